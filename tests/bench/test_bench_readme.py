# SPDX-License-Identifier: Apache-2.0
"""The README's measured figures are the committed records', and a difference in either is seen."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeDevice, fake_record, second_of_ab
from typer.testing import CliRunner

from kernellib.bench.cli import app
from kernellib.bench.comparison import compare_records
from kernellib.bench.errors import ReadmeError
from kernellib.bench.method import Method
from kernellib.bench.readme import BEGIN, END, find_records, measured_block, update, with_block
from kernellib.bench.record import Record

ROOT = Path(__file__).parents[2]


def check(root: Path) -> int:
    return CliRunner().invoke(app, ["readme", "--check", "--root", str(root)]).exit_code


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the README's figures are made of."""
    shutil.copy(ROOT / "README.md", tmp_path)
    for path in ROOT.glob("results/**/*.record.json"):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def test_the_readme_shows_the_committed_records() -> None:
    assert check(ROOT) == 0, "run python -m kernellib.bench readme"


def test_a_changed_figure_and_a_changed_record_are_both_seen(checkout: Path) -> None:
    assert check(checkout) == 0
    readme = checkout / "README.md"
    text = readme.read_text()
    path, record = find_records(checkout)[0]
    ratio = f"{record.data['comparisons'][0]['ratio']:.3f}"
    fused = f"{record.arm('fused')['times']['p50'] * 1e6:.2f}"
    start = text.index(BEGIN)
    assert fused in text[start:]
    readme.write_text(text[:start] + text[start:].replace(fused, "9.99", 1))
    assert check(checkout) == 1
    assert not update(checkout)
    assert readme.read_text() == text
    data = copy.deepcopy(dict(record.data))
    for entry in data["comparisons"]:
        entry["ratio"] *= 1.01
    Record.of(data).save(checkout / path)
    assert check(checkout) == 1, ratio


def test_an_invalid_record_is_labelled_with_its_reason_and_nothing_else_hides_it(checkout: Path) -> None:
    block = measured_block(checkout)
    for path, record in find_records(checkout):
        row = next(line for line in block.splitlines() if f"({path.as_posix()})" in line)
        assert ("**NO**" in row) != record.valid
        for reason in record.invalid_reasons:
            assert reason in block


@pytest.mark.parametrize(
    ("names", "rows", "texts"),
    [
        (("good",), ["| yes |"], ()),
        (("good", "bad"), ["| **NO** |", "| yes |"], ("No claim rests on the records that are not valid",)),
        (("bad",), ["| **NO** |"], ("None of these records is valid", "A/A control")),
        ((), [], ("No record is committed yet",)),
    ],
)
def test_validity_by_hand(
    tmp_path: Path, names: tuple[str, ...], rows: list[str], texts: tuple[str, ...]
) -> None:
    makers: dict[str, Callable[[], Record]] = {
        "good": fake_record,
        "bad": lambda: fake_record(device=FakeDevice(bias=second_of_ab)),
    }
    for name in names:
        makers[name]().save(tmp_path / "results" / "fake" / "2030-01-01" / f"{name}.record.json")
    block = measured_block(tmp_path)
    found = [line for line in block.splitlines() if line.startswith("| [")]
    assert len(found) == len(rows)
    assert all(text in line for text, line in zip(rows, found, strict=True))
    assert all(text in block for text in texts)
    assert ("claim rests" in block) == ("bad" in names)


def test_the_intervals_are_called_what_they_are(tmp_path: Path) -> None:
    method = Method(trials=16, max_trials=16, confidence=0.8)
    fake_record(method=method).save(tmp_path / "results" / "fake" / "2030-01-01" / "x.record.json")
    assert "their 80% intervals" in measured_block(tmp_path)


def test_what_stands_outside_the_markers_stays() -> None:
    block = f"{BEGIN}\nnew\n{END}"
    assert with_block(f"before\n{BEGIN}\nold\n{END}\nafter\n", block) == f"before\n{block}\nafter\n"


@pytest.mark.parametrize("text", ["none", f"{BEGIN}", f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_readme_without_its_markers_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ReadmeError, match="markers"):
        with_block(text, "block")
    (tmp_path / "README.md").write_text(text)
    assert check(tmp_path) == 2


def test_committed_records_whose_control_failed_compare_with_nothing() -> None:
    records: list[Any] = [record for _, record in find_records(ROOT) if not record.valid]
    fresh = fake_record()
    for record in records:
        for old, new in ((record, record), (fresh, record), (record, fresh)):
            outcome = compare_records(old, new)
            assert outcome.exit_code == 2
            assert any("A/A control" in reason for reason in outcome.incomparable)
