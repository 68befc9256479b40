# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of a record. A column holds numbers of one source only, and says which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .comparison import Outcome
from .record import Record
from .stats import slowest_rank

ARM_COLOURS = {"baseline": "#7f7f7f", "peer": "#e08214", "candidate": "#2166ac"}


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def _optional(value: Any, spelling: str = "{}") -> str:
    return "-" if value is None else escape(spelling.format(value))


def capture_spread(times: Mapping[str, Any]) -> str:
    """By how much the medians of an arm's captures differ, slowest over fastest; "-" where there was one."""
    medians = times.get("p50_by_capture", [])
    return f"+-{(max(medians) / min(medians) - 1) / 2:.2%}" if len(medians) > 1 else "-"


def time_table(record: Record) -> Table:
    """Times and rates of each arm (measured)."""
    title = f"{record.data['operator']} on {record.data['device']['name']}: time per call, measured"
    table = Table(
        "arm", "role", "p10 (us)", "p50 (us)", "p90 (us)", "captures", "GB/s", "of copy", "of matmul",
        "status",
        title=escape(title),
    )  # fmt: skip
    for arm in record.arms:
        times, rates = arm["times"], arm["rates"]
        row = ["-"] * 7
        if times and rates:
            row = [
                *(_microseconds(times[key]) for key in ("p10", "p50", "p90")),
                capture_spread(times),
                f"{rates['bytes_per_s'] / 1e9:.0f}",
                f"{rates['share_of_copy']:.1%}",
                f"{rates['share_of_matmul']:.2%}",
            ]
        status = arm["status"] if arm["reason"] is None else f"{arm['status']}: {arm['reason']}"
        table.add_row(escape(arm["name"]), arm["role"], *row, escape(status))
    return table


def ratio_table(record: Record) -> Table:
    """Paired ratios with their intervals and verdicts, the control last (measured)."""
    table = Table(
        "reference",
        "tested",
        "reference / tested",
        "interval",
        "trials",
        "verdict",
        title="Paired ratios, measured",
    )
    control = record.data["control"]
    for entry in [*record.data["comparisons"], *([control] if control else [])]:
        table.add_row(
            escape(entry["reference"]),
            escape(entry["tested"]),
            f"{entry['ratio']:.4f}",
            f"{entry['low']:.4f} to {entry['high']:.4f} ({entry['confidence']:.0%})",
            str(len(entry["orders"])),
            entry["verdict"],
        )
    return table


def error_table(record: Record) -> Table:
    """Errors against the oracle before and after timing (checked)."""
    table = Table(
        "arm", "when", "worst error (ulp)", "bit-equal at least", "relative RMSE at most",
        title="Against the oracle, over all slots, checked",
    )  # fmt: skip
    for arm in record.arms:
        for when in ("before", "after"):
            errors = arm[f"errors_{when}"]
            if errors:
                table.add_row(
                    escape(arm["name"]),
                    when,
                    _optional(errors["max_ulp_error"], "{:.3g}"),
                    _optional(errors["min_bit_equal_fraction"], "{:.3%}"),
                    _optional(errors["max_relative_rmse"], "{:.2e}"),
                )
    return table


def traffic_tables(record: Record) -> list[Table]:
    """Launches and bytes, one table for each source."""
    titles = {
        "counted": "Launches, and bytes requested by all waves, counted",
        "modelled": "Launches, and the least bytes to move, from the shapes, modelled",
    }
    tables = []
    for source, title in titles.items():
        table = Table("arm", "launches", "bytes read", "bytes written", title=title)
        for arm in record.arms:
            launches, traffic = arm["launches"], arm["traffic"]
            if launches and traffic and launches["source"] == traffic["source"] == source:
                table.add_row(
                    escape(arm["name"]),
                    str(launches["value"]),
                    f"{traffic['read_bytes']:,}",
                    f"{traffic['written_bytes']:,}",
                )
        if table.row_count:
            tables.append(table)
    return tables


def device_table(record: Record) -> Table:
    """The device's state around the trials, and the ceilings of the same run."""
    table = Table("quantity", "before", "after", title="Device")
    before, after = record.data["state_before"], record.data["state_after"]
    if before["source"] is None:
        table.add_row("state", _optional(before["why_not"]), "")
    else:
        for key in before:
            if key not in ("source", "why_not"):
                table.add_row(escape(key), *(_optional(state[key]) for state in (before, after)))
    for ceiling in record.data["ceilings"]:
        scale, unit = (1e12, "TB/s") if ceiling["unit"] == "byte/s" else (1e12, "TFLOP/s")
        table.add_row(escape(ceiling["detail"]), f"{ceiling['median'] / scale:.2f} {unit}", "")
    return table


def print_record(record: Record, console: Console, name: str = "") -> None:
    """Everything worth reading, the verdict on the record first."""
    data = record.data
    mark = "[green]valid[/]" if record.trusted else "[bold red]INVALID[/]"
    dirty = " (dirty)" if data["git"]["dirty"] else ""
    revision = f"revision {_optional(data['git']['revision'])}{dirty}"
    console.print(f"{mark} {escape(name)}  {escape(data['created'])}  {revision}", highlight=False)
    for reason in record.faults:
        console.print(f"  {reason}", style="red", markup=False, highlight=False)
    for warning in data["warnings"]:
        console.print(f"  warning: {warning}", style="yellow", markup=False, highlight=False)
    if record.timed:
        method = data["method"]
        console.print(
            f"{method['num_trials']} trials, {method['stopped_because']}; {method['rotation']} slots of "
            f"{method['slot_bytes']:,} bytes, {_optional(method['cache_coverage'])} "
            "times the last-level cache",
            markup=False,
            highlight=False,
        )
        tables = [time_table(record), ratio_table(record), device_table(record)]
    else:
        console.print("nothing was timed: counters and shapes only", highlight=False)
        tables = traffic_tables(record)
    for table in [*tables, error_table(record)]:
        console.print(table)


def print_outcome(outcome: Outcome, console: Console) -> None:
    """What ``compare`` has to say."""
    for reason in outcome.incomparable:
        console.print(f"do not compare: {reason}", style="red", markup=False, highlight=False)
    if outcome.changes:
        table = Table("arm", "quantity", "source", "old", "new", "new is worse by")
        for change in outcome.changes:
            table.add_row(
                escape(change.arm),
                escape(change.quantity),
                change.source,
                f"{change.old:.6g}",
                f"{change.new:.6g}",
                f"{change.slowdown - 1:+.2%}",
            )
        console.print(table)
    for contradiction in outcome.contradictions:
        console.print(f"not to be trusted: {contradiction}", style="red", markup=False, highlight=False)
    for change in outcome.changes:
        if change.regressed:
            line = f"REGRESSION: {change.arm}, {change.quantity}, worse by {change.slowdown - 1:.2%}"
            console.print(line, style="red", markup=False, highlight=False)
    for failure in outcome.failures:
        console.print(f"REGRESSION: {failure}", style="red", markup=False, highlight=False)
    for note in outcome.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _draw_times(axes: Any, record: Record) -> None:
    timed = [arm for arm in record.arms if arm["times"]]
    for position, arm in enumerate(timed):
        p10, p50, p90 = (arm["times"][key] * 1e6 for key in ("p10", "p50", "p90"))
        axes.barh(position, p50, color=ARM_COLOURS[arm["role"]], height=0.6)
        axes.errorbar(p50, position, xerr=[[p50 - p10], [p90 - p50]], color="black", capsize=3)
        axes.annotate(f" {p50:.2f}", (p90, position), va="center")
    copy = record.ceiling("copy")
    if copy:
        bound = record.data["work"]["bytes_per_call"] / copy["median"] * 1e6
        axes.axvline(
            bound, color="black", linestyle="--", linewidth=1, label=f"at copy bandwidth, {bound:.2f}"
        )
        axes.legend(loc="lower right")
    axes.set_yticks(range(len(timed)), [arm["name"] for arm in timed])
    axes.margins(x=0.15)
    axes.set_ylim(len(timed) + 0.3, -0.6)  # from the top, with room for the legend under the last bar
    axes.set_xlabel("time per call (microseconds), p50 with p10 to p90")
    axes.set_title("Times (measured)")


def _draw_ratios(axes: Any, record: Record) -> None:
    control = record.data["control"]
    entries: list[Mapping[str, Any]] = [*record.data["comparisons"], *([control] if control else [])]
    for position, entry in enumerate(entries):
        pairs = zip(entry["reference_s"], entry["tested_s"], strict=True)
        ratios = [slowest_rank(reference) / slowest_rank(tested) for reference, tested in pairs]
        axes.plot(ratios, [position] * len(ratios), "|", color="#999999", markersize=10)
        error = [[entry["ratio"] - entry["low"]], [entry["high"] - entry["ratio"]]]
        colour = "#7f7f7f" if entry is control else ARM_COLOURS["candidate"]
        axes.errorbar(entry["ratio"], position, xerr=error, fmt="o", color=colour, capsize=4)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(entries)), [f"{entry['reference']} / {entry['tested']}" for entry in entries])
    axes.invert_yaxis()
    axes.set_xlabel("ratio of times: each trial,\nand the median over captures with its interval")
    axes.set_title("Paired ratios (measured)")


def plot_record(record: Record, path: Path) -> Path | None:
    """Writes the times and the paired ratios of a timed record as a picture.

    Args:
        record: what to draw.
        path: the file, ".png" or ".svg".

    Returns:
        the path; None for a counted record, which has no times to draw.
    """
    if not record.timed:
        return None
    from matplotlib.figure import Figure  # noqa: PLC0415  (an optional package, slow to import)

    figure = Figure(figsize=(11, 1.6 + 0.55 * max(len(record.arms), len(record.data["comparisons"]) + 1)))
    left, right = figure.subplots(1, 2)
    _draw_times(left, record)
    _draw_ratios(right, record)
    figure.suptitle(f"{record.data['operator']}, {record.data['device']['name']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
