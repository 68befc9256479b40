# SPDX-License-Identifier: Apache-2.0
"""Hygiene of committed notebooks: no outputs, plain parameters, asserted claims, nothing machine-bound."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from kernellib.workbook.discovery import default_notebooks_dir, load_notebook, notebook_paths

ROOT = Path(__file__).parents[2] / "notebooks"
PATHS = notebook_paths(ROOT)

TAIL = ["latent_moe_tail/01_correctness", "latent_moe_tail/02_tuning", "latent_moe_tail/03_performance_ab"]

# A cell is a few calls; anything longer belongs in the package, where it is typed and tested.
MAX_CODE_LINES = 30
FORBIDDEN = {
    "sys.exit": re.compile(r"\bsys\.exit\b|\bexit\(|\bquit\(|SystemExit|os\._exit"),
    "an absolute path": re.compile(r"""["'](/[A-Za-z]|[A-Za-z]:\\\\|~/)"""),
    "a shell command": re.compile(r"^\s*[!%]", re.MULTILINE),
    "a formula that needs MathJax": re.compile(r"\$\$|\\\("),
    "a remote resource": re.compile(r"!\[[^]]*\]\(https?:|<img|<script"),
}


@pytest.fixture(params=sorted(PATHS), ids=str)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def notebook(name: str) -> NotebookNode:
    return nbformat.read(PATHS[name], as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_tails_notebooks_are_there() -> None:
    assert default_notebooks_dir() == ROOT
    assert [name for name in PATHS if name.startswith("latent_moe_tail/")] == TAIL


def test_no_outputs_and_clean_metadata(notebook: NotebookNode) -> None:
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.get("language_info", {}), "the interpreter that wrote it"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}, cell.source
    for cell in code_cells(notebook):
        assert cell.outputs == [], cell.source
        assert cell.execution_count is None, cell.source


def test_one_parameters_cell_with_plain_values_only(name: str, notebook: NotebookNode) -> None:
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert tagged[0] is code_cells(notebook)[0]
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        ast.literal_eval(statement.value)
    declared = load_notebook(PATHS[name], name)
    assert declared.problem is None
    assert {"target", "profile", "seed", "artifact_dir"} <= set(declared.parameters)
    assert all(spec.help for spec in declared.parameters.values()), "each parameter says what it does"


def test_the_last_cell_writes_the_artifact_and_asserts_the_claims(name: str, notebook: NotebookNode) -> None:
    last = notebook.cells[-1]
    assert last.cell_type == "code"
    calls = [node for node in ast.walk(ast.parse(last.source)) if isinstance(node, ast.Call)]
    called = [node.func.id for node in calls if isinstance(node.func, ast.Name)]
    assert "write_artifact" in called
    final = ast.parse(last.source).body[-1]
    assert isinstance(final, ast.Expr)
    assert isinstance(final.value, ast.Call)
    assert ast.unparse(final.value.func) == "assert_claims"
    assert f'"{name.rpartition("/")[2]}"' in last.source, "the artifact is called after the notebook"


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_nothing_forbidden(notebook: NotebookNode, what: str) -> None:
    for cell in notebook.cells:
        if what == "a shell command" and cell.cell_type != "code":
            continue
        found = FORBIDDEN[what].search(cell.source)
        assert found is None, f"{what}: {found.group(0)!r} in {cell.source}"


def test_cells_are_thin_and_explained(notebook: NotebookNode) -> None:
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= MAX_CODE_LINES
        defined = [
            n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)
        ]
        assert defined == [], f"{defined[0].name} belongs in the package" if defined else ""
    prose = sum(len(cell.source) for cell in notebook.cells if cell.cell_type == "markdown")
    assert prose > sum(len(cell.source) for cell in code_cells(notebook)) / 2


def test_the_checks_see_what_they_forbid() -> None:
    bad = {
        "sys.exit": "import sys; sys.exit(0)",
        "an absolute path": "open('/home/me/x')",
        "a shell command": "x = 1\n!pip install y",
        "a formula that needs MathJax": "$$x$$",
        "a remote resource": "![a](https://example.org/a.png)",
    }
    assert set(bad) == set(FORBIDDEN)
    for what, source in bad.items():
        assert FORBIDDEN[what].search(source)
