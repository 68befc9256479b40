# SPDX-License-Identifier: Apache-2.0
"""Device state through made-up driver libraries; revisions from a real repository; lazy imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernellib.bench import state


def fake_nvml(**changes: Any) -> SimpleNamespace:
    def unsupported(*_: Any) -> None:
        raise RuntimeError("not supported")

    library = SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}",
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetPowerUsage=lambda handle: 345_600,
        nvmlDeviceGetEnforcedPowerLimit=unsupported,
        nvmlDeviceGetTemperature=lambda handle, kind: 41,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x44,
    )  # fmt: skip
    library.__dict__.update(changes)
    return library


def test_nvml_is_read_and_what_it_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    found = state.device_state("cuda", 0, "1234")
    assert found == {
        "source": "nvml", "why_not": None, "driver": "580.1", "sm_clock_mhz": 1980, "memory_clock_mhz": 3201,
        "max_sm_clock_mhz": 1980, "power_w": 345.6, "power_limit_w": None, "temperature_c": 41,
        "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"],
    }  # fmt: skip
    assert set(found["throttle_reasons"]) & state.HARMFUL_REASONS == {"hw_thermal_slowdown"}


def test_a_driver_that_fails_leaves_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=fail))
    found = state.device_state("cuda")
    assert found["source"] is None
    assert "driver not loaded" in found["why_not"]


def test_amdsmi_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = SimpleNamespace(GFX="gfx", MEM="mem")
    library = SimpleNamespace(
        AmdSmiClkType=kind,
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_clock_info=lambda handle, which: {
            "clk": {"gfx": 2400, "mem": 2000}[which],
            "max_clk": "N/A",
        },
        amdsmi_get_power_info=lambda handle: {"current_socket_power": 900, "power_limit": 1400},
        amdsmi_get_gpu_driver_info=lambda handle: {"driver_version": "6.14"},
        amdsmi_get_temp_metric=lambda handle, sensor, metric: 55,
        amdsmi_get_gpu_metrics_info=lambda handle: {"throttle_status": 0},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    found = state.device_state("hip", 1)
    assert (found["sm_clock_mhz"], found["memory_clock_mhz"], found["power_w"]) == (2400.0, 2000.0, 900.0)
    assert (found["driver"], found["temperature_c"], found["throttle_reasons"]) == ("6.14", 55.0, [])
    assert found["max_sm_clock_mhz"] is None


@pytest.mark.parametrize(("kind", "package"), [("cuda", "pynvml"), ("hip", "amdsmi")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    found = state.device_state(kind)
    assert package in found["why_not"]
    assert all(found[field] is None for field in state.STATE_FIELDS)


def test_unknown_throttle_bits_are_kept() -> None:
    assert state.decode_reasons(0x4001) == ["gpu_idle", "unknown_0x4000"]


def test_the_revision_and_whether_the_tree_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv(state.REVISION_VARIABLE, raising=False)
    assert state.git_revision(tmp_path)["revision"] is None
    monkeypatch.setenv(state.REVISION_VARIABLE, "abc123 def456")
    assert state.git_revision(tmp_path)["revision"] is None
    monkeypatch.setenv(state.REVISION_VARIABLE, "abc123\nabc123\n")
    assert state.git_revision(tmp_path) == {
        "revision": "abc123", "dirty": None, "source": "declared", "why_not": None
    }  # fmt: skip
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = state.git_revision(tmp_path)
    assert (clean["source"], clean["dirty"], len(clean["revision"])) == ("git", False, 40)
    (tmp_path / "file").write_text("two")
    assert state.git_revision(tmp_path)["dirty"] is True
    (tmp_path / "copy").mkdir()  # another revision, unpacked inside a working tree
    (tmp_path / "copy" / "file").write_text("three")
    assert state.git_revision(tmp_path / "copy")["revision"] == "abc123"


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PACKAGES", ("torch", "no-such-package"))
    found = state.versions()
    assert found["torch"]
    assert found["no-such-package"] is None


def test_measuring_needs_no_gfx950_compiler() -> None:
    code = (
        "import sys; sys.modules['flydsl'] = None; import kernellib.bench as b, kernellib.bench.cli; "
        "print('torch' in sys.modules); b.compare_tail, b.timed_record, b.compare_records; "
        "print([m for m in ('kernellib.emulator', 'kernellib.workbook', 'triton') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["False", "[]"]
