# SPDX-License-Identifier: Apache-2.0
"""What waves have issued and not waited for: stores on their way, write-backs, operations put off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernellib.emulator.relaxed.chip import CUS_PER_XCD

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


class VectorQueue:
    """Vector memory operations of a cohort's waves that no wait has covered yet, in order of issue."""

    def __init__(self, chip: Any, num_waves: int) -> None:
        self.chip = chip  # a Chip or a DirectChip
        self.issued = np.zeros(num_waves, np.int64)
        self.covered = np.zeros(num_waves, np.int64)
        self.records: list[Stores | WriteBack] = []

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

    def wait(self, waves: Array, newest: int) -> None:
        """Perform all but the `newest` operations of each wave."""
        covered = self.covered
        covered[waves] = np.maximum(covered[waves], self.issued[waves] - newest)
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


__all__ = ["Stores", "VectorQueue", "WriteBack"]
