# SPDX-License-Identifier: Apache-2.0
"""Conversions to and from fp8, bf8, fp6, bf6 and fp4, with and without a scale, and stochastic rounding.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 and section 7.3 (a scale is the
exponent field of an f32; packing divides by 2**(E - 127), unpacking multiplies; E = 255 is NaN; fp6 and fp4
saturate); LLVM, pull requests 117380, 117384, 117417, 117418 (which op_sel bits choose which byte or half);
public gfx950 quantisers (2xpk16 interleaves: code 2i from S0[i], code 2i + 1 from S1[i]); OCP Microscaling
Formats (e4m3, e5m2, e2m3, e3m2, e2m1).

Stochastic rounding: which bits of the random operand count is not published for every form, so a result must
be one of the two neighbours (the value itself where it is exact), must not fall as the random operand grows,
and its mean over uniform random operands must be the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import conformance_reference as ref
import numpy as np
import pytest
from conformance_forms import check_vector_case
from conformance_harness import Case, Expected, Halves, OneOf, case_id, implemented, run
from conformance_reference import BF16, E2M1, E4M3, E5M2, F16, F32, Format, Num, decode, encode
from conformance_vector import VectorCase, row

SMALL = {"fp8": E4M3, "bf8": E5M2, "fp4": E2M1}
WIDE = {"f32": F32, "f16": F16, "bf16": BF16}
ISA = "CDNA4 ISA; LLVM op_sel"


@functools.cache
def nan_codes(fmt: Format) -> tuple[int, ...]:
    """The NaN encodings of a narrow format."""
    return tuple(code for code in range(1 << fmt.bits) if ref.is_nan(fmt, code))


def scale_power(bits: int) -> int | None:
    """log2 of the scale that an f32 operand means; None for NaN."""
    exponent = bits >> 23 & 255
    return None if exponent == 255 else exponent - 127


def codes(fmt: Format, value: Num) -> tuple[int, ...]:
    """Encodings that rounding to nearest even may give (NaN payloads and signs are not promised)."""
    if value.is_nan:
        return nan_codes(fmt) or (fmt.max_bits, fmt.max_bits | 1 << fmt.bits - 1)
    if value.kind == "inf" and fmt is E4M3:
        return nan_codes(fmt)
    code = encode(fmt, value)
    return nan_codes(fmt) if ref.is_nan(fmt, code) else (code,)


def scaled(fmt: Format, bits: int, scale: int, direction: int) -> Num:
    """A value times (direction 1) or divided by (-1) a scale."""
    power = scale_power(scale)
    return ref.NAN if power is None else ref.scale_by(decode(fmt, bits), direction * power)


def near_overflow(value: Num) -> bool:
    """In (448, 480): whether a value that rounds down to e4m3's maximum has overflowed is not documented."""
    return value.kind == "num" and 448 < abs(value.fraction) < 480


def merged(old: int, parts: tuple[int, ...], shift: int, bits: int) -> Expected:
    """The old register with one of some values at a place."""
    mask = (1 << bits) - 1 << shift
    return OneOf(tuple(old & ~mask | part << shift for part in parts))


# ------------------------------------------------------------------------------------------------ unpacking
def unpack(fmt: Format, dst: Format, shift: int, count: int) -> Callable[..., Expected]:
    """`count` elements from bit `shift` on, times the scale, rounded once."""

    def apply(word: int, scale: int = 127 << 23) -> Expected:
        values = [
            encode(dst, scaled(fmt, word >> (shift + i * fmt.bits) & (1 << fmt.bits) - 1, scale, 1))
            for i in range(count)
        ]
        return values[0] if count == 1 else Halves(dst, values[0], values[1])

    return apply


def unpack_f16_half(fmt: Format, shift: int, high: bool) -> Callable[[int, int, int], Expected]:
    """One fp8 to one half of the destination."""

    def apply(word: int, scale: int, old: int) -> Expected:
        value = encode(F16, scaled(fmt, word >> shift & 255, scale, 1))
        parts = (0x7E00, 0xFE00, 0x7FFF, 0xFFFF) if ref.is_nan(F16, value) else (value,)
        return merged(old, parts, 16 if high else 0, 16)

    return apply


def unpacking() -> list[VectorCase]:
    """Narrow formats to f32, f16 and bf16."""
    rows = []
    for name, fmt in (("fp8", E4M3), ("bf8", E5M2)):
        rows.append(
            row(f"v_cvt_f32_{name}", "b32 -> f32", unpack(fmt, F32, 0, 1), "e32 e64 sdwa dpp", "every byte",
                sdwa_sext=False, sdwa_dst=False, modifiers=False)
        )  # fmt: skip
        rows.append(
            row(f"v_cvt_pk_f32_{name}", "b32 -> b64", unpack(fmt, F32, 0, 2), "e32 e64 sdwa dpp", "two bytes",
                sdwa_sext=False, sdwa_dst=False, modifiers=False)
        )  # fmt: skip
        for byte in range(4):
            op_sel = f"op_sel:[{byte & 1},{byte >> 1},0]" if byte else ""
            rows.append(
                row(f"v_cvt_scalef32_f32_{name}", "b32 f32 -> f32", unpack(fmt, F32, 8 * byte, 1),
                    checks="byte by op_sel; scale", suffix=op_sel, scalar=False, modifiers=False,
                    source=ISA, count=256)
            )  # fmt: skip
            high = byte >> 1
            rows.append(
                row(f"v_cvt_scalef32_f16_{name}", "b32 f32 old:b32 -> b32",
                    unpack_f16_half(fmt, 8 * byte, bool(high)), checks="byte and half by op_sel; half kept",
                    suffix=f"op_sel:[{byte & 1},{byte >> 1},{high}]", scalar=False, modifiers=False,
                    source=ISA, count=256)
            )  # fmt: skip
    for name, fmt in SMALL.items():
        for to, dst in WIDE.items():
            for part in range(2 if fmt.bits == 8 else 4):
                suffix = f"op_sel:[{part & 1},{part >> 1},0]" if part else ""
                result = "b64" if to == "f32" else "b32"
                rows.append(
                    row(f"v_cvt_scalef32_pk_{to}_{name}", f"b32 f32 -> {result}",
                        unpack(fmt, dst, 2 * fmt.bits * part, 2), checks="part by op_sel; scale; rounding",
                        suffix=suffix, scalar=False, modifiers=False, source=ISA, count=256)
                )  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------ packing
def pack_f32(fmt: Format, part: int) -> Callable[[int, int, int, int], Expected]:
    """Two f32 over the scale into part `part` of the old register."""

    def apply(a: int, b: int, scale: int, old: int) -> Expected:
        low, high = (codes(fmt, scaled(F32, v, scale, -1)) for v in (a, b))
        pairs = tuple(x | y << fmt.bits for x in low for y in high)
        return merged(old, pairs, 2 * fmt.bits * part, 2 * fmt.bits)

    return apply


def pack_halves(src: Format, fmt: Format, part: int) -> Callable[[int, int, int], Expected]:
    """Two halves of a register over the scale into part `part` of the old register."""

    def apply(word: int, scale: int, old: int) -> Expected:
        low, high = (codes(fmt, scaled(src, word >> s & 0xFFFF, scale, -1)) for s in (0, 16))
        pairs = tuple(x | y << fmt.bits for x in low for y in high)
        return merged(old, pairs, 2 * fmt.bits * part, 2 * fmt.bits)

    return apply


def clear_of_overflow(src: Format, fmt: Format) -> Callable[..., bool]:
    """Filter of packing inputs: nothing in the disputed band, and a NaN scale only where NaN exists."""

    def keep(*values: int) -> bool:
        *data, scale, _ = values
        if fmt is not E4M3:
            return fmt.special == "ieee" or (scale_power(scale) is not None and not any(
                decode(src, v).kind != "num" for v in parts_of(src, data)
            ))  # fmt: skip
        return not any(near_overflow(scaled(src, v, scale, -1)) for v in parts_of(src, data))

    return keep


def parts_of(src: Format, words: list[int]) -> list[int]:
    """f32 words as they are, or both halves of each."""
    return words if src is F32 else [w >> s & 0xFFFF for w in words for s in (0, 16)]


def packing() -> list[VectorCase]:
    """f32, f16 and bf16 to narrow formats, nearest even."""
    rows = []
    for name, fmt in SMALL.items():
        for part in range(2 if fmt.bits == 8 else 4):
            bits = f"{part & 1},{part >> 1}" if fmt.bits == 4 else f"0,{part}"
            four = f"op_sel:[0,0,{bits}]" if part else ""
            three = f"op_sel:[0,0,{part}]" if part else ""
            rows.append(
                row(f"v_cvt_scalef32_pk_{name}_f32", "f32 f32 f32 old:b32 -> b32", pack_f32(fmt, part),
                    checks="nearest even; part by op_sel, rest kept", suffix=four, scalar=False,
                    keep=clear_of_overflow(F32, fmt), source=ISA, count=256)
            )  # fmt: skip
            for source in ("f16", "bf16"):
                src = WIDE[source]
                rows.append(
                    row(f"v_cvt_scalef32_pk_{name}_{source}", f"pk_{source} f32 old:b32 -> b32",
                        pack_halves(src, fmt, part), checks="nearest even; part by op_sel, rest kept",
                        suffix=four if fmt.bits == 4 else three, scalar=False, modifiers=False,
                        keep=clear_of_overflow(src, fmt), source=ISA, count=256)
                )  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------- stochastic rounding
def neighbours(fmt: Format, value: Num) -> tuple[int, ...]:
    """The encodings between which stochastic rounding chooses."""
    if value.kind != "num":
        return codes(fmt, value)
    toward = encode(fmt, value, "zero", "saturate")
    away = encode(fmt, value, "down" if value.sign else "up", "ieee")
    found = {toward, away}
    return tuple(found | set(nan_codes(fmt))) if ref.is_nan(fmt, away) else tuple(found)


def stochastic(src: Format, fmt: Format, shift: int, has_scale: bool) -> Callable[..., Expected]:
    """One element at a place of the old register."""

    def apply(a: int, random: int, *rest: int) -> Expected:
        scale, old = rest if has_scale else (127 << 23, rest[0])
        value = scaled(src, a, scale, -1)
        if value.is_nan and fmt.special == "ieee" and fmt.bits > 8:
            return merged(old, tuple(c for c in nan_halves(fmt)), shift, fmt.bits)
        return merged(old, neighbours(fmt, value), shift, fmt.bits)

    return apply


@functools.cache
def nan_halves(fmt: Format) -> tuple[int, ...]:
    """Quiet NaNs of a 16-bit format."""
    return tuple(
        s << 15 | fmt.inf_bits | 1 << fmt.mbits - 1 | m for s in (0, 1) for m in range(1 << fmt.mbits - 1)
    )


def stochastic_pair(src: Format, part: int) -> Callable[[int, int, int, int], Expected]:
    """Two elements to a byte of fp4."""

    def apply(pair: int, random: int, scale: int, old: int) -> Expected:
        low, high = (
            neighbours(E2M1, scaled(src, pair >> s & (1 << src.bits) - 1, scale, -1)) for s in (0, src.bits)
        )
        return merged(old, tuple(x | y << 4 for x in low for y in high), 8 * part, 8)

    return apply


def finite(src: Format) -> Callable[..., bool]:
    """Finite data and a scale that is no NaN."""
    mask = (1 << src.bits) - 1

    def keep(pair: int, random: int, scale: int, old: int) -> bool:
        parts = (pair & mask, pair >> src.bits & mask)
        return scale_power(scale) is not None and all(decode(src, v).kind == "num" for v in parts)

    return keep


def rounding_at_random() -> list[VectorCase]:
    """Every stochastic conversion of one or two elements."""
    rows = []
    text = "a neighbour; exact values exact; rest kept"
    for name, fmt in (("f16", F16), ("bf16", BF16)):
        for high in (0, 1):
            rows.append(
                row(f"v_cvt_sr_{name}_f32", "f32 u32 old:b32 -> b32", stochastic(F32, fmt, 16 * high, False),
                    checks=text, suffix="op_sel:[0,0,1]" if high else "", scalar=False,
                    keep=lambda a, r, o: not ref.is_nan(F32, a), source=ISA, count=256)
            )  # fmt: skip
    for name, fmt in (("fp8", E4M3), ("bf8", E5M2)):
        for byte in range(4):
            op_sel = f"op_sel:[0,0,{byte & 1},{byte >> 1}]" if byte else ""
            rows.append(
                row(f"v_cvt_sr_{name}_f32", "f32 u32 old:b32 -> b32", stochastic(F32, fmt, 8 * byte, False),
                    checks=text, suffix=op_sel, scalar=False, source=ISA, count=256)
            )  # fmt: skip
            for source, src in WIDE.items():
                rows.append(
                    row(f"v_cvt_scalef32_sr_{name}_{source}", f"{source} u32 f32 old:b32 -> b32",
                        stochastic(src, fmt, 8 * byte, True), checks=text, suffix=op_sel, scalar=False,
                        modifiers=False, source=ISA, count=256)
                )  # fmt: skip
    for part in range(4):
        op_sel = f"op_sel:[0,0,{part & 1},{part >> 1}]" if part else ""
        for source, src in WIDE.items():
            kind = "b64" if source == "f32" else f"pk_{source}"
            rows.append(
                row(f"v_cvt_scalef32_sr_pk_fp4_{source}", f"{kind} u32 f32 old:b32 -> b32",
                    stochastic_pair(src, part), checks=text, suffix=op_sel, scalar=False, modifiers=False,
                    keep=finite(src), source=ISA, count=256)
            )  # fmt: skip
    return rows


CASES: list[Case] = [*unpacking(), *packing(), *rounding_at_random()]


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_small_float_conversion(case: VectorCase) -> None:
    check_vector_case(case)


SR_ONE = [c for c in CASES if "_sr_" in c.mnemonic and "_pk_" not in c.mnemonic and "op_sel" not in c.suffix]  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", implemented(SR_ONE), ids=case_id)
def test_random_operand_decides_in_proportion(case: VectorCase) -> None:
    """Over all high bits of the random operand: results do not fall, and their mean is the value."""
    source = case.sources[0]
    src, fmt = WIDE[source], {"f16": F16, "bf16": BF16, **SMALL}[case.mnemonic.split("_")[-2]]
    waves = 16
    lanes = np.arange(waves * 64, dtype=np.uint64)
    random = (lanes << np.uint64(22)).astype(np.uint32).reshape(waves, 64)
    for number in (Num("num", 0, 0b1011011011010111, -13), Num("num", 1, 0b1100101101110101, -15)):
        bits = encode(src, number)
        value = decode(src, bits).fraction
        vgprs: dict[int, Any] = {1: np.full((waves, 64), bits, np.uint32), 2: random}
        vgprs |= {0: np.zeros((waves, 64), np.uint32), 3: np.full((waves, 64), 0x3F800000, np.uint32)}
        operands = "v0, v1, v2, v3" if "scalef32" in case.mnemonic else "v0, v1, v2"
        got = np.asarray(run(f"{case.mnemonic} {operands}", vgprs=vgprs, num_waves=waves).vgpr(0)).reshape(-1)
        results = [decode(fmt, int(g) & (1 << fmt.bits) - 1).fraction for g in got]
        magnitudes = [abs(r) for r in results]
        assert magnitudes == sorted(magnitudes)
        mean, step = sum(results) / len(results), max(magnitudes) - min(magnitudes)
        assert step > 0
        assert abs(mean - value) <= step * Fraction(1, 64), (case.mnemonic, float(mean), float(value))
