# SPDX-License-Identifier: Apache-2.0
"""Tables, notes and figures in one style, for notebooks: static, so that they survive in HTML.

Everything here displays itself as the last expression of a cell and through ``IPython.display``.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

# Colours that stay apart for colour-blind readers (Okabe and Ito's palette, darkened for text on white).
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#B3261E", "#7B4FA3", "#6B7280"

FIGURE_DPI = 144
CSS_PIXELS_PER_INCH = 96

STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so figures look the same everywhere
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E7EB",
    "legend.framealpha": 0.92,
    "legend.edgecolor": "none",
    "legend.fontsize": 10,
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, PURPLE, GREY]),
}

HEAD_STYLE = "padding:6px 12px;border-bottom:2px solid #d0d7de;vertical-align:bottom"
CAPTION_STYLE = (
    "caption-side:top;text-align:left;font-weight:600;padding:4px 12px;color:#1f2328;white-space:nowrap"
)

Tone = Literal["info", "warning"]
NOTE_COLOURS: dict[Tone, tuple[str, str]] = {
    "info": ("#ddf4ff", "#0a3069"),
    "warning": ("#fff3cd", "#664d03"),
}


@dataclass(frozen=True)
class HtmlTable:
    """A table with a caption; cells are text, numbers are right-aligned, verdicts get a colour.

    Attributes:
        columns: headings.
        rows: one sequence of values per row, as long as ``columns``.
        caption: what the table shows.
        source: where its numbers come from (measured, counted, modelled, checked); one table, one source.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Checks that rows and headings match.

        Raises:
            ValueError: a row has another length.
        """
        for position, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"table row {position} has {len(row)} values, wanted {len(self.columns)}")

    def _align(self, column_idx: int) -> str:
        return "right" if self.rows and is_number(self.rows[0][column_idx]) else "left"

    def _repr_html_(self) -> str:
        head = "".join(
            f'<th style="text-align:{self._align(position)};{HEAD_STYLE}">{html.escape(column)}</th>'
            for position, column in enumerate(self.columns)
        )
        body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in self.rows)
        note = f"{self.caption} ({self.source})" if self.source else self.caption
        caption = f'<caption style="{CAPTION_STYLE}">{html.escape(note)}</caption>' if note else ""
        return (
            '<table style="border-collapse:collapse;font-size:13px;margin:8px 0;text-align:left">'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def __repr__(self) -> str:
        rows = [" | ".join(self.columns)]
        rows += [" | ".join(format_value(value) for value in row) for row in self.rows]
        return "\n".join(([self.caption] if self.caption else []) + rows)


VERDICT_COLOURS = {"pass": "#116329", "fail": "#a40e26", "yes": "#116329", "no": "#a40e26"}


def format_value(value: Any) -> str:
    """A cell's text: thousands separated, floats with four significant digits, None as a dash.

    Example:
        >>> format_value(51380224), format_value(0.000123456), format_value(None)
        ('51,380,224', '0.0001235', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def is_number(value: Any) -> bool:
    """Whether a cell's value is set as a number: right-aligned, with digits that line up."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    text = format_value(value)
    number = is_number(value)
    colour = VERDICT_COLOURS.get(text, "")
    style = "padding:5px 12px;border-bottom:1px solid #eaeef2;vertical-align:top;"
    # One alignment for a column of numbers, with figures of equal width, so that digits line up.
    style += "text-align:right;font-variant-numeric:tabular-nums;" if number else "text-align:left;"
    style += f"color:{colour};font-weight:600;" if colour else ""
    return f'<td style="{style}">{html.escape(text)}</td>'


@dataclass(frozen=True)
class Note:
    """A short remark in a box, for what a reader must not miss."""

    text: str
    tone: Tone = "info"

    def _repr_html_(self) -> str:
        background, colour = NOTE_COLOURS[self.tone]
        return (
            f'<div style="background:{background};color:{colour};border-radius:8px;padding:10px 14px;'
            f'margin:6px 0;font-size:14px">{html.escape(self.text)}</div>'
        )

    def __repr__(self) -> str:
        return self.text


@contextmanager
def figure_style() -> Iterator[None]:
    """Matplotlib settings of every figure; draw and ``picture`` inside it."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]  # keys are checked when it is entered
        yield


def new_figure(width: float, height: float, num_axes: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with ``num_axes`` axes side by side.

    Made without pyplot: no global state, no second copy when a cell ends, no display needed.

    Args:
        width, height: inches.
        num_axes: number of axes in the row.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, num_axes, squeeze=False)[0]
    return figure, list(axes)


def picture(figure: Figure, alt: str) -> Image:
    """Renders a figure to a PNG that displays itself at its nominal size.

    Args:
        figure: what to render.
        alt: the figure in words, for readers who cannot see it.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=FIGURE_DPI)
    width = round(figure.get_size_inches()[0] * CSS_PIXELS_PER_INCH)
    return Image(  # type: ignore[no-untyped-call]
        data=buffer.getvalue(), format="png", width=width, alt=alt
    )
