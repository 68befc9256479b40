# SPDX-License-Identifier: Apache-2.0
"""LDS loads and stores: widths, paired accesses, d16 forms, and the transposing reads.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", sections 11.3 (address = VGPR + offset;
read2/write2 offsets count elements, the st64 forms 64 elements) and 11.4 (DS_READ_B64_TR: EXEC all ones,
transposes a matrix while loading); Triton's lane layout for ds_read_tr on gfx950 (groups of 16 lanes); the
fp8 tile loader of HipKittens for gfx950, which fixes the lane addresses of the b8 form (row = lane % 16 / 2,
columns 8 * (lane % 2)).

For the transposing reads each lane of a group of 16 supplies 64 (96) bits of a row-major matrix with 16
columns: 4, 8 or 16 rows for 16-, 8- and 4- (6-) bit elements.  Lane j of the group then receives column j.
The addresses here are not contiguous, so that an implementation that ignores the lanes' own addresses fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conformance_harness import EXEC_WITH_HOLES, LANES, Case, Report, case_id, implemented, run
from conformance_reference import M32, sx
from test_conformance_memory import data_registers, lane_data, poison, scattered

WAIT = "s_waitcnt lgkmcnt(0)"
SIZE = 16384
ACTIVE = [EXEC_WITH_HOLES >> n & 1 for n in range(LANES)]


@dataclass(frozen=True)
class LdsCase(Case):
    """An LDS access: bytes of one element, elements (2 for pairs), offset unit of a pair."""

    num_bytes: int = 4
    signed: bool = False
    half: str = ""
    pair: int = 0


PAIRS = tuple((f"2{s}_b{b}", b // 8, unit * b // 8) for s, unit in (("", 1), ("st64", 64)) for b in (32, 64))
READS: list[LdsCase] = [
    *(LdsCase(f"ds_read_{n}", ("offset",), "bytes, extension, exec", num_bytes=b, signed=s) for n, b, s in (
        ("b32", 4, False), ("b64", 8, False), ("b96", 12, False), ("b128", 16, False),
        ("u8", 1, False), ("i8", 1, True), ("u16", 2, False), ("i16", 2, True))),
    *(LdsCase(f"ds_read_{n}", ("offset",), "half of a register", num_bytes=b, signed=s, half=n.split("_")[-1])
      for n, b, s in (("u8_d16", 1, False), ("u8_d16_hi", 1, False), ("i8_d16", 1, True),
                      ("i8_d16_hi", 1, True), ("u16_d16", 2, False), ("u16_d16_hi", 2, False))),
    *(LdsCase(f"ds_read{n}", ("offset0, offset1",), "element offsets", num_bytes=b, pair=p)
      for n, b, p in PAIRS),
]  # fmt: skip
WRITES: list[LdsCase] = [
    *(LdsCase(f"ds_write_{n}", ("offset",), "bytes, exec", num_bytes=b, half=h) for n, b, h in (
        ("b32", 4, ""), ("b64", 8, ""), ("b96", 12, ""), ("b128", 16, ""), ("b8", 1, ""), ("b16", 2, ""),
        ("b8_d16_hi", 1, "hi"), ("b16_d16_hi", 2, "hi"))),
    *(LdsCase(f"ds_write{n}", ("offset0, offset1",), "element offsets", num_bytes=b, pair=p)
      for n, b, p in PAIRS),
]  # fmt: skip


def memory() -> np.ndarray[Any, Any]:
    """LDS contents: bytes that differ from their neighbours."""
    index = np.arange(SIZE)
    return ((index * 37 + index // 256 * 11 + 5) % 256).astype(np.uint8)


def bytes_after(result: Any) -> np.ndarray[Any, Any]:
    """LDS of a result as bytes."""
    return np.asarray(result.lds).view(np.uint8).reshape(-1)[:SIZE]


def registers(raw: bytes, case: LdsCase) -> list[int]:
    """Register contents of loaded bytes."""
    value = int.from_bytes(raw, "little")
    if len(raw) < 4:
        value = sx(value, 8 * len(raw)) & (0xFFFF if case.half else M32) if case.signed else value
    return [value >> (32 * i) & M32 for i in range(max(1, len(raw) // 4))]


def operand(base: int, count: int) -> str:
    """`v8` or `v[8:9]`."""
    return f"v{base}" if count == 1 else f"v[{base}:{base + count - 1}]"


@pytest.mark.parametrize("case", implemented(READS), ids=case_id)
def test_lds_read(case: LdsCase) -> None:
    report, lds = Report(case.mnemonic), memory()
    addresses = scattered(max(4, case.num_bytes) * 2)
    count = max(1, case.num_bytes // 4) * (2 if case.pair else 1)
    offsets = ((0, 1), (5, 3), (2, 2)) if case.pair else ((0, 0), (case.num_bytes * 3, 0), (4096, 0))
    for first, second in offsets:
        text = f"{case.mnemonic} {operand(8, count)}, v2"
        if case.pair:
            text += (f" offset0:{first}" if first else "") + (f" offset1:{second}" if second else "")
        elif first:
            text += f" offset:{first}"
        result = run(
            f"{text}\n{WAIT}",
            vgprs={2: np.array(addresses, np.uint32)} | poison(8),
            lds=lds.copy(),
            exec_mask=EXEC_WITH_HOLES,
        )
        got = [[int(x) for x in np.asarray(result.vgpr(8 + i)).reshape(-1)] for i in range(count)]
        for lane, address in enumerate(addresses):
            places = (
                [address + first * case.pair, address + second * case.pair]
                if case.pair
                else [address + first]
            )
            want = [w for p in places for w in registers(lds[p : p + case.num_bytes].tobytes(), case)]
            have, old = [g[lane] for g in got], [0x5EED0000 + lane] * count
            if not ACTIVE[lane]:
                good = have == old
            elif case.half:
                shift = 16 if case.half == "hi" else 0
                rest = have[0] & ~(0xFFFF << shift)
                good = have[0] >> shift & 0xFFFF == want[0] and rest in (0, old[0] & ~(0xFFFF << shift))
            else:
                good = have == want
            report.check(
                good,
                lambda t=text, n=lane, h=have, w=want: (
                    f"`{t}` lane {n}: {[hex(v) for v in h]}, want {[hex(v) for v in w]}"
                ),
            )
        report.check(np.array_equal(bytes_after(result), lds), lambda t=text: f"`{t}` changed the LDS")
    report.finish()


@pytest.mark.parametrize("case", implemented(WRITES), ids=case_id)
def test_lds_write(case: LdsCase) -> None:
    report = Report(case.mnemonic)
    addresses = scattered(max(4, case.num_bytes) * 2)
    count = max(1, case.num_bytes // 4)
    offsets = ((0, 1), (3, 2)) if case.pair else ((0, 0), (case.num_bytes * 3, 0))
    vgprs = data_registers(8) | {2: np.array(addresses, np.uint32)}
    second_data = {12 + i: vgprs[8 + (i + 2) % 4] for i in range(4)}
    for first, second in offsets:
        text = f"{case.mnemonic} v2, {operand(8, count)}"
        if case.pair:
            text += (
                f", {operand(12, count)}"
                + (f" offset0:{first}" if first else "")
                + (f" offset1:{second}" if second else "")
            )
            # lanes two element pairs apart, so that no two lanes touch the same place
            vgprs[2] = np.array(
                [a * 2 for a in addresses] if case.pair < 64 else [a // 2 for a in addresses], np.uint32
            )
        elif first:
            text += f" offset:{first}"
        result = run(f"{text}\n{WAIT}", vgprs=vgprs | second_data, lds=memory(), exec_mask=EXEC_WITH_HOLES)
        want = memory()
        for lane in range(LANES):
            if not ACTIVE[lane]:
                continue
            data, base = lane_data(lane), int(vgprs[2][lane])
            pieces = [(base + first * (case.pair or 1), data)]
            if case.pair:
                pieces.append((base + second * case.pair, [data[(i + 2) % 4] for i in range(4)]))
            for place, values in pieces:
                raw = sum(v << (32 * i) for i, v in enumerate(values)) >> (16 if case.half else 0)
                want[place : place + case.num_bytes] = np.frombuffer(
                    (raw & (1 << 128) - 1).to_bytes(16, "little")[: case.num_bytes], np.uint8
                )
        wrong = np.flatnonzero(bytes_after(result) != want).tolist()
        report.check(not wrong, lambda t=text, w=wrong: f"`{t}`: bytes {w[:8]} differ")
    report.finish()


@dataclass(frozen=True)
class TransposeCase(Case):
    """A transposing read: element bits and bits per lane."""

    element: int = 16
    width: int = 64


TRANSPOSE: list[TransposeCase] = [
    TransposeCase(
        f"ds_read_b{w}_tr_b{e}",
        ("offset",),
        "16-lane groups, lanes' own addresses",
        element=e,
        width=w,
        source="CDNA4 ISA 11.4; Triton and HipKittens lane layouts",
    )
    for e, w in ((16, 64), (8, 64), (4, 64), (6, 96))
]


@pytest.mark.parametrize("case", implemented(TRANSPOSE), ids=case_id)
@pytest.mark.parametrize("offset", [0, 64])
def test_transposing_read(case: TransposeCase, offset: int) -> None:
    lds = memory()
    rows = case.width // case.element  # elements that a lane supplies and receives
    lanes_per_row = 16 // rows if rows < 16 else 1
    step = 16 if case.width == 96 else 8
    addresses = [(lane * 29 % 64) * step * 3 for lane in range(LANES)]
    count = case.width // 32
    text = f"{case.mnemonic} {operand(8, count)}, v2" + (f" offset:{offset}" if offset else "")
    result = run(f"{text}\n{WAIT}", vgprs={2: np.array(addresses, np.uint32)} | poison(8), lds=lds.copy())
    got = [[int(x) for x in np.asarray(result.vgpr(8 + i)).reshape(-1)] for i in range(count)]
    mask = (1 << case.element) - 1
    supplied = [
        int.from_bytes(lds[a + offset : a + offset + case.width // 8].tobytes(), "little") for a in addresses
    ]
    for lane in range(LANES):
        group, column = lane // 16 * 16, lane % 16
        want = 0
        for row in range(rows):
            # Row-major with 16 columns: `lanes_per_row` lanes hold a row, each `rows` columns of it.
            origin = group + row * lanes_per_row + column // rows
            want |= (supplied[origin] >> (case.element * (column % rows)) & mask) << (case.element * row)
        have = sum(g[lane] << (32 * i) for i, g in enumerate(got))
        assert have == want, (text, lane, hex(have), hex(want))


CASES: list[Case] = [*READS, *WRITES, *TRANSPOSE]
