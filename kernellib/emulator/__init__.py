# SPDX-License-Identifier: Apache-2.0
"""A gfx950 (MI355X) emulator: executes the assembly text that FlyDSL or Triton emit, on numpy.

    with kernellib.emulator.emulated() as session:
        launcher(x, weights, out, n)          # any @flyc.jit launcher, CPU tensors or raw addresses
    print(session.launches[-1].bytes_by_space)

Timing is not emulated: reports hold counts, no durations of the chip.
"""

from __future__ import annotations

from typing import Any

from kernellib.emulator.errors import (
    AssemblySyntaxError,
    BarrierDivergenceError,
    CompilerBackendError,
    DeadlockError,
    EmulatorError,
    Finding,
    GlobalRaceError,
    InstructionLimitError,
    LaunchArgumentError,
    LdsRaceError,
    MisalignedAccessError,
    MissingNopError,
    MissingWaitError,
    OutOfBoundsError,
    PoisonedMemoryError,
    SessionError,
    TrapError,
    UninitialisedLdsError,
    UninitialisedRegisterError,
    UnknownInstructionError,
    UnsupportedModeError,
    UnsupportedOperandError,
    UseAfterFreeError,
)

_LAZY = {
    "KernelResources": "resources",
    "LaunchReport": "report",
    "Program": "assembly",
    "Rank": "world",
    "Session": "session",
    "SnippetResult": "snippet",
    "Tuning": "launch",
    "World": "world",
    "active_session": "session",
    "compile_to_assembly": "flydsl_backend",
    "emulated": "session",
    "kernel_resources": "resources",
    "parse": "assembly",
    "run_assembly": "launch",
    "run_snippet": "snippet",
}


def __getattr__(name: str) -> Any:
    # numpy-heavy modules load on first use, so that importing the package for its error types stays cheap
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


__all__ = [  # noqa: RUF022 (error types first; the rest is loaded by __getattr__)
    "AssemblySyntaxError",
    "BarrierDivergenceError",
    "CompilerBackendError",
    "DeadlockError",
    "EmulatorError",
    "Finding",
    "GlobalRaceError",
    "InstructionLimitError",
    "LaunchArgumentError",
    "LdsRaceError",
    "MisalignedAccessError",
    "MissingNopError",
    "MissingWaitError",
    "OutOfBoundsError",
    "PoisonedMemoryError",
    "SessionError",
    "TrapError",
    "UninitialisedLdsError",
    "UninitialisedRegisterError",
    "UnknownInstructionError",
    "UnsupportedModeError",
    "UnsupportedOperandError",
    "UseAfterFreeError",
    "KernelResources",
    "LaunchReport",
    "Program",
    "Rank",
    "Session",
    "SnippetResult",
    "Tuning",
    "World",
    "active_session",
    "compile_to_assembly",
    "emulated",
    "kernel_resources",
    "parse",
    "run_assembly",
    "run_snippet",
]
