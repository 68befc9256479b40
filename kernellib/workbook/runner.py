# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks headlessly through papermill and judges each by its artifact.

A notebook passes when its last cell was reached, it left an artifact that this run wrote and that
follows the schema, and every claim in it passes. Anything else is a failure with a kind and a text;
the notebooks after it still run.

What a run leaves under ``out``::

    index.html                    every claim's verdict, pictures, links
    summary.json                  the same for programs
    <folder>/<stem>.ipynb         the executed notebook
    <folder>/<stem>.html          the same, self-contained; failures with their traceback on top
    <folder>/<stem>.json          the artifact
    <folder>/<stem>-figure-N.png  its pictures
"""

from __future__ import annotations

import base64
import json
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbclient.exceptions
import papermill
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from . import HEADLESS_VARIABLE
from .artifact import artifact_path, load_artifact
from .discovery import Notebook, read_notebook
from .engine import ENGINE_NAME, ProgressListener, SilentProgress
from .errors import (
    ArtifactError,
    CellTimeoutError,
    ClaimFailedError,
    EarlyStopError,
    NotebookFormatError,
    RunTimeoutError,
)
from .parameters import check_known, select

FailureKind = Literal["claim", "exception", "timeout", "early stop", "artifact", "kernel", "format", "page"]

# Errors whose text says everything, and what to call the failure.
NAMED_KINDS: dict[type[Exception], FailureKind] = {
    CellTimeoutError: "timeout",
    RunTimeoutError: "timeout",
    EarlyStopError: "early stop",
    ArtifactError: "artifact",
    NotebookFormatError: "format",
}

ANSI_CODES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds: for one cell, and for all cells of one notebook together."""

    cell_s: float
    run_s: float


PROFILES: dict[str, Limits] = {"quick": Limits(300.0, 900.0), "full": Limits(3600.0, 14400.0)}


@dataclass(frozen=True)
class Failure:
    """Why a notebook failed: the kind, one paragraph, and the traceback where there is one."""

    kind: FailureKind
    message: str
    traceback: str = ""


@dataclass
class NotebookResult:
    """The outcome of one notebook; paths exist unless the failure says otherwise."""

    notebook: Notebook
    parameters: dict[str, Any]
    executed_path: Path
    html_path: Path
    duration_s: float = 0.0
    failure: Failure | None = None
    artifact: dict[str, Any] | None = None
    figures: list[Path] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the notebook stands."""
        return self.failure is None

    @property
    def claims(self) -> list[dict[str, str]]:
        """The claims of its artifact, empty without one."""
        return list(self.artifact["claims"]) if self.artifact else []


def _plain_traceback(error: PapermillExecutionError) -> str:
    return ANSI_CODES.sub("", "\n".join(error.traceback))


def _classify(error: BaseException) -> Failure:
    """Names what went wrong in a notebook run."""
    if isinstance(error, PapermillExecutionError):
        text = ANSI_CODES.sub("", str(error.evalue))
        if error.ename == ClaimFailedError.__name__:
            return Failure("claim", text)  # its traceback shows only where claims are asserted
        return Failure("exception", f"{error.ename}: {text}", _plain_traceback(error))
    for error_type, named_kind in NAMED_KINDS.items():
        if isinstance(error, error_type):
            return Failure(named_kind, str(error))
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, nbclient.exceptions.DeadKernelError):
        return Failure(
            "kernel",
            "the kernel died: a crash in compiled code, memory ran out, or the notebook called os._exit",
            detail,
        )
    return Failure("kernel", f"{type(error).__name__}: {error}", detail)


def _demand_last_cell(executed: NotebookNode) -> None:
    """Raises EarlyStopError when a cell ended the run without an error (papermill lets exit(0) pass)."""
    for index, cell in enumerate(executed.cells):
        if cell.cell_type != "code":
            continue
        exits = [out for out in cell.outputs if out.output_type == "error" and out.ename == "SystemExit"]
        if exits or (cell.source.strip() and cell.execution_count is None):
            reason = "called sys.exit" if exits else "was never run"
            raise EarlyStopError(
                f"the notebook stopped early: cell {index + 1} {reason}; every cell to the last must run"
            )


def _demand_artifact(path: Path, notebook: Notebook, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the artifact and demands that it is this notebook's, with the parameters passed in."""
    artifact = load_artifact(path)
    if artifact["notebook"] != notebook.stem:
        raise ArtifactError(
            f"artifact {path.name} names notebook {artifact['notebook']!r}, wanted {notebook.stem!r}"
        )
    for name, value in parameters.items():
        if name in artifact["parameters"] and artifact["parameters"][name] != value:
            raise ArtifactError(
                f"artifact {path.name} was made with {name}={artifact['parameters'][name]!r}, "
                f"this run passed {value!r}; record the parameters as they came in"
            )
    return artifact


def _save_figures(executed: NotebookNode, stem_path: Path) -> list[Path]:
    """Writes every PNG output of the executed notebook to ``<stem>-figure-N.png``."""
    paths: list[Path] = []
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            image = output.get("data", {}).get("image/png")
            if image:
                path = stem_path.with_name(f"{stem_path.name}-figure-{len(paths) + 1}.png")
                path.write_bytes(base64.b64decode(image))
                paths.append(path)
    return paths


def _remove_stale(stem_path: Path) -> None:
    """Deletes what an earlier run of the same notebook left, so that none of it can count for this run."""
    for suffix in (".json", ".ipynb", ".html"):
        stem_path.with_name(stem_path.name + suffix).unlink(missing_ok=True)
    for figure in stem_path.parent.glob(f"{stem_path.name}-figure-*.png"):
        figure.unlink()


def _execute(result: NotebookResult, folder: Path, limits: Limits, listener: ProgressListener) -> None:
    """Runs the notebook; raises whatever stopped it."""
    papermill.execute_notebook(
        str(result.notebook.path),
        str(result.executed_path),
        parameters=result.parameters,
        engine_name=ENGINE_NAME,
        kernel_name="python3",  # names the language only; the engine starts this interpreter
        progress_bar=False,
        listener=listener,
        cell_timeout_s=limits.cell_s,
        run_timeout_s=limits.run_s,
        kernel_cwd=str(folder),
        kernel_env={HEADLESS_VARIABLE: "1"},
    )


def run_notebook(
    notebook: Notebook,
    out: Path,
    limits: Limits,
    *,
    common: Mapping[str, Any] | None = None,
    overrides: Mapping[str, str] | None = None,
    listener: ProgressListener | None = None,
) -> NotebookResult:
    """Runs one notebook and judges it; never raises for what the notebook does.

    Args:
        notebook: what to run.
        out: folder of the whole run; this notebook's files go to ``out/<its folder>``.
        limits: time limits in seconds.
        common: values for ``COMMON_PARAMETERS`` that the notebook may declare; ``artifact_dir`` is
            set here.
        overrides: ``-p`` values as text; names that the notebook does not declare are left out.
        listener: told about each cell.

    Raises:
        ParameterTypeError: an override does not fit the notebook's default.
    """
    folder = (out / notebook.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    stem_path = folder / notebook.stem
    offered = {**(common or {}), "artifact_dir": str(folder)}
    result = NotebookResult(
        notebook=notebook,
        parameters=select(notebook.parameters, offered, overrides or {}),
        executed_path=stem_path.with_name(stem_path.name + ".ipynb"),
        html_path=stem_path.with_name(stem_path.name + ".html"),
    )
    started = time.monotonic()
    _remove_stale(stem_path)
    # The kernel runs in the folder, so that is what a relative -p artifact_dir is relative to.
    json_path = artifact_path(folder / result.parameters.get("artifact_dir", "."), notebook.stem)
    json_path.unlink(missing_ok=True)
    try:
        if notebook.problem is not None:
            raise NotebookFormatError(notebook.problem)
        _execute(result, folder, limits, listener or SilentProgress())
        _demand_last_cell(read_notebook(result.executed_path))
        result.artifact = _demand_artifact(json_path, notebook, result.parameters)
        failing = [claim["name"] for claim in result.claims if claim["verdict"] != "pass"]
        if failing:  # the notebook forgot to assert them
            result.failure = Failure("claim", f"claims fail in the artifact: {', '.join(failing)}")
    except Exception as error:
        result.failure = _classify(error)
        if result.artifact is None and json_path.exists():
            try:
                result.artifact = load_artifact(
                    json_path
                )  # the claims made before the failure are worth showing
            except ArtifactError:
                result.artifact = None
    result.duration_s = time.monotonic() - started
    if result.executed_path.exists():
        result.figures = _save_figures(read_notebook(result.executed_path), stem_path)
    return result


def run_notebooks(
    notebooks: Sequence[Notebook],
    out: Path,
    limits: Limits,
    *,
    common: Mapping[str, Any] | None = None,
    overrides: Mapping[str, str] | None = None,
    listener_for: Callable[[Notebook], ProgressListener] | None = None,
    finished: Callable[[NotebookResult], None] | None = None,
) -> list[NotebookResult]:
    """Runs notebooks one after the other (two cores are the design point) and returns every outcome.

    All overrides are checked against all notebooks before the first one starts.

    Args:
        notebooks: in the order to run.
        out, limits, common, overrides: see ``run_notebook``.
        listener_for: makes the listener of one notebook.
        finished: called after each, for reports that should exist even when the run is interrupted.

    Raises:
        UnknownParameterError: an override that no notebook declares.
        ParameterTypeError: an override does not fit.
    """
    specs = [notebook.parameters for notebook in notebooks]
    check_known(overrides or {}, specs)
    for declared in specs:
        select(declared, {}, overrides or {})
    results = []
    for notebook in notebooks:
        listener = listener_for(notebook) if listener_for else None
        result = run_notebook(notebook, out, limits, common=common, overrides=overrides, listener=listener)
        results.append(result)
        if finished:
            finished(result)
    return results


def write_summary(results: Sequence[NotebookResult], path: Path, pending: Sequence[str] = ()) -> None:
    """Writes the outcomes as JSON: one entry per notebook, with claims and failure.

    Args:
        results: outcomes in the order they ran.
        path: the file to write.
        pending: names of the chosen notebooks that have no outcome, under the key "pending".
    """
    entries = [
        {
            "notebook": result.notebook.name,
            "passed": result.passed,
            "duration_s": round(result.duration_s, 3),
            "parameters": result.parameters,
            "failure": None
            if result.failure is None
            else {"kind": result.failure.kind, "message": result.failure.message},
            "claims": result.claims,
        }
        for result in results
    ]
    summary = {"notebooks": entries, "pending": list(pending)}
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
