# SPDX-License-Identifier: Apache-2.0
"""Happens-before among waves, by vector clocks.

A thread is a wave; its clock counts the stretches of its program between events that others can learn of.
What a thread knows of the waves of its own workgroup is a row of small numbers (barriers change it); what it
knows of all others is a row that exists only once it has acquired something.

Release and acquire are what the LLVM memory model for gfx942 makes of them: buffer_wbl2 and the wait that
covers it release what this wave has done and what it knows of others; a store or atomic with scope bits then
publishes that under its address; a load or atomic that finds it there hands it to the next buffer_inv, which
acquires it, if every scope on the way reaches far enough.

Within a workgroup less is needed: its waves share an L1, which takes the operations of a wave in order.  So
any store or atomic with scope bits, workgroup scope included, hands on what its wave has done before, and a
load or atomic with scope bits that finds it there knows it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.relaxed.chip import AGENT, SYSTEM

if TYPE_CHECKING:
    from kernellib.emulator.launch import Launch

Array = np.ndarray[Any, Any]


@dataclass
class Published:
    """What lies released under an address."""

    rank: int
    level: int  # of the store
    agent: Array | None  # what an acquire on the same rank learns
    system: Array | None  # what an acquire on any rank learns


@dataclass
class Parcel:
    """What waves of one workgroup learn from a flag: their first thread, and rows as in `Clocks`."""

    first_mate: int
    mates: Array
    finished: Array
    foreign: Array | None


def joined(a: Array | None, b: Array | None) -> Array | None:
    """The later of two pieces of knowledge (neither is changed)."""
    if a is None or b is None:
        return a if b is None else b
    if len(a) < len(b):
        a, b = b, a
    result = a.copy()
    np.maximum(result[: len(b)], b, out=result[: len(b)])
    return result


class Clocks:
    """Clocks of all threads since the last moment at which nothing ran."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: all that was is ordered before all that comes."""
        self.clock = np.zeros(1, np.int32)  # thread 0 is nobody
        self.complete = np.zeros(1, np.int32)  # accesses with a clock up to this have been waited for
        self.launch_of = np.zeros(1, np.int32)
        self.rank_of = np.zeros(1, np.int32)
        self.first_mate = np.zeros(1, np.int64)  # first thread of the workgroup
        self.mates = np.zeros((1, 16), np.int32)  # what each thread knows of its workgroup
        self.finished = np.zeros((1, 16), np.int32)  # of that, what has been waited for
        self.foreign: dict[int, Array] = {}
        self.released: dict[int, tuple[Array | None, Array | None]] = {}  # for agent, for system
        self.found: dict[int, tuple[Array | None, Array | None]] = {}  # by loads, not yet acquired
        self.published: dict[int, Published] = {}
        self.handed: dict[int, Parcel] = {}  # the same for waves of the workgroup that stored there
        self.launches: list[tuple[Launch | None, int, int]] = [(None, 0, 0)]  # launch, first thread, waves
        self.base: list[Array | None] = [None]  # what the threads of each launch knew when it began

    # ------------------------------------------------------------------ launches
    def begin(self, launch: Launch, known: Array | None) -> int:
        """Number of a new launch, whose host knows `known`."""
        number = len(self.launches)
        waves, groups = launch.waves_per_workgroup, launch.num_workgroups
        first = len(self.clock)
        count = waves * groups
        self.launches.append((launch, first, waves))
        self.base.append(known)
        self.clock = np.concatenate([self.clock, np.ones(count, np.int32)])
        self.complete = np.concatenate([self.complete, np.zeros(count, np.int32)])
        self.launch_of = np.concatenate([self.launch_of, np.full(count, number, np.int32)])
        self.rank_of = np.concatenate([self.rank_of, np.full(count, launch.rank, np.int32)])
        mates = first + np.arange(count) // waves * waves
        self.first_mate = np.concatenate([self.first_mate, mates])
        blank = np.zeros((count, 16), np.int32)
        self.mates = np.concatenate([self.mates, blank])
        self.finished = np.concatenate([self.finished, blank])
        return number

    def end(self, number: int, known: Array | None) -> Array:
        """What the host that knew `known` knows once a launch has ended: all that it did, and had learnt."""
        launch, first, waves = self.launches[number]
        assert launch is not None
        last = first + waves * launch.num_workgroups
        row = np.zeros(last, np.int32)
        row[first:] = np.iinfo(np.int32).max
        rows = {id(r): r for t, r in self.foreign.items() if first <= t < last}
        for one in (known, *rows.values()):
            together = joined(row, one)
            assert together is not None
            row = together
        return row

    def known(self, thread: int) -> Array | None:
        """What a thread knows of other workgroups."""
        row = self.foreign.get(thread)
        return row if row is not None else self.base[int(self.launch_of[thread])]

    def threads(self, number: int, workgroups: Array, waves: Array) -> Array:
        """Threads of waves of a launch."""
        _, first, per_workgroup = self.launches[number]
        result: Array = (first + workgroups * per_workgroup + waves).astype(np.int64)
        return result

    # ------------------------------------------------------------------ order
    def unordered(self, earlier: Array, clock: Array, now: Array) -> Array:
        """bool: which accesses of thread `earlier` at `clock` nothing orders before thread `now`."""
        suspect: Array = (earlier != 0) & (earlier != now)
        if not suspect.any():
            return suspect
        which = np.nonzero(suspect)[0]
        who, when, me = earlier[which], clock[which], now[which]
        mate = self.first_mate[who] == self.first_mate[me]
        known = np.zeros(len(which), np.bool_)
        if mate.any():
            column = (who - self.first_mate[who])[mate]
            known[mate] = self.mates[me[mate], column] >= when[mate]
        if not mate.all():
            for one in np.unique(me[~mate]):
                row = self.known(int(one))
                if row is not None:
                    rest = np.nonzero((me == one) & ~mate & (who < len(row)))[0]
                    known[rest] |= row[who[rest]] >= when[rest]
        suspect[which[known]] = False
        return suspect

    # ------------------------------------------------------------------ events
    def wait(self, threads: Array) -> None:
        """s_waitcnt vmcnt(0): all that these threads have done so far is complete."""
        self.complete[threads] = self.clock[threads]
        self.clock[threads] += 1

    def barrier(self, threads: Array) -> None:
        """The threads of one workgroup meet."""
        first = int(self.first_mate[threads[0]])
        column = threads - first
        know = self.mates[threads].max(axis=0)
        know[column] = self.clock[threads]
        done = self.finished[threads].max(axis=0)
        done[column] = np.maximum(done[column], self.complete[threads])
        self.mates[threads] = know
        self.finished[threads] = done
        self.clock[threads] += 1
        rows = [row for row in (self.foreign.get(int(t)) for t in threads) if row is not None]
        if rows:
            together: Array | None = None
            for row in {id(row): row for row in rows}.values():
                together = joined(together, row)
            assert together is not None
            for thread in threads:
                self.foreign[int(thread)] = together
        # What one wave has released is done: another may publish it after the barrier.  What one has found,
        # another may acquire.
        for table in (self.released, self.found):
            pairs = [pair for pair in (table.get(int(t)) for t in threads) if pair is not None]
            if pairs:
                agent, system = None, None
                for pair in {id(pair): pair for pair in pairs}.values():
                    agent, system = joined(agent, pair[0]), joined(system, pair[1])
                for thread in threads:
                    table[int(thread)] = (agent, system)

    def release(self, threads: Array, level: int) -> None:
        """A write-back of each thread's caches has been waited for."""
        for thread in map(int, threads):
            first = int(self.first_mate[thread])
            waves = self.launches[int(self.launch_of[thread])][2]
            row = np.zeros(len(self.clock), np.int32)
            row[first : first + waves] = np.minimum(self.mates[thread], self.finished[thread])[:waves]
            row[thread] = self.complete[thread]
            known = joined(row, self.known(thread))
            _, system = self.released.get(thread, (None, None))
            self.released[thread] = (known, known if level == SYSTEM else system)

    def publish(self, thread: int, address: int, level: int, keep: bool) -> None:
        """A store with scope bits (`keep`: an atomic, which continues what lay there)."""
        agent, system = self.released.get(thread, (None, None))
        old = self.published.get(address) if keep else None
        if old is not None:
            agent = joined(agent, old.agent if old.rank == self.rank_of[thread] else old.system)
            system = joined(system, old.system)
            level = min(level, old.level)
        if agent is None:
            self.published.pop(address, None)
            return
        self.published[address] = Published(int(self.rank_of[thread]), level, agent, system)

    def find(self, thread: int, address: int, level: int) -> None:
        """A load or atomic with scope bits."""
        there = self.published.get(address)
        if there is None:
            return
        agent = there.agent if there.rank == self.rank_of[thread] else None
        system = there.system if level == SYSTEM and there.level == SYSTEM else None
        if agent is None and system is None:
            return
        old = self.found.get(thread, (None, None))
        self.found[thread] = (joined(old[0], agent), joined(old[1], system))

    def parcels(self, threads: Array) -> dict[int, Parcel]:
        """What each of some threads that have mates could hand to them now, without what it does next."""
        made = {}
        for thread in np.unique(threads).tolist():
            if self.launches[int(self.launch_of[thread])][2] > 1:
                first = int(self.first_mate[thread])
                mates, finished = self.mates[thread].copy(), self.finished[thread].copy()
                mates[thread - first] = self.clock[thread]
                finished[thread - first] = self.complete[thread]
                made[thread] = Parcel(first, mates, finished, self.foreign.get(thread))
        self.clock[list(made)] += 1
        return made

    def hand(self, address: int, parcel: Parcel, keep: bool) -> None:
        """Lay a parcel under an address (`keep`: by an atomic, which continues what lay there)."""
        old = self.handed.get(address) if keep else None
        if old is not None and old.first_mate == parcel.first_mate:
            parcel = Parcel(
                old.first_mate, np.maximum(old.mates, parcel.mates),
                np.maximum(old.finished, parcel.finished), joined(old.foreign, parcel.foreign),
            )  # fmt: skip
        self.handed[address] = parcel

    def take(self, thread: int, address: int) -> None:
        """A load or atomic with scope bits learns what a mate has handed on."""
        there = self.handed.get(address)
        if there is None or there.first_mate != self.first_mate[thread]:
            return
        np.maximum(self.mates[thread], there.mates, out=self.mates[thread])
        np.maximum(self.finished[thread], there.finished, out=self.finished[thread])
        if there.foreign is not None:
            row = joined(self.known(thread), there.foreign)
            assert row is not None
            self.foreign[thread] = row

    def acquire(self, threads: Array, level: int) -> None:
        """buffer_inv: what was found counts from now on."""
        for thread in map(int, threads):
            pair = self.found.get(thread)
            if pair is None or level < AGENT:
                continue
            row = joined(self.known(thread), pair[0])
            if level == SYSTEM:
                row = joined(row, pair[1])
            if row is not None:
                self.foreign[thread] = row
                self._learn_of_mates(thread, row)

    def _learn_of_mates(self, thread: int, row: Array) -> None:
        """Knowledge that came back from other workgroups may be of the own one."""
        first = int(self.first_mate[thread])
        waves = self.launches[int(self.launch_of[thread])][2]
        part = row[first : first + waves]
        np.maximum(self.mates[thread, : len(part)], part, out=self.mates[thread, : len(part)])
