# SPDX-License-Identifier: Apache-2.0
"""Direct-mapped tables of cache lines with a state per byte, for many caches of one level at a time.

A byte of a line is absent, clean (a copy that may be stale) or dirty (written here, not yet below).  All
operations take arrays: one element per access or per line, of any of the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.memory import ITEM_CODES

Array = np.ndarray[Any, Any]
LINE = 128  # bytes; CDNA3 and CDNA4: a line of the vector cache and of the L2
_REPEAT = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class LineTable:
    """`caches` caches of `sets` lines each.

    Arrays, by slot (cache * sets + line % sets): `tags` line number + 1, `has_dirty`, `has_clean`; by byte
    (slot * LINE + offset): `bytes` the data, `valid` 0 or 255, `level` 0 for clean bytes, else how far down a
    dirty byte goes when it leaves: a set of bits (chip.py).
    """

    def __init__(self, caches: int, sets: int) -> None:
        self.sets = sets
        slots = caches * sets
        # zeros, which the operating system hands out when they are first touched
        self.tags = np.zeros(slots, np.int64)
        self.has_dirty = np.zeros(slots, np.bool_)
        self.has_clean = np.zeros(slots, np.bool_)
        self.bytes = np.zeros(slots * LINE, np.uint8)
        self.valid = np.zeros(slots * LINE, np.uint8)
        self.level = np.zeros(slots * LINE, np.uint8)
        self.rows = self.bytes.reshape(slots, LINE)
        self.valid_rows = self.valid.reshape(slots, LINE)
        self.level_rows = self.level.reshape(slots, LINE)
        self.writes = 0
        self._views: dict[tuple[int, int], Array] = {}

    def view(self, itemsize: int, phase: int) -> Array:
        """The data as items (what `gather`, `scatter` and `combine_atomic` need)."""
        found = self._views.get((itemsize, phase))
        if found is None:
            count = (len(self.bytes) - phase) // itemsize
            found = self.bytes[phase : phase + count * itemsize].view(ITEM_CODES[itemsize])
            self._views[itemsize, phase] = found
        return found

    def slots(self, cache: Array | int, line: Array) -> Array:
        """Where a line of a cache would lie."""
        place: Array = cache * self.sets + (line & (self.sets - 1))
        return place

    def find(self, cache: Array | int, line: Array) -> tuple[Array, Array]:
        """(slots, whether the line is there)."""
        slot = self.slots(cache, line)
        return slot, self.tags[slot] == line + 1

    def span(self, cache: int) -> slice:
        """Slots of one cache."""
        return slice(cache * self.sets, (cache + 1) * self.sets)

    # ------------------------------------------------------------------ reading
    def overlay(self, items: Array, cache: Array, line: Array, offset: Array) -> None:
        """Replace, in place, those bytes of `items` that this table holds.

        `items` [k] of an unsigned type of 1 to 8 bytes, each inside one line at a multiple of its size.
        """
        slot, hit = self.find(cache, line)
        if not hit.any():
            return
        which = np.nonzero(hit)[0]
        size = items.dtype.itemsize
        index = (slot[which] * LINE + offset[which]) // size
        code = items.dtype
        mask = self.valid.view(code)[index]
        if not mask.any():
            return
        items[which] = (items[which] & ~mask) | (self.view(size, 0)[index] & mask)

    # ------------------------------------------------------------------ writing
    def write(
        self,
        cache: Array,
        line: Array,
        offset: Array,
        items: Array,
        level: int,
        evict: Callable[[Array], None],
    ) -> None:
        """Put dirty items of 1 to 8 bytes in; of several to one address, the last stays.

        Lines in the way are evicted first: `evict(slots)` moves their dirty bytes away.
        """
        self.writes += 1
        size = items.dtype.itemsize
        while True:
            slot = self.slots(cache, line)
            self._claim_for(slot, line, evict)
            ours = self.tags[slot] == line + 1
            everything = bool(ours.all())
            kept = slice(None) if everything else np.nonzero(ours)[0]
            place = slot[kept]
            index = (place * LINE + offset[kept]) // size
            self.view(size, 0)[index] = items[kept]
            self.valid.view(items.dtype)[index] = np.iinfo(items.dtype).max
            # levels are nested bit sets: the deepest of several wins
            self.level.view(items.dtype)[index] |= items.dtype.type(level * _REPEAT[size])
            self.has_dirty[place] = True
            if everything:
                return
            rest = np.nonzero(~ours)[0]
            cache, line, offset, items = cache[rest], line[rest], offset[rest], items[rest]

    def _claim_for(self, slot: Array, line: Array, evict: Callable[[Array], None]) -> None:
        """Give slots that hold another line to the first line that wants each."""
        miss = self.tags[slot] != line + 1
        if not miss.any():
            return
        wanted, first = np.unique(slot[miss], return_index=True)
        dirty = wanted[self.has_dirty[wanted]]
        if len(dirty):
            evict(dirty)
        self.drop(wanted)
        self.tags[wanted] = line[miss][first] + 1

    def drop(self, slots: Array) -> None:
        """Forget lines, dirty bytes included."""
        self.tags[slots] = 0
        self.valid_rows[slots] = 0
        self.level_rows[slots] = 0
        self.has_dirty[slots] = False
        self.has_clean[slots] = False

    def merge(
        self,
        cache: Array,
        line: Array,
        data: Array,
        mask: Array,
        level: Array,
        evict: Callable[[Array], None],
    ) -> None:
        """Put whole rows [m, LINE] in where `mask` [m, LINE] says so, with `level` per byte."""
        self.writes += 1
        todo = np.arange(len(line))
        while len(todo):
            slot = self.slots(cache[todo], line[todo])
            _, first = np.unique(slot, return_index=True)  # one line per slot at a time, in order
            now = todo[first]
            slot = slot[first]
            self._claim_for(slot, line[now], evict)
            keep = mask[now]
            self.rows[slot] = np.where(keep, data[now], self.rows[slot])
            self.valid_rows[slot] |= (keep * np.uint8(255)).astype(np.uint8)
            self.level_rows[slot] = np.where(keep, level[now], self.level_rows[slot])
            self.has_dirty[slot] = self.level_rows[slot].any(axis=1)
            self.has_clean[slot] = True
            todo = np.delete(todo, first)

    def fill(self, cache: Array | int, line: Array, data: Array, mask: Array) -> None:
        """Put clean bytes in where nothing is in the way and nothing is known yet; lines are distinct."""
        slot = self.slots(cache, line)
        free = (self.tags[slot] == 0) | (self.tags[slot] == line + 1)
        _, first = np.unique(slot, return_index=True)
        chosen = first[free[first]]
        if not len(chosen):
            return
        slot = slot[chosen]
        new = mask[chosen] & (self.valid_rows[slot] == 0)
        self.tags[slot] = line[chosen] + 1
        self.rows[slot] = np.where(new, data[chosen], self.rows[slot])
        self.valid_rows[slot] |= (new * np.uint8(255)).astype(np.uint8)
        self.has_clean[slot] = True

    # ------------------------------------------------------------------ taking out
    def take(self, slots: Array) -> tuple[Array, Array, Array]:
        """(lines, data rows, levels) of slots, whose dirty bytes become clean."""
        level = self.level_rows[slots]
        self.level_rows[slots] = 0
        self.has_dirty[slots] = False
        self.has_clean[slots] = True
        return self.tags[slots] - 1, self.rows[slots], level

    def dirty_slots(self, cache: int) -> Array:
        """Slots of a cache that hold dirty bytes."""
        return np.nonzero(self.has_dirty[self.span(cache)])[0] + cache * self.sets

    def invalidate(self, cache: int) -> None:
        """Forget the clean bytes of a cache."""
        slots = np.nonzero(self.has_clean[self.span(cache)])[0] + cache * self.sets
        if len(slots):
            self.forget_clean(slots)

    def forget_clean(self, slots: Array) -> None:
        """Forget the clean bytes of some lines."""
        self.valid_rows[slots] = ((self.level_rows[slots] > 0) * np.uint8(255)).astype(np.uint8)
        self.has_clean[slots] = False
        self.tags[slots] = np.where(self.has_dirty[slots], self.tags[slots], 0)

    def missing(self, cache: Array | int, line: Array) -> Array:
        """bool [m, LINE]: bytes of the lines that the cache does not hold."""
        slot, hit = self.find(cache, line)
        absent: Array = self.valid_rows[slot] == 0
        absent[~hit] = True
        return absent
