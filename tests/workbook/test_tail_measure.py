# SPDX-License-Identifier: Apache-2.0
"""What the notebooks time, with a clock of our own: ranking, records, claims, and silence without a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernellib.bench.assemble import timed_record
from kernellib.bench.cases.latent_moe_tail import H200_GOALS
from kernellib.bench.device import Capture, Ceiling
from kernellib.bench.method import Method, run_paired
from kernellib.bench.record import Record
from kernellib.bench.schedule import NUM_CAPTURES
from kernellib.bench.state import device_state
from kernellib.bench.workload import EXACT_ROUNDING, Arm, Expected, Launch, Role, Workload
from kernellib.numerics.bf16 import to_float64
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, TailConfig
from kernellib.targets import TargetInfo
from kernellib.workbook.display import Note
from kernellib.workbook.latent_moe_tail import measure, tuning
from kernellib.workbook.latent_moe_tail.tuning import Candidate

SEED = 20261202
ROTATION = 2
SIZE = 256
GPU = TargetInfo("mi355x", True, None, "a made-up GPU", "cpu", "measured")
EMULATOR = TargetInfo("emulator", True, None, "this CPU", "cpu", "none")


class Doubling(Workload):
    """A toy in place of the tail: y = x + x, which bf16 has exactly."""

    operator = "doubling"
    num_versions = 2
    bytes_per_call = 4 * SIZE
    flops_per_call = SIZE
    rotating = ("x",)

    def __init__(self, rotation: int, seed: int, _device: str) -> None:
        self.slots = [{"x": torch.zeros(SIZE, dtype=torch.bfloat16)} for _ in range(rotation)]
        self._seed = seed

    def set_version(self, version: int) -> None:
        generator = torch.Generator().manual_seed(self._seed + version)
        for slot in self.slots:
            slot["x"].copy_(torch.randn(SIZE, generator=generator))

    def oracle(self, slot_idx: int) -> Expected:
        return Expected(2.0 * to_float64(self.slots[slot_idx]["x"]))


def doubling_arms(_target: str, _config: TailConfig | None, names: Sequence[str]) -> list[Arm]:
    def prepare(workload: Workload) -> Launch:
        return lambda slot_idx: workload.slots[slot_idx]["x"] + workload.slots[slot_idx]["x"]

    roles: dict[str, Role] = {"eager": "baseline", "fused": "candidate"}
    return [Arm(name, roles[name], "x + x", prepare, EXACT_ROUNDING) for name in names]


class ScriptedClock:
    """A device whose times are given arm by arm, in order of capture; values are computed on the CPU.

    ``ab_bias`` slows the second sample of each AB trial, as no fair clock would: the control must fail.
    """

    name, kind, num_ranks, num_rounds, llc_bytes, resolution_s = "a made-up GPU", "fake", 1, 1, 0, 0.0

    def __init__(self, microseconds: Sequence[float], ab_bias: float = 1.0) -> None:
        self._times = list(microseconds)
        self._of: dict[int, float] = {}
        self._turn = 0
        self._ab_bias = ab_bias
        self._random = np.random.default_rng(SEED)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "num_ranks": 1, "llc_bytes": 0}

    def state(self) -> dict[str, Any]:
        return device_state("fake", 0)

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def ceilings(self) -> list[Ceiling]:
        return [
            Ceiling("copy", "byte/s", "copy", (4e12,)),
            Ceiling("matmul", "FLOP/s", "matrix product", (1e15,)),
        ]

    def capture(self, launch: Callable[[int], torch.Tensor], num_slots: int) -> Capture:
        outputs = [torch.empty_like(launch(slot)) for slot in range(num_slots)]

        def replay() -> None:
            for slot, output in enumerate(outputs):
                output.copy_(launch(slot))

        capture = Capture(outputs, replay)
        self._of[id(outputs)] = self._times[len(self._of) // NUM_CAPTURES] * 1e-6
        return capture

    def sample(self, capture: Capture, poison: Callable[[], None]) -> tuple[float, ...]:
        poison()
        capture.replay()
        self._turn += 1
        jitter = self._random.normal(1.0, 2e-4)  # no two trials alike, no arm favoured
        place = (self._turn - 1) % 8  # of two pairs' samples in an AB and a BA trial
        bias = self._ab_bias if place in (1, 3) else 1.0
        return (self._of[id(capture.outputs)] * len(capture.outputs) * jitter * bias,)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up GPU measures the toy."""
    monkeypatch.setattr(measure, "tail_arms", doubling_arms)
    monkeypatch.setattr(measure, "TailWorkload", Doubling)


def correct(config: TailConfig) -> Candidate:
    return Candidate(config, "correct", "0 ulp")


def test_candidates_are_ranked_by_the_clock(toy: None) -> None:
    slow, fast = DEFAULT_CONFIG, TailConfig(4, 7, 2)
    crashed = Candidate(TailConfig(28, 1, 1), "crashed", "RuntimeError: out of registers")
    clock = ScriptedClock([20.0, 12.0, 10.0])  # eager, slow, fast
    measured = measure.measure_candidates(
        [correct(slow), crashed, correct(fast)], GPU, seed=SEED, trials=16, rotation=ROTATION, device=clock
    )
    assert [candidate.status for candidate in measured.candidates] == ["correct", "crashed", "correct"]
    ranking = tuning.rank(measured.candidates)
    assert [candidate.config for candidate in ranking] == [fast, slow]
    assert ranking[0].time_us == pytest.approx(10.0, rel=1e-3)
    (claim,) = measure.control_claims(measured)
    assert (claim.verdict, claim.source) == ("pass", "measured")


def ab_record(times: Sequence[float], ab_bias: float = 1.0) -> Record:
    workload = Doubling(ROTATION, SEED, "cpu")
    clock, method = ScriptedClock(times, ab_bias), Method(trials=16, max_trials=16, seed=SEED)
    arms = doubling_arms("", None, ("eager", "fused"))
    result = run_paired(workload, arms, [("eager", "fused")], clock, method)
    return timed_record(result, workload, clock, method, target="cuda", command="a test")


def test_the_ab_is_saved_shown_and_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: dict[str, Any] = {}

    def compare(target: str, **options: Any) -> Record:
        made.update(options, target=target)
        return ab_record([14.0, 10.0])

    monkeypatch.setattr(measure, "compare_tail", compare)
    record = measure.run_ab(GPU, profile="quick", seed=3, trials=21, rotation=8, artifact_dir=str(tmp_path))
    assert record is not None
    assert (made["target"], made["trials"], made["rotation"], made["seed"]) == ("mi355x", 21, 8, 3)
    assert Record.load(tmp_path / measure.RECORD_FILE).data == record.data
    verdicts = {claim.name: claim.verdict for claim in measure.ab_claims(record)}
    assert verdicts == {
        "every timed arm stays right in every trial": "pass",
        "the A/A control finds no difference": "pass",
        "the fused launch is faster than the unfused chain": "pass",
    }
    shown = measure.ab_view(record)
    text = " ".join(repr(item) for item in shown)
    assert "1.4" in text
    assert "measured" in "".join(getattr(item, "source", "") for item in shown)
    assert shown[-1].data.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("times", "ab_bias", "failing"),
    [
        ([10.0, 10.0], 1.0, {"the fused launch is faster than the unfused chain"}),
        ([10.0, 12.0], 1.0, {"the fused launch is faster than the unfused chain"}),
        (
            [14.0, 10.0],
            1.02,
            {"the A/A control finds no difference", "the fused launch is faster than the unfused chain"},
        ),
    ],
)
def test_no_win_is_claimed_without_one(times: list[float], ab_bias: float, failing: set[str]) -> None:
    claims = measure.ab_claims(ab_record(times, ab_bias))
    assert {claim.name for claim in claims if claim.verdict == "fail"} == failing


class H200Clock(ScriptedClock):
    """A copy takes 1 s for 4e12 bytes."""

    name = "NVIDIA H200"


def h200_record(eager: float, max_autotune: float, fused: float) -> Record:
    """Times in microseconds; the toy's 1,024 bytes in ``fused`` are its bandwidth."""
    workload = Doubling(ROTATION, SEED, "cpu")
    clock = H200Clock([eager, max_autotune, fused])
    method = Method(trials=16, max_trials=16, seed=SEED)
    arms = doubling_arms("", None, ("eager", "fused"))
    arms.insert(1, Arm("max_autotune", "peer", "x + x", arms[0].prepare, EXACT_ROUNDING))
    pairs = [("eager", "fused"), ("max_autotune", "fused")]
    result = run_paired(workload, arms, pairs, clock, method)
    return timed_record(result, workload, clock, method, target="cuda", command="a test")


TOY_US = 4 * SIZE / 4e12 * 1e6  # of a copy's bandwidth


@pytest.mark.parametrize(
    ("eager", "max_autotune", "fused", "failing"),
    [
        (1.77, 1.14, 0.99 / 0.9, {"eager", "max_autotune"}),
        (1.77 / 0.91, 1.14 / 0.91, 1 / 0.91, set()),
        (1.73 / 0.91, 1.14 / 0.91, 1 / 0.91, {"eager"}),
        (1.77 / 0.91, 1.11 / 0.91, 1 / 0.91, {"max_autotune"}),
        (1.77 / 0.89, 1.14 / 0.89, 1 / 0.89, {"copy"}),
    ],
)
def test_each_goal_of_an_h200_is_a_claim(
    eager: float, max_autotune: float, fused: float, failing: set[str]
) -> None:
    record = h200_record(eager * TOY_US, max_autotune * TOY_US, fused * TOY_US)
    claims = measure.goal_claims(record)
    assert len(claims) == 3
    assert {name for name in H200_GOALS for c in claims if name in c.name and c.verdict == "fail"} == failing
    assert not measure.goal_claims(ab_record([14.0, 10.0])), "other GPUs have no goal"


def test_without_a_clock_nothing_is_timed(tmp_path: Path) -> None:
    stale = tmp_path / measure.RECORD_FILE
    stale.write_text("{}")
    record = measure.run_ab(
        EMULATOR, profile="quick", seed=0, trials=21, rotation=8, artifact_dir=str(tmp_path)
    )
    assert record is None
    assert not stale.exists(), "a record of an earlier run must not lie beside this artifact"
    assert measure.ab_claims(None) == []
    (note,) = measure.ab_view(None)
    assert isinstance(note, Note)
    assert "nothing was timed" in note.text
    untouched = measure.measure_candidates([correct(DEFAULT_CONFIG)], EMULATOR, seed=0, trials=5, rotation=2)
    assert untouched.candidates == [correct(DEFAULT_CONFIG)]
    assert measure.control_claims(untouched) == []
