# SPDX-License-Identifier: Apache-2.0
"""Vector integer and bit instructions against Python integers.

Source: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 (the pseudocode of each
instruction) and sections 6.2 (operands, literals), 13.3.7 (SDWA), 13.3.9 (DPP).  Facts that a plausible
implementation gets wrong and that the inputs here separate: shift counts use 5, 6 or 4 bits only; `rev`
shifts take the count first; v_bfe's width is 5 bits; v_perm_b32 numbers bytes from the SECOND source;
v_mad_u64_u32 has a 65-bit sum; v_lshl_add_u64 uses three bits of its shift; an inline 0.5 in an integer
instruction is 0x3f000000; v_bitop3's table is indexed by (S0,S1,S2) with S0 as the high bit; inactive lanes
of a compare give 0 in the mask.
"""

from __future__ import annotations

from typing import Any

import pytest
from conformance_forms import check_vector_case
from conformance_harness import Case, case_id, implemented
from conformance_reference import M32, M64, saturate, sx
from conformance_vector import VectorCase, row

ALL = "e32 e64 sdwa dpp"


def i32(f: Any) -> Any:
    """A reference over signed 32-bit operands."""
    return lambda *v: f(*(sx(x, 32) for x in v)) & M32


def i16(f: Any) -> Any:
    """A reference over signed 16-bit operands."""
    return lambda *v: f(*(sx(x, 16) for x in v)) & 0xFFFF


def first_bit(value: int, bits: int, from_top: bool, same_as_sign: bool = False) -> int:
    """Position of the first one (or, for I32, of the first bit that differs from the sign), else all ones."""
    order = range(bits - 1, -1, -1) if from_top else range(bits)
    sign = value >> (bits - 1) & 1
    for position, bit in enumerate(order):
        if (value >> bit & 1) != (sign if same_as_sign else 0):
            return position
    return M32


def reverse(value: int, bits: int) -> int:
    """Bits in the opposite order."""
    return int(f"{value:0{bits}b}"[::-1], 2)


def perm(s0: int, s1: int, sel: int) -> int:
    """V_PERM_B32: bytes 0-3 of the data are S1, 4-7 are S0; 8-11 sign bytes, 12 zero, above 0xff."""
    data, out = s0 << 32 | s1, 0
    for i in range(4):
        which = sel >> (8 * i) & 0xFF
        if which >= 13:
            byte = 0xFF
        elif which == 12:
            byte = 0
        elif which >= 8:
            byte = 0xFF if data >> (8 * (2 * (which - 8) + 1) + 7) & 1 else 0
        else:
            byte = data >> (8 * which) & 0xFF
        out |= byte << (8 * i)
    return out


def bitop3(table: int) -> Any:
    """V_BITOP3: result bit = table[(s0 << 2) | (s1 << 1) | s2]."""

    def apply(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)
        )

    return apply


def med3(*v: int) -> int:
    """Middle of three."""
    return sorted(v)[1]


def sad(a: int, b: int, c: int, bits: int, masked: bool = False) -> int:
    """Sum of absolute differences of the fields of two words, plus c."""
    total, mask = c, (1 << bits) - 1
    for i in range(0, 32, bits):
        x, y = a >> i & mask, b >> i & mask
        total += 0 if masked and y == 0 else abs(x - y)
    return total & M32


def bfe_i32(a: int, offset: int, width: int) -> int:
    """Signed bit field extract; width 0 gives 0."""
    width &= 31
    field = (sx(a, 32) >> (offset & 31)) & ((1 << width) - 1)
    return sx(field, width) & M32 if width else 0


def dot(bits: int, signed: bool) -> Any:
    """V_DOTn: sum of products of packed integers plus the accumulator."""

    def apply(a: int, b: int, c: int) -> int:
        total = c
        for i in range(0, 32, bits):
            x, y = a >> i & ((1 << bits) - 1), b >> i & ((1 << bits) - 1)
            total += sx(x, bits) * sx(y, bits) if signed else x * y
        return total & M32

    return apply


def ashr_pack(low: int, high: int) -> Any:
    """V_ASHR_PK_*: two shifted words, saturated to a byte each."""

    def apply(a: int, b: int, c: int) -> int:
        first, second = (saturate(sx(v, 32) >> (c & 31), low, high) & 0xFF for v in (a, b))
        return first | second << 8

    return apply


U, UU, UUU = "u32 -> u32", "u32 u32 -> u32", "u32 u32 u32 -> u32"
VOP2: list[VectorCase] = [
    row("v_and_b32", UU, lambda a, b: a & b, ALL),
    row("v_or_b32", UU, lambda a, b: a | b, ALL),
    row("v_xor_b32", UU, lambda a, b: a ^ b, ALL),
    row("v_xnor_b32", UU, lambda a, b: ~(a ^ b) & M32, ALL),
    row("v_lshlrev_b32", UU, lambda a, b: b << (a & 31) & M32, ALL, "shift count is S0[4:0]"),
    row("v_lshrrev_b32", UU, lambda a, b: b >> (a & 31), ALL, "shift count is S0[4:0]"),
    row("v_ashrrev_i32", UU, lambda a, b: sx(b, 32) >> (a & 31) & M32, ALL, "shift count is S0[4:0]"),
    row("v_add_u32", UU, lambda a, b: a + b & M32, ALL, "wraps"),
    row("v_sub_u32", UU, lambda a, b: a - b & M32, ALL, "wraps"),
    row("v_subrev_u32", UU, lambda a, b: b - a & M32, ALL, "wraps"),
    row("v_min_i32", UU, i32(min), ALL),
    row("v_max_i32", UU, i32(max), ALL),
    row("v_min_u32", UU, min, ALL),
    row("v_max_u32", UU, max, ALL),
    row("v_mul_i32_i24", UU, lambda a, b: sx(a, 24) * sx(b, 24) & M32, ALL, "low 24 bits, sign extended"),
    row("v_mul_u32_u24", UU, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M32, ALL, "low 24 bits"),
    row("v_mul_hi_i32_i24", UU, lambda a, b: sx(a, 24) * sx(b, 24) >> 32 & M32, ALL, "low 24 bits"),
    row("v_mul_hi_u32_u24", UU, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32, ALL, "low 24 bits"),
    row(
        "v_cndmask_b32",
        "b32 b32 mask -> b32",
        lambda a, b, m: b if m else a,
        ALL,
        "mask picks S1",
        modifiers=False,
        sdwa_sext=False,
    ),
]
CARRY: list[VectorCase] = [
    row(
        f"v_{name}_u32",
        signature,
        f,
        ALL,
        "sum, carry or borrow per lane",
        mask_holes=False,
    )
    for name, signature, f in (
        ("add_co", "u32 u32 -> u32 mask", lambda a, b: (a + b & M32, int(a + b > M32))),
        ("sub_co", "u32 u32 -> u32 mask", lambda a, b: (a - b & M32, int(b > a))),
        ("subrev_co", "u32 u32 -> u32 mask", lambda a, b: (b - a & M32, int(a > b))),
        ("addc_co", "u32 u32 mask -> u32 mask", lambda a, b, c: (a + b + c & M32, int(a + b + c > M32))),
        ("subb_co", "u32 u32 mask -> u32 mask", lambda a, b, c: (a - b - c & M32, int(b + c > a))),
        ("subbrev_co", "u32 u32 mask -> u32 mask", lambda a, b, c: (b - a - c & M32, int(a + c > b))),
    )
]
VOP1: list[VectorCase] = [
    row("v_mov_b32", "b32 -> b32", lambda a: a, ALL),
    row("v_mov_b64", "b64 -> b64", lambda a: a, "e32 e64 dpp", "register pairs"),
    row("v_not_b32", U, lambda a: ~a & M32, ALL),
    row("v_bfrev_b32", U, lambda a: reverse(a, 32), ALL),
    row("v_ffbh_u32", U, lambda a: first_bit(a, 32, True), ALL, "-1 when no bit is set"),
    row("v_ffbl_b32", U, lambda a: first_bit(a, 32, False), ALL, "-1 when no bit is set"),
    row("v_ffbh_i32", U, lambda a: first_bit(a, 32, True, True), ALL, "-1 when all bits are equal"),
    row(
        "v_prng_b32",
        U,
        lambda a: (a << 1 ^ (197 if a >> 31 else 0)) & M32,
        ALL,
        "one step of the generator",
    ),
]
VOP3: list[VectorCase] = [
    row("v_add3_u32", UUU, lambda a, b, c: a + b + c & M32),
    row("v_lshl_add_u32", UUU, lambda a, b, c: (a << (b & 31)) + c & M32, checks="shift S1[4:0]"),
    row("v_add_lshl_u32", UUU, lambda a, b, c: (a + b & M32) << (c & 31) & M32, checks="shift S2[4:0]"),
    row("v_lshl_or_b32", UUU, lambda a, b, c: (a << (b & 31) & M32) | c, checks="shift S1[4:0]"),
    row("v_and_or_b32", UUU, lambda a, b, c: a & b | c),
    row("v_or3_b32", UUU, lambda a, b, c: a | b | c),
    row("v_xad_u32", UUU, lambda a, b, c: (a ^ b) + c & M32),
    row("v_bfi_b32", UUU, lambda a, b, c: a & b | ~a & c),
    row(
        "v_bfe_u32",
        UUU,
        lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
        checks="offset and width 5 bits",
    ),
    row("v_bfe_i32", UUU, bfe_i32, checks="offset and width 5 bits, sign from the field"),
    row(
        "v_bfm_b32",
        UU,
        lambda a, b: ((1 << (a & 31)) - 1) << (b & 31) & M32,
        checks="width and offset 5 bits",
    ),
    row("v_alignbit_b32", UUU, lambda a, b, c: (a << 32 | b) >> (c & 31) & M32, checks="S1 is the low word"),
    row(
        "v_alignbyte_b32",
        UUU,
        lambda a, b, c: (a << 32 | b) >> (8 * (c & 3)) & M32,
        checks="S1 is the low word",
    ),
    row("v_perm_b32", UUU, perm, checks="all selector values 0..255"),
    row(
        "v_mad_u32_u24",
        UUU,
        lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c & M32,
        checks="24-bit factors",
    ),
    row("v_mad_i32_i24", UUU, lambda a, b, c: sx(a, 24) * sx(b, 24) + c & M32, checks="24-bit factors"),
    row("v_mad_u32_u16", "u16 u16 u32 -> u32", lambda a, b, c: a * b + c & M32, checks="16-bit factors"),
    row(
        "v_mad_i32_i16",
        "u16 u16 u32 -> u32",
        lambda a, b, c: sx(a, 16) * sx(b, 16) + c & M32,
        checks="16-bit factors",
    ),
    row("v_mul_lo_u32", UU, lambda a, b: a * b & M32),
    row("v_mul_hi_u32", UU, lambda a, b: a * b >> 32),
    row("v_mul_hi_i32", UU, i32(lambda a, b: a * b >> 32)),
    row("v_min3_i32", UUU, i32(min)),
    row("v_max3_i32", UUU, i32(max)),
    row("v_med3_i32", UUU, i32(med3)),
    row("v_min3_u32", UUU, min),
    row("v_max3_u32", UUU, max),
    row("v_med3_u32", UUU, med3),
    row("v_add_i32", UU, lambda a, b: a + b & M32),
    row("v_sub_i32", UU, lambda a, b: a - b & M32),
    row("v_bcnt_u32_b32", UU, lambda a, b: a.bit_count() + b & M32, checks="count of S0 plus S1"),
    row("v_sad_u8", UUU, lambda a, b, c: sad(a, b, c, 8)),
    row("v_sad_hi_u8", UUU, lambda a, b, c: (sad(a, b, 0, 8) << 16) + c & M32),
    row("v_sad_u16", UUU, lambda a, b, c: sad(a, b, c, 16)),
    row("v_sad_u32", UUU, lambda a, b, c: sad(a, b, c, 32)),
    row("v_msad_u8", UUU, lambda a, b, c: sad(a, b, c, 8, True)),
    row(
        "v_lerp_u8",
        UUU,
        lambda a, b, c: sum(
            ((a >> i & 255) + (b >> i & 255) + (c >> i & 1) >> 1 & 255) << i for i in range(0, 32, 8)
        ),
    ),
    row("v_lshlrev_b64", "u32 b64 -> b64", lambda a, b: b << (a & 63) & M64, checks="shift S0[5:0]"),
    row("v_lshrrev_b64", "u32 b64 -> b64", lambda a, b: b >> (a & 63), checks="shift S0[5:0]"),
    row("v_ashrrev_i64", "u32 b64 -> b64", lambda a, b: sx(b, 64) >> (a & 63) & M64, checks="shift S0[5:0]"),
    row(
        "v_lshl_add_u64",
        "b64 u32 b64 -> b64",
        lambda a, b, c: (a << (b & 7)) + c & M64,
        checks="shift S1[2:0]",
    ),
    row(
        "v_mad_u64_u32",
        "u32 u32 u64 -> u64 mask",
        lambda a, b, c: (a * b + c & M64, a * b + c >> 64),
        checks="65-bit sum, carry out",
        mask_holes=False,
    ),
    row(
        "v_mad_i64_i32",
        "u32 u32 u64 -> u64 mask",
        lambda a, b, c: (
            sx(a, 32) * sx(b, 32) + sx(c, 64) & M64,
            sx(a, 32) * sx(b, 32) + sx(c, 64) >> 64 & 1,
        ),
        checks="65-bit signed sum, top bit out",
        mask_holes=False,
    ),
    row(
        "v_ashr_pk_i8_i32",
        "u32 u32 u32 -> u16",
        ashr_pack(-128, 127),
        checks="saturates",
        high="any",
        modifiers=False,
    ),
    row(
        "v_ashr_pk_u8_i32",
        "u32 u32 u32 -> u16",
        ashr_pack(0, 255),
        checks="saturates",
        high="any",
        modifiers=False,
    ),
    row("v_cvt_pk_u16_u32", UU, lambda a, b: min(a, 0xFFFF) | min(b, 0xFFFF) << 16, checks="saturates"),
    row(
        "v_cvt_pk_i16_i32",
        UU,
        lambda a, b: (
            saturate(sx(a, 32), -32768, 32767) & 0xFFFF | (saturate(sx(b, 32), -32768, 32767) & 0xFFFF) << 16
        ),
        checks="saturates",
    ),
    row(
        "v_pack_b32_f16",
        "u16 u16 -> u32",
        lambda a, b: a | b << 16,
        checks="halves of two registers",
        modifiers=False,
    ),
]
BITOP3 = [
    row("v_bitop3_b32", UUU, bitop3(t), checks="truth table", suffix=f"bitop3:{t:#x}", count=128)
    for t in (0x01, 0x02, 0x10, 0x80, 0x96, 0xCA, 0xE8, 0x54)
]
BITOP3 += [
    row(
        "v_bitop3_b16",
        "u16 u16 u16 -> u16",
        lambda a, b, c, t=t: bitop3(t)(a, b, c) & 0xFFFF,
        checks="truth table",
        suffix=f"bitop3:{t:#x}",
        count=128,
        high="any",
    )
    for t in (0x01, 0x10, 0x96, 0xCA)
]
DOT: list[VectorCase] = [
    row("v_dot2_i32_i16", UUU, dot(16, True), scalar=False),
    row("v_dot2_u32_u16", UUU, dot(16, False), scalar=False),
    row("v_dot4_i32_i8", UUU, dot(8, True), scalar=False),
    row("v_dot4_u32_u8", UUU, dot(8, False), scalar=False),
    row("v_dot8_i32_i4", UUU, dot(4, True), scalar=False),
    row("v_dot8_u32_u4", UUU, dot(4, False), scalar=False),
    row("v_dot2c_i32_i16", "u32 u32 old:u32 -> u32", dot(16, True), "e32 e64 dpp", scalar=False),
    row("v_dot4c_i32_i8", "u32 u32 old:u32 -> u32", dot(8, True), "e32 e64 dpp", scalar=False),
    row("v_dot8c_i32_i4", "u32 u32 old:u32 -> u32", dot(4, True), "e32 e64 dpp", scalar=False),
]
B16, BB16, BBB16 = "u16 -> u16", "u16 u16 -> u16", "u16 u16 u16 -> u16"
SHORT: list[VectorCase] = [
    row("v_add_u16", BB16, lambda a, b: a + b & 0xFFFF, ALL),
    row("v_sub_u16", BB16, lambda a, b: a - b & 0xFFFF, ALL),
    row("v_subrev_u16", BB16, lambda a, b: b - a & 0xFFFF, ALL),
    row("v_mul_lo_u16", BB16, lambda a, b: a * b & 0xFFFF, ALL),
    row("v_lshlrev_b16", BB16, lambda a, b: b << (a & 15) & 0xFFFF, ALL, "shift S0[3:0]"),
    row("v_lshrrev_b16", BB16, lambda a, b: b >> (a & 15), ALL, "shift S0[3:0]"),
    row("v_ashrrev_i16", BB16, lambda a, b: sx(b, 16) >> (a & 15) & 0xFFFF, ALL, "shift S0[3:0]"),
    row("v_min_u16", BB16, min, ALL),
    row("v_max_u16", BB16, max, ALL),
    row("v_min_i16", BB16, i16(min), ALL),
    row("v_max_i16", BB16, i16(max), ALL),
    row("v_add_i16", BB16, lambda a, b: a + b & 0xFFFF, high="any"),
    row("v_sub_i16", BB16, lambda a, b: a - b & 0xFFFF, high="any"),
    row("v_mad_u16", BBB16, lambda a, b, c: a * b + c & 0xFFFF, high="any"),
    row("v_mad_i16", BBB16, lambda a, b, c: a * b + c & 0xFFFF, high="any"),
    row("v_mad_legacy_u16", BBB16, lambda a, b, c: a * b + c & 0xFFFF, op_sel=False),
    row("v_mad_legacy_i16", BBB16, lambda a, b, c: a * b + c & 0xFFFF, op_sel=False),
    row("v_min3_u16", BBB16, min, high="any"),
    row("v_max3_u16", BBB16, max, high="any"),
    row("v_med3_u16", BBB16, med3, high="any"),
    row("v_min3_i16", BBB16, i16(min), high="any"),
    row("v_max3_i16", BBB16, i16(max), high="any"),
    row("v_med3_i16", BBB16, i16(med3), high="any"),
    row(
        "v_sat_pk_u8_i16",
        "u32 -> u16",
        lambda a: saturate(sx(a, 16), 0, 255) | saturate(sx(a >> 16, 16), 0, 255) << 8,
        ALL,
        high="any",
    ),
]
CASES: list[Case] = [*VOP2, *CARRY, *VOP1, *VOP3, *BITOP3, *DOT, *SHORT]


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_vector_integer(case: VectorCase) -> None:
    check_vector_case(case)
