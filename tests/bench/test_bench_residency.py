# SPDX-License-Identifier: Apache-2.0
"""No arm lives on cache lines that another arm asked to keep: priorities are reset before each sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernellib.bench import device as device_module
from kernellib.bench.device import Capture, GpuDevice
from kernellib.bench.errors import BenchError
from kernellib.bench.residency import RESET_CALL, nothing, priority_reset


class Driver:
    """Answers ``code`` to the reset, and counts."""

    def __init__(self, code: int) -> None:
        self.num_calls = 0

        def call() -> int:
            self.num_calls += 1
            return code

        setattr(self, RESET_CALL, call)


def test_the_reset_is_the_drivers_call() -> None:
    driver: Any = Driver(0)
    name, reset = priority_reset("cuda", lambda: driver)
    assert name == "cuCtxResetPersistingL2Cache"
    assert driver.num_calls == 0
    reset()
    assert driver.num_calls == 1


def test_a_failing_reset_is_an_error_that_names_the_code() -> None:
    driver: Any = Driver(201)
    _, reset = priority_reset("cuda", lambda: driver)
    with pytest.raises(BenchError, match=r"error 201 .*CUDA_SUCCESS"):
        reset()


def missing_library() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("load", [missing_library, SimpleNamespace], ids=["no library", "no such call"])
def test_a_driver_without_it_cannot_time(load: Any) -> None:
    with pytest.raises(BenchError, match="wanted CUDA 11 or newer"):
        priority_reset("cuda", load)


def test_other_devices_have_nothing_to_reset() -> None:
    name, reset = priority_reset("hip", missing_library)
    assert name.startswith("none")
    assert reset is nothing


def test_a_sample_resets_before_its_lead_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the lead-in it would take away what the arm itself keeps; without it other arms' lines stay."""
    log: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> None:
            log.append(self.name)

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert (self.name, end.name) == ("start", "end")
            return 8.0  # ms

    names = iter(("start", "end"))
    monkeypatch.setattr(device_module, "_event", lambda: Event(next(names)))
    clock = object.__new__(GpuDevice)  # its constructor wants a GPU
    clock._num_lead_in, clock.num_rounds = 2, 4
    clock._reset_priorities = lambda: log.append("reset")
    monkeypatch.setattr(GpuDevice, "synchronize", lambda self: log.append("synchronize"))
    capture = Capture([], lambda: log.append("replay"))
    assert clock.sample(capture, lambda: log.append("poison")) == (2e-3,)
    assert log == ["synchronize", "reset", "replay", "replay", "poison", "start", "replay", "end", "wait"]
