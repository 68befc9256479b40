# SPDX-License-Identifier: Apache-2.0
"""The command line: exit statuses, the index page, self-contained pages."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kernellib.workbook.cli import main

from .conftest import PASSING_END, MakeNotebook


def exit_status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


FIGURE = """\
import numpy as np
from IPython.display import display
from kernellib.workbook import display as d
with d.figure_style():
    figure, (axes,) = d.new_figure(3, 2)
    axes.plot([1, 2])
    display(d.picture(figure, "a rising line"))
"""


def test_the_command_line_runs_the_rest_after_a_failure_and_writes_the_index(
    make_notebook: MakeNotebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_notebook("t/1_bad", ["raise KeyError('lost')"])
    root = make_notebook("t/2_good", [FIGURE, PASSING_END])
    out = tmp_path / "o"
    arguments = [
        "run",
        "--notebooks",
        str(root),
        "--out",
        str(out),
        "--target",
        "reference",
        "-p",
        "trials",
        "7",
    ]
    assert exit_status(arguments) == 1
    captured = capsys.readouterr()
    assert "1 of 2 notebooks failed: t/1_bad" in captured.err
    assert "KeyError: 'lost'" in captured.out
    summary = json.loads((out / "summary.json").read_text())["notebooks"]
    assert [(entry["notebook"], entry["passed"]) for entry in summary] == [
        ("t/1_bad", False),
        ("t/2_good", True),
    ]
    index = (out / "index.html").read_text()
    assert "1 of 2 notebooks passed, 1 of 1 claims hold" in index
    for text in (
        "numbers add up",
        "checked",
        "t/2_good.html",
        "t/2_good.json",
        "KeyError",
        "data:image/png;base64,",
    ):
        assert text in index
    page = (out / "t" / "2_good.html").read_text()
    assert "data:image/png;base64," in page
    assert "a rising line" in page
    assert (out / "t" / "2_good-figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert (
        re.findall(r"""<script[^>]+src=|<link[^>]+href=|@import|url\(["']?http|<img[^>]+src=["']http""", page)
        == []
    )


def test_the_command_line_passes_with_status_0(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    root = make_notebook("a")
    assert (
        exit_status(
            ["run", "a", "--notebooks", str(root), "--out", str(tmp_path / "o"), "--target", "reference"]
        )
        == 0
    )


def test_a_page_that_cannot_be_rendered_fails_its_notebook_and_is_said(
    make_notebook: MakeNotebook,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_arguments: object) -> None:
        raise ValueError("no template")

    monkeypatch.setattr("kernellib.workbook.cli.render_notebook", broken)
    root, out = make_notebook("a"), tmp_path / "o"
    arguments = ["run", "a", "--notebooks", str(root), "--out", str(out), "--target", "reference"]
    assert exit_status(arguments) == 1
    assert (
        "page: the notebook's page could not be rendered: ValueError: no template" in capsys.readouterr().out
    )
    assert "could not be rendered" in (out / "index.html").read_text()


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["b"], "the notebooks are: a"),
        (["-p", "trails", "3"], "artifact_dir, seed, trials"),
        (["-p", "trials", "few"], "wanted int"),
        (["-p", "trials"], "wanted NAME VALUE"),
        (["--profile", "slow"], "quick, full"),
        (["--target", "tpu"], "tpu"),
    ],
)
def test_a_request_for_what_does_not_exist_has_status_2(
    make_notebook: MakeNotebook,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    complaint: str,
) -> None:
    root = make_notebook("a")
    common = ["--notebooks", str(root), "--out", str(tmp_path / "o")]
    target = [] if "--target" in extra else ["--target", "reference"]
    assert exit_status(["run", *common, *target, *extra]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_list_names_every_notebook_and_parameter(
    make_notebook: MakeNotebook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    make_notebook("t/a")
    root = make_notebook("t/b")
    assert exit_status(["list", "--notebooks", str(root)]) == 0
    text = capsys.readouterr().out
    for expected in ("t/a", "t/b", "trials: int = 3", "how many"):
        assert expected in text


def test_the_repositorys_notebooks_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert exit_status(["list"]) == 0
    assert "latent_moe_tail/01_correctness" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
