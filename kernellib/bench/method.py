# SPDX-License-Identifier: Apache-2.0
"""The paired A/B method: gates, alternating trials, the A/A control, the stopping rule.

For each comparison (reference arm, tested arm) a trial takes one sample of both, in the order AB, the
next trial in the order BA. The last comparison is the control: the baseline against a second capture of
itself, whose interval must contain 1, or else the run is invalid.

Stopping rule: at least ``trials`` trials, then more until every interval's half-width is below
``half_width`` of its median, at most ``max_trials``. The rule looks at the width only, never at which
side of 1 the interval lies, so that it does not stop on a lucky difference.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .device import Capture, Ceiling, Device
from .errors import BenchError, MethodError
from .gates import Checker, GateResult, poison
from .stats import Interval, ratio_interval, slowest_rank
from .workload import Arm, Workload, check_rotation, check_versions, fingerprints

# Raise it whenever a change makes times or intervals incomparable with those of older records.
METHOD_REVISION = 1
CONTROL = "control"
CHECK_EVERY = 10  # trials between two looks at the stopping rule
Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Progress that nobody asked for."""


@dataclass(frozen=True)
class Method:
    """Parameters of the method.

    Attributes:
        trials: fewest paired trials.
        max_trials: most of them.
        half_width: relative half-width of every interval at which trials end.
        confidence: of the intervals.
        seed: of inputs and of the bootstrap.

    Raises:
        MethodError: a value out of range.
    """

    trials: int = 21
    max_trials: int = 201
    half_width: float = 0.01
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 5:
            raise MethodError(f"trials got {self.trials}, wanted at least 5; an interval needs some samples")
        if self.max_trials < self.trials:
            raise MethodError(f"max_trials got {self.max_trials}, wanted at least trials, {self.trials}")
        if not 0.0 < self.half_width < 1.0:
            raise MethodError(f"half_width got {self.half_width}, wanted a share between 0 and 1")
        if not 0.5 <= self.confidence < 1.0:
            raise MethodError(f"confidence got {self.confidence}, wanted at least 0.5 and below 1")


@dataclass
class ArmState:
    """One arm during a run. ``status``: "passed", "failed_build", "failed_gate", "failed_in_trial",
    "failed_recheck"; an arm that is not "passed" has no times in the record."""

    arm: Arm
    status: str = "passed"
    reason: str | None = None
    gate: GateResult | None = None
    recheck: GateResult | None = None
    capture: Capture | None = None

    @property
    def passed(self) -> bool:
        """Whether the arm is right so far."""
        return self.status == "passed"

    def fail(self, status: str, reason: str) -> None:
        """Marks the arm as failed; the first failure stays."""
        if self.passed:
            self.status, self.reason = status, reason


@dataclass
class Pairing:
    """The trials of one comparison: seconds of a whole replay on each rank, in trial order."""

    reference: ArmState
    tested: ArmState
    orders: list[str] = field(default_factory=list)
    reference_s: list[tuple[float, ...]] = field(default_factory=list)
    tested_s: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether both arms are right so far."""
        return self.reference.passed and self.tested.passed

    def interval(self, method: Method, resolution_s: float) -> Interval:
        """Of reference time / tested time, each the maximum over ranks."""
        return ratio_interval(
            [slowest_rank(times) for times in self.reference_s],
            [slowest_rank(times) for times in self.tested_s],
            resolution_s=resolution_s,
            confidence=method.confidence,
            seed=method.seed,
        )


@dataclass
class RunResult:
    """Everything a run found; ``record.timed_record`` turns it into a record."""

    arms: list[ArmState]
    pairings: list[Pairing]
    control: Pairing | None
    coverage: float
    num_trials: int
    stopped_because: str
    state_before: dict[str, Any]
    state_after: dict[str, Any]
    ceilings: list[Ceiling]


def _why(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0][:300]


def _gate(state: ArmState, checker: Checker, workload: Workload, device: Device) -> None:
    """Builds, checks, captures and checks again; a failing or crashing arm is marked, not raised."""
    num_slots, tolerance = len(workload.slots), state.arm.tolerance
    workload.set_version(0)
    before = fingerprints(workload)
    try:
        launch = state.arm.prepare(workload)
        with torch.no_grad():
            outputs = [launch(slot_idx).clone() for slot_idx in range(num_slots)]
        device.synchronize()
        state.gate = checker.full(outputs, 0, tolerance)
        if not state.gate.passed:
            return state.fail("failed_gate", f"first call, {state.gate.reason}")
        state.capture = device.capture(launch, num_slots)
        workload_changed = fingerprints(workload) != before
        state.gate = _check_replay(state, checker, workload, device, version=1)
    except Exception as error:  # a candidate that crashes is recorded, and the others go on
        return state.fail("failed_build", _why(error))
    if workload_changed:
        return state.fail("failed_gate", "the arm overwrote its inputs")
    if not state.gate.passed:
        state.fail("failed_gate", f"captured replay with changed inputs, {state.gate.reason}")
    return None


def _check_replay(
    state: ArmState, checker: Checker, workload: Workload, device: Device, version: int
) -> GateResult:
    """A replay with another version's values in the inputs and NaN in the outputs, fully checked."""
    assert state.capture is not None
    workload.set_version(version)
    poison(state.capture.outputs)
    state.capture.replay()
    device.synchronize()
    return checker.full(state.capture.outputs, version, state.arm.tolerance)


def _sample(state: ArmState, checker: Checker, device: Device, version: int) -> tuple[float, ...] | None:
    """One timed replay, its outputs checked; None when they are wrong (the arm has then failed)."""
    capture = state.capture
    assert capture is not None
    seconds = device.sample(capture, partial(poison, capture.outputs))
    slowest_rank(seconds)  # a broken clock shows here
    if len(seconds) != device.num_ranks:
        raise BenchError(
            f"the device gave {len(seconds)} times, wanted one for each of {device.num_ranks} ranks"
        )
    wrong = checker.num_wrong(capture.outputs, version, state.arm.tolerance)
    if wrong:
        state.fail("failed_in_trial", f"{wrong} outputs of a timed replay are wrong")
        return None
    return seconds


def _trial(trial: int, pairings: Sequence[Pairing], checker: Checker, device: Device, version: int) -> None:
    """One sample of both arms of every living pairing; which pairing comes first moves on as well."""
    order = "AB" if trial % 2 == 0 else "BA"
    for turn in range(len(pairings)):
        pairing = pairings[(trial + turn) % len(pairings)]
        if not pairing.alive:
            continue
        both = {"A": pairing.reference, "B": pairing.tested}
        times = {letter: _sample(both[letter], checker, device, version) for letter in order}
        reference_s, tested_s = times["A"], times["B"]
        if reference_s is None or tested_s is None:
            continue
        pairing.orders.append(order)
        pairing.reference_s.append(reference_s)
        pairing.tested_s.append(tested_s)


def _narrow_enough(pairings: Sequence[Pairing], method: Method, device: Device) -> bool:
    alive = [pairing for pairing in pairings if pairing.alive]
    return all(
        pairing.interval(method, device.resolution_s).half_width < method.half_width for pairing in alive
    )


def _run_trials(
    pairings: Sequence[Pairing], checker: Checker, workload: Workload, device: Device, method: Method
) -> tuple[int, str]:
    """All trials; returns how many, and why they ended."""
    for trial in range(method.max_trials):
        if not any(pairing.alive for pairing in pairings):
            return trial, "no pair of arms is left"
        due = trial >= method.trials and (trial - method.trials) % CHECK_EVERY == 0
        if due and _narrow_enough(pairings, method, device):
            return trial, f"every interval's half-width is below {method.half_width:.2%}"
        version = trial % workload.num_versions
        workload.set_version(version)
        _trial(trial, pairings, checker, device, version)
    if _narrow_enough(pairings, method, device):
        return method.max_trials, f"every interval's half-width is below {method.half_width:.2%}"
    return method.max_trials, f"max_trials reached before every half-width was below {method.half_width:.2%}"


def _control_of(baseline: ArmState, workload: Workload, device: Device, checker: Checker) -> Pairing | None:
    """The baseline paired with a second capture of itself."""
    if not baseline.passed:
        return None
    twin = ArmState(replace(baseline.arm, name=CONTROL, description="second capture of the baseline"))
    _gate(twin, checker, workload, device)
    return Pairing(baseline, twin)


def _pair(states: Sequence[ArmState], comparisons: Sequence[tuple[str, str]]) -> list[Pairing]:
    by_name = {state.arm.name: state for state in states}
    unknown = {name for pair in comparisons for name in pair} - set(by_name)
    if unknown or len(by_name) != len(states):
        raise MethodError(
            f"comparisons name {sorted(unknown)}; arms are {[s.arm.name for s in states]}, once each"
        )
    return [Pairing(by_name[reference], by_name[tested]) for reference, tested in comparisons]


def run_paired(
    workload: Workload,
    arms: Sequence[Arm],
    comparisons: Sequence[tuple[str, str]],
    device: Device,
    method: Method,
    progress: Progress = silent,
) -> RunResult:
    """Gates every arm, times those that are right in paired alternating trials, checks them again.

    Args:
        workload: inputs in rotating slots.
        arms: exactly one of role "baseline".
        comparisons: (reference arm, tested arm) by name.
        device: the clock.
        method: parameters.
        progress: called with a line for each stage.

    Raises:
        MethodError, TimedInputsError, RotationError: what was asked for cannot be measured honestly. An arm
            that is wrong or crashes does not raise: it is recorded as failed.
    """
    baselines = [arm for arm in arms if arm.role == "baseline"]
    if len(baselines) != 1:
        raise MethodError(f"arms got {len(baselines)} baselines, wanted exactly one")
    states = [ArmState(arm) for arm in arms]
    pairings = _pair(states, comparisons)
    coverage = check_rotation(workload, device.llc_bytes)
    progress("checking inputs and computing what is right")
    check_versions(workload)
    checker = Checker(workload)
    for version in range(workload.num_versions + 1):
        checker.learn(version)
    for state in states:
        progress(f"gate: {state.arm.name}")
        _gate(state, checker, workload, device)
    baseline = next(state for state in states if state.arm.role == "baseline")
    control = _control_of(baseline, workload, device, checker)
    progress("ceilings")
    ceilings_before = device.ceilings()
    state_before = device.state()
    progress("trials")
    everything = [*pairings, *([control] if control else [])]
    num_trials, stopped_because = _run_trials(everything, checker, workload, device, method)
    state_after = device.state()
    ceilings = [
        Ceiling(first.name, first.unit, first.detail, first.samples + second.samples)
        for first, second in zip(ceilings_before, device.ceilings(), strict=True)
    ]
    progress("checking again, with every input changed")
    for state in [*states, *([control.tested] if control else [])]:
        if state.passed:
            state.recheck = _check_replay(state, checker, workload, device, version=workload.num_versions)
            if not state.recheck.passed:
                state.fail("failed_recheck", f"after timing, {state.recheck.reason}")
    return RunResult(states, pairings, control, coverage, num_trials, stopped_because, state_before,
                     state_after, ceilings)  # fmt: skip
