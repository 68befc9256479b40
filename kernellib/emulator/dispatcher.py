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

    cohort_type: type[Cohort] = Cohort

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
        self.active.append(self.cohort_type(self.launch, self.next_workgroup, count))
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
                self._ended(cohort)
                changed = True
            else:
                self.active.append(cohort)
        if self.active:
            changed = self.admit() or changed
        return changed or self.launch.stores != before

    def _ended(self, cohort: Cohort) -> None:
        self.launch.finish(cohort)

    def settle(self) -> None:
        """Let everything that is on its way arrive (nothing is, where every store is visible at once)."""

    def stuck(self) -> bool:
        """True when every group comes back to the same registers at the same place and nothing is written.

        With all memory visible at once and no clock read, such a state repeats for ever.
        """
        self.settle()
        before = self.launch.stores
        for cohort in list(self.active):
            if not cohort.repeats():
                if not cohort.groups:
                    self.active.remove(cohort)
                    self._ended(cohort)
                return False
        return self.launch.stores == before


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
