# SPDX-License-Identifier: Apache-2.0
"""What binding/ asks for instead of its own steps when a listing is bound for relaxed mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding.memory import make_issue
from kernellib.emulator.relaxed import steps
from kernellib.emulator.relaxed.chip import AGENT, L2, SYSTEM
from kernellib.emulator.relaxed.pending import WriteBack
from kernellib.emulator.relaxed.steps import Step, scope_level
from kernellib.emulator.sanitizers.monitor import Access
from kernellib.emulator.state import WaveGroup
from kernellib.emulator.waits import Outstanding, PendingKind

if TYPE_CHECKING:
    from kernellib.emulator.binding.buffer import BufferAddress
    from kernellib.emulator.binding.memory import MemoryPlan
    from kernellib.emulator.binding.sources import Array, Fetch
    from kernellib.emulator.operands import Operand


def global_step(plan: MemoryPlan, addresses: Fetch, kind: PendingKind) -> Step:
    """A global or flat instruction."""
    return _step(plan, steps.locate_global(addresses), kind, plan.result, False)


def buffer_step(
    plan: MemoryPlan, where: BufferAddress, kind: PendingKind, result: Operand | None, to_lds: bool
) -> Step:
    """A buffer instruction."""
    locate = steps.locate_buffer(where)
    if to_lds:
        return steps.direct_step(plan, locate)
    return _step(plan, locate, kind, result, True)


def _step(
    plan: MemoryPlan, locate: steps.Locate, kind: PendingKind, result: Operand | None, checked: bool
) -> Step:
    action = plan.definition.action
    if action == "load_to_lds":
        return steps.direct_step(plan, locate)
    issue = make_issue(plan, kind)
    if action == "load":
        return steps.load_step(plan, locate, issue, checked)
    if action == "store":
        return steps.store_step(plan, locate, issue, checked)
    return steps.atomic_step(plan, locate, issue, result)


def read_scalar(g: WaveGroup, inst: Instruction, allocation: Any, offsets: Array, waves: Array) -> Array:
    """uint32 [k, count] for a scalar load of some waves of the group: what the L2 of each one's die shows."""
    cu = np.broadcast_to(g.cohort.cu[g.waves][waves][:, None], offsets.shape).reshape(-1)
    chip, monitor = g.cohort.launch.chip, g.cohort.launch.monitor
    if monitor is not None and allocation.writable:
        each = np.repeat(waves, offsets.shape[1])
        monitor.access(Access(g, inst, allocation, offsets.reshape(-1), 4, "load", L2, each, each * 0))
    words = chip.load(allocation, offsets.reshape(-1), 4, cu, L2, scalar=True)
    return np.asarray(words).reshape(offsets.shape)


def cache_step(inst: Instruction, mnemonic: str) -> Step | None:
    """buffer_wbl2 and buffer_inv with their scope bits; scalar cache instructions have no effect here."""
    bits = {bit for bit in ("sc0", "sc1") if inst.modifiers.get(bit)}
    level = SYSTEM if bits == {"sc0", "sc1"} else AGENT if "sc1" in bits else L2
    if mnemonic == "buffer_inv":

        def invalidate(g: WaveGroup) -> None:
            cohort = g.cohort
            cohort.launch.chip.invalidate(cohort.cu[g.waves], level)
            if cohort.launch.monitor is not None:
                cohort.launch.monitor.acquired(cohort, g.waves, level)

        return invalidate
    if mnemonic == "buffer_wbl2":
        operation = Outstanding(0, inst, "store")

        def write_back(g: WaveGroup) -> None:
            cohort, queue, monitor = g.cohort, g.cohort.queue, g.cohort.launch.monitor
            queue.issued[g.waves] += 1
            g.waits.issue(operation)
            if level > L2:
                waves = g.waves.copy()
                done = None
                if monitor is not None:

                    def done(some: Array) -> None:
                        monitor.released(cohort, some, level)

                queue.records.append(WriteBack(waves, queue.issued[waves], cohort.cu[waves], level, done))

        return write_back
    return None


def wait(g: WaveGroup, vmcnt: int | None, lgkmcnt: int | None) -> None:
    """s_waitcnt: all but the N newest operations have been performed."""
    cohort = g.cohort
    if vmcnt is not None:
        if vmcnt == 0 and cohort.launch.monitor is not None:
            cohort.launch.monitor.waited(cohort, g.waves)
        cohort.queue.wait(g, vmcnt)
    if lgkmcnt is not None:
        if lgkmcnt == 0 and cohort.queue.loads:
            # within a workgroup a release is this wait alone: its loads come before what others do next
            cohort.queue.catch_up(g)
        if cohort.lds_monitor is not None:
            cohort.lds_monitor.wait(g.waves, lgkmcnt)
        if cohort.lds_delay is not None:
            cohort.lds_delay.wait(g.waves, lgkmcnt)


__all__ = ["buffer_step", "cache_step", "global_step", "read_scalar", "scope_level", "wait"]
