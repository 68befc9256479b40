# SPDX-License-Identifier: Apache-2.0
"""Where a kernel's instructions come from: counters per line of its Python source.

    with emulated(counters="all") as session:
        launcher(...)
    found = profile(session.launches[-1])
    rich.print(found.table())
    Path("heat.html").write_text(found.html())

The lines come from the line table that FlyDSL and LLVM write into the listing: an instruction belongs to the
innermost statement that the compiler kept for it; what it merged or made itself has the line of one of the
sources, or none.  All numbers are counts of what was executed, not times.
"""

from __future__ import annotations

import html
import linecache
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from kernellib.emulator.counters import CLASSES, AccessTotals, instruction_class
from kernellib.emulator.errors import EmulatorError
from kernellib.emulator.instructions import lookup
from kernellib.emulator.instructions.registry import AluDef

if TYPE_CHECKING:
    from kernellib.emulator.report import LaunchReport

Metric = Literal["issues", "global_bytes", "lines_64", "bank_conflicts", "flops"]
METRICS: dict[Metric, str] = {
    "issues": "instructions issued (by waves)",
    "global_bytes": "bytes asked of global memory",
    "lines_64": "64-byte lines touched",
    "bank_conflicts": "LDS bank conflicts",
    "flops": "matrix FLOP",
}
NO_SOURCE = "(no source line)"
HEAT = (200, 60, 20)  # red, green, blue of the hottest line's background
GAP_LINES = 6  # longer stretches of lines without instructions are left out of a listing


class NoLinesError(EmulatorError):
    """A listing without line table has no profile."""


@dataclass
class LineCounts:
    """What the instructions of one source line did.

    Attributes:
        file, line: where; (NO_SOURCE, 0) for instructions without a line.
        static: instructions in the listing; issues: how often waves issued them.
        classes: issues by class (counters.CLASSES).
        memory: accesses of global memory, and lds: of the LDS (zeros unless the session counted them).
        flops: multiplications and additions of matrix instructions.
    """

    file: str
    line: int
    static: int = 0
    issues: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    memory: AccessTotals = field(default_factory=AccessTotals)
    lds: AccessTotals = field(default_factory=AccessTotals)
    flops: int = 0

    @property
    def text(self) -> str:
        """The source line without indentation, "" where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""

    def value(self, metric: Metric) -> int:
        """One number of the line, see METRICS."""
        return {
            "issues": self.issues, "global_bytes": self.memory.bytes, "lines_64": self.memory.lines_64,
            "bank_conflicts": self.lds.conflicts, "flops": self.flops,
        }[metric]  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Counters of one launch by source line, most issues first."""

    kernel_name: str
    lines: tuple[LineCounts, ...]

    @property
    def files(self) -> list[str]:
        """Source files, most issues first."""
        totals: Counter[str] = Counter()
        for entry in self.lines:
            if entry.line:
                totals[entry.file] += entry.issues
        return [name for name, _ in totals.most_common()]

    @property
    def located(self) -> float:
        """Share of the issues that have a source line."""
        total = self.total("issues")
        return sum(entry.issues for entry in self.lines if entry.line) / total if total else 0.0

    def total(self, metric: Metric) -> int:
        """Sum over all lines."""
        return sum(entry.value(metric) for entry in self.lines)

    def of_file(self, file: str | None = None) -> dict[int, LineCounts]:
        """line -> counts of one file (by default the one with most issues)."""
        chosen = file or self.files[0]
        return {entry.line: entry for entry in self.lines if entry.file == chosen}

    def table(self, metric: Metric = "issues", top: int = 20) -> Table:
        """The `top` lines by a metric, as a rich table."""
        total = self.total(metric) or 1
        shown = Table("line", "issues", "share", "most of it", "bytes", "source", title=METRICS[metric])
        for entry in sorted(self.lines, key=lambda e: -e.value(metric))[:top]:
            if not entry.value(metric):
                break
            where = f"{PurePath(entry.file).name}:{entry.line}" if entry.line else NO_SOURCE
            common = entry.classes.most_common(1)[0][0] if entry.classes else ""
            shown.add_row(
                where, f"{entry.issues:,}", f"{entry.value(metric) / total:.1%}", common,
                f"{entry.memory.bytes:,}", entry.text[:60],
            )  # fmt: skip
        return shown

    def html(self, metric: Metric = "issues", file: str | None = None) -> str:
        """The file's source as a self-contained HTML table, its lines coloured by their share of a metric."""
        counts = self.of_file(file)
        rows = "".join(_html_row(counts, number, metric) for number in _shown_lines(counts))
        name = html.escape(PurePath(file or self.files[0]).name)
        caption = (
            f"{html.escape(self.kernel_name)}: {METRICS[metric]}, by line of {name} "
            f"({self.located:.1%} of the instructions have a line); counted"
        )
        return (
            '<table style="border-collapse:collapse;font-family:monospace;font-size:12px;text-align:left">'
            f'<caption style="text-align:left;font-weight:600;padding:4px">{caption}</caption>'
            f"<tr><th>line</th><th>share</th><th>count</th><th>source</th></tr>{rows}</table>"
        )

    def figure(self, metric: Metric = "issues", file: str | None = None, top: int = 24) -> Any:
        """Heat map as a matplotlib figure: the `top` lines of a file in source order, a column per class."""
        import numpy as np  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)

        counts = self.of_file(file)
        hottest = sorted(counts.values(), key=lambda e: -e.value(metric))[:top]
        chosen = sorted((entry for entry in hottest if entry.value(metric)), key=lambda e: e.line)
        classes = [name for name in CLASSES if any(entry.classes[name] for entry in chosen)]
        heat = np.array([[entry.classes[name] for name in classes] for entry in chosen], float)
        figure = Figure(figsize=(10, 0.28 * max(len(chosen), 4) + 1.6), layout="constrained")
        axes = figure.add_subplot()
        with np.errstate(divide="ignore"):
            image = axes.imshow(np.log10(heat), aspect="auto", cmap="YlOrRd")
        axes.set_yticks(range(len(chosen)), [f"{e.line}: {e.text[:70]}" for e in chosen], family="monospace")
        axes.tick_params(axis="y", labelsize=8)
        axes.set_xticks(range(len(classes)), classes, rotation=30, ha="right")
        title = f"{self.kernel_name}\ninstructions issued, by line and class (counted)"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.colorbar(image, ax=axes, label="log10 of issues")
        return figure


def profile(report: LaunchReport) -> Profile:
    """Counters of a launch by source line.

    Raises:
        NoLinesError: the listing has no line table (compile with debug information).
    """
    found: dict[tuple[str, int], LineCounts] = {}
    for inst, number in zip(report.program.instructions, report.issues, strict=True):
        if not number:
            continue
        where = (inst.source.file, inst.source.line) if inst.source else (NO_SOURCE, 0)
        entry = found.setdefault(where, LineCounts(*where))
        entry.static += 1
        entry.issues += int(number)
        entry.classes[instruction_class(inst.mnemonic)] += int(number)
        definition = lookup(inst.mnemonic)
        if isinstance(definition, AluDef):
            entry.flops += definition.flops * int(number)
        if report.accesses is not None and inst.index in report.accesses.kind:
            space = report.accesses.kind[inst.index][0]
            totals = report.accesses.totals(inst.index)
            if space == "lds":
                entry.lds += totals
            elif space == "global":
                entry.memory += totals
    if not any(line for _, line in found):
        raise NoLinesError(f"the listing of {report.kernel_name} has no .loc lines")
    return Profile(report.kernel_name, tuple(sorted(found.values(), key=lambda e: -e.issues)))


def _shown_lines(counts: dict[int, LineCounts]) -> Iterator[int]:
    """Lines of a listing in order; 0 stands for a stretch that is left out."""
    last = 0
    for number in sorted(counts):
        if last and number - last > GAP_LINES:
            yield 0
        yield from range(last + 1 if last and number - last <= GAP_LINES else number, number + 1)
        last = number


def _html_row(counts: dict[int, LineCounts], number: int, metric: Metric) -> str:
    if number == 0:
        return '<tr><td colspan="4" style="color:#888">...</td></tr>'
    file = next(iter(counts.values())).file
    entry = counts.get(number)
    value = entry.value(metric) if entry else 0
    total = sum(e.value(metric) for e in counts.values()) or 1
    most = max(e.value(metric) for e in counts.values()) or 1
    red, green, blue = HEAT
    colour = f"rgba({red},{green},{blue},{value / most:.3f})"
    source = html.escape(linecache.getline(file, number).rstrip("\n")) or "&nbsp;"
    share = f"{value / total:.1%}" if value else ""
    shown = f"{value:,}" if value else ""
    return (
        f'<tr style="background:{colour}"><td>{number}</td><td>{share}</td>'
        f'<td style="text-align:right">{shown}</td><td style="white-space:pre">{source}</td></tr>'
    )
