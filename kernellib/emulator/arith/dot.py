# SPDX-License-Identifier: Apache-2.0
"""Dot products of two to eight packed elements with an accumulator: v_dot2, v_dot4, v_dot8."""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith.formats import Array, flush_denormals


def _dot2(a: Array, b: Array, c: Array, accumulate_first: bool) -> Array:
    a, b, c = flush_denormals(a), flush_denormals(b), flush_denormals(c)
    with np.errstate(all="ignore"):
        low, high = a[0] * b[0], a[1] * b[1]
        total = (c + low) + high if accumulate_first else (low + high) + c
    return flush_denormals(np.asarray(total))


def dot2_f32(a: Array, b: Array, c: Array) -> Array:
    """v_dot2_f32_bf16: a[0] b[0] + a[1] b[1] + c, in that order, every sum rounded to float32.

    Args:
        a, b: float32 [2, ...], the widened halves of the operands; c: float32.
    Products of bf16 or f16 values are exact in float32. The order is that of the pseudo code (CDNA4 ISA,
    V_DOT2_F32_BF16); how many roundings the hardware makes is not published. Denormal inputs and results are
    flushed, whatever MODE says (CDNA4 ISA 6.4, note on V_DOT2); for f16 inputs this means the f16 value
    widened, so f16 denormals, which float32 holds as normal numbers, are to be flushed by the caller.
    """
    return _dot2(a, b, c, accumulate_first=False)


def dot2c_f32(a: Array, b: Array, c: Array) -> Array:
    """v_dot2c_f32_bf16, v_dot2c_f32_f16, v_dot2_f32_f16: c + a[0] b[0], then + a[1] b[1] (see `dot2_f32`)."""
    return _dot2(a, b, c, accumulate_first=True)


def integer_dot(a: Array, b: Array, c: Array, *, bits: int, signed: bool, clamp: bool = False) -> Array:
    """v_dot2/4/8_{i32,u32}_{i16,u16,i8,u8,i4,u4}: the sum of 32 / bits products and c.

    Args:
        a, b, c: uint32 bits.
        bits: element width, 16, 8 or 4.
        clamp: saturate the result to 32 bits instead of wrapping.
    Returns: uint32 bits. Source: CDNA4 ISA, V_DOT2_I32_I16, V_DOT4_I32_I8, V_DOT8_I32_I4.
    """
    element = _signed_element if signed else _unsigned_element
    total = c.view(np.int32).astype(np.int64) if signed else c.astype(np.int64)
    for item in range(32 // bits):
        total = total + element(a, item, bits) * element(b, item, bits)
    if clamp:
        low, high = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
        total = np.clip(total, low, high)
    return np.asarray(total.astype(np.uint64).astype(np.uint32))


def _unsigned_element(x: Array, item: int, bits: int) -> Array:
    return np.asarray(((x >> np.uint32(item * bits)) & np.uint32((1 << bits) - 1)).astype(np.int64))


def _signed_element(x: Array, item: int, bits: int) -> Array:
    value = _unsigned_element(x, item, bits)
    top = 1 << (bits - 1)
    return (value ^ top) - top
