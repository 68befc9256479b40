# SPDX-License-Identifier: Apache-2.0
"""Registers of the waves that advance together, as numpy arrays.

A `Cohort` (scheduler.py) owns one `RegisterFile` for all its waves.  A `WaveGroup` is the part of a cohort
whose waves are at one program counter: it sees the register file through views (whenever its waves form an
arithmetic progression, which wave-of-workgroup order makes the usual case) or through copies.

Layouts: vector registers `[row, wave, lane]` uint32, where row r is `v r` and, after all VGPRs, the AGPRs;
scalar registers `[wave, 140]` uint32 at their operand encodings (vcc 106, m0 124, exec 126), so that an
aligned pair is one uint64 of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.operands import EXEC, NUM_SGPRS

if TYPE_CHECKING:
    from kernellib.emulator.scheduler import Cohort
    from kernellib.emulator.waits import WaitState

Array = np.ndarray[Any, Any]
NUM_LANES = 64
POISON = (
    0x7FF7BAD1  # signalling NaN as f32, a large odd address as an integer: uninitialised registers stand out
)
ALL_LANES = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class FloatMode:
    """The floating-point part of the MODE register (CDNA ISA, "MODE register").

    `round32`/`round64_16`: 0 nearest even, 1 +inf, 2 -inf, 3 zero.  `denorm32`/`denorm64_16`: bit 0 keep
    denormal sources, bit 1 keep denormal results (3 = IEEE).
    """

    round32: int = 0
    round64_16: int = 0
    denorm32: int = 3
    denorm64_16: int = 3
    dx10_clamp: bool = True
    ieee: bool = True
    fp16_overflow: bool = False

    @property
    def is_plain(self) -> bool:
        """Nearest even, denormals kept: what numpy computes."""
        return self.round32 == self.round64_16 == 0 and self.denorm32 == self.denorm64_16 == 3

    @classmethod
    def from_bits(cls, bits: int) -> FloatMode:
        """Decode MODE bits: 1:0 round32, 3:2 round64_16, 5:4 denorm32, 7:6 denorm64_16, 8 dx10_clamp, 9 ieee,
        23.
        """
        fields = (bits & 3, bits >> 2 & 3, bits >> 4 & 3, bits >> 6 & 3)
        return cls(*fields, bool(bits >> 8 & 1), bool(bits >> 9 & 1), bool(bits >> 23 & 1))

    def to_bits(self) -> int:
        """The inverse of `from_bits`."""
        return (self.round32 | self.round64_16 << 2 | self.denorm32 << 4 | self.denorm64_16 << 6
                | self.dx10_clamp << 8 | self.ieee << 9 | self.fp16_overflow << 23)  # fmt: skip


PLAIN_MODE = FloatMode()


class SlotTable:
    """Interns operand views: a slot number stands for a part of the register file, seen as some dtype."""

    def __init__(self) -> None:
        self.makers: list[Callable[[RegisterFile], Array]] = []
        self._by_key: dict[Any, int] = {}

    def intern(self, key: Any, maker: Callable[[RegisterFile], Array]) -> int:
        """The slot of `key`, made on first use."""
        slot = self._by_key.get(key)
        if slot is None:
            slot = self._by_key[key] = len(self.makers)
            self.makers.append(maker)
        return slot


class ViewCache(dict[int, Array]):
    """slot -> view of one register file, built when first asked for."""

    __slots__ = ("makers", "regs")

    def __init__(self, slots: SlotTable, regs: RegisterFile) -> None:
        super().__init__()
        self.makers = slots.makers
        self.regs = regs

    def __missing__(self, slot: int) -> Array:
        view = self[slot] = self.makers[slot](self.regs)
        return view


class RegisterFile:
    """Vector, scalar and condition registers of some waves, and the operand views of them."""

    __slots__ = ("scalar", "scalar64", "scc", "slots", "vector", "views")

    def __init__(self, slots: SlotTable, vector: Array, scalar: Array, scc: Array) -> None:
        self.slots = slots
        self.vector = vector
        self.scalar = scalar
        self.scalar64 = scalar.view(np.uint64)
        self.scc = scc
        self.views = ViewCache(slots, self)

    @classmethod
    def allocate(cls, slots: SlotTable, num_rows: int, num_waves: int) -> RegisterFile:
        """Poisoned registers; EXEC and everything else are set by the launch."""
        self = cls(
            slots,
            np.empty((max(num_rows, 1), num_waves, NUM_LANES), np.uint32),
            np.empty((num_waves, NUM_SGPRS), np.uint32),
            np.zeros(num_waves, np.bool_),
        )
        self.reset()
        return self

    def reset(self) -> None:
        """Poison every register, clear SCC."""
        self.vector.fill(POISON)
        self.scalar.fill(POISON)
        self.scc.fill(False)

    def subset(self, waves: slice | Array) -> RegisterFile:
        """Registers of some waves: views for a slice, copies for an index array."""
        return RegisterFile(self.slots, self.vector[:, waves], self.scalar[waves], self.scc[waves])


def as_slice(waves: Array) -> slice | Array:
    """A slice that selects the same waves, when they form an arithmetic progression."""
    if len(waves) == 1:
        return slice(int(waves[0]), int(waves[0]) + 1)
    step = int(waves[1] - waves[0])
    if step > 0 and (np.diff(waves) == step).all():
        return slice(int(waves[0]), int(waves[-1]) + 1, step)
    return waves


class WaveGroup:
    """Waves at one program counter.

    `pc` is the instruction being executed (for error messages), `block` the next basic block, `exec` the lane
    mask (None when every lane of every wave is on), `fast` whether plain arithmetic may write registers
    directly (every lane on, plain float mode).
    """

    __slots__ = (
        "block",
        "cohort",
        "copied",
        "exec",
        "fast",
        "issued",
        "lds_base",
        "mode",
        "n",
        "pc",
        "pending",
        "picks",
        "regs",
        "scalar",
        "scalar64",
        "scc",
        "sleeping",
        "state",
        "targets",
        "vector",
        "views",
        "waits",
        "waves",
        "written",
    )  # fmt: skip

    def __init__(self, cohort: Cohort, waves: Array, regs: RegisterFile, copied: bool) -> None:
        self.cohort = cohort
        self.waves = waves
        self.regs = regs
        self.copied = copied
        self.vector = regs.vector
        self.scalar = regs.scalar
        self.scalar64 = regs.scalar64
        self.scc = regs.scc
        self.n = len(waves)
        self.views = regs.views
        self.lds_base: Array = cohort.lds_base[
            waves, None
        ]  # [n, 1]: where in the cohort's LDS each wave's begins
        self.exec: Array | None = None
        self.fast = True
        self.mode = PLAIN_MODE
        self.pc = 0
        self.block = 0
        self.state = "run"
        self.waits: WaitState
        self.pending = 0
        self.issued = 0
        self.targets: tuple[Array, int, int] | None = None
        self.picks = 0
        self.sleeping = False
        self.written = 0  # register bits (waits.py) that sanitizers know to be written

    def refresh_exec(self) -> None:
        """Recompute the boolean lane mask after EXEC was written."""
        bits = self.scalar64[:, EXEC // 2]
        if (bits == ALL_LANES).all():
            self.exec = None
        else:
            self.exec = unpack_mask(self.scalar, EXEC)
        self.fast = self.exec is None and self.mode.is_plain

    def set_mode(self, mode: FloatMode) -> None:
        """Change the floating-point mode of every wave of the group."""
        self.mode = mode
        self.fast = self.exec is None and mode.is_plain

    @property
    def lane_mask(self) -> Array:
        """EXEC as bool [n, 64], also when every lane is on."""
        return self.exec if self.exec is not None else np.ones((self.n, NUM_LANES), np.bool_)


def unpack_mask(scalar: Array, index: int) -> Array:
    """SGPR pair `index` of every wave as bool [n, 64]."""
    raw = scalar.view(np.uint8)[:, 4 * index : 4 * index + 8]
    return np.unpackbits(raw, axis=1, bitorder="little").view(np.bool_)


def pack_mask(mask: Array) -> Array:
    """bool [n, 64] to uint8 [n, 8], lane 0 in bit 0 of byte 0."""
    return np.packbits(mask, axis=1, bitorder="little")


def wave_order(num_workgroups: int, waves_per_workgroup: int) -> tuple[Array, Array]:
    """(workgroup slot, wave in workgroup) of each wave of a cohort.

    Waves are ordered wave-major: "wave k of every workgroup" is contiguous and "all waves of workgroup j" is
    an arithmetic progression, so that the usual divergences (by wave id, by workgroup) split a group into
    views.
    """
    wave_idx, workgroup = np.divmod(np.arange(num_workgroups * waves_per_workgroup), num_workgroups)
    return workgroup, wave_idx


__all__: Sequence[str] = ["FloatMode", "RegisterFile", "SlotTable", "ViewCache", "WaveGroup"]
