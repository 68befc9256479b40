# SPDX-License-Identifier: Apache-2.0
"""Integer instructions beyond what numpy's operators do by themselves.

Unless said otherwise operands and results are uint32 arrays. Source of every formula: the pseudo code of the
instruction of that name in CDNA4 ISA 12.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernellib.emulator.arith.formats import Array

_U = np.uint32
_MASK24 = np.uint32(0xFFFFFF)


def _i32(x: Array) -> Array:
    return x.view(np.int32) if isinstance(x, np.ndarray) else x


def sign_extend(x: Array, bits: int) -> Array:
    """The low `bits` bits of a uint32 as int32."""
    shift = np.int32(32 - bits)
    return np.asarray((x.astype(np.uint32) << _U(32 - bits)).view(np.int32) >> shift)


def mul_u24(a: Array, b: Array) -> Array:
    """v_mul_u32_u24: low 32 bits of the product of the low 24 bits."""
    return (a & _MASK24) * (b & _MASK24)


def mul_i24(a: Array, b: Array) -> Array:
    """v_mul_i32_i24: low 32 bits (int32) of the product of the low 24 bits, signed."""
    return sign_extend(a, 24) * sign_extend(b, 24)


def mul_hi_u24(a: Array, b: Array) -> Array:
    """v_mul_hi_u32_u24: bits 63:32 of the 24-bit product."""
    wide = (a & _MASK24).astype(np.uint64) * (b & _MASK24).astype(np.uint64)
    return np.asarray((wide >> np.uint64(32)).astype(np.uint32))


def mul_hi_i24(a: Array, b: Array) -> Array:
    """v_mul_hi_i32_i24: bits 63:32 (int32) of the signed 24-bit product."""
    wide = sign_extend(a, 24).astype(np.int64) * sign_extend(b, 24).astype(np.int64)
    return np.asarray((wide >> 32).astype(np.int32))


def mul_hi_u32(a: Array, b: Array) -> Array:
    """v_mul_hi_u32, s_mul_hi_u32: bits 63:32 of the product."""
    return np.asarray(((a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32))


def mul_hi_i32(a: Array, b: Array) -> Array:
    """v_mul_hi_i32, s_mul_hi_i32 on int32: bits 63:32 of the signed product."""
    return np.asarray(((a.astype(np.int64) * b.astype(np.int64)) >> 32).astype(np.int32))


def mad_u64_u32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """v_mad_u64_u32: a * b + c (c uint64); the second result is the carry out of 64 bits."""
    product = a.astype(np.uint64) * b.astype(np.uint64)
    total = product + c
    return total, total < product


def mad_i64_i32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """v_mad_i64_i32: a * b + c (int32, int32, int64); second result: bit 64 of the 65-bit signed sum."""
    product = a.astype(np.int64) * b.astype(np.int64)
    total = product + c
    overflow = ((product ^ total) & (c ^ total)) < 0
    return total, (total < 0) ^ overflow


def bfe_u32(x: Array, offset: Array, width: Array) -> Array:
    """v_bfe_u32: `width`[4:0] bits from bit `offset`[4:0] (width 0 gives 0)."""
    mask = (_U(1) << (width & _U(31))) - _U(1)
    return np.asarray((x >> (offset & _U(31))) & mask)


def bfe_i32(x: Array, offset: Array, width: Array) -> Array:
    """v_bfe_i32: the same field of an int32, sign-extended from its top bit; int32."""
    count = (width & _U(31)).astype(np.uint32)
    field = (_i32(x) >> (offset & _U(31)).astype(np.int32)).view(np.uint32) & ((_U(1) << count) - _U(1))
    top = np.where(count > 0, (_U(1) << count) >> _U(1), _U(0))
    return np.asarray(((field ^ top) - top).view(np.int32))


def bfi_b32(mask: Array, when_set: Array, when_clear: Array) -> Array:
    """v_bfi_b32: (mask & when_set) | (~mask & when_clear)."""
    return (mask & when_set) | (~mask & when_clear)


def bfm_b32(width: Array, offset: Array) -> Array:
    """v_bfm_b32, s_bfm_b32: `width`[4:0] ones from bit `offset`[4:0]."""
    return np.asarray(((_U(1) << (width & _U(31))) - _U(1)) << (offset & _U(31)))


def bitop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """v_bitop3_b32/b16: bit i of the result is bit {a[i], b[i], c[i]} of the 8-bit truth table.

    >>> hex(int(bitop3(np.uint32(0xF0), np.uint32(0xCC), np.uint32(0xAA), 0xCA)))
    '0xca'
    """
    # one operation of a and b where c is 0, one where it is 1, and c to choose
    clear = sum((table >> 2 * i & 1) << i for i in range(4))
    set_ = sum((table >> 2 * i + 1 & 1) << i for i in range(4))
    if clear == set_:
        result = _bitop2(a, b, clear)
    elif clear == set_ ^ 15:
        result = _bitop2(a, b, clear) ^ c
    elif clear == 0:
        result = _bitop2(a, b, set_) & c
    elif set_ == 0:
        result = _bitop2(a, b, clear) & ~c
    elif clear == 15:
        result = _bitop2(a, b, set_) | ~c
    elif set_ == 15:
        result = _bitop2(a, b, clear) | c
    else:
        result = _bitop2(a, b, clear) ^ (_bitop2(a, b, clear ^ set_) & c)
    shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))
    return result if np.shape(result) == shape else np.broadcast_to(result, shape)


def _bitop2(a: Array, b: Array, table: int) -> Array:
    """Bit i of the result is bit {a[i], b[i]} of the 4-bit truth table."""
    return _BITOP2[table](a, b)


_BITOP2: tuple[Callable[[Array, Array], Array], ...] = (
    lambda a, b: np.zeros_like(a), lambda a, b: ~(a | b), lambda a, b: ~a & b, lambda a, b: ~a,
    lambda a, b: a & ~b, lambda a, b: ~b, lambda a, b: a ^ b, lambda a, b: ~(a & b),
    lambda a, b: a & b, lambda a, b: ~(a ^ b), lambda a, b: b, lambda a, b: ~a | b,
    lambda a, b: a, lambda a, b: a | ~b, lambda a, b: a | b, lambda a, b: ~np.zeros_like(a),
)  # fmt: skip


def perm_b32(high: Array, low: Array, selector: Array) -> Array:
    """v_perm_b32: each byte of `selector` picks a byte of the 8-byte value {S0 = high, S1 = low}.

    0..7: that byte (0 is low's first); 8..11: 0xff if byte 1, 3, 5, 7 has its top bit set, else 0; 12: 0x00;
    13 and above: 0xff.
    """
    high, low, selector = np.broadcast_arrays(high, low, selector)
    data = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    result = np.zeros(data.shape, np.uint32)
    for byte in range(4):
        sel = (selector >> _U(8 * byte)) & _U(0xFF)
        plain = (data >> (np.uint64(8) * (sel & _U(7)).astype(np.uint64))) & np.uint64(0xFF)
        sign_byte = np.uint64(2) * (sel & _U(3)).astype(np.uint64) + np.uint64(1)
        sign = (data >> (np.uint64(8) * sign_byte + np.uint64(7))) & np.uint64(1)
        value = np.where(sel >= 8, sign * np.uint64(0xFF), plain)
        value = np.where(sel == 12, np.uint64(0), np.where(sel >= 13, np.uint64(0xFF), value))
        result |= value.astype(np.uint32) << _U(8 * byte)
    return result


def alignbit(high: Array, low: Array, shift: Array) -> Array:
    """v_alignbit_b32: bits of {high, low} from bit `shift`[4:0]."""
    wide = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    return np.asarray((wide >> (shift & _U(31)).astype(np.uint64)).astype(np.uint32))


def alignbyte(high: Array, low: Array, shift: Array) -> Array:
    """v_alignbyte_b32: bytes of {high, low} from byte `shift`[1:0]."""
    return alignbit(high, low, (shift & _U(3)) * _U(8))


def lshl_add_u64(a: Array, shift: Array, c: Array) -> Array:
    """v_lshl_add_u64: (a << shift[2:0]) + c in 64 bits. Shifts above 4 are not published as legal; masked."""
    return (a << (shift & _U(7)).astype(np.uint64)) + c


def count_ones(x: Array) -> Array:
    """Number of set bits of uint32 or uint64 values, as uint32."""
    return np.asarray(np.bitwise_count(x).astype(np.uint32))


def bcnt(x: Array, addend: Array) -> Array:
    """v_bcnt_u32_b32: set bits of x plus `addend`."""
    return count_ones(x) + addend


def mbcnt(mask: Array, addend: Array, high: bool) -> Array:
    """v_mbcnt_lo/hi_u32_b32: set bits of `mask` below the lane's own bit, plus `addend`.

    Args:
        mask: uint32 [..., 1] or [..., 64]: lanes 0..31 (lo) or 32..63 (hi).
    """
    lane = np.arange(64, dtype=np.int64)
    below = (np.int64(1) << np.clip(lane - (32 if high else 0), 0, 32)) - 1
    return count_ones(mask & below.astype(np.uint32)) + addend


def find_first_high_u32(x: Array) -> Array:
    """v_ffbh_u32: zeros above the highest one; 0xffffffff when there is none."""
    length = np.frexp(x.astype(np.float64))[1]
    return np.where(x == 0, -1, 32 - length).astype(np.int32).view(np.uint32)


def find_first_high_i32(x: Array) -> Array:
    """v_ffbh_i32 on int32: leading bits equal to the sign bit; 0xffffffff for 0 and -1."""
    folded = np.where(x < 0, ~x, x).view(np.uint32)
    return np.where(folded == 0, _U(0xFFFFFFFF), find_first_high_u32(folded))


def find_first_low(x: Array) -> Array:
    """v_ffbl_b32: zeros below the lowest one; 0xffffffff when there is none (uint32 or uint64 input)."""
    lowest = x & (~x + x.dtype.type(1))
    return np.where(x == 0, -1, np.frexp(lowest.astype(np.float64))[1] - 1).astype(np.int32).view(np.uint32)


def reverse_bits(x: Array) -> Array:
    """v_bfrev_b32, s_brev_b32/b64: bits in opposite order, for uint32 or uint64."""
    size = x.dtype.itemsize
    reversed_bytes = np.ascontiguousarray(x)[..., None].view(np.uint8)[..., ::-1]
    bits = np.unpackbits(reversed_bytes, axis=-1).reshape(*x.shape, size, 8)
    bits = np.packbits(bits[..., ::-1], axis=-1)
    return np.ascontiguousarray(bits.reshape(*x.shape, size)).view(x.dtype).reshape(x.shape)


def absdiff_u(a: Array, b: Array) -> Array:
    """|a - b| of unsigned values."""
    return np.where(a > b, a - b, b - a)


def sad_u8(a: Array, b: Array, c: Array, masked: bool = False) -> Array:
    """v_sad_u8 (v_msad_u8 when `masked`): sum of absolute differences of four bytes, plus c.

    `masked` skips bytes where b is zero.
    """
    total = c
    for byte in range(4):
        x, y = (a >> _U(8 * byte)) & _U(0xFF), (b >> _U(8 * byte)) & _U(0xFF)
        difference = absdiff_u(x, y)
        total = total + (np.where(y == 0, _U(0), difference) if masked else difference)
    return np.asarray(total)


def sad_u16(a: Array, b: Array, c: Array) -> Array:
    """v_sad_u16: sum of absolute differences of two 16-bit halves, plus c."""
    low = absdiff_u(a & _U(0xFFFF), b & _U(0xFFFF))
    return low + absdiff_u(a >> _U(16), b >> _U(16)) + c


def lerp_u8(a: Array, b: Array, c: Array) -> Array:
    """v_lerp_u8: per byte (a + b + c's lowest bit) >> 1."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for byte in range(4):
        s = _U(8 * byte)
        total = ((a >> s) & _U(0xFF)) + ((b >> s) & _U(0xFF)) + ((c >> s) & _U(1))
        result |= (total >> _U(1)) << s
    return result


def saturate(x: Array, low: int, high: int) -> Array:
    """int64 values clipped to [low, high]."""
    return np.asarray(np.clip(x, low, high))


def median3(a: Array, b: Array, c: Array) -> Array:
    """v_med3_i32/u32/i16/u16: the middle value."""
    return np.asarray(np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)))
