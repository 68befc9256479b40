# SPDX-License-Identifier: Apache-2.0
"""Control panels: the static result survives headless, the panel re-runs with other values when alive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from kernellib.workbook import HEADLESS_VARIABLE, widgets
from kernellib.workbook.discovery import find_notebooks
from kernellib.workbook.display import HtmlTable, Note, format_value
from kernellib.workbook.report import render_notebook
from kernellib.workbook.runner import Limits, run_notebook
from kernellib.workbook.widgets import Choice, Panel, Slider, is_headless, show

from .conftest import PASSING_END, MakeNotebook

CONTROLS = {"kind": Choice("value range", ["normal", "tiny"], "normal"), "count": Slider("count", 1, 9, 1, 3)}

PANEL_CELL = """\
from kernellib.workbook.display import HtmlTable
from kernellib.workbook.widgets import Choice, show
def run(kind):
    return [HtmlTable(["kind", "value"], [[kind, 12345]], "A static table", "checked")]
panel = show(run("normal"), run, {"kind": Choice("kind", ["normal", "tiny"], "normal")})
assert panel is None
"""


def run(kind: str, count: int) -> Sequence[Any]:
    if kind == "tiny":
        raise ValueError("no tiny values today")
    return [HtmlTable(["kind", "count"], [[kind, count]])]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """A shell like a kernel's, and no request to be headless."""
    monkeypatch.delenv(HEADLESS_VARIABLE, raising=False)
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr(widgets, "get_ipython", lambda: shell)
    return shell


def test_headless_keeps_the_static_result_in_the_page(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    (notebook,) = find_notebooks(make_notebook("a", [PANEL_CELL, PASSING_END]))
    result = run_notebook(notebook, tmp_path / "out", Limits(60, 120))
    assert result.failure is None
    page = render_notebook(result, tmp_path / "out" / "index.html").read_text()
    assert "A static table (checked)" in page
    assert "12,345" in page
    assert "adds a control panel" in page
    assert "widget-view+json" not in result.executed_path.read_text()


def test_alive_a_panel_follows_the_static_result(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(widgets, "display", shown.append)
    static = run("normal", 3)
    panel = show(static, run, CONTROLS)
    assert panel is not None
    assert shown == [static[0], panel.root]
    assert panel.values() == {"kind": "normal", "count": 3}


def test_each_run_replaces_the_last_and_shows_errors(shell: InteractiveShell) -> None:
    panel = Panel(run, CONTROLS)
    panel.inputs["count"].value = 7
    panel.button.click()
    (output,) = panel.output.outputs
    assert ">7</td>" in output["data"]["text/html"]
    panel.inputs["kind"].value = "tiny"
    panel.button.click()
    (output,) = panel.output.outputs
    assert "ValueError: no tiny values today" in output["text"]
    assert not panel.button.disabled


def test_sliders_are_whole_only_when_all_their_values_are() -> None:
    assert Slider("n", 1, 9, 1, 3).whole
    assert not Slider("x", 0, 1, 0.5, 0.5).whole


def test_without_a_kernel_or_when_told_so_it_is_headless(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_headless()
    monkeypatch.setenv(HEADLESS_VARIABLE, "1")
    assert is_headless()
    monkeypatch.delenv(HEADLESS_VARIABLE)
    monkeypatch.setattr(widgets, "get_ipython", lambda: None)
    assert is_headless()


def test_tables_escape_align_and_check_their_rows() -> None:
    page = HtmlTable(["a<b", "n"], [["x & y", 1234567]], "Caption")._repr_html_()
    assert "a&lt;b" in page
    assert "x &amp; y" in page
    assert "text-align:right" in page
    assert "1,234,567" in page
    with pytest.raises(ValueError, match="row 1 has 1 values, wanted 2"):
        HtmlTable(["a", "b"], [[1, 2], [3]])
    assert "a &lt; b" in Note("a < b")._repr_html_()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (1234, "1,234"),
        (0.00012345678, "0.0001235"),
        (51380224.0, "51,380,224"),
        ("x", "x"),
    ],
)
def test_values_are_formatted_for_reading(value: Any, text: str) -> None:
    assert format_value(value) == text
