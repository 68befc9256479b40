# SPDX-License-Identifier: Apache-2.0
"""Minimum, maximum, median, comparison and class tests on floats of any width (f16, f32, f64).

Two families differ in what a NaN does. v_min/v_max/v_min3/v_max3/v_med3 return the number (a signaling NaN
wins when MODE.IEEE is set, and comes out quiet); v_minimum3/v_maximum3 return the NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernellib.emulator.arith.formats import (
    Array,
    FloatFormat,
    bits_of,
    format_of,
    is_denormal,
    is_signaling,
    quiet,
)


def minimum_number(a: Array, b: Array, ieee: bool = True) -> Array:
    """v_min_f16/f32/f64: the smaller; the number if one is a NaN; -0 is smaller than +0.

    Args:
        a, b: float arrays of one dtype.
        ieee: MODE.IEEE; a signaling NaN is then quieted and returned (of `a` before of `b`).
    Source: CDNA4 ISA, V_MIN_F32.
    """
    return _select(a, b, ieee, smaller=True)


def maximum_number(a: Array, b: Array, ieee: bool = True) -> Array:
    """v_max_f16/f32/f64: the larger; the number if one is a NaN; +0 is larger than -0.

    Source: CDNA4 ISA, V_MAX_F32 (its `>=` under IEEE and `>` otherwise pick equal values, so they agree).
    """
    return _select(a, b, ieee, smaller=False)


def _select(a: Array, b: Array, ieee: bool, smaller: bool) -> Array:
    with np.errstate(invalid="ignore"):
        # Equal values differ only as zeros do: their signs join (min) or cancel (max).
        take_a = (a < b) if smaller else (a > b)
        join = bits_of(a) | bits_of(b) if smaller else bits_of(a) & bits_of(b)
        result = np.where(a == b, join.view(a.dtype), np.where(take_a | np.isnan(b), a, b))
        # Here a NaN in `a` compared false, so b was taken already, and a NaN in `b` took a.
        result = np.where(np.isnan(a), b, result)
    if ieee:
        result = np.where(is_signaling(b), quiet(b), result)
        result = np.where(is_signaling(a), quiet(a), result)
    return result


def minimum3_number(a: Array, b: Array, c: Array, ieee: bool = True) -> Array:
    """v_min3_f16/f32: two v_min in a row (CDNA4 ISA, V_MIN3_F32)."""
    return minimum_number(minimum_number(a, b, ieee), c, ieee)


def maximum3_number(a: Array, b: Array, c: Array, ieee: bool = True) -> Array:
    """v_max3_f16/f32: two v_max in a row (CDNA4 ISA, V_MAX3_F32)."""
    return maximum_number(maximum_number(a, b, ieee), c, ieee)


def median3(a: Array, b: Array, c: Array, ieee: bool = True) -> Array:
    """v_med3_f16/f32: the middle value; with any NaN the result of v_min3 (CDNA4 ISA, V_MED3_F32)."""
    top = maximum3_number(a, b, c, ieee)
    with np.errstate(invalid="ignore"):
        middle = np.where(
            top == a,
            maximum_number(b, c, ieee),
            np.where(top == b, maximum_number(a, c, ieee), maximum_number(a, b, ieee)),
        )
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), minimum3_number(a, b, c, ieee), middle)


def minimum3(a: Array, b: Array, c: Array) -> Array:
    """v_minimum3_f32, v_pk_minimum3_f16: the smallest, NaN if any is NaN, -0 below +0.

    Source: CDNA4 ISA, V_MINIMUM3_F32, in terms of IEEE 754-2019 minimum. Which NaN wins is not published;
    assumed the first signaling one (made quiet), then the first quiet one, pair by pair.
    """
    return _propagating(_propagating(a, b, smaller=True), c, smaller=True)


def maximum3(a: Array, b: Array, c: Array) -> Array:
    """v_maximum3_f32, v_pk_maximum3_f16: the largest, NaN if any is NaN, +0 above -0 (see `minimum3`)."""
    return _propagating(_propagating(a, b, smaller=False), c, smaller=False)


def _propagating(a: Array, b: Array, smaller: bool) -> Array:
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    result = _select(a, b, False, smaller)
    if not (nan_a.any() or nan_b.any()):
        return result
    result = np.where(nan_b, quiet(b), result)
    return np.where(nan_a & ~(is_signaling(b) & ~is_signaling(a)), quiet(a), result)


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


FLOAT_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), np.bool_),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), np.bool_),
}
"""v_cmp_<name>_f16/f32/f64. A negated test is true on NaN; `neq` is `!=`, true on NaN (CDNA4 ISA,
V_CMP_*)."""

INTEGER_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "f": FLOAT_COMPARISONS["f"],
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": FLOAT_COMPARISONS["tru"],
}
"""v_cmp_<name>_i16 ... u64 (CDNA4 ISA, V_CMP_*)."""


def _of_classes(x: Array, mask: int, fmt: FloatFormat) -> Array:
    """`compare_class` for one mask: a comparison of bits per class in it."""
    bits = bits_of(x)
    inf, sign = fmt.exponent_mask, fmt.sign_mask
    found = np.zeros(bits.shape, np.bool_)
    for bit, value in ((2, inf | sign), (9, inf), (5, sign), (6, 0)):
        if mask >> bit & 1:
            found |= bits == fmt.scalar(value)
    smallest = fmt.mantissa_mask + 1
    # classes that are ranges of magnitudes: bits of either sign, first and one past the last magnitude
    ranges = (
        (0, 0, inf + 1, inf | fmt.quiet_bit), (1, 1, inf | fmt.quiet_bit, sign),
        (4, 7, 1, smallest), (3, 8, smallest, inf),
    )  # fmt: skip
    for negative, positive, first, end in ranges:
        if not (mask >> negative | mask >> positive) & 1:
            continue
        magnitude = bits & fmt.scalar(sign - 1)
        inside = (magnitude >= fmt.scalar(first)) & (magnitude < fmt.scalar(end))
        if not mask >> negative & 1:
            inside &= bits < fmt.scalar(sign)
        elif not mask >> positive & 1:
            inside &= bits >= fmt.scalar(sign)
        found |= inside
    return found


def compare_class(x: Array, mask: Array) -> Array:
    """v_cmp_class_f16/f32/f64: whether x is of one of the classes whose bits are set in `mask`.

    Bits: 0 signaling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal,
    9 +inf. Source: CDNA4 ISA, V_CMP_CLASS_F32.
    """
    fmt = format_of(x)
    first = mask.reshape(-1)[0]
    if (mask == first).all():  # nearly always: the same few classes for every lane
        return _of_classes(x, int(first), fmt)
    negative = (bits_of(x) & fmt.scalar(fmt.sign_mask)) != 0
    positive_bit = np.select(
        [np.isnan(x), np.isinf(x), is_denormal(x), x == 0], [np.where(is_signaling(x), 0, 1), 9, 7, 6], 8
    )
    negative_bit = np.select(
        [np.isnan(x), np.isinf(x), is_denormal(x), x == 0], [np.where(is_signaling(x), 0, 1), 2, 4, 5], 3
    )
    bit = np.where(negative, negative_bit, positive_bit).astype(np.uint32)
    return np.asarray(((mask.astype(np.uint32) >> bit) & np.uint32(1)) != 0)
