# SPDX-License-Identifier: Apache-2.0
"""Result modifiers and the MODE register: omod, clamp on integers and packed results, DX10_CLAMP, IEEE,
denormal modes, FP16_OVFL.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", section 6.2.2 (output modifiers: ignored in
IEEE mode and where output denormals are kept, else denormals flush and -0 becomes +0), 6.5 (clamp: floats to
[0, 1], integers saturate), section 3 (MODE: denormal modes by source and result), 7.3 (FP16_OVFL: overflow of
conversions to f16 and the 8-bit formats saturates); LLVM, SIModeRegisterDefaults (DX10_CLAMP: clamp turns a
NaN into 0); IEEE 754-2008 minNum for min and max with IEEE = 0 (a signalling NaN loses like a quiet one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conformance_functions as fn
import conformance_reference as ref
import pytest
from conformance_forms import clamped
from conformance_harness import (
    EXEC_WITH_HOLES,
    LANES,
    TYPES,
    Case,
    Expected,
    Halves,
    OneOf,
    Report,
    case_id,
    compare,
    from_registers,
    implemented,
    rng_for,
    run,
    show,
    test_values,
    to_registers,
    vname,
)
from conformance_reference import BF16, E4M3, E5M2, F16, F32, F64, Format, decode, encode, saturate, sx

from kernellib.emulator.state import PLAIN_MODE, FloatMode

WAVES = 8
NUM = WAVES * LANES
FORMATS = {"f16": F16, "f32": F32, "f64": F64}


@dataclass(frozen=True)
class ModifierCase(Case):
    """An instruction with a modifier in its text, under a mode."""

    text: str = ""  # with {m} for the mnemonic and {d}, {0}, {1} ... for the operands
    kinds: tuple[str, ...] = ()
    result: str = "f32"
    reference: Callable[..., Expected] = int
    mode: FloatMode = PLAIN_MODE


def check(case: ModifierCase) -> None:
    """Run over many values and compare each lane; inactive lanes keep their poison."""
    rng, report = rng_for(case.mnemonic, case.text, repr(case.mode)), Report(f"{case.mnemonic} {case.mode}")
    columns = test_values(list(case.kinds), rng, NUM)
    vgprs: dict[int, Any] = {}
    names = []
    for i, (kind, column) in enumerate(zip(case.kinds, columns, strict=True)):
        width = TYPES[kind].registers
        for j, array in enumerate(to_registers(column, width, WAVES)):
            vgprs[8 + 4 * i + j] = array
        names.append(vname(8 + 4 * i, width))
    width = TYPES[case.result].registers
    for j in range(width):
        vgprs[j] = vgprs[8] * 0 + 0x5EED
    text = case.text.format(*names, m=case.mnemonic, d=vname(0, width))
    result = run(text, vgprs=vgprs, exec_mask=EXEC_WITH_HOLES, num_waves=WAVES, mode=case.mode)
    got = from_registers([result.vgpr(j) for j in range(width)])
    kept = sum(0x5EED << (32 * j) for j in range(width))
    fmt, mask = TYPES[case.result].fmt, (1 << TYPES[case.result].bits) - 1
    for i, values in enumerate(zip(*columns, strict=True)):
        if not EXEC_WITH_HOLES >> (i % LANES) & 1:
            report.check(got[i] == kept, lambda i=i: f"lane {i} is off, but was written")
            continue
        want = case.reference(*values)
        report.check(
            compare(fmt, got[i] & mask, want),
            lambda v=values, g=got[i], w=want: (
                f"`{text}` {[hex(x) for x in v]} gave {g:#x}, want {show(0, w)}"
            ),
        )
    report.finish()


# ------------------------------------------------------------------------------------------ output modifiers
OPERATIONS: dict[str, tuple[int, Callable[..., ref.Num]]] = {
    "add": (2, ref.add), "mul": (2, ref.multiply), "fma": (3, ref.fma),
}  # fmt: skip
FACTORS = {"mul:2": 1, "mul:4": 2, "div:2": -1}


def modified(fmt: Format, f: Callable[..., ref.Num], power: int) -> Callable[..., Expected]:
    """The result under an output modifier that applies: subnormals flush before and after, no -0."""

    def apply(*values: int) -> Expected:
        plain = ref.flush(fmt, encode(fmt, f(*(decode(fmt, v) for v in values))))
        if ref.is_nan(fmt, plain):
            return plain
        scaled = ref.flush(fmt, encode(fmt, ref.scale_by(decode(fmt, plain), power)))
        return 0 if scaled == 1 << fmt.bits - 1 else scaled

    return apply


def omod_cases() -> list[ModifierCase]:
    """Where the modifier applies, and the modes in which it is ignored."""
    rows = []
    for name, (count, f) in OPERATIONS.items():
        for kind, fmt in FORMATS.items():
            encoding = "_e64" if name != "fma" and kind != "f64" else ""
            operands = ", ".join(f"{{{i}}}" for i in range(count))
            for text, power in FACTORS.items():
                line = f"{{m}}{encoding} {{d}}, {operands} {text}"
                modes = {
                    "applied": FloatMode(denorm32=1, denorm64_16=1, ieee=False),
                    "IEEE": FloatMode(denorm32=1, denorm64_16=1, ieee=True),
                    "denormals kept": FloatMode(ieee=False),
                }
                for why, mode in modes.items():
                    if why == "applied":
                        reference = modified(fmt, f, power)
                    elif why == "IEEE":
                        reference = flushed(fmt, f)
                    else:
                        reference = fn.exact(fmt, f)
                    rows.append(
                        ModifierCase(f"v_{name}_{kind}", ("omod",), "omod, and where it is ignored",
                                     text=line, kinds=(kind,) * count, result=kind,
                                     reference=reference, mode=mode)
                    )  # fmt: skip
    return rows


def flushed(fmt: Format, f: Callable[..., ref.Num]) -> Callable[..., Expected]:
    """The plain result with subnormal results flushed."""
    return lambda *values: ref.flush(fmt, encode(fmt, f(*(decode(fmt, v) for v in values))))


# --------------------------------------------------------------------------------------------- denormal modes
def denormal_cases() -> list[ModifierCase]:
    """The four denormal modes of f32 and of f16 with f64, each leaving the other alone."""
    rows = []
    for kind, fmt in FORMATS.items():
        for bits in range(4):
            single = kind == "f32"
            mode = FloatMode(denorm32=bits if single else 3, denorm64_16=3 if single else bits)
            other = FloatMode(denorm32=3 if single else bits, denorm64_16=bits if single else 3)

            def reference(a: int, b: int, fmt: Format = fmt, bits: int = bits) -> Expected:
                x, y = (v if bits & 1 else ref.flush(fmt, v) for v in (a, b))
                total = encode(fmt, ref.add(decode(fmt, x), decode(fmt, y)))
                return total if bits & 2 else ref.flush(fmt, total)

            text = "{m} {d}, {0}, {1}" if kind == "f64" else "{m}_e32 {d}, {0}, {1}"
            for chosen, expected in ((mode, reference), (other, fn.exact(fmt, ref.add))):
                rows.append(
                    ModifierCase(f"v_add_{kind}", ("denormal modes",), "denormal modes", text=text,
                                 kinds=(kind, kind), result=kind, reference=expected, mode=chosen)
                )  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------------ clamp
def limits(kind: str) -> tuple[int, int]:
    """Smallest and largest of an integer kind."""
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "i" else (0, (1 << bits) - 1)


def integer_clamp(kind: str, f: Callable[..., int]) -> Callable[..., int]:
    """The exact result, saturated."""
    bits = int(kind[1:])
    mask = (1 << bits) - 1
    return lambda *v: saturate(f(*(sx(x, bits) if kind[0] == "i" else x for x in v)), *limits(kind)) & mask


def packed_clamp(kind: str, f: Callable[..., int]) -> Callable[..., int]:
    """`integer_clamp` on both halves."""
    one = integer_clamp(kind, f)
    return lambda *v: one(*(x & 0xFFFF for x in v)) | one(*(x >> 16 for x in v)) << 16


def dot_clamp(bits: int, signed: bool) -> Callable[[int, int, int], int]:
    """Sum of products plus the accumulator, saturated to 32 bits."""

    def apply(a: int, b: int, c: int) -> int:
        pick = (lambda v, i: sx(v >> i, bits)) if signed else (lambda v, i: v >> i & (1 << bits) - 1)
        total = (sx(c, 32) if signed else c) + sum(pick(a, i) * pick(b, i) for i in range(0, 32, bits))
        return saturate(total, *limits("i32" if signed else "u32")) & ref.M32

    return apply


def integer_clamp_cases() -> list[ModifierCase]:
    """Saturating integer instructions."""
    rows = []
    operations: dict[str, Callable[..., int]] = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "subrev": lambda a, b: b - a,
        "mad": lambda a, b, c: a * b + c,
    }  # fmt: skip
    for name in ("add", "sub", "subrev"):
        for kind in ("u32", "u16") if name == "subrev" else ("u32", "u16", "i32", "i16"):
            encoding = "" if kind[0] == "i" else "_e64"
            rows.append(
                ModifierCase(f"v_{name}_{kind}", ("clamp",), "saturates under clamp",
                             text=f"{{m}}{encoding} {{d}}, {{0}}, {{1}} clamp", kinds=(f"u{kind[1:]}",) * 2,
                             result=f"u{kind[1:]}", reference=integer_clamp(kind, operations[name]))
            )  # fmt: skip
    for name, count in (("add", 2), ("sub", 2), ("mad", 3)):
        for kind in ("u16", "i16"):
            operands = ", ".join(f"{{{i}}}" for i in range(count))
            rows.append(
                ModifierCase(f"v_pk_{name}_{kind}", ("clamp",), "saturates under clamp",
                             text=f"{{m}} {{d}}, {operands} clamp", kinds=("u32",) * count, result="u32",
                             reference=packed_clamp(kind, operations[name]))
            )  # fmt: skip
    for bits, count in ((16, 2), (8, 4), (4, 8)):
        for letter in "iu":
            rows.append(
                ModifierCase(f"v_dot{count}_{letter}32_{letter}{bits}", ("clamp",), "saturates under clamp",
                             text="{m} {d}, {0}, {1}, {2} clamp", kinds=("u32",) * 3, result="u32",
                             reference=dot_clamp(bits, letter == "i"))
            )  # fmt: skip
    return rows


def keeps_nan(fmt: Format, f: Callable[..., Expected]) -> Callable[..., Expected]:
    """Clamp with DX10_CLAMP = 0: a NaN stays."""

    def apply(*values: int) -> Expected:
        plain = f(*values)
        assert isinstance(plain, int)
        return plain if ref.is_nan(fmt, plain) else clamped(fmt)(plain)

    return apply


def both_halves(fmt: Format, f: Callable[..., Expected]) -> Callable[..., Expected]:
    """A clamped operation on two elements of a register (pair)."""
    mask = (1 << fmt.bits) - 1

    def apply(*values: int) -> Expected:
        low, high = (
            clamped(fmt)(f(*(v >> shift & mask for v in values))) for shift in (0, fmt.bits)
        )  # fmt: skip
        return Halves(fmt, low, high)  # type: ignore[arg-type]

    return apply


def mixed(a: int, b: int, c: int) -> Expected:
    """v_fma_mix_f32 on three f32 sources, clamped."""
    return clamped(F32)(encode(F32, ref.fma(decode(F32, a), decode(F32, b), decode(F32, c))))


def float_clamp_cases() -> list[ModifierCase]:
    """Clamp without DX10_CLAMP, of packed results, and under SDWA."""
    two = "{m} {d}, {0}, {1} clamp"
    sdwa = "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD"
    exact_add = fn.exact(F32, ref.add)
    rows = [
        ModifierCase("v_pk_add_f16", ("clamp",), "clamp", text=two, kinds=("pk_f16",) * 2, result="u32",
                     reference=both_halves(F16, fn.exact(F16, ref.add))),
        ModifierCase("v_pk_mul_f32", ("clamp",), "clamp", text=two, kinds=("b64",) * 2, result="u64",
                     reference=both_halves(F32, fn.exact(F32, ref.multiply))),
        ModifierCase("v_fma_mix_f32", ("clamp",), "clamp", text="{m} {d}, {0}, {1}, {2} clamp",
                     kinds=("f32",) * 3, reference=mixed),
        ModifierCase("v_add_f32", ("sdwa clamp",), "clamp", text=f"{{m}}_sdwa {two[4:]} {sdwa}",
                     kinds=("f32",) * 2, reference=lambda a, b: clamped(F32)(exact_add(a, b))),
        ModifierCase("v_add_f32", ("sdwa omod",), "omod", text=f"{{m}}_sdwa {{d}}, {{0}}, {{1}} mul:2 {sdwa}",
                     kinds=("f32",) * 2, reference=modified(F32, ref.add, 1),
                     mode=FloatMode(denorm32=1, ieee=False)),
    ]  # fmt: skip
    for kind, fmt in FORMATS.items():
        encoding = "" if kind == "f64" else "_e64"
        rows.append(
            ModifierCase(f"v_add_{kind}", ("clamp",), "clamp with and without DX10_CLAMP",
                         text=f"{{m}}{encoding} {{d}}, {{0}}, {{1}} clamp", kinds=(kind, kind), result=kind,
                         reference=keeps_nan(fmt, fn.exact(fmt, ref.add)), mode=FloatMode(dx10_clamp=False))
        )  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------- overflow, IEEE mode
def saturating(src: Format, dst: Format) -> Callable[[int], Expected]:
    """A conversion with FP16_OVFL = 1: finite overflow gives the largest number; NaN stays NaN."""

    def apply(a: int) -> Expected:
        number = decode(src, a)
        if number.is_nan:
            return (
                OneOf(tuple(b for b in range(256) if ref.is_nan(dst, b))) if dst.bits == 8 else dst.nan_bits
            )
        if number.kind == "inf" and dst.bits == 16:
            return encode(dst, number)
        return encode(dst, number, overflow="saturate")

    return apply


def overflow_cases() -> list[ModifierCase]:
    """FP16_OVFL."""
    mode = FloatMode(fp16_overflow=True)
    checks = "FP16_OVFL saturates"
    rows = [
        ModifierCase("v_cvt_f16_f32", ("FP16_OVFL",), checks, text="{m}_e32 {d}, {0}", kinds=("f32",),
                     result="f16", reference=saturating(F32, F16), mode=mode)
    ]  # fmt: skip
    for name, fmt in (("fp8", E4M3), ("bf8", E5M2)):
        one = saturating(F32, fmt)

        def reference(a: int, b: int, one: Any = one) -> Expected:
            low, high = (v.values if isinstance(v, OneOf) else (v,) for v in (one(a), one(b)))
            return OneOf(tuple(x | y << 8 for x in low for y in high))

        rows.append(
            ModifierCase(f"v_cvt_pk_{name}_f32", ("FP16_OVFL",), checks, text="{m} {d}, {0}, {1}",
                         kinds=("f32", "f32"), result="u16", reference=reference, mode=mode)
        )  # fmt: skip
    return rows


def ieee_cases() -> list[ModifierCase]:
    """min and max with IEEE = 0: a signalling NaN loses to a number."""
    rows = []
    for name, want_max in (("min", False), ("max", True)):
        for kind, fmt in FORMATS.items():
            text = "{m} {d}, {0}, {1}" if kind == "f64" else "{m}_e32 {d}, {0}, {1}"

            def reference(a: int, b: int, fmt: Format = fmt, want_max: bool = want_max) -> Expected:
                if ref.is_nan(fmt, a) and ref.is_nan(fmt, b):
                    return OneOf((a, b, ref.quieted(fmt, a), ref.quieted(fmt, b)))
                return ref.minmax_ieee(fmt, a, b, want_max, ieee=False)

            rows.append(
                ModifierCase(f"v_{name}_{kind}", ("IEEE = 0",), "signalling NaN without IEEE mode", text=text,
                             kinds=(kind, kind), result=f"u{fmt.bits}", reference=reference,
                             mode=FloatMode(ieee=False))
            )  # fmt: skip
    return rows


CASES: list[Case] = [
    *omod_cases(), *denormal_cases(), *integer_clamp_cases(), *float_clamp_cases(), *overflow_cases(),
    *ieee_cases(),
]  # fmt: skip


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_modifier(case: ModifierCase) -> None:
    check(case)


def test_bf16_rounding_ignores_fp16_ovfl() -> None:
    """Overflow of bf16 is infinity whatever FP16_OVFL says."""
    column = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF] + [0] * 61
    vgprs = {1: to_registers(column, 1, 1)[0]}
    got = run("v_cvt_pk_bf16_f32 v0, v1, v1", vgprs=vgprs, mode=FloatMode(fp16_overflow=True)).vgpr(0)
    assert (
        [int(v) & 0xFFFF for v in got[:3]]
        == [encode(BF16, decode(F32, v)) for v in column[:3]]
        == [0x7F80, 0xFF80, 0x7F7F]
    )
