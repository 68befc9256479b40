# SPDX-License-Identifier: Apache-2.0
"""The command line: exit statuses, the index page, self-contained pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernellib.workbook.cli import join_parameter_pairs, main
from kernellib.workbook.runner import NotebookResult

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
        (["-p", "trials", "--profile", "quick"], "-p got 'trials', wanted NAME VALUE"),
        (["-p", "--profile", "quick"], "-p got '--profile', wanted NAME VALUE"),
        (["-p", "--profile=quick"], "-p got '--profile=quick', wanted NAME VALUE"),
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


@pytest.mark.parametrize(
    ("arguments", "joined"),
    [
        (["-p", "seed", "-1"], ["-p", "seed=-1"]),
        (["-p", "scale", "-1.5e-3", "--out", "x"], ["-p", "scale=-1.5e-3", "--out", "x"]),
        (["--parameter", "name", "-x"], ["--parameter", "name", "-x"]),
        (["-p", "name=-x", "a"], ["-p", "name=-x", "a"]),
        (["-p", "seed", "--out", "x"], ["-p", "seed", "--out", "x"]),
        (["-p", "--out", "x"], ["-p", "--out", "x"]),
        (["-p", "name", ""], ["-p", "name="]),
        (["a", "-p"], ["a", "-p"]),
    ],
)
def test_a_parameters_value_is_not_an_option(arguments: list[str], joined: list[str]) -> None:
    assert join_parameter_pairs(arguments) == joined


def test_an_output_folder_that_cannot_be_written_has_status_2(
    make_notebook: MakeNotebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, file = make_notebook("t/a"), tmp_path / "file"
    file.touch()
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "t").touch()  # where the notebook's folder should be
    # Not even root makes files in a process's folder.
    read_only = [Path("/proc/self")] if Path("/proc/self").is_dir() else []
    for out in (file, file / "sub", tmp_path / "o", *read_only):
        arguments = ["run", "--notebooks", str(root), "--target", "reference", "--out", str(out)]
        assert exit_status(arguments) == 2
        error = capsys.readouterr().err
        assert "--out" in error
        assert "Traceback" not in error
    assert not (tmp_path / "o" / "index.html").exists()


def test_the_index_names_the_target_that_a_parameter_chose(
    make_notebook: MakeNotebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = 'artifact_dir = "out"\ntrials = 3\ntarget = "auto"\nprofile = "quick"'
    root, out = make_notebook("a", parameters=parameters), tmp_path / "o"
    arguments = ["run", "--notebooks", str(root), "--out", str(out), "--target", "emulator"]
    assert exit_status([*arguments, "-p", "target", "reference"]) == 0
    index = (out / "index.html").read_text()
    assert "kernellib workbook on reference (" in index
    assert "target=&#x27;reference&#x27;" in index
    assert exit_status([*arguments, "-p", "target", "tpu"]) == 2
    assert exit_status([*arguments, "-p", "profile", "slow"]) == 2
    assert "wanted one of quick, full" in " ".join(capsys.readouterr().err.split())


def test_a_malformed_notebook_is_listed_and_does_not_stop_the_others(
    make_notebook: MakeNotebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_notebook("a")
    root, out = make_notebook("b"), tmp_path / "o"
    content = json.loads((root / "a.ipynb").read_text())
    content["metadata"] = {}
    (root / "a.ipynb").write_text(json.dumps(content))
    assert exit_status(["list", "--notebooks", str(root)]) == 0
    assert "kernelspec" in capsys.readouterr().out
    assert exit_status(["run", "--notebooks", str(root), "--target", "reference", "--out", str(out)]) == 1
    entries = json.loads((out / "summary.json").read_text())["notebooks"]
    assert [(entry["notebook"], entry["passed"]) for entry in entries] == [("a", False), ("b", True)]
    assert entries[0]["failure"]["kind"] == "format"


HANGS = """\
import time
from pathlib import Path
Path("hangs.txt").touch()
time.sleep(600)
"""


def test_an_index_of_fewer_notebooks_than_chosen_never_says_all_passed(
    make_notebook: MakeNotebook,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, pages = tmp_path / "o", []

    def interrupted_after_one(notebooks, out, limits, *, listener_for, finished, **options) -> None:
        listener_for(notebooks[0])
        pages.append((out / "index.html").read_text())
        path = out / notebooks[0].stem
        finished(NotebookResult(notebooks[0], {}, path.with_suffix(".ipynb"), path.with_suffix(".html")))
        pages.append((out / "index.html").read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr("kernellib.workbook.cli.run_notebooks", interrupted_after_one)
    make_notebook("a")
    options = ["--notebooks", str(make_notebook("b")), "--out", str(out), "--target", "reference"]
    assert exit_status(["run", *options]) == 130
    assert "interrupted" in capsys.readouterr().err
    pages.append((out / "index.html").read_text())
    headlines = (
        "not finished</span> 0 of 2 notebooks ran, 0 of 2",
        "not finished</span> 1 of 2 notebooks ran, 1 of 2",
        "interrupted</span> 1 of 2 notebooks ran, 1 of 2",
    )
    for page, headline in zip(pages, headlines, strict=True):
        assert headline in page
        assert "<li>b</li>" in page
        assert "all passed" not in page


@pytest.mark.slow
def test_an_interrupted_run_says_so_and_what_is_pending(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    make_notebook("a")
    make_notebook("b", [HANGS])
    root, out = make_notebook("c"), tmp_path / "o"
    options = ["--notebooks", str(root), "--out", str(out), "--target", "reference"]
    command = [sys.executable, "-m", "kernellib.workbook", "run", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            while not (out / "hangs.txt").exists() and process.poll() is None:
                time.sleep(0.05)
            during, summary = (out / "index.html").read_text(), json.loads((out / "summary.json").read_text())
            process.send_signal(signal.SIGINT)
            printed, error = process.communicate(timeout=60)
        finally:
            process.kill()
    index = (out / "index.html").read_text()
    for page, badge in ((during, "not finished"), (index, "interrupted")):
        assert f">{badge}</span> 1 of 3 notebooks ran, 1 of 3 notebooks passed, 1 of 1 claims hold" in page
        assert "<li>b</li><li>c</li>" in page
        assert "all passed" not in page
    assert summary["pending"] == ["b", "c"]
    assert json.loads((out / "summary.json").read_text()) == summary
    assert process.returncode == 130
    assert "Traceback" not in printed + error
    assert error.split() == f"interrupted; what finished is in {out / 'index.html'}".split()


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
