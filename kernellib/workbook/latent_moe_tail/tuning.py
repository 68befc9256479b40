# SPDX-License-Identifier: Apache-2.0
"""Notebook 02: which configuration of the kernel is best on this target.

Every candidate is built, launched at full size and checked before anything else is asked of it. One
that is wrong, or that raises at any point, is recorded with its reason and takes no further part.

On a GPU the rest are ranked by measured time. On the emulator nothing can be timed: they are ranked by
the model in ``model`` from counted resources, and every such number is labelled modelled.
"""

from __future__ import annotations

import platform
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from kernellib.ops.latent_moe_tail.api import GFX950_TARGETS
from kernellib.ops.latent_moe_tail.config import (
    DEFAULT_CONFIG,
    NUM_COMPUTE_UNITS,
    TailConfig,
    config_space,
    load_tuned,
    save_tuned,
)
from kernellib.targets import TargetInfo

from ..artifact import Claim, Source
from .correctness import MAX_RELATIVE_RMSE, MAX_ULP, MIN_BIT_EQUAL, Case, CaseResult, run_case
from .counters import LaunchCounts, summarise
from .model import MachineModel, ModelledTime, can_time, modelled_time, resident_workgroups

Status = Literal["correct", "wrong", "crashed"]
TUNED_FILE = "latent_moe_tail.tuned.json"
BUILT_IN = "built in"

# The quick profile's few: the default, then one thing changed at a time, then two that the model dislikes.
QUICK_NAMES = (
    DEFAULT_CONFIG.name,
    "r4_w7_f2_stream_preload",
    "r4_w7_f4_normal_preload",
    "r4_w7_f4_stream_load",
    "r2_w14_f1_stream_preload",
    "r28_w1_f1_stream_preload",
)


@dataclass(frozen=True)
class Candidate:
    """One configuration and what became of it.

    Attributes:
        config: the configuration; None on a target whose kernel has none to choose.
        status: "correct", "wrong" (it ran and failed the gate) or "crashed" (it raised).
        detail: the gate's numbers, or the last line of the exception.
        counts: counters of its launch, on the emulator.
        modelled: the model's answer from those counters.
        measured_us: p50 of its time in microseconds, on a GPU; with the tenth and ninetieth percentile.
    """

    config: TailConfig | None
    status: Status
    detail: str
    counts: LaunchCounts | None = None
    modelled: ModelledTime | None = None
    measured_us: tuple[float, float, float] | None = None

    @property
    def name(self) -> str:
        """The configuration's name."""
        return BUILT_IN if self.config is None else self.config.name

    @property
    def bytes_in_flight(self) -> int | None:
        """Weight bytes that a compute unit keeps outstanding, at the occupancy its registers allow."""
        if self.config is None or self.counts is None:
            return None
        resident = resident_workgroups(self.config, self.counts.waves_per_simd)
        return resident * self.config.weight_bytes_in_flight

    @property
    def time_us(self) -> float | None:
        """What it is ranked by, in microseconds: measured where there is a GPU, modelled elsewhere."""
        if self.measured_us is not None:
            return self.measured_us[1]
        return None if self.modelled is None else self.modelled.total_s * 1e6


def choose_candidates(profile: str, target: TargetInfo) -> list[TailConfig | None]:
    """The configurations to try: a few in the quick profile, the whole space in the full one.

    A ``TailConfig`` shapes the gfx950 kernel; on other targets the one candidate is their own kernel.
    """
    if target.name not in GFX950_TARGETS:
        return [None]
    if profile == "full":
        return list(config_space())
    return [TailConfig.from_name(name) for name in QUICK_NAMES]


def gate_failures(result: CaseResult) -> list[str]:
    """Why a launch may not be ranked; empty when it may. The thresholds are those of notebook 01."""
    oracle = result.oracle
    checks = [
        (oracle.nonfinite_match, "NaN or infinities where the oracle has none"),
        (oracle.judged_ulp_error <= MAX_ULP, f"{oracle.judged_ulp_error:.3g} ulp, wanted {MAX_ULP:g}"),
        (oracle.bit_equal_fraction >= MIN_BIT_EQUAL, f"only {oracle.bit_equal_fraction:.3%} bit-equal"),
        (oracle.relative_rmse <= MAX_RELATIVE_RMSE, f"relative RMSE {oracle.relative_rmse:.1e}"),
        (result.num_unwritten == 0, f"{result.num_unwritten} elements unwritten"),
        (result.guards_intact, "wrote outside the output"),
        (result.inputs_unchanged, "changed an input"),
    ]
    return [reason for holds, reason in checks if not holds]


def _launch_checked(
    config: TailConfig | None, target: TargetInfo, seed: int
) -> tuple[CaseResult, LaunchCounts | None]:
    """Runs the gate's case; on the emulator, with the counters of that very launch."""
    if target.name != "emulator":
        return run_case(Case("normal", seed), target, config), None
    from kernellib.emulator import emulated  # noqa: PLC0415  (only where something is to be counted)

    with emulated() as session:
        result = run_case(Case("normal", seed), target, config)
        return result, summarise(session.launches, ())


def try_candidate(
    config: TailConfig | None, target: TargetInfo, seed: int, machine: MachineModel | None = None
) -> Candidate:
    """Builds, launches, checks and only then rates one configuration; never raises for its faults.

    Args:
        config: the candidate.
        target: where.
        seed: of the gate's inputs.
        machine: the model's assumptions.
    """
    try:
        result, counts = _launch_checked(config, target, seed)
        reasons = gate_failures(result)
        if reasons:
            return Candidate(config, "wrong", "; ".join(reasons), counts)
        oracle = result.oracle
        detail = f"{oracle.max_ulp_error:.3g} ulp, {oracle.bit_equal_fraction:.3%} bit-equal"
        candidate = Candidate(config, "correct", detail, counts)
        if counts is not None and config is not None:
            vector = counts.instructions["vector"]
            return replace(candidate, modelled=modelled_time(config, counts.waves_per_simd, vector, machine))
        return candidate
    except Exception as error:
        lines = traceback.format_exception_only(error)
        return Candidate(config, "crashed", lines[-1].strip().splitlines()[0][:300])


def try_candidates(
    configs: Iterable[TailConfig | None],
    target: TargetInfo,
    seed: int,
    machine: MachineModel | None = None,
) -> list[Candidate]:
    """``try_candidate`` for each, in order, printing a line for each as it goes."""
    candidates = []
    for config in configs:
        candidates.append(try_candidate(config, target, seed, machine))
        print(candidates[-1].name, candidates[-1].status, end=";  ", flush=True)
    return candidates


def _rank_key(candidate: Candidate) -> tuple[float, float, int, int]:
    """Time first. Modelled times often tie: then more bytes in flight, fewer instructions and registers."""
    time_us = candidate.time_us
    in_flight = candidate.modelled.bytes_in_flight_per_unit if candidate.modelled else 0.0
    counts = candidate.counts
    return (
        round(time_us, 3) if time_us is not None else float("inf"),
        -in_flight,
        counts.num_instructions if counts else 0,
        counts.vgprs if counts else 0,
    )


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The correct candidates, best first."""
    return sorted((candidate for candidate in candidates if candidate.status == "correct"), key=_rank_key)


def ranking_source(target: TargetInfo) -> Source:
    """Where the ranking's numbers come from on this target."""
    return "measured" if can_time(target) else "modelled"


def save_winner(
    artifact_dir: str,
    ranking: Sequence[Candidate],
    target: TargetInfo,
    *,
    profile: str,
    seed: int,
    tried: int,
) -> Path | None:
    """Writes the winner with its provenance to ``<artifact_dir>/latent_moe_tail.tuned.json``.

    Returns:
        the file; None when no candidate was correct or there was nothing to choose.
        ``load_tuned(target, path)`` reads it back.
    """
    path = Path(artifact_dir) / TUNED_FILE
    path.unlink(missing_ok=True)  # the file must hold this run's winner or nothing
    if not ranking or ranking[0].config is None:
        return None
    winner = ranking[0]
    assert winner.config is not None
    provenance = {
        "target": target.name,
        "source": ranking_source(target),
        "device": target.device_name,
        "time_us": winner.time_us,
        "candidates_tried": tried,
        "candidates_correct": len(ranking),
        "profile": profile,
        "seed": seed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: metadata.version(name) for name in ("torch", "flydsl")},
        "python": platform.python_version(),
    }
    save_tuned(path, winner.config, provenance)
    return path


def tuning_claims(
    candidates: Sequence[Candidate],
    ranking: Sequence[Candidate],
    path: Path | None,
    target: TargetInfo,
    machine: MachineModel | None = None,
) -> list[Claim]:
    """The claims of notebook 02. A candidate that crashed is reported, and does not fail the run."""
    machine = machine or MachineModel()
    crashed = [candidate for candidate in candidates if candidate.status == "crashed"]
    wrong = [candidate for candidate in candidates if candidate.status == "wrong"]
    winner = ranking[0] if ranking else None
    read_back = load_tuned(target.name, path) if path is not None else None
    odd = "; ".join(f"{candidate.name}: {candidate.detail}" for candidate in [*wrong, *crashed][:3])
    claims = [
        Claim.check(
            "no candidate that runs is wrong, and the default is among the right ones",
            not wrong and any(candidate.config in (DEFAULT_CONFIG, None) for candidate in ranking),
            f"{len(ranking)} of {len(candidates)} correct, {len(wrong)} wrong, {len(crashed)} crashed"
            + (f" ({odd})" if odd else ""),
            "checked",
        ),
    ]
    if target.name in GFX950_TARGETS:
        claims.append(
            Claim.check(
                "the winner is saved and reads back",
                winner is not None and read_back is not None and read_back == winner.config,
                f"{winner.name if winner else 'no winner'} in {TUNED_FILE}",
                "checked",
            )
        )
    if winner is not None and winner.counts is not None and winner.modelled is not None:
        wanted = machine.bandwidth_bytes_per_s * machine.latency_s / NUM_COMPUTE_UNITS
        in_flight = winner.modelled.bytes_in_flight_per_unit
        claims += [
            Claim.check(
                "the winner does not spill",
                winner.counts.scratch_bytes == 0,
                f"{winner.counts.scratch_bytes} bytes of scratch, {winner.counts.vgprs} vector registers",
                "counted",
            ),
            Claim.check(
                "the winner keeps enough bytes in flight for the full bandwidth",
                in_flight >= wanted,
                f"{in_flight:,.0f} bytes a compute unit, Little's law wants {wanted:,.0f}",
                "modelled",
            ),
        ]
    return claims


def tuning_data(
    candidates: Sequence[Candidate], ranking: Sequence[Candidate], target: TargetInfo
) -> dict[str, Any]:
    """What notebook 02 keeps in its artifact beside the claims."""
    order = {candidate.name: position for position, candidate in enumerate(ranking, start=1)}
    return {
        "target": target.name,
        "device": target.device_name,
        "source": ranking_source(target),
        "candidates": [
            {
                "config": candidate.config.to_dict() if candidate.config else None,
                "name": candidate.name,
                "status": candidate.status,
                "detail": candidate.detail,
                "rank": order.get(candidate.name),
                "modelled_us": None if candidate.modelled is None else candidate.modelled.total_s * 1e6,
                "measured_us_p10_p50_p90": candidate.measured_us,
                "vgprs": candidate.counts.vgprs if candidate.counts else None,
                "waves_per_simd": candidate.counts.waves_per_simd if candidate.counts else None,
                "scratch_bytes": candidate.counts.scratch_bytes if candidate.counts else None,
            }
            for candidate in candidates
        ],
    }
