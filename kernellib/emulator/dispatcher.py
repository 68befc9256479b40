# SPDX-License-Identifier: Apache-2.0
"""Feeds workgroups to the emulated chip and decides whose turn it is; several launches can run side by side.

Everything is deterministic: cohorts and launches take turns in a fixed order, each for a quantum of
instructions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernellib.emulator.errors import DeadlockError
from kernellib.emulator.scheduler import Cohort

if TYPE_CHECKING:
    from kernellib.emulator.launch import Launch

IDLE_ROUNDS = 4  # rounds without a store, an end or a new workgroup before a deadlock is looked for


class Dispatcher:
    """The workgroups of one launch: at most `resident` at a time, in dispatch order."""

    def __init__(self, launch: Launch, resident: int, per_cohort: int, quantum: int) -> None:
        self.launch = launch
        self.resident = max(resident, per_cohort)
        self.per_cohort = per_cohort
        self.quantum = quantum
        self.next_workgroup = 0
        self.active: deque[Cohort] = deque()

    @property
    def finished(self) -> bool:
        """Whether every workgroup has ended."""
        return not self.active and self.next_workgroup >= self.launch.num_workgroups

    @property
    def num_resident(self) -> int:
        """Workgroups in flight."""
        return sum(c.num_workgroups for c in self.active)

    def admit(self) -> bool:
        """Make the next workgroups resident, if they fit."""
        total = self.launch.num_workgroups
        count = min(self.per_cohort, total - self.next_workgroup, self.resident - self.num_resident)
        if count <= 0:
            return False
        self.active.append(Cohort(self.launch, self.next_workgroup, count))
        self.next_workgroup += count
        return True

    def round(self) -> bool:
        """Give every resident cohort a quantum.  Returns whether anything changed that others can see.

        Cohorts that need nothing from each other run one after another (their registers stay in the cache); a
        cohort that sleeps or has used its quantum makes room for the next, until the chip is full.
        """
        changed = False if self.active else self.admit()
        before = self.launch.stores
        for _ in range(len(self.active)):
            cohort = self.active.popleft()
            outcome = cohort.run(self.quantum)
            self.launch.clock += self.quantum
            if outcome == "done":
                self.launch.finish(cohort)
                changed = True
            else:
                self.active.append(cohort)
        if self.active:
            changed = self.admit() or changed
        return changed or self.launch.stores != before

    def stuck(self) -> bool:
        """True when every group comes back to the same registers at the same place and nothing is written.

        With all memory visible at once and no clock read, such a state repeats for ever.
        """
        before = self.launch.stores
        return all(self._repeats(c) for c in list(self.active)) and self.launch.stores == before

    def _repeats(self, cohort: Cohort) -> bool:
        snapshots = {_signature(cohort)}
        for _ in range(64):
            if cohort.run(1) == "done":
                self.active.remove(cohort)
                self.launch.finish(cohort)
                return False
            signature = _signature(cohort)
            if signature in snapshots:
                return True
            snapshots.add(signature)
        return False


def _signature(cohort: Cohort) -> int:
    """Hash of everything that decides what a cohort does next, memory apart."""
    parts = []
    for g in sorted(cohort.groups, key=lambda g: int(g.waves[0])):
        registers = (g.vector.tobytes(), g.scalar.tobytes(), g.scc.tobytes())
        parts.append((g.block, g.state, g.waves.tobytes(), registers))
    return hash(tuple(parts))


def run_until_one_ends(dispatchers: Sequence[Dispatcher]) -> list[Dispatcher]:
    """Interleave launches until at least one has ended; returns those that have.

    Raises DeadlockError, listing the waves of every launch, when none can make progress.
    """
    idle_rounds = 0
    while True:
        changed = False
        for dispatcher in dispatchers:
            changed = dispatcher.round() or changed
        ended = [d for d in dispatchers if d.finished]
        if ended:
            return ended
        idle_rounds = 0 if changed else idle_rounds + 1
        if idle_rounds >= IDLE_ROUNDS and all([d.stuck() for d in dispatchers]):
            lines = itertools.chain.from_iterable(c.waiting() for d in dispatchers for c in d.active)
            raise DeadlockError(
                "no wave can make progress: every one spins on memory that nobody will write",
                None,
                tuple(itertools.islice(lines, 20)),
            )


__all__ = ["Dispatcher", "run_until_one_ends"]
