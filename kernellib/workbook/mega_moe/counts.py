# SPDX-License-Identifier: Apache-2.0
"""What a call of all ranks does, counted by the emulator from the instructions it executed.

Bytes on the wire are stores and atomics that reach another rank's symmetric memory. Memory bytes are what all
lanes asked for, polling of flags included, which depends on how the ranks interleave. Idle tile slots are the
padding rows of M tiles, matrix operations spent on nothing; they come from the metadata that the planner
wrote.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernellib.emulator import LaunchReport, Session


@dataclass(frozen=True)
class Counts:
    """Counters of one call, over all ranks.

    Attributes:
        launches: kernels that a rank launched.
        kernels: their names, of rank 0.
        wire_bytes: stored in other ranks' memory.
        memory_bytes: asked for in global memory, by all lanes.
        matrix_flops: multiplications and additions of matrix instructions.
        instructions: wave-level issues.
        num_tiles, tile_slots, rows: M tiles, rows they have room for, rows they hold.
        vgprs, lds_bytes, scratch_bytes: the most that any of the kernels has.
    """

    launches: int
    kernels: tuple[str, ...]
    wire_bytes: int
    memory_bytes: int
    matrix_flops: int
    instructions: int
    num_tiles: int
    tile_slots: int
    rows: int
    vgprs: int
    lds_bytes: int
    scratch_bytes: int

    @property
    def idle_slots(self) -> int:
        return self.tile_slots - self.rows


class _RankedLaunches(list[LaunchReport]):
    """A session's launches, which also remembers which thread, that is which rank, made each."""

    def __init__(self) -> None:
        super().__init__()
        self.by_thread: dict[int, list[LaunchReport]] = defaultdict(list)

    def append(self, report: LaunchReport) -> None:
        super().append(report)
        self.by_thread[threading.get_ident()].append(report)


class Counter:
    """Counters of one rank. Made by ``rank_counters``."""

    def __init__(self, session: Session, launches: _RankedLaunches) -> None:
        self._session, self._launches = session, launches

    def count(
        self,
        regions: Sequence[tuple[int, int]],
        rank: int,
        barrier: Callable[[], None],
        call: Callable[[], Any],
    ) -> tuple[Any, dict[str, Any]]:
        """Runs ``call`` on this rank with every rank's region tracked; collective.

        Args:
            regions: (address, bytes) of every rank's symmetric region.
            rank: this rank.
            barrier: of the heap.
            call: the call.

        Returns:
            What the call returned, and this rank's counters.
        """
        barrier()
        self._session.track = list(regions)
        barrier()
        mine = self._launches.by_thread[threading.get_ident()]
        before = len(mine)
        result = call()
        reports = mine[before:]
        barrier()
        self._session.track = []
        barrier()
        own = regions[rank]
        wire = sum(
            tracker.bytes["store"]
            for report in reports
            for tracker in report.trackers
            if (tracker.base, tracker.size) != own
        )
        return result, {
            "kernels": tuple(report.kernel_name for report in reports),
            "wire_bytes": wire,
            "memory_bytes": sum(sum(r.bytes_by_space.get("global", {}).values()) for r in reports),
            "matrix_flops": sum(sum(r.matrix_flops.values()) for r in reports),
            "instructions": sum(sum(r.instruction_counts.values()) for r in reports),
            "vgprs": max(r.resources.vgprs for r in reports),
            "lds_bytes": max(r.lds_bytes for r in reports),
            "scratch_bytes": max(r.resources.scratch_bytes for r in reports),
        }


def rank_counters(session: Session) -> Callable[[], Counter]:
    """A source of counters for the ranks of a session; takes over the session's list of launches."""
    launches = _RankedLaunches()
    session.launches = launches
    return lambda: Counter(session, launches)


def total(by_rank: Sequence[dict[str, Any]], tile_rows: Sequence[Sequence[int]], tile_m: int) -> Counts:
    """The counters of all ranks together."""

    def summed(name: str) -> int:
        return sum(int(counters[name]) for counters in by_rank)

    def largest(name: str) -> int:
        return max(int(counters[name]) for counters in by_rank)

    num_tiles = sum(len(rows) for rows in tile_rows)
    return Counts(
        launches=max(len(counters["kernels"]) for counters in by_rank),
        kernels=by_rank[0]["kernels"],
        wire_bytes=summed("wire_bytes"),
        memory_bytes=summed("memory_bytes"),
        matrix_flops=summed("matrix_flops"),
        instructions=summed("instructions"),
        num_tiles=num_tiles,
        tile_slots=num_tiles * tile_m,
        rows=sum(sum(rows) for rows in tile_rows),
        vgprs=largest("vgprs"),
        lds_bytes=largest("lds_bytes"),
        scratch_bytes=largest("scratch_bytes"),
    )
