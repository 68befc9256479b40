# SPDX-License-Identifier: Apache-2.0
"""Rounding to bfloat16: every pattern, every kind of tie, and the double rounding that must not happen."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernellib.numerics import (
    BF16_MAX,
    BF16_MIN_SUBNORMAL,
    bf16_from_bits,
    bf16_neighbours,
    bf16_ulp,
    bits_from_bf16,
    round_to_bf16,
)
from kernellib.numerics.bf16 import to_float64

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def finite_values() -> np.ndarray:
    """Every finite bfloat16, ascending, -0 and 0 once."""
    values = np.unique(bf16_from_bits(ALL_BITS))
    return values[np.isfinite(values)]


def test_every_pattern_keeps_its_bits() -> None:
    values = bf16_from_bits(ALL_BITS)
    nan = np.isnan(values)
    assert nan.sum() == 2 * 127
    back = bits_from_bf16(values)
    assert np.array_equal(back[~nan], ALL_BITS[~nan])
    assert np.all(np.isnan(bf16_from_bits(back[nan])))


def test_every_value_rounds_to_itself() -> None:
    values = finite_values()
    assert np.array_equal(round_to_bf16(values), values)
    assert np.signbit(round_to_bf16(-0.0))
    assert not np.signbit(round_to_bf16(0.0))


def test_between_neighbours_the_nearer_wins_and_ties_go_to_even() -> None:
    values = finite_values()
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2  # exact in float64
    below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
    assert np.array_equal(round_to_bf16(below), low)
    assert np.array_equal(round_to_bf16(above), high)
    even = np.where(bits_from_bf16(low) % 2 == 0, low, high)
    assert np.array_equal(round_to_bf16(middle), even)


def test_neighbours_are_the_next_values_on_either_side() -> None:
    values = finite_values()
    below, above = bf16_neighbours(values)
    assert np.array_equal(below, [-np.inf, *values[:-1]])
    assert np.array_equal(above, [*values[1:], np.inf])
    for side in bf16_neighbours(-0.0):
        assert abs(side) == BF16_MIN_SUBNORMAL
    assert np.isnan(bf16_neighbours([np.nan, np.inf, -np.inf])).all()


def test_overflow_starts_half_a_unit_past_the_largest() -> None:
    edge = BF16_MAX + 2.0**119  # half the last place of the largest finite value
    assert round_to_bf16(np.nextafter(edge, 0.0)) == BF16_MAX
    assert round_to_bf16(edge) == np.inf
    assert round_to_bf16(-edge) == -np.inf
    assert np.isnan(round_to_bf16(np.nan))
    assert round_to_bf16(np.inf) == np.inf


def test_smallest_subnormal() -> None:
    assert bf16_from_bits(1) == BF16_MIN_SUBNORMAL
    assert round_to_bf16(BF16_MIN_SUBNORMAL / 2) == 0.0
    assert round_to_bf16(np.nextafter(BF16_MIN_SUBNORMAL / 2, 1.0)) == BF16_MIN_SUBNORMAL


def test_no_double_rounding_where_a_library_cast_has_it() -> None:
    value = 1 + 2.0**-8 + 2.0**-40  # just above a tie: float32 drops the last term, leaving the tie
    assert round_to_bf16(value) == 1 + 2.0**-7
    assert float(np.float64(value).astype(np.float32).astype(ml_dtypes.bfloat16)) == 1.0


@given(st.floats(width=32, allow_nan=False))
def test_float32_rounds_as_ml_dtypes_and_torch_do(value: float) -> None:
    expected = float(np.float32(value).astype(ml_dtypes.bfloat16))
    assert round_to_bf16(value) == expected
    assert float(torch.tensor(value, dtype=torch.float32).bfloat16()) == expected


def test_ulp_is_the_gap_to_the_next_value() -> None:
    values = finite_values()
    positive = values[values >= 0]
    assert np.array_equal(bf16_ulp(positive[:-1]), np.diff(positive))
    assert np.array_equal(bf16_ulp(-positive), bf16_ulp(positive))
    assert np.isnan(bf16_ulp(np.inf))
    assert np.isnan(bf16_ulp(np.nan))


def test_tensors_convert_exactly() -> None:
    tensor = torch.from_numpy(ALL_BITS.view(np.int16)).view(torch.bfloat16)
    assert np.array_equal(bits_from_bf16(tensor), ALL_BITS)
    assert np.array_equal(to_float64(tensor), bf16_from_bits(ALL_BITS), equal_nan=True)
    assert np.array_equal(to_float64(torch.tensor([0.5, -2.0])), [0.5, -2.0])


@pytest.mark.parametrize("value", [1 + 2.0**-9, 1e300, 2.0**-140])
def test_bits_of_other_numbers_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="represents exactly"):
        bits_from_bf16(value)
