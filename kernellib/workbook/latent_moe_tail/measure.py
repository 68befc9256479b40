# SPDX-License-Identifier: Apache-2.0
"""What notebooks 02 and 03 time on a GPU, through ``kernellib.bench``; nothing on targets without a clock."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from IPython.display import Image

from kernellib.bench.cases.latent_moe_tail import (
    ARM_NAMES,
    H200,
    H200_GOALS,
    TailWorkload,
    compare_tail,
    tail_arms,
)
from kernellib.bench.device import Device, GpuDevice
from kernellib.bench.method import Method, Pairing, run_paired
from kernellib.bench.record import Record
from kernellib.bench.stats import Interval, percentiles, slowest_rank
from kernellib.bench.view import capture_spread, plot_record
from kernellib.targets import TargetInfo

from ..artifact import Claim
from ..display import HtmlTable, Note, figure_style
from .model import can_time
from .tuning import Candidate

RECORD_FILE = "03_performance_ab.record.json"
QUICK_ARMS = ("eager", "fused")
# A tuning run has many candidates; it takes this many times its trials at most to narrow the intervals.
MAX_TRIALS_FACTOR = 3


@dataclass(frozen=True)
class Measurement:
    """Candidates with their times, and the A/A control of the same run (None where nothing was timed)."""

    candidates: list[Candidate]
    control: Interval | None = None


def _times_us(pairing: Pairing, rotation: int) -> tuple[float, float, float]:
    """p10, p50 and p90 of the tested arm's time per call, in microseconds."""
    p10, p50, p90 = percentiles([slowest_rank(ranks) for ranks in pairing.tested_s])
    scale = 1e6 / rotation
    return p10 * scale, p50 * scale, p90 * scale


def measure_candidates(
    candidates: Sequence[Candidate],
    target: TargetInfo,
    *,
    seed: int,
    trials: int,
    rotation: int,
    device: Device | None = None,
) -> Measurement:
    """Times every correct candidate in one paired run against the unfused chain.

    All candidates share the run, so that clocks drift for all of them alike. The harness checks each
    again, on the outputs of every timed replay; one that fails there becomes "wrong".

    Args:
        candidates: from ``tuning.try_candidates``.
        target: where; without a clock the candidates come back as they are.
        seed, trials, rotation: of the harness.
        device: the clock; None takes torch's first GPU.
    """
    chosen = [candidate for candidate in candidates if candidate.status == "correct"]
    if not can_time(target) or not chosen:
        return Measurement(list(candidates))
    workload = TailWorkload(rotation, seed, target.torch_device)
    arms = tail_arms(target.name, None, ("eager",))
    for candidate in chosen:
        fused = tail_arms(target.name, candidate.config, QUICK_ARMS)[1]
        arms.append(replace(fused, name=candidate.name))
    clock = device or GpuDevice()
    method = Method(trials=trials, max_trials=MAX_TRIALS_FACTOR * trials, seed=seed)
    result = run_paired(workload, arms, [("eager", candidate.name) for candidate in chosen], clock, method)
    states = {state.arm.name: state for state in result.arms}
    pairings = {pairing.tested.arm.name: pairing for pairing in result.pairings}
    measured = []
    for candidate in candidates:
        state = states.get(candidate.name)
        if state is None:
            measured.append(candidate)
        elif not state.passed:
            measured.append(replace(candidate, status="wrong", detail=f"{state.status}: {state.reason}"))
        elif pairings[candidate.name].tested_s:
            times = _times_us(pairings[candidate.name], rotation)
            measured.append(replace(candidate, measured_us=times))
        else:
            measured.append(replace(candidate, status="wrong", detail="the chain it is paired with failed"))
    control = result.control
    interval = control.interval(method, clock.resolution_s) if control and control.reference_s else None
    return Measurement(measured, interval)


def _control_claim(low: float, high: float) -> Claim:
    return Claim.check(
        "the A/A control finds no difference",
        low <= 1.0 <= high,
        "the unfused chain against other captures of itself: "
        f"interval {low:.4f} to {high:.4f}, must contain 1",
        "measured",
    )


def control_claims(measurement: Measurement) -> list[Claim]:
    """That the control of a tuning run holds; none where nothing was timed."""
    if measurement.control is None:
        return []
    return [_control_claim(measurement.control.low, measurement.control.high)]


def run_ab(
    target: TargetInfo,
    *,
    profile: str,
    seed: int,
    trials: int,
    rotation: int,
    artifact_dir: str,
    device: Device | None = None,
) -> Record | None:
    """The A/B of notebook 03, saved beside the artifact; None on targets without a clock.

    Args:
        target: where.
        profile: "quick" times the eager chain and the fused launch, "full" the compiled chains as well.
        seed, trials, rotation: of the harness.
        artifact_dir: where ``03_performance_ab.record.json`` goes.
        device: the clock; None takes torch's first GPU.
    """
    path = Path(artifact_dir) / RECORD_FILE
    path.unlink(missing_ok=True)
    if not can_time(target):
        return None
    command = (
        "python -m kernellib.workbook run latent_moe_tail/03_performance_ab "
        f"--target {target.name} --profile {profile} --seed {seed} -p trials {trials} -p rotation {rotation}"
    )
    record = compare_tail(
        target.name,
        trials=trials,
        rotation=rotation,
        seed=seed,
        arms=ARM_NAMES if profile == "full" else QUICK_ARMS,
        device=device,
        command=command,
        progress=lambda stage: print(stage, end=";  ", flush=True),
    )
    record.save(path)
    return record


def _time_table(record: Record) -> HtmlTable:
    rows: list[list[Any]] = []
    for arm in record.arms:
        times, rates = arm["times"], arm["rates"]
        numbers: list[Any] = [None] * 6
        if times and rates:
            numbers = [
                *(times[key] * 1e6 for key in ("p10", "p50", "p90")),
                capture_spread(times),
                rates["bytes_per_s"] / 1e12,
                f"{rates['share_of_copy']:.1%}",
            ]
        rows.append([arm["name"], arm["description"], *numbers, arm["reason"] or arm["status"]])
    return HtmlTable(
        [
            "arm",
            "what it runs",
            "p10 (us)",
            "p50 (us)",
            "p90 (us)",
            "between captures",
            "bandwidth (TB/s)",
            "of copy bandwidth",
            "checks",
        ],
        rows,
        f"Time of one call on {record.data['device']['name']}",
        "measured",
    )


def _comparisons(record: Record) -> list[Any]:
    control = record.data["control"]
    return [*record.data["comparisons"], *([control] if control else [])]


def _ratio_table(record: Record) -> HtmlTable:
    rows = [
        [
            f"{entry['reference']} / {entry['tested']}",
            f"{entry['ratio']:.4f}",
            f"{entry['low']:.4f} to {entry['high']:.4f}",
            len(entry["orders"]),
            entry["verdict"],
        ]
        for entry in _comparisons(record)
    ]
    return HtmlTable(
        ["pair", "ratio of times", "95% interval", "paired trials", "the tested arm is"],
        rows,
        "Paired ratios; the control last",
        "measured",
    )


def ab_view(record: Record | None) -> list[Any]:
    """What to display: times, ratios and their figure, or a note that there are none."""
    if record is None:
        return [Note("No GPU's clock on this target: nothing was timed, and no ratio is claimed.", "warning")]
    method = record.data["method"]
    summary = (
        f"{method['num_trials']} trials ({method['stopped_because']}) over {method.get('num_captures', 1)} "
        f"captures of each arm; {method['rotation']} weights of {method['slot_bytes']:,} bytes, "
        f"{method['timer']}."
    )
    notes = [Note(summary)]
    notes += [Note(text, "warning") for text in [*record.invalid_reasons, *record.data["warnings"]]]
    with figure_style(), tempfile.TemporaryDirectory() as folder:
        path = plot_record(record, Path(folder) / "ab.png")
        image = [Image(data=path.read_bytes())] if path else []  # type: ignore[no-untyped-call]
    return [*notes, _time_table(record), _ratio_table(record), *image]


def goal_claims(record: Record) -> list[Claim]:
    """The goals of ``H200_GOALS``, one claim each; none on other GPUs, or where a peer was not timed."""
    if H200 not in record.data["device"]["name"]:
        return []
    claims = []
    for peer, least in H200_GOALS.items():
        if peer == "copy":
            rates = record.arm("fused")["rates"]
            got = rates["share_of_copy"] if rates else 0.0
            name = f"the fused launch reaches {least:.0%} of the copy bandwidth"
            detail = f"{got:.1%} of the bandwidth of a copy in the same run"
        else:
            if peer not in {arm["name"] for arm in record.arms}:
                continue
            pair = record.comparison(peer, "fused")
            got = pair["ratio"] if pair else 0.0
            name = f"the fused launch is {least} times as fast as {peer}"
            detail = f"ratio {got:.4f} ({pair['low']:.4f} to {pair['high']:.4f})" if pair else "not timed"
        claims.append(Claim.check(name, record.valid and got >= least, detail, "measured"))
    return claims


def ab_claims(record: Record | None) -> list[Claim]:
    """The measured claims of notebook 03; none where nothing was timed."""
    if record is None:
        return []
    failed = [f"{arm['name']}: {arm['reason']}" for arm in record.arms if arm["status"] != "passed"]
    claims = [
        Claim.check(
            "every timed arm stays right in every trial",
            not failed,
            "; ".join(failed) or f"{len(record.arms)} arms, checked before, in and after the trials",
            "checked",
        )
    ]
    control = record.data["control"]
    if control is not None:
        claims.append(_control_claim(control["low"], control["high"]))
    pair = record.comparison("eager", "fused")
    eager, fused = record.arm("eager")["times"], record.arm("fused")["times"]
    detail = "one of the arms failed"
    if pair is not None and eager and fused:
        detail = (
            f"{eager['p50'] * 1e6:.2f} us against {fused['p50'] * 1e6:.2f} us, ratio {pair['ratio']:.4f} "
            f"({pair['low']:.4f} to {pair['high']:.4f}, {len(pair['orders'])} paired trials)"
        )
    claims.append(
        Claim.check(
            "the fused launch is faster than the unfused chain",
            record.valid and pair is not None and pair["verdict"] == "faster",
            detail + ("" if record.valid else f"; invalid: {'; '.join(record.invalid_reasons)}"),
            "measured",
        )
    )
    return [*claims, *goal_claims(record)]
