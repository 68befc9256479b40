# SPDX-License-Identifier: Apache-2.0
"""`python -m kernellib.emulator coverage FILE.s...`: what a listing needs, and what of it is missing.
`python -m kernellib.emulator bench`: how fast the emulator is on this computer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kernellib.emulator.assembly import Instruction, parse
from kernellib.emulator.binding.control import ControlContext
from kernellib.emulator.binding.program import bind_instruction, leaders, register_counts
from kernellib.emulator.binding.sources import BindContext
from kernellib.emulator.errors import AssemblySyntaxError, UnknownInstructionError
from kernellib.emulator.state import SlotTable

app = typer.Typer(add_completion=False, help="Tools around the gfx950 emulator.")


@app.callback()
def main() -> None:
    """Tools around the gfx950 emulator."""


def check_listing(text: str) -> tuple[Counter[str], dict[str, str]]:
    """(uses per mnemonic, first problem per mnemonic that cannot run)."""
    program = parse(text)
    block_of = {leader: number for number, leader in enumerate(leaders(program))}
    ctx = BindContext(SlotTable(), *register_counts(program))
    control = ControlContext(ctx, program, block_of)
    uses: Counter[str] = Counter()
    problems: dict[str, str] = {}
    for inst in program.instructions:
        uses[inst.mnemonic] += 1
        problem = _problem(ctx, control, inst)
        if problem is not None:
            problems.setdefault(inst.mnemonic, problem)
    return uses, problems


def _problem(ctx: BindContext, control: ControlContext, inst: Instruction) -> str | None:
    try:
        bind_instruction(ctx, control, inst)
    except UnknownInstructionError:
        return f"not in the instruction table (line {inst.line_no})"
    except AssemblySyntaxError as error:
        return str(error)
    return None


@app.command()
def coverage(
    files: Annotated[
        list[Path], typer.Argument(help="gfx950 assembly listings", exists=True, dir_okay=False)
    ],
    every: Annotated[bool, typer.Option("--all", help="list the mnemonics that work, too")] = False,
) -> None:
    """Print what each listing needs and what is missing.  Exits with 1 when anything is."""
    console = Console()
    missing: dict[str, list[str]] = defaultdict(list)
    uses: Counter[str] = Counter()
    for path in files:
        try:
            found, problems = check_listing(path.read_text(errors="replace"))
        except AssemblySyntaxError as error:
            console.print(f"[red]{path}[/]: {error}", highlight=False)
            missing["(listing)"].append(f"{path}: {error}")
            continue
        uses.update(found)
        for mnemonic, problem in problems.items():
            missing[mnemonic].append(f"{path.name}: {problem}")
        console.print(f"{path}: {len(found)} mnemonics, {len(problems)} missing", highlight=False)
    table = Table("mnemonic", "uses", "status")
    for mnemonic, number in sorted(uses.items()):
        if mnemonic in missing:
            table.add_row(mnemonic, str(number), f"[red]{missing[mnemonic][0]}[/]")
        elif every:
            table.add_row(mnemonic, str(number), "runs")
    if table.row_count:
        console.print(table)
    if missing:
        raise typer.Exit(1)


@app.command()
def bench(
    case: Annotated[list[str] | None, typer.Option(help="only this case (may be repeated)")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each case")] = 5,
    seed: Annotated[int, typer.Option(help="of the inputs")] = 0,
    out: Annotated[Path, typer.Option(help="where the record goes")] = Path("out/emulator/benchmark.json"),
    require: Annotated[bool, typer.Option("--require", help="exit with 1 when a rate is missed")] = False,
) -> None:
    """Run the benchmark kernels, print their rates and write a JSON record.  A wrong result is an error."""
    from kernellib.emulator.benchmarks.cases import CASES  # noqa: PLC0415  (torch and FlyDSL load slowly)
    from kernellib.emulator.benchmarks.run import run_benchmark, save, table  # noqa: PLC0415

    unknown = sorted(set(case or []) - set(CASES))
    if unknown:
        raise typer.BadParameter(f"got {', '.join(unknown)}, wanted one of: {', '.join(CASES)}")
    record = run_benchmark(case or [], seed, repeats)
    save(record, out)
    Console().print(table(record))
    typer.echo(f"record: {out}")
    if require and not all(entry["reached"] for entry in record["cases"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
