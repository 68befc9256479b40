# SPDX-License-Identifier: Apache-2.0
"""Memory of emulated MI355X chips as the LLVM memory model for gfx942/gfx950 leaves it open.

    registers -> L1 of a compute unit -> L2 of a die (XCD) -> agent (with several ranks) -> memory

A store enters the L1 of its compute unit at once and moves down later: when a wait covers it, when the seed
decides so, at the latest at the end of the kernel.  What is below is found by a load that finds nothing
above.  So dirty bytes of the L1 are stores that have not been performed yet, dirty bytes of the L2 are stores
that other dies do not see, and those of the agent level are stores that other ranks do not see.  Clean bytes
are copies, which may be stale.  They come into being when the bytes below change: some caches are then taken
to have fetched the line just before (any cache may hold any line at any time).  This way loads leave nothing
behind, and memory that nobody writes costs nothing.

Levels of a dirty byte, nested bit sets: L2 (wave and workgroup scope), AGENT (sc1), SYSTEM (sc0 sc1).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.binding.addresses import gather
from kernellib.emulator.binding.movers import combine_atomic
from kernellib.emulator.relaxed.table import LINE, Array, LineTable

if TYPE_CHECKING:
    from kernellib.emulator.instructions.registry import MemoryDef
    from kernellib.emulator.memory import Allocation

L2, AGENT, SYSTEM = 1, 3, 7
NUM_XCDS, CUS_PER_XCD = 8, 32  # CDNA4 white paper: MI355X has 8 dies of 32 compute units each
NUM_CUS = NUM_XCDS * CUS_PER_XCD
L1_SETS, L2_SETS, AGENT_SETS = 256, 4096, 16384


@dataclass
class LineRange:
    """Line numbers of one allocation; `hot[i]`: whether some cache may hold line `first + i`."""

    first: int
    count: int
    hot: Array | None = None


@dataclass(frozen=True)
class Temper:
    """How a seed makes the chip behave: probabilities of its choices."""

    early: float  # a store is performed at once
    drain: float  # a pending line is performed at a tick
    evict: float  # a dirty line of an L2 leaves at a tick
    forget: float  # a clean line leaves at a tick
    stale: float  # caches have copies of lines that are about to change
    late: float  # a load, or an LDS store, is put off until a wait

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Temper:
        """Some patient, some hasty."""
        return cls(
            early=float(rng.choice([0.0, 0.3, 0.7])),
            drain=float(rng.choice([0.02, 0.1, 0.4])),
            evict=float(rng.choice([0.002, 0.02, 0.2])),
            forget=float(rng.choice([0.002, 0.02, 0.2])),
            stale=float(rng.choice([0.5, 0.9, 1.0])),
            late=float(rng.choice([0.0, 0.3, 0.9])),
        )


class Chip:
    """The caches of `num_ranks` chips over host memory.  Compute units are numbered across ranks."""

    direct = False

    def __init__(self, seed: int, num_ranks: int = 1) -> None:
        self.seed = seed
        self.num_ranks = num_ranks
        self.rng = np.random.default_rng([seed, num_ranks])
        self.temper = Temper.draw(self.rng)
        self.l1 = LineTable(num_ranks * NUM_CUS, L1_SETS)
        self.l2 = LineTable(num_ranks * NUM_XCDS, L2_SETS)
        self.agent = LineTable(num_ranks, AGENT_SETS) if num_ranks > 1 else None
        self.residents = np.zeros(num_ranks * NUM_CUS, np.int64)  # workgroups on each compute unit
        self.running = 0  # launches
        self.changes = 0  # grows whenever something becomes visible to someone else
        self._ranges: weakref.WeakKeyDictionary[Allocation, LineRange] = weakref.WeakKeyDictionary()
        self._first: list[int] = []
        self._owners: list[weakref.ref[Allocation]] = []
        self._next_line = 0

    # ------------------------------------------------------------------ lines
    def range_of(self, allocation: Allocation) -> LineRange:
        """Line numbers of an allocation, given out in order of first use (so addresses decide nothing)."""
        found = self._ranges.get(allocation)
        if found is None:
            count = -(-allocation.size // LINE)
            found = self._ranges[allocation] = LineRange(self._next_line, count)
            self._first.append(self._next_line)
            self._owners.append(weakref.ref(allocation))
            self._next_line += count + 1
        return found

    def _by_owner(self, line: Array) -> list[tuple[Allocation, Array, Any]]:
        """(allocation, line within it, which of `line`) for each allocation that lines belong to."""
        owner = np.searchsorted(self._first, line, side="right") - 1
        parts: list[tuple[Allocation, Array, Any]] = []
        low, high = int(owner.min()), int(owner.max())
        for number in range(low, high + 1) if low != high else [low]:
            which: Any = slice(None) if low == high else np.nonzero(owner == number)[0]
            allocation = self._owners[number]()
            if allocation is not None and allocation.alive() and len(line[which]):
                parts.append((allocation, line[which] - self._first[number], which))
        return parts

    def memory_rows(self, line: Array) -> Array:
        """uint8 [m, LINE]: the lines as memory has them (what lies past an allocation's end is undefined)."""
        rows = np.zeros((len(line), LINE), np.uint8)
        for allocation, local, which in self._by_owner(line):
            index = local[:, None] * LINE + np.arange(LINE)
            rows[which] = allocation.bytes[np.minimum(index, allocation.size - 1)]
        return rows

    def _heat(self, line: Array) -> None:
        for allocation, local, _ in self._by_owner(line):
            area = self._ranges[allocation]
            if area.hot is None:
                area.hot = np.zeros(area.count, np.bool_)
            area.hot[local] = True

    # ------------------------------------------------------------------ loads
    def load(
        self, allocation: Allocation, offsets: Array, size: int, cu: Array, level: int, scalar: bool = False
    ) -> Array:
        """Items of `size` bytes at byte offsets (1-D) as each compute unit sees them.

        `level` L2 for plain loads, AGENT for sc1, SYSTEM for sc0 sc1; `scalar`: past the L1, which belongs to
        the vector memory.
        """
        area = self.range_of(allocation)
        hot = area.hot
        if hot is not None:
            local = offsets // LINE
            warm = hot[local]
            if size > 1:
                warm |= hot[np.minimum((offsets + (size - 1)) // LINE, area.count - 1)]
            if warm.any():
                return self._load_hot(allocation, offsets, size, cu, level, scalar, warm)
        return gather(allocation, offsets, size)

    def _load_hot(
        self,
        allocation: Allocation,
        offsets: Array,
        size: int,
        cu: Array,
        level: int,
        scalar: bool,
        warm: Array,
    ) -> Array:
        which = np.nonzero(warm)[0]
        if level > L2:
            self._push(self._lines(allocation, offsets[which], size), cu[which], level)
        items = np.array(gather(allocation, offsets, size))
        unit = min(size, 8)
        if int(np.bitwise_or.reduce(offsets[which])) & (unit - 1):
            unit = 1
        part = items[which] if len(which) < len(items) else items
        pieces = np.ascontiguousarray(part).view(f"u{unit}").reshape(len(which), -1)
        flat = pieces.reshape(-1)
        count = pieces.shape[1]
        at = (offsets[which][:, None] + np.arange(count) * unit).reshape(-1)
        unit_cu = np.repeat(cu[which], count) if count > 1 else cu[which]
        line = self.range_of(allocation).first + at // LINE
        offset = at % LINE
        if self.agent is not None and level != SYSTEM:
            self.agent.overlay(flat, unit_cu // NUM_CUS, line, offset)
        if level == L2:
            self.l2.overlay(flat, unit_cu // CUS_PER_XCD, line, offset)
            if not scalar:
                self.l1.overlay(flat, unit_cu, line, offset)
        items[which] = pieces.reshape(-1).view(items.dtype)
        return items

    def _lines(self, allocation: Allocation, offsets: Array, size: int) -> Array:
        """Line number of the first byte of each item (of two lines, when one item lies across, the second is
        left out: items that synchronise are aligned).
        """
        return self.range_of(allocation).first + offsets // LINE

    def _push(self, line: Array, cu: Array, level: int) -> None:
        """Move what the own caches hold dirty of these lines down to a level."""
        slot, hit = self.l1.find(cu, line)
        dirty = slot[hit & self.l1.has_dirty[slot]]
        if len(dirty):
            self.drain(np.unique(dirty))
        slot, hit = self.l2.find(cu // CUS_PER_XCD, line)
        dirty = slot[hit & self.l2.has_dirty[slot]]
        if len(dirty):
            self.write_back_slots(np.unique(dirty), level)
        if self.agent is not None and level == SYSTEM:
            slot, hit = self.agent.find(cu // NUM_CUS, line)
            dirty = slot[hit & self.agent.has_dirty[slot]]
            if len(dirty):
                self._agent_to_memory(np.unique(dirty))

    # ------------------------------------------------------------------ stores
    def store(self, allocation: Allocation, offsets: Array, items: Array, cu: Array, level: int) -> Array:
        """Put items at byte offsets (1-D, in wave and lane order); returns their line numbers."""
        area = self.range_of(allocation)
        if area.hot is None:
            area.hot = np.zeros(area.count, np.bool_)
        size = items.dtype.itemsize
        unit = min(size, 8)
        if int(np.bitwise_or.reduce(offsets)) & (unit - 1):
            unit = 1
        if unit < size:
            pieces = np.ascontiguousarray(items).view(f"u{unit}").reshape(len(items), -1)
            count = pieces.shape[1]
            at = (offsets[:, None] + np.arange(count) * unit).reshape(-1)
            items, unit_cu = pieces.reshape(-1), np.repeat(cu, count)
        else:
            at, unit_cu = offsets, cu
        local = at // LINE
        area.hot[local] = True
        self.l1.write(unit_cu, area.first + local, at % LINE, items, level, self.drain)
        lines: Array = area.first + offsets // LINE
        return lines

    def atomic(
        self,
        definition: MemoryDef,
        allocation: Allocation,
        offsets: Array,
        operands: list[Array],
        cu: Array,
        level: int,
    ) -> Array:
        """Apply an atomic at the coherence point of its scope; returns the values before."""
        line = self._lines(allocation, offsets, 1)
        area = self.range_of(allocation)
        if area.hot is not None and area.hot[offsets // LINE].any():
            self._push(line, cu, level)
        self.changes += 1
        if self.agent is not None and level != SYSTEM:
            old = self._agent_atomic(definition, offsets, operands, cu, line)
        else:
            unique = np.unique(line)
            touched = np.zeros((len(unique), LINE), np.bool_)
            row = np.searchsorted(unique, line)
            touched[row[:, None], (offsets % LINE)[:, None] + np.arange(definition.bytes_per_lane)] = True
            self._age(unique, touched, cu)
            old = combine_atomic(definition, allocation, offsets, operands)
        if area.hot is not None:  # the L1 is bypassed, so that the own copies must go
            self._forget_own(line, cu)
        return old

    def _agent_atomic(
        self, definition: MemoryDef, offsets: Array, operands: list[Array], cu: Array, line: Array
    ) -> Array:
        """An agent-scope atomic among several ranks: in the agent level, one line at a time."""
        assert self.agent is not None
        size = definition.bytes_per_lane
        old = np.zeros(len(line), f"u{size}")
        rank = cu // NUM_CUS
        for one in np.unique(line):
            which = np.nonzero(line == one)[0]
            owner, number = rank[which][:1], np.array([one])
            self._heat(number)
            rows = self.memory_rows(number)
            absent = self.agent.missing(owner, number)
            nothing = np.zeros((1, LINE), np.uint8)
            self.agent.merge(owner, number, rows, absent, nothing, self._agent_to_memory)
            slot = self.agent.slots(owner, number)
            place = slot[0] * LINE + offsets[which] % LINE
            old[which] = combine_atomic(definition, self.agent, place, [o[which] for o in operands])
            for byte in range(size):
                self.agent.level[place + byte] |= AGENT
            self.agent.has_dirty[slot] = True
        return old

    def _forget_own(self, line: Array, cu: Array) -> None:
        for table, cache in ((self.l1, cu), (self.l2, cu // CUS_PER_XCD)):
            slot, hit = table.find(cache, line)
            if hit.any():
                table.forget_clean(np.unique(slot[hit]))

    # ------------------------------------------------------------------ moving down
    def drain(self, slots: Array) -> None:
        """Perform the pending stores of L1 lines."""
        cu = slots // L1_SETS
        line, data, level = self.l1.take(slots)
        mask = level > 0
        xcd = cu // CUS_PER_XCD
        self._age_l1(line, mask, cu)
        self.l2.merge(xcd, line, data, mask, np.where(level == L2, L2, 0).astype(np.uint8), self.evict_l2)
        self.changes += 1
        deep = level > L2
        if deep.any():
            rows = np.nonzero(deep.any(axis=1))[0]
            self._to_agent(line[rows], data[rows], deep[rows], level[rows], cu[rows])

    def write_back_slots(self, slots: Array, level: int) -> None:
        """Make dirty lines of L2 caches visible at a level."""
        xcd = slots // L2_SETS
        line, data, dirty = self.l2.take(slots)
        levels = np.where(dirty > 0, level, 0).astype(np.uint8)
        self._to_agent(line, data, dirty > 0, levels, xcd * CUS_PER_XCD)

    def evict_l2(self, slots: Array) -> None:
        """Lines of an L2 make room."""
        self.write_back_slots(slots, AGENT)

    def _to_agent(self, line: Array, data: Array, mask: Array, level: Array, cu: Array) -> None:
        """Bytes leave L2 caches."""
        if self.agent is not None:
            stays = np.where(mask & (level == AGENT), AGENT, 0).astype(np.uint8)
            self._age_agent(line, mask, cu)
            self.agent.merge(cu // NUM_CUS, line, data, mask, stays, self._agent_to_memory)
            mask = mask & (level == SYSTEM)
            rows = np.nonzero(mask.any(axis=1))[0]
            if not len(rows):
                return
            line, data, mask, cu = line[rows], data[rows], mask[rows], cu[rows]
        self._to_memory(line, data, mask, cu)

    def _agent_to_memory(self, slots: Array) -> None:
        assert self.agent is not None
        line, data, level = self.agent.take(slots)
        self._to_memory(line, data, level > 0, slots // AGENT_SETS * NUM_CUS)

    def _to_memory(self, line: Array, data: Array, mask: Array, cu: Array) -> None:
        self.changes += 1
        if len(np.unique(line)) == len(line):
            self._age(line, mask, cu)
        for allocation, local, which in self._by_owner(line):
            keep = mask[which]
            index = local[:, None] * LINE + np.arange(LINE)
            keep = keep & (index < allocation.size)
            allocation.bytes[index[keep]] = data[which][keep]

    # ------------------------------------------------------------------ stale copies
    def _age(self, line: Array, mask: Array, cu: Array) -> None:
        """Memory is about to change: some other caches are taken to hold what it has now.

        `line` distinct; `mask` the bytes that change; `cu` says whose caches are left out.
        """
        own = np.unique(cu)
        xcds = self._others(self._active_xcds(), np.unique(own // CUS_PER_XCD))
        cus = self._others(self._active_cus(), own)
        if not len(xcds) and not len(cus):
            return
        before = self.memory_rows(line)
        if self.agent is not None:
            for rank in self._others(np.unique(self._active_xcds() // NUM_XCDS), np.unique(own // NUM_CUS)):
                self.agent.fill(int(rank), line, before, mask)
                self._heat(line)
        for xcd in xcds:
            seen = mask if self.agent is None else mask & self.agent.missing(int(xcd) // NUM_XCDS, line)
            self._fill(self.l2, int(xcd), line, before, seen)
        for one in cus:
            xcd = int(one) // CUS_PER_XCD
            if (own // CUS_PER_XCD == xcd).any():
                continue
            seen = mask & self.l2.missing(xcd, line)
            if self.agent is not None:
                seen &= self.agent.missing(xcd // NUM_XCDS, line)
            self._fill(self.l1, int(one), line, before, seen)

    def _age_agent(self, line: Array, mask: Array, cu: Array) -> None:
        """An agent level is about to change: other dies of the rank may hold what it shows now."""
        assert self.agent is not None
        active = self._active_xcds()
        own = int(cu[0]) // CUS_PER_XCD
        peers = active[active // NUM_XCDS == own // NUM_XCDS]
        xcds = self._others(peers, np.unique(cu // CUS_PER_XCD))
        if not len(xcds) or len(np.unique(line)) != len(line):
            return
        before = self.memory_rows(line)
        slot, hit = self.agent.find(own // NUM_XCDS, line)
        held = hit[:, None] & (self.agent.valid_rows[slot] > 0)
        before = np.where(held, self.agent.rows[slot], before)
        for xcd in xcds:
            self._fill(self.l2, int(xcd), line, before, mask)

    def _age_l1(self, line: Array, mask: Array, cu: Array) -> None:
        """An L2 is about to change: other compute units of the die may hold what it shows now."""
        active = self._active_cus()
        own = np.unique(cu)
        peers = active[np.isin(active // CUS_PER_XCD, own // CUS_PER_XCD)]
        cus = self._others(peers, own)
        if not len(cus):
            return
        xcd_of = cu // CUS_PER_XCD
        before = self.memory_rows(line)
        if self.agent is not None:
            slot, hit = self.agent.find(xcd_of // NUM_XCDS, line)
            before = np.where(hit[:, None] & (self.agent.valid_rows[slot] > 0), self.agent.rows[slot], before)
        slot, hit = self.l2.find(xcd_of, line)
        before = np.where(hit[:, None] & (self.l2.valid_rows[slot] > 0), self.l2.rows[slot], before)
        for one in cus:
            rows = np.nonzero(xcd_of == one // CUS_PER_XCD)[0]
            rows = rows[np.unique(line[rows], return_index=True)[1]]
            self._fill(self.l1, int(one), line[rows], before[rows], mask[rows])

    def _fill(self, table: LineTable, cache: int, line: Array, before: Array, mask: Array) -> None:
        keep = np.nonzero(mask.any(axis=1) & (self.rng.random(len(line)) < 0.8))[0]
        if len(keep):
            table.fill(cache, line[keep], before[keep], mask[keep])
            self._heat(line[keep])

    def _active_cus(self) -> Array:
        return np.nonzero(self.residents)[0]

    def _active_xcds(self) -> Array:
        return np.nonzero(self.residents.reshape(-1, CUS_PER_XCD).any(axis=1))[0]

    def _others(self, candidates: Array, own: Array) -> Array:
        """Up to two of the caches that are not in `own`; none when the temper says so."""
        # `own` is sorted: np.isin would take several times as long for so few
        place = np.minimum(np.searchsorted(own, candidates), len(own) - 1)
        candidates = candidates[own[place] != candidates]
        if not len(candidates) or self.rng.random() >= self.temper.stale:
            return candidates[:0]
        if len(candidates) <= 2:
            return candidates
        return self.rng.choice(candidates, 2, replace=False)

    # ------------------------------------------------------------------ cache instructions
    def write_back(self, xcds: Array, level: int) -> None:
        """buffer_wbl2: make everything that these dies' L2 caches hold visible at a level."""
        for xcd in np.unique(xcds):
            slots = self.l2.dirty_slots(int(xcd))
            if len(slots):
                self.write_back_slots(slots, level)
            if self.agent is not None and level == SYSTEM:
                slots = self.agent.dirty_slots(int(xcd) // NUM_XCDS)
                if len(slots):
                    self._agent_to_memory(slots)

    def invalidate(self, cus: Array, level: int) -> None:
        """buffer_inv: forget copies in the L1, for sc1 in the L2, for sc0 sc1 in the agent level too."""
        for cu in np.unique(cus):
            self.l1.invalidate(int(cu))
        if level >= AGENT:
            for xcd in np.unique(cus // CUS_PER_XCD):
                self.l2.invalidate(int(xcd))
        if self.agent is not None and level == SYSTEM:
            for rank in np.unique(cus // NUM_CUS):
                self.agent.invalidate(int(rank))

    # ------------------------------------------------------------------ time passes
    def tick(self) -> None:
        """Some lines leave some caches of one rank on their own."""
        temper, rng = self.temper, self.rng
        rank = int(rng.integers(self.num_ranks)) if self.num_ranks > 1 else 0
        for table, evict in ((self.l2, self.evict_l2), (self.agent, self._agent_to_memory)):
            if table is not None:
                slots = self._some(table.has_dirty, rank, temper.evict)
                if len(slots):
                    evict(slots)
        for table in (self.l1, self.l2, self.agent):
            if table is not None:
                slots = self._some(table.has_clean, rank, temper.forget)
                if len(slots):
                    table.forget_clean(slots)

    def _some(self, flags: Array, rank: int, share: float) -> Array:
        """Some of a rank's slots whose flag is set."""
        count = len(flags) // self.num_ranks
        slots = np.nonzero(flags[rank * count : (rank + 1) * count])[0] + rank * count
        chosen: Array = slots[self.rng.random(len(slots)) < share]
        return chosen

    def settle(self) -> None:
        """Everything becomes visible to everyone."""
        for rank in range(self.num_ranks):
            self.flush(rank)

    def flush(self, rank: int) -> None:
        """Write back and forget all that the caches of a rank hold: the end, or the start, of a kernel."""
        first = rank * NUM_CUS * L1_SETS
        slots = np.nonzero(self.l1.has_dirty[first : first + NUM_CUS * L1_SETS])[0] + first
        if len(slots):
            self.drain(slots)
        self.write_back(np.arange(rank * NUM_XCDS, (rank + 1) * NUM_XCDS), SYSTEM)
        for table, span in (
            (self.l1, slice(first, first + NUM_CUS * L1_SETS)),
            (self.l2, slice(rank * NUM_XCDS * L2_SETS, (rank + 1) * NUM_XCDS * L2_SETS)),
            (self.agent, slice(rank * AGENT_SETS, (rank + 1) * AGENT_SETS)),
        ):
            if table is not None:
                slots = np.nonzero(table.tags[span])[0] + span.start
                if len(slots):
                    table.drop(slots)

    def begin(self, rank: int) -> None:
        """A kernel starts."""
        if not self.running:
            self.temper = Temper.draw(self.rng)
        self.running += 1
        self.flush(rank)

    def end(self, rank: int) -> None:
        """A kernel has ended."""
        self.flush(rank)
        self.running -= 1
        if not self.running:
            for area in self._ranges.values():
                area.hot = None
