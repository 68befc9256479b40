# SPDX-License-Identifier: Apache-2.0
"""A device with a made-up clock and an operator small enough to run a thousand times: y = bf16(a * w)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kernellib.bench.assemble import timed_record
from kernellib.bench.device import Capture, Ceiling
from kernellib.bench.method import Method, RunResult, run_paired
from kernellib.bench.record import Record
from kernellib.bench.state import device_state
from kernellib.bench.workload import EXACT_ROUNDING, Arm, Expected, Launch, Role, Workload
from kernellib.numerics.bf16 import round_to_bf16, to_float64

NUM_ELEMENTS = 64
BASE_S = 200e-6  # of a replay: as long as the real thing, against the same timer resolution


class FakeWorkload(Workload):
    """``a`` changes between trials, ``w`` rotates and changes only in the fresh version."""

    operator = "fake_scale"
    num_versions = 3
    bytes_per_call = 3 * NUM_ELEMENTS * 2
    flops_per_call = NUM_ELEMENTS
    rotating = ("w",)

    def __init__(self, num_slots: int = 3, seed: int = 0) -> None:
        print(f"seed {seed}")
        generator = torch.Generator().manual_seed(seed)

        def draw() -> list[torch.Tensor]:
            return [
                torch.randn(NUM_ELEMENTS, generator=generator).to(torch.bfloat16) for _ in range(num_slots)
            ]

        self.values = [draw() for _ in range(self.num_versions + 1)]
        for version in self.values:
            for slot_idx, tensor in enumerate(version):
                tensor[0] = 1.5 + slot_idx  # an element that never changes, for who hopes to leave it out
        self.weights = [draw(), draw()]  # for trials, and for the fresh version
        self.slots = [
            {"a": a.clone(), "w": w.clone()} for a, w in zip(self.values[0], self.weights[0], strict=True)
        ]

    def set_version(self, version: int) -> None:
        weights = self.weights[int(version == self.num_versions)]
        for slot, a, w in zip(self.slots, self.values[version], weights, strict=True):
            slot["a"].copy_(a)
            slot["w"].copy_(w)

    def oracle(self, slot_idx: int) -> Expected:
        slot = self.slots[slot_idx]
        return Expected(round_to_bf16(to_float64(slot["a"]) * to_float64(slot["w"])))


class FakeLaunch:
    """Computes the operator into its own buffers, and carries the seconds that the fake clock gives it."""

    def __init__(self, name: str, seconds: float, workload: FakeWorkload) -> None:
        self.name, self.seconds, self.workload = name, seconds, workload
        self.outputs = [torch.full_like(slot["a"], math.nan) for slot in workload.slots]
        self.num_calls = 0

    def __call__(self, slot_idx: int) -> torch.Tensor:
        self.num_calls += 1
        slot = self.workload.slots[slot_idx]
        torch.mul(slot["a"], slot["w"], out=self.outputs[slot_idx])
        return self.outputs[slot_idx]


class FakeDevice:
    """Runs launches on the CPU; its clock drifts slowly, jitters a little, and is the same every time.

    ``log`` holds the name of each timed launch, in order. ``placement`` is the relative standard deviation of
    what a capture's place does to all of its times. ``bias`` makes a sample slower or faster by its number,
    as something other than the arm would.
    """

    name, kind = "fake device", "fake"
    resolution_s = 0.5e-6

    def __init__(
        self, seed: int = 0, *, jitter: float = 0.004, num_ranks: int = 1, llc_bytes: int = 0,
        placement: float = 0.0, bias: Callable[[int], float] = lambda _: 1.0, num_lead_in: int = 1,
    ) -> None:  # fmt: skip
        self.num_ranks, self.num_rounds, self.llc_bytes = num_ranks, 1, llc_bytes
        self._random = np.random.default_rng(seed)
        self._jitter, self._placement, self._bias, self._num_lead_in = jitter, placement, bias, num_lead_in
        self.log: list[str] = []

    def describe(self) -> dict[str, Any]:
        return {"arch": "none"}

    def state(self) -> dict[str, Any]:
        return device_state("fake")

    def capture(self, launch: Launch, num_slots: int) -> Capture:
        assert isinstance(launch, FakeLaunch)
        outputs = [launch(slot_idx) for slot_idx in range(num_slots)]

        def replay() -> None:
            for slot_idx, output in enumerate(outputs):
                assert launch(slot_idx) is output  # a graph writes where it did when it was captured

        seconds = launch.seconds * math.exp(self._random.normal(0.0, self._placement))
        return Capture(outputs, replay, (launch.name, seconds))

    def sample(self, capture: Capture, poison: Callable[[], None]) -> tuple[float, ...]:
        for _ in range(self._num_lead_in):
            capture.replay()
        poison()
        capture.replay()
        name, seconds = capture.keep
        seconds *= self._bias(len(self.log))
        self.log.append(name)
        drift = 1.0 + 0.2 * math.sin(len(self.log) / 40)
        jitter = self._random.normal(1.0, self._jitter, self.num_ranks)
        return tuple(float(seconds * drift * factor) for factor in jitter)

    def ceilings(self) -> list[Ceiling]:
        return [
            Ceiling("copy", "byte/s", "made up", (1e9, 1.1e9)),
            Ceiling("matmul", "FLOP/s", "made up", (1e12, 1.1e12)),
        ]

    def synchronize(self) -> None:
        pass


def second_of_ab(sample: int) -> float:
    """A bias with one comparison and the control: second samples of AB trials 3 % slower, BA trials fair."""
    samples_of_a_trial = 4
    trial, place = divmod(sample, samples_of_a_trial)
    return 1.03 if trial % 2 == 0 and place % 2 == 1 else 1.0


def fake_arm(name: str, role: Role, seconds: float = BASE_S, launch: type[FakeLaunch] = FakeLaunch) -> Arm:
    return Arm(name, role, f"{name} arm", lambda workload: launch(name, seconds, workload), EXACT_ROUNDING)


def fake_run(
    arms: Sequence[Arm], *, device: FakeDevice | None = None, method: Method | None = None, seed: int = 0
) -> tuple[RunResult, Record]:
    """Every arm against the baseline, as a run and as its record."""
    workload = FakeWorkload(seed=seed)
    device = device or FakeDevice(seed)
    method = method or Method(trials=21, max_trials=61, half_width=0.02, seed=seed)
    baseline = next(arm.name for arm in arms if arm.role == "baseline")
    comparisons = [(baseline, arm.name) for arm in arms if arm.role != "baseline"]
    result = run_paired(workload, arms, comparisons, device, method)
    return result, timed_record(result, workload, device, method, target="cuda", command="fake")


def fake_record(candidate_s: float = BASE_S / 2, seed: int = 0, **options: Any) -> Record:
    """A record of a baseline and a candidate, by default twice as fast."""
    arms = [fake_arm("eager", "baseline"), fake_arm("fused", "candidate", candidate_s)]
    return fake_run(arms, seed=seed, **options)[1]
