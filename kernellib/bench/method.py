# SPDX-License-Identifier: Apache-2.0
"""The paired A/B method: gates, alternating trials, the A/A control, the stopping rule.

Every arm is built, checked and captured ``schedule.NUM_CAPTURES`` times, each time with its own buffers.
For each comparison (reference arm, tested arm) a trial takes one sample of both, in the order AB, the
next trial in the order BA; ``schedule`` says which captures. The last comparison is the control: the baseline
against itself, another capture on the other side, whose interval must contain 1, or else the run is invalid.

What varies from capture to capture is part of a comparison's interval, and divides out of the control: the
control says whether the procedure treats equal arms alike, the interval how much another placement of the
buffers may change the result. The weights' own placement is shared by all arms of a run and changes between
runs only: compare two records to see it.

Stopping rule: at least ``trials`` trials, then more until every interval's half-width is below
``half_width`` of its median, at most ``max_trials``. The rule looks at the width only, never at which
side of 1 the interval lies, so that it does not stop on a lucky difference.

Revisions of the method: 1 had one capture of each arm, drew trials for its intervals, and took a second
capture of the baseline as its control, which on an H200 lay 0.3 to 0.5 % off. 2 let lines that one arm had
asked the cache to keep serve the other arms, which made the baseline 10 to 20 % faster there than alone.
This is revision 3: cache priorities are neutral before each sample (``residency``). See
docs/performance.md.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .device import Capture, Ceiling, Device
from .errors import BenchError, MethodError
from .gates import Checker, GateResult, poison, shared_memory, worst
from .schedule import MIN_TRIALS, NUM_CAPTURES, TRIALS_IN_BLOCK, turn_of, whole_blocks
from .stats import Interval, ratio_interval, slowest_rank
from .workload import Arm, Workload, check_rotation, check_versions, fingerprints

# Raise it whenever a change makes times or intervals incomparable with those of older records.
METHOD_REVISION = 3
CONTROL = "control"
CHECK_EVERY = 10  # trials between two looks at the stopping rule; whole blocks
Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Progress that nobody asked for."""


@dataclass(frozen=True)
class Method:
    """Parameters of the method.

    Attributes:
        trials: fewest paired trials, ``schedule.MIN_TRIALS`` at least; rounded up to whole blocks.
        max_trials: most of them, rounded up likewise.
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
        if self.trials < MIN_TRIALS:
            raise MethodError(
                f"trials got {self.trials}, wanted at least {MIN_TRIALS}: "
                f"each of {NUM_CAPTURES} captures takes part in an AB and a BA trial"
            )
        if self.max_trials < self.trials:
            raise MethodError(f"max_trials got {self.max_trials}, wanted at least trials, {self.trials}")
        if not 0.0 < self.half_width < 1.0:
            raise MethodError(f"half_width got {self.half_width}, wanted a share between 0 and 1")
        if not 0.5 <= self.confidence < 1.0:
            raise MethodError(f"confidence got {self.confidence}, wanted at least 0.5 and below 1")


@dataclass
class ArmState:
    """One arm during a run. ``status``: "passed", "failed_build", "failed_gate", "failed_in_trial",
    "failed_recheck"; an arm that is not "passed" has no times in the record. ``gate`` and ``recheck`` are the
    worst over its captures."""

    arm: Arm
    status: str = "passed"
    reason: str | None = None
    gate: GateResult | None = None
    recheck: GateResult | None = None
    captures: list[Capture] = field(default_factory=list)

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
    """The trials of one comparison: seconds of a whole replay on each rank, in trial order.

    ``captures`` holds (reference capture, tested capture) of each trial. In the control both arms are the
    baseline.
    """

    reference: ArmState
    tested: ArmState
    control: bool = False
    orders: list[str] = field(default_factory=list)
    captures: list[tuple[int, int]] = field(default_factory=list)
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
            self.captures,
            resolution_s=resolution_s,
            confidence=method.confidence,
            seed=method.seed,
        )


@dataclass
class RunResult:
    """Everything a run found; ``assemble.timed_record`` turns it into a record."""

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
    """Makes all captures of an arm; a failing or crashing arm is marked, not raised."""
    for _ in range(NUM_CAPTURES):
        _gate_capture(state, checker, workload, device)
        if not state.passed:
            return


def _gate_capture(state: ArmState, checker: Checker, workload: Workload, device: Device) -> None:
    """Builds, checks, captures and checks again."""
    num_slots, tolerance = len(workload.slots), state.arm.tolerance
    where = f"capture {len(state.captures)}"
    workload.set_version(0)
    before = fingerprints(workload)
    try:
        launch = state.arm.prepare(workload)
        with torch.no_grad():
            outputs = [launch(slot_idx).clone() for slot_idx in range(num_slots)]
        device.synchronize()
        first = checker.full(outputs, 0, tolerance)
        state.gate = worst(state.gate, first)
        if not first.passed:
            return state.fail("failed_gate", f"{where}, first call, {first.reason}")
        capture = device.capture(launch, num_slots)
        inputs = [tensor for slot in workload.slots for tensor in slot.values()]
        earlier = [output for each in state.captures for output in each.outputs]
        if shared_memory(capture.outputs, [*earlier, *inputs]):
            why = "an output shares memory with another slot's, another capture's or an input"
            return state.fail("failed_gate", f"{where}: {why}; each needs its own")
        state.captures.append(capture)
        workload_changed = fingerprints(workload) != before
        workload.set_version(1)
        before = fingerprints(workload)
        replayed = _check_replay(capture, checker, state.arm, device, version=1)
        workload_changed |= fingerprints(workload) != before
        state.gate = worst(state.gate, replayed)
    except Exception as error:  # a candidate that crashes is recorded, and the others go on
        return state.fail("failed_build", f"{where}: {_why(error)}")
    if workload_changed:
        return state.fail("failed_gate", f"{where}: the arm overwrote its inputs")
    if not replayed.passed:
        state.fail("failed_gate", f"{where}, captured replay with changed inputs, {replayed.reason}")
    return None


def _check_replay(capture: Capture, checker: Checker, arm: Arm, device: Device, version: int) -> GateResult:
    """A replay with NaN in the outputs, fully checked; the workload holds ``version`` already."""
    poison(capture.outputs)
    capture.replay()
    device.synchronize()
    return checker.full(capture.outputs, version, arm.tolerance)


def _recheck(states: Sequence[ArmState], checker: Checker, workload: Workload, device: Device) -> None:
    """Every capture once more, on the fresh version, which changes every input."""
    version = workload.num_versions
    workload.set_version(version)
    for state in states:
        if not state.passed:
            continue
        for index, capture in enumerate(state.captures):
            found = _check_replay(capture, checker, state.arm, device, version)
            state.recheck = worst(state.recheck, found)
            if not found.passed:
                state.fail("failed_recheck", f"capture {index}, after timing, {found.reason}")


def _sample(
    state: ArmState, index: int, checker: Checker, device: Device, version: int
) -> tuple[float, ...] | None:
    """One timed replay of a capture, its outputs checked; None when they are wrong: the arm failed."""
    capture = state.captures[index]
    seconds = device.sample(capture, partial(poison, capture.outputs))
    slowest_rank(seconds)  # a broken clock shows here
    if len(seconds) != device.num_ranks:
        raise BenchError(
            f"the device gave {len(seconds)} times, wanted one for each of {device.num_ranks} ranks"
        )
    wrong = checker.num_wrong(capture.outputs, version, state.arm.tolerance)
    if wrong:
        state.fail("failed_in_trial", f"capture {index}: {wrong} outputs of a timed replay are wrong")
        return None
    return seconds


def _trial(trial: int, pairings: Sequence[Pairing], checker: Checker, device: Device, version: int) -> None:
    """One sample of both arms of every living pairing; which pairing comes first moves on with each block."""
    for place in range(len(pairings)):
        pairing = pairings[(trial // TRIALS_IN_BLOCK + place) % len(pairings)]
        if not pairing.alive:
            continue
        turn = turn_of(trial, control=pairing.control)
        both = {"A": (pairing.reference, turn.reference), "B": (pairing.tested, turn.tested)}
        times = {letter: _sample(*both[letter], checker, device, version) for letter in turn.order}
        reference_s, tested_s = times["A"], times["B"]
        if reference_s is None or tested_s is None:
            continue
        pairing.orders.append(turn.order)
        pairing.captures.append((turn.reference, turn.tested))
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
    fewest, most = whole_blocks(method.trials), whole_blocks(method.max_trials)
    for trial in range(most):
        if not any(pairing.alive for pairing in pairings):
            return trial, "no pair of arms is left"
        due = trial >= fewest and (trial - fewest) % CHECK_EVERY == 0
        if due and _narrow_enough(pairings, method, device):
            return trial, f"every interval's half-width is below {method.half_width:.2%}"
        version = trial % workload.num_versions
        workload.set_version(version)
        _trial(trial, pairings, checker, device, version)
    if _narrow_enough(pairings, method, device):
        return most, f"every interval's half-width is below {method.half_width:.2%}"
    return most, f"max_trials reached before every half-width was below {method.half_width:.2%}"


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
    control = Pairing(baseline, baseline, control=True) if baseline.passed else None
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
    _recheck(states, checker, workload, device)
    return RunResult(states, pairings, control, coverage, num_trials, stopped_because, state_before,
                     state_after, ceilings)  # fmt: skip
