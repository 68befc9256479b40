# SPDX-License-Identifier: Apache-2.0
"""Targets: where an operator can run on this machine, and honest reasons where it cannot.

===========  ==============================================  =====================================
target       hardware                                        code that runs
===========  ==============================================  =====================================
mi355x       gfx950 through HIP                              the FlyDSL kernel
cuda         NVIDIA GPU, or a ROCm GPU through Triton        the Triton kernel of the same operator
emulator     any CPU                                         the gfx950 instructions FlyDSL emitted
reference    any torch device                                the PyTorch chain
===========  ==============================================  =====================================

``auto`` is the first available of mi355x, cuda, emulator. Only targets on a GPU may report times.

Example:
    >>> from kernellib.targets import detect, resolve
    >>> detect()["reference"].available
    True
    >>> resolve("reference").name
    'reference'
"""

from __future__ import annotations

import importlib
import importlib.util
import platform as _platform
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

TARGETS: tuple[str, ...] = ("mi355x", "cuda", "emulator", "reference")
AUTO_ORDER: tuple[str, ...] = ("mi355x", "cuda", "emulator")

GFX950 = "gfx950"
# Triton's bf16 arithmetic and 16-byte asynchronous copies start with compute capability 8.0.
MIN_NVIDIA_CAPABILITY = (8, 0)


class TargetUnavailableError(RuntimeError):
    """A target was asked for that this machine cannot run, or a name that is no target."""


@dataclass(frozen=True)
class TargetInfo:
    """One target on this machine.

    Attributes:
        name: one of ``TARGETS``.
        available: whether an operator can run on it here and now.
        why_not: the reason when it is not available, with the remedy; None when it is.
        device_name: what the hardware calls itself; for a CPU its model.
        torch_device: the torch device type its tensors live on, "cpu" or "cuda"
            (a ROCm build of torch says "cuda" too).
        times: "measured" when device events can time it, "none" otherwise.
    """

    name: str
    available: bool
    why_not: str | None
    device_name: str
    torch_device: Literal["cpu", "cuda"]
    times: Literal["measured", "none"]


@dataclass(frozen=True)
class Platform:
    """The facts detection rests on; a test makes one up, ``probe`` reads the real one."""

    gpu: bool
    gpu_why_not: str | None
    hip_version: str | None
    gcn_arch: str | None
    gpu_name: str
    capability: tuple[int, int] | None
    has_flydsl: bool
    has_triton: bool
    has_emulator: bool
    system: str
    machine: str
    cpu_name: str


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a broken parent package counts as missing
        return False


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return _platform.processor() or _platform.machine() or "unknown CPU"


def probe() -> Platform:
    """Reads this machine: torch's build and first GPU, installed packages, system and processor.

    Imports torch, but neither flydsl nor triton (they are only looked for).
    """
    import torch  # noqa: PLC0415  (kernellib must import quickly where only names are wanted)

    hip = getattr(torch.version, "hip", None)
    gpu = bool(torch.cuda.is_available())
    why_not: str | None = None
    arch: str | None = None
    name = ""
    capability: tuple[int, int] | None = None
    if gpu:
        properties = torch.cuda.get_device_properties(0)
        name = str(properties.name)
        arch = str(getattr(properties, "gcnArchName", "")) or None
        if hip is None:
            arch = None
            capability = (int(properties.major), int(properties.minor))
    elif hip is None and torch.version.cuda is None:
        why_not = f"torch {torch.__version__} is a CPU build; install a ROCm or CUDA build of torch"
    else:
        kind = "ROCm" if hip is not None else "CUDA"
        why_not = f"torch {torch.__version__} ({kind} build) sees no GPU; check the driver and device files"
    return Platform(
        gpu=gpu,
        gpu_why_not=why_not,
        hip_version=hip,
        gcn_arch=arch,
        gpu_name=name,
        capability=capability,
        has_flydsl=_has_module("flydsl"),
        has_triton=_has_module("triton"),
        has_emulator=_has_module("kernellib.emulator"),
        system=sys.platform,
        machine=_platform.machine(),
        cpu_name=_cpu_name(),
    )


def _why_not_mi355x(machine: Platform) -> str | None:
    if not machine.gpu:
        return f"no GPU: {machine.gpu_why_not}"
    if machine.hip_version is None:
        return f"the GPU is not AMD's ({machine.gpu_name}); the gfx950 kernel needs an MI355X or MI350X"
    arch = (machine.gcn_arch or "unknown").partition(":")[0]
    if arch != GFX950:
        return f"the GPU is {arch} ({machine.gpu_name}), the kernel is for gfx950; use target 'cuda' (Triton)"
    if not machine.has_flydsl:
        return "package flydsl is not installed; pip install flydsl"
    return None


def _why_not_cuda(machine: Platform) -> str | None:
    if not machine.gpu:
        return f"no GPU: {machine.gpu_why_not}"
    if not machine.has_triton:
        return "package triton is not installed; pip install triton"
    if machine.capability is not None and machine.capability < MIN_NVIDIA_CAPABILITY:
        got = ".".join(map(str, machine.capability))
        return f"{machine.gpu_name} has compute capability {got}, the Triton kernels need 8.0 or newer"
    return None


def _why_not_emulator(machine: Platform) -> str | None:
    if not machine.has_emulator:
        return "kernellib.emulator is missing from this installation; reinstall kernellib"
    if not machine.has_flydsl:
        return "package flydsl is not installed, so there is no compiler for gfx950; pip install flydsl"
    if not machine.system.startswith("linux"):
        return f"flydsl runs on Linux only, this is {machine.system}"
    return None


def describe(machine: Platform) -> dict[str, TargetInfo]:
    """The four targets for a given platform, in the order of ``TARGETS``; a pure function."""

    def info(name: str, why_not: str | None, on_gpu: bool) -> TargetInfo:
        return TargetInfo(
            name=name,
            available=why_not is None,
            why_not=why_not,
            device_name=machine.gpu_name if on_gpu and machine.gpu else machine.cpu_name,
            torch_device="cuda" if on_gpu else "cpu",
            times="measured" if on_gpu and why_not is None else "none",
        )

    return {
        "mi355x": info("mi355x", _why_not_mi355x(machine), True),
        "cuda": info("cuda", _why_not_cuda(machine), True),
        "emulator": info("emulator", _why_not_emulator(machine), False),
        "reference": info("reference", None, machine.gpu),
    }


def detect() -> dict[str, TargetInfo]:
    """Looks at this machine now.

    Returns:
        one ``TargetInfo`` for each name in ``TARGETS``, available or with its reason.
    """
    return describe(probe())


def choose(name: str, targets: Mapping[str, TargetInfo]) -> TargetInfo:
    """Picks ``name`` (or for "auto" the first available of ``AUTO_ORDER``) from ``targets``.

    Raises:
        TargetUnavailableError: the name is unknown, or the target is not available; the text
            gives each reason.
    """
    if name == "auto":
        for candidate in AUTO_ORDER:
            if targets[candidate].available:
                return targets[candidate]
        reasons = "; ".join(f"{candidate}: {targets[candidate].why_not}" for candidate in AUTO_ORDER)
        raise TargetUnavailableError(f"target 'auto' found nothing to run on ({reasons})")
    if name not in targets:
        raise TargetUnavailableError(f"target got {name!r}, wanted 'auto' or one of {', '.join(TARGETS)}")
    if not targets[name].available:
        raise TargetUnavailableError(f"target {name!r} is not available here: {targets[name].why_not}")
    return targets[name]


def resolve(name: str = "auto") -> TargetInfo:
    """The target ``name`` on this machine; see ``choose`` for "auto" and the errors."""
    return choose(name, detect())


def execution_scope(name: str) -> AbstractContextManager[Any]:
    """The context a launch on target ``name`` must run in.

    For "emulator" that is ``kernellib.emulator.emulated()``, unless a session is active already
    (then the launch joins it). Compiler and session are process-wide, so threads that launch without a
    session of the caller's take turns; a session that the caller opened must outlive the threads that
    launch in it. The emulator is imported here by name, at the moment of use, so that operators never
    depend on it. Every other target needs no context.

    Raises:
        TargetUnavailableError: ``name`` is no target.
    """
    if name not in TARGETS:
        raise TargetUnavailableError(f"target got {name!r}, wanted one of {', '.join(TARGETS)}")
    if name != "emulator":
        return nullcontext()
    return _emulator_scope()


_one_at_a_time = threading.RLock()


@contextmanager
def _emulator_scope() -> Iterator[None]:
    emulator = importlib.import_module("kernellib.emulator")
    with _one_at_a_time:
        if emulator.active_session() is None:
            with emulator.emulated():
                yield
            return
    # Without the lock: ranks of a World launch side by side in the caller's session, and wait for each other.
    yield
