# SPDX-License-Identifier: Apache-2.0
"""The device's state (clocks, power, temperature, throttle reasons) and the software's: versions, git.

Whatever cannot be told is None, with the reason beside it: a record never leaves a gap unexplained.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

STATE_FIELDS = (
    "driver",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "max_sm_clock_mhz",
    "power_w",
    "power_limit_w",
    "temperature_c",
    "throttle_reasons",
)
PACKAGES = ("kernellib", "torch", "triton", "flydsl", "numpy", "scipy")
# A working tree copied without .git names its revision here; the record says "declared", not "git".
REVISION_VARIABLE = "KERNELLIB_REVISION"

# Bits of nvmlDeviceGetCurrentClocksEventReasons [NVML API reference, NvmlClocksEventReasons].
NVML_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
HARMFUL_REASONS = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}


def _empty(why_not: str) -> dict[str, Any]:
    return {"source": None, "why_not": why_not, **dict.fromkeys(STATE_FIELDS)}


def _ask(query: Callable[[], Any]) -> Any:
    """The answer of one driver query; None where this device or driver does not support it."""
    try:
        return query()
    except Exception:  # each driver library has its own family of errors; one missing value is no failure
        return None


def decode_reasons(bits: int) -> list[str]:
    """Names of NVML's throttle reasons in a bit mask; unknown bits keep their number.

    Example:
        >>> decode_reasons(0x5)
        ['gpu_idle', 'sw_power_cap']
    """
    known = [name for bit, name in NVML_REASONS.items() if bits & bit]
    rest = bits & ~sum(NVML_REASONS)
    return known + ([f"unknown_{rest:#x}"] if rest else [])


def _nvml_state(index: int, uuid: str | None) -> dict[str, Any]:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handle = _ask(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")) if uuid else None
        handle = handle if handle is not None else nvml.nvmlDeviceGetHandleByIndex(index)
        query = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        query = query or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = _ask(lambda: query(handle))
        milliwatts = _ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = _ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        driver = _ask(nvml.nvmlSystemGetDriverVersion)
        return {
            "source": "nvml",
            "why_not": None,
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "sm_clock_mhz": _ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": _ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "max_sm_clock_mhz": _ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "power_limit_w": None if limit is None else limit / 1000,
            "temperature_c": _ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "throttle_reasons": None if bits is None else decode_reasons(int(bits)),
        }
    finally:
        nvml.nvmlShutdown()


def _number(value: Any) -> float | None:
    """amdsmi says "N/A" for what a device does not report."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _amdsmi_state(index: int, _uuid: str | None) -> dict[str, Any]:
    smi = importlib.import_module("amdsmi")
    smi.amdsmi_init()
    try:
        handle = smi.amdsmi_get_processor_handles()[index]
        clock = _ask(lambda: smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)) or {}
        memory = _ask(lambda: smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM)) or {}
        power = _ask(lambda: smi.amdsmi_get_power_info(handle)) or {}
        driver = _ask(lambda: smi.amdsmi_get_gpu_driver_info(handle)) or {}
        junction = _ask(
            lambda: smi.amdsmi_get_temp_metric(
                handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
            )
        )
        metrics = _ask(lambda: smi.amdsmi_get_gpu_metrics_info(handle)) or {}
        status = metrics.get("throttle_status")
        return {
            "source": "amdsmi",
            "why_not": None,
            "driver": driver.get("driver_version"),
            "sm_clock_mhz": _number(clock.get("clk")),
            "memory_clock_mhz": _number(memory.get("clk")),
            "max_sm_clock_mhz": _number(clock.get("max_clk")),
            "power_w": _number(power.get("current_socket_power")),
            "power_limit_w": _number(power.get("power_limit")),
            "temperature_c": _number(junction),
            "throttle_reasons": None if not isinstance(status, int) else ([f"{status:#x}"] if status else []),
        }
    finally:
        smi.amdsmi_shut_down()


def device_state(kind: str, index: int = 0, uuid: str | None = None) -> dict[str, Any]:
    """What the driver tells about a GPU now.

    Args:
        kind: "cuda" asks NVML, "hip" asks amdsmi; anything else has no driver to ask.
        index: of the device.
        uuid: torch's UUID of it, which NVML finds whatever CUDA_VISIBLE_DEVICES hides.

    Returns:
        ``STATE_FIELDS``, "source" and "why_not"; a field is None when the driver does not tell.
    """
    readers = {"cuda": ("pynvml", _nvml_state), "hip": ("amdsmi", _amdsmi_state)}
    if kind not in readers:
        return _empty("no GPU, so no clocks to read")
    package, reader = readers[kind]
    try:
        return reader(index, uuid)
    except ImportError:
        return _empty(f"package {package} is not installed; install it to record clocks and power")
    except Exception as error:  # the driver's library has no common base class; the run goes on without
        return _empty(f"{package} failed: {type(error).__name__}: {error}")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a result; None for one that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_revision(folder: Path | None = None) -> dict[str, Any]:
    """The revision of the working tree that tracks ``folder`` (this package by default).

    A copy that lies inside somebody else's working tree, untracked, has no revision of its own there; it may
    declare one in the environment (``REVISION_VARIABLE``).

    Returns:
        {"revision", "dirty", "source", "why_not"}: dirty is whether a tracked file differs from the revision.
    """
    folder = folder or Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if git("ls-files", "."):
            revision, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
            return {"revision": revision, "dirty": bool(changes), "source": "git", "why_not": None}
    except (OSError, subprocess.SubprocessError):
        pass  # no git, or no working tree
    declared = set(os.environ.get(REVISION_VARIABLE, "").split())
    if len(declared) == 1:  # several are none: which one was measured?
        return {"revision": declared.pop(), "dirty": None, "source": "declared", "why_not": None}
    why_not = f"no git working tree tracks this copy; set {REVISION_VARIABLE} to the one revision"
    return {"revision": None, "dirty": None, "source": None, "why_not": why_not}
