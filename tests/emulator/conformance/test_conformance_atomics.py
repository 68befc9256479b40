# SPDX-License-Identifier: Apache-2.0
"""Atomics on global, flat and buffer memory and on LDS, with and without return, with lanes that collide.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 (pseudocode of each atomic),
section 9.2 (float atomics round to nearest even; in the L2 cache ADD_F32 flushes subnormals, packed 16-bit
and f64 adds do not; float minimum and maximum), section 9.1.10 (SC0 asks for the value before), section 9.1.5
(atomics are range-checked as a whole); order of arguments of a compare-and-swap: memory takes {compare, swap}
from DATA[1], DATA[0], LDS takes the compare from DATA and the swap from DATA2.

Colliding lanes: integer results do not depend on the order; returned values must be the values of some serial
order, which is checked by replaying them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conformance_functions as fn
import conformance_reference as ref
import numpy as np
import pytest
import torch
from conformance_harness import (
    EXEC_WITH_HOLES,
    LANES,
    Case,
    Report,
    case_id,
    compare,
    implemented,
    rng_for,
    run,
    run_with_memory,
    test_values,
)
from conformance_reference import BF16, F16, F32, F64, M32, flush, sx
from test_conformance_memory import WAIT, address_registers, descriptor, poison, scattered

ACTIVE = [EXEC_WITH_HOLES >> n & 1 for n in range(LANES)]
Operation = Callable[..., int]


def wrap_inc(old: int, data: int) -> int:
    """ATOMIC_INC."""
    return 0 if old >= data else old + 1


def wrap_dec(old: int, data: int) -> int:
    """ATOMIC_DEC."""
    return data if old == 0 or old > data else old - 1


def integer_operations(bits: int) -> dict[str, Operation]:
    """Integer atomics (global names) of a width."""
    mask = (1 << bits) - 1

    def signed(f: Any) -> Operation:
        return lambda old, data: f(sx(old, bits), sx(data, bits)) & mask

    return {
        "swap": lambda old, data: data,
        "add": lambda old, data: old + data & mask,
        "sub": lambda old, data: old - data & mask,
        "smin": signed(min),
        "smax": signed(max),
        "umin": min,
        "umax": max,
        "and": lambda old, data: old & data,
        "or": lambda old, data: old | data,
        "xor": lambda old, data: old ^ data,
        "inc": wrap_inc,
        "dec": wrap_dec,
        "cmpswap": lambda old, data: data & mask if data >> bits == old else old,
    }


def packed_add(fmt: ref.Format) -> Operation:
    """PK_ADD_F16 / BF16."""
    add = fn.exact(fmt, ref.add)
    return lambda old, data: add(old & 0xFFFF, data & 0xFFFF) | add(old >> 16, data >> 16) << 16  # type: ignore[operator,return-value]


def add_f32_flushing(old: int, data: int) -> int:
    """ADD_F32 in the cache: subnormal inputs (and results) are zero."""
    total = ref.encode(F32, ref.add(ref.decode(F32, flush(F32, old)), ref.decode(F32, flush(F32, data))))
    return flush(F32, total)


FLOAT: dict[str, tuple[str, Operation]] = {
    "add_f32": ("f32", add_f32_flushing),
    "add_f64": ("f64", fn.exact(F64, ref.add)),
    "min_f64": ("f64", fn.minmax(F64, False)),
    "max_f64": ("f64", fn.minmax(F64, True)),
    "pk_add_f16": ("pk_f16", packed_add(F16)),
    "pk_add_bf16": ("pk_bf16", packed_add(BF16)),
}


@dataclass(frozen=True)
class AtomicCase(Case):
    """An atomic: the value kind of old and data, and the operation."""

    space: str = "global"
    kind: str = "u32"
    operation: Operation = wrap_inc
    compares: bool = False
    values: str = ""  # kind of the test values where it is not `kind`

    @property
    def bits(self) -> int:
        """Width of the memory operand."""
        return 64 if self.kind.endswith("64") else 32


def memory_cases() -> list[AtomicCase]:
    """Every atomic of global, flat and buffer memory."""
    rows = []
    for space in ("global", "flat", "buffer"):
        for bits, suffix in ((32, ""), (64, "_x2")):
            for name, operation in integer_operations(bits).items():
                rows.append(
                    AtomicCase(
                        f"{space}_atomic_{name}{suffix}",
                        ("no return", "sc0", "device and system scope"),
                        "value, returned old value, collisions",
                        space=space,
                        kind=f"u{bits}",
                        operation=operation,
                        compares=name == "cmpswap",
                    )
                )
        for name, (kind, operation) in FLOAT.items():
            rows.append(
                AtomicCase(
                    f"{space}_atomic_{name}",
                    ("no return", "sc0", "device and system scope"),
                    "rounding, NaN, subnormals",
                    space=space,
                    kind=kind,
                    operation=operation,
                )
            )
    return rows


MEMORY = memory_cases()


def values(case: AtomicCase, rng: Any, count: int) -> list[int]:
    """Test values of the case's kind."""
    kind = case.values or case.kind
    if not kind.startswith("pk_"):
        return test_values([kind], rng, count)[0]
    low, high = (test_values([kind[3:]], rng, count)[0] for _ in range(2))
    return [a | b << 16 for a, b in zip(low, high, strict=True)]


def same(case: AtomicCase, got: int, want: int) -> bool:
    """Equal, or NaN for NaN in the case's format."""
    if case.kind.startswith("pk_"):
        fmt = F16 if case.kind == "pk_f16" else BF16
        return all(compare(fmt, got >> s & 0xFFFF, want >> s & 0xFFFF) for s in (0, 16))
    return compare({"f32": F32, "f64": F64}.get(case.kind), got, want)


def memory_of(words: list[int], bits: int) -> torch.Tensor:
    """Words as a tensor."""
    raw = b"".join(w.to_bytes(bits // 8, "little") for w in words)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def words_of(tensor: Any, bits: int) -> list[int]:
    """The inverse of `memory_of`."""
    raw = bytes(tensor.tolist())
    return [int.from_bytes(raw[i : i + bits // 8], "little") for i in range(0, len(raw), bits // 8)]


def data_registers(case: AtomicCase, data: list[int]) -> tuple[dict[int, Any], str]:
    """Data operands at v8 (compare-and-swap: the compare value above the new one)."""
    count = case.bits // 32 * (2 if case.compares else 1)
    registers = {8 + i: np.array([d >> (32 * i) & M32 for d in data], np.uint32) for i in range(count)}
    return registers, "v8" if count == 1 else f"v[8:{7 + count}]"


def instruction(case: AtomicCase, data: str, returns: bool, scope: str = "") -> str:
    """Text of the atomic; the result goes to v[20:21], or over the data for buffers."""
    result = "v20" if case.bits == 32 else "v[20:21]"
    if case.space == "buffer":
        return f"{case.mnemonic} {data}, v2, s[4:7], 0 offen{' sc0' if returns else ''}{scope}"
    address = "v[2:3]"
    base = f"{case.mnemonic} {result + ', ' if returns else ''}{address}, {data}"
    return base + (", off" if case.space == "global" else "") + (" sc0" if returns else "") + scope


def launch(
    case: AtomicCase,
    memory: Any,
    offsets: list[int],
    data: list[int],
    returns: bool,
    num_records: int = 1 << 20,
    scope: str = "",
) -> Any:
    """Run the atomic once on every active lane."""
    registers, operand = data_registers(case, data)
    address = (
        {2: np.array(offsets, np.uint32)}
        if case.space == "buffer"
        else address_registers([memory.data_ptr() + o for o in offsets], 2)
    )
    text = instruction(case, operand, returns, scope)
    return run_with_memory(
        memory,
        f"{text}\n{WAIT}",
        vgprs=registers | address | poison(20),
        sgprs=descriptor(memory.data_ptr(), num_records),
        exec_mask=EXEC_WITH_HOLES,
    )


def returned(case: AtomicCase, result: Any) -> list[int]:
    """Values returned to the lanes."""
    base = 8 if case.space == "buffer" else 20
    parts = [[int(x) for x in np.asarray(result.vgpr(base + i)).reshape(-1)] for i in range(case.bits // 32)]
    return [sum(p[lane] << (32 * i) for i, p in enumerate(parts)) for lane in range(LANES)]


@pytest.mark.parametrize("case", implemented(MEMORY), ids=case_id)
def test_atomic(case: AtomicCase) -> None:
    """One lane per word: value and returned old value."""
    rng, report, size = rng_for(case.mnemonic), Report(case.mnemonic), case.bits // 8
    for round_index in range(4):
        old, data = values(case, rng, LANES), values(case, rng, LANES)
        if case.compares:  # half of the lanes compare equal
            data = [d | (old[i] if i % 2 else d ^ 1) << case.bits for i, d in enumerate(data)]
        offsets = scattered(size)
        order = [o // size for o in offsets]
        returns = round_index % 2 == 1
        memory = memory_of([old[order.index(w)] if w in order else 0 for w in range(LANES)], case.bits)
        scope = ("", "", " sc1", " sc1 nt")[round_index]  # of this device, and of the whole system
        result = launch(case, memory, offsets, data, returns, scope=scope)
        after = words_of(memory, case.bits)
        got_back = returned(case, result)
        for lane in range(LANES):
            want = case.operation(old[lane], data[lane]) if ACTIVE[lane] else old[lane]
            got = after[order[lane]]
            good = same(case, got, want) if ACTIVE[lane] else got == want
            report.check(
                good,
                lambda o=old[lane], d=data[lane], g=got, w=want: (
                    f"old {o:#x} data {d:#x}: memory {g:#x}, want {w:#x}"
                ),
            )
            if returns and ACTIVE[lane]:
                report.check(
                    got_back[lane] == old[lane],
                    lambda g=got_back[lane], o=old[lane]: f"returned {g:#x}, want {o:#x}",
                )
    report.finish()


@pytest.mark.parametrize(
    "case",
    implemented([c for c in MEMORY if c.mnemonic.endswith(("_add", "_add_x2", "_inc", "_umax"))]),
    ids=case_id,
)
def test_colliding_lanes(case: AtomicCase) -> None:
    """All active lanes on two words: the sum is whole, returned values are those of a serial order."""
    memory = memory_of([1000, 5], case.bits)
    data = [lane + 1 if "inc" not in case.mnemonic else 1 << 20 for lane in range(LANES)]
    size = case.bits // 8
    result = launch(case, memory, [lane % 2 * size for lane in range(LANES)], data, True)
    back = returned(case, result)
    for word, start in enumerate((1000, 5)):
        lanes = [lane for lane in range(LANES) if ACTIVE[lane] and lane % 2 == word]
        remaining, value = set(lanes), start
        while remaining:  # replay: some lane must have seen the present value
            candidates = [lane for lane in remaining if back[lane] == value]
            assert candidates, (case.mnemonic, word, value)
            lane = min(candidates, key=lambda n: -(case.operation(value, data[n]) == value))
            value = case.operation(value, data[lane])
            remaining.remove(lane)
        assert words_of(memory, case.bits)[word] == value


@pytest.mark.parametrize("case", implemented([c for c in MEMORY if c.space == "buffer"]), ids=case_id)
def test_buffer_atomic_range(case: AtomicCase) -> None:
    """Past num_records nothing happens."""
    size = case.bits // 8
    memory = memory_of([7] * LANES, case.bits)
    data = [1 | 7 << case.bits if case.compares else 1] * LANES
    launch(case, memory, [lane * size for lane in range(LANES)], data, False, num_records=40 * size)
    after = words_of(memory, case.bits)
    assert after[40:] == [7] * 24
    assert [same(case, a, case.operation(7, data[0])) for n, a in enumerate(after[:40]) if ACTIVE[n]] == [
        True
    ] * sum(ACTIVE[:40])


# -------------------------------------------------------------------------------------------------------- LDS
def lds_names(bits: int) -> dict[str, Operation]:
    """LDS spellings of the integer operations."""
    ops, b = integer_operations(bits), bits
    return {
        f"add_u{b}": ops["add"],
        f"sub_u{b}": ops["sub"],
        f"rsub_u{b}": lambda old, data: data - old & ((1 << b) - 1),
        f"inc_u{b}": ops["inc"],
        f"dec_u{b}": ops["dec"],
        f"min_i{b}": ops["smin"],
        f"max_i{b}": ops["smax"],
        f"min_u{b}": ops["umin"],
        f"max_u{b}": ops["umax"],
        f"and_b{b}": ops["and"],
        f"or_b{b}": ops["or"],
        f"xor_b{b}": ops["xor"],
    }


def float_swap(bits: int) -> Operation:
    """CMPST_F: stores where the numbers are equal: NaN equals nothing, +0 equals -0."""
    fmt = {32: F32, 64: F64}[bits]

    def apply(old: int, packed: int) -> int:
        new, compare_with = packed & ((1 << bits) - 1), packed >> bits
        if ref.is_nan(fmt, old) or ref.is_nan(fmt, compare_with):
            return old
        return new if ref.order(fmt, old) == ref.order(fmt, compare_with) else old

    return apply


def masked_or(bits: int) -> Operation:
    """MSKOR: clears the bits of the mask, then sets those of the data."""
    return lambda old, packed: old & ~(packed >> bits) | packed & ((1 << bits) - 1)


LDS_FLOAT: dict[str, tuple[str, Any]] = {
    "add_f32": ("f32", fn.exact(F32, ref.add)),
    "add_f64": ("f64", fn.exact(F64, ref.add)),
    "min_f32": ("f32", fn.minmax(F32, False)),
    "max_f32": ("f32", fn.minmax(F32, True)),
    "min_f64": ("f64", fn.minmax(F64, False)),
    "max_f64": ("f64", fn.minmax(F64, True)),
    "pk_add_f16": ("pk_f16", packed_add(F16)),
    "pk_add_bf16": ("pk_bf16", packed_add(BF16)),
}


def lds_cases() -> list[AtomicCase]:
    """LDS atomics with and without return."""
    rows = []
    for bits in (32, 64):
        for name, operation in lds_names(bits).items():
            stem, unit = name.rsplit("_", 1)
            for spelled in (name, f"{stem}_rtn_{unit}"):
                rows.append(
                    AtomicCase(
                        f"ds_{spelled}",
                        ("offset",),
                        "value, returned old value",
                        space="lds",
                        kind=f"u{bits}",
                        operation=operation,
                    )
                )
        rows.append(
            AtomicCase(
                f"ds_wrxchg_rtn_b{bits}",
                ("offset",),
                "exchange",
                space="lds",
                kind=f"u{bits}",
                operation=lambda old, data: data,
            )
        )
        for name, operation in ((f"cmpst_f{bits}", float_swap(bits)), (f"mskor_b{bits}", masked_or(bits))):
            stem, unit = name.rsplit("_", 1)
            for spelled in (name, f"{stem}_rtn_{unit}"):
                rows.append(
                    AtomicCase(
                        f"ds_{spelled}",
                        ("offset",),
                        "compare (float: NaN, signed zero) or mask in DATA, new bits in DATA2",
                        space="lds",
                        kind=f"u{bits}",
                        compares=True,
                        operation=operation,
                        values=unit if unit[0] == "f" else "",
                    )
                )
        for spelled in (f"ds_cmpst_b{bits}", f"ds_cmpst_rtn_b{bits}"):
            rows.append(
                AtomicCase(
                    spelled,
                    ("offset",),
                    "compare in DATA, new value in DATA2",
                    space="lds",
                    kind=f"u{bits}",
                    compares=True,
                    operation=integer_operations(bits)["cmpswap"],
                )
            )
    for name, (kind, operation) in LDS_FLOAT.items():
        stem, unit = name.rsplit("_", 1)
        for spelled in (name, f"{stem}_rtn_{unit}"):
            rows.append(
                AtomicCase(
                    f"ds_{spelled}",
                    ("offset",),
                    "rounding, NaN; mode decides on subnormals",
                    space="lds",
                    kind=kind,
                    operation=operation,
                )
            )
    return rows


LDS = lds_cases()


@pytest.mark.parametrize("case", implemented(LDS), ids=case_id)
def test_lds_atomic(case: AtomicCase) -> None:
    rng, report, size = rng_for(case.mnemonic), Report(case.mnemonic), case.bits // 8
    returns = "_rtn_" in case.mnemonic
    for _ in range(3):
        old, data = values(case, rng, LANES), values(case, rng, LANES)
        compare_with = [old[i] if i % 2 else old[i] ^ 1 for i in range(LANES)]
        if "mskor" in case.mnemonic:
            compare_with = values(case, rng, LANES)
        for i in range(0, LANES, 8):  # zeros of both signs
            old[i], compare_with[i] = (0, 1 << (case.bits - 1)) if case.values else (old[i], compare_with[i])
        order = [o // size for o in scattered(size)]
        raw = bytearray(b"".join(old[order.index(w)].to_bytes(size, "little") for w in range(LANES)))
        width = case.bits // 32
        name = lambda base, w=width: f"v{base}" if w == 1 else f"v[{base}:{base + w - 1}]"  # noqa: E731
        registers: dict[int, Any] = {2: np.array([o * size for o in order], np.uint32)} | poison(20)
        sources = [compare_with, data] if case.compares else [data]
        for k, column in enumerate(sources):
            for i in range(width):
                registers[8 + 2 * k + i] = np.array([v >> (32 * i) & M32 for v in column], np.uint32)
        operands = ", ".join(name(8 + 2 * k) for k in range(len(sources)))
        text = f"{case.mnemonic} {name(20) + ', ' if returns else ''}v2, {operands} offset:128"
        lds = np.frombuffer(bytes(128) + bytes(raw), np.uint8).copy()
        result = run(f"{text}\n{WAIT}", vgprs=registers, lds=lds, exec_mask=EXEC_WITH_HOLES)
        after = np.asarray(result.lds).view(np.uint8).reshape(-1)[128 : 128 + LANES * size].tobytes()
        for lane in range(LANES):
            got = int.from_bytes(after[order[lane] * size : order[lane] * size + size], "little")
            packed = data[lane] | compare_with[lane] << case.bits if case.compares else data[lane]
            want = case.operation(old[lane], packed) if ACTIVE[lane] else old[lane]
            good = same(case, got, want) if ACTIVE[lane] else got == want
            report.check(
                good,
                lambda o=old[lane], d=packed, g=got, w=want: (
                    f"old {o:#x} data {d:#x}: LDS {g:#x}, want {w:#x}"
                ),
            )
            if returns and ACTIVE[lane]:
                back = sum(
                    int(np.asarray(result.vgpr(20 + i)).reshape(-1)[lane]) << (32 * i) for i in range(width)
                )
                report.check(back == old[lane], lambda g=back, o=old[lane]: f"returned {g:#x}, want {o:#x}")
    report.finish()


CASES: list[Case] = [*MEMORY, *LDS]
