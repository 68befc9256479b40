# SPDX-License-Identifier: Apache-2.0
"""README and docs: links lead somewhere, the Python example runs, make targets and commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def broken_links(page: Path) -> list[str]:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    return [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_shows(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md#part), [gone](gone.md), [far](https://example.org/gone.md)")
    assert broken_links(page) == ["gone.md"]


def test_the_python_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "eps" in done.stdout, "the report names the argument that fails"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z-]+)\b(?=`|\s+#)", page.read_text())}
    assert {"run", "test", "lab"} <= named
    assert named - targets == set()


def test_modules_named_in_commands_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    modules = set(re.findall(r"python -m (kernellib[\w.]*)", text))
    assert len(modules) >= 2
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module
