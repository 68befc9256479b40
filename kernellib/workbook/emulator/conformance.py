# SPDX-License-Identifier: Apache-2.0
"""The conformance table, read from the document that the tests write (docs/emulator_conformance.md)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernellib.emulator.counters import instruction_class
from kernellib.emulator.instructions import lookup

from ..artifact import Claim
from ..display import HtmlTable
from ..errors import UsageError

DOCUMENT = Path("docs") / "emulator_conformance.md"
COLUMNS = ("instruction", "encodings", "forms", "lanes", "checked", "source")


@dataclass(frozen=True)
class ConformanceRow:
    """One instruction: which encodings and forms were executed, how many lanes a test compared, with what."""

    mnemonic: str
    encodings: str
    forms: str
    lanes: int
    checked: str
    source: str


def document_path() -> Path:
    """The document beside the package (an editable install or a checkout), else in the current directory.

    Raises:
        UsageError: it is in neither place.
    """
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / DOCUMENT).is_file():
            return folder / DOCUMENT
    raise UsageError(f"{DOCUMENT} is not beside the package: run the notebook in a checkout")


def read_rows(path: Path | None = None) -> list[ConformanceRow]:
    """The rows of the document's table.

    Raises:
        UsageError: no document, or no table in it.
    """
    rows = []
    for line in (path or document_path()).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) == len(COLUMNS):
            lanes = int(cells[3].replace(",", ""))
            rows.append(ConformanceRow(cells[0].strip("`"), cells[1], cells[2], lanes, cells[4], cells[5]))
    if not rows:
        raise UsageError(f"{path or document_path()} has no table of instructions")
    return rows


def summary_table(rows: Sequence[ConformanceRow]) -> HtmlTable:
    """Instructions and compared lanes by class."""
    by_class: dict[str, list[ConformanceRow]] = {}
    for row in rows:
        by_class.setdefault(instruction_class(row.mnemonic), []).append(row)
    body = [[name, len(group), sum(row.lanes for row in group), min(row.lanes for row in group)]
            for name, group in sorted(by_class.items())]  # fmt: skip
    body.append(["all", len(rows), sum(row.lanes for row in rows), min(row.lanes for row in rows)])
    columns = ["class", "instructions", "lanes compared", "least for one"]
    return HtmlTable(columns, body, "Instructions held to values worked out without the emulator", "checked")


class FullTable:
    """Every row, folded away until it is clicked on."""

    def __init__(self, rows: Sequence[ConformanceRow]) -> None:
        self.rows = rows

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:left">{html.escape(str(cell))}</td>'
                for cell in (row.mnemonic, row.encodings, row.forms, row.lanes, row.checked, row.source)
            )
            + "</tr>"
            for row in self.rows
        )
        style = "font-size:11px;border-collapse:collapse"
        return (
            f"<details><summary>All {len(self.rows)} instructions</summary>"
            f'<table style="{style}"><tr>{head}</tr>{body}</table></details>'
        )

    def __repr__(self) -> str:
        return "\n".join(f"{row.mnemonic}: {row.forms} ({row.lanes} lanes)" for row in self.rows)


def used_rows(rows: Sequence[ConformanceRow], mnemonics: Sequence[str]) -> tuple[list[str], list[str]]:
    """(mnemonics of a listing that the table has, those that it lacks), without their encoding suffix."""
    known = {row.mnemonic for row in rows}
    bare = sorted({definition.mnemonic if (definition := lookup(name)) else name for name in mnemonics})
    return [name for name in bare if name in known], [name for name in bare if name not in known]


def conformance_claims(rows: Sequence[ConformanceRow], mnemonics: Sequence[str]) -> list[Claim]:
    """Every row compared lanes, and every instruction of the counted kernels has a row."""
    least = min(row.lanes for row in rows)
    held, missing = used_rows(rows, mnemonics)
    detail = f"{len(held)} of {len(held) + len(missing)}" + (f", not {', '.join(missing)}" if missing else "")
    return [
        Claim.check(
            "every instruction's result was compared", least > 0,
            f"{len(rows)} instructions, at least {least} lanes each", "checked",
        ),
        Claim.check("what these kernels execute is in the table", not missing, detail, "checked"),
    ]  # fmt: skip
