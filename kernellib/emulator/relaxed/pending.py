# SPDX-License-Identifier: Apache-2.0
"""What waves have issued and not waited for: stores on their way, write-backs, operations put off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.relaxed.chip import CUS_PER_XCD

if TYPE_CHECKING:
    from kernellib.emulator.binding.movers import RegisterMover
    from kernellib.emulator.memory import Allocation
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]


@dataclass
class Stores:
    """Lines that waves have stored to: one element per (wave, line), in no order."""

    wave: Array
    sequence: Array  # the wave's count of vector memory operations when the store was issued
    cu: Array
    line: Array

    def perform(self, chip: Any, which: Array) -> None:
        """Drain the L1 lines of the elements where `which`."""
        slot, hit = chip.l1.find(self.cu[which], self.line[which])
        slot = slot[hit & chip.l1.has_dirty[slot]]
        if len(slot):
            chip.drain(np.unique(slot))

    def keep(self, which: Array) -> bool:
        """Forget the other elements; False when none is left."""
        self.wave, self.sequence = self.wave[which], self.sequence[which]
        self.cu, self.line = self.cu[which], self.line[which]
        return bool(len(self.wave))


@dataclass
class WriteBack:
    """buffer_wbl2: done when a wait covers it, after the wave's earlier stores."""

    wave: Array
    sequence: Array
    cu: Array
    level: int
    done: Callable[[Array], None] | None = None  # told which waves

    def perform(self, chip: Any, which: Array) -> None:
        """Write the L2 of the waves where `which` back."""
        chip.write_back(self.cu[which] // CUS_PER_XCD, self.level)
        if self.done is not None:
            self.done(self.wave[which])

    def keep(self, which: Array) -> bool:
        """Forget the other elements; False when none is left."""
        self.wave, self.sequence, self.cu = self.wave[which], self.sequence[which], self.cu[which]
        return bool(len(self.wave))


@dataclass(eq=False)
class Loads:
    """A load that takes its values later than it was issued: one element per lane."""

    wave: Array
    sequence: Array
    lanes: Array
    cu: Array
    allocation: Allocation
    offsets: Array
    size: int
    level: int
    mover: RegisterMover
    mask: int  # registers (waits.py) that it writes

    @property
    def span(self) -> tuple[int, int]:
        """Lowest address, and the one past the highest."""
        base = self.allocation.base
        return base + int(self.offsets.min()), base + int(self.offsets.max()) + self.size

    def perform(self, chip: Any, which: Array, g: WaveGroup) -> None:
        """Read memory and write the registers of the elements where `which`, whose waves are in `g`."""
        offsets, cu = self.offsets[which], self.cu[which]
        piece = self.mover.piece
        items = [
            chip.load(self.allocation, offsets + shift, piece, cu, self.level)
            for shift in range(0, self.size, piece)
        ]
        self.mover.write(g, items, np.searchsorted(g.waves, self.wave[which]), self.lanes[which])

    def keep(self, which: Array) -> bool:
        """Forget the other elements; False when none is left."""
        self.wave, self.sequence, self.lanes = self.wave[which], self.sequence[which], self.lanes[which]
        self.cu, self.offsets = self.cu[which], self.offsets[which]
        return bool(len(self.wave))


class VectorQueue:
    """Vector memory operations of a cohort's waves that no wait has covered yet, in order of issue."""

    def __init__(self, chip: Any, num_waves: int) -> None:
        self.chip = chip  # a Chip or a DirectChip
        self.issued = np.zeros(num_waves, np.int64)
        self.covered = np.zeros(num_waves, np.int64)
        self.records: list[Stores | WriteBack] = []
        self.loads: list[Loads] = []

    def put_off(self, load: Loads) -> None:
        """Let a load wait for the values that memory will have later."""
        load.sequence = self.issued[load.wave]
        self.loads.append(load)

    def late(self) -> bool:
        """Whether the next load is put off."""
        chip = self.chip
        return not chip.direct and chip.temper.late > 0 and bool(chip.rng.random() < chip.temper.late)

    def before(self, g: WaveGroup, address: Array, size: int, mask: int = 0) -> None:
        """A group is about to access memory, or to load into registers of `mask`: what it has put off and
        touches the same is done first, as a wave's accesses to one address keep their order.
        """
        low, high = int(address.min()), int(address.max()) + size
        for load in list(self.loads):
            first, last = load.span
            if (first < high and low < last) or load.mask & mask:
                self._load(load, self._flags(g.waves)[load.wave], g)

    def catch_up(self, g: WaveGroup) -> None:
        """Do everything that a group has put off."""
        for load in list(self.loads):
            self._load(load, self._flags(g.waves)[load.wave], g)

    def _flags(self, waves: Array) -> Array:
        """bool per wave of the cohort: whether it is among `waves`."""
        flags = np.zeros(len(self.issued), np.bool_)
        flags[waves] = True
        return flags

    def _load(self, load: Loads, which: Array, g: WaveGroup) -> None:
        if which.any():
            load.perform(self.chip, which, g)
            if which.all() or not load.keep(~which):
                self.loads.remove(load)

    def add_stores(self, waves: Array, cu: Array, lines: Array) -> None:
        """Enter stores of `waves` (one element per lane) to `lines`; some are performed at once."""
        chip = self.chip
        if chip.direct:
            return
        count = int(lines.max()) + 1
        pairs, first = np.unique(waves * count + lines, return_index=True)
        del pairs
        wave = waves[first]
        record = Stores(wave, self.issued[wave], cu[first], lines[first])
        temper, rng = chip.temper, chip.rng
        if temper.early:
            early = rng.random(len(wave)) < temper.early
            if early.any():
                record.perform(chip, early)
                if not record.keep(~early):
                    return
        self.records.append(record)

    def wait(self, g: WaveGroup, newest: int) -> None:
        """Perform all but the `newest` operations of each wave of a group."""
        covered, waves = self.covered, g.waves
        covered[waves] = np.maximum(covered[waves], self.issued[waves] - newest)
        for load in list(self.loads):
            self._load(load, self._flags(waves)[load.wave] & (load.sequence <= covered[load.wave]), g)
        self._perform(lambda record: record.sequence <= covered[record.wave])

    def finish(self) -> None:
        """Perform everything (the kernel is over)."""
        self.covered[:] = self.issued
        self._perform(lambda record: np.ones(len(record.wave), np.bool_))

    def _perform(self, ready: Any) -> None:
        if not self.records:
            return
        left = []
        for record in self.records:
            which = ready(record)
            if not which.any():
                left.append(record)
                continue
            record.perform(self.chip, which)
            if not which.all() and record.keep(~which):
                left.append(record)
        self.records = left

    def tick(self) -> None:
        """Some stores are performed although nobody waits for them."""
        if not self.records:
            return
        assert not self.chip.direct
        drain, rng = self.chip.temper.drain, self.chip.rng
        left = []
        for record in self.records:
            if isinstance(record, Stores):
                now = rng.random(len(record.wave)) < drain
                if now.any():
                    record.perform(self.chip, now)
                    if not record.keep(~now):
                        continue
            left.append(record)
        self.records = left


__all__ = ["Loads", "Stores", "VectorQueue", "WriteBack"]
