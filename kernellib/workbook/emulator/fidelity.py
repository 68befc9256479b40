# SPDX-License-Identifier: Apache-2.0
"""Notebook emulator/01_fidelity: its opening, its picture, and what goes to the artifact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from IPython.display import Image

from kernellib.emulator.profile import Profile

from ..display import Note, figure_style, picture
from .conformance import ConformanceRow
from .demos import DemoResult, where_of
from .kernels import CountedKernel
from .roofline import Bounds

HOT_LINES = 10


def opening_note(target: str) -> Note:
    """Says that nothing here is timed, and what happens to another target."""
    text = "Counted by the gfx950 emulator on this CPU; bounds for an MI355X are modelled; nothing is timed."
    if target in ("auto", "emulator"):
        return Note(text)
    asked = f"Target {target} was asked for, but this notebook runs on the emulator only."
    return Note(f"{asked} {text}", "warning")


def profile_picture(found: Profile) -> Image:
    """The heat map of a profile as a picture that survives in HTML."""
    with figure_style():
        figure = found.figure()
        for axes in figure.axes:
            axes.grid(False)
        return picture(figure, f"heat map of {found.kernel_name}: instructions by source line and class")


def artifact_data(
    counted: Sequence[CountedKernel],
    found: Sequence[DemoResult],
    bounds: Sequence[Bounds],
    rows: Sequence[ConformanceRow],
) -> dict[str, Any]:
    """Everything behind the claims, in plain values."""
    return {
        "kernels": [_kernel_data(kernel) for kernel in counted],
        "hot_lines": [
            {"line": entry.line, "issues": entry.issues, "text": entry.text}
            for entry in counted[0].profile.lines[:HOT_LINES]
        ],
        "findings": [
            {
                "demo": result.demo.name, "sanitizer": result.demo.sanitizer, "mode": result.mode,
                "schedule_seed": result.schedule_seed, "finding": type(result.caught).__name__,
                "where": where_of(result.caught) if result.caught else "",
                "twin_silent": not result.repaired_error,
            }
            for result in found
        ],
        "bounds": [
            {"kernel": b.kernel.name, "units": b.units, "seconds": dict(b.seconds), "source": "modelled"}
            for b in bounds
        ],
        "conformance": {"instructions": len(rows), "lanes": sum(row.lanes for row in rows)},
    }  # fmt: skip


def _kernel_data(kernel: CountedKernel) -> dict[str, Any]:
    report = kernel.report
    return {
        "name": kernel.name, "kernel": report.kernel_name, "num_waves": report.num_waves,
        "classes": report.classes, "matrix_flops": report.matrix_flops, "touched_bytes": kernel.touched_bytes,
        "error": kernel.error,
        "memory": {
            f"{space} {action}": {
                "bytes": totals.bytes, "lines_64": totals.lines_64, "lines_128": totals.lines_128,
                "passes": totals.passes, "conflicts": totals.conflicts,
            }
            for (space, action), totals in report.memory.items()
        },
    }  # fmt: skip
