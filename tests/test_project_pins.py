# SPDX-License-Identifier: Apache-2.0
"""One pin, four places: pyproject.toml, constraints.txt, environment.yml and Dockerfile must agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# What the serving image brings itself, in builds for ROCm; a pin in the Dockerfile would replace them.
FROM_THE_IMAGE = {"torch", "triton", "numpy"}
# Tools of the development machine that the image does not need.
DEVELOPMENT_ONLY = {"ziglang", "ruff", "mypy", "types-pyyaml"}

# Looked for at run time, and done without: the drivers' Python bindings.
OPTIONAL_IMPORTS = {"pynvml", "amdsmi"}
DISTRIBUTION_OF = {"mori": "amd-mori"}  # not installable on every Python


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_in(lines: list[str]) -> dict[str, str]:
    """{canonical name: version} of the lines; a requirement without an exact pin is an error."""
    pins = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s;]+)", line.strip())
        assert match, f"not an exact pin: {line!r}"
        assert canonical(match[1]) not in pins, f"pinned twice: {line!r}"
        pins[canonical(match[1])] = match[2]
    return pins


@pytest.fixture(scope="module")
def project_pins() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return pins_in([*project["dependencies"], *(pin for extra in extras.values() for pin in extra)])


def test_every_dependency_is_pinned_exactly(project_pins: dict[str, str]) -> None:
    required = {"torch", "flydsl", "jupyterlab", "ipywidgets", "papermill", "pytest", "amd-mori"}
    assert required <= project_pins.keys()


def test_constraints_pin_the_same_versions(project_pins: dict[str, str]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = pins_in([line for line in lines if line and not line.startswith("#")])
    # amd-mori is not installable on Python 3.11, where the constraints were resolved.
    expected = {name: version for name, version in project_pins.items() if name != "amd-mori"}
    assert {name: constraints.get(name) for name in expected} == expected


def closure(names: list[str]) -> set[str]:
    """Canonical names of the distributions that ``names`` (with extras) need on this interpreter."""
    found: set[str] = set()
    queue = [Requirement(name) for name in names]
    seen: set[str] = set()
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        found.add(canonical(requirement.name))
        for text in metadata.requires(requirement.name) or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(needed)
    return found


def test_constraints_pin_everything_that_gets_installed() -> None:
    """Also what the dependencies need: an unpinned one would change the environment from day to day."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = pins_in([line for line in lines if line and not line.startswith("#")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        pin for name, extra in project["optional-dependencies"].items() if name != "rocm" for pin in extra
    ]
    needed = closure([*project["dependencies"], *extras])
    assert {"torch", "pydantic", "jinja2"} <= needed
    assert needed - pinned.keys() == {"setuptools"}  # every venv of Python 3.11 begins with it


def test_what_the_package_imports_is_declared(project_pins: dict[str, str]) -> None:
    """Not only brought along by something else."""
    imported = set()
    for path in (ROOT / "kernellib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    outside = imported - set(sys.stdlib_module_names) - {"kernellib", "__future__"} - OPTIONAL_IMPORTS
    assert {"torch", "flydsl", "numpy"} <= outside
    packages = metadata.packages_distributions()
    undeclared = {
        name
        for name in outside
        if not {canonical(d) for d in packages.get(name, [DISTRIBUTION_OF.get(name, name)])}
        & project_pins.keys()
    }
    assert undeclared == set()


def test_environment_yml_pins_the_same_versions(project_pins: dict[str, str]) -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip_lines,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    pins = pins_in([line for line in pip_lines if not line.startswith("--")])
    lint_only = {"ruff", "mypy", "types-pyyaml"}
    assert pins == {name: version for name, version in project_pins.items() if name not in lint_only}
    assert "python=3.12" in environment["dependencies"], "amd-mori has no wheel for 3.11"
    assert "--editable ." in pip_lines


def test_dockerfile_pins_the_same_versions(project_pins: dict[str, str]) -> None:
    text = (ROOT / "Dockerfile").read_text()
    pins = pins_in(re.findall(r"^\s+([A-Za-z0-9_.-]+==[^\s\\]+)", text, re.MULTILINE))
    left_out = FROM_THE_IMAGE | DEVELOPMENT_ONLY
    assert pins == {name: version for name, version in project_pins.items() if name not in left_out}


def test_dockerfile_builds_on_the_agreed_image_and_documents_its_devices() -> None:
    text = (ROOT / "Dockerfile").read_text()
    digest = "5aa7e626ff73672f5ca7aae46754570488c23d33ca1ac90756a1d2d1a3fe099b"
    assert f"FROM vllm/vllm-openai-rocm:kimi-k3@sha256:{digest}" in text
    for needed in ("/dev/kfd", "/dev/dri", "--group-add video", "--group-add render", "--shm-size"):
        assert needed in text, f"the documented docker run lacks {needed}"
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), f"the Dockerfile copies {name}, which does not exist"
    assert '"jupyter", "lab"' in text
