# SPDX-License-Identifier: Apache-2.0
"""Tiny notebooks for the runner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PASSING_END = """\
from kernellib.workbook.artifact import Claim, assert_claims, write_artifact
claims = [Claim.check("numbers add up", trials + 1 == 1 + trials, "1 + 1", "checked")]
assert_claims(write_artifact(artifact_dir, stem, parameters={"trials": trials}, claims=claims, data={}))
"""

MakeNotebook = Callable[..., Path]


@pytest.fixture
def make_notebook(tmp_path: Path) -> MakeNotebook:
    """Writes ``notebooks/<name>.ipynb`` with a parameters cell and the given cells; returns the folder."""

    def make(
        name: str,
        cells: Sequence[str] = (PASSING_END,),
        parameters: str = 'artifact_dir = "out"\ntrials = 3  # how many\nseed = 0',
    ) -> Path:
        root = tmp_path / "notebooks"
        path = root / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        parameters_cell = new_code_cell(parameters, metadata={"tags": ["parameters"]})
        heading = new_markdown_cell(f"# The notebook {name}")
        code = [new_code_cell(f"stem = {path.stem!r}"), *(new_code_cell(cell) for cell in cells)]
        metadata = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
        nbformat.write(new_notebook(cells=[heading, parameters_cell, *code], metadata=metadata), path)
        return root

    return make
