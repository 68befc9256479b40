# SPDX-License-Identifier: Apache-2.0
"""The paired method on a device with a made-up clock: order, stopping, control, ranks, refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from bench_fakes import (
    BASE_S,
    FakeDevice,
    FakeLaunch,
    FakeWorkload,
    fake_arm,
    fake_record,
    fake_run,
    second_of_ab,
)

from kernellib.bench.errors import BenchError, MethodError, RotationError, TimedInputsError
from kernellib.bench.method import Method, run_paired
from kernellib.bench.schedule import NUM_CAPTURES
from kernellib.bench.workload import check_rotation, check_values, check_versions, fingerprint, min_rotation

ARMS = [fake_arm("eager", "baseline"), fake_arm("fused", "candidate", BASE_S / 2)]


def test_trials_alternate_ab_ba_and_both_arms_of_a_pair_are_adjacent() -> None:
    device = FakeDevice()
    result, _ = fake_run(ARMS, device=device)
    assert result.pairings[0].orders == ["AB", "BA"] * (result.num_trials // 2)
    assert len(device.log) == 4 * result.num_trials  # the pair and the control
    for trial in range(result.num_trials):
        samples = device.log[4 * trial : 4 * trial + 4]
        pair = samples[:2] if trial // 2 % 2 == 0 else samples[2:]  # which pairing comes first moves on
        assert pair == (["eager", "fused"] if trial % 2 == 0 else ["fused", "eager"])
        assert sorted(samples) == ["eager", "eager", "eager", "fused"]


def test_a_twofold_difference_is_found_through_a_drift_of_forty_percent() -> None:
    record = fake_record()
    comparison = record.comparison("eager", "fused")
    assert record.valid
    assert comparison is not None
    assert comparison["ratio"] == pytest.approx(2.0, rel=0.01)
    assert comparison["low"] <= 2.0 <= comparison["high"]
    assert comparison["verdict"] == "faster"
    times = record.arm("fused")["times"]
    assert times["p50"] == pytest.approx(BASE_S / 2 / 3, rel=0.25)  # of one call of three
    assert times["p10"] < times["p50"] < times["p90"]


def test_equal_arms_are_no_win() -> None:
    comparison = fake_record(candidate_s=BASE_S).comparison("eager", "fused")
    assert comparison is not None
    assert comparison["verdict"] == "no difference"


def test_a_control_away_from_one_makes_the_record_invalid() -> None:
    record = fake_record(device=FakeDevice(bias=second_of_ab))
    assert not record.valid
    assert "A/A control" in record.invalid_reasons[0]
    assert record.data["control"]["verdict"] == "slower"


def test_placement_alone_neither_fails_the_control_nor_hides_in_the_interval() -> None:
    device = FakeDevice(placement=0.01, jitter=0.0005)
    record = fake_record(candidate_s=BASE_S, device=device, method=Method(trials=16, max_trials=16))
    assert record.valid
    control, comparison = record.data["control"], record.comparison("eager", "fused")
    assert comparison is not None
    assert control["high"] - control["low"] < 0.006
    assert comparison["high"] - comparison["low"] > 0.006
    times = record.arm("fused")["times"]
    assert len(times["p50_by_capture"]) == record.data["method"]["num_captures"] == NUM_CAPTURES
    assert max(times["p50_by_capture"]) / min(times["p50_by_capture"]) > 1.01


def test_every_capture_has_its_own_launch_and_outputs() -> None:
    result, _ = fake_run(ARMS)
    for state in result.arms:
        addresses = {output.data_ptr() for capture in state.captures for output in capture.outputs}
        assert len(addresses) == NUM_CAPTURES * 3


def test_trials_go_on_until_the_intervals_are_narrow_and_no_longer() -> None:
    method = Method(trials=17, max_trials=400, half_width=0.01)
    quiet, _ = fake_run(ARMS, device=FakeDevice(jitter=1e-4), method=method)
    noisy, _ = fake_run(ARMS, device=FakeDevice(jitter=0.015), method=method)
    assert quiet.num_trials == 18  # whole blocks
    assert 18 < noisy.num_trials < 400
    assert "half-width is below" in noisy.stopped_because


def test_max_trials_bounds_the_run_and_the_record_says_so() -> None:
    method = Method(trials=16, max_trials=23, half_width=1e-6)
    result, record = fake_run(ARMS, method=method)
    assert result.num_trials == 24
    assert any(warning.startswith("max_trials") for warning in record.data["warnings"])


def test_the_slowest_rank_is_a_trials_time() -> None:
    class OneSlowRank(FakeDevice):
        def sample(self, capture, poison):  # type: ignore[no-untyped-def]
            return tuple(
                time * (3.0 if rank == 2 else 1.0)
                for rank, time in enumerate(super().sample(capture, poison))
            )

    record = fake_record(device=OneSlowRank(num_ranks=4))
    comparison = record.comparison("eager", "fused")
    assert comparison is not None
    assert record.data["device"]["num_ranks"] == 4
    assert all(len(ranks) == 4 and max(ranks) == ranks[2] for ranks in comparison["tested_s"])
    assert record.arm("fused")["times"]["p50"] == pytest.approx(3 * BASE_S / 2 / 3, rel=0.25)


def test_inputs_change_between_trials_and_not_within_one() -> None:
    seen: list[int] = []

    class Watching(FakeDevice):
        def sample(self, capture, poison):  # type: ignore[no-untyped-def]
            seen.append(fingerprint(workload.slots[0]["a"]))
            return super().sample(capture, poison)

    workload = FakeWorkload()
    run_paired(workload, ARMS, [("eager", "fused")], Watching(), Method(trials=16, max_trials=16))
    trials = [seen[4 * trial : 4 * trial + 4] for trial in range(16)]
    assert all(len(set(trial)) == 1 for trial in trials)
    assert all(before[0] != after[0] for before, after in pairwise(trials))


@pytest.mark.parametrize("name", ["a", "w"])
@pytest.mark.parametrize("value", [0.0, 1.5, math.nan, math.inf])
def test_constant_or_broken_inputs_are_never_timed(name: str, value: float) -> None:
    workload, device = FakeWorkload(), FakeDevice()
    for values in workload.values if name == "a" else workload.weights:
        for tensor in values:
            tensor.fill_(value)
    with pytest.raises(TimedInputsError, match=name):
        run_paired(workload, ARMS, [("eager", "fused")], device, Method())
    assert device.log == []


@pytest.mark.parametrize("num_others", [1, 31])
def test_one_value_is_found_wherever_others_lie(num_others: int) -> None:
    workload = FakeWorkload()
    for places in (slice(0, num_others), slice(-num_others, None), slice(0, 2 * num_others, 2)):
        weight = torch.full_like(workload.slots[2]["w"], 2.0)
        weight[places] = workload.slots[1]["w"][places]
        workload.slots[2]["w"].copy_(weight)
        with pytest.raises(TimedInputsError, match=r"w of slot 2 .* one value \(2\)"):
            check_values(workload)


def test_mostly_zero_inputs_are_refused() -> None:
    workload = FakeWorkload()
    workload.slots[1]["w"][:40].zero_()
    with pytest.raises(TimedInputsError, match="zero"):
        check_values(workload)


def test_slots_and_versions_must_differ() -> None:
    same_slots = FakeWorkload()
    same_slots.weights[0][1].copy_(same_slots.weights[0][0])
    with pytest.raises(TimedInputsError, match="two slots"):
        check_versions(same_slots)
    same_versions = FakeWorkload()
    for target, source in zip(same_versions.values[2], same_versions.values[0], strict=True):
        target.copy_(source)
    with pytest.raises(TimedInputsError, match="no new values"):
        check_versions(same_versions)
    stale = FakeWorkload()
    stale.weights[1] = stale.weights[0]
    with pytest.raises(TimedInputsError, match="fresh version left w unchanged"):
        check_versions(stale)


def test_a_rotation_that_the_cache_holds_is_refused() -> None:
    workload = FakeWorkload(num_slots=3)
    assert workload.slot_bytes == 128
    assert check_rotation(workload, 256) == 1.0
    with pytest.raises(RotationError, match="at least 4"):
        check_rotation(workload, 257)
    assert [min_rotation(51_380_224, mib * 2**20) for mib in (50, 60, 256)] == [3, 3, 7]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trials": 15}, "trials"),
        ({"trials": 30, "max_trials": 20}, "max_trials"),
        ({"half_width": 0.0}, "half_width"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_a_method_without_sense_is_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(MethodError, match=text):
        Method(**changes)  # type: ignore[arg-type]


def test_one_baseline_and_known_names_are_needed() -> None:
    with pytest.raises(MethodError, match="baselines"):
        run_paired(FakeWorkload(), ARMS[1:], [], FakeDevice(), Method())
    with pytest.raises(MethodError, match="nobody"):
        run_paired(FakeWorkload(), ARMS, [("eager", "nobody")], FakeDevice(), Method())


def test_fingerprints_see_a_single_bit() -> None:
    tensor = torch.arange(9, dtype=torch.int16)
    before = fingerprint(tensor)
    tensor[8] ^= 1
    assert fingerprint(tensor) != before


@pytest.mark.parametrize("times", [(0.0,), (-1e-6,), (math.nan,), (math.inf,), ()])
def test_a_clock_without_sense_is_an_error(times: tuple[float, ...]) -> None:
    class Broken(FakeDevice):
        def sample(self, capture, poison):  # type: ignore[no-untyped-def]
            honest = super().sample(capture, poison)
            return times if len(self.log) > 50 else honest

    with pytest.raises(MethodError, match="timer"):
        fake_run(ARMS, device=Broken())


def test_a_clock_with_times_of_too_many_ranks_is_an_error() -> None:
    class Talkative(FakeDevice):
        def sample(self, capture, poison):  # type: ignore[no-untyped-def]
            return super().sample(capture, poison) * 2

    with pytest.raises(BenchError, match="2 times, wanted one for each of 1"):
        fake_run(ARMS, device=Talkative())


def test_a_clock_that_always_says_the_same_proves_nothing() -> None:
    class Frozen(FakeDevice):
        def sample(self, capture, poison):  # type: ignore[no-untyped-def]
            super().sample(capture, poison)
            return (BASE_S,)

    comparison = fake_run(ARMS, device=Frozen())[1].comparison("eager", "fused")
    assert comparison is not None
    assert comparison["verdict"] == "no difference"
    assert comparison["low"] < 1.0 < comparison["high"], "as wide as the timer is coarse"


def test_the_fake_launch_is_right() -> None:
    workload = FakeWorkload()
    launch = FakeLaunch("x", 1.0, workload)
    assert torch.equal(launch(0), workload.slots[0]["a"] * workload.slots[0]["w"])
