# SPDX-License-Identifier: Apache-2.0
"""Cheats, each planted in a candidate and seen caught: no times, no comparison, and the reason recorded."""

from __future__ import annotations

import re

import pytest
import torch
from bench_fakes import BASE_S, FakeDevice, FakeLaunch, FakeWorkload, fake_arm, fake_run

from kernellib.bench.comparison import compare_records
from kernellib.bench.device import Ceiling
from kernellib.bench.workload import fingerprint


class ConstantOutput(FakeLaunch):
    """The same finite numbers whatever the inputs."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        self.outputs[slot_idx].fill_(1.0)
        return self.outputs[slot_idx]


class OneSlotForAll(FakeLaunch):
    """Slot 0's result for every slot: reads one weight, which stays in the cache."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        return self.outputs[slot_idx].copy_(super().__call__(0))


class CachedOutput(FakeLaunch):
    """Right on the first call of each slot, which it remembers."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.memory: dict[int, torch.Tensor] = {}

    def __call__(self, slot_idx: int) -> torch.Tensor:
        if slot_idx not in self.memory:
            self.memory[slot_idx] = super().__call__(slot_idx).clone()
        return self.outputs[slot_idx].copy_(self.memory[slot_idx])


class SkipsLastElement(FakeLaunch):
    """Does not write the last element, hoping that it is still there from before."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        last = self.outputs[slot_idx][-1].clone()
        super().__call__(slot_idx)
        self.outputs[slot_idx][-1] = last
        return self.outputs[slot_idx]


class SkipsWhenTimed(FakeLaunch):
    """Honest through both gates and a capture's first trial, then writes nothing."""

    num_honest = 18

    def __call__(self, slot_idx: int) -> torch.Tensor:
        if self.num_calls >= self.num_honest:
            return self.outputs[slot_idx]
        return super().__call__(slot_idx)


class SkipsEverySecondReplay(FakeLaunch):
    """Honest through both gates; then writes in the replays that lead in, and not in the timed ones."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        call_of_slot = self.num_calls // len(self.outputs)
        if call_of_slot >= 3 and call_of_slot % 2 == 0:
            self.num_calls += 1
            return self.outputs[slot_idx]
        return super().__call__(slot_idx)


class LeavesFirstElement(FakeLaunch):
    """Writes the first element in the first two calls of a slot only: it is the same in every version."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        first = self.outputs[slot_idx][0].clone()
        early = self.num_calls < 2 * len(self.outputs)
        super().__call__(slot_idx)
        if not early:
            self.outputs[slot_idx][0] = first
        return self.outputs[slot_idx]


class ReusesOutputsWhenTimed(CachedOutput):
    """Honest through both gates, then returns what it remembers of an earlier version."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        if self.num_calls < 20:
            self.memory.clear()
        else:
            self.num_calls += 1
        return super().__call__(slot_idx)


class OldWeights(FakeLaunch):
    """Computes with a copy of the weights made at build time: right until the weights change."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.weights = [slot["w"].clone() for slot in workload.slots]

    def __call__(self, slot_idx: int) -> torch.Tensor:
        a = self.workload.slots[slot_idx]["a"]
        return torch.mul(a, self.weights[slot_idx], out=self.outputs[slot_idx])


class ZeroesItsInput(FakeLaunch):
    """Right, and leaves zeros in the weight for the calls that follow."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        result = super().__call__(slot_idx)
        self.workload.slots[slot_idx]["w"].zero_()
        return result


class ZeroesItsInputInReplays(FakeLaunch):
    """As ZeroesItsInput, in the captured replay only."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        result = super().__call__(slot_idx)
        if self.num_calls > 2 * len(self.outputs):
            self.workload.slots[slot_idx]["w"].zero_()
        return result


class OneOutput(FakeLaunch):
    """All slots write to one buffer."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.outputs = self.outputs[:1] * len(self.outputs)


class WritesIntoItsInput(FakeLaunch):
    """The result takes an input's place."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.outputs = [slot["a"] for slot in workload.slots]


class BuffersOfTheFirstCapture(FakeLaunch):
    """Every capture writes where the first one did: their placement would not be in the interval."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.outputs = vars(workload).setdefault("first_outputs", self.outputs)


def number_of_build(workload: FakeWorkload) -> int:
    """0 for the first launch of a cheat built for a workload, then 1, 2 ..."""
    number: int = getattr(workload, "num_built", 0)
    workload.num_built = number + 1  # type: ignore[attr-defined]
    return number


class WrongInALaterCapture(FakeLaunch):
    """Right in the first captures, constant in the sixth: checking the first alone would not do."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.wrong = number_of_build(workload) == 5

    def __call__(self, slot_idx: int) -> torch.Tensor:
        return self.outputs[slot_idx].fill_(1.0) if self.wrong else super().__call__(slot_idx)


class OldWeightsInALaterCapture(OldWeights):
    """As OldWeights, in the fourth capture only."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        if number_of_build(workload) != 3:
            self.weights = [slot["w"] for slot in workload.slots]


class Crashes(FakeLaunch):
    def __call__(self, slot_idx: int) -> torch.Tensor:
        raise RuntimeError("out of registers")


class Imprecise(FakeLaunch):
    """Every element off by more than one bf16 unit."""

    def __call__(self, slot_idx: int) -> torch.Tensor:
        return super().__call__(slot_idx).mul_(1.02)


CHEATS = [
    (ConstantOutput, "failed_gate", "ulp"),
    (OneSlotForAll, "failed_gate", "slot 1"),
    (CachedOutput, "failed_gate", "changed inputs"),
    (SkipsLastElement, "failed_gate", "1 of 64 outputs are NaN"),
    (SkipsWhenTimed, "failed_in_trial", "outputs of a timed replay are wrong"),
    (SkipsEverySecondReplay, "failed_in_trial", "192 outputs of a timed replay are wrong"),
    (
        LeavesFirstElement,
        "failed_gate",
        "captured replay with changed inputs, slot 0: 1 of 64 outputs are NaN",
    ),
    (ReusesOutputsWhenTimed, "failed_in_trial", "outputs of a timed replay are wrong"),
    (OldWeights, "failed_recheck", "after timing"),
    (ZeroesItsInput, "failed_gate", "inputs"),
    (ZeroesItsInputInReplays, "failed_gate", "capture 0: the arm overwrote its inputs"),
    (OneOutput, "failed_gate", "shares memory"),
    (WritesIntoItsInput, "failed_gate", "shares memory"),
    (BuffersOfTheFirstCapture, "failed_gate", "capture 1: an output shares memory"),
    (WrongInALaterCapture, "failed_gate", "capture 5, first call"),
    (OldWeightsInALaterCapture, "failed_recheck", "capture 3, after timing"),
    (Crashes, "failed_build", "out of registers"),
    (Imprecise, "failed_gate", "ulp"),
]


@pytest.mark.parametrize(
    ("cheat", "status", "reason"), CHEATS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_cheat_is_caught_and_has_no_times(cheat: type[FakeLaunch], status: str, reason: str) -> None:
    device = FakeDevice()
    arms = [
        fake_arm("eager", "baseline"),
        fake_arm("fused", "candidate", BASE_S / 10, cheat),
        fake_arm("honest", "peer", BASE_S / 2),
    ]
    _, record = fake_run(arms, device=device)
    arm = record.arm("fused")
    assert arm["status"] == status
    assert reason in arm["reason"]
    assert arm["times"] is arm["rates"] is None
    assert record.comparison("eager", "fused") is None
    assert any("fused" in warning for warning in record.data["warnings"])
    if status in ("failed_gate", "failed_build"):
        assert "fused" not in device.log  # never timed
    assert record.valid  # the others stand, as the control says
    honest = record.comparison("eager", "honest")
    assert honest is not None
    assert honest["verdict"] == "faster"


class RemembersByValue(FakeLaunch):
    """Knows the result of each value that it has seen: right in every replay, without reading a weight."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.memory: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, slot_idx: int) -> torch.Tensor:
        key = (slot_idx, fingerprint(self.workload.slots[slot_idx]["a"]))
        if key not in self.memory:
            self.memory[key] = super().__call__(slot_idx).clone()
        return self.outputs[slot_idx].copy_(self.memory[key])


class WorksInTheLeadIn(FakeLaunch):
    """Computes in the replay that leads in, to a place of its own, and copies in the timed one."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        super().__init__(name, seconds, workload)
        self.hidden = [torch.empty_like(output) for output in self.outputs]

    def __call__(self, slot_idx: int) -> torch.Tensor:
        call_of_slot = self.num_calls // len(self.outputs)
        if call_of_slot >= 3 and call_of_slot % 2 == 0:
            self.num_calls += 1
            return self.outputs[slot_idx].copy_(self.hidden[slot_idx])
        self.hidden[slot_idx].copy_(super().__call__(slot_idx))
        return self.outputs[slot_idx]


class MemoryLikeAGpus(FakeDevice):
    """An honest candidate, twice as fast as the baseline, streams at 90 % of the copy bandwidth here."""

    def ceilings(self) -> list[Ceiling]:
        honest = FakeWorkload.bytes_per_call * 3 / (BASE_S / 2)
        return [Ceiling("copy", "byte/s", "made up", (honest / 0.9,)), super().ceilings()[1]]


@pytest.mark.parametrize("cheat", [RemembersByValue, WorksInTheLeadIn])
def test_who_is_right_without_its_work_is_too_fast_to_be_believed(cheat: type[FakeLaunch]) -> None:
    """What no output betrays: see the docstring of gates."""
    for launch, seconds, valid in ((FakeLaunch, BASE_S / 2, True), (cheat, BASE_S / 10, False)):
        arms = [fake_arm("eager", "baseline"), fake_arm("fused", "candidate", seconds, launch)]
        _, record = fake_run(arms, device=MemoryLikeAGpus())
        assert record.arm("fused")["status"] == "passed"
        assert record.valid == valid
    (reason,) = record.invalid_reasons
    assert re.match(r"fused: 4\.\d+ times the same run's copy ceiling, wanted at most 1\.5", reason)


def test_an_honest_candidate_passes_every_check() -> None:
    _, record = fake_run([fake_arm("eager", "baseline"), fake_arm("fused", "candidate", BASE_S / 2)])
    arm = record.arm("fused")
    assert arm["status"] == "passed"
    for when in ("errors_before", "errors_after"):
        assert arm[when]["passed"]
        assert arm[when]["num_slots"] == 3
        assert arm[when]["min_bit_equal_fraction"] == 1.0


@pytest.mark.parametrize("cheat", [ConstantOutput, SkipsWhenTimed, OldWeights])
def test_a_baseline_that_fails_makes_the_record_invalid(cheat: type[FakeLaunch]) -> None:
    arms = [fake_arm("eager", "baseline", BASE_S, cheat), fake_arm("fused", "candidate", BASE_S / 2)]
    _, record = fake_run(arms)
    assert not record.valid
    assert "baseline eager failed" in record.invalid_reasons[0]
    assert record.data["comparisons"] == []


def test_a_candidate_that_was_right_and_is_not_any_more_is_a_regression() -> None:
    honest = [fake_arm("eager", "baseline"), fake_arm("fused", "candidate", BASE_S / 2)]
    broken = [fake_arm("eager", "baseline"), fake_arm("fused", "candidate", BASE_S / 9, CachedOutput)]
    old, new = fake_run(honest)[1], fake_run(broken)[1]
    outcome = compare_records(old, new)
    assert outcome.exit_code == 1
    assert "was right" in outcome.failures[0]
    assert compare_records(new, old).exit_code == 2  # nothing to hold on to
