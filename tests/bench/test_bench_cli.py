# SPDX-License-Identifier: Apache-2.0
"""The command line's exit status and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_fakes import BASE_S, FakeDevice, fake_record, second_of_ab
from typer.testing import CliRunner, Result

from kernellib.bench.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    fake_record().save(folder / "old.json")
    fake_record(seed=1).save(folder / "same.json")
    fake_record(BASE_S / 2 * 1.07, seed=2).save(folder / "slow.json")
    fake_record(device=FakeDevice(bias=second_of_ab)).save(folder / "invalid.json")
    (folder / "broken.json").write_text("{}")
    return folder


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("new", "options", "exit_code"),
    [
        ("same.json", (), 0),
        ("slow.json", (), 1),
        ("slow.json", ("--tolerance", "0.1"), 0),
        ("invalid.json", (), 2),
        ("broken.json", (), 2),
        ("missing.json", (), 2),
        ("same.json", ("--tolerance", "5"), 2),
    ],
)
def test_compare_says_it_by_its_exit_status(
    folder: Path, new: str, options: tuple[str, ...], exit_code: int
) -> None:
    result = invoke("compare", folder / "old.json", folder / new, *options)
    assert result.exit_code == exit_code
    assert ("REGRESSION" in result.output) == (exit_code == 1)


def test_show_prints_each_record_and_writes_its_plot(folder: Path, tmp_path: Path) -> None:
    result = invoke("show", folder / "old.json", folder / "invalid.json", "--out", tmp_path)
    assert result.exit_code == 0
    for text in ("fused", "control", "no difference", "measured", "INVALID"):
        assert text in result.output
    for name in ("old.png", "invalid.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_show_refuses_what_is_no_record(folder: Path) -> None:
    assert invoke("show", folder / "broken.json").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("no_such_operator",), "operator"),
        (("latent_moe_tail", "--target", "mi999x"), "target"),
        (("latent_moe_tail", "--target", "reference"), "no fused kernel"),
    ],
)
def test_run_refuses_what_it_cannot_measure(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    out = tmp_path / "record.json"
    result = invoke("run", *arguments, "--out", out)
    assert result.exit_code == 2
    assert text in result.output
    assert not out.exists()
