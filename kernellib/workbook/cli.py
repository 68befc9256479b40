# SPDX-License-Identifier: Apache-2.0
"""The command line ``python -m kernellib.workbook list | run``.

Exit status: 0 every chosen notebook passed; 1 at least one failed (the others ran, the index page
says which claim); 2 the command asked for something that does not exist (notebook, parameter,
target, profile) or ``--out`` cannot be written to; 130 interrupted, with the index page of what had
finished and the names of what had not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..targets import TargetUnavailableError, resolve
from .discovery import Notebook, default_notebooks_dir, find_notebooks
from .errors import OutputFolderError, UsageError
from .parameters import check_known, parse_literal
from .report import render_index, render_notebook
from .runner import PROFILES, Failure, Limits, NotebookResult, run_notebooks, write_summary

PROGRAM = "python -m kernellib.workbook"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="List and run kernellib's notebooks headlessly.",
    pretty_exceptions_show_locals=False,
)

NotebooksOption = Annotated[
    Path | None,
    typer.Option(
        "--notebooks", help="Folder with the notebooks; by default the checkout's.", file_okay=False
    ),
]


class ConsoleProgress:
    """Shows one notebook's cells: a live line in a terminal, one printed line per cell elsewhere."""

    def __init__(self, console: Console, progress: Progress | None, title: str) -> None:
        self._console = console
        self._progress = progress
        self._task: TaskID | None = (
            progress.add_task(title, total=None, cell="starting the kernel") if progress else None
        )
        self._label = ""
        if progress is None:
            console.print(f"{title}")

    def cell_started(self, index: int, num_cells: int, label: str) -> None:
        """See ``engine.ProgressListener``."""
        self._label = label
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=num_cells, completed=index, cell=label)

    def cell_finished(self, index: int, num_cells: int, seconds: float) -> None:
        """See ``engine.ProgressListener``."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=index + 1)
        else:
            self._console.print(
                f"  cell {index + 1}/{num_cells} {seconds:7.1f} s  {self._label}",
                markup=False,
                highlight=False,
            )

    def output(self, text: str) -> None:
        """Shows the last line a cell printed beside its label, in a terminal only."""
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and self._progress is not None and self._task is not None:
            self._progress.update(self._task, cell=f"{self._label}: {lines[-1].strip()[:60]}")

    def close(self) -> None:
        """Removes the live line; the notebook's verdict is printed in its place."""
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)


def _fail_usage(console: Console, error: Exception) -> typer.Exit:
    console.print(f"error: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(EXIT_USAGE)


@app.command("list")
def list_command(notebooks: NotebooksOption = None) -> None:
    """List the notebooks with their parameters and defaults."""
    console = Console()
    try:
        found = find_notebooks(notebooks or default_notebooks_dir())
    except UsageError as error:
        raise _fail_usage(Console(stderr=True), error) from error
    table = Table("notebook", "title", "parameters", show_lines=True)
    for notebook in found:
        lines = [
            f"{spec.name}: {spec.type_name} = {spec.default!r}"
            + (f"  ({spec.help.lstrip('# ')})" if spec.help else "")
            for spec in notebook.parameters.values()
        ]
        table.add_row(notebook.name, notebook.title, "\n".join(lines) or notebook.problem or "none")
    console.print(table)


def _print_verdict(console: Console, result: NotebookResult) -> None:
    holding = sum(claim["verdict"] == "pass" for claim in result.claims)
    mark = "[green]passed[/]" if result.passed else "[bold red]FAILED[/]"
    console.print(
        f"{mark} {result.notebook.name}  {holding}/{len(result.claims)} claims  {result.duration_s:.1f} s",
        highlight=False,
    )
    if result.failure is not None:
        text = f"  {result.failure.kind}: {result.failure.message}"
        tail = result.failure.traceback.strip().splitlines()[-12:]
        console.print("\n    ".join([text, *tail]), style="red", markup=False, highlight=False)


@dataclass
class _Reporter:
    """Shows progress, and rewrites the index page after every notebook so that it exists when interrupted."""

    console: Console
    out: Path
    where: str
    planned: Sequence[str]
    results: list[NotebookResult] = field(default_factory=list)
    live: Progress | None = None
    current: ConsoleProgress | None = None

    @property
    def index(self) -> Path:
        return self.out / "index.html"

    def __enter__(self) -> _Reporter:
        if self.console.is_terminal:
            self.live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed}/{task.total} cells"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[cell]}"),
                console=self.console,
                transient=True,
            )
            self.live.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_error: object) -> None:
        if self.live is not None:
            self.live.stop()
        if error_type is not None and issubclass(error_type, KeyboardInterrupt):
            self.write_index(interrupted=True)

    def listener_for(self, notebook: Notebook) -> ConsoleProgress:
        self.write_index()  # before the first notebook too: an index of an earlier run must not stay
        title = f"({len(self.results) + 1}/{len(self.planned)}) {notebook.name}"
        self.current = ConsoleProgress(self.console, self.live, title)
        return self.current

    def write_index(self, interrupted: bool = False) -> None:
        """Writes the index page and the summary of what has an outcome, naming what has none."""
        pending = self.planned[len(self.results) :]
        render_index(self.results, self.index, self.where, pending=pending, interrupted=interrupted)
        write_summary(self.results, self.out / "summary.json", pending)

    def finished(self, result: NotebookResult) -> None:
        self.results.append(result)
        try:
            render_notebook(result, self.index)
        except Exception as error:  # one page less must not cost the verdicts of the others
            text = f"the notebook's page could not be rendered: {type(error).__name__}: {error}"
            result.failure = result.failure or Failure("page", text)
        self.write_index()
        if self.current is not None:
            self.current.close()
        _print_verdict(self.console, result)


def _is_value(text: str) -> bool:
    """Whether ``text`` after ``-p NAME`` is its value, and not the next option."""
    return not text.startswith("-") or isinstance(parse_literal(text), int | float)


def join_parameter_pairs(arguments: Sequence[str]) -> list[str]:
    """Rewrites ``-p NAME VALUE`` to ``-p NAME=VALUE``, the form typer can read.

    A VALUE that starts with "-" must be a number: anything else there is the next option, and the NAME
    without a value is left for ``parse_overrides`` to refuse.

    Example:
        >>> join_parameter_pairs(["run", "-p", "seed", "-1", "-p", "trials=3"])
        ['run', '-p', 'seed=-1', '-p', 'trials=3']
    """
    joined: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        joined.append(argument)
        if argument in {"-p", "--parameter"} and pending:
            name = pending.pop(0)
            takes_next = "=" not in name and not name.startswith("-") and pending and _is_value(pending[0])
            joined.append(f"{name}={pending.pop(0)}" if takes_next else name)
    return joined


def parse_overrides(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping.

    Raises:
        UsageError: a text without "=" or with a name that no parameter can have, or a name given twice.
    """
    overrides: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(
                f"-p got {pair!r}, wanted NAME VALUE, for example: -p trials 5 "
                "(NAME=VALUE where VALUE starts with - and is no number)"
            )
        if name in overrides:
            raise UsageError(f"-p {name} is given twice; give it once")
        overrides[name] = value
    return overrides


def _demand_writable(folder: Path) -> None:
    """Makes ``folder`` and demands that files can be made there.

    Raises:
        OutputFolderError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputFolderError(
            f"--out: cannot write to the folder {folder}: {error.strerror or error}; "
            "name a folder where files can be made"
        ) from error


def _value_of(option: str, given: str, overrides: Mapping[str, str]) -> str:
    """The value of ``--option`` in effect: notebooks see ``-p option VALUE`` in its place."""
    text = overrides.get(option)
    if text is None:
        return given
    value = parse_literal(text)  # quotes are allowed there
    return value if isinstance(value, str) else text


@app.command("run")
def run_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Full name, folder, or a unique ending; all notebooks by default."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="auto, mi355x, cuda, emulator or reference.")] = "auto",
    profile: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    parameters: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME VALUE", help="Set a notebook parameter; may repeat."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for the notebooks that declare one.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for pages, artifacts and pictures.", file_okay=False)
    ] = Path("out"),
    notebooks: NotebooksOption = None,
    cell_timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds for one cell.")] = None,
    run_timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds for one notebook.")] = None,
) -> None:
    """Run notebooks headlessly and write an index page of their claims."""
    errors = Console(stderr=True)
    try:
        overrides = parse_overrides(parameters or [])
        found = find_notebooks(notebooks or default_notebooks_dir(), names or [])
        check_known(overrides, [notebook.parameters for notebook in found])
        target, profile = _value_of("target", target, overrides), _value_of("profile", profile, overrides)
        if profile not in PROFILES:
            raise UsageError(f"profile got {profile!r}, wanted one of {', '.join(PROFILES)}")
        info = resolve(target)
        limits = Limits(cell_timeout or PROFILES[profile].cell_s, run_timeout or PROFILES[profile].run_s)
        for folder in dict.fromkeys([out, *(out / notebook.folder for notebook in found)]):
            _demand_writable(folder)
        where, planned = f"{info.name} ({info.device_name})", [notebook.name for notebook in found]
        with _Reporter(Console(), out, where, planned) as reporter:
            results = run_notebooks(
                found,
                out,
                limits,
                common={"target": target, "profile": profile, "seed": seed},
                overrides=overrides,
                listener_for=reporter.listener_for,
                finished=reporter.finished,
            )
    except (UsageError, TargetUnavailableError) as error:
        raise _fail_usage(errors, error) from error
    except KeyboardInterrupt as error:
        errors.print(f"interrupted; what finished is in {out / 'index.html'}", style="red", highlight=False)
        raise typer.Exit(EXIT_INTERRUPTED) from error
    failed = [result.notebook.name for result in results if not result.passed]
    Console().print(f"index page: {out / 'index.html'}", highlight=False, soft_wrap=True)
    if failed:
        errors.print(f"{len(failed)} of {len(results)} notebooks failed: {', '.join(failed)}", style="red")
        raise typer.Exit(EXIT_FAILED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; ``arguments`` default to the command line's."""
    app(args=join_parameter_pairs(sys.argv[1:] if arguments is None else arguments), prog_name=PROGRAM)
