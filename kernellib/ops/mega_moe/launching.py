# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled once for each variant and target, and launched on this rank's stream."""

from __future__ import annotations

import importlib
import linecache
import sys
import threading
from collections.abc import Callable
from typing import Any

import flydsl.expr as fx
import torch
from flydsl.compiler.jit_function import _build_call_state

# By launcher, not by the kernel's name: a reloaded module's launcher is another, and compiles again.
_compiled: dict[tuple[Any, str], Callable[[tuple[Any, ...]], Any]] = {}
_lock = threading.Lock()


def launch(
    target: str, build: Callable[[Any], Any], stage: Any, arguments: tuple[Any, ...], device: torch.device
) -> None:
    """Launches a kernel on the device's current stream; the first time it is traced and compiled.

    Args:
        target: "mi355x" or "emulator"; compiled kernels are not shared between them.
        build: a cached function from ``stage`` to the FlyDSL launcher, whose last parameter is the stream.
        stage: everything known at compile time.
        arguments: of the launcher, but for the stream.
        device: of the tensors.
    """
    if device.type != "cuda":
        _call(target, build, stage, (*arguments, fx.Stream(None)))
        return
    with torch.cuda.device(device):
        stream = fx.Stream(torch.cuda.current_stream().cuda_stream)
        _call(target, build, stage, (*arguments, stream))


def _call(target: str, build: Callable[[Any], Any], stage: Any, arguments: tuple[Any, ...]) -> None:
    with _lock:  # emulated ranks are threads: one of them builds and compiles
        launcher = build(stage)
        run = _compiled.get((launcher, target))
        if run is None:
            run = _compiled[launcher, target] = _compile(launcher, arguments)
    run(arguments)  # outside the lock: on the emulator it returns only when the other ranks launch, too


def _compile(launcher: Any, arguments: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """``flyc.compile`` without the launch that it makes: that would wait for ranks that wait for the lock."""
    launcher._compile_only(*arguments)
    _, artifact = launcher._last_compiled
    state: Callable[[tuple[Any, ...]], Any] = _build_call_state(launcher._sig, arguments, artifact)
    return state


# In the order of their imports.
KERNEL_MODULES = ("device", "gemm", "dispatch", "quantize", "gemm1", "gemm2", "combine", "stage1", "stage2")


def reload_kernels() -> None:
    """Takes kernels from their edited sources: the next launch traces and compiles them anew.

    Call it after editing a ``*_gfx950.py`` of this folder, helpers included, in a running process; layers
    that exist already use the new kernels, too. Shapes, configurations and layouts are not reloaded.
    """
    linecache.checkcache()  # the compiler reads functions' sources
    with _lock:
        for name in KERNEL_MODULES:
            module = sys.modules.get(f"{__package__}.{name}_gfx950")
            if module is not None:
                importlib.reload(module)
        _compiled.clear()
