# SPDX-License-Identifier: Apache-2.0
"""Every error the emulator raises, each with what it found, where, and what to do about it.

Three families:

* the input is not understood: `AssemblySyntaxError`, `UnknownInstructionError`, `UnsupportedOperandError`,
  `UnsupportedModeError`, `CompilerBackendError`, `LaunchArgumentError`;
* the program broke a rule of the hardware: subclasses of `Finding` (a sanitizer's verdict);
* the program does not end: `DeadlockError`, `InstructionLimitError` (findings as well).
"""

from __future__ import annotations

from dataclasses import dataclass


class EmulatorError(RuntimeError):
    """Base class of everything the emulator raises on purpose."""


class AssemblySyntaxError(EmulatorError):
    """A line of the listing has no known form.  `line_no` counts from 1, `text` is the line."""

    def __init__(self, message: str, line_no: int = 0, text: str = "") -> None:
        where = f"line {line_no}: {text.strip()!r}: " if line_no else ""
        super().__init__(where + message)
        self.line_no = line_no
        self.text = text


class UnknownInstructionError(AssemblySyntaxError):
    """The mnemonic is not in the instruction table."""


class UnsupportedOperandError(AssemblySyntaxError):
    """The mnemonic is known, but an operand, a modifier or their number is not understood for it."""


class UnsupportedModeError(EmulatorError):
    """A floating-point mode (rounding other than nearest-even, ...) that the emulator does not compute in."""


class CompilerBackendError(EmulatorError):
    """LLVM reported an error on file descriptor 2 and the compiler did not raise."""


class LaunchArgumentError(EmulatorError, ValueError):
    """A launch whose grid, block, LDS size or arguments the kernel cannot be started with."""


class SessionError(EmulatorError):
    """The emulator was entered, left or configured in a way that it does not support."""


@dataclass(frozen=True)
class Location:
    """Where a finding happened; fields that are not known are None."""

    kernel: str | None = None
    instruction: str | None = None
    line_no: int | None = None
    source: str | None = None
    workgroup: tuple[int, int, int] | None = None
    wave: int | None = None
    lane: int | None = None
    address: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.instruction is not None:
            parts.append(f"`{self.instruction}`")
        if self.line_no is not None:
            parts.append(f"listing line {self.line_no}")
        if self.source is not None:
            parts.append(f"source {self.source}")
        if self.kernel is not None:
            parts.append(f"kernel {self.kernel}")
        if self.workgroup is not None:
            parts.append(f"workgroup {self.workgroup}")
        if self.wave is not None:
            parts.append(f"wave {self.wave}")
        if self.lane is not None:
            parts.append(f"lane {self.lane}")
        if self.address is not None:
            parts.append(f"address {self.address:#x}")
        return ", ".join(parts)


class Finding(EmulatorError):
    """A rule of the hardware that the running program broke.  `location` says where, `detail` what."""

    def __init__(self, detail: str, location: Location | None = None) -> None:
        self.detail = detail
        self.location = location or Location()
        self.schedule_seed: int | None = None
        super().__init__(f"{detail}\n  at {self.location}" if location else detail)

    def name_seed(self, schedule_seed: int) -> None:
        """Add the seed of the schedule that led here, which reproduces the run."""
        if self.schedule_seed is None:
            self.schedule_seed = schedule_seed
            self.args = (f"{self.args[0]}\n  schedule_seed={schedule_seed}", *self.args[1:])


class OutOfBoundsError(Finding):
    """An access outside every live allocation (global), the LDS or scratch allocation."""


class UseAfterFreeError(OutOfBoundsError):
    """An access inside an allocation that has been freed."""


class MisalignedAccessError(Finding):
    """An address that the instruction's alignment rule forbids."""


class MissingWaitError(Finding):
    """A register (or LDS byte) was touched before a wait covered the operation that writes it."""


class MissingNopError(Finding):
    """Too few wait states between two instructions whose hazard the hardware does not interlock."""


class BarrierDivergenceError(Finding):
    """Waves of a workgroup cannot meet at a barrier (one has ended or waits somewhere else)."""


class UninitialisedRegisterError(Finding):
    """A register that the wave has not written was read."""


class UninitialisedLdsError(Finding):
    """An LDS byte that the workgroup has not written was read."""


class PoisonedMemoryError(Finding):
    """A byte of memory that the session knows to be uninitialised was read."""


class LdsRaceError(Finding):
    """Two waves of a workgroup touch an LDS byte, one writes it, and no barrier orders them."""


class GlobalRaceError(Finding):
    """Two waves touch a byte of global memory, one writes it, and nothing orders them."""


class DeadlockError(Finding):
    """No wave can make progress; `waiting` lists who waits where."""

    def __init__(self, detail: str, location: Location | None = None, waiting: tuple[str, ...] = ()) -> None:
        super().__init__(detail + "".join(f"\n  {w}" for w in waiting), location)
        self.waiting = waiting


class InstructionLimitError(Finding):
    """The launch issued more instructions than the session allows."""


class TrapError(Finding):
    """The program executed `s_trap` (an assertion of the compiled code)."""
