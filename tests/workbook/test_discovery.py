# SPDX-License-Identifier: Apache-2.0
"""Finding notebooks by name, and reading what they declare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernellib.workbook.discovery import find_notebooks, match_names
from kernellib.workbook.errors import UnknownNotebookError, UsageError

NAMES = [
    "moe/01_correctness",
    "moe/02_tuning",
    "tail/01_correctness",
    "tail/02_tuning",
    "tail/03_performance",
]


@pytest.mark.parametrize(
    ("wanted", "matched"),
    [
        ([], NAMES),
        (["tail/02_tuning"], ["tail/02_tuning"]),
        (["tail/02_tuning.ipynb"], ["tail/02_tuning"]),
        (["moe"], ["moe/01_correctness", "moe/02_tuning"]),
        (["moe/"], ["moe/01_correctness", "moe/02_tuning"]),
        (["03_performance"], ["tail/03_performance"]),
        (["performance"], ["tail/03_performance"]),
        (["performance", "moe/01_correctness", "performance"], ["moe/01_correctness", "tail/03_performance"]),
    ],
)
def test_names_match_in_full_by_folder_or_by_ending(wanted: list[str], matched: list[str]) -> None:
    assert match_names(wanted, NAMES) == matched


@pytest.mark.parametrize(
    ("wanted", "complaint"), [("nope", "unknown"), ("02_tuning", "ambiguous"), ("", "unknown")]
)
def test_a_name_that_is_not_one_notebook_lists_them_all(wanted: str, complaint: str) -> None:
    with pytest.raises(UnknownNotebookError, match=complaint) as raised:
        match_names([wanted], NAMES)
    assert all(name in str(raised.value) for name in NAMES)


def test_parameters_and_titles_are_read(make_notebook) -> None:
    root = make_notebook(
        "tail/01_x",
        parameters='target = "auto"  # where to run\nseeds = [1, 2]\nscale = 1.5\nflag = False\nn = None',
    )
    (notebook,) = find_notebooks(root)
    assert (notebook.name, notebook.folder, notebook.stem) == ("tail/01_x", "tail", "01_x")
    assert notebook.title == "The notebook tail/01_x"
    assert {name: spec.default for name, spec in notebook.parameters.items()} == {
        "target": "auto",
        "seeds": [1, 2],
        "scale": 1.5,
        "flag": False,
        "n": None,
    }
    assert "where to run" in notebook.parameters["target"].help


def test_broken_notebooks_are_reported_not_raised(make_notebook) -> None:
    root = make_notebook("a", parameters="import os\nx = os.cpu_count()")
    (root / "b.ipynb").write_text("{")
    first, second = find_notebooks(root)
    assert first.problem is not None
    assert "plain value" in first.problem
    assert second.problem is not None
    assert "not a readable notebook" in second.problem


def test_a_notebook_without_a_kernelspec_is_reported_not_raised(make_notebook) -> None:
    make_notebook("a")
    root = make_notebook("b")
    content = json.loads((root / "b.ipynb").read_text())
    content["metadata"] = {}
    (root / "b.ipynb").write_text(json.dumps(content))
    good, bad = find_notebooks(root)
    assert good.problem is None
    assert bad.problem is not None
    assert "kernelspec" in bad.problem
    assert bad.title == "The notebook b"


def test_checkpoints_and_outputs_are_no_notebooks(make_notebook, tmp_path: Path) -> None:
    make_notebook("a")
    make_notebook(".ipynb_checkpoints/a-checkpoint")
    root = make_notebook("out/a")
    assert [notebook.name for notebook in find_notebooks(root)] == ["a"]
    with pytest.raises(UsageError, match="no notebooks under"):
        find_notebooks(tmp_path / "empty")
