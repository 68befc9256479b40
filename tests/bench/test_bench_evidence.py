# SPDX-License-Identifier: Apache-2.0
"""The evidence command: what it runs, what it packs, and that failures and invalid records stay visible."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeDevice, fake_record, second_of_ab
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from kernellib.bench.record import Record
from kernellib.targets import TargetInfo
from kernellib.workbook import evidence
from kernellib.workbook.errors import UsageError
from kernellib.workbook.evidence import NotebookRun, pack, small_page

GPU = TargetInfo("cuda", True, None, "NVIDIA H999 (80 GB)", "cuda", "measured")
CPU = TargetInfo("emulator", True, None, "this CPU", "cpu", "none")


def picture() -> bytes:
    image = Image.new("RGB", (90, 60))
    image.putdata([(x % 256, 3 * x % 256, 7 * x % 256) for x in range(90 * 60)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def page(text: str = "claim") -> str:
    encoded = base64.b64encode(picture()).decode()
    theme = "x" * (evidence.LARGE_STYLE_CHARS + 1)
    return (
        f'<html><head><style>{theme}</style><style>.small</style></head><body><div class="kl-nav">'
        f'<a href="../index.html">All notebooks</a> · name</div>{text}'
        f'<img src="data:image/png;base64,{encoded}"></body></html>'
    )


def test_a_small_page_keeps_text_and_pictures_and_loses_theme_and_paths() -> None:
    small = small_page(page("/opt/checkout/kernellib/x.py says 13.12 us"), ["/opt/checkout"])
    assert len(small) < len(page()) / 2
    assert "kernellib/x.py says 13.12 us" in small
    assert "/opt/checkout" not in small
    assert "index.html" not in small
    assert "<style>.small</style>" in small
    encoded = small.partition("base64,")[2].partition('"')[0]
    decoded = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert decoded.size == (90, 60)


def finished_run(folder: Path, record: Record | None = None) -> Path:
    inner = folder / "latent_moe_tail"
    inner.mkdir(parents=True)
    (folder / "index.html").write_text("index")
    (inner / "03_performance_ab.html").write_text(page())
    if record is not None:
        record.save(inner / "03_performance_ab.record.json")
    return folder


@pytest.fixture(scope="module")
def records() -> tuple[Record, Record, Record]:
    """Two of one revision, and one whose control failed."""
    return fake_record(), fake_record(seed=1), fake_record(device=FakeDevice(bias=second_of_ab))


def test_records_are_packed_byte_for_byte_and_an_invalid_one_says_so(
    tmp_path: Path, records: tuple[Record, Record, Record]
) -> None:
    good, bad = (
        finished_run(tmp_path / name, record) for name, record in zip("ab", records[::2], strict=True)
    )
    runs = [NotebookRun("good", good), NotebookRun("bad", bad)]
    readme = pack(runs, tmp_path / "device" / "day", notes=["a note"]).read_text()
    folder = tmp_path / "device" / "day"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "bad.html", "bad.record.json", "good.html", "good.record.json",
    ]  # fmt: skip
    for run in runs:
        (source,) = run.files(".record.json")
        assert (folder / f"{run.label}.record.json").read_bytes() == source.read_bytes()
    assert readme.count("**Not valid**") == readme.count("Valid: ") == 1
    assert records[2].invalid_reasons[0] in readme
    assert "a note" in readme


def test_a_run_that_left_nothing_and_labels_that_repeat_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="left no record"):
        pack([NotebookRun("x", tmp_path / "empty")], tmp_path / "to")
    run = NotebookRun("x", finished_run(tmp_path / "run"))
    with pytest.raises(UsageError, match="distinct"):
        pack([run, run], tmp_path / "to")


def test_a_run_of_several_notebooks_is_refused(
    tmp_path: Path, records: tuple[Record, Record, Record]
) -> None:
    folder = finished_run(tmp_path / "run", records[0])
    records[1].save(folder / "latent_moe_tail" / "other.record.json")
    with pytest.raises(UsageError, match="wanted those of one notebook"):
        pack([NotebookRun("x", folder)], tmp_path / "to")


def test_seeds_that_repeat_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "resolve", lambda _target: GPU)
        result = CliRunner().invoke(evidence.app, ["run", "--seeds", "1,01"])
    assert result.exit_code == 2
    assert "wanted distinct ones" in result.output


def run_faked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Sequence[Record | None], target: TargetInfo = GPU
) -> tuple[int, list[list[str]], str]:
    """The command with notebooks that leave ``made``; (exit status, commands, output)."""
    commands: list[list[str]] = []
    waiting = list(made)

    def step(_name: str, command: Sequence[str], _console: Any) -> int:
        commands.append(list(command))
        if "kernellib.bench" in command:
            other = copy.deepcopy(next(record for record in made if record is not None).data)
            Record({**other, "operator": f"{other['operator']}_after_producer"}).save(Path(command[-1]))
            return 0
        if "--out" in command:
            record = waiting.pop(0) if "03_performance_ab" in command[3] else None
            if record is not None or "01_correctness" in command[3]:
                finished_run(Path(command[-1]), record)
            return int("01" not in command[3] and record is None)
        return 0

    monkeypatch.setattr(evidence, "_run_step", step)
    monkeypatch.setattr(evidence, "resolve", lambda _target: target)
    words = ["run", "--seeds", "0,1", "--out", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(evidence.app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, commands, result.output


def test_it_runs_two_seeds_correctness_and_the_gpu_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, records: tuple[Record, Record, Record]
) -> None:
    status, commands, output = run_faked(monkeypatch, tmp_path, records[:2])
    assert status == 0, output
    notebooks = [command[3].partition("/")[2] for command in commands if "kernellib.workbook" in command]
    assert notebooks == ["03_performance_ab", "03_performance_ab", "01_correctness"]
    seeds = [command[command.index("--seed") + 1] for command in commands[:2]]
    assert seeds == ["0", "1"]
    assert all("full" in command for command in commands[:2])
    assert commands[-1][:5] == ["-m", "pytest", "-q", "-m", "gpu"]
    assert {"tests/bench/test_bench_gpu.py", "tests/ops/test_latent_moe_tail_triton.py"} <= set(commands[-1])
    assert "tests/bench/test_bench_evidence.py" not in commands[-1]
    (folder,) = (tmp_path / "results" / "nvidia_h999_80_gb").iterdir()
    found = sorted(path.name for path in folder.glob("*.record.json"))
    assert found == [f"{name}.record.json" for name in
                     ("03_performance_ab.seed0", "03_performance_ab.seed1", "after_producer")]  # fmt: skip
    (producer,) = [command for command in commands if "kernellib.bench" in command]
    assert producer[2:7] == ["run", "latent_moe_tail", "--target", "cuda", "--after-producer"]
    assert output.count("no regression") == 1, "another operator's record is compared with none of these"
    status, _, _ = run_faked(monkeypatch, tmp_path, records[:2])
    assert len(list(folder.parent.iterdir())) == 2, "evidence of an earlier run stays"


def test_an_invalid_record_or_a_failing_notebook_fails_it_and_the_rest_is_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, records: tuple[Record, Record, Record]
) -> None:
    status, _, output = run_faked(monkeypatch, tmp_path, (records[0], records[2]))
    assert status == 1
    assert "NOT VALID" in output
    status, _, _ = run_faked(monkeypatch, tmp_path / "again", (None, records[0]))
    assert status == 1
    (folder,) = (tmp_path / "again" / "results" / "nvidia_h999_80_gb").iterdir()
    assert len(list(folder.glob("03*.record.json"))) == 1
    assert "03_performance_ab.seed0: FAILED" in (folder / "README.md").read_text()


def test_a_step_runs_in_a_process_of_its_own_and_reports_its_status() -> None:
    for status in (0, 3):
        command = ["-c", f"import os; assert os.path.isdir('kernellib'); raise SystemExit({status})"]
        assert evidence._run_step("step", command, Console(quiet=True)) == status


def test_without_a_clock_there_is_no_evidence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, commands, _ = run_faked(monkeypatch, tmp_path, (), CPU)
    assert (status, commands) == (2, [])
