# SPDX-License-Identifier: Apache-2.0
"""Command line: python -m kernellib.inspect OPERATOR [--config NAME] [--emit asm|object] [--out FILE]."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sized
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .registry import UnknownOperatorError, inspection_of, operator_names

TABLE_WIDTH = 140  # where there is no terminal to ask
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Emit(StrEnum):
    """What to write instead of the table."""

    ASM = "asm"
    OBJECT = "object"


@app.command()
def main(
    operator: Annotated[str, typer.Argument(help="An operator, such as latent_moe_tail; 'list' lists them.")],
    config: Annotated[
        str | None, typer.Option(help="A configuration; what an MI355X runs when left out.")
    ] = None,
    emit: Annotated[Emit | None, typer.Option(help="Write the gfx950 listing or the linked object.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write to; several kernels get a name each. An object needs it, the rest is printed."
        ),
    ] = None,
) -> None:
    """Shows what the compiler made of every kernel that OPERATOR launches."""
    if operator == "list":
        for name in operator_names():
            typer.echo(f"{name}: {len(inspection_of(name).config_names())} configurations")
        return
    if emit is Emit.OBJECT and out is None:
        typer.echo(f"--emit object got no --out, wanted a file: --out {operator}.hsaco", err=True)
        raise typer.Exit(2)
    try:
        if emit is Emit.OBJECT and out is not None:
            _emit_objects(operator, config, out)
        elif emit is Emit.ASM:
            _emit_listings(operator, config, out)
        else:
            _show_resources(operator, config, out)
    except (UnknownOperatorError, ValueError, RuntimeError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


def _emit_objects(operator: str, config: str | None, out: Path) -> None:
    from .linking import link_operator  # noqa: PLC0415

    objects = link_operator(operator, config)
    for name, image in objects.items():
        path = _path_for(out, name, objects)
        path.write_bytes(image)
        typer.echo(f"{name}: {len(image)} bytes to {path}")


def _emit_listings(operator: str, config: str | None, out: Path | None) -> None:
    from .listing import inspect_operator  # noqa: PLC0415

    found = {kernel.name: kernel.assembly for kernel in inspect_operator(operator, config)}
    for name, text in found.items():
        if out is None:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            continue
        path = _path_for(out, name, found)
        path.write_text(text, encoding="utf-8")
        typer.echo(f"{name}: {text.count(chr(10))} lines to {path}", err=True)


def _path_for(path: Path, kernel: str, kernels: Sized) -> Path:
    """``path``, or with several kernels ``path`` with the kernel's name in it."""
    return path if len(kernels) == 1 else path.with_name(f"{path.stem}.{kernel}{path.suffix}")


def _show_resources(operator: str, config: str | None, out: Path | None) -> None:
    from .listing import classes_of, inspect_operator  # noqa: PLC0415

    kernels = inspect_operator(operator, config)
    resources = Table("kernel", "resource", "value", title=f"{operator}: compiled resources (gfx950)")
    mix = Table("kernel", "class", "instructions", "most frequent", title="Instructions in the listing")
    for kernel in kernels:
        used = kernel.resources
        per_unit = used.workgroups_per_cu(used.max_workgroup_size)
        rows = (
            ("VGPRs", used.vgprs),
            ("AGPRs", used.agprs),
            ("SGPRs", used.sgprs),
            ("LDS, bytes for a workgroup", used.lds_bytes),
            ("scratch, bytes for a lane", used.scratch_bytes),
            ("spilled VGPRs, SGPRs", f"{used.vgpr_spills}, {used.sgpr_spills}"),
            ("kernel arguments, bytes", used.kernarg_bytes),
            ("threads in a workgroup", used.max_workgroup_size),
            ("occupancy, waves on a SIMD", used.occupancy_waves_per_simd),
            ("workgroups on a compute unit", per_unit),
        )
        for index, (label, value) in enumerate(rows):
            resources.add_row(kernel.name if index == 0 else "", label, str(value))
        classes = classes_of(used.instruction_mix)
        for index, (label, count) in enumerate(classes.most_common()):
            examples = _examples(used.instruction_mix, label)
            mix.add_row(kernel.name if index == 0 else "", label, str(count), examples)
    if out is None:
        Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(resources, mix)
        return
    with out.open("w", encoding="utf-8") as file:
        Console(file=file, width=TABLE_WIDTH).print(resources, mix)


def _examples(mix: Mapping[str, int], label: str) -> str:
    from .listing import instruction_class  # noqa: PLC0415

    members = [(count, name) for name, count in mix.items() if instruction_class(name) == label]
    return ", ".join(f"{name} {count}" for count, name in sorted(members, reverse=True)[:3])


if __name__ == "__main__":
    app()
