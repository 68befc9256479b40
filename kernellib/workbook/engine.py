# SPDX-License-Identifier: Apache-2.0
"""Papermill's engine with the limits and the kernel that a headless run needs.

Three things differ from papermill's own:

- the kernel is *this* interpreter, whatever kernel specifications are installed on the machine;
- a cell limit and a limit on the whole notebook, after which the kernel's process group is killed
  (a cell stuck in C code ignores interrupts, and a kernel's children would outlive it);
- cell by cell progress.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

import nbclient.exceptions
import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines

from .errors import CellTimeoutError, RunTimeoutError

ENGINE_NAME = "kernellib"
STARTUP_TIMEOUT_S = 60.0
# Output may lag far behind its cell when other processes keep all cores busy.
OUTPUT_TIMEOUT_S = 60


class ProgressListener(Protocol):
    """What the runner tells about a notebook while it runs. Cells are counted over code cells only."""

    def cell_started(self, index: int, num_cells: int, label: str) -> None:
        """Code cell ``index`` (from 0) of ``num_cells`` starts; ``label`` is its heading."""

    def cell_finished(self, index: int, num_cells: int, seconds: float) -> None:
        """It ended, well or badly."""

    def output(self, text: str) -> None:
        """Text that the running cell printed."""


class SilentProgress:
    """Listens to nothing."""

    def cell_started(self, index: int, num_cells: int, label: str) -> None:
        """Ignores it."""

    def cell_finished(self, index: int, num_cells: int, seconds: float) -> None:
        """Ignores it."""

    def output(self, text: str) -> None:
        """Ignores it."""


class CurrentInterpreterManager(AsyncKernelManager):
    """A kernel manager whose kernel is ``sys.executable``, not whatever "python3" is installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The specification, made here instead of looked up."""
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="kernellib",
            language="python",
            metadata={"supported_encryption": ["curve"]},  # ipykernel has it since 7.0
        )


def cell_labels(cells: list[NotebookNode]) -> list[str]:
    """A short label for each cell: the last heading above it, else the first line of its source.

    Example:
        >>> from nbformat.v4 import new_code_cell, new_markdown_cell
        >>> cell_labels([new_markdown_cell("## Sweep"), new_code_cell("x = 1")])
        ['Sweep', 'Sweep']
    """
    labels, heading = [], ""
    for cell in cells:
        lines = cell.source.strip().splitlines()
        if cell.cell_type == "markdown":
            heading = next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), heading)
        tags = cell.metadata.get("tags", [])
        if "parameters" in tags or "injected-parameters" in tags:
            labels.append("parameters")
        else:
            labels.append(heading or (lines[0] if lines else "(empty)"))
    return labels


class LimitedClient(PapermillNotebookClient):  # type: ignore[misc]  # papermill is untyped
    """Runs the cells of one notebook under both limits and reports each to a listener."""

    def __init__(
        self,
        nb_man: Any,
        *,
        listener: ProgressListener,
        cell_timeout_s: float,
        run_timeout_s: float,
        **options: Any,
    ) -> None:
        super().__init__(nb_man, timeout_func=self._remaining_s, **options)
        self._listener = listener
        self._cell_timeout_s = cell_timeout_s
        self._run_timeout_s = run_timeout_s
        self._deadline = time.monotonic() + run_timeout_s
        self._labels = cell_labels(self.nb.cells)
        code = [index for index, cell in enumerate(self.nb.cells) if cell.cell_type == "code"]
        self._code_idx = {index: position for position, index in enumerate(code)}

    def _remaining_s(self, _cell: NotebookNode) -> float:
        """The current cell's time: its own limit or what is left of the run, whichever is less."""
        left = self._deadline - time.monotonic()
        return max(min(self._cell_timeout_s, left), 0.01)  # nbclient reads 0 as "no limit"

    def create_kernel_manager(self) -> AsyncKernelManager:
        """Called by nbclient when the kernel starts."""
        # Cells and outputs pass through local sockets that any user of the machine could read.
        encryption = "auto" if zmq.has("curve") else "disabled"
        self.km = CurrentInterpreterManager(config=self.config, transport_encryption=encryption)
        return self.km

    def papermill_execute_cells(self) -> None:
        """Called when the kernel is ready; its start has a limit of its own."""
        self._deadline = time.monotonic() + self._run_timeout_s
        super().papermill_execute_cells()

    def execute_cell(self, cell: NotebookNode, cell_index: int, *args: Any, **options: Any) -> NotebookNode:
        """Runs one cell; see the class.

        Raises:
            CellTimeoutError, RunTimeoutError: the limit that was hit.
        """
        position = self._code_idx.get(cell_index)
        if position is None:
            return cast(NotebookNode, super().execute_cell(cell, cell_index, *args, **options))
        label = self._labels[cell_index]
        self._listener.cell_started(position, len(self._code_idx), label)
        started = time.monotonic()
        try:
            return cast(NotebookNode, super().execute_cell(cell, cell_index, *args, **options))
        except nbclient.exceptions.CellTimeoutError:
            # A kernel that missed its limit gets no polite shutdown: it may be stuck in C code.
            self.shutdown_kernel = "immediate"
            where = f"cell {position + 1} of {len(self._code_idx)} ({label!r})"
            if time.monotonic() >= self._deadline:
                raise RunTimeoutError(
                    f"{where} was running when the notebook passed its limit of {self._run_timeout_s:g} s; "
                    "the kernel was killed. Raise --run-timeout or choose the quick profile"
                ) from None
            raise CellTimeoutError(
                f"{where} ran past the cell limit of {self._cell_timeout_s:g} s; the kernel was killed. "
                "Raise --cell-timeout or find out what hangs"
            ) from None
        except KeyboardInterrupt:
            # Killed before its sockets close: a kernel that finds them closed prints tracebacks.
            self.shutdown_kernel = "immediate"
            self._kill_group()
            raise
        finally:
            self._listener.cell_finished(position, len(self._code_idx), time.monotonic() - started)

    def process_message(self, *args: Any, **options: Any) -> Any:
        """Passes printed text on to the listener."""
        output = super().process_message(*args, **options)
        if output and output.get("output_type") == "stream":
            self._listener.output("".join(output.text))
        return output

    def execute(self, **options: Any) -> NotebookNode:
        """Runs the notebook; afterwards no process of the kernel's group is left.

        Raises:
            RunTimeoutError, CellTimeoutError: see ``execute_cell``.
        """
        try:
            return cast(NotebookNode, super().execute(**options))
        finally:
            self._kill_group()

    def start_new_kernel(self, **options: Any) -> None:
        """Starts the kernel and remembers its process group."""
        super().start_new_kernel(**options)
        self._group = getattr(self.km.provisioner, "pgid", None)

    _group: int | None = None

    def _kill_group(self) -> None:
        """Ends what the kernel started and left behind; its group id is its own (a new session)."""
        if self._group is not None and self._group != os.getpgrp():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)


class WorkbookEngine(Engine):  # type: ignore[misc]  # papermill is untyped
    """The engine that ``papermill.execute_notebook(engine_name="kernellib")`` uses."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        listener: ProgressListener,
        cell_timeout_s: float,
        run_timeout_s: float,
        kernel_cwd: str,
        kernel_env: Mapping[str, str],
        **_unused: Any,
    ) -> None:
        """Runs ``nb_man.nb`` in a fresh kernel in folder ``kernel_cwd``; see ``LimitedClient``."""
        client = LimitedClient(
            nb_man,
            listener=listener,
            cell_timeout_s=cell_timeout_s,
            run_timeout_s=run_timeout_s,
            startup_timeout=STARTUP_TIMEOUT_S,
            iopub_timeout=OUTPUT_TIMEOUT_S,
            kernel_name=kernel_name,
        )
        client.execute(cwd=kernel_cwd, env={**os.environ, **kernel_env})


papermill_engines.register(ENGINE_NAME, WorkbookEngine)
