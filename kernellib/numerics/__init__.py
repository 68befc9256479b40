# SPDX-License-Identifier: Apache-2.0
"""Rounding and error metrics shared by operators and tests."""

from .bf16 import (
    BF16_MAX,
    BF16_MIN_SUBNORMAL,
    bf16_from_bits,
    bf16_neighbours,
    bf16_ulp,
    bits_from_bf16,
    round_to_bf16,
)
from .errors import ErrorReport, bit_equal, compare, neighbour_sums, relative_rmse, ulp_distance

__all__ = [
    "BF16_MAX",
    "BF16_MIN_SUBNORMAL",
    "ErrorReport",
    "bf16_from_bits",
    "bf16_neighbours",
    "bf16_ulp",
    "bit_equal",
    "bits_from_bf16",
    "compare",
    "neighbour_sums",
    "relative_rmse",
    "round_to_bf16",
    "ulp_distance",
]
