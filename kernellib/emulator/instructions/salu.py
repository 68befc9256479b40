# SPDX-License-Identifier: Apache-2.0
"""Scalar ALU: SOP1, SOP2, SOPC and SOPK. Semantics: CDNA4 ISA 12.1 to 12.4 (pseudo code of each
instruction)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import integer
from kernellib.emulator.instructions.registry import define_scalar, scalar

Array = np.ndarray[Any, Any]

# ---------------------------------------------------------------------------------------------- bitwise logic
_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def _with_nonzero(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """The result, and SCC = result != 0."""

    def wrapped(*args: Array) -> tuple[Array, Array]:
        result = function(*args)
        return result, result != 0

    return wrapped


def _saveexec(function: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, Array, Array]]:
    """D = EXEC, EXEC = function(S0, EXEC), SCC = EXEC != 0."""

    def wrapped(mask: Array, exec_bits: Array) -> tuple[Array, Array, Array]:
        new = function(mask, exec_bits)
        return exec_bits.copy(), new, new != 0

    return wrapped


def _wrexec(function: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, Array, Array]]:
    """D = EXEC = function(S0, EXEC), SCC = EXEC != 0."""

    def wrapped(mask: Array, exec_bits: Array) -> tuple[Array, Array, Array]:
        new = function(mask, exec_bits)
        return new, new, new != 0

    return wrapped


for _name, _function in _LOGIC.items():
    for _type in ("b32", "b64"):
        define_scalar(f"s_{_name}_{_type}", f"{_type}, {_type} -> {_type}, scc", _with_nonzero(_function))
    if _name != "and":  # s_and_saveexec_b64 stands in moves.py
        define_scalar(f"s_{_name}_saveexec_b64", "b64, exec -> b64, exec, scc", _saveexec(_function))
_MASK_FIRST = {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
for _name, _function in _MASK_FIRST.items():
    define_scalar(f"s_{_name}_saveexec_b64", "b64, exec -> b64, exec, scc", _saveexec(_function))
define_scalar("s_andn1_wrexec_b64", "b64, exec -> b64, exec, scc", _wrexec(_MASK_FIRST["andn1"]))
define_scalar("s_andn2_wrexec_b64", "b64, exec -> b64, exec, scc", _wrexec(_LOGIC["andn2"]))


# --------------------------------------------------------------------------------------------------- moves
define_scalar("s_mov_b32", "b32 -> b32", np.positive)
define_scalar("s_mov_b64", "b64 -> b64", np.positive)
define_scalar("s_movk_i32", "simm16 -> i32", np.positive)
for _type in ("b32", "b64"):
    define_scalar(
        f"s_cmov_{_type}", f"{_type}, old, scc -> {_type}", lambda new, old, scc: np.where(scc, new, old)
    )
    define_scalar(
        f"s_cselect_{_type}", f"{_type}, {_type}, scc -> {_type}", lambda a, b, scc: np.where(scc, a, b)
    )
    define_scalar(f"s_not_{_type}", f"{_type} -> {_type}, scc", _with_nonzero(np.bitwise_not))
    define_scalar(f"s_brev_{_type}", f"{_type} -> {_type}", integer.reverse_bits)
define_scalar("s_cmovk_i32", "simm16, old, scc -> i32", lambda new, old, scc: np.where(scc, new, old))
define_scalar("s_sext_i32_i8", "b32 -> i32", lambda a: integer.sign_extend(a, 8))
define_scalar("s_sext_i32_i16", "b32 -> i32", lambda a: integer.sign_extend(a, 16))


# ------------------------------------------------------------------------------------------------ arithmetic
@scalar("s_sub_u32", "u32, u32 -> u32, scc")
def s_sub_u32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S0 - S1, SCC = borrow."""
    return a - b, b > a


@scalar("s_add_i32", "i32, i32 -> i32, scc")
def s_add_i32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S0 + S1, SCC = signed overflow."""
    total = a + b
    return total, ((a ^ total) & (b ^ total)) < 0


@scalar("s_sub_i32", "i32, i32 -> i32, scc")
def s_sub_i32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S0 - S1, SCC = signed overflow."""
    total = a - b
    return total, ((a ^ b) & (a ^ total)) < 0


@scalar("s_addk_i32", "old, simm16 -> i32, scc")
def s_addk_i32(old: Array, immediate: Array) -> tuple[Array, Array]:
    """D = D + simm16, SCC = signed overflow."""
    result: tuple[Array, Array] = s_add_i32(old, immediate)
    return result


@scalar("s_addc_u32", "u32, u32, scc -> u32, scc")
def s_addc_u32(a: Array, b: Array, scc: Array) -> tuple[Array, Array]:
    """D = S0 + S1 + SCC, SCC = carry."""
    total = a.astype(np.uint64) + b + scc
    return total.astype(np.uint32), total > 0xFFFFFFFF


@scalar("s_subb_u32", "u32, u32, scc -> u32, scc")
def s_subb_u32(a: Array, b: Array, scc: Array) -> tuple[Array, Array]:
    """D = S0 - S1 - SCC, SCC = borrow."""
    return a - b - scc.astype(np.uint32), b.astype(np.uint64) + scc > a


def _lshl_add(shift: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    def function(a: Array, b: Array) -> tuple[Array, Array]:
        total = (a.astype(np.uint64) << np.uint64(shift)) + b
        return total.astype(np.uint32), total > 0xFFFFFFFF

    return function


for _shift in (1, 2, 3, 4):
    define_scalar(f"s_lshl{_shift}_add_u32", "u32, u32 -> u32, scc", _lshl_add(_shift))
define_scalar("s_mul_i32", "u32, u32 -> u32", np.multiply)
define_scalar("s_mulk_i32", "old, simm16 -> i32", np.multiply)
define_scalar("s_mul_hi_u32", "u32, u32 -> u32", integer.mul_hi_u32)
define_scalar("s_mul_hi_i32", "i32, i32 -> i32", integer.mul_hi_i32)
for _type in ("i32", "u32"):
    define_scalar(
        f"s_min_{_type}", f"{_type}, {_type} -> {_type}, scc", lambda a, b: (np.minimum(a, b), a < b)
    )
    define_scalar(
        f"s_max_{_type}", f"{_type}, {_type} -> {_type}, scc", lambda a, b: (np.maximum(a, b), a >= b)
    )
define_scalar("s_abs_i32", "i32 -> i32, scc", _with_nonzero(np.abs))
define_scalar("s_absdiff_i32", "i32, i32 -> i32, scc", _with_nonzero(lambda a, b: np.abs(a - b)))

# ---------------------------------------------------------------------------------------------------- shifts
define_scalar("s_lshl_b32", "b32, u32 -> b32, scc", _with_nonzero(lambda a, s: a << (s & np.uint32(31))))
define_scalar("s_lshr_b32", "b32, u32 -> b32, scc", _with_nonzero(lambda a, s: a >> (s & np.uint32(31))))
define_scalar("s_ashr_i32", "i32, i32 -> i32, scc", _with_nonzero(lambda a, s: a >> (s & np.int32(31))))
define_scalar(
    "s_lshl_b64",
    "b64, u32 -> b64, scc",
    _with_nonzero(lambda a, s: a << (s & np.uint32(63)).astype(np.uint64)),
)
define_scalar(
    "s_lshr_b64",
    "b64, u32 -> b64, scc",
    _with_nonzero(lambda a, s: a >> (s & np.uint32(63)).astype(np.uint64)),
)
define_scalar(
    "s_ashr_i64",
    "i64, u32 -> i64, scc",
    _with_nonzero(lambda a, s: a >> (s & np.uint32(63)).astype(np.int64)),
)

# -------------------------------------------------------------------------------------------------- bit
# fields
define_scalar("s_bfm_b32", "u32, u32 -> b32", integer.bfm_b32)


@scalar("s_bfm_b64", "u32, u32 -> b64")
def s_bfm_b64(width: Array, offset: Array) -> Array:
    """D = S0[5:0] ones from bit S1[5:0]."""
    ones = (np.uint64(1) << (width & np.uint32(63)).astype(np.uint64)) - np.uint64(1)
    result: Array = ones << (offset & np.uint32(63)).astype(np.uint64)
    return result


def _field(value: Array, control: Array, bits: int) -> tuple[Array, Array]:
    """(field, width) as uint64: `control` has the offset in its low bits and the width in 22:16."""
    offset = (control & np.uint32(bits - 1)).astype(np.uint64)
    width = np.minimum((control >> np.uint32(16)) & np.uint32(127), np.uint32(bits)).astype(np.uint64)
    # A shift by 64 is not defined: shift twice.
    ones = ~(~np.uint64(0) << (width >> np.uint64(1)) << (width - (width >> np.uint64(1))))
    return (value >> offset) & ones, width


def _extend(field: Array, width: Array) -> Array:
    """Sign-extend uint64 fields of the given widths (0 gives 0)."""
    top = np.where(width > 0, np.uint64(1) << (np.maximum(width, 1) - 1).astype(np.uint64), np.uint64(0))
    return (field ^ top) - top


@scalar("s_bfe_u32", "u32, u32 -> u32, scc")
def s_bfe_u32(value: Array, control: Array) -> tuple[Array, Array]:
    """D = S1[22:16] bits of S0 from bit S1[4:0]."""
    field = _field(value.astype(np.uint64), control, 32)[0].astype(np.uint32)
    return field, field != 0


@scalar("s_bfe_i32", "i32, u32 -> i32, scc")
def s_bfe_i32(value: Array, control: Array) -> tuple[Array, Array]:
    """The same, sign-extended from the field's top bit."""
    field = (
        _extend(*_field(value.astype(np.int64).view(np.uint64), control, 32)).astype(np.uint32).view(np.int32)
    )
    return field, field != 0


@scalar("s_bfe_u64", "u64, u32 -> u64, scc")
def s_bfe_u64(value: Array, control: Array) -> tuple[Array, Array]:
    """D = S1[22:16] bits of S0 from bit S1[5:0]."""
    field = _field(value, control, 64)[0]
    return field, field != 0


@scalar("s_bfe_i64", "i64, u32 -> i64, scc")
def s_bfe_i64(value: Array, control: Array) -> tuple[Array, Array]:
    """The same, sign-extended from the field's top bit; bits above the value repeat its sign."""
    offset = (control & np.uint32(63)).astype(np.int64)
    field, width = _field((value >> offset).view(np.uint64), control & ~np.uint32(63), 64)
    result = _extend(field, width).view(np.int64)
    return result, result != 0


for _value, _verb in ((0, "bitset0"), (1, "bitset1")):
    for _type, _mask in (("b32", 31), ("b64", 63)):

        def _bitset(position: Array, old: Array, set_bit: int = _value, mask: int = _mask) -> Array:
            bit = old.dtype.type(1) << (position & np.uint32(mask)).astype(old.dtype)
            result: Array = old | bit if set_bit else old & ~bit
            return result

        define_scalar(f"s_{_verb}_{_type}", f"u32, old -> {_type}", _bitset)
    for _type, _mask in (("b32", 31), ("b64", 63)):

        def _bitcmp(value: Array, position: Array, wanted: int = _value, mask: int = _mask) -> Array:
            result: Array = (
                (value >> (position & np.uint32(mask)).astype(value.dtype)) & value.dtype.type(1)
            ) == wanted
            return result

        define_scalar(f"s_bitcmp{_value}_{_type}", f"{_type}, u32 -> scc", _bitcmp)

# ----------------------------------------------------------------------------------------- counting and
# search
for _type, _bits in (("b32", 32), ("b64", 64)):
    define_scalar(f"s_bcnt1_i32_{_type}", f"{_type} -> u32, scc", _with_nonzero(integer.count_ones))
    define_scalar(
        f"s_bcnt0_i32_{_type}", f"{_type} -> u32, scc", _with_nonzero(lambda a: integer.count_ones(~a))
    )
    define_scalar(f"s_ff1_i32_{_type}", f"{_type} -> u32", integer.find_first_low)
    define_scalar(f"s_ff0_i32_{_type}", f"{_type} -> u32", lambda a: integer.find_first_low(~a))


def _leading_zeros64(a: Array) -> Array:
    high, low = (a >> np.uint64(32)).astype(np.uint32), a.astype(np.uint32)
    in_low = integer.find_first_high_u32(low)
    in_low = np.where(low == 0, in_low, in_low + np.uint32(32))
    return np.where(high != 0, integer.find_first_high_u32(high), in_low)


define_scalar("s_flbit_i32_b32", "b32 -> u32", integer.find_first_high_u32)
define_scalar("s_flbit_i32_b64", "b64 -> u32", _leading_zeros64)
define_scalar("s_flbit_i32", "i32 -> u32", integer.find_first_high_i32)
define_scalar(
    "s_flbit_i32_i64", "i64 -> u32", lambda a: _leading_zeros64(np.where(a < 0, ~a, a).view(np.uint64))
)


def _any_in_quads(a: Array, bits: int) -> Array:
    """[n] to [n, bits / 4]: whether any of four neighbouring bits is set."""
    quads = (a[..., None] >> np.arange(0, bits, 4).astype(a.dtype)) & a.dtype.type(15)
    return np.asarray(quads != 0)


@scalar("s_quadmask_b32", "b32 -> b32, scc")
@scalar("s_quadmask_b64", "b64 -> b64, scc")
def s_quadmask(a: Array) -> tuple[Array, Array]:
    """Bit i of D: any of bits 4 i .. 4 i + 3 of S0."""
    bits = a.dtype.itemsize * 8
    weights = a.dtype.type(1) << np.arange(bits // 4).astype(a.dtype)
    result = (_any_in_quads(a, bits) * weights).sum(axis=-1).astype(a.dtype)
    return result, result != 0


@scalar("s_wqm_b32", "b32 -> b32, scc")
@scalar("s_wqm_b64", "b64 -> b64, scc")
def s_wqm(a: Array) -> tuple[Array, Array]:
    """Every group of four bits with any bit set becomes four ones."""
    bits = a.dtype.itemsize * 8
    weights = a.dtype.type(15) << np.arange(0, bits, 4).astype(a.dtype)
    result = (_any_in_quads(a, bits) * weights).sum(axis=-1).astype(a.dtype)
    return result, result != 0


@scalar("s_bitreplicate_b64_b32", "b32 -> b64")
def s_bitreplicate_b64_b32(a: Array) -> Array:
    """Every bit twice."""
    result = a.astype(np.uint64)
    for shift, mask in (
        (16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F),
        (2, 0x3333333333333333), (1, 0x5555555555555555),
    ):  # fmt: skip
        result = (result | (result << np.uint64(shift))) & np.uint64(mask)
    return result | (result << np.uint64(1))


# --------------------------------------------------------------------------------------------------- packing
_LOW, _HIGH = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
define_scalar("s_pack_ll_b32_b16", "b32, b32 -> b32", lambda a, b: (a & _LOW) | (b << np.uint32(16)))
define_scalar("s_pack_lh_b32_b16", "b32, b32 -> b32", lambda a, b: (a & _LOW) | (b & _HIGH))
define_scalar("s_pack_hh_b32_b16", "b32, b32 -> b32", lambda a, b: (a >> np.uint32(16)) | (b & _HIGH))

# ------------------------------------------------------------------------------------------------ comparisons
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
for _name, _function in _COMPARE.items():
    for _type in ("i32", "u32"):
        define_scalar(f"s_cmp_{_name}_{_type}", f"{_type}, {_type} -> scc", _function)
        define_scalar(
            f"s_cmpk_{_name}_{_type}", f"{_type}, {_type[0]}imm16 -> scc".replace("iimm", "simm"), _function
        )
    if _name in ("eq", "lg"):
        define_scalar(f"s_cmp_{_name}_u64", "u64, u64 -> scc", _function)
