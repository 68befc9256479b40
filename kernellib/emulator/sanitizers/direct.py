# SPDX-License-Identifier: Apache-2.0
"""A chip without caches: what sanitizers put under a launch in simple mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.binding.addresses import gather, scatter
from kernellib.emulator.binding.movers import combine_atomic

if TYPE_CHECKING:
    from kernellib.emulator.instructions.registry import MemoryDef
    from kernellib.emulator.memory import Allocation

Array = np.ndarray[Any, Any]


class DirectChip:
    """The interface of relaxed.chip.Chip, with every store visible at once."""

    direct = True

    def load(
        self, allocation: Allocation, offsets: Array, size: int, cu: Array, level: int, scalar: bool = False
    ) -> Array:
        """Items of `size` bytes at byte offsets."""
        return gather(allocation, offsets, size)

    def store(self, allocation: Allocation, offsets: Array, items: Array, cu: Array, level: int) -> Array:
        """Put items at byte offsets."""
        scatter(allocation, offsets, items)
        return offsets

    def atomic(
        self,
        definition: MemoryDef,
        allocation: Allocation,
        offsets: Array,
        operands: list[Array],
        cu: Array,
        level: int,
    ) -> Array:
        """Apply an atomic; returns the values before."""
        return combine_atomic(definition, allocation, offsets, operands)

    def write_back(self, xcds: Array, level: int) -> None:
        """There is nothing to write back."""

    def invalidate(self, cus: Array, level: int) -> None:
        """There is nothing to forget."""

    def begin(self, rank: int) -> None:
        """A kernel starts."""

    def end(self, rank: int) -> None:
        """A kernel has ended."""
