# SPDX-License-Identifier: Apache-2.0
"""Headless runs of tiny notebooks: what passes, every way to fail, and what a failure leaves behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from kernellib.workbook.artifact import Claim, write_artifact
from kernellib.workbook.discovery import find_notebooks
from kernellib.workbook.errors import ParameterTypeError, UnknownParameterError
from kernellib.workbook.report import render_index, render_notebook
from kernellib.workbook.runner import Limits, NotebookResult, run_notebook, run_notebooks

from .conftest import PASSING_END, MakeNotebook

LIMITS = Limits(cell_s=60, run_s=120)


def run_one(root: Path, out: Path, limits: Limits = LIMITS, **options) -> NotebookResult:
    (notebook,) = find_notebooks(root)
    return run_notebook(notebook, out, limits, **options)


def failure_of(result: NotebookResult) -> tuple[str, str]:
    assert result.failure is not None, "the notebook should have failed"
    return result.failure.kind, result.failure.message


def process_exists(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that its reaper has yet to collect does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_passing_notebook_runs_in_this_interpreter_with_its_parameters(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    write = "Path('seen.txt').write_text(f'{sys.executable} {seed} {trials}')"
    cell = f"import sys; from pathlib import Path\n{write}"
    root = make_notebook("tail/01_x", [cell, PASSING_END])
    seen: list[tuple[str, int, str]] = []

    class Listener:
        def cell_started(self, index: int, num_cells: int, label: str) -> None:
            seen.append(("start", index, label))

        def cell_finished(self, index: int, num_cells: int, seconds: float) -> None:
            seen.append(("end", index, str(num_cells)))

        def output(self, text: str) -> None:
            seen.append(("text", -1, text.strip()))

    result = run_one(
        root,
        tmp_path / "out",
        common={"target": "emulator", "seed": 41},
        overrides={"trials": "8"},
        listener=Listener(),
    )
    assert result.failure is None
    assert result.parameters == {"seed": 41, "trials": 8, "artifact_dir": str(tmp_path / "out" / "tail")}
    # The kernel works in the output folder, in this very interpreter.
    assert (tmp_path / "out" / "tail" / "seen.txt").read_text() == f"{sys.executable} 41 8"
    assert result.artifact is not None
    assert result.artifact["parameters"] == {"trials": 8}
    assert next(entry for entry in seen if entry[0] == "start") == ("start", 0, "parameters")
    assert seen.count(("end", 4, "5")) == 1
    assert ("text", -1, "all 1 claims hold; evidence in 01_x.json") in seen


def test_a_failing_claim_fails_and_leaves_its_artifact(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    root = make_notebook("a", [PASSING_END.replace("trials + 1 == 1 + trials", "False")])
    result = run_one(root, tmp_path / "out")
    kind, message = failure_of(result)
    assert kind == "claim"
    assert "numbers add up" in message
    assert [claim["verdict"] for claim in result.claims] == ["fail"]


def test_a_failing_claim_that_is_never_asserted_fails(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    source = PASSING_END.replace("trials + 1 == 1 + trials", "False").replace(
        "assert_claims(write", "str(write"
    )
    assert failure_of(run_one(make_notebook("a", [source]), tmp_path / "out"))[0] == "claim"


@pytest.mark.parametrize(
    ("cells", "kind", "complaint"),
    [
        (["x = 1"], "artifact", "no artifact a.json"),
        (["import sys\nsys.exit(0)", PASSING_END], "early stop", "sys.exit"),
        ([PASSING_END, "raise SystemExit"], "early stop", "sys.exit"),
        ([PASSING_END.replace("stem,", "'b',")], "artifact", "no artifact a.json"),
        ([PASSING_END.replace('{"trials": trials}', '{"trials": 99}')], "artifact", "trials=99"),
        ([PASSING_END, "open('a.json', 'w').write('{}')"], "artifact", "does not follow"),
        (["import os\nos._exit(0)", PASSING_END], "kernel", "kernel died"),
    ],
)
def test_a_notebook_without_its_artifact_or_its_end_fails(
    make_notebook: MakeNotebook, tmp_path: Path, cells: list[str], kind: str, complaint: str
) -> None:
    result = run_one(make_notebook("a", cells), tmp_path / "out", overrides={"trials": "4"})
    got_kind, message = failure_of(result)
    assert (got_kind, complaint in message) == (kind, True), message


def test_an_artifact_of_an_earlier_run_does_not_count(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stale = write_artifact(out, "a", parameters={}, claims=[Claim("old", "pass", "d", "checked")], data={})
    (out / "a-figure-1.png").write_bytes(b"old")
    result = run_one(make_notebook("a", ["x = 1"]), out)
    assert failure_of(result)[0] == "artifact"
    assert result.claims == []
    assert not stale.exists()
    assert not (out / "a-figure-1.png").exists()


def test_an_exception_shows_its_traceback_on_the_page(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    cell = "def inner():\n    raise ValueError('tail & wagging')\ninner()"
    result = run_one(make_notebook("a", [cell, PASSING_END]), tmp_path / "out")
    assert failure_of(result) == ("exception", "ValueError: tail & wagging")
    assert result.failure is not None
    assert "inner()" in result.failure.traceback
    assert "\x1b" not in result.failure.traceback
    index = tmp_path / "out" / "index.html"
    page = render_notebook(result, index).read_text()
    assert "kl-failure" in page
    assert "ValueError: tail &amp; wagging" in page
    assert "raise ValueError" in render_index([result], index).read_text()


STUBBORN = """\
import os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path("pids.txt").write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("limits", "complaint"), [(Limits(3.0, 60.0), "--cell-timeout"), (Limits(60.0, 4.0), "--run-timeout")]
)
def test_a_hung_cell_is_killed_with_its_kernel_and_children(
    make_notebook: MakeNotebook, tmp_path: Path, limits: Limits, complaint: str
) -> None:
    started = time.monotonic()
    result = run_one(make_notebook("a", [STUBBORN, PASSING_END]), tmp_path / "out", limits)
    kind, message = failure_of(result)
    assert kind == "timeout"
    assert complaint in message
    assert "cell 4 of 5" in message
    assert time.monotonic() - started < 40, "nobody waited for the sleep to end"
    kernel, child = map(int, (tmp_path / "out" / "pids.txt").read_text().split())
    assert not process_exists(kernel)
    assert not process_exists(child)
    assert complaint in render_notebook(result, tmp_path / "out" / "index.html").read_text()


def test_overrides_are_checked_before_anything_runs(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebooks = find_notebooks(make_notebook("a"))
    with pytest.raises(UnknownParameterError, match="artifact_dir, seed, trials"):
        run_notebooks(notebooks, tmp_path / "out", LIMITS, overrides={"trial": "3"})
    with pytest.raises(ParameterTypeError, match="trials"):
        run_notebooks(notebooks, tmp_path / "out", LIMITS, overrides={"trials": "few"})
    assert not (tmp_path / "out").exists()
