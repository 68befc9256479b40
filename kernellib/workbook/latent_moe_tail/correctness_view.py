# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of notebook 01."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from IPython.display import Image

from kernellib.numerics.errors import ErrorReport
from kernellib.ops.latent_moe_tail.config import TailConfig
from kernellib.ops.latent_moe_tail.reference import INPUT_KINDS, InputKind
from kernellib.targets import TargetInfo

from ..display import BLUE, GREY, ORANGE, RED, HtmlTable, figure_style, new_figure, picture
from ..widgets import Choice, Slider
from .contract_table import BreachResult
from .correctness import MAX_ULP, Case, CaseResult, ReuseResult, run_case
from .counters import LaunchCounts

# 21 bins of an eighth of an ulp: the middle one holds exact equality, the outermost everything beyond.
HISTOGRAM_EDGES = np.linspace(-1.3125, 1.3125, 22)
BEYOND = 1.25  # where whatever lies beyond is drawn


def case_table(results: Sequence[CaseResult]) -> HtmlTable:
    """One row per case: accuracy of the fused kernel, with the production chain's beside it."""
    rows = [
        [
            result.case.kind,
            result.case.seed,
            result.oracle.max_ulp_error,
            result.chain_oracle.max_ulp_error,
            f"{result.oracle.bit_equal_fraction:.3%}",
            f"{result.chain_oracle.bit_equal_fraction:.3%}",
            f"{result.oracle.relative_rmse:.1e}",
            result.chain.num_nonfinite,
            result.chain.nonfinite_match,
            result.num_unwritten == 0 and result.guards_intact and result.inputs_unchanged,
        ]
        for result in results
    ]
    return HtmlTable(
        [
            "kind",
            "seed",
            "max ulp, fused",
            "max ulp, chain",
            "bit-equal, fused",
            "bit-equal, chain",
            "relative RMSE, fused",
            "NaN and Inf outputs",
            "same places as chain",
            "memory intact",
        ],
        rows,
        "The fused kernel and the production chain, each against the float64 oracle",
        "checked",
    )


def error_figure(results: Sequence[CaseResult], where: str) -> Image:
    """Left: histogram of every output's error. Right: the worst error of each case, by kind."""
    fused = np.concatenate([result.ulp_errors for result in results])
    chain = np.concatenate([result.chain_ulp_errors for result in results])
    with figure_style():
        figure, (left, right) = new_figure(10.5, 4.2, 2)
        for values, label, colour in ((chain, "production chain", ORANGE), (fused, f"fused, {where}", BLUE)):
            counts, _ = np.histogram(
                np.clip(values, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1]), HISTOGRAM_EDGES
            )
            share = counts / max(values.size, 1)
            left.stairs(
                share,
                HISTOGRAM_EDGES,
                label=label,
                color=colour,
                fill=colour == ORANGE,
                alpha=0.85,
                linewidth=2,
                baseline=1e-6,
            )
        left.set_yscale("log")
        left.set_ylim(1e-6, 3)
        left.axvline(-MAX_ULP, color=RED, linestyle="--", linewidth=1)
        left.axvline(MAX_ULP, color=RED, linestyle="--", linewidth=1, label="allowed")
        left.set_xlabel("error against the oracle (ulp at the larger of |p| and |y|)")
        left.set_xticks(
            [-BEYOND, -1, -0.5, 0, 0.5, 1, BEYOND], ["less", "-1", "-0.5", "0", "0.5", "1", "more"]
        )
        left.set_ylabel("share of outputs")
        left.set_title(f"Errors of {fused.size:,} outputs (checked)")
        left.legend(loc="upper right")
        kinds = [kind for kind in INPUT_KINDS if any(result.case.kind == kind for result in results)]
        for position, kind in enumerate(kinds):
            chosen = [result for result in results if result.case.kind == kind]
            right.plot(
                [min(r.chain_oracle.max_ulp_error, BEYOND) for r in chosen],
                [position + 0.15] * len(chosen),
                "s",
                color=ORANGE,
                markersize=6,
                label="production chain" if position == 0 else None,
            )
            right.plot(
                [min(r.oracle.max_ulp_error, BEYOND) for r in chosen],
                [position - 0.15] * len(chosen),
                "o",
                color=BLUE,
                markersize=7,
                label="fused" if position == 0 else None,
            )
        right.axvline(MAX_ULP, color=RED, linestyle="--", linewidth=1)
        right.set_yticks(range(len(kinds)), kinds)
        right.invert_yaxis()
        right.set_xlim(-0.05, BEYOND + 0.05)
        right.set_xticks([0, 0.25, 0.5, 0.75, 1, BEYOND], ["0", "0.25", "0.5", "0.75", "1", "more"])
        right.set_xlabel("largest error in a case (ulp)")
        right.set_title("Worst output of each case (checked)")
        right.legend(loc="center")
        right.tick_params(axis="y", colors=GREY)
        return picture(
            figure, "Histogram of output errors in ulp, and the largest error of each case by kind"
        )


def reuse_table(reuse: ReuseResult) -> HtmlTable:
    """What the repeated launches showed."""
    rows = [
        ["the buffer passed in is the one returned", reuse.same_buffer],
        ["the same values give the same bits", reuse.repeat_equal],
        ["new values give a new result", reuse.changed],
        ["its largest error against the new values' oracle (ulp)", reuse.after_change.max_ulp_error],
    ]
    if reuse.replay is not None:
        rows.append(["the same after a graph's replay (ulp)", reuse.replay.max_ulp_error])
    return HtmlTable(["check", "result"], rows, "Three launches into one buffer", "checked")


def breach_table(results: Sequence[BreachResult]) -> HtmlTable:
    """One row per violation: what was passed, and the report's row for it."""
    rows = [
        [
            result.breach.clause,
            result.breach.argument,
            result.breach.how,
            *(result.refusal or (None, None, None)),
            result.refused_rightly,
        ]
        for result in results
    ]
    return HtmlTable(
        ["clause", "argument", "what was passed", "got", "wanted", "remedy", "refused, nothing written"],
        rows,
        "Each clause of the contract, violated once",
        "checked",
    )


def case_view(target: TargetInfo, kind: InputKind, seed: int, config: TailConfig | None = None) -> list[Any]:
    """Runs one case and returns its table and figure, for the control panel."""
    results = [run_case(Case(kind, seed), target, config)]
    return [case_table(results), error_figure(results, target.name)]


CONTROLS = {"kind": Choice("value range", INPUT_KINDS, "normal"), "seed": Slider("seed", 0, 99, 1, 0)}


def artifact_data(
    target: TargetInfo,
    results: Sequence[CaseResult],
    reuse: ReuseResult,
    breaches: Sequence[BreachResult],
    counts: LaunchCounts | None,
) -> dict[str, Any]:
    """What notebook 01 keeps in its artifact beside the claims."""
    return {
        "target": target.name,
        "device": target.device_name,
        "cases": [
            {
                "kind": result.case.kind,
                "seed": result.case.seed,
                "fused_vs_oracle": report_data(result.oracle),
                "fused_vs_chain": report_data(result.chain),
                "chain_vs_oracle": report_data(result.chain_oracle),
            }
            for result in results
        ],
        "reuse": {
            "after_change": report_data(reuse.after_change),
            "replay": None if reuse.replay is None else report_data(reuse.replay),
        },
        "contract": [
            {
                "clause": result.breach.clause,
                "argument": result.breach.argument,
                "how": result.breach.how,
                "refused": result.refused_rightly,
            }
            for result in breaches
        ],
        "counters": None if counts is None else asdict(counts),
    }


def report_data(report: ErrorReport) -> dict[str, Any]:
    """An error report for JSON: infinite metrics, which mean "not comparable", become text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report).items()
    }
