# SPDX-License-Identifier: Apache-2.0
"""The per-line profile: numbers land on the lines that caused them, in every view."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kernellib import emulator
from kernellib.emulator.profile import NO_SOURCE, NoLinesError, Profile, profile
from tests.emulator.kernels import access, matrix

SOURCE = str(Path(access.__file__).resolve())


def line_of(module: object, text: str) -> int:
    """Line number of the one source line with `text`."""
    lines = inspect.getsource(module).splitlines()  # type: ignore[arg-type]
    found = [number for number, line in enumerate(lines, 1) if text in line]
    assert len(found) == 1, (text, found)
    return found[0]


@pytest.fixture(scope="module")
def column() -> Profile:
    out = torch.full((64,), float("nan"))
    with emulator.emulated(counters="all") as session:
        access.lds_column(32)(out.data_ptr())
    return profile(session.launches[0])


def test_bank_conflicts_are_on_the_line_that_reads_a_column(column: Profile) -> None:
    reads = column.of_file(SOURCE)[line_of(access, "tile[t * pitch]")]
    assert reads.lds.conflicts == 62 == column.total("bank_conflicts")
    assert reads.memory.bytes == 256 == column.total("global_bytes")  # the store on the same line
    fills = column.of_file(SOURCE)[line_of(access, "tile[at] = ")]
    assert fills.classes["lds"] == 32  # one store for each of 32 rounds
    assert fills.lds.conflicts == 0


def test_nothing_is_lost(column: Profile) -> None:
    out = torch.full((64,), float("nan"))
    with emulator.emulated() as session:
        access.lds_column(32)(out.data_ptr())
    report = session.launches[0]
    again = profile(report)
    assert again.total("issues") == sum(report.instruction_counts.values()) == column.total("issues")
    assert sum(sum(e.classes.values()) for e in again.lines) == again.total("issues")
    assert 0.5 < again.located <= 1
    assert again.total("global_bytes") == 0  # lines touched were not counted in that session


def test_matrix_operations_are_on_their_line() -> None:
    m, n, k = 64, 64, 128
    a, b = (torch.zeros(rows, k, dtype=torch.bfloat16) for rows in (m, n))
    c = torch.zeros(m, n)
    with emulator.emulated() as session:
        matrix.gemm_bf16()(*[t.data_ptr() for t in (a, b, c)], m, n, k)
    found = profile(session.launches[0])
    entry = found.of_file(str(Path(matrix.__file__).resolve()))[line_of(matrix, "mfma_f32_32x32x16_bf16")]
    assert entry.flops == 2 * m * n * k == found.total("flops")


def test_table_shows_the_hottest_line_first(column: Profile) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(column.table("bank_conflicts"))
    text = console.export_text()
    rows = [line for line in text.splitlines() if "access.py:" in line]
    assert f"access.py:{line_of(access, 'tile[t * pitch]')}" in rows[0]
    assert "100.0%" in rows[0]
    assert len(rows) == 1  # lines without conflicts are not listed


def test_html_colours_lines_by_their_share(column: Profile) -> None:
    text = column.html("bank_conflicts", SOURCE)
    hot = re.findall(r"rgba\(200,60,20,1\.000\)\"><td>(\d+)</td><td>100\.0%</td>", text)
    assert hot == [str(line_of(access, "tile[t * pitch]"))]
    assert "counted" in text
    assert "<script" not in text
    assert text.count("<tr") == text.count("</tr>")


def test_figure_has_a_row_per_line(column: Profile) -> None:
    figure = column.figure("issues", SOURCE)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert any(label.startswith(f"{line_of(access, 'tile[t * pitch]')}: ") for label in labels)
    assert [int(label.split(":")[0]) for label in labels] == sorted(
        int(label.split(":")[0]) for label in labels
    )


def test_a_listing_without_lines_says_so() -> None:
    out = torch.full((64,), float("nan"))
    with emulator.emulated() as session:
        access.lds_column(33)(out.data_ptr())
        listing = re.sub(r"^\s*\.loc.*$", "", session.launches[0].assembly, flags=re.MULTILINE)
        report = session.run_assembly(listing, None, 1, 64, [out.data_ptr()])
    with pytest.raises(NoLinesError, match="access_lds_column_33"):
        profile(report)
    assert NO_SOURCE.startswith("(")
