# SPDX-License-Identifier: Apache-2.0
"""Error metrics: values worked out by hand, extreme magnitudes, non-finite elements."""

import math

import numpy as np
import pytest

from kernellib.numerics import bit_equal, compare, neighbour_sums, relative_rmse, round_to_bf16, ulp_distance


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


# p and y have units of 2^-7 here, and shared is half a unit, so that p + shared is a tie, which goes to the
# even side. One unit of p then moves y by two units or by none.
UNIT = 2.0**-7
HALF = UNIT / 2


@pytest.mark.parametrize(
    ("p", "p_rounded_otherwise", "shared", "y", "y_otherwise"),
    [
        (129 * UNIT, 130 * UNIT, HALF, 130 * UNIT, 130 * UNIT),
        (130 * UNIT, 131 * UNIT, HALF, 130 * UNIT, 132 * UNIT),
        (131 * UNIT, 130 * UNIT, HALF, 132 * UNIT, 130 * UNIT),
        (-130 * UNIT, -131 * UNIT, -HALF, -130 * UNIT, -132 * UNIT),
    ],
)
def test_a_tie_of_the_sum_turns_one_unit_of_p_into_two_or_none(
    p: float, p_rounded_otherwise: float, shared: float, y: float, y_otherwise: float
) -> None:
    assert round_to_bf16(p + shared) == y
    assert round_to_bf16(p_rounded_otherwise + shared) == y_otherwise
    others = neighbour_sums([p], [shared])
    assert y_otherwise in np.concatenate(others)
    report = compare([y_otherwise], [y], magnitudes=([p],), alternatives=others)
    assert report.max_ulp_error == abs(y_otherwise - y) / UNIT
    assert report.judged_ulp_error <= 1.0
    assert report.num_alternatives == int(abs(y_otherwise - y) > UNIT)


def test_an_alternative_excuses_its_own_element_and_no_other() -> None:
    p, shared = np.array([130.0, 129.0, 130.0]) * UNIT, np.full(3, HALF)
    y = round_to_bf16(p + shared)
    others = neighbour_sums(p, shared)
    assert compare(y + np.array([2 * UNIT, 0, 0]), y, alternatives=others).judged_ulp_error == 1.0
    # 132 units are right where p is 130, not where it is 129; 133 and 128 are right nowhere
    assert compare(y + np.array([0, 2 * UNIT, 0]), y, alternatives=others).judged_ulp_error == 2.0
    assert compare(y + np.array([3 * UNIT, 0, 0]), y, alternatives=others).judged_ulp_error == 3.0
    assert compare(y - np.array([2 * UNIT, 0, 0]), y, alternatives=others).judged_ulp_error == 2.0
    both = compare(y + np.array([2 * UNIT, 0, 2 * UNIT]), y, alternatives=others)
    assert (both.judged_ulp_error, both.max_ulp_error, both.num_alternatives) == (1.0, 2.0, 2)


def test_one_unit_stays_right_without_being_an_alternative() -> None:
    report = compare([1 + UNIT], [1.0], alternatives=neighbour_sums([256.0], [-255.0]))
    assert (report.max_ulp_error, report.judged_ulp_error, report.num_alternatives) == (1.0, 1.0, 0)


def test_alternatives_that_are_not_finite_excuse_nothing() -> None:
    largest = float(np.float32(3.3895313892515355e38))
    _, above = neighbour_sums([largest], [0.0])
    assert above == np.inf
    assert compare([np.inf], [largest], alternatives=(above,)).judged_ulp_error == np.inf
    assert compare([np.nan], [1.0], alternatives=([np.nan],)).judged_ulp_error == np.inf


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare(np.zeros((1, 4)), np.zeros(4))
