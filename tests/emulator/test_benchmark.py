# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its small kernels are right, its record follows the schema, a wrong result stops it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kernellib.emulator.__main__ import app
from kernellib.emulator.benchmarks import cases, run

FEW = pytest.mark.parametrize("name", ["gemm_bf16", "gemm_a8w4"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MIN_CPU_S", 0.0)


@FEW
@pytest.mark.parametrize("seed", [1, 2])
def test_gemms_are_right(name: str, seed: int) -> None:
    entry = run.run_case(cases.CASES[name], seed, 1)
    assert entry["matrix_flops"] == 2 * 256**3
    assert entry["rate"] == entry["matrix_flops"] / min(entry["cpu_s"])
    assert entry["sanitize_ratio"] == min(entry["sanitized_cpu_s"]) / min(entry["cpu_s"])


def test_rmsnorm_is_right_on_a_few_rows() -> None:
    small = dataclasses.replace(
        cases.CASES["rmsnorm"], prepare=lambda seed: cases.prepare_rmsnorm(seed, 8, 8192)
    )
    entry = run.run_case(small, 3, 1)
    assert entry["num_waves"] == 32
    assert 0 < entry["error"] <= 1


@pytest.mark.slow
def test_the_tail_is_right() -> None:
    entry = run.run_case(cases.CASES["tail"], 0, 1)
    assert entry["lane_instructions"] > 50e6
    assert entry["error"] <= 1


def test_a_wrong_result_has_no_rate() -> None:
    def spoiled(seed: int) -> cases.Prepared:
        prepared = cases.prepare_gemm_bf16(seed, 64)
        prepared.tensors[0][0, 0] += 1.0  # after the reference was computed
        return prepared

    with pytest.raises(cases.WrongResultError, match="gemm_bf16 with seed 7"):
        run.run_case(dataclasses.replace(cases.CASES["gemm_bf16"], prepare=spoiled), 7, 1)


def test_command_writes_a_record_that_follows_the_schema(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    result = CliRunner().invoke(app, ["bench", "--case", "gemm_bf16", "--repeats", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    run.validate(record)
    assert [entry["name"] for entry in record["cases"]] == ["gemm_bf16"]
    del record["cases"][0]["rate"]
    with pytest.raises(ValueError, match="cases/0"):
        run.validate(record)


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--case", "gemm_fp64", "--out", str(tmp_path / "r.json")])
    assert result.exit_code == 2
    assert "gemm_a8w4" in result.output
