# SPDX-License-Identifier: Apache-2.0
"""Rounding to integral values, splitting into significand and exponent, scaling by powers of two."""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith.formats import Array, bits_of, format_of, quiet

# The largest value below one: v_fract's results are clamped to it (CDNA4 ISA, notes on V_FRACT_F32/F64).
_BELOW_ONE = {np.dtype(t): np.nextafter(t(1), t(0)) for t in (np.float16, np.float32, np.float64)}


def trunc(x: Array) -> Array:
    """v_trunc: towards zero (CDNA4 ISA, V_TRUNC_F32). Zero results keep the sign of x."""
    return np.asarray(np.trunc(quiet(x)))


def ceil(x: Array) -> Array:
    """v_ceil: towards +inf. The sign of a zero result is assumed to be that of x, as IEEE has it."""
    return np.asarray(np.ceil(quiet(x)))


def floor(x: Array) -> Array:
    """v_floor: towards -inf (CDNA4 ISA, V_FLOOR_F32)."""
    return np.asarray(np.floor(quiet(x)))


def round_even(x: Array) -> Array:
    """v_rndne: to the nearest integer, ties to even (CDNA4 ISA, V_RNDNE_F32)."""
    return np.asarray(np.rint(quiet(x)))


def fract(x: Array) -> Array:
    """v_fract: x - floor(x), never one (CDNA4 ISA, V_FRACT_F32: result clamped to 0x3f7fffff).

    fract of an infinity is inf - inf, a NaN.
    """
    fmt = format_of(x)
    with np.errstate(all="ignore"):
        result = np.minimum(x - np.floor(x), _BELOW_ONE[x.dtype])
    bits = np.where(np.isinf(x), fmt.scalar(fmt.default_nan), bits_of(result)).astype(fmt.bits_dtype)
    return np.where(np.isnan(x), quiet(x), bits.view(fmt.dtype))


def frexp_exponent(x: Array) -> Array:
    """v_frexp_exp_i16_f16 / _i32_f32 / _i32_f64: the exponent e of x = m * 2**e, 0.5 <= |m| < 1, as int32.

    0 for zero, infinity and NaN (CDNA4 ISA, V_FREXP_EXP_I32_F32; the note names C's frexp for zero and
    denormals, whose significands are normalised).
    """
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(x.astype(np.float64) if x.dtype == np.float16 else x)
    return np.where(np.isfinite(x), exponent, 0).astype(np.int32)


def frexp_mantissa(x: Array) -> Array:
    """v_frexp_mant: the significand m of x = m * 2**e, 0.5 <= |m| < 1; x itself for infinity, NaN and
    zero."""
    with np.errstate(all="ignore"):
        mantissa, _ = np.frexp(x)
    return np.where(np.isfinite(x), mantissa, quiet(x)).astype(x.dtype)


def ldexp(x: Array, exponent: Array) -> Array:
    """v_ldexp_f16/f32/f64: x * 2**exponent, rounded once (also into the denormals), overflowing to infinity.

    Source: CDNA4 ISA, V_LDEXP_F32.
    """
    limit = 4200  # beyond the widest span of any format: keeps the int32 exponent arithmetic from wrapping
    with np.errstate(all="ignore"):
        result = np.ldexp(x, np.clip(exponent.astype(np.int32), -limit, limit))
    return np.where(np.isnan(x), quiet(x), result).astype(x.dtype)
