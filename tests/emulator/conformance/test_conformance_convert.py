# SPDX-License-Identifier: Apache-2.0
"""Conversions between integers, f16, bf16, f32, f64 and the 8-bit formats.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 and section 7.3 (overflow of f32
to fp8 and bf8: NaN and infinity with FP16_OVFL = 0; which modifiers apply; op_sel chooses the destination
byte or half and the rest is kept); OCP 8-bit Floating Point Specification (e4m3: no infinity, max 448; e5m2);
LLVM AMDGPU (float to integer conversions saturate, NaN gives 0).

Beliefs that these inputs prove wrong: the fnuz formats of gfx942 (0x80 is -0 here, not NaN; bias 7, not 8);
saturation of f32 to fp8 (without FP16_OVFL it gives NaN); truncation of f32 to bf16; cvt of NaN to INT_MIN.
"""

from __future__ import annotations

import functools
from typing import Any

import conformance_reference as ref
import pytest
from conformance_forms import check_vector_case
from conformance_harness import Case, Expected, Halves, OneOf, case_id, implemented
from conformance_reference import BF16, E4M3, E5M2, F16, F32, F64, M32, decode, encode, sx, to_int
from conformance_vector import VectorCase, row

ALL, WIDE = "e32 e64 sdwa dpp", "e32 e64 dpp"
I32, U32 = (-(1 << 31), (1 << 31) - 1), (0, M32)


def narrow(src: ref.Format, dst: ref.Format, rounding: str = "rne") -> Any:
    """One rounding from a format to another."""
    return lambda a: encode(dst, decode(src, a), rounding)  # type: ignore[arg-type]


def integer(src: ref.Format, limits: tuple[int, int], bits: int, how: str = "trunc") -> Any:
    """Float to integer, saturating."""
    return lambda a: to_int(decode(src, a), *limits, how) & ((1 << bits) - 1)  # type: ignore[arg-type]


def from_integer(dst: ref.Format, bits: int, signed: bool) -> Any:
    """Integer to float, one rounding."""
    return lambda a: encode(dst, ref.from_int(sx(a, bits) if signed else a))


def ubyte(index: int) -> Any:
    """V_CVT_F32_UBYTEn."""
    return lambda a: encode(F32, ref.from_int(a >> (8 * index) & 255))


def normalised(signed: bool, fmt: ref.Format = F32, pairs: bool = True) -> Any:
    """A float to snorm16 or unorm16; a value halfway between two integers may go either way."""

    def one(a: int) -> tuple[int, ...]:
        number = decode(fmt, a)
        if number.is_nan:
            return (0,)
        top, low = (32767, -1) if signed else (65535, 0)
        if number.kind == "inf":
            return ((top if not number.sign else low * top) & 0xFFFF,)
        scaled = max(ref.Fraction(low), min(ref.Fraction(1), number.fraction)) * top
        down = scaled.__floor__()
        if scaled - down == ref.Fraction(1, 2):
            return (down & 0xFFFF, down + 1 & 0xFFFF)
        return (round(scaled) & 0xFFFF,)

    if not pairs:
        return lambda a: OneOf(one(a))
    return lambda a, b: OneOf(tuple(x | y << 16 for x in one(a) for y in one(b)))


def to_byte_of(a: int, position: int, rest: int) -> Expected:
    """V_CVT_PK_U8_F32: a byte of `rest` replaced; to nearest even or cut, which is not documented."""
    number, shift = decode(F32, a), 8 * (position & 3)
    bytes_ = {to_int(number, 0, 255, how) for how in ("trunc", "even")}
    return OneOf(tuple(rest & ~(255 << shift) | byte << shift for byte in bytes_))


OFF_TABLE = [
    0.0,
    0.0625,
    0.125,
    0.1875,
    0.25,
    0.3125,
    0.375,
    0.4375,
    -0.5,
    -0.4375,
    -0.375,
    -0.3125,
    -0.25,
    -0.1875,
    -0.125,
    -0.0625,
]

SCALAR_TYPES: list[VectorCase] = [
    row("v_cvt_i32_f32", "f32 -> i32", integer(F32, I32, 32), ALL, "toward zero, saturates, NaN gives 0"),
    row("v_cvt_u32_f32", "f32 -> u32", integer(F32, U32, 32), ALL, "toward zero, saturates, NaN gives 0"),
    row("v_cvt_flr_i32_f32", "f32 -> i32", integer(F32, I32, 32, "floor"), ALL, "floor, saturates"),
    row(
        "v_cvt_rpi_i32_f32",
        "f32 -> i32",
        lambda a: OneOf(
            tuple(
                {
                    to_int(v, *I32, "floor") & M32
                    for v in (
                        ref.add(decode(F32, a), ref.Num("num", 0, 1, -1)),
                        decode(F32, encode(F32, ref.add(decode(F32, a), ref.Num("num", 0, 1, -1)))),
                    )
                }
            )
        ),
        ALL,
        "floor(x + 0.5), the sum rounded or not",
    ),
    row(
        "v_cvt_i32_f64",
        "f64 -> i32",
        integer(F64, I32, 32),
        WIDE,
        "toward zero, saturates, NaN gives 0",
    ),
    row(
        "v_cvt_u32_f64",
        "f64 -> u32",
        integer(F64, U32, 32),
        WIDE,
        "toward zero, saturates, NaN gives 0",
    ),
    row(
        "v_cvt_f32_i32",
        "i32 -> f32",
        from_integer(F32, 32, True),
        ALL,
        "rounds to nearest even",
        modifiers=False,
    ),
    row(
        "v_cvt_f32_u32",
        "u32 -> f32",
        from_integer(F32, 32, False),
        ALL,
        "rounds to nearest even",
        modifiers=False,
    ),
    row("v_cvt_f64_i32", "i32 -> f64", from_integer(F64, 32, True), WIDE, "exact", modifiers=False),
    row("v_cvt_f64_u32", "u32 -> f64", from_integer(F64, 32, False), WIDE, "exact", modifiers=False),
    row("v_cvt_f32_f64", "f64 -> f32", narrow(F64, F32), WIDE, "rounds into subnormals, overflows"),
    row("v_cvt_f64_f32", "f32 -> f64", narrow(F32, F64), WIDE, "exact"),
    row("v_cvt_f16_f32", "f32 -> f16", narrow(F32, F16), ALL, "rounds into subnormals, overflows", count=640),
    row("v_cvt_f32_f16", "f16 -> f32", narrow(F16, F32), ALL, "exact, subnormals kept"),
    row(
        "v_cvt_f32_bf16",
        "bf16 -> b32",
        lambda a: OneOf((a << 16, ref.quieted(F32, a << 16))) if ref.is_nan(BF16, a) else a << 16,
        ALL,
        "the upper half of an f32; whether a NaN becomes quiet is not documented",
        scalar=False,
    ),
    row(
        "v_cvt_f16_u16",
        "u16 -> f16",
        from_integer(F16, 16, False),
        ALL,
        "rounds to nearest even",
        modifiers=False,
    ),
    row(
        "v_cvt_f16_i16",
        "i16 -> f16",
        from_integer(F16, 16, True),
        ALL,
        "rounds to nearest even",
        modifiers=False,
    ),
    row("v_cvt_u16_f16", "f16 -> u16", integer(F16, (0, 65535), 16), ALL, "toward zero, saturates"),
    row("v_cvt_i16_f16", "f16 -> i16", integer(F16, (-32768, 32767), 16), ALL, "toward zero, saturates"),
    *(
        row(f"v_cvt_f32_ubyte{n}", "u32 -> f32", ubyte(n), ALL, f"byte {n}", modifiers=False)
        for n in range(4)
    ),
    row(
        "v_cvt_off_f32_i4",
        "u32 -> f32",
        lambda a: ref.f32_bits(OFF_TABLE[a & 15]),
        ALL,
        "table of 16ths",
        modifiers=False,
    ),
]


def pack_floats(fmt: ref.Format, rounding: str = "rne") -> Any:
    """Round two f32 to a 16-bit format."""
    one = narrow(F32, fmt, rounding)
    return lambda a, b: Halves(fmt, one(a), one(b))


PACKED: list[VectorCase] = [
    row(
        "v_cvt_pk_bf16_f32",
        "f32 f32 -> b32",
        pack_floats(BF16),
        checks="nearest even, subnormals, overflow",
        count=640,
    ),
    row(
        "v_cvt_pk_f16_f32",
        "f32 f32 -> b32",
        pack_floats(F16),
        checks="nearest even, subnormals, overflow",
        count=640,
    ),
    row(
        "v_cvt_pkrtz_f16_f32",
        "f32 f32 -> b32",
        pack_floats(F16, "zero"),
        "vop3",
        "toward zero, largest finite on overflow",
    ),
    *(
        row(f"v_cvt_norm_{k}16_f16", f"f16 -> {k}16", normalised(k == "i", F16, False), ALL, "clamps, rounds")
        for k in "iu"
    ),
    row("v_cvt_pknorm_i16_f16", "f16 f16 -> b32", normalised(True, F16), checks="clamps to [-1, 1]"),
    row("v_cvt_pknorm_u16_f16", "f16 f16 -> b32", normalised(False, F16), checks="clamps to [0, 1]"),
    row("v_cvt_pk_u8_f32", "f32 u32 b32 -> b32", to_byte_of, checks="byte by S1[1:0], others from S2"),
    row("v_cvt_pkaccum_u8_f32", "f32 u32 old:b32 -> b32", to_byte_of, checks="byte by S1[1:0], others kept"),
    row("v_cvt_pknorm_i16_f32", "f32 f32 -> b32", normalised(True), checks="clamps to [-1, 1]"),
    row("v_cvt_pknorm_u16_f32", "f32 f32 -> b32", normalised(False), checks="clamps to [0, 1]"),
]


@functools.cache
def nan_bytes(fmt: ref.Format) -> tuple[int, ...]:
    """The NaN encodings of an 8-bit format."""
    return tuple(b for b in range(256) if ref.is_nan(fmt, b))


def to_byte(fmt: ref.Format, bits: int) -> tuple[int, ...]:
    """f32 to fp8 or bf8, FP16_OVFL = 0; NaN payloads and signs are not promised."""
    number = decode(F32, bits)
    if number.is_nan or (fmt is E4M3 and number.kind == "inf"):
        return nan_bytes(fmt)
    byte = encode(fmt, number)
    return nan_bytes(fmt) if ref.is_nan(fmt, byte) else (byte,)


class TwoBytes:
    """Expected register after V_CVT_PK_FP8_F32: two bytes in one half, the other half kept."""

    def __init__(self, fmt: ref.Format, high: bool) -> None:
        self.fmt, self.high = fmt, high

    def __call__(self, a: int, b: int, old: int) -> Expected:
        first, second = to_byte(self.fmt, a), to_byte(self.fmt, b)
        pairs = [x | y << 8 for x in first for y in second]
        return OneOf(tuple((p << 16 | old & 0xFFFF) if self.high else (old & 0xFFFF0000 | p) for p in pairs))


def not_near_overflow(a: int, b: int, _old: int) -> bool:
    """Leave out (448, 480): whether a value above the maximum that rounds down to it overflows is not
    documented.
    """
    return not any(0x43E00000 < v & 0x7FFFFFFF < 0x43F00000 for v in (a, b))


EIGHT: list[VectorCase] = [
    row(
        f"v_cvt_pk_{name}_f32",
        "f32 f32 old:b32 -> b32",
        TwoBytes(fmt, high),
        checks="nearest even, overflow, kept half",
        suffix="op_sel:[0,0,1]" if high else "",
        scalar=False,
        keep=not_near_overflow,
    )
    for name, fmt in (("fp8", E4M3), ("bf8", E5M2))
    for high in (False, True)
]
CASES: list[Case] = [*SCALAR_TYPES, *PACKED, *EIGHT]


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_conversion(case: VectorCase) -> None:
    check_vector_case(case)
