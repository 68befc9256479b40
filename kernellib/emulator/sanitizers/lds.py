# SPDX-License-Identifier: Apache-2.0
"""Watches the LDS of a cohort: bytes that nobody has written, races between waves of a workgroup.

Two accesses of different waves are ordered when a barrier lies between them and the first had been waited for
when its wave arrived there: LDS operations of different waves may overtake each other (LLVM AMDGPU guide,
memory model gfx942), and only `s_waitcnt lgkmcnt` says that one is done.

Flags order as well: a load that polls (polls.py) learns what the wave that last wrote the word had done
before, in the LDS and in global memory, and what that wave had learnt from other flags until then.
Operations of one wave are in order, so that takes no wait.  Polling loads do not race.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.errors import LdsRaceError, UninitialisedLdsError
from kernellib.emulator.sanitizers.polls import polling_loads
from kernellib.emulator.sanitizers.shadow import Shadow, Stamp

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.sanitizers.cohort import InstrumentedCohort
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]
PLAIN, ATOMIC = 0, 1
_NUMBERS = itertools.count()


def _words(place: Array, size: int) -> list[int]:
    """Numbers of the dwords that accesses of `size` bytes touch."""
    words: list[int] = np.unique((place[:, None] + np.arange(0, size, 4)) // 4).tolist()
    return words


class LdsMonitor:
    """The checks of one cohort.  Threads are its waves (plus 1); their clocks count barriers, and stores
    where the program polls."""

    def __init__(self, cohort: InstrumentedCohort, enabled: frozenset[str]) -> None:
        self.races = "lds_races" in enabled
        self.written = np.zeros(len(cohort.lds.bytes), np.bool_) if "uninitialised_lds" in enabled else None
        self.shadow = Shadow(len(cohort.lds.bytes))
        self.clock = np.ones(cohort.num_waves + 1, np.int32)
        # up to which clock a thread knows each wave of its workgroup
        self.slot, self.wave_idx = cohort.slot, cohort.wave_idx
        self.known = np.zeros((cohort.num_waves + 1, int(cohort.wave_idx.max()) + 1), np.int32)
        bound = cohort.launch.bound
        if bound.polls is None:
            bound.polls = polling_loads(bound.program)
        self.polls = bound.polls
        # where the program polls: what waves knew when, and what atomics have gathered under a word
        self.learnt: dict[int, list[tuple[int, Array]]] = {}
        self.gathered: dict[int, Array] = {}
        self.monitor, self.threads = cohort.monitor, cohort.threads
        self.first_key = -((next(_NUMBERS) + 1) << 32)  # names of words among the addresses of clocks.py
        self.issued = np.zeros(cohort.num_waves, np.int64)
        self.covered = np.zeros(cohort.num_waves, np.int64)
        # accesses that no wait has covered: (wave, its count of LDS operations, byte offset, bytes)
        self.open: list[tuple[Array, Array, Array, int]] = []
        self.sites: list[Instruction] = []
        self._site_of: dict[int, int] = {}

    # ------------------------------------------------------------------ accesses
    def access(
        self,
        g: WaveGroup,
        inst: Instruction,
        placed: Array,
        local: Array,
        size: int,
        verb: str,
        waves: Array | None,
        lanes: Array | None,
    ) -> None:
        """Check and enter an access of `size` bytes per lane at bytes `placed` of the cohort's LDS."""
        place = placed.reshape(-1)
        if waves is None or lanes is None:
            waves, lanes = np.divmod(np.arange(64 * g.n), 64)
        if self.written is not None:
            self._check_written(g, inst, place, local.reshape(-1), size, verb, waves, lanes)
        if self.races:
            self._check_races(g, inst, place, local.reshape(-1), size, verb, waves, lanes)

    def _check_written(
        self,
        g: WaveGroup,
        inst: Instruction,
        place: Array,
        local: Array,
        size: int,
        verb: str,
        waves: Array,
        lanes: Array,
    ) -> None:
        assert self.written is not None
        index = place[:, None] + np.arange(size)
        if verb != "store":
            known = self.written[index]
            if not known.all():
                row, byte = np.unravel_index(int(np.argmin(known)), known.shape)
                at = int(local[row])
                raise UninitialisedLdsError(
                    f"{size}-byte LDS {verb} at byte {at}: byte {at + int(byte)} has not been written",
                    g.cohort.location(g, inst, int(waves[row]), int(lanes[row]), at),
                )
        if verb != "load":
            self.written[index] = True

    def _check_races(
        self,
        g: WaveGroup,
        inst: Instruction,
        place: Array,
        local: Array,
        size: int,
        verb: str,
        waves: Array,
        lanes: Array,
    ) -> None:
        shadow = self.shadow
        index = shadow.index(place, size)
        wave = g.waves[waves]
        each = np.broadcast_to((wave + 1)[:, None], index.shape)
        if verb == "load" and inst.index in self.polls:
            self._learn(index, each, place, size)
            return
        clock = self.clock[each]
        level = ATOMIC if verb == "atomic" else PLAIN
        stamps = [shadow.write] if verb == "load" else [shadow.write, shadow.read]
        for stamp in stamps:
            earlier = stamp.thread[index]
            # thread 0 is nobody: its column is some wave's, and it never counts
            bad = (earlier != 0) & (earlier != each)
            bad &= stamp.clock[index] > self.known[each, self.wave_idx[earlier - 1]]
            if level == ATOMIC:
                bad &= stamp.level[index] != ATOMIC
            if bad.any():
                self._report(g, inst, stamp, index, bad, local, size, verb, waves, lanes)
        site = self._site(inst)
        if verb != "load":
            shadow.write.put(index, each, clock, site, level)
            if level == PLAIN:
                lost = shadow.write.thread[index] != each
                if lost.any():
                    self._report(g, inst, shadow.write, index, lost, local, size, verb, waves, lanes)
        if verb != "store":
            shadow.read.put(index, each, clock, site, level)
        if verb != "load" and self.polls:
            self._hand_on(each, place, size, level)
        self.open.append((wave, self.issued[wave], place, size))

    def _learn(self, index: Array, each: Array, place: Array, size: int) -> None:
        """Threads poll words: what lay under them they know from now on."""
        for thread in np.unique(each).tolist():
            mine = each[:, 0] == thread
            row = self.known[thread].copy()
            for granule in np.unique(index[mine]).tolist():
                writer, clock = int(self.shadow.write.thread[granule]), int(self.shadow.write.clock[granule])
                if writer not in (0, thread):
                    column = int(self.wave_idx[writer - 1])
                    row[column] = max(row[column], clock)
                    before = [known for when, known in self.learnt.get(writer, ()) if when <= clock]
                    if before:
                        np.maximum(row, before[-1], out=row)
            for word in _words(place[mine], size):
                if word in self.gathered:
                    np.maximum(row, self.gathered[word], out=row)
                if self.monitor is not None:
                    self.monitor.clocks.take(int(self.threads[thread - 1]), self.first_key + word)
            if (row > self.known[thread]).any():
                self.known[thread] = row
                self.learnt.setdefault(thread, []).append((int(self.clock[thread]), row.copy()))

    def _hand_on(self, each: Array, place: Array, size: int, level: int) -> None:
        """Threads have stored; what they do next is not part of what the store tells.  Atomics continue what
        others have told by the same word."""
        for thread in np.unique(each).tolist():
            row = self.known[thread].copy()
            row[self.wave_idx[thread - 1]] = self.clock[thread]
            clocks = self.monitor.clocks if self.monitor is not None and self.monitor.races else None
            one = self.threads[thread - 1 : thread]
            parcel = clocks.parcels(one).get(int(one[0])) if clocks is not None else None
            for word in _words(place[each[:, 0] == thread], size):
                if clocks is not None and parcel is not None:
                    clocks.hand(self.first_key + word, parcel, level == ATOMIC)
                if level == ATOMIC:
                    old = self.gathered.get(word)
                    self.gathered[word] = row if old is None else np.maximum(old, row)
                else:
                    self.gathered.pop(word, None)
            self.clock[thread] += 1

    def _report(
        self,
        g: WaveGroup,
        inst: Instruction,
        stamp: Stamp,
        index: Array,
        bad: Array,
        local: Array,
        size: int,
        verb: str,
        waves: Array,
        lanes: Array,
    ) -> None:
        row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
        granule = index[row, column]
        other = self.sites[int(stamp.site[granule])]
        did = "wrote" if stamp is self.shadow.write else "read"
        who = int(g.cohort.wave_idx[int(stamp.thread[granule]) - 1])
        source = f", source {other.source}" if other.source else ""
        at = int(local[row])
        raise LdsRaceError(
            f"{size}-byte LDS {verb} at byte {at}, which wave {who} of the workgroup {did} with "
            f"`{other.text}` (listing line {other.line_no}{source}) with no barrier between, or no s_waitcnt "
            "lgkmcnt before the barrier",
            g.cohort.location(g, inst, int(waves[row]), int(lanes[row]), at),
        )

    def _site(self, inst: Instruction) -> int:
        found = self._site_of.get(id(inst))
        if found is None:
            found = self._site_of[id(inst)] = len(self.sites)
            self.sites.append(inst)
        return found

    # ------------------------------------------------------------------ waits and barriers
    def count(self, waves: Array) -> None:
        """An operation of the LDS counter has been issued (before its accesses are entered)."""
        self.issued[waves] += 1

    def wait(self, waves: Array, newest: int) -> None:
        """s_waitcnt lgkmcnt(N)."""
        self.covered[waves] = np.maximum(self.covered[waves], self.issued[waves] - newest)
        if not self.open:
            return
        left = []
        for wave, number, place, size in self.open:
            keep = number > self.covered[wave]
            if keep.all():
                left.append((wave, number, place, size))
            elif keep.any():
                left.append((wave[keep], number[keep], place[keep], size))
        self.open = left

    def met(self, waves: Array) -> None:
        """Waves of a workgroup pass a barrier; what they have not waited for counts as later than it."""
        self._meet(waves)
        for wave, _, place, size in self.open:
            mine = np.isin(wave, waves)
            if mine.any():
                index = self.shadow.index(place[mine], size)
                thread = np.broadcast_to((wave[mine] + 1)[:, None], index.shape)
                for stamp in (self.shadow.write, self.shadow.read):
                    still = stamp.thread[index] == thread
                    stamp.clock[index[still]] = self.clock[thread[still]]

    def _meet(self, waves: Array) -> None:
        """Waves know all that those of their workgroup have done, the ended ones too."""
        latest = np.zeros((int(self.slot.max()) + 1, self.known.shape[1]), np.int32)
        latest[self.slot, self.wave_idx] = self.clock[1:]
        self.known[waves + 1] = latest[self.slot[waves]]
        self.clock[waves + 1] += 1
