# SPDX-License-Identifier: Apache-2.0
"""The performance log's tables of committed runs say what their records say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernellib.bench.record import Record

ROOT = Path(__file__).parents[2]
LOG = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
VALID = ROOT / "results" / "nvidia_h200" / "2026-12-02"
FIRST = ROOT / "results" / "nvidia_h200" / "2026-12-01"
ARMS = {
    "eager": "unfused chain",
    "compile": "`torch.compile`",
    "max_autotune": "`torch.compile`, max-autotune-no-cudagraphs",
    "fused": "fused",
}


def records(folder: Path) -> list[Record]:
    return [Record.load(folder / f"03_performance_ab.seed{seed}.record.json") for seed in (0, 1)]


def p50(record: Record, arm: str) -> str:
    return f"{record.arm(arm)['times']['p50'] * 1e6:.2f}"


def ratio(entry: Mapping[str, Any] | None, digits: int = 3) -> str:
    assert entry is not None
    low, high = (f"{entry[key]:.{digits}f}" for key in ("low", "high"))
    return f"{entry['ratio']:.{digits}f} ({low} to {high})"


def test_the_table_of_the_valid_runs() -> None:
    both = records(VALID)
    rows = [
        f"| {name}, p50 | | {' | '.join(f'{p50(record, arm)} us' for record in both)} |"
        for arm, name in ARMS.items()
    ]
    for reference, name, goal in (("eager", "unfused", "1.75"), ("max_autotune", "max-autotune", "1.12")):
        cells = " | ".join(ratio(record.comparison(reference, "fused")) for record in both)
        rows.append(f"| {name} / fused | {goal} | {cells} |")
    shares = [f"{100 * record.arm('fused')['rates']['share_of_copy']:.1f} %" for record in both]
    rows.append(f"| fused, share of the copy bandwidth | 90 % | {' | '.join(shares)} |")
    controls = [ratio(record.data["control"], 4) for record in both]
    rows.append(f"| A/A control, must contain 1 | | {' | '.join(controls)} |")
    assert [row for row in rows if row not in LOG] == []
    assert all(record.trusted and record.data["method"]["num_trials"] == 210 for record in both)


def test_the_copy_and_the_time_of_a_call_at_its_rate() -> None:
    medians = []
    for record in records(VALID):
        copy = record.ceiling("copy")
        assert copy is not None
        medians.append(copy["median"])
    for median in medians:
        seconds = records(VALID)[0].data["work"]["bytes_per_call"] / median
        assert (
            f"both runs of 2026-12-02 (measured) | {median / 1e12:.3f} TB/s | {seconds * 1e6:.2f} us |" in LOG
        )


@pytest.mark.parametrize("seed", [0, 1])
def test_the_table_of_the_first_runs(seed: int) -> None:
    record = records(FIRST)[seed]
    assert not record.valid
    cells = [
        f"{', '.join(p50(record, arm) for arm in ARMS)} us",
        ratio(record.comparison("eager", "fused")),
        ratio(record.comparison("max_autotune", "fused")),
        f"**{ratio(record.data['control'], 4)}**",
    ]
    assert [cell for cell in cells if f"| {cell} |" not in LOG] == []


def test_what_is_said_of_the_intervals_and_of_the_run_after_a_producer() -> None:
    reach = [
        (entry[key] / entry["ratio"] - 1) * 100
        for record in records(VALID)
        for entry in record.data["comparisons"]
        for key in ("low", "high")
    ]
    assert f"from {min(reach):.1f} to {max(reach):+.1f} % of the ratio" in LOG
    assert all(
        record.data["method"]["stopped_because"].startswith("max_trials reached") for record in records(VALID)
    )
    after = Record.load(VALID / "after_producer.record.json")
    assert after.trusted
    times = [p50(after, arm) for arm in ("eager", "max_autotune", "fused")]
    text = " ".join(LOG.split())
    assert f"{times[0]}, {times[1]} and {times[2]} us, one kernel that writes" in text
    assert f"{ratio(after.comparison('eager', 'fused'))} over the chain" in text
    assert f"{ratio(after.comparison('max_autotune', 'fused'))} over max-autotune" in text
