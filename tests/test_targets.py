# SPDX-License-Identifier: Apache-2.0
"""Detection: each target's availability and reason, over made-up platforms and this machine's own."""

from __future__ import annotations

import dataclasses
import sys
import types
from contextlib import contextmanager

import pytest

from kernellib import targets
from kernellib.targets import TARGETS, Platform, TargetUnavailableError, choose, describe

CPU_ONLY = Platform(
    gpu=False,
    gpu_why_not="torch is a CPU build",
    hip_version=None,
    gcn_arch=None,
    gpu_name="",
    capability=None,
    has_flydsl=True,
    has_triton=True,
    has_emulator=True,
    system="linux",
    machine="x86_64",
    cpu_name="some CPU",
)
MI355X = dataclasses.replace(
    CPU_ONLY,
    gpu=True,
    gpu_why_not=None,
    hip_version="7.2",
    gcn_arch="gfx950:sramecc+:xnack-",
    gpu_name="MI355X",
)
MI300X = dataclasses.replace(MI355X, gcn_arch="gfx942:sramecc+:xnack-", gpu_name="MI300X")
H200 = dataclasses.replace(
    CPU_ONLY, gpu=True, gpu_why_not=None, gpu_name="NVIDIA H200", capability=(9, 0), has_flydsl=False
)


@pytest.mark.parametrize(
    ("machine", "auto"),
    [(CPU_ONLY, "emulator"), (MI355X, "mi355x"), (MI300X, "cuda"), (H200, "cuda")],
)
def test_auto_takes_the_first_available(machine: Platform, auto: str) -> None:
    assert choose("auto", describe(machine)).name == auto


@pytest.mark.parametrize(
    ("machine", "name", "words"),
    [
        (CPU_ONLY, "mi355x", "CPU build"),
        (CPU_ONLY, "cuda", "CPU build"),
        (H200, "mi355x", "not AMD's"),
        (H200, "emulator", "flydsl is not installed"),
        (MI300X, "mi355x", "gfx942"),
        (dataclasses.replace(MI355X, has_flydsl=False), "mi355x", "flydsl is not installed"),
        (dataclasses.replace(H200, has_triton=False), "cuda", "triton is not installed"),
        (dataclasses.replace(H200, capability=(7, 5)), "cuda", "compute capability 7.5"),
        (dataclasses.replace(CPU_ONLY, system="darwin"), "emulator", "Linux only"),
        (dataclasses.replace(CPU_ONLY, has_emulator=False), "emulator", "emulator is missing"),
    ],
)
def test_a_refused_target_names_its_reason(machine: Platform, name: str, words: str) -> None:
    info = describe(machine)[name]
    assert not info.available
    assert info.why_not is not None
    assert words in info.why_not
    assert info.times == "none"
    with pytest.raises(TargetUnavailableError, match="not available"):
        choose(name, describe(machine))


def test_only_gpus_report_times() -> None:
    for machine in (CPU_ONLY, MI355X, MI300X, H200):
        for info in describe(machine).values():
            assert (info.times == "measured") == (info.available and info.torch_device == "cuda")
            assert info.available == (info.why_not is None)
    assert describe(CPU_ONLY)["reference"].device_name == "some CPU"
    assert describe(H200)["reference"].times == "measured"


def test_nothing_available_lists_every_reason() -> None:
    bare = dataclasses.replace(CPU_ONLY, has_flydsl=False)
    with pytest.raises(TargetUnavailableError, match=r"mi355x: .*cuda: .*emulator: "):
        choose("auto", describe(bare))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TargetUnavailableError, match="'tpu'"):
        choose("tpu", describe(CPU_ONLY))
    with pytest.raises(TargetUnavailableError, match="'auto'"):
        targets.execution_scope("auto")


def test_this_machine_is_described() -> None:
    found = targets.detect()
    assert tuple(found) == TARGETS
    assert found["reference"].available
    assert targets.resolve("reference") == found["reference"]


def test_the_emulators_scope_is_entered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    stand_in = types.ModuleType("kernellib.emulator")
    active: list[object] = []

    @contextmanager
    def emulated():  # type: ignore[no-untyped-def]
        entered.append("emulated")
        active.append(object())
        yield active[-1]
        active.pop()

    stand_in.emulated = emulated  # type: ignore[attr-defined]
    stand_in.active_session = lambda: active[-1] if active else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernellib.emulator", stand_in)
    with targets.execution_scope("emulator"), targets.execution_scope("emulator"):
        assert entered == ["emulated"]
    for other in ("mi355x", "cuda", "reference"):
        with targets.execution_scope(other):
            assert entered == ["emulated"]
