# SPDX-License-Identifier: Apache-2.0
"""Notebook 03: the complete unfused chain against the fused launch."""

from __future__ import annotations

from typing import Any

from kernellib.bench.record import Record
from kernellib.targets import TargetInfo

from ..artifact import Claim
from ..display import HtmlTable
from .bound import bound_claims, bound_data, launch_model
from .correctness import MAX_ULP, Case, CaseResult, run_case
from .counters import LaunchCounts, traffic_claims
from .tuning import gate_failures


def check_arms(seed: int, target: TargetInfo) -> CaseResult:
    """Both arms against the oracle on one set of inputs: the fused launch and the production chain."""
    return run_case(Case("normal", seed), target)


def gate_table(gate: CaseResult) -> HtmlTable:
    """Accuracy of both arms."""
    rows = [
        [arm, report.max_ulp_error, f"{report.bit_equal_fraction:.3%}", f"{report.relative_rmse:.1e}"]
        for arm, report in (("unfused chain", gate.chain_oracle), ("fused launch", gate.oracle))
    ]
    return HtmlTable(
        ["arm", "largest error (ulp)", "bit-equal to the oracle", "relative RMSE"],
        rows,
        "Both arms against the float64 oracle",
        "checked",
    )


def gate_claims(gate: CaseResult) -> list[Claim]:
    """That both arms compute the operator."""
    reasons = gate_failures(gate)
    fused_ulp, chain_ulp = gate.oracle.judged_ulp_error, gate.chain_oracle.judged_ulp_error
    if chain_ulp > MAX_ULP:
        reasons.append(f"unfused chain: {chain_ulp:.3g} ulp, wanted {MAX_ULP:g}")
    return [
        Claim.check(
            "both arms are right before anything is compared",
            not reasons,
            "; ".join(reasons)
            or f"fused {fused_ulp:.3g} ulp, unfused {chain_ulp:.3g} ulp, wanted {MAX_ULP:g}",
            "checked",
        )
    ]


def performance_claims(gate: CaseResult, counts: LaunchCounts | None) -> list[Claim]:
    """The claims of notebook 03: what could be checked, counted, modelled or measured on this target."""
    claims = [*gate_claims(gate), *traffic_claims(counts)]
    if counts is not None:
        claims += bound_claims(launch_model(counts))
    return claims


def performance_data(
    target: TargetInfo, record: Record | None, counts: LaunchCounts | None
) -> dict[str, Any]:
    """What notebook 03 keeps in its artifact beside the claims."""
    modelled = None if counts is None else launch_model(counts)
    return {
        "target": target.name,
        "device": target.device_name,
        "timed": record is not None,
        "record": None if record is None else record.data,
        **bound_data(counts, modelled),
    }
