# SPDX-License-Identifier: Apache-2.0
"""Imports run one way: numerics, symmetric and targets below operators, operators below the instruments."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kernellib"

# layer -> the kernellib layers it may import. What is not listed is forbidden.
ALLOWED = {
    "numerics": {"numerics"},
    "symmetric": {"symmetric", "numerics", "targets", "emulator"},
    "targets": {"targets"},
    "ops": {"ops", "numerics", "symmetric", "targets"},
    "emulator": {"emulator", "numerics"},
    # measures the emulator on an operator's kernel; nothing else of the emulator knows operators
    "emulator/benchmarks": {"emulator", "ops", "numerics"},
    "inspect": {"inspect", "ops", "emulator", "targets", "numerics"},
    "bench": {"bench", "ops", "emulator", "targets", "numerics", "symmetric"},
    "workbook": {"workbook", "bench", "inspect", "ops", "emulator", "targets", "numerics", "symmetric"},
}


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:2]) if "/".join(parts[:2]) in ALLOWED else parts[0]


def imported_modules(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import statement, at any depth."""
    package = ("kernellib", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def violations(path: Path, source: str) -> list[str]:
    layer = layer_of(path)
    found = []
    for line, module in imported_modules(path, ast.parse(source)):
        parts = module.split(".")
        if parts[0] != "kernellib":
            continue
        target = parts[1] if len(parts) > 1 else "kernellib"
        if target not in ALLOWED[layer] and target != "__version__":
            found.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
        sibling = layer == "ops" == target and len(parts) > 2 and len(path.relative_to(PACKAGE).parts) > 2
        if sibling and parts[2] not in {path.relative_to(PACKAGE).parts[1], "contract"}:
            found.append(f"{path.relative_to(PACKAGE)}:{line} imports the operator {parts[2]}")
    return found


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_in_the_designs_direction(path: Path) -> None:
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("where", "statement"),
    [
        ("ops/latent_moe_tail/kernel_gfx950.py", "from kernellib.emulator import emulated"),
        ("ops/latent_moe_tail/kernel_gfx950.py", "from kernellib import bench"),
        ("ops/latent_moe_tail/api.py", "from ...workbook import artifact"),
        ("ops/latent_moe_tail/api.py", "def f():\n    import kernellib.bench.record"),
        ("numerics/bf16.py", "from ..ops import contract"),
        ("emulator/state.py", "import kernellib.ops"),
        ("bench/record.py", "from kernellib.workbook import runner"),
        ("ops/latent_moe_tail/api.py", "from ..mega_moe import config"),
    ],
)
def test_a_wrong_import_is_found(where: str, statement: str) -> None:
    assert violations(PACKAGE / where, statement) != []


def test_importing_the_package_pulls_in_no_compiler_and_no_notebook_tool() -> None:
    heavy = (
        "flydsl",
        "triton",
        "papermill",
        "matplotlib",
        "kernellib.emulator",
        "kernellib.bench",
        "kernellib.workbook",
    )
    code = f"import sys, kernellib; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
