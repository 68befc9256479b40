# SPDX-License-Identifier: Apache-2.0
"""Microscaling (MX) formats on numpy: e4m3 and e2m1 elements, one e8m0 scale for 32 elements.

A block of 32 consecutive elements along the last axis shares a scale 2^(E - 127), E a byte (e8m0). An
element's value is ``decode(code) * 2^(E - 127)``; E = 255 makes the whole block NaN.

Scale rule (round up): ``2^ceil(log2(amax / max_normal))``, amax the block's largest magnitude and
max_normal 448 (e4m3) or 6 (e2m1). It is evaluated exactly, on the bits of fp32: with amax = m * 2^e and
max_normal = M * 2^x (m, M in [1, 2)) the exponent is ``e - x``, plus one when ``m > M``; no division
is rounded.

Blocks that the rule does not cover:

==============  ==================  ==================================================================
block           scale byte E        elements
==============  ==================  ==================================================================
all zero        0                   zeros, signs kept
amax subnormal  as the rule, but    x / 2^-127, rounded: fewer significant bits than usual, never Inf
or tiny         never below 0
any Inf or NaN  255                 e4m3: 0x7F (NaN); e2m1, which has no NaN: 0. The block reads as NaN
otherwise       0 .. 254            x / 2^(E-127) rounded to nearest, ties to even; |.| <= max_normal.
                                    Within half a step of 2^128 that is 2^128: Inf once read as fp32
==============  ==================  ==================================================================

Formats: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 (e4m3: bias 7, largest 448, no
Inf; e2m1: bias 1, largest 6) and 5.4.1 (e8m0). Element conversion is ml_dtypes'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

BLOCK = 32  # elements that share a scale
E8M0_BIAS = 127
E8M0_NAN = 255
E4M3_NAN = 0x7F

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_MANTISSA_BITS = 23  # of fp32


class MXFormatError(ValueError):
    """An array that cannot be read or written in an MX format: says which, got and wanted."""


@dataclass(frozen=True)
class ElementFormat:
    """An element format of the MX family.

    Attributes:
        name: "e4m3" or "e2m1".
        max_normal: the largest magnitude.
        bits: of one element.
    """

    name: str
    max_normal: float
    bits: int
    nan_code: int

    @property
    def numpy_dtype(self) -> Any:
        return ml_dtypes.float8_e4m3fn if self.name == "e4m3" else ml_dtypes.float4_e2m1fn

    @property
    def scale_addend(self) -> int:
        """Added to amax's fp32 bits, it carries into the exponent exactly when m > M: see ``scale_bytes``."""
        bits = int(np.float32(self.max_normal).view(np.uint32))
        return (1 << _MANTISSA_BITS) - 1 - (bits & ((1 << _MANTISSA_BITS) - 1))

    @property
    def max_exponent(self) -> int:
        """x of max_normal = M * 2^x."""
        return int(np.frexp(self.max_normal)[1]) - 1


E4M3 = ElementFormat("e4m3", 448.0, 8, E4M3_NAN)
E2M1 = ElementFormat("e2m1", 6.0, 4, 0)


@dataclass(frozen=True)
class MXArray:
    """Quantised values: one code for each element (e2m1 unpacked, in the low nibble) and its scales.

    Attributes:
        codes: uint8 [..., K].
        scales: uint8 [..., K / 32], e8m0, in logical order.
        element: the element format.
    """

    codes: U8
    scales: U8
    element: ElementFormat

    def dequantize(self) -> F32:
        """fp32 values [..., K]; exact, but for underflow below 2^-149."""
        return dequantize(self.codes, self.scales, self.element)


def scale_bytes(amax: npt.ArrayLike, element: ElementFormat) -> U8:
    """The e8m0 byte of each block, from its largest magnitude (fp32, not negative; NaN and Inf give 255).

    Example:
        >>> scale_bytes([448.0, 449.0, 0.0], E4M3).tolist()
        [127, 128, 0]
    """
    bits = (np.ascontiguousarray(amax, dtype=np.float32).view(np.uint32) & 0x7FFF_FFFF).astype(np.int64)
    exponent = ((bits + element.scale_addend) >> _MANTISSA_BITS) - element.max_exponent
    finite = bits < 0x7F80_0000
    return np.asarray(np.where(finite, np.clip(exponent, 0, E8M0_NAN - 1), E8M0_NAN), dtype=np.uint8)


def decode_scales(scales: U8) -> F32:
    """2^(E - 127) as fp32; NaN for 255. 2^-127 is an fp32 subnormal and exact."""
    values = np.ldexp(np.float32(1.0), scales.astype(np.int32) - E8M0_BIAS)
    return np.asarray(np.where(scales == E8M0_NAN, np.float32(np.nan), values), dtype=np.float32)


def decode(codes: U8, element: ElementFormat) -> F32:
    """Element values of codes, scale not applied; e2m1 codes one a byte, high nibble ignored."""
    return _decode_table(element)[codes if element.bits == 8 else codes & 0xF]


def _decode_table(element: ElementFormat) -> F32:
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    return np.asarray(codes.view(element.numpy_dtype), dtype=np.float32)


def quantize(values: npt.ArrayLike, element: ElementFormat) -> MXArray:
    """Quantises blocks of 32 along the last axis, by the rules of this module.

    Args:
        values: real numbers [..., K], K a multiple of 32; read as fp32 (bf16 and fp32 are exact).
        element: E4M3 or E2M1.

    Raises:
        MXFormatError: K is not a multiple of 32.

    Example:
        >>> q = quantize(np.full(32, 449.0), E4M3)
        >>> int(q.scales[0]), float(q.dequantize()[0])
        (128, 448.0)
    """
    x = np.asarray(values, dtype=np.float32)
    blocks = _blocks(x)
    magnitudes = np.ascontiguousarray(blocks).view(np.uint32) & np.uint32(0x7FFF_FFFF)
    # Compared as integers, so that NaN, whose bits are above Inf's, wins.
    amax = magnitudes.max(axis=-1, initial=0).view(np.float32)
    scales = scale_bytes(amax, element)
    whole = scales != E8M0_NAN
    inverse = np.ldexp(np.float32(1.0), E8M0_BIAS - np.where(whole, scales, E8M0_BIAS).astype(np.int32))
    scaled = np.where(whole[..., None], blocks, np.float32(0.0)) * inverse[..., None]
    codes = scaled.astype(element.numpy_dtype).view(np.uint8)
    codes = np.where(whole[..., None], codes, np.uint8(element.nan_code))
    return MXArray(codes.reshape(x.shape), scales, element)


def dequantize(codes: U8, scales: U8, element: ElementFormat) -> F32:
    """fp32 values of codes [..., K] under scales [..., K / 32] in logical order.

    Raises:
        MXFormatError: the two shapes do not belong together.
    """
    blocks = _blocks(decode(codes, element))
    if blocks.shape[:-1] != scales.shape:
        raise MXFormatError(
            f"scales got shape {list(scales.shape)}, wanted {list(blocks.shape[:-1])}: one per {BLOCK}"
        )
    with np.errstate(over="ignore"):
        return np.asarray(blocks * decode_scales(scales)[..., None], dtype=np.float32).reshape(codes.shape)


def pack_nibbles(codes: U8) -> U8:
    """e2m1 codes [..., K] -> bytes [..., K / 2]; of two neighbours the first is the low nibble.

    Raises:
        MXFormatError: K is odd, or a code has more than four bits.
    """
    if codes.shape[-1] % 2:
        raise MXFormatError(f"codes got a last axis of {codes.shape[-1]}, wanted an even one")
    if codes.size and int(codes.max()) > 0xF:
        raise MXFormatError(
            f"codes got {int(codes.max()):#x}, wanted codes of four bits (decode before packing)"
        )
    return np.asarray(codes[..., 0::2] | (codes[..., 1::2] << 4), dtype=np.uint8)


def unpack_nibbles(packed: U8) -> U8:
    """The inverse of ``pack_nibbles``."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & 0xF
    codes[..., 1::2] = packed >> 4
    return codes


def dequantize_packed(packed: U8, scales: U8) -> F32:
    """fp32 values [..., K] of packed e2m1 [..., K / 2]: a look-up of byte pairs, for whole weights."""
    table = _decode_table(E2M1)
    # A byte's two values as one 64-bit word: one look-up each, and several times as fast as rows of two.
    pairs = np.stack([np.tile(table, 16), np.repeat(table, 16)], axis=-1).view(np.uint64)[:, 0]
    values = np.take(pairs, packed).view(np.float32)
    blocks = _blocks(values)
    if blocks.shape[:-1] != scales.shape:
        raise MXFormatError(f"scales got shape {list(scales.shape)}, wanted {list(blocks.shape[:-1])}")
    blocks *= decode_scales(scales)[..., None]
    return values


def _blocks(x: F32) -> F32:
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        got = "a scalar" if x.ndim == 0 else f"a last axis of {x.shape[-1]}"
        raise MXFormatError(f"values got {got}, wanted a last axis that is a multiple of {BLOCK}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
