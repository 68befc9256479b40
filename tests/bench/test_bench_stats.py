# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired trials against values worked out by hand and by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from kernellib.bench.errors import MethodError
from kernellib.bench.schedule import turn_of
from kernellib.bench.stats import (
    Interval,
    bootstrap_median,
    capture_ratios,
    percentiles,
    ratio_interval,
    slowest_rank,
)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    print("seed 7")
    random = np.random.default_rng(7)
    covered = 0
    for index in range(200):
        values = random.normal(1.3, 0.05, 21)
        interval = bootstrap_median(values.tolist(), num_resamples=400, seed=index)
        assert interval.low <= interval.median <= interval.high
        covered += interval.low <= 1.3 <= interval.high
    # binomial(200, 0.95) has a standard deviation of 3.1
    assert 178 <= covered <= 199


def test_the_interval_is_reproducible_from_its_samples_and_seed() -> None:
    values = [1.0, 1.02, 0.99, 1.05, 1.01, 1.03]
    assert bootstrap_median(values, seed=3) == bootstrap_median(values, seed=3)


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_median([1.5] * 9) == Interval(1.5, 1.5, 1.5, 0.95)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan"), 1.0], [1.0, float("inf")]])
def test_too_few_or_broken_values_are_refused(values: list[float]) -> None:
    with pytest.raises(MethodError, match="finite"):
        bootstrap_median(values)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.99, 1.01, "no difference"), (1.0, 1.2, "no difference"),
     (0.9, 1.0, "no difference")],
)  # fmt: skip
def test_nothing_is_claimed_when_the_interval_contains_one(low: float, high: float, verdict: str) -> None:
    assert Interval((low + high) / 2, low, high, 0.95).verdict == verdict


def captures(num_trials: int) -> list[tuple[int, int]]:
    turns = [turn_of(trial) for trial in range(num_trials)]
    return [(turn.reference, turn.tested) for turn in turns]


def test_ratios_by_hand() -> None:
    # blocks: sqrt(2 * 8) and sqrt(1 * 9) of captures 0/0, sqrt(2 * 2) of 1/1; the odd trial is left out
    ratios = [2.0, 8.0, 2.0, 2.0, 1.0, 9.0, 100.0]
    pairs = [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0), (0, 0), (1, 1)]
    assert capture_ratios(ratios, pairs) == [3.5, 2.0]


def test_a_control_belongs_to_the_captures_of_its_blocks_first_trial() -> None:
    assert capture_ratios([2.0, 0.5, 4.0, 1.0], [(0, 1), (1, 0), (1, 2), (2, 1)]) == [1.0, 2.0]


def test_drift_divides_out_of_paired_ratios() -> None:
    drift = np.linspace(1.0, 2.0, 31)
    interval = ratio_interval((drift * 3e-6).tolist(), (drift * 2e-6).tolist(), captures(31))
    assert interval.low == pytest.approx(1.5)
    assert interval.high == pytest.approx(1.5)


def test_a_difference_below_the_timers_resolution_is_no_evidence() -> None:
    reference, tested = [100.4e-6] * 22, [100.0e-6] * 22
    assert ratio_interval(reference, tested, captures(22)).verdict == "faster"
    assert ratio_interval(reference, tested, captures(22), resolution_s=0.5e-6).verdict == "no difference"


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(MethodError, match="one for each pair"):
        ratio_interval([1.0, 2.0], [1.0], captures(2))
    with pytest.raises(MethodError, match="one for each trial"):
        ratio_interval([1.0, 2.0], [1.0, 2.0], captures(1))


def test_the_slowest_rank_decides() -> None:
    assert slowest_rank([1.0, 3.0, 2.0]) == 3.0


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0, 2.0], [float("nan")]])
def test_a_broken_clock_is_refused(seconds: list[float]) -> None:
    with pytest.raises(MethodError, match="timer"):
        slowest_rank(seconds)


def test_percentiles() -> None:
    assert percentiles([float(value) for value in range(101)]) == (10.0, 50.0, 90.0)
