# SPDX-License-Identifier: Apache-2.0
"""LDS stores that happen later than they were issued.

The LDS serves the waves of a workgroup from several queues: operations of one wave keep their order, those of
different waves do not (LLVM AMDGPU guide, memory model gfx942).  So a store may come after what another wave
does next, until `s_waitcnt lgkmcnt` covers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.binding.addresses import scatter

if TYPE_CHECKING:
    from kernellib.emulator.binding.addresses import ByteStore
    from kernellib.emulator.relaxed.chip import Chip

Array = np.ndarray[Any, Any]


class LdsDelay:
    """Stores of a cohort that have not reached the LDS: (wave, its count, byte, item), one per lane."""

    def __init__(self, chip: Chip, lds: ByteStore, num_waves: int) -> None:
        self.chip = chip
        self.lds = lds
        self.issued = np.zeros(num_waves, np.int64)
        self.stores: list[tuple[Array, Array, Array, Array]] = []

    def count(self, waves: Array) -> None:
        """An operation of the LDS counter has been issued."""
        self.issued[waves] += 1

    def store(self, waves: Array, place: Array, items: Array) -> None:
        """Store items, now or later; `waves` of the cohort, one per item."""
        late = self.chip.temper.late
        if late and self.chip.rng.random() < late:
            self.stores.append((waves, self.issued[waves], place, np.array(items)))
        else:
            self.flush(waves)
            scatter(self.lds, place, items)

    def flush(self, waves: Array) -> None:
        """Do what some waves have put off."""
        if self.stores:
            mine = self._flags(waves)
            self._do(lambda wave, number: mine[wave])

    def finish(self) -> None:
        """Do everything that has been put off."""
        self._do(lambda wave, number: np.ones(len(wave), np.bool_))

    def wait(self, waves: Array, newest: int) -> None:
        """s_waitcnt lgkmcnt(N): do all but the N newest operations of some waves."""
        if self.stores:
            limit = self.issued - newest
            mine = self._flags(waves)
            self._do(lambda wave, number: mine[wave] & (number <= limit[wave]))

    def tick(self) -> None:
        """Some waves' stores happen although nobody waits for them."""
        if self.stores and self.chip.rng.random() < self.chip.temper.drain:
            present = np.unique(np.concatenate([wave for wave, *_ in self.stores]))
            self.flush(present[self.chip.rng.random(len(present)) < 0.5])

    def _flags(self, waves: Array) -> Array:
        flags = np.zeros(len(self.issued), np.bool_)
        flags[waves] = True
        return flags

    def _do(self, ready: Any) -> None:
        left = []
        for wave, number, place, items in self.stores:
            now = ready(wave, number)
            if now.any():
                scatter(self.lds, place[now], np.ascontiguousarray(items[now]))
            if not now.all():
                keep = ~now
                left.append((wave[keep], number[keep], place[keep], items[keep]))
        self.stores = left
