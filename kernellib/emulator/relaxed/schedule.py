# SPDX-License-Identifier: Apache-2.0
"""Seeded placement and interleaving: which compute unit a workgroup gets, which waves go next, how far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.dispatcher import Dispatcher
from kernellib.emulator.relaxed.chip import CUS_PER_XCD, NUM_CUS, NUM_XCDS, Chip
from kernellib.emulator.relaxed.lds import LdsDelay
from kernellib.emulator.relaxed.pending import VectorQueue
from kernellib.emulator.sanitizers.cohort import InstrumentedCohort, InstrumentedDispatcher
from kernellib.emulator.scheduler import Cohort

if TYPE_CHECKING:
    from kernellib.emulator.launch import Launch
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]
LONGEST_RUN = 64  # blocks that one group may run before another is drawn


class RelaxedCohort(InstrumentedCohort):
    """A cohort whose waves do not run in lockstep: each has a colour, and only equal colours run together."""

    def __init__(self, launch: Launch, first: int, count: int) -> None:
        super().__init__(launch, first, count)
        chip = launch.chip
        self.chip: Chip = chip
        placed = place(chip, launch.rank, self.first, count)
        chip.residents[placed] += 1
        self.placed = placed
        self.cu = placed[self.slot]
        self.xcd = self.cu // CUS_PER_XCD % NUM_XCDS
        if launch.lds_bytes:
            self.lds_delay = LdsDelay(chip, self.lds, self.num_waves)
        self.color = colors(chip.rng, self.slot, self.wave_idx)
        everyone = self.groups[0]
        present = np.unique(self.color)
        if len(present) > 1:
            self._split(everyone, [(self.color == c, everyone.block) for c in present])

    def _partners(self, g: WaveGroup) -> list[WaveGroup]:
        color = self.color[g.waves[0]]
        return [o for o in super()._partners(g) if self.color[o.waves[0]] == color]

    def _choose(self, awake: list[WaveGroup]) -> WaveGroup:
        return awake[int(self.chip.rng.integers(len(awake)))]

    def run(self, quantum: int) -> str:
        """As Cohort.run, with groups drawn at random, each for a random number of blocks."""
        budget = quantum
        rng = self.chip.rng
        for g in self.groups:
            g.sleeping = False
        while True:
            ready = [g for g in self.groups if g.state == "run"]
            if not ready:
                if not self.groups:
                    return "done"
                raise self._barrier_deadlock()
            awake = [g for g in ready if not g.sleeping]
            if not awake:
                return "asleep"
            if budget <= 0:
                return "busy"
            g = self._choose(awake)
            for _ in range(1 + int(rng.integers(LONGEST_RUN)) if rng.random() < 0.5 else 1):
                budget -= self._run_group(g, 1, False)
                if g not in self.groups or g.state != "run" or g.sleeping or budget <= 0:
                    break
            self.queue.tick()
            if self.lds_delay is not None:
                self.lds_delay.tick()
            if rng.random() < 0.2:
                self.chip.tick()

    def finish(self) -> None:
        """The cohort's waves have ended: their compute units are free."""
        self.chip.residents[self.placed] -= 1


def place(chip: Chip, rank: int, first: int, count: int) -> Array:
    """Compute unit of each of `count` workgroups.

    The dies take turns, as the hardware deals workgroups out, from a random one on; or each workgroup gets
    any die.  Within a die any compute unit, or one of a few.
    """
    rng = chip.rng
    number = first + np.arange(count)
    if rng.random() < 0.5:
        xcd = (number + int(rng.integers(NUM_XCDS))) % NUM_XCDS
    else:
        xcd = rng.integers(NUM_XCDS, size=count)
    few = int(rng.choice([2, CUS_PER_XCD]))
    placed: Array = rank * NUM_CUS + xcd * CUS_PER_XCD + rng.integers(few, size=count)
    return placed


def colors(rng: np.random.Generator, slot: Array, wave_idx: Array) -> Array:
    """A colour per wave: by wave of the workgroup, by workgroup, or at random."""
    count = int(rng.integers(2, 5))
    kind = int(rng.integers(3))
    if kind == 0 and wave_idx.max() > 0:
        found: Array = rng.permutation(int(wave_idx.max()) + 1)[wave_idx] % count
    elif kind == 1 and slot.max() > 0:
        found = rng.permutation(int(slot.max()) + 1)[slot] % count
    else:
        found = rng.integers(count, size=len(slot))
    return found


class RelaxedDispatcher(InstrumentedDispatcher):
    """Workgroups of one launch on a seeded chip."""

    cohort_type = RelaxedCohort

    def __init__(self, launch: Launch, resident: int, per_cohort: int, quantum: int) -> None:
        super().__init__(launch, resident, per_cohort, quantum)
        self.queues: list[VectorQueue] = []  # of cohorts whose waves have ended

    @property
    def finished(self) -> bool:
        """Whether every workgroup has ended and what they stored has arrived."""
        return self.ended

    @property
    def _drained(self) -> bool:
        return not self.active and self.next_workgroup >= self.launch.num_workgroups

    def round(self) -> bool:
        """As Dispatcher.round, with short random quanta in random order."""
        chip = self.launch.chip
        self._begin()
        if chip.num_ranks > 1 and chip.rng.random() < 0.3:
            return True  # the other ranks are faster
        before = chip.changes
        self.quantum = int(chip.rng.choice([1, 30, 300, 3000]))
        if len(self.active) > 1:
            order = chip.rng.permutation(len(self.active))
            members = list(self.active)
            self.active.clear()
            self.active.extend(members[i] for i in order)
        changed = Dispatcher.round(self)
        for queue in self.queues:
            queue.tick()
        if self._drained and chip.rng.random() < 0.4:
            for queue in self.queues:
                queue.finish()
            self._end()
            return True
        return self._drained or changed or chip.changes != before

    def _ended(self, cohort: Cohort) -> None:
        super()._ended(cohort)
        if cohort.queue.records:
            self.queues.append(cohort.queue)

    def settle(self) -> None:
        """Nothing happens any more: what is still on its way arrives."""
        for queue in [*self.queues, *(cohort.queue for cohort in self.active)]:
            queue.finish()
        for cohort in self.active:
            if cohort.lds_delay is not None:
                cohort.lds_delay.finish()
        self.launch.chip.settle()
