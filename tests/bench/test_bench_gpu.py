# SPDX-License-Identifier: Apache-2.0
"""The real clock: what it refuses without a GPU, and on one that graphs, events and gates work together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernellib.bench.cases.latent_moe_tail import compare_tail
from kernellib.bench.device import GpuDevice
from kernellib.bench.errors import BenchError, RotationError
from kernellib.bench.record import Record

HAS_GPU = torch.cuda.is_available()


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_there_is_no_clock() -> None:
    with pytest.raises(BenchError, match="counted"):
        GpuDevice()


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(BenchError, match=r"set_device\(1\)"):
        GpuDevice(1)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_the_tail_is_measured_on_this_gpu(tmp_path: Path) -> None:
    target = "mi355x" if torch.version.hip else "cuda"
    record = compare_tail(target, trials=16, max_trials=16, arms=("eager", "fused"))
    assert [arm["status"] for arm in record.arms] == ["passed", "passed"]
    comparison = record.comparison("eager", "fused")
    assert comparison is not None
    assert comparison["orders"] == ["AB", "BA"] * 8
    assert all(len(arm["times"]["p50_by_capture"]) == 8 for arm in record.arms)
    assert record.data["method"]["cache_coverage"] >= 1.0
    assert {ceiling["name"] for ceiling in record.data["ceilings"]} == {"copy", "matmul"}
    assert Record.load(record.save(tmp_path / "record.json")).data == record.data


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_too_few_weights_are_refused_on_this_gpu() -> None:
    with pytest.raises(RotationError):
        compare_tail("mi355x" if torch.version.hip else "cuda", rotation=1)
