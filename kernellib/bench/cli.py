# SPDX-License-Identifier: Apache-2.0
"""The command line ``python -m kernellib.bench run | show | compare | readme``.

Exit status of ``run``: 0 the record is valid and every arm was right, 1 otherwise (the record is written all
the same), 2 the command asked for what cannot be measured here. Of ``compare``: 0 no regression, 1
regression, 2 the records do not compare. Of ``readme --check``: 1 when README.md and the records differ.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .errors import BenchError, MethodError, ReadmeError, RecordError, RotationError, TimedInputsError
from .record import Record

PROGRAM = "python -m kernellib.bench"
OPERATORS = ("latent_moe_tail",)
EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure operators in paired A/B trials, show and compare the records.",
    pretty_exceptions_enable=False,
)


def _console() -> Console:
    # Not in a terminal rich assumes 80 columns, too few for a row of times.
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(EXIT_USAGE)


@app.command()
def run(
    operator: Annotated[str, typer.Argument(help=f"One of: {', '.join(OPERATORS)}.")],
    out: Annotated[Path, typer.Option(help="The record's file.", dir_okay=False)],
    trials: Annotated[int, typer.Option(help="Fewest paired trials.")] = 21,
    max_trials: Annotated[int, typer.Option(help="Most of them.")] = 201,
    half_width: Annotated[float, typer.Option(help="Trials end when every interval is narrower.")] = 0.01,
    rotation: Annotated[int, typer.Option(help="Slots, each with its own weight.")] = 8,
    seed: Annotated[int, typer.Option(help="Of inputs and bootstrap.")] = 0,
    target: Annotated[str, typer.Option(help="auto, mi355x, cuda or emulator.")] = "auto",
    arms: Annotated[
        str, typer.Option(help="Arms by name, with commas.")
    ] = "eager,compile,max_autotune,fused",
    after_producer: Annotated[
        bool, typer.Option("--after-producer", help="A kernel before each call writes its activations.")
    ] = False,
) -> None:
    """Measure an operator (on the emulator: count) and write its record."""
    from kernellib.targets import TargetUnavailableError  # noqa: PLC0415

    from .cases.latent_moe_tail import compare_tail  # noqa: PLC0415  (loads torch)
    from .view import print_record  # noqa: PLC0415

    if operator not in OPERATORS:
        raise _fail(MethodError(f"operator got {operator!r}, wanted one of {', '.join(OPERATORS)}"))
    options = {
        "trials": trials, "max-trials": max_trials, "half-width": half_width, "rotation": rotation,
        "seed": seed, "target": target, "arms": arms, "out": out.name,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--after-producer"] if after_producer else []
    command = f"{PROGRAM} run {operator} {shlex.join(words)}"
    console = _console()
    try:
        record = compare_tail(
            target,
            trials,
            rotation,
            seed,
            max_trials=max_trials,
            half_width=half_width,
            arms=tuple(arms.split(",")),
            with_producer=after_producer,
            command=command,
            progress=lambda line: console.print(line, style="dim", markup=False, highlight=False),
        )
    except (BenchError, MethodError, RotationError, TimedInputsError, TargetUnavailableError) as error:
        raise _fail(error) from error
    record.save(out)
    print_record(record, console, out.name)
    if not record.valid or any(arm["status"] != "passed" for arm in record.arms):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def show(
    records: Annotated[list[Path], typer.Argument(help="Record files.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for one plot for each record.", file_okay=False)
    ] = None,
) -> None:
    """Print a record's tables; with --out, write its plot."""
    from .view import plot_record, print_record  # noqa: PLC0415

    console = _console()
    drawn: set[str] = set()
    for path in records:
        try:
            record = Record.load(path)
        except RecordError as error:
            raise _fail(error) from error
        print_record(record, console, path.name)
        written = None
        if out is not None:
            name = f"{path.stem}.png"
            # Records of two days have the same name: the second plot must not replace the first.
            name = name if name not in drawn else f"{path.stem}.{len(drawn)}.png"
            drawn.add(name)
            written = plot_record(record, out / name)
        if written is not None:
            console.print(f"plot: {written}", markup=False, highlight=False)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The record to hold on to.")],
    new: Annotated[Path, typer.Argument(help="The record to judge.")],
    tolerance: Annotated[
        float, typer.Option(help="How much worse is still no regression, as a share.")
    ] = 0.05,
) -> None:
    """Compare two records: exit 0 no regression, 1 regression, 2 they do not compare."""
    from .comparison import compare_records  # noqa: PLC0415
    from .view import print_outcome  # noqa: PLC0415

    console = _console()
    try:
        outcome = compare_records(Record.load(old), Record.load(new), tolerance)
    except (RecordError, MethodError) as error:
        raise _fail(error) from error
    print_outcome(outcome, console)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
    console.print(f"no regression beyond {tolerance:.1%}", highlight=False)


@app.command()
def readme(
    root: Annotated[
        Path, typer.Option(help="The checkout, with README.md and results.", file_okay=False)
    ] = Path("."),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when it is stale.")] = False,
) -> None:
    """Write the README's measured figures from the records under results."""
    from .readme import update  # noqa: PLC0415

    try:
        fresh = update(root, check=check)
    except (OSError, ReadmeError, RecordError) as error:
        raise _fail(error) from error
    if check and not fresh:
        _console().print("README.md differs from the records: run python -m kernellib.bench readme")
        raise typer.Exit(EXIT_FAILED)
    _console().print("README.md is up to date" if fresh else "README.md was rewritten")
