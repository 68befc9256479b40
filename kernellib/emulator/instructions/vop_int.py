# SPDX-License-Identifier: Apache-2.0
"""Vector integer instructions (VOP1, VOP2, VOP3). Semantics: CDNA4 ISA 12.7, 12.8, 12.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import dot, integer, smallfloat
from kernellib.emulator.instructions.registry import define_vector, vector

Array = np.ndarray[Any, Any]
_U31, _I31 = np.uint32(31), np.int32(31)


# ----------------------------------------------------------------------------------------- 32-bit add,
# subtract
def _clamping(function: Callable[[Array, Array], Array], low: int, high: int) -> Callable[..., Array]:
    """An integer operation whose clamp bit saturates it (CDNA4 ISA 6.5)."""

    def wrapped(a: Array, b: Array, *, clamp: bool) -> Array:
        if clamp:
            exact = function(a.astype(np.int64), b.astype(np.int64))
            return np.clip(exact, low, high).astype(a.dtype)
        return function(a, b)

    return wrapped


def _plus(a: Array, b: Array) -> Array:
    return a + b


def _minus(a: Array, b: Array) -> Array:
    return a - b


def _minus_reversed(a: Array, b: Array) -> Array:
    return b - a


for _name, _function, _plain in (
    ("add", _plus, np.add), ("sub", _minus, np.subtract), ("subrev", _minus_reversed, None),
):  # fmt: skip
    for _type, _low, _high in (
        ("u32", 0, 0xFFFFFFFF), ("u16", 0, 0xFFFF), ("i32", -(1 << 31), (1 << 31) - 1),
        ("i16", -(1 << 15), (1 << 15) - 1),
    ):  # fmt: skip
        if _name != "subrev" or _type.startswith("u"):
            define_vector(
                f"v_{_name}_{_type}", f"{_type}, {_type} -> {_type}", _clamping(_function, _low, _high),
                unclamped=_plain,
            )  # fmt: skip


@vector("v_sub_co_u32", "u32, u32 -> u32, mask")
def v_sub_co_u32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S0 - S1, borrow per lane."""
    return a - b, b > a


@vector("v_subrev_co_u32", "u32, u32 -> u32, mask")
def v_subrev_co_u32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S1 - S0, borrow per lane."""
    return b - a, a > b


@vector("v_addc_co_u32", "u32, u32, mask -> u32, mask")
def v_addc_co_u32(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """D = S0 + S1 + carry in, carry out per lane."""
    total = a + b + carry.astype(np.uint32)
    return total, np.where(carry, total <= b, total < b)


@vector("v_subb_co_u32", "u32, u32, mask -> u32, mask")
def v_subb_co_u32(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    """D = S0 - S1 - borrow in, borrow out per lane."""
    return a - b - borrow.astype(np.uint32), np.where(borrow, b >= a, b > a)


@vector("v_subbrev_co_u32", "u32, u32, mask -> u32, mask")
def v_subbrev_co_u32(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    """D = S1 - S0 - borrow in, borrow out per lane."""
    result: tuple[Array, Array] = v_subb_co_u32(b, a, borrow)
    return result


# ------------------------------------------------------------------------------------------------
# multiplication
define_vector("v_mul_lo_u32", "u32, u32 -> u32", np.multiply)
define_vector("v_mul_hi_u32", "u32, u32 -> u32", integer.mul_hi_u32)
define_vector("v_mul_hi_i32", "i32, i32 -> i32", integer.mul_hi_i32)
define_vector("v_mul_u32_u24", "u32, u32 -> u32", integer.mul_u24)
define_vector("v_mul_i32_i24", "u32, u32 -> i32", integer.mul_i24)
define_vector("v_mul_hi_u32_u24", "u32, u32 -> u32", integer.mul_hi_u24)
define_vector("v_mul_hi_i32_i24", "u32, u32 -> i32", integer.mul_hi_i24)
define_vector("v_mad_u32_u24", "u32, u32, u32 -> u32", lambda a, b, c: integer.mul_u24(a, b) + c)
define_vector("v_mad_i32_i24", "u32, u32, i32 -> i32", lambda a, b, c: integer.mul_i24(a, b) + c)
define_vector("v_mul_lo_u16", "u16, u16 -> u16", np.multiply)
define_vector("v_mad_u64_u32", "u32, u32, u64 -> u64, mask", integer.mad_u64_u32)
define_vector("v_mad_i64_i32", "i32, i32, i64 -> i64, mask", integer.mad_i64_i32)
# The gfx9 forms keep the upper half of the result's register, the legacy forms clear it.
for _type in ("u16", "i16"):
    _three = f"{_type}, {_type}, {_type} -> {_type}"
    define_vector(f"v_mad_{_type}", _three, lambda a, b, c: a * b + c, high16="preserve")
    define_vector(f"v_mad_legacy_{_type}", _three, lambda a, b, c: a * b + c)
define_vector("v_mad_u32_u16", "u16, u16, u32 -> u32", lambda a, b, c: a.astype(np.uint32) * b + c)
define_vector("v_mad_i32_i16", "i16, i16, i32 -> i32", lambda a, b, c: a.astype(np.int32) * b + c)

# ------------------------------------------------------------------------------------------------ minimum,
# maximum
for _type in ("i32", "u32", "i16", "u16"):
    define_vector(f"v_min_{_type}", f"{_type}, {_type} -> {_type}", np.minimum)
    define_vector(f"v_max_{_type}", f"{_type}, {_type} -> {_type}", np.maximum)
    _three = f"{_type}, {_type}, {_type} -> {_type}"
    define_vector(f"v_min3_{_type}", _three, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    define_vector(f"v_max3_{_type}", _three, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    define_vector(f"v_med3_{_type}", _three, integer.median3)

# -----------------------------------------------------------------------------------------------------------
# shifts
define_vector("v_lshrrev_b32", "u32, b32 -> b32", lambda s, a, out=None: np.right_shift(a, s & _U31, out=out))
define_vector("v_ashrrev_i32", "i32, i32 -> i32", lambda s, a, out=None: np.right_shift(a, s & _I31, out=out))
define_vector("v_lshlrev_b64", "u32, b64 -> b64", lambda s, a: a << (s & np.uint32(63)).astype(np.uint64))
define_vector("v_lshrrev_b64", "u32, b64 -> b64", lambda s, a: a >> (s & np.uint32(63)).astype(np.uint64))
define_vector("v_ashrrev_i64", "u32, i64 -> i64", lambda s, a: a >> (s & np.uint32(63)).astype(np.int64))
define_vector("v_lshlrev_b16", "u16, b16 -> b16", lambda s, a: a << (s & np.uint16(15)))
define_vector("v_lshrrev_b16", "u16, b16 -> b16", lambda s, a: a >> (s & np.uint16(15)))
define_vector("v_ashrrev_i16", "u16, i16 -> i16", lambda s, a: a >> (s & np.uint16(15)).astype(np.int16))
define_vector("v_alignbit_b32", "b32, b32, b32 -> b32", integer.alignbit)
define_vector("v_alignbyte_b32", "b32, b32, b32 -> b32", integer.alignbyte)

# ------------------------------------------------------------------------------------------------ logic,
# fused pairs
define_vector("v_not_b32", "b32 -> b32", np.bitwise_not)
define_vector("v_xnor_b32", "b32, b32 -> b32", lambda a, b, out=None: np.bitwise_not(a ^ b, out=out))
define_vector(
    "v_lshl_add_u32", "u32, u32, u32 -> u32", lambda a, s, c, out=None: np.add(a << (s & _U31), c, out=out)
)
define_vector(
    "v_add_lshl_u32",
    "u32, u32, u32 -> u32",
    lambda a, b, s, out=None: np.left_shift(a + b, s & _U31, out=out),
)
define_vector("v_add3_u32", "u32, u32, u32 -> u32", lambda a, b, c, out=None: np.add(a + b, c, out=out))
define_vector("v_xad_u32", "u32, u32, u32 -> u32", lambda a, b, c, out=None: np.add(a ^ b, c, out=out))
define_vector(
    "v_lshl_or_b32",
    "b32, u32, b32 -> b32",
    lambda a, s, c, out=None: np.bitwise_or(a << (s & _U31), c, out=out),
)
define_vector(
    "v_and_or_b32", "b32, b32, b32 -> b32", lambda a, b, c, out=None: np.bitwise_or(a & b, c, out=out)
)
define_vector("v_or3_b32", "b32, b32, b32 -> b32", lambda a, b, c, out=None: np.bitwise_or(a | b, c, out=out))
define_vector("v_lshl_add_u64", "u64, u32, u64 -> u64", integer.lshl_add_u64)


@vector("v_bitop3_b32", "b32, b32, b32 -> b32")
@vector("v_bitop3_b16", "b16, b16, b16 -> b16")
def v_bitop3(a: Array, b: Array, c: Array, *, bitop3: int) -> Array:
    """D[i] = truth table bit {S0[i], S1[i], S2[i]}."""
    return integer.bitop3(a, b, c, bitop3)


# ------------------------------------------------------------------------------------------------------ bit
# fields
define_vector("v_bfe_u32", "u32, u32, u32 -> u32", integer.bfe_u32)
define_vector("v_bfe_i32", "i32, u32, u32 -> i32", integer.bfe_i32)
define_vector("v_bfi_b32", "b32, b32, b32 -> b32", integer.bfi_b32)
define_vector("v_bfm_b32", "u32, u32 -> b32", integer.bfm_b32)
define_vector("v_bfrev_b32", "b32 -> b32", integer.reverse_bits)
define_vector("v_bcnt_u32_b32", "b32, u32 -> u32", integer.bcnt)
define_vector("v_mbcnt_lo_u32_b32", "b32, u32 -> u32", lambda m, c: integer.mbcnt(m, c, high=False))
define_vector("v_mbcnt_hi_u32_b32", "b32, u32 -> u32", lambda m, c: integer.mbcnt(m, c, high=True))
define_vector("v_ffbh_u32", "u32 -> u32", integer.find_first_high_u32)
define_vector("v_ffbh_i32", "i32 -> u32", integer.find_first_high_i32)
define_vector("v_ffbl_b32", "b32 -> u32", integer.find_first_low)
define_vector("v_perm_b32", "b32, b32, b32 -> b32", integer.perm_b32)
define_vector("v_prng_b32", "b32 -> b32", smallfloat.next_random)


@vector("v_pack_b32_f16", "f16, f16 -> b32")
def v_pack_b32_f16(low: Array, high: Array) -> Array:
    """D = {S1, S0} (denormals pass unchanged)."""
    result: Array = low.view(np.uint16).astype(np.uint32) | (
        high.view(np.uint16).astype(np.uint32) << np.uint32(16)
    )
    return result


# --------------------------------------------------------------------------------- sums of absolute
# differences
define_vector("v_sad_u8", "u32, u32, u32 -> u32", integer.sad_u8)
define_vector("v_msad_u8", "u32, u32, u32 -> u32", lambda a, b, c: integer.sad_u8(a, b, c, masked=True))
define_vector("v_sad_u16", "u32, u32, u32 -> u32", integer.sad_u16)
define_vector("v_sad_u32", "u32, u32, u32 -> u32", lambda a, b, c: integer.absdiff_u(a, b) + c)
define_vector("v_lerp_u8", "u32, u32, u32 -> u32", integer.lerp_u8)


@vector("v_sad_hi_u8", "u32, u32, u32 -> u32")
def v_sad_hi_u8(a: Array, b: Array, c: Array) -> Array:
    """D = (sad_u8(S0, S1) << 16) + S2."""
    result: Array = (integer.sad_u8(a, b, np.zeros_like(c)) << np.uint32(16)) + c
    return result


# ----------------------------------------------------------------------------------------------------
# saturating
def _saturating_shift(low: int, high: int) -> Callable[[Array, Array, Array, Array], Array]:
    def function(a: Array, b: Array, shift: Array, old: Array) -> Array:
        first, second = (
            np.clip(v >> (shift & _U31).astype(np.int32), low, high).astype(np.uint32) & np.uint32(0xFF)
            for v in (a, b)
        )
        result: Array = (old & np.uint32(0xFFFF0000)) | first | (second << np.uint32(8))
        return result

    return function


# Only bits 15:0 are named as written (CDNA4 ISA, V_ASHR_PK_I8_I32); bits 31:16 are assumed preserved.
define_vector("v_ashr_pk_i8_i32", "i32, i32, u32, old -> b32", _saturating_shift(-128, 127))
define_vector("v_ashr_pk_u8_i32", "i32, i32, u32, old -> b32", _saturating_shift(0, 255))


@vector("v_sat_pk_u8_i16", "b32 -> b16")
def v_sat_pk_u8_i16(a: Array) -> Array:
    """Two int16 clamped to 0..255, packed into 16 bits."""
    low = np.clip(integer.sign_extend(a, 16), 0, 255).astype(np.uint16)
    high = np.clip(a.view(np.int32) >> np.int32(16), 0, 255).astype(np.uint16)
    result: Array = low | (high << np.uint16(8))
    return result


# -------------------------------------------------------------------------------------------------- dot
# products
def _integer_dot(bits: int, signed: bool) -> Callable[..., Array]:
    def function(a: Array, b: Array, c: Array, *, clamp: bool) -> Array:
        return dot.integer_dot(a, b, c, bits=bits, signed=signed, clamp=clamp)

    return function


for _count, _bits in ((2, 16), (4, 8), (8, 4)):
    for _letter, _signed in (("i", True), ("u", False)):
        _type = f"{_letter}32_{_letter}{_bits}"
        define_vector(f"v_dot{_count}_{_type}", "b32, b32, b32 -> b32", _integer_dot(_bits, _signed))
    define_vector(
        f"v_dot{_count}c_i32_i{_bits}", "b32, b32, old -> b32",
        lambda a, b, c, bits=_bits: dot.integer_dot(a, b, c, bits=bits, signed=True),
    )  # fmt: skip
