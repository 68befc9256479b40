# SPDX-License-Identifier: Apache-2.0
"""Conversions between integers and IEEE floats, and between IEEE widths."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernellib.emulator.arith.formats import Array, bits_of, quiet


def float_to_int(x: Array, dtype: type[np.integer[Any]] | np.dtype[Any]) -> Array:
    """v_cvt_i32_f32, v_cvt_u32_f64, v_cvt_i16_f16, ...: truncate, saturate, NaN to 0.

    Source: CDNA4 ISA, V_CVT_I32_F32 ("out-of-range floating point values (including infinity) saturate. NAN
    is converted to 0"); for f16 sources "conversion is done with truncation".

    >>> float_to_int(np.float32([-1.5, 3e9, np.nan]), np.int32)
    array([        -1, 2147483647,          0], dtype=int32)
    """
    info = np.iinfo(np.dtype(dtype))
    wide = np.trunc(x.astype(np.float64))
    with np.errstate(all="ignore"):
        clipped = np.clip(np.where(np.isnan(wide), 0.0, wide), float(info.min), float(info.max))
        return np.asarray(clipped.astype(np.int64).astype(dtype))


def nearest_int32(x: Array) -> Array:
    """v_cvt_rpi_i32_f32: floor(x + 0.5) (CDNA4 ISA, V_CVT_RPI_I32_F32; the sum rounds to float32)."""
    with np.errstate(all="ignore"):
        return float_to_int(np.floor(x + np.float32(0.5)), np.int32)


def floor_int32(x: Array) -> Array:
    """v_cvt_flr_i32_f32: floor(x) (CDNA4 ISA, V_CVT_FLR_I32_F32)."""
    return float_to_int(np.floor(x), np.int32)


def int_to_f32(x: Array) -> Array:
    """v_cvt_f32_i32, v_cvt_f32_u32: to nearest even (CDNA4 ISA, V_CVT_F32_I32: 0.5 ulp)."""
    return x.astype(np.float32)


def int_to_f16(x: Array) -> Array:
    """v_cvt_f16_i16, v_cvt_f16_u16: to nearest even, 65520 and above to infinity."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(np.float16)


def ubyte_to_f32(x: Array, byte: int) -> Array:
    """v_cvt_f32_ubyte0..3: byte `byte` of a uint32 as float32 (CDNA4 ISA, V_CVT_F32_UBYTE0)."""
    return np.asarray(((x >> np.uint32(8 * byte)) & np.uint32(0xFF)).astype(np.float32))


def offset_i4_to_f32(x: Array) -> Array:
    """v_cvt_off_f32_i4: the low four bits as a signed multiple of 1/16 (CDNA4 ISA, V_CVT_OFF_F32_I4)."""
    nibble = (x & np.uint32(15)).astype(np.int32)
    return np.asarray(((nibble ^ 8) - 8).astype(np.float32) / np.float32(16))


def f16_to_f32(x: Array) -> Array:
    """v_cvt_f32_f16: exact; a signaling NaN becomes quiet."""
    return quiet(x.astype(np.float32))


def f32_to_f16(x: Array, saturate: bool = False) -> Array:
    """v_cvt_f16_f32, v_cvt_pk_f16_f32: to nearest even, denormals kept.

    `saturate` is MODE.FP16_OVFL: a finite value that overflows becomes the largest float16.
    Source: CDNA4 ISA, V_CVT_F16_F32.
    """
    with np.errstate(all="ignore"):
        result = quiet(x.astype(np.float16))
    if saturate:
        largest = np.float16(65504)
        result = np.where(np.isinf(result) & np.isfinite(x), np.copysign(largest, result), result)
    return result


def f32_to_f16_toward_zero(x: Array) -> Array:
    """v_cvt_pkrtz_f16_f32: round toward zero; finite values never become infinite.

    Source: CDNA4 ISA, V_CVT_PKRTZ_F16_F32.
    """
    with np.errstate(all="ignore"):
        nearest = quiet(x.astype(np.float16))
        back = nearest.astype(np.float32)
        too_far = (np.abs(back) > np.abs(x)) & np.isfinite(x)
    stepped = (nearest.view(np.uint16) - np.uint16(1)).view(np.float16)
    return np.where(too_far, stepped, nearest)


def f16_stochastic(x: Array, random: Array) -> Array:
    """v_cvt_sr_f16_f32: add random bits below the kept ones, then truncate.

    Source: CDNA4 ISA 7.3 ("add a random value ... and then truncate"). Which random bits are used is
    published for the 8-bit formats only (the top 23 - mantissa bits); assumed alike here: the top 13 bits of
    `random`, aligned with the first discarded bit; denormal results are aligned after the shift, as in AMD's
    host model of the narrow conversions.
    """
    return _stochastic(x, random, mantissa_bits=10, exponent_bits=5).astype(np.uint16).view(np.float16)


def bf16_stochastic(x: Array, random: Array) -> Array:
    """v_cvt_sr_bf16_f32: bf16 bits of x with the top 16 bits of `random` added below them (see
    `f16_stochastic`)."""
    bits = bits_of(x)
    summed = bits + (random >> np.uint32(16))
    keep = np.isnan(x) | np.isinf(x)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    plain = np.where(np.isnan(x), quiet_nan, bits >> np.uint32(16))
    return np.asarray(np.where(keep, plain, summed >> np.uint32(16)).astype(np.uint16))


def _stochastic(x: Array, random: Array, mantissa_bits: int, exponent_bits: int) -> Array:
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    bits = bits_of(x).astype(np.int64)
    sign = (bits >> 31) << (mantissa_bits + exponent_bits)
    exponent = ((bits >> 23) & 0xFF) - 127 + bias
    mantissa = np.where((bits >> 23) & 0xFF, (bits & 0x7FFFFF) | 0x800000, bits & 0x7FFFFF)
    down = np.clip(1 - exponent, 0, 40)
    scaled = (np.maximum(exponent, 1) << 23) + (mantissa >> down) - 0x800000
    rounded = (scaled + (random.astype(np.int64) >> (9 + mantissa_bits))) >> (23 - mantissa_bits)
    infinite = top << mantissa_bits
    finite = sign | np.minimum(rounded, infinite)
    nan = sign | infinite | (1 << (mantissa_bits - 1))
    return np.where(np.isnan(x), nan, np.where(np.isinf(x), sign | infinite, finite))


def f64_to_f32(x: Array) -> Array:
    """v_cvt_f32_f64: to nearest even (CDNA4 ISA, V_CVT_F32_F64: denormals are supported)."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


def to_unorm16(x: Array) -> Array:
    """v_cvt_pknorm_u16_f32, v_cvt_norm_u16_f16: round(clamp(x, 0, 1) * 65535) as uint16, NaN to 0.

    Source: CDNA4 ISA, V_CVT_PKNORM_U16_F32; that ties round to even is assumed.
    """
    wide = np.nan_to_num(np.clip(x.astype(np.float64), 0.0, 1.0), nan=0.0)
    return np.asarray(np.rint(wide * 65535.0).astype(np.uint16))


def to_snorm16(x: Array) -> Array:
    """v_cvt_pknorm_i16_f32, v_cvt_norm_i16_f16: round(clamp(x, -1, 1) * 32767) as int16, NaN to 0."""
    wide = np.nan_to_num(np.clip(x.astype(np.float64), -1.0, 1.0), nan=0.0)
    return np.asarray(np.rint(wide * 32767.0).astype(np.int16))


def to_u8(x: Array) -> Array:
    """v_cvt_pk_u8_f32's conversion: to the nearest integer (ties to even), clamped to 0..255, NaN to 0.

    The rounding of f32_to_u8 is not published; assumed to follow MODE's nearest even.
    """
    wide = np.rint(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=255.0, neginf=0.0))
    return np.asarray(np.clip(wide, 0, 255).astype(np.uint32))
