# SPDX-License-Identifier: Apache-2.0
"""The schedule is balanced; and simulated runs, in which captures differ by where they lie.

The simulation draws a factor for each capture and one for each sample, and puts the times through the
schedule and the statistics that real runs use. Standard deviations are those seen on an H200: 0.3 % from
sample to sample, and 0.5 % between captures (two captures of one chain lay 0.34 % and 0.46 % apart).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
from bench_fakes import fake_arm

from kernellib.bench.method import ArmState, Method, Pairing
from kernellib.bench.schedule import MIN_TRIALS, NUM_CAPTURES, Order, turn_of, whole_blocks
from kernellib.bench.stats import Interval, bootstrap_median

NUM_RUNS = 200
NUM_TRIALS = whole_blocks(Method().trials)
PASS_S = 190e-6  # of the tail's chain over eight weights
SAMPLE_NOISE, PLACEMENT = 0.003, 0.005
RESOLUTION_S = 0.125e-6
NUM_VERSIONS = 3

Bias = Callable[[Order, int], float]  # (order of the trial, place in it) -> factor of the time


def fair(_order: Order, _place: int) -> float:
    return 1.0


def second_one_percent_slower_in_ab(order: Order, place: int) -> float:
    return 1.01 if order == "AB" and place == 1 else 1.0


def second_one_percent_slower(_order: Order, place: int) -> float:
    return 1.01 if place == 1 else 1.0


def simulated_interval(
    seed: int,
    *,
    control: bool = False,
    speedup: float = 1.0,
    placement: float = PLACEMENT,
    bias: Bias = fair,
) -> Interval:
    """One run: the interval of a comparison (the tested arm ``speedup`` times as fast), or of the control."""
    random = np.random.default_rng(seed)
    drift = 1.0 + 0.1 * random.uniform(-1, 1) * np.linspace(0, 1, 2 * NUM_TRIALS)
    reference = PASS_S * np.exp(random.normal(0, placement, NUM_CAPTURES))
    tested = reference if control else PASS_S / speedup * np.exp(random.normal(0, placement, NUM_CAPTURES))
    state = ArmState(fake_arm("eager", "baseline"))
    pairing = Pairing(state, state, control)
    for trial in range(NUM_TRIALS):
        turn = turn_of(trial, control=control)
        times = {}
        for place, letter in enumerate(turn.order):
            seconds = reference[turn.reference] if letter == "A" else tested[turn.tested]
            noise = np.exp(random.normal(0, SAMPLE_NOISE)) * drift[2 * trial + place]
            times[letter] = (float(seconds * noise * bias(turn.order, place)),)
        pairing.orders.append(turn.order)
        pairing.captures.append((turn.reference, turn.tested))
        pairing.reference_s.append(times["A"])
        pairing.tested_s.append(times["B"])
    return pairing.interval(Method(seed=seed), RESOLUTION_S)


def share(predicate: Callable[[Interval], bool], **options: object) -> float:
    """Of simulated runs for which ``predicate`` holds."""
    print(f"seeds 0 to {NUM_RUNS - 1}")
    found = [predicate(simulated_interval(seed, **options)) for seed in range(NUM_RUNS)]  # type: ignore[arg-type]
    return sum(found) / NUM_RUNS


def contains_one(interval: Interval) -> bool:
    return interval.contains_one


@pytest.mark.parametrize("placement", [0.0, PLACEMENT, 0.02])
def test_the_control_contains_one_however_captures_lie(placement: float) -> None:
    assert share(contains_one, control=True, placement=placement) >= 0.9


def test_equal_arms_are_no_difference_although_their_captures_differ() -> None:
    assert share(contains_one) >= 0.9


def test_the_interval_covers_a_true_difference() -> None:
    assert share(lambda interval: interval.low <= 1.02 <= interval.high, speedup=1.02) >= 0.9


@pytest.mark.parametrize(("speedup", "verdict"), [(1.02, "faster"), (1 / 1.02, "slower")])
def test_two_percent_are_detected(speedup: float, verdict: str) -> None:
    assert share(lambda interval: interval.verdict == verdict, speedup=speedup) >= 0.95


def test_a_bias_in_one_order_fails_the_control_although_captures_differ_as_much() -> None:
    caught = share(
        lambda interval: not interval.contains_one, control=True, bias=second_one_percent_slower_in_ab
    )
    assert caught >= 0.9  # the control moves by half a percent


def test_a_bias_in_both_orders_divides_out() -> None:
    assert share(contains_one, control=True, bias=second_one_percent_slower) >= 0.9


def test_one_capture_of_each_would_fail_half_of_all_controls() -> None:
    """Revision 1 of the method: the simulation does what an H200 did."""

    def trials_drawn(seed: int) -> bool:
        random = np.random.default_rng(seed)
        difference = random.normal(0, PLACEMENT) - random.normal(0, PLACEMENT)
        noise = random.normal(0, SAMPLE_NOISE, (2, NUM_TRIALS))
        ratios = np.exp(difference + noise[0] - noise[1])
        draws = np.median(random.choice(ratios, (500, NUM_TRIALS)), axis=1)
        low, high = np.percentile(draws, [2.5, 97.5])
        return bool(low <= 1.0 <= high)

    assert np.mean([trials_drawn(seed) for seed in range(NUM_RUNS)]) < 0.5


def test_a_bootstrap_over_few_captures_covers_too_seldom() -> None:
    """Why there are eight of them."""
    covered = {}
    for count in (2, NUM_CAPTURES):
        runs = [np.random.default_rng(seed).normal(1.0, 0.005, count).tolist() for seed in range(NUM_RUNS)]
        covered[count] = np.mean([contains_one(bootstrap_median(run, num_resamples=500)) for run in runs])
    print(f"seeds 0 to {NUM_RUNS - 1}: {covered}")
    assert covered[2] < 0.6
    assert covered[NUM_CAPTURES] >= 0.9


def test_every_capture_meets_every_version_in_either_order_equally_often() -> None:
    period = 2 * NUM_CAPTURES * NUM_VERSIONS
    for control in (False, True):
        turns = [turn_of(trial, control=control) for trial in range(period)]
        for side in ("reference", "tested"):
            counts = Counter(
                (getattr(turn, side), turn.order, trial % NUM_VERSIONS) for trial, turn in enumerate(turns)
            )
            everything = product(range(NUM_CAPTURES), ("AB", "BA"), range(NUM_VERSIONS))
            assert counts == dict.fromkeys(everything, 1)


def test_a_block_is_ab_then_ba_on_the_same_captures() -> None:
    for first in range(0, 4 * NUM_CAPTURES, 2):
        for control in (False, True):
            ab, ba = (turn_of(trial, control=control) for trial in (first, first + 1))
            assert (ab.order, ba.order) == ("AB", "BA")
            wanted = (ab.tested, ab.reference) if control else (ab.reference, ab.tested)
            assert (ba.reference, ba.tested) == wanted
            assert (ab.reference != ab.tested) == control


def test_the_fewest_trials_use_every_capture_on_either_side() -> None:
    for control in (False, True):
        turns = [turn_of(trial, control=control) for trial in range(MIN_TRIALS)]
        for side in ("reference", "tested"):
            assert {getattr(turn, side) for turn in turns} == set(range(NUM_CAPTURES))
    assert [whole_blocks(trials) for trials in (16, 17, 21)] == [16, 18, 22]
    assert all(turn_of(a) != turn_of(b) for a, b in pairwise(range(64)))
