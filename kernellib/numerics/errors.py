# SPDX-License-Identifier: Apache-2.0
"""How far a bfloat16 result is from its reference, in the terms the operators' claims use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .bf16 import F64, bf16_neighbours, bf16_ulp, bits_from_bf16, round_to_bf16, to_float64


@dataclass(frozen=True)
class ErrorReport:
    """Error of a result against its reference.

    Attributes:
        num_elements: how many were compared.
        relative_rmse: root mean square of the error over that of the reference, over elements finite
            in both; infinite when the two do not agree on which elements are NaN, +Inf and -Inf.
        bit_equal_fraction: share of elements with the same bits (any NaN equals any NaN).
        max_ulp_error: largest error in units in the last place, the unit taken at the largest of the
            magnitudes given; infinite when non-finite elements disagree.
        judged_ulp_error: the same, but an element that equals one of its alternatives counts as one unit at
            the most: what a bound of one unit is held against.
        num_alternatives: elements more than one unit off that equal an alternative.
        max_abs_error: largest absolute error over elements finite in both.
        num_nonfinite: elements of the reference that are NaN or infinite.
        nonfinite_match: whether both have the same NaN, +Inf and -Inf in the same places.
    """

    num_elements: int
    relative_rmse: float
    bit_equal_fraction: float
    max_ulp_error: float
    judged_ulp_error: float
    num_alternatives: int
    max_abs_error: float
    num_nonfinite: int
    nonfinite_match: bool


def relative_rmse(actual: Any, expected: Any) -> float:
    """sqrt(mean((actual - expected)^2)) / sqrt(mean(expected^2)), over elements finite in both.

    Scaled by the largest magnitude first, so that neither square overflows or underflows. A reference
    of zeros gives 0 when ``actual`` is zero too, and infinity otherwise.
    """
    a, e = to_float64(actual), to_float64(expected)
    _require_same_shape(a, e)
    finite = np.isfinite(a) & np.isfinite(e)
    error, reference = np.abs(a[finite] - e[finite]), np.abs(e[finite])
    numerator, denominator = _rms(error), _rms(reference)
    if numerator == 0.0:
        return 0.0
    return float(numerator / denominator) if denominator > 0.0 else float("inf")


def _rms(magnitudes: F64) -> float:
    largest = float(magnitudes.max(initial=0.0))
    if largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.mean(np.square(magnitudes / largest))))


def bit_equal(actual: Any, expected: Any) -> npt.NDArray[np.bool_]:
    """Where two bfloat16 results have the same bits; -0.0 differs from 0.0, any NaN equals any NaN."""
    a, e = bits_from_bf16(actual), bits_from_bf16(expected)
    _require_same_shape(a, e)
    both_nan = ((a & 0x7FFF) > 0x7F80) & ((e & 0x7FFF) > 0x7F80)
    return np.asarray((a == e) | both_nan, dtype=np.bool_)


def ulp_distance(actual: Any, expected: Any) -> npt.NDArray[np.int64]:
    """How many representable bfloat16 values apart, elementwise; 0 for both NaN, 2^16 for one NaN."""
    a, e = bits_from_bf16(actual), bits_from_bf16(expected)
    _require_same_shape(a, e)

    def ordered(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
        magnitude = (bits & 0x7FFF).astype(np.int64)
        return np.where(bits & 0x8000, -magnitude, magnitude)

    a_nan, e_nan = (a & 0x7FFF) > 0x7F80, (e & 0x7FFF) > 0x7F80
    distance = np.abs(ordered(a) - ordered(e))
    return np.where(a_nan | e_nan, np.where(a_nan & e_nan, 0, 1 << 16), distance)


def neighbour_sums(p: Any, addend: Any) -> tuple[F64, F64]:
    """bf16(p' + addend) for either bfloat16 neighbour p' of p: what y = bf16(p + addend) may be as well.

    p is itself rounded, from a sum whose last bits depend on the order of its terms. Where the exact sum lies
    near a tie of bfloat16, a right kernel may round it to the neighbour. One unit of p is mostly one unit
    of y, but where p + addend is a tie too, rounding to even turns it into two.

    Args:
        p, addend: bfloat16 values of equal shape.

    Returns:
        (from the neighbour below, from the one above), float64 arrays; NaN where p is not finite.

    Example:
        >>> [float(y) for y in neighbour_sums(1.0, 2.0)]
        [3.0, 3.0]
    """
    other = to_float64(addend)
    with np.errstate(invalid="ignore", over="ignore"):
        below, above = (round_to_bf16(side + other) for side in bf16_neighbours(to_float64(p)))
    return below, above


def compare(
    actual: Any, expected: Any, *, magnitudes: tuple[Any, ...] = (), alternatives: tuple[Any, ...] = ()
) -> ErrorReport:
    """Every metric of ``actual`` against ``expected``.

    Args:
        actual: the result, bfloat16 values.
        expected: the reference, same shape, bfloat16 values.
        magnitudes: further values whose last place may show in the result, such as the rounded
            projection p of y = p + shared: where the add cancels, one unit of p is many of y. The unit
            of ``max_ulp_error`` is taken at the largest magnitude of these and ``expected``.
        alternatives: further right answers, element by element, such as ``neighbour_sums`` gives. Only
            finite ones count, and only for ``judged_ulp_error`` and ``num_alternatives``.
    """
    a, e = to_float64(actual), to_float64(expected)
    _require_same_shape(a, e)
    largest = np.abs(e)
    for other in magnitudes:
        largest = np.fmax(largest, np.abs(to_float64(other).reshape(e.shape)))
    finite = np.isfinite(a) & np.isfinite(e)
    match = _same_nonfinite(a, e)
    with np.errstate(invalid="ignore"):  # infinite minus infinite, masked below
        error = np.where(finite, np.abs(a - e), 0.0)
        in_ulp = np.where(finite & np.isfinite(largest), error / bf16_ulp(largest), 0.0)
    allowed = np.zeros(e.shape, dtype=np.bool_)
    for other in alternatives:
        allowed |= finite & (a == to_float64(other).reshape(e.shape))
    judged = np.where(allowed, np.minimum(in_ulp, 1.0), in_ulp)
    return ErrorReport(
        num_elements=int(e.size),
        relative_rmse=relative_rmse(a, e) if match else float("inf"),
        bit_equal_fraction=float(np.mean(bit_equal(actual, expected))) if e.size else 1.0,
        max_ulp_error=float(in_ulp.max(initial=0.0)) if match else float("inf"),
        judged_ulp_error=float(judged.max(initial=0.0)) if match else float("inf"),
        num_alternatives=int(np.count_nonzero(allowed & (in_ulp > 1.0))),
        max_abs_error=float(error.max(initial=0.0)),
        num_nonfinite=int(np.count_nonzero(~np.isfinite(e))),
        nonfinite_match=match,
    )


def _same_nonfinite(a: F64, e: F64) -> bool:
    same_nan = np.array_equal(np.isnan(a), np.isnan(e))
    infinite = np.isinf(a) | np.isinf(e)
    return bool(same_nan and np.array_equal(a[infinite], e[infinite]))


def _require_same_shape(a: npt.NDArray[Any], e: npt.NDArray[Any]) -> None:
    if a.shape != e.shape:
        raise ValueError(f"actual got shape {a.shape}, wanted the shape of expected, {e.shape}")
