# SPDX-License-Identifier: Apache-2.0
"""Watches global memory for a session or a world: poisoned bytes and races."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.errors import GlobalRaceError, PoisonedMemoryError
from kernellib.emulator.relaxed.chip import AGENT, L2, SYSTEM
from kernellib.emulator.sanitizers.clocks import Clocks, joined
from kernellib.emulator.sanitizers.shadow import Shadow, Stamp

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.errors import Location
    from kernellib.emulator.launch import Launch
    from kernellib.emulator.memory import Allocation
    from kernellib.emulator.scheduler import Cohort
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]
# How far an access is meant to be seen: chip.py's levels, and between L2 (plain) and AGENT sc0 on its own.
WORKGROUP = 2
_SCOPE = {L2: "no scope", WORKGROUP: "workgroup scope", AGENT: "agent scope", SYSTEM: "system scope"}


@dataclass
class Access:
    """One access of a group: per element a byte offset in `allocation`, a wave of the group and a lane.

    `action`: load, store or atomic; `level`: its scope (chip.py; L2 for plain loads and stores, WORKGROUP for
    those with sc0 alone).
    """

    g: WaveGroup
    inst: Instruction
    allocation: Allocation
    offsets: Array
    size: int
    action: str
    level: int
    waves: Array
    lanes: Array

    def location(self, row: int) -> Location:
        """Where element `row` happened."""
        address = self.allocation.base + int(self.offsets[row])
        return self.g.cohort.location(self.g, self.inst, int(self.waves[row]), int(self.lanes[row]), address)


class Poison:
    """Bytes of registered memory that nobody has written yet."""

    def __init__(self) -> None:
        self.bytes: weakref.WeakKeyDictionary[Allocation, Array] = weakref.WeakKeyDictionary()

    def mark(self, allocation: Allocation, offset: int, size: int, poisoned: bool) -> None:
        """Declare bytes uninitialised, or initialised."""
        found = self.bytes.get(allocation)
        if found is None:
            if not poisoned:
                return
            found = self.bytes[allocation] = np.zeros(allocation.size, np.bool_)
        found[offset : offset + size] = poisoned


def _check_poison(a: Access, poisoned: Array) -> None:
    index = a.offsets[:, None] + np.arange(a.size)
    if a.action == "store":
        poisoned[index] = False
        return
    bad = poisoned[index]
    if bad.any():
        row, byte = np.unravel_index(int(np.argmax(bad)), bad.shape)
        raise PoisonedMemoryError(
            f"{a.size}-byte {a.action} of memory that has not been written: "
            f"byte {int(a.offsets[row]) + int(byte)} of {a.allocation}",
            a.location(int(row)),
        )


class Monitor:
    """The checks of global memory that a session asks for, across its launches and ranks."""

    def __init__(self, enabled: frozenset[str], poison: Poison) -> None:
        self.races = "global_races" in enabled
        self.poison = poison if "poisoned_memory" in enabled else None
        self.clocks = Clocks()
        self.shadows: weakref.WeakKeyDictionary[Allocation, Shadow] = weakref.WeakKeyDictionary()
        self.sites: list[tuple[Instruction | None, str]] = [(None, "")]
        self._site_of: dict[int, int] = {}
        self.running: set[int] = set()
        self.hosts: dict[int, Array | None] = {}  # what the host of each rank knows (clocks.py)
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ launches
    def begin(self, launch: Launch) -> int:
        """A launch starts; returns its number."""
        with self._lock:
            number = self.clocks.begin(launch, self.hosts.get(launch.rank))
            self.running.add(number)
            return number

    def end(self, number: int, rank: int) -> None:
        """A launch has ended: the host of its rank knows."""
        with self._lock:
            self.hosts[rank] = self.clocks.end(number, self.hosts.get(rank))
            self.running.discard(number)

    def host_barrier(self, ranks: Any) -> None:
        """The hosts of some ranks have met: each knows what the others know."""
        with self._lock:
            together: Array | None = None
            for rank in ranks:
                together = joined(together, self.hosts.get(rank))
            for rank in ranks:
                self.hosts[rank] = together
            if not self.running:
                self.forget()

    def forget(self) -> None:
        """Nothing runs and everybody knows: a new beginning."""
        self.clocks.reset()
        self.shadows.clear()
        self.hosts.clear()
        self.sites = [(None, "")]
        self._site_of.clear()

    # ------------------------------------------------------------------ accesses
    def access(self, access: Access) -> None:
        """Check and enter an access."""
        if self.poison is not None:
            poisoned = self.poison.bytes.get(access.allocation)
            if poisoned is not None:
                _check_poison(access, poisoned)
        if self.races:
            self._check_races(access)

    def _check_races(self, a: Access) -> None:
        shadow = self.shadows.get(a.allocation)
        if shadow is None:
            shadow = self.shadows[a.allocation] = Shadow(a.allocation.size)
        cohort = a.g.cohort
        index = shadow.index(a.offsets, a.size)
        thread = cohort.threads[a.g.waves][a.waves]
        each = np.broadcast_to(thread[:, None], index.shape)
        writes = a.action != "load"
        self._compare(a, shadow.write, index, each)
        if writes:
            self._compare(a, shadow.read, index, each)
        clock = self.clocks.clock[thread][:, None]
        site = self.site(cohort.launch, a.inst)
        if writes:
            shadow.write.put(index, each, clock, site, a.level)
            if a.g.n > 1 and a.level == L2:
                # waves of one group that write the same granule in the same step
                lost = shadow.write.thread[index] != each
                if lost.any():
                    row, column = np.unravel_index(int(np.argmax(lost)), lost.shape)
                    self._report(a, shadow.write, int(index[row, column]), int(row))
        if a.action != "store":
            shadow.read.put(index, each, clock, site, a.level)
        if a.level > L2:
            self._synchronise(a, thread)

    def _compare(self, a: Access, stamp: Stamp, index: Array, each: Array) -> None:
        """Raise when an access of `stamp` is not ordered before this one."""
        earlier = stamp.thread[index]
        suspect = (earlier != 0) & (earlier != each)
        if not suspect.any():
            return
        if a.level > L2:  # accesses with a scope are meant to meet, if the scope covers both
            other = np.minimum(stamp.level[index], a.level)
            same = self.clocks.rank_of[earlier] == self.clocks.rank_of[each]
            meant = (other == SYSTEM) | ((other == AGENT) & same)
            if (other == WORKGROUP).any():
                mates = self.clocks.first_mate[earlier] == self.clocks.first_mate[each]
                meant |= (other == WORKGROUP) & mates
            suspect &= ~meant
        which = np.nonzero(suspect.reshape(-1))[0]
        if not len(which):
            return
        flat = index.reshape(-1)[which]
        bad = self.clocks.unordered(earlier.reshape(-1)[which], stamp.clock[flat], each.reshape(-1)[which])
        if bad.any():
            first = int(np.argmax(bad))
            self._report(a, stamp, int(flat[first]), int(which[first]) // index.shape[1])

    def _report(self, a: Access, stamp: Stamp, granule: int, row: int) -> None:
        other, kernel = self.sites[int(stamp.site[granule])]
        assert other is not None
        did = "wrote" if stamp is self.shadows[a.allocation].write else "read"
        source = f", source {other.source}" if other.source else ""
        raise GlobalRaceError(
            f"{a.size}-byte {a.action} ({_SCOPE[a.level]}) of byte {int(a.offsets[row])} of {a.allocation}, "
            f"which {self.describe(int(stamp.thread[granule]))} {did} with `{other.text}` "
            f"({_SCOPE[int(stamp.level[granule])]}, listing line {other.line_no}{source}, kernel {kernel}); "
            "nothing orders the two",
            a.location(row),
        )

    def _synchronise(self, a: Access, thread: Array) -> None:
        clocks, base = self.clocks, a.allocation.base
        pairs = list(zip(thread.tolist(), (a.offsets + base).tolist(), strict=True))
        keep, wide = a.action == "atomic", a.level > WORKGROUP
        parcels = clocks.parcels(thread) if a.action != "load" else {}
        # One after the other: an atomic finds what those before it in the same step have published.
        for one, address in pairs:
            if a.action != "store":
                if wide and clocks.published:
                    clocks.find(one, address, a.level)
                if clocks.handed:
                    clocks.take(one, address)
            if a.action != "load":
                if wide:
                    clocks.publish(one, address, a.level, keep)
                if one in parcels:
                    clocks.hand(address, parcels[one], keep)

    # ------------------------------------------------------------------ names
    def site(self, launch: Launch, inst: Instruction) -> int:
        """A number for a place in the code."""
        found = self._site_of.get(id(inst))
        if found is None:
            found = self._site_of[id(inst)] = len(self.sites)
            self.sites.append((inst, launch.kernel.name))
        return found

    def describe(self, thread: int) -> str:
        """A wave's name."""
        number = int(self.clocks.launch_of[thread])
        launch, first, waves = self.clocks.launches[number]
        assert launch is not None
        workgroup, wave = divmod(thread - first, waves)
        gx, gy, _ = launch.grid
        place = (workgroup % gx, workgroup // gx % gy, workgroup // (gx * gy))
        rank = f"rank {launch.rank}, " if launch.rank or launch.ranks > 1 else ""
        return f"{rank}workgroup {place}, wave {wave}"

    # ------------------------------------------------------------------ what a cohort does
    def waited(self, cohort: Cohort, waves: Array) -> None:
        """s_waitcnt vmcnt(0) of some waves of a cohort."""
        if self.races:
            self.clocks.wait(cohort.threads[waves])

    def released(self, cohort: Cohort, waves: Array, level: int) -> None:
        """A write-back has been waited for."""
        if self.races:
            self.clocks.release(cohort.threads[waves], level)

    def acquired(self, cohort: Cohort, waves: Array, level: int) -> None:
        """An invalidation."""
        if self.races:
            self.clocks.acquire(cohort.threads[waves], level)

    def met(self, cohort: Cohort, waves: Array) -> None:
        """The waves of one workgroup have met at a barrier."""
        if self.races:
            self.clocks.barrier(cohort.threads[waves])
