# SPDX-License-Identifier: Apache-2.0
"""Error metrics: values worked out by hand, extreme magnitudes, non-finite elements."""

import math

import numpy as np
import pytest

from kernellib.numerics import bit_equal, compare, relative_rmse, round_to_bf16, ulp_distance


def test_relative_rmse_by_hand() -> None:
    assert relative_rmse([3.0, 4.0], [3.0, 5.0]) == pytest.approx(math.sqrt(1 / 2) / math.sqrt(34 / 2))
    assert relative_rmse([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert relative_rmse([0.0], [0.0]) == 0.0
    assert relative_rmse([1.0], [0.0]) == math.inf


@pytest.mark.parametrize("scale", [2.0**-900, 1.0, 2.0**900])
def test_relative_rmse_does_not_overflow_or_underflow(scale: float) -> None:
    expected = np.array([1.0, -2.0, 3.0])
    assert relative_rmse(expected * scale * 1.5, expected * scale) == pytest.approx(0.5)


def test_bit_equality_tells_zeros_apart_and_joins_nans() -> None:
    assert bit_equal([0.0, -0.0, np.nan, np.inf], [-0.0, -0.0, np.nan, -np.inf]).tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_ulp_distance_counts_values_across_zero() -> None:
    smallest = 2.0**-133
    assert ulp_distance([smallest], [-smallest]).tolist() == [2]
    assert ulp_distance([1.0], [1 + 2.0**-7]).tolist() == [1]
    assert ulp_distance([2.0], [2.0 - 2.0**-7]).tolist() == [1]
    assert ulp_distance([np.nan, np.nan], [np.nan, 1.0]).tolist() == [0, 1 << 16]


def test_ulp_error_is_taken_at_the_largest_magnitude() -> None:
    # y = p + shared cancels from 256 down to 1: one unit of p (2) is 256 units of y.
    actual, expected, p = [3.0], [1.0], [256.0]
    assert compare(actual, expected).max_ulp_error == 256.0
    assert compare(actual, expected, magnitudes=(p,)).max_ulp_error == 1.0


def test_report_of_equal_results() -> None:
    values = round_to_bf16(np.linspace(-3, 3, 100))
    report = compare(values, values)
    assert (report.num_elements, report.bit_equal_fraction, report.max_ulp_error) == (100, 1.0, 0.0)
    assert report.relative_rmse == 0.0
    assert report.nonfinite_match


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([1.0], [np.nan]), ([np.nan], [1.0]), ([np.inf], [-np.inf]), ([np.inf], [1.0]), ([1.0], [np.inf])],
)
def test_disagreement_on_nonfinite_elements_is_infinite_error(
    actual: list[float], expected: list[float]
) -> None:
    report = compare([*actual, 1.0], [*expected, 1.0])
    assert not report.nonfinite_match
    assert report.relative_rmse == math.inf
    assert report.max_ulp_error == math.inf
    assert report.bit_equal_fraction == 0.5


def test_agreeing_nonfinite_elements_leave_the_finite_ones() -> None:
    report = compare([np.nan, np.inf, -np.inf, 2.0], [np.nan, np.inf, -np.inf, 1.0])
    assert report.nonfinite_match
    assert report.num_nonfinite == 3
    assert report.max_abs_error == 1.0
    assert report.bit_equal_fraction == 0.75


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare(np.zeros((1, 4)), np.zeros(4))
