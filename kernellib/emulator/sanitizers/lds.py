# SPDX-License-Identifier: Apache-2.0
"""Watches the LDS of a cohort: bytes that nobody has written, races between waves of a workgroup.

Two accesses of different waves are ordered when a barrier lies between them and the first had been waited for
when its wave arrived there: LDS operations of different waves may overtake each other (LLVM AMDGPU guide,
memory model gfx942), and only `s_waitcnt lgkmcnt` says that one is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.errors import LdsRaceError, UninitialisedLdsError
from kernellib.emulator.sanitizers.shadow import Shadow, Stamp

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.scheduler import Cohort
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]
PLAIN, ATOMIC = 0, 1


class LdsMonitor:
    """The checks of one cohort.  Threads are its waves (plus 1), clocks the barriers they have passed."""

    def __init__(self, cohort: Cohort, enabled: frozenset[str]) -> None:
        self.races = "lds_races" in enabled
        self.written = np.zeros(len(cohort.lds.bytes), np.bool_) if "uninitialised_lds" in enabled else None
        self.shadow = Shadow(len(cohort.lds.bytes))
        self.phase = np.zeros(cohort.num_waves + 1, np.int32)
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
        phase = self.phase[each]
        level = ATOMIC if verb == "atomic" else PLAIN
        stamps = [shadow.write] if verb == "load" else [shadow.write, shadow.read]
        for stamp in stamps:
            earlier = stamp.thread[index]
            bad = (earlier != 0) & (earlier != each) & (stamp.clock[index] >= phase)
            if level == ATOMIC:
                bad &= stamp.level[index] != ATOMIC
            if bad.any():
                self._report(g, inst, stamp, index, bad, local, size, verb, waves, lanes)
        site = self._site(inst)
        if verb != "load":
            shadow.write.put(index, each, phase, site, level)
            if level == PLAIN:
                lost = shadow.write.thread[index] != each
                if lost.any():
                    self._report(g, inst, shadow.write, index, lost, local, size, verb, waves, lanes)
        if verb != "store":
            shadow.read.put(index, each, phase, site, level)
        self.open.append((wave, self.issued[wave], place, size))

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
        self.phase[waves + 1] += 1
        for wave, _, place, size in self.open:
            mine = np.isin(wave, waves)
            if mine.any():
                index = self.shadow.index(place[mine], size)
                thread = np.broadcast_to((wave[mine] + 1)[:, None], index.shape)
                for stamp in (self.shadow.write, self.shadow.read):
                    still = stamp.thread[index] == thread
                    stamp.clock[index[still]] = self.phase[thread[still]]
