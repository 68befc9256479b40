# SPDX-License-Identifier: Apache-2.0
"""Who last wrote and who last read each granule of some memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_FIELDS = ("thread", "clock", "site", "level")


@dataclass
class Stamp:
    """The last access of each granule: thread (0: none), its clock, the place in the code, its scope."""

    thread: Array
    clock: Array
    site: Array
    level: Array

    @classmethod
    def blank(cls, count: int) -> Stamp:
        """No access yet (zeros that cost nothing until they are written)."""
        thread, clock, site = (np.zeros(count, np.int32) for _ in range(3))
        return cls(thread, clock, site, np.zeros(count, np.uint8))

    def put(self, index: Array, thread: Array, clock: Array, site: int, level: int) -> None:
        """Enter accesses; of several to one granule, the last stays."""
        self.thread[index] = thread
        self.clock[index] = clock
        self.site[index] = site
        self.level[index] = level

    def clear(self, index: Array) -> None:
        """Forget the accesses of some granules."""
        self.thread[index] = 0

    def repeat(self) -> Stamp:
        """The same for granules of half the size."""
        return Stamp(*(np.repeat(getattr(self, name), 2) for name in _FIELDS))


class Shadow:
    """Last write and last read per granule of `size` bytes of memory.

    The granule starts at 16 bytes and shrinks to what the accesses need.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.granule = 16
        self.write = Stamp.blank(-(-size // 16))
        self.read = Stamp.blank(-(-size // 16))

    def index(self, offsets: Array, size: int) -> Array:
        """Granules [k, m] of accesses of `size` bytes at byte offsets [k]."""
        bits = int(np.bitwise_or.reduce(offsets)) | size
        while bits & (self.granule - 1):
            self.granule //= 2
            self.write, self.read = self.write.repeat(), self.read.repeat()
        first: Array = offsets // self.granule
        count = size // self.granule
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)
