# SPDX-License-Identifier: Apache-2.0
"""The three instructions of the correctly rounded division sequence: div_scale, div_fmas, div_fixup.

Compilers divide n / d by scaling both into a safe range (v_div_scale), Newton steps of fma, a last fma that
undoes the scaling (v_div_fmas) and a repair of special values (v_div_fixup).
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from kernellib.emulator.arith.float32 import fma32, fma64
from kernellib.emulator.arith.formats import Array, FloatFormat, bits_of, format_of, is_denormal, quiet
from kernellib.emulator.arith.rounding import ldexp

# Per format: scaling of an operand (power of two), exponent distance of a quotient near overflow, exponent
# below which a numerator counts as tiny, exponent distance of a certain underflow.
_SCALE = {"f32": 64, "f64": 128}
_NEAR_OVERFLOW = {"f32": 96, "f64": 768}
_TINY_EXPONENT = {"f32": 23, "f64": 53}
_UNDERFLOW_DISTANCE = {"f32": -150, "f64": -1075}


def _exponent(x: Array, fmt: FloatFormat) -> Array:
    field = (bits_of(x) & fmt.scalar(fmt.exponent_mask)) >> fmt.scalar(fmt.mantissa_bits)
    return np.asarray(field.astype(np.int32))


def _is_tiny(x: Array, fmt: FloatFormat) -> Array:
    """Below the normal range, zero included (an exact quotient that underflows counts as denormal)."""
    return np.abs(x) < 2.0 ** (1 - fmt.bias)


def _needs_no_scaling(denominator: Array, numerator: Array, fmt: FloatFormat) -> bool:
    """Whether all operands are normal and so far from every limit that no case of `div_scale` can apply."""
    den, num = _exponent(denominator, fmt), _exponent(numerator, fmt)
    if den.min() < 1 or den.max() > 2 * fmt.bias - 4 or num.max() > 2 * fmt.bias:
        return False
    distance = num - den
    return bool(
        num.min() > _TINY_EXPONENT[fmt.name]
        and distance.max() < _NEAR_OVERFLOW[fmt.name]
        and distance.min() > 4 - fmt.bias
    )


def div_scale(chosen: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """v_div_scale_f32/f64: scale one operand of numerator / denominator.

    Args:
        chosen: S0, the operand to scale: equal to `denominator` or to `numerator`.
        denominator, numerator: S1 and S2, the quotient's parts.
    Returns:
        The scaled operand, and a bool array: whether v_div_fmas must scale the result back.
    Source: CDNA4 ISA, V_DIV_SCALE_F32/F64. Its tests "1/S1 is a denormal" and "S2/S1 is a denormal" are read
    as "of magnitude below the smallest normal", quotients that round to zero included. Where both hold it
    scales a huge denominator by 2**+64 in the published text, which overflows; 2**-64 is meant and done.
    """
    fmt = format_of(chosen)
    up = np.int32(_SCALE[fmt.name])
    if _needs_no_scaling(denominator, numerator, fmt):
        shape = np.broadcast_shapes(chosen.shape, denominator.shape, numerator.shape)
        return quiet(np.broadcast_to(chosen, shape)), np.zeros(shape, np.bool_)
    chosen, denominator, numerator = np.broadcast_arrays(chosen, denominator, numerator)
    with np.errstate(all="ignore"):
        wide = np.dtype(np.float64 if fmt.name == "f32" else np.longdouble)
        den, num = denominator.astype(wide), numerator.astype(wide)
        inverse_tiny = _is_tiny(np.divide(1.0, den), fmt)
        quotient_tiny = _is_tiny(np.divide(num, den), fmt)
    distance = _exponent(numerator, fmt) - _exponent(denominator, fmt)
    zero = (numerator == 0) | (denominator == 0)
    near_overflow = distance >= _NEAR_OVERFLOW[fmt.name]
    chose_den = bits_of(chosen) == bits_of(denominator)
    chose_num = bits_of(chosen) == bits_of(numerator)
    none = np.zeros(chosen.shape, np.int32)
    cases = [
        zero,
        near_overflow,
        is_denormal(denominator),
        inverse_tiny & quotient_tiny,
        inverse_tiny,
        quotient_tiny,
        _exponent(numerator, fmt) <= _TINY_EXPONENT[fmt.name],
    ]
    shift = np.select(
        cases,
        [none, np.where(chose_den, up, 0), none + up, np.where(chose_den, -up, 0), none - up,
         np.where(chose_num, up, 0), none + up],
        0,
    )  # fmt: skip
    scales_back = np.select(cases[:6], [none, none + 1, none, none + 1, none, none + 1], 0) != 0
    nan = fmt.scalar(fmt.default_nan).view(fmt.dtype)
    return np.where(zero, nan, ldexp(chosen, shift)), scales_back


def div_fmas(a: Array, b: Array, c: Array, scales_back: Array) -> Array:
    """v_div_fmas_f32/f64: fma(a, b, c), scaled back where v_div_scale asked for it, with one rounding.

    The published pseudo code (CDNA4 ISA, V_DIV_FMAS_F32) gives one power, 2**32, which undoes neither
    scaling; emulators checked on RDNA hardware scale by 2**64 (f64: 2**128) where c's exponent is above the
    bias and by 2**-64 elsewhere. That is what undoes v_div_scale, and what is done here. That the scaled
    value is rounded only once is assumed: otherwise division could not be correctly rounded to denormals.
    """
    fmt = format_of(a)
    a = np.broadcast_to(a, np.broadcast_shapes(a.shape, b.shape, c.shape, scales_back.shape))
    value = fma32(a, b, c) if fmt.name == "f32" else fma64(a, b, c)
    lanes = np.nonzero(np.broadcast_to(scales_back, value.shape) & np.isfinite(value))
    if not lanes[0].size:
        return value
    a, b, c = (np.broadcast_to(v, value.shape)[lanes] for v in (a, b, c))
    power = np.where(_exponent(c, fmt) > fmt.bias, _SCALE[fmt.name], -_SCALE[fmt.name])
    if fmt.name == "f32":
        with np.errstate(all="ignore"):
            value[lanes] = np.ldexp(_odd_sum(a, b, c), power).astype(np.float32)
    else:
        lanes_of = zip(a.tolist(), b.tolist(), c.tolist(), power.tolist(), strict=True)
        value[lanes] = [_exact(*lane) for lane in lanes_of]
    return value


def _odd_sum(a: Array, b: Array, c: Array) -> Array:
    """a*b + c of float32 values in float64, rounded to odd: any later rounding to float32 is then correct."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    words = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.asarray(np.where((error != 0) & ((words & 1) == 0), words + step, words).view(np.float64))


def _exact(a: float, b: float, c: float, power: int) -> float:
    value = (Fraction(a) * Fraction(b) + Fraction(c)) * Fraction(2) ** power
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_plain_quotient(quotient: Array, denominator: Array, numerator: Array, fmt: FloatFormat) -> bool:
    """Whether all operands are normal and no quotient is a NaN or certain to underflow."""
    den, num = _exponent(denominator, fmt), _exponent(numerator, fmt)
    largest = 2 * fmt.bias
    if den.min() < 1 or num.min() < 1 or den.max() > largest or num.max() > largest:
        return False
    limit = _UNDERFLOW_DISTANCE.get(fmt.name, -2 * largest)
    return bool((num - den).min() >= limit and not np.isnan(quotient).any())


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup_f16/f32/f64: the quotient with its sign, or the special value the operands call for.

    Source: CDNA4 ISA, V_DIV_FIXUP_F32. "UNDERFLOW" is read as zero and "OVERFLOW" as infinity; a NaN quotient
    of finite operands gives infinity, as emulators checked on RDNA hardware have it.
    """
    fmt = format_of(quotient)
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    sign = (bits_of(denominator) ^ bits_of(numerator)) & fmt.scalar(fmt.sign_mask)
    if _is_plain_quotient(quotient, denominator, numerator, fmt):
        return np.asarray(((bits_of(quotient) & fmt.scalar(fmt.sign_mask - 1)) | sign).view(fmt.dtype))
    inf = fmt.scalar(fmt.exponent_mask)
    nan = np.full(quotient.shape, fmt.default_nan, fmt.bits_dtype)
    zero_num, zero_den = numerator == 0, denominator == 0
    inf_num, inf_den = np.isinf(numerator), np.isinf(denominator)
    magnitude = bits_of(quotient) & fmt.scalar(fmt.sign_mask - 1)
    underflow = np.zeros(quotient.shape, np.bool_)
    if fmt.name in _UNDERFLOW_DISTANCE:
        distance = _exponent(numerator, fmt) - _exponent(denominator, fmt)
        underflow = distance < _UNDERFLOW_DISTANCE[fmt.name]
    bits = np.select(
        [
            np.isnan(numerator),
            np.isnan(denominator),
            (zero_num & zero_den) | (inf_num & inf_den),
            zero_den | inf_num,
            inf_den | zero_num | underflow,
            np.isnan(quotient),
        ],
        [bits_of(quiet(numerator)), bits_of(quiet(denominator)), nan, inf | sign, sign, inf | sign],
        magnitude | sign,
    )
    return np.asarray(bits.astype(fmt.bits_dtype).view(fmt.dtype))
