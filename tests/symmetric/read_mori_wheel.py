# SPDX-License-Identifier: Apache-2.0
"""Writes mori_signatures.json: the names and parameters, in the published wheel, of what this project calls.

    pip download --no-deps --python-version 3.12 --only-binary=:all: --platform manylinux_2_39_x86_64 \
        amd-mori==1.2.4 -d DIR
    python tests/symmetric/read_mori_wheel.py DIR/amd_mori-1.2.4-*.whl

The sources are parsed, never run: reading a wheel needs neither ROCm nor the Python it is for.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("mori_signatures.json")
VERSION = "1.2.4"

# module -> (source file in the wheel, functions, classes with the methods that are called)
USED: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "mori.shmem": (
        "mori/shmem/api.py",
        (
            "shmem_torch_process_group_init",
            "shmem_mype",
            "shmem_npes",
            "shmem_malloc_align",
            "shmem_free",
            "shmem_ptr_p2p",
            "shmem_barrier_all",
            "shmem_finalize",
        ),
        {},
    ),
    "mori.ops": (
        "mori/ops/dispatch_combine.py",
        (),
        {"EpDispatchCombineConfig": (), "EpDispatchCombineOp": ("__init__", "dispatch", "combine")},
    ),
}


def parameters(function: ast.FunctionDef) -> list[dict[str, Any]]:
    """Name, kind and whether there is a default, for each parameter but self."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    found = [
        {"name": argument.arg, "kind": "positional", "default": index >= num_required}
        for index, argument in enumerate(positional)
    ]
    found += [
        {"name": argument.arg, "kind": "keyword", "default": default is not None}
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.vararg or arguments.kwarg:
        raise ValueError(f"{function.name} takes any arguments: its signature says nothing")
    return [entry for entry in found if entry["name"] != "self"]


def fields(node: ast.ClassDef) -> list[dict[str, Any]]:
    """Parameters of a dataclass's constructor."""
    return [
        {"name": entry.target.id, "kind": "positional", "default": entry.value is not None}
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    ]


def read_class(node: ast.ClassDef, methods: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    if not methods:
        return {"__init__": fields(node)}
    bodies = {entry.name: entry for entry in node.body if isinstance(entry, ast.FunctionDef)}
    return {name: parameters(bodies[name]) for name in methods}


def read_wheel(path: Path) -> dict[str, Any]:
    """The signatures of ``USED``; KeyError names what the wheel no longer has."""
    found: dict[str, Any] = {"package": "amd-mori", "version": path.name.split("-")[1], "modules": {}}
    with zipfile.ZipFile(path) as wheel:
        for module, (source, functions, classes) in USED.items():
            body = ast.parse(wheel.read(source)).body
            nodes = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            package = ast.parse(wheel.read(f"{Path(source).parent.as_posix()}/__init__.py"))
            exported = exports(package, Path(source).stem)
            missing = [
                name for name in (*functions, *classes) if exported is not None and name not in exported
            ]
            if missing:
                raise KeyError(f"{module} does not export {missing}")
            found["modules"][module] = {
                "functions": {name: parameters(nodes[name]) for name in functions},  # type: ignore[arg-type]
                "classes": {
                    name: read_class(nodes[name], methods)  # type: ignore[arg-type]
                    for name, methods in classes.items()
                },
            }
    return found


def exports(package: ast.Module, stem: str) -> set[str] | None:
    """Names that a package takes from its module ``stem``; None for all of them."""
    names: set[str] = set()
    for node in package.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module == stem:
            if node.names[0].name == "*":
                return None
            names |= {alias.name for alias in node.names}
    return names


if __name__ == "__main__":
    DATA.write_text(json.dumps(read_wheel(Path(sys.argv[1])), indent=1) + "\n")
