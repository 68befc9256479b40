# SPDX-License-Identifier: Apache-2.0
"""Cohorts and dispatchers that tell the sanitizers what happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.binding.control import BARRIER
from kernellib.emulator.dispatcher import Dispatcher
from kernellib.emulator.errors import BarrierDivergenceError
from kernellib.emulator.operands import EXEC
from kernellib.emulator.relaxed.pending import VectorQueue
from kernellib.emulator.sanitizers.lds import LdsMonitor
from kernellib.emulator.sanitizers.registers import initially_written
from kernellib.emulator.scheduler import Cohort

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.launch import Launch
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]


class InstrumentedCohort(Cohort):
    """A cohort whose memory goes through `launch.chip` and whose events reach the sanitizers."""

    def __init__(self, launch: Launch, first: int, count: int) -> None:
        super().__init__(launch, first, count)
        enabled = launch.tuning.sanitizers
        self.monitor = launch.monitor
        self.cu = np.zeros(self.num_waves, np.int64)
        self.queue = VectorQueue(launch.chip, self.num_waves)
        self.threads = np.zeros(self.num_waves, np.int64)
        if self.monitor is not None:
            self.threads = self.monitor.clocks.threads(launch.number, self.workgroup_number, self.wave_idx)
        if launch.lds_bytes and enabled & {"lds_races", "uninitialised_lds"}:
            self.lds_monitor = LdsMonitor(self, enabled)
        # registers that hold what came of others never written: the instruction that read those, and which
        self.register_origins: dict[int, tuple[Instruction, int]] = {}
        if "uninitialised_registers" in enabled:
            self.groups[0].written = initially_written(self)
        self.watch_barriers = "barrier_divergence" in enabled
        self.barrier_pc = np.full(self.num_waves, -1, np.int64)
        self.first_exec = self.regs.scalar64[:, EXEC // 2].copy()

    def direct_load(self, g: WaveGroup, inst: Instruction, places: Array, size: int) -> None:
        """As Cohort.direct_load; the bytes count as written."""
        super().direct_load(g, inst, places, size)
        if self.lds_monitor is not None:
            waves = np.nonzero(g.lane_mask)[0]
            lanes = np.nonzero(g.lane_mask)[1]
            local = places - self.lds_base[g.waves][waves]
            self.lds_monitor.access(g, inst, places, local, max(size, 4), "store", waves, lanes)

    def lds_issued(self, waves: Array) -> None:
        """Count an operation of the LDS counter."""
        if self.lds_monitor is not None:
            self.lds_monitor.count(waves)
        if self.lds_delay is not None:
            self.lds_delay.count(waves)

    def _leave(self, g: WaveGroup, code: int) -> None:
        if code == BARRIER:
            # a compute unit takes its vector memory operations in order: loads come before the barrier
            self.queue.catch_up(g)
            self.barrier_pc[g.waves] = g.pc
            now = g.scalar64[:, EXEC // 2]
            off = np.nonzero(now != self.first_exec[g.waves])[0]
            if self.watch_barriers and len(off):
                inst = self.launch.bound.program.instructions[g.pc]
                missing = int(self.first_exec[g.waves[off[0]]]) & ~int(now[off[0]])
                lane = (missing & -missing).bit_length() - 1 if missing else None
                raise BarrierDivergenceError(
                    f"lanes of a wave are switched off at a barrier (EXEC {int(now[off[0]]):#x}, the wave "
                    f"started with {int(self.first_exec[g.waves[off[0]]]):#x})",
                    self.location(g, inst, int(off[0]), lane, None),
                )
        super()._leave(g, code)

    def _met(self, free: Array) -> None:
        for number in np.unique(self.slot[free]):
            waves = np.nonzero(free & (self.slot == number))[0]
            if self.watch_barriers and len(np.unique(self.barrier_pc[waves])) > 1:
                self._report_divergence(waves)
            if self.monitor is not None:
                self.monitor.met(self, waves)
        if self.lds_monitor is not None:
            self.lds_monitor.met(np.nonzero(free)[0])

    def _report_divergence(self, waves: Array) -> None:
        instructions = self.launch.bound.program.instructions
        first = waves[0]
        other = waves[int(np.argmax(self.barrier_pc[waves] != self.barrier_pc[first]))]
        here, there = (instructions[int(self.barrier_pc[w])] for w in (first, other))
        group = next(g for g in self.groups if first in g.waves)
        raise BarrierDivergenceError(
            f"wave {int(self.wave_idx[first])} of a workgroup waits at the barrier in listing line "
            f"{here.line_no}, wave {int(self.wave_idx[other])} at the one in line {there.line_no}",
            self.location(group, here, int(np.searchsorted(group.waves, first)), None, None),
        )


class InstrumentedDispatcher(Dispatcher):
    """Tells chip and monitor when a launch begins and ends."""

    cohort_type: type[Cohort] = InstrumentedCohort
    began = False
    ended = False

    def _begin(self) -> None:
        if not self.began:
            self.began = True
            launch = self.launch
            launch.chip.begin(launch.rank)
            if launch.monitor is not None:
                launch.number = launch.monitor.begin(launch)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            launch = self.launch
            launch.chip.end(launch.rank)
            if launch.monitor is not None:
                launch.monitor.end(launch.number, launch.rank)

    def round(self) -> bool:
        """As Dispatcher.round."""
        self._begin()
        changed = super().round()
        if self.finished:
            self._end()
        return changed
