# SPDX-License-Identifier: Apache-2.0
"""bf16: the upper half of a float32. numpy has no such type, so bits travel as uint16."""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith.formats import Array


def to_f32(bits: Array) -> Array:
    """float32 values of bf16 bits (uint16, or the low half of uint32); exact: v_cvt_f32_bf16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_f32(x: Array) -> Array:
    """bf16 bits (uint16) of float32 values, to nearest even: v_cvt_pk_bf16_f32.

    Denormals are kept, overflow gives infinity. A NaN keeps its sign and upper payload and becomes quiet;
    that choice of payload is not published. Source: CDNA4 ISA, V_CVT_PK_BF16_F32.

    >>> [hex(int(v)) for v in from_f32(np.float32([1 + 2**-8, 1 + 3 * 2**-8]))]
    ['0x3f80', '0x3f82']
    """
    words = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(x)
    if nan.any():
        rounded = np.where(nan, (words >> np.uint32(16)) | np.uint32(0x40), rounded)
    return np.asarray(rounded.astype(np.uint16))


def pack_f32(low: Array, high: Array) -> Array:
    """`from_f32` of two operands as uint32, `low` in bits 15:0."""
    low, high = np.broadcast_arrays(low, high)
    if np.isnan(low).any() or np.isnan(high).any():
        return from_f32(low).astype(np.uint32) | (from_f32(high).astype(np.uint32) << np.uint32(16))
    result = _rounded(high)
    result &= np.uint32(0xFFFF0000)
    lower = _rounded(low)
    lower >>= np.uint32(16)
    result |= lower
    return result


def _rounded(x: Array) -> Array:
    """float32 bits with the rounding to the upper half added: no NaNs, low half left to cut off."""
    words = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    result = words >> np.uint32(16)
    result &= np.uint32(1)
    result += np.uint32(0x7FFF)
    result += words
    return result


def from_f64(x: Array) -> Array:
    """bf16 bits of float64 values whose significand has at most 8 bits (a decoded fp8, fp6 or fp4 times a
    scale).

    Such values are exact in float32 wherever a bf16 denormal could still round, so going through it is safe.
    """
    with np.errstate(all="ignore"):
        return from_f32(x.astype(np.float32))
