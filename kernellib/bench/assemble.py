# SPDX-License-Identifier: Apache-2.0
"""Turns what a run found into a record: times per call, rates against ceilings, verdicts, validity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .device import Device
from .gates import GateResult
from .method import CONTROL, METHOD_REVISION, ArmState, Method, Pairing, RunResult
from .record import SCHEMA_NAME, Record, now
from .schedule import NUM_CAPTURES
from .state import HARMFUL_REASONS, device_state, git_revision, versions
from .stats import percentiles, slowest_rank
from .workload import Arm, Workload

SIGNIFICANT_DIGITS = 7  # events resolve no more, and records stay small
# A copy reads and writes, and moves less than a stream that only reads could: 1.1 to 1.3 times as much, by
# data sheets. Whoever is above this share of a ceiling has not done the work of its call.
MAX_SHARE = 1.5
SAMPLE_UNIT = "s/pass over the slots, one number for each rank"


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def head(
    workload: Workload, *, kind: str, target: str, command: str, seed: int, device: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that timed and counted records share."""
    shapes = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in workload.slots[0].items()
    }
    return {
        "schema": SCHEMA_NAME,
        "method_revision": METHOD_REVISION,
        "kind": kind,
        "operator": workload.operator,
        "target": target,
        "created": now(),
        "command": command,
        "seed": seed,
        "shapes": shapes,
        "device": dict(device),
        "versions": versions(),
        "git": git_revision(),
        "work": {
            "source": "modelled",
            "bytes_per_call": workload.bytes_per_call,
            "flops_per_call": workload.flops_per_call,
        },
    }


def arm_entry(
    arm: Arm, status: str, reason: str | None, before: GateResult | None, after: GateResult | None
) -> dict[str, Any]:
    """An arm without times or counters."""
    return {
        "name": arm.name,
        "role": arm.role,
        "description": arm.description,
        "config": None if arm.config is None else dict(arm.config),
        "status": status,
        "reason": reason,
        "errors_before": None if before is None else before.to_json(),
        "errors_after": None if after is None else after.to_json(),
        "launches": None,
        "traffic": None,
        "times": None,
        "rates": None,
    }


def _seconds_per_call(state: ArmState, pairings: Sequence[Pairing], num_slots: int) -> dict[int, list[float]]:
    """By capture."""
    samples: dict[int, list[float]] = {}
    for pairing in pairings:
        for place, (side, times) in enumerate(
            ((pairing.reference, pairing.reference_s), (pairing.tested, pairing.tested_s))
        ):
            if side is state:
                for captures, ranks in zip(pairing.captures, times, strict=True):
                    samples.setdefault(captures[place], []).append(slowest_rank(ranks) / num_slots)
    return samples


def _timed_arm(
    state: ArmState, pairings: Sequence[Pairing], workload: Workload, ceilings: Mapping[str, float]
) -> dict[str, Any]:
    entry = arm_entry(state.arm, state.status, state.reason, state.gate, state.recheck)
    by_capture = _seconds_per_call(state, pairings, len(workload.slots))
    if not state.passed or not by_capture:
        return entry
    samples = [sample for capture in by_capture.values() for sample in capture]
    p10, p50, p90 = map(_rounded, percentiles(samples))
    entry["times"] = {
        "source": "measured", "unit": "s/call", "p10": p10, "p50": p50, "p90": p90,
        "num_samples": len(samples),
        "p50_by_capture": [_rounded(percentiles(by_capture[index])[1]) for index in sorted(by_capture)],
    }  # fmt: skip
    bytes_per_s, flops_per_s = workload.bytes_per_call / p50, workload.flops_per_call / p50
    entry["rates"] = {
        "source": "measured",
        "bytes_per_s": _rounded(bytes_per_s),
        "share_of_copy": _rounded(bytes_per_s / ceilings["copy"]),
        "flops_per_s": _rounded(flops_per_s),
        "share_of_matmul": _rounded(flops_per_s / ceilings["matmul"]),
    }
    return entry


def _comparison(pairing: Pairing, method: Method, resolution_s: float) -> dict[str, Any] | None:
    """None when an arm of the pair failed: its times mean nothing."""
    if not pairing.alive or len(pairing.orders) < 2:
        return None
    interval = pairing.interval(method, resolution_s)
    return {
        "source": "measured",
        "reference": pairing.reference.arm.name,
        "tested": CONTROL if pairing.control else pairing.tested.arm.name,
        "ratio": _rounded(interval.median),
        "low": _rounded(interval.low),
        "high": _rounded(interval.high),
        "confidence": interval.confidence,
        "verdict": interval.verdict,
        "orders": list(pairing.orders),
        "captures": [list(captures) for captures in pairing.captures],
        "unit": SAMPLE_UNIT,
        "reference_s": [[_rounded(rank) for rank in times] for times in pairing.reference_s],
        "tested_s": [[_rounded(rank) for rank in times] for times in pairing.tested_s],
    }


def too_fast(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arms with a rate that no device gives, of the ``arms`` of a record."""
    return [
        f"{arm['name']}: {arm['rates'][share]:.3g} times the same run's {ceiling} ceiling, wanted at most "
        f"{MAX_SHARE:g}: a timed replay leaves work out, or the cache serves it"
        for arm in arms
        if arm["rates"]
        for share, ceiling in (("share_of_copy", "copy"), ("share_of_matmul", "matmul"))
        if arm["rates"][share] > MAX_SHARE
    ]


def invalid_reasons(
    result: RunResult, control: Mapping[str, Any] | None, arms: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Why nothing in this run may be claimed: a failed baseline, a control away from 1, impossible rates."""
    baseline = next(state for state in result.arms if state.arm.role == "baseline")
    if not baseline.passed:
        return [f"the baseline {baseline.arm.name} failed: {baseline.reason}"]
    if control is None:
        return ["no A/A control: too few trials"]
    if control["verdict"] != "no difference":
        return [
            f"A/A control: {control['ratio']:.4f}, interval {control['low']:.4f} to {control['high']:.4f}, "
            "which does not contain 1; something other than the arms decides the times",
            *too_fast(arms),
        ]
    return too_fast(arms)


def _warnings(result: RunResult) -> list[str]:
    found = []
    for when, state in (("before", result.state_before), ("after", result.state_after)):
        reasons = state.get("throttle_reasons")
        harmful = HARMFUL_REASONS & set(reasons) if isinstance(reasons, list) else set()
        if harmful:
            found.append(f"throttled {when} the trials: {', '.join(sorted(harmful))}")
    if result.stopped_because.startswith("max_trials"):
        found.append(result.stopped_because)
    found += [f"arm {s.arm.name} was not timed, {s.status}: {s.reason}" for s in result.arms if not s.passed]
    return found


def _method_entry(result: RunResult, workload: Workload, device: Device, method: Method) -> dict[str, Any]:
    num_slots = len(workload.slots)
    return {
        "trials": method.trials,
        "max_trials": method.max_trials,
        "half_width": method.half_width,
        "confidence": method.confidence,
        "num_captures": NUM_CAPTURES,
        "num_trials": result.num_trials,
        "stopped_because": result.stopped_because,
        "rotation": num_slots,
        "slot_bytes": workload.slot_bytes,
        "rotation_bytes": num_slots * workload.slot_bytes,
        "cache_coverage": _rounded(result.coverage) if math.isfinite(result.coverage) else None,
        "timer": f"{device.kind} events around a graph replay, {device.num_rounds} x {num_slots} calls",
        "timer_resolution_s": device.resolution_s,
    }


def timed_record(
    result: RunResult, workload: Workload, device: Device, method: Method, *, target: str, command: str
) -> Record:
    """The record of a run of ``method.run_paired``.

    Args:
        result: what the run found.
        workload, device, method: what it was given.
        target: where the candidate ran.
        command: what to type to do it again.
    """
    facts = {
        "name": device.name,
        "kind": device.kind,
        "num_ranks": device.num_ranks,
        "llc_bytes": device.llc_bytes,
        **device.describe(),
    }
    ceilings = {ceiling.name: ceiling.median for ceiling in result.ceilings}
    pairings = [*result.pairings, *([result.control] if result.control else [])]
    comparisons = [_comparison(pairing, method, device.resolution_s) for pairing in result.pairings]
    control = _comparison(result.control, method, device.resolution_s) if result.control else None
    arms = [_timed_arm(state, pairings, workload, ceilings) for state in result.arms]
    reasons = invalid_reasons(result, control, arms)
    record = {
        **head(workload, kind="timed", target=target, command=command, seed=method.seed, device=facts),
        "state_before": result.state_before,
        "state_after": result.state_after,
        "method": _method_entry(result, workload, device, method),
        "arms": arms,
        "comparisons": [comparison for comparison in comparisons if comparison is not None],
        "control": control,
        "ceilings": [
            {
                "source": "measured",
                "name": ceiling.name,
                "unit": ceiling.unit,
                "detail": ceiling.detail,
                "median": _rounded(ceiling.median),
                "samples": [_rounded(sample) for sample in ceiling.samples],
            }
            for ceiling in result.ceilings
        ],
        "valid": not reasons,
        "invalid_reasons": reasons,
        "warnings": _warnings(result),
    }
    return Record.of(record)


def counted_record(
    workload: Workload,
    arms: Sequence[Mapping[str, Any]],
    *,
    target: str,
    command: str,
    seed: int,
    device: Mapping[str, Any],
) -> Record:
    """The record of a comparison without a clock: launches and bytes, no times.

    Args:
        workload: whose shapes the record names.
        arms: entries of ``arm_entry`` with their launches and traffic filled in.
        target, command, seed, device: as in a timed record.
    """
    state = device_state("none")
    failed = [arm for arm in arms if arm["status"] != "passed"]
    reasons = [
        f"the baseline {arm['name']} failed: {arm['reason']}" for arm in failed if arm["role"] == "baseline"
    ]
    return Record.of(
        {
            **head(workload, kind="counted", target=target, command=command, seed=seed, device=device),
            "state_before": state,
            "state_after": state,
            "method": None,
            "arms": [dict(arm) for arm in arms],
            "comparisons": [],
            "control": None,
            "ceilings": [],
            "valid": not reasons,
            "invalid_reasons": reasons,
            "warnings": [f"arm {arm['name']}: {arm['status']}: {arm['reason']}" for arm in failed],
        }
    )
