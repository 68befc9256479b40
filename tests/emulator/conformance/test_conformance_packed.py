# SPDX-License-Identifier: Apache-2.0
"""Packed (VOP3P) arithmetic: op_sel, op_sel_hi, neg_lo, neg_hi, mixed-precision fma and dot products.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", section 6.7 (packed math; packed 32-bit
operands select dwords with op_sel; V_MAD_MIX is a fused multiply-add), section 6.4 (V_DOT2 on floats flushes
subnormals), chapter 12; LLVM AMDGPUModifierSyntax (op_sel_hi defaults to all ones for packed instructions and
to zeros for v_fma_mix; v_fma_mix takes abs through neg_hi).

Every register half holds a different value, so a wrong half, or neg_lo taken for neg_hi, changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import conformance_functions as fn
import conformance_reference as ref
import numpy as np
import pytest
from conformance_harness import (
    EXEC_WITH_HOLES,
    FULL_EXEC,
    LANES,
    Case,
    Expected,
    OneOf,
    Report,
    Within,
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
from conformance_reference import BF16, F16, F32, M32, decode, encode, sx

from kernellib.emulator.errors import UnsupportedOperandError

WAVES = 4


@dataclass(frozen=True)
class PackedCase(Case):
    """`element` works on one element of each source; `bits` is 16 or 32."""

    kind: str = "f16"
    num_sources: int = 2
    element: Callable[..., Expected] = field(default=lambda: 0)
    bits: int = 16


def packed(
    name: str, kind: str, num: int, element: Callable[..., Expected], checks: str = "both halves"
) -> PackedCase:
    """A row."""
    forms = ("op_sel", "op_sel_hi", "neg_lo/neg_hi" if kind[0] == "f" else "", "sgpr", "inline")
    return PackedCase(
        name,
        tuple(f for f in forms if f),
        checks,
        kind=kind,
        num_sources=num,
        element=element,
        bits=int(kind[1:]),
    )


def i16(f: Callable[..., int]) -> Callable[..., int]:
    """Over signed 16-bit elements."""
    return lambda *v: f(*(sx(x, 16) for x in v)) & 0xFFFF


PACKED: list[PackedCase] = [
    packed("v_pk_add_f16", "f16", 2, fn.exact(F16, ref.add)),
    packed("v_pk_mul_f16", "f16", 2, fn.exact(F16, ref.multiply)),
    packed("v_pk_fma_f16", "f16", 3, fn.exact(F16, ref.fma), "one rounding"),
    packed("v_pk_min_f16", "f16", 2, fn.minmax(F16, False), "NaN, signed zero"),
    packed("v_pk_max_f16", "f16", 2, fn.minmax(F16, True), "NaN, signed zero"),
    packed("v_pk_minimum3_f16", "f16", 3, fn.minmax3_2019(F16, False), "NaN propagates"),
    packed("v_pk_maximum3_f16", "f16", 3, fn.minmax3_2019(F16, True), "NaN propagates"),
    packed("v_pk_add_f32", "f32", 2, fn.exact(F32, ref.add), "op_sel picks dwords"),
    packed("v_pk_mul_f32", "f32", 2, fn.exact(F32, ref.multiply), "op_sel picks dwords"),
    packed("v_pk_fma_f32", "f32", 3, fn.exact(F32, ref.fma), "one rounding, op_sel picks dwords"),
    packed("v_pk_add_u16", "u16", 2, lambda a, b: a + b & 0xFFFF),
    packed("v_pk_sub_u16", "u16", 2, lambda a, b: a - b & 0xFFFF),
    packed("v_pk_add_i16", "u16", 2, lambda a, b: a + b & 0xFFFF),
    packed("v_pk_sub_i16", "u16", 2, lambda a, b: a - b & 0xFFFF),
    packed("v_pk_mul_lo_u16", "u16", 2, lambda a, b: a * b & 0xFFFF),
    packed("v_pk_mad_u16", "u16", 3, lambda a, b, c: a * b + c & 0xFFFF),
    packed("v_pk_mad_i16", "u16", 3, lambda a, b, c: a * b + c & 0xFFFF),
    packed("v_pk_lshlrev_b16", "u16", 2, lambda a, b: b << (a & 15) & 0xFFFF, "4-bit counts"),
    packed("v_pk_lshrrev_b16", "u16", 2, lambda a, b: b >> (a & 15), "4-bit counts"),
    packed("v_pk_ashrrev_i16", "u16", 2, lambda a, b: sx(b, 16) >> (a & 15) & 0xFFFF, "4-bit counts"),
    packed("v_pk_min_u16", "u16", 2, min),
    packed("v_pk_max_u16", "u16", 2, max),
    packed("v_pk_min_i16", "u16", 2, i16(min)),
    packed("v_pk_max_i16", "u16", 2, i16(max)),
]


@dataclass(frozen=True)
class Form:
    """A text with the modifier bits it means."""

    text: str
    op_sel: tuple[int, ...] = (0, 0, 0)
    op_sel_hi: tuple[int, ...] = (1, 1, 1)
    neg_lo: tuple[int, ...] = (0, 0, 0)
    neg_hi: tuple[int, ...] = (0, 0, 0)
    operand: tuple[int, str] | None = None  # (source index, "s" or a constant)


def words(name: str, bits: tuple[int, ...], num: int) -> str:
    """`op_sel:[0,1]`."""
    return f"{name}:[{','.join(str(b) for b in bits[:num])}]"


def forms_of(case: PackedCase) -> list[Form]:
    """The modifier combinations of a packed case."""
    n = case.num_sources
    forms = [Form("")]
    for bits in ((1, 0, 0), (0, 1, 1), (1, 1, 1)):
        forms.append(Form(words("op_sel", bits, n), op_sel=bits))
        flipped = tuple(1 - b for b in bits)
        forms.append(Form(words("op_sel_hi", flipped, n), op_sel_hi=flipped))
        both = f"{words('op_sel', bits, n)} {words('op_sel_hi', flipped, n)}"
        forms.append(Form(both, op_sel=bits, op_sel_hi=flipped))
        if case.kind[0] == "f":
            both = f"{words('neg_lo', bits, n)} {words('neg_hi', flipped, n)}"
            forms.append(Form(both, neg_lo=bits, neg_hi=flipped))
    forms.append(Form("", operand=(0, "s")))
    broadcast = tuple(1 if i == 0 else 0 for i in range(3))
    constant = "0.5" if case.kind[0] == "f" else "7"
    forms.append(Form(words("op_sel_hi", broadcast[:n], n), op_sel_hi=broadcast, operand=(n - 1, constant)))
    if n == 3:
        forms[-1] = Form("op_sel_hi:[1,1,0]", op_sel_hi=(1, 1, 0), operand=(2, constant))
    return forms


def elements(case: PackedCase, form: Form, sources: list[int]) -> tuple[list[int], list[int]]:
    """The operands of the low and of the high element after the modifiers."""
    mask, sign = (1 << case.bits) - 1, 1 << (case.bits - 1)
    low, high = [], []
    for i, value in enumerate(sources):
        halves = (value & mask, value >> case.bits & mask)
        low.append(halves[form.op_sel[i]] ^ (sign if form.neg_lo[i] else 0))
        high.append(halves[form.op_sel_hi[i]] ^ (sign if form.neg_hi[i] else 0))
    return low, high


CONSTANTS = {("f16", "0.5"): 0x3800, ("f32", "0.5"): 0x3F000000, ("u16", "7"): 7}


def run_packed(case: PackedCase) -> int:
    """Checks every form of a case in every lane; returns how many results were compared with a reference."""
    width = case.bits * 2 // 32
    num = WAVES * LANES
    rng = rng_for(case.mnemonic)
    columns: list[list[int]] = []
    low, high = (test_values([case.kind] * case.num_sources, rng, num) for _ in range(2))
    columns = [
        [a | b << case.bits for a, b in zip(x, y, strict=True)] for x, y in zip(low, high, strict=True)
    ]
    vgprs: dict[int, Any] = {}
    for i, column in enumerate(columns):
        for j, array in enumerate(to_registers(column, width, WAVES)):
            vgprs[8 + 4 * i + j] = array
    forms = forms_of(case)
    lines = []
    poison = np.full((WAVES, LANES), 0x5EED0000, dtype=np.uint32) + np.arange(LANES, dtype=np.uint32)
    for k, form in enumerate(forms):
        operands = [vname(8 + 4 * i, width) for i in range(case.num_sources)]
        if form.operand is not None:
            index, text = form.operand
            operands[index] = ("s8" if width == 1 else "s[8:9]") if text == "s" else text
        destination = 64 + 2 * k
        vgprs |= {destination: poison, destination + 1: poison}
        lines.append(
            f"{case.mnemonic} {vname(destination, width)}, {', '.join(operands)} {form.text}".strip()
        )
    scalar = columns[0][5]
    result = run(
        "\ns_nop 4\n".join(lines),
        vgprs=vgprs,
        sgprs={8: scalar & M32, 9: scalar >> 32 & M32},
        exec_mask=EXEC_WITH_HOLES,
        num_waves=WAVES,
    )
    num_compared = 0
    report, fmt = Report(case.mnemonic), {"f16": F16, "f32": F32}.get(case.kind)
    mask = (1 << case.bits) - 1
    for k, form in enumerate(forms):
        got = from_registers([result.vgpr(64 + 2 * k + j) for j in range(width)])
        for i in range(num):
            sources = [c[i] for c in columns]
            if form.operand is not None:
                index, text = form.operand
                sources[index] = scalar if text == "s" else CONSTANTS[case.kind, text]
            if not EXEC_WITH_HOLES >> (i % LANES) & 1:
                want_low = want_high = None
                good = got[i] & M32 == 0x5EED0000 + i % LANES
            else:
                one, two = elements(case, form, sources)
                want_low, want_high = case.element(*one), case.element(*two)
                num_compared += 1
                good = compare(fmt, got[i] & mask, want_low) and compare(
                    fmt, got[i] >> case.bits & mask, want_high
                )
            report.check(
                good,
                lambda t=lines[k], s=sources, g=got[i], w=(want_low, want_high): (
                    f"`{t}` {[hex(v) for v in s]} gave {g:#x}, want {w}"
                ),
            )
    report.finish()
    return num_compared


@pytest.mark.parametrize("case", implemented(PACKED), ids=case_id)
def test_packed(case: PackedCase) -> None:
    num_active = WAVES * EXEC_WITH_HOLES.bit_count()
    assert run_packed(case) == len(forms_of(case)) * num_active > 0  # and each was right, else it raises


MIX: list[Case] = [
    Case(name, ("f32 and f16 sources", "op_sel", "neg", "abs", "clamp"), checks)
    for name, checks in (
        ("v_fma_mix_f32", "one rounding to f32"),
        ("v_fma_mixlo_f16", "rounding to f32, then to f16, upper half kept"),
        ("v_fma_mixhi_f16", "rounding to f32, then to f16, lower half kept"),
    )
]
MIX_FORMS = (
    # text of each operand, op_sel, op_sel_hi, neg, abs
    (("{}", "{}", "{}"), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
    (("{}", "{}", "{}"), (0, 0, 0), (1, 1, 1), (0, 0, 0), (0, 0, 0)),
    (("{}", "{}", "{}"), (1, 0, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0)),
    (("{}", "{}", "{}"), (0, 1, 0), (0, 1, 0), (0, 0, 0), (0, 0, 0)),
    (("-{}", "{}", "-{}"), (1, 0, 0), (1, 0, 1), (1, 0, 1), (0, 0, 0)),
    (("|{}|", "-|{}|", "{}"), (0, 0, 0), (0, 1, 0), (0, 1, 0), (1, 1, 0)),
)


def mix_source(register: int, sel: int, sel_hi: int, neg: int, absolute: int) -> ref.Num:
    """An operand of v_fma_mix."""
    number = decode(F16, register >> (16 * sel) & 0xFFFF) if sel_hi else decode(F32, register)
    number = number.abs() if absolute else number
    return number.neg() if neg else number


@pytest.mark.parametrize("case", implemented(MIX), ids=case_id)
def test_fma_mix(case: Case) -> None:
    num, rng = WAVES * LANES, rng_for(case.mnemonic)
    wide = test_values(["f32"] * 3, rng, num)
    halves = [test_values(["f16"] * 3, rng, num) for _ in range(2)]
    fmt = F32 if case.mnemonic.endswith("f32") else F16
    report = Report(case.mnemonic)
    for texts, op_sel, op_sel_hi, neg, absolute in MIX_FORMS:
        columns = [
            [lo | hi << 16 for lo, hi in zip(halves[0][i], halves[1][i], strict=True)]
            if op_sel_hi[i]
            else wide[i]
            for i in range(3)
        ]
        vgprs = {1 + i: to_registers(c, 1, WAVES)[0] for i, c in enumerate(columns)}
        vgprs[0] = np.full((WAVES, LANES), 0x5EED5EED, dtype=np.uint32)
        operands = ", ".join(t.format(f"v{1 + i}") for i, t in enumerate(texts))
        text = f"{case.mnemonic} v0, {operands}"
        text += f" {words('op_sel', op_sel, 3)}" if any(op_sel) else ""
        text += f" {words('op_sel_hi', op_sel_hi, 3)}" if any(op_sel_hi) else ""
        got = from_registers([run(text, vgprs=vgprs, exec_mask=EXEC_WITH_HOLES, num_waves=WAVES).vgpr(0)])
        for i in range(num):
            if not EXEC_WITH_HOLES >> (i % LANES) & 1:
                report.check(got[i] == 0x5EED5EED, lambda: "an inactive lane was written")
                continue
            sources = [
                mix_source(columns[k][i], op_sel[k], op_sel_hi[k], neg[k], absolute[k]) for k in range(3)
            ]
            want = encode(F32, ref.fma(*sources))  # the f32 result is rounded before it becomes an f16
            want = want if fmt is F32 else encode(F16, decode(F32, want))
            value = got[i]
            if fmt is F16:
                kept, value = (
                    (value >> 16, value & 0xFFFF) if "lo" in case.mnemonic else (value & 0xFFFF, value >> 16)
                )
                report.check(kept == 0x5EED, lambda t=text, k=kept: f"`{t}` changed the other half to {k:#x}")
            report.check(
                compare(fmt, value, want),
                lambda t=text, s=sources, g=value, w=want: f"`{t}` {s} gave {g:#x}, want {w:#x}",
            )
    report.finish()


FMAC = [
    PackedCase(
        "v_pk_fmac_f16", ("e32", "e64", "dpp", "sgpr", "inline"), "one rounding in both halves", num_sources=3
    )
]


@pytest.mark.parametrize("case", implemented(FMAC), ids=case_id)
def test_pk_fmac(case: PackedCase) -> None:
    """D = S0 * S1 + D on each half."""
    num, rng, report = WAVES * LANES, rng_for(case.mnemonic), Report(case.mnemonic)
    halves = [test_values(["f16"] * 3, rng, num) for _ in range(2)]
    a, b, d = ([lo | hi << 16 for lo, hi in zip(x, y, strict=True)] for x, y in zip(*halves, strict=True))
    fma = fn.exact(F16, ref.fma)
    swapped = [a[i ^ 1] for i in range(num)]
    dpp = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1"
    forms = (
        ("_e32", "v1", "", a), ("_e64", "v1", "", a), ("", "s4", "", [a[7]] * num),
        ("", "2.0", "", [0x4000] * num),
        ("_dpp", "v1", dpp, swapped),
    )  # fmt: skip
    for encoding, text, suffix, first in forms:
        vgprs = {i: to_registers(column, 1, WAVES)[0] for i, column in ((0, d), (1, a), (2, b))}
        line = f"v_pk_fmac_f16{encoding} v0, {text}, v2 {suffix}"
        mask = FULL_EXEC if suffix else EXEC_WITH_HOLES
        result = run(line, vgprs=vgprs, sgprs={4: a[7]}, exec_mask=mask, num_waves=WAVES)
        got = from_registers([result.vgpr(0)])
        for i in range(num):
            if not mask >> (i % LANES) & 1:
                report.check(got[i] == d[i], lambda i=i: f"lane {i} is off, but was written")
                continue
            # A constant is the low half; what the upper half of a packed constant reads is not documented.
            for shift in (0,) if text == "2.0" else (0, 16):
                x, y, z = (v >> shift & 0xFFFF for v in (first[i], b[i], d[i]))
                report.check(
                    compare(F16, got[i] >> shift & 0xFFFF, fma(x, y, z)),
                    lambda v=(x, y, z), g=got[i], t=line: f"`{t}` {[hex(q) for q in v]} gave {g:#x}",
                )
    report.finish()


PK_MOV = [Case("v_pk_mov_b32", ("op_sel",), "op_sel[0] picks the dword of S0, op_sel[1] that of S1")]


@pytest.mark.parametrize("case", implemented(PK_MOV), ids=case_id)
def test_pk_mov(case: Case) -> None:
    vgprs = {i: np.arange(LANES, dtype=np.uint32) + np.uint32(1000 * i) for i in range(2, 6)}
    for first in (0, 1):
        for second in (0, 1):
            got = run(
                f"v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[{first},{second}]",
                vgprs=vgprs | {0: vgprs[2], 1: vgprs[2]},
            )
            assert np.array_equal(np.asarray(got.vgpr(0)).reshape(-1), vgprs[2 + first]), (first, second)
            assert np.array_equal(np.asarray(got.vgpr(1)).reshape(-1), vgprs[4 + second]), (first, second)


@dataclass(frozen=True)
class DotCase(Case):
    """Dot product of two packed pairs plus an f32."""

    fmt: ref.Format = F16
    accumulates: bool = False


DOT: list[DotCase] = [
    DotCase(
        f"v_dot2{c}_f32_{t}",
        ("e32", "e64", "dpp") if c else ("vop3p",),
        "exact sums exact; else within the rounding of three terms",
        fmt=fmt,
        accumulates=bool(c),
    )
    for t, fmt in (("f16", F16), ("bf16", BF16))
    for c in ("", "c")
]


def normal_or_zero(fmt: ref.Format, bits: int) -> int:
    """Without subnormals, infinities and NaN (the instruction flushes; the order of its sums is not
    documented).
    """
    exponent = bits >> fmt.mbits & ((1 << fmt.ebits) - 1)
    limits = (fmt.bias - 12, fmt.bias + 12)
    return bits & ~fmt.inf_bits | ref.saturate(exponent, *limits) << fmt.mbits


@pytest.mark.parametrize("case", implemented(DOT), ids=case_id)
def test_dot2(case: DotCase) -> None:
    num, rng, fmt = WAVES * LANES, rng_for(case.mnemonic), case.fmt
    small = [encode(fmt, ref.from_int(v)) for v in range(-8, 9)]
    columns: list[list[int]] = []
    for _ in range(4):
        raw = test_values([fmt.name], rng, num)[0]
        columns.append([rng.choice(small) if i % 2 else normal_or_zero(fmt, v) for i, v in enumerate(raw)])
    addend = [
        encode(F32, ref.from_int(rng.randint(-1000, 1000)))
        if i % 2
        else normal_or_zero(F32, rng.getrandbits(32))
        for i in range(num)
    ]
    a, b = (
        [lo | hi << 16 for lo, hi in zip(columns[2 * k], columns[2 * k + 1], strict=True)] for k in (0, 1)
    )
    vgprs = {i + 1: to_registers(v, 1, WAVES)[0] for i, v in enumerate((a, b, addend))}
    vgprs[0] = vgprs[3]
    lines = [f"{case.mnemonic} v0, v1, v2, v3"]
    if case.accumulates:
        dpp = "quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf"
        lines = [
            f"{case.mnemonic}_{e} v0, v1, v2{' ' + dpp if e == 'dpp' else ''}" for e in ("e32", "e64", "dpp")
        ]
    report = Report(case.mnemonic)
    for line in lines:
        got = from_registers([run(line, vgprs=vgprs, num_waves=WAVES).vgpr(0)])
        for i in range(num):
            parts = [decode(fmt, columns[k][i]).fraction for k in range(4)]
            terms = [parts[0] * parts[2], parts[1] * parts[3], decode(F32, addend[i]).fraction]
            tolerance = Fraction(0) if i % 2 else sum(abs(t) for t in terms) * Fraction(1, 1 << 22)
            want: Expected = Within(sum(terms, Fraction(0)), Fraction(0), tolerance)
            if i % 2 and not sum(terms):
                want = OneOf((0, 1 << 31))
            report.check(
                compare(F32, got[i], want),
                lambda t=line, v=terms, g=got[i], w=want: (
                    f"`{t}` {[float(x) for x in v]} gave {g:#x}, want {show(0, w)}"
                ),
            )
    report.finish()


@pytest.mark.parametrize("case", implemented([c for c in DOT if not c.accumulates]), ids=case_id)
def test_dot2_signs(case: DotCase) -> None:
    """neg_lo and neg_hi flip factors of the low and high products; both of the addend's flip the addend.

    LLVM (SelectVOP3PMods) sets both bits of an addend that it finds negated.
    """
    fmt = case.fmt
    one, two, three, five = (encode(fmt, ref.from_int(v)) for v in (1, 2, 3, 5))
    registers = {1: one | two << 16, 2: three | five << 16, 3: encode(F32, ref.from_int(100))}
    vgprs = {i: np.full(LANES, v, np.uint32) for i, v in registers.items()}
    for text, want in (
        ("", 113), (" neg_lo:[1,0,0]", 107), (" neg_hi:[1,0,0]", 93), (" neg_lo:[1,1,0] neg_hi:[0,1,0]", 93),
        (" neg_lo:[0,0,1] neg_hi:[0,0,1]", -87),
    ):  # fmt: skip
        got = run(f"{case.mnemonic} v0, v1, v2, v3{text}", vgprs=vgprs).vgpr(0)
        assert int(got[9]) == encode(F32, ref.from_int(want)), text
    with pytest.raises(UnsupportedOperandError, match="no halves"):
        run(f"{case.mnemonic} v0, v1, v2, v3 neg_hi:[0,0,1]", vgprs=vgprs)


CASES: list[Case] = [*PACKED, *FMAC, *MIX, *PK_MOV, *DOT]
