# SPDX-License-Identifier: Apache-2.0
"""Finding notebooks: where they lie, what they are called, which parameters they declare."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import nbformat
import papermill
from nbformat import NotebookNode

from .errors import NotebookFormatError, UnknownNotebookError, UsageError
from .parameters import ParameterSpec

SUFFIX = ".ipynb"


@dataclass(frozen=True)
class Notebook:
    """One notebook: ``name`` is its path under the notebooks folder, without suffix, with ``/``.

    ``problem`` says why it cannot be run, None when it can: a broken notebook is listed and reported
    as failed, and does not keep the others from running.
    """

    name: str
    path: Path
    title: str
    parameters: dict[str, ParameterSpec]
    problem: str | None = None

    @property
    def folder(self) -> str:
        """The name's folder part, "" for a notebook at the top."""
        return self.name.rpartition("/")[0]

    @property
    def stem(self) -> str:
        """The file name without suffix; the artifact is called after it."""
        return self.name.rpartition("/")[2]


def default_notebooks_dir() -> Path:
    """The ``notebooks`` folder beside the package (an editable install or a checkout), else in the
    current directory.

    Raises:
        UsageError: there is neither.
    """
    candidates = (Path(__file__).resolve().parents[2] / "notebooks", Path.cwd() / "notebooks")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UsageError("no notebooks folder beside the package or here; pass --notebooks DIR")


def read_parameters(path: Path) -> dict[str, ParameterSpec]:
    """The parameters that a notebook declares in its cell tagged ``parameters``.

    Raises:
        NotebookFormatError: a default is not a plain value (a literal), or papermill cannot read the
            cell, as where the metadata name no kernel.
    """
    specs: dict[str, ParameterSpec] = {}
    try:
        declared = papermill.inspect_notebook(str(path))
    except Exception as error:  # papermill raises ValueError, its own errors and what its parsers raise
        raise NotebookFormatError(
            f"{path.name}: its parameters cannot be read: {error}; wanted a Python notebook whose metadata "
            'have a kernelspec (save it with the kernel "Python 3")'
        ) from error
    for name, entry in declared.items():
        try:
            default = ast.literal_eval(entry["default"])
        except (ValueError, SyntaxError) as error:
            raise NotebookFormatError(
                f"{path.name}: parameter {name} defaults to {entry['default']!r}, wanted a plain value "
                "(number, text, bool, None, list); derive other values in the next cell"
            ) from error
        specs[name] = ParameterSpec(name, default, entry["help"].strip())
    return specs


def read_notebook(path: Path) -> NotebookNode:
    """The notebook at ``path`` in nbformat 4; raises what nbformat raises on a file that is none."""
    return cast(NotebookNode, nbformat.read(path, as_version=4))  # type: ignore[no-untyped-call]


def _title(notebook: NotebookNode, fallback: str) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return str(line[2:].strip())
    return fallback


def load_notebook(path: Path, name: str) -> Notebook:
    """Reads one notebook's title and parameters; what is wrong with it goes to ``problem``."""
    try:
        content = read_notebook(path)
    except Exception as error:  # nbformat raises a dozen unrelated types on broken files
        return Notebook(name, path, name, {}, problem=f"not a readable notebook: {error}")
    title = _title(content, name)
    try:
        return Notebook(name, path, title, read_parameters(path))
    except NotebookFormatError as error:
        return Notebook(name, path, title, {}, problem=str(error))


def notebook_paths(root: Path) -> dict[str, Path]:
    """Every notebook under ``root`` by name, sorted; hidden folders and ``out`` are skipped."""
    found = {}
    for path in sorted(root.rglob(f"*{SUFFIX}")):
        relative = path.relative_to(root)
        if any(part.startswith(".") or part == "out" for part in relative.parts[:-1]):
            continue
        found[relative.with_suffix("").as_posix()] = path
    return found


def match_names(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Resolves what a user typed: a full name, a folder, or an ending that only one name has.

    Returns:
        matching names in the order of ``known``, each once; all of them when ``wanted`` is empty.

    Raises:
        UnknownNotebookError: a name matches nothing or is ambiguous; lists the names.
    """
    if not wanted:
        return list(known)
    chosen: set[str] = set()
    for text in wanted:
        name = text.removesuffix(SUFFIX).strip("/")
        in_folder = [candidate for candidate in known if candidate.startswith(name + "/")]
        ending = [candidate for candidate in known if candidate.endswith(name)] if name else []
        if name in known:
            chosen.add(name)
        elif in_folder:
            chosen.update(in_folder)
        elif len(ending) == 1:
            chosen.add(ending[0])
        else:
            problem = f"is ambiguous ({', '.join(ending)})" if ending else "is unknown"
            raise UnknownNotebookError(f"notebook {text!r} {problem}; the notebooks are: {', '.join(known)}")
    return [name for name in known if name in chosen]


def find_notebooks(root: Path, wanted: Sequence[str] = ()) -> list[Notebook]:
    """The notebooks under ``root`` that ``wanted`` names (all when empty), in name order.

    Raises:
        UsageError: ``root`` holds no notebooks.
        UnknownNotebookError: see ``match_names``.
    """
    paths = notebook_paths(root)
    if not paths:
        raise UsageError(f"no notebooks under {root}; pass --notebooks DIR")
    return [load_notebook(paths[name], name) for name in match_names(wanted, list(paths))]
