# SPDX-License-Identifier: Apache-2.0
"""Runs wave groups: divergence, barriers, interleaving, residency, deadlock.

A *cohort* is a set of whole workgroups whose waves share one register file and advance together; it is the
unit that is switched between.  Inside a cohort, waves at one program counter form a *group*; a branch on
which they disagree splits the group, and groups that reach the same block merge again.  The group at the
lowest program counter runs first (compilers lay out code so that this makes diverged waves meet), with a
quantum, so that a spin loop cannot starve the waves it waits for.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.binding.addresses import LocalStore
from kernellib.emulator.binding.control import BARRIER, END, SPLIT, YIELD
from kernellib.emulator.binding.memory import missing_wait
from kernellib.emulator.errors import (
    DeadlockError,
    EmulatorError,
    Finding,
    InstructionLimitError,
    Location,
    OutOfBoundsError,
)
from kernellib.emulator.state import WaveGroup, as_slice, wave_order
from kernellib.emulator.waits import Outstanding, WaitState

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.launch import Launch
    from kernellib.emulator.relaxed.lds import LdsDelay
    from kernellib.emulator.relaxed.pending import VectorQueue
    from kernellib.emulator.sanitizers.lds import LdsMonitor

Array = np.ndarray[Any, Any]
GROUP_QUANTUM = 512  # blocks that one group may run while others of its cohort wait
MAX_SPIN_BLOCKS = 256  # the longest loop that is recognised as waiting
MAX_POLLED = 4  # addresses that a message names per group


class Cohort:
    """Some workgroups of a launch, resident together."""

    # of instrumented cohorts (sanitizers/cohort.py):
    cu: Array  # compute unit of each wave
    queue: VectorQueue  # vector memory operations under way
    threads: Array  # numbers of the waves among all that run
    lds_monitor: LdsMonitor | None = None
    lds_delay: LdsDelay | None = None
    register_origins: dict[int, tuple[Instruction, int]]  # of instrumented cohorts (sanitizers/registers.py)

    def __init__(self, launch: Launch, first: int, count: int) -> None:
        bound = launch.bound
        self.launch = launch
        self.slots = bound.slots
        self.memory = launch.memory
        self.epoch = launch.epoch
        waves = launch.waves_per_workgroup
        self.first, self.num_workgroups = first, count
        slot, self.wave_idx = wave_order(count, waves)
        self.slot = slot
        self.workgroup_number = first + slot
        gx, gy, _ = launch.grid
        number = self.workgroup_number
        self.workgroup_id = np.stack([number % gx, number // gx % gy, number // (gx * gy)], axis=1)
        self.xcd = number % 8  # workgroups are dealt to the eight dies round robin
        self.num_waves = count * waves
        self.regs = launch.take_registers(self.num_waves)
        self.lds_bytes = launch.lds_bytes
        stride = -(-launch.lds_bytes // 16) * 16
        self.lds = LocalStore(count * stride)
        # one flag per dword, made when the first direct-to-LDS load is issued
        self.lds_in_flight: Array | None = None
        self.lds_base = slot.astype(np.int64) * stride
        self.scratch_bytes = launch.scratch_bytes
        self.scratch_stride = -(-launch.scratch_bytes // 16) * 16
        self.scratch = LocalStore(self.num_waves * 64 * self.scratch_stride)
        self.live = np.ones(self.num_waves, np.bool_)
        self.at_barrier = np.zeros(self.num_waves, np.bool_)
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.requests: Counter[tuple[str, int]] = Counter()
        launch.initialise(self)
        everyone = WaveGroup(self, np.arange(self.num_waves), self.regs, copied=False)
        everyone.waits = WaitState()
        everyone.block = launch.entry_block
        everyone.set_mode(launch.float_mode)
        everyone.refresh_exec()
        self.groups: list[WaveGroup] = [everyone]
        self.polled: dict[int, list[tuple[str, int, int]]] = {}  # by the first wave of a group
        self.turn = 0

    # ---------------------------------------------------------------------------------- counters, locations
    def count(
        self,
        space: str,
        action: str,
        mnemonic: str,
        size: int,
        addresses: Array,
        g: WaveGroup,
        lanes: tuple[Array, Array] | None = None,
    ) -> None:
        """Count what an instruction of group `g` asks for.

        `addresses`: [n, 64] of every lane, or 1-D of the active lanes in wave and lane order, or of the lanes
        (waves, lanes) that `lanes` names; [n] for scalar loads.
        """
        number = addresses.size
        self.bytes[space, action] += number * size
        self.requests[mnemonic, size] += number
        launch = self.launch
        if launch.trackers and space == "global":
            for tracker in launch.trackers:
                tracker.add(action, addresses, size)
        if launch.accesses is not None:
            launch.accesses.add(g, space, action, size, addresses, lanes)

    def location(
        self, g: WaveGroup, inst: Instruction, wave: int, lane: int | None, address: int | None
    ) -> Location:
        """Where a finding of wave `wave` (index within the group) happened."""
        member = int(g.waves[wave])
        x, y, z = (int(v) for v in self.workgroup_id[member])
        source = str(inst.source) if inst.source else None
        return Location(
            self.launch.kernel.name,
            inst.text,
            inst.line_no,
            source,
            (x, y, z),
            int(self.wave_idx[member]),
            lane,
            address,
        )

    def direct_load(self, g: WaveGroup, inst: Instruction, places: Array, size: int) -> None:
        """Enter a direct-to-LDS load: the bytes it writes are not there before a wait on vmcnt covers it."""
        if self.lds_in_flight is None:
            self.lds_in_flight = np.zeros(len(self.lds.bytes) // 4 + 4, np.bool_)
        dwords = (places[:, None] // 4 + np.arange(-(-size // 4))).reshape(-1)
        self.lds_in_flight[dwords] = True
        g.waits.issue(Outstanding(0, inst, "vmem", dwords))

    def _met(self, free: Array) -> None:
        """The waves of some workgroups, all that live, have met at a barrier (a hook)."""

    def lds_issued(self, waves: Array) -> None:
        """Some waves have issued an operation that lgkmcnt counts (a hook)."""

    def finish(self) -> None:
        """Every wave has ended (a hook for cohorts that keep more than registers)."""

    # ---------------------------------------------------------------------------------- groups
    def _make_group(self, parent: WaveGroup, waves: Array, block: int) -> WaveGroup:
        selection = as_slice(waves)
        if isinstance(selection, slice):
            group = WaveGroup(self, waves, self.regs.subset(selection), copied=False)
        else:
            group = WaveGroup(self, waves, self.regs.subset(waves), copied=True)
        group.waits = parent.waits.copy()
        group.pending = parent.pending
        group.written = parent.written
        group.block = block
        group.issued = parent.issued
        group.set_mode(parent.mode)
        group.refresh_exec()
        return group

    def _write_back(self, g: WaveGroup) -> None:
        """Put the registers of a group that works on copies back into the cohort's file."""
        if g.copied:
            self.regs.vector[:, g.waves] = g.vector
            self.regs.scalar[g.waves] = g.scalar
            self.regs.scc[g.waves] = g.scc

    def _split(self, g: WaveGroup, parts: list[tuple[Array, int]]) -> list[WaveGroup]:
        """Replace a group by one per (wave mask, block)."""
        self._write_back(g)
        self.groups.remove(g)
        made = [self._make_group(g, g.waves[mask], block) for mask, block in parts if mask.any()]
        self.groups.extend(made)
        return made

    def _partners(self, g: WaveGroup) -> list[WaveGroup]:
        """Groups that a runnable group may join with where it stands."""
        return [
            o
            for o in self.groups
            if o is not g and o.state == "run" and o.block == g.block and o.mode == g.mode
        ]

    def _merge(self, g: WaveGroup) -> WaveGroup:
        """Join a runnable group with the others that stand at the same block in the same mode."""
        partners = self._partners(g)
        if not partners:
            return g
        for other in (*partners, g):
            self._write_back(other)
            self.groups.remove(other)
        waves = np.sort(np.concatenate([g.waves, *[o.waves for o in partners]]))
        merged = self._make_group(g, waves, g.block)
        merged.issued = max(o.issued for o in (g, *partners))
        for other in partners:
            merged.waits = WaitState.merged(merged.waits, other.waits)
            merged.written &= other.written
        merged.pending = merged.waits.pending()
        self.groups.append(merged)
        return merged

    # ---------------------------------------------------------------------------------- running
    def run(self, quantum: int) -> str:
        """Run until every wave has ended ("done"), all are asleep ("asleep"), or the quantum is used up
        ("busy").

        `quantum` counts instructions issued by groups.  Raises DeadlockError when no wave can go on.
        """
        budget = quantum
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
            alone = len(awake) == 1 and len(self.groups) == 1
            g = awake[0] if alone else self._choose(awake)
            budget -= self._run_group(g, budget if alone else 1, alone)

    def _choose(self, awake: list[WaveGroup]) -> WaveGroup:
        """Lowest block first; a group that has had its quantum waits until the others have had theirs."""
        fresh = [g for g in awake if g.picks < GROUP_QUANTUM]
        if not fresh:
            for g in self.groups:
                g.picks = 0
            fresh = awake
        chosen = min(fresh, key=lambda g: g.block)
        chosen.picks += 1
        return chosen

    def _run_group(self, g: WaveGroup, budget: int, alone: bool) -> int:  # noqa: PLR0912 (the hot loop)
        """Run one group for at least a block; returns the instructions issued."""
        launch = self.launch
        blocks, counts, limit = launch.bound.blocks, launch.block_counts, launch.instruction_limit
        used = 0
        try:
            while True:
                number = g.block
                if number < 0:
                    raise OutOfBoundsError(
                        f"kernel {launch.kernel.name} runs past its last instruction: s_endpgm is missing",
                        self._here(g),
                    )
                block = blocks[number]
                for g.pc, touched, step in block.body:
                    if touched & g.pending:
                        self._check_pending(g, touched)
                    step(g)
                counts[number] += g.n
                issued = len(block.instructions)
                used += issued
                g.issued += issued
                if block.end is None:
                    g.block = block.next_block
                else:
                    g.pc, touched, step = block.end
                    if touched & g.pending:
                        self._check_pending(g, touched)
                    code = step(g)
                    if code < 0:
                        self._leave(g, code)
                        return used
                    g.block = code
                if g.issued > limit:
                    raise InstructionLimitError(
                        f"a wave has issued more than {limit} instructions", self._here(g)
                    )
                if not alone:
                    self._merge(g)
                    return used
                if used >= budget:
                    return used
        except EmulatorError:
            raise
        except (IndexError, ValueError, TypeError, MemoryError, ArithmeticError) as error:
            inst = launch.bound.program.instructions[g.pc]
            raise EmulatorError(
                f"internal error in `{inst.text}` (listing line {inst.line_no}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _here(self, g: WaveGroup) -> Location:
        return self.location(g, self.launch.bound.program.instructions[g.pc], 0, None, None)

    def _check_pending(self, g: WaveGroup, touched: int) -> None:
        other = g.waits.find(touched)
        if other is not None:
            inst = self.launch.bound.program.instructions[g.pc]
            raise missing_wait(g, inst, touched & other.mask, other, "touches")

    def _leave(self, g: WaveGroup, code: int) -> None:
        """Handle a block end that is not a plain jump."""
        if code == SPLIT:
            assert g.targets is not None
            truth, taken, falls = g.targets
            for part in self._split(g, [(truth, taken), (~truth, falls)]):
                if part in self.groups:
                    self._merge(part)
        elif code == END:
            self.live[g.waves] = False
            self.groups.remove(g)
            if self.at_barrier.any():
                self._release()
        elif code == BARRIER:
            self.at_barrier[g.waves] = True
            g.state = "barrier"
            self._release()
        elif code == YIELD:
            g.sleeping = True
            if len(self.groups) > 1:
                g.picks = GROUP_QUANTUM

    def _release(self) -> None:
        """Let every workgroup go whose live waves have all arrived at a barrier."""
        late = self.live & ~self.at_barrier
        free = self.at_barrier.copy()
        if late.any():
            missing = np.bincount(self.slot, weights=late, minlength=self.num_workgroups)
            free &= (missing == 0)[self.slot]
            if not free.any():
                return
        self._met(free)
        self.at_barrier[free] = False
        for g in [g for g in self.groups if g.state == "barrier"]:
            mine = free[g.waves]
            if mine.all():
                g.state = "run"
            elif mine.any():
                released, kept = self._split(g, [(mine, g.block), (~mine, g.block)])
                kept.state = "barrier"
                assert released.state == "run"
        for g in list(self.groups):
            if g in self.groups and g.state == "run":
                self._merge(g)

    # ---------------------------------------------------------------------------------- diagnosis
    def repeats(self) -> bool:
        """Whether every runnable group, run on its own, comes back to where it was with the same registers.

        Notes what each one reads meanwhile, for `waiting`.
        """
        self.polled.clear()
        return all(self._comes_back(g) for g in [g for g in self.groups if g.state == "run"])

    def _comes_back(self, g: WaveGroup) -> bool:
        reads: dict[tuple[str, int, int], None] = {}

        counted = self.count

        def note(space: str, action: str, mnemonic: str, size: int, addresses: Array, *rest: Any) -> None:
            counted(space, action, mnemonic, size, addresses, *rest)  # what runs here has run
            for address in addresses.reshape(-1)[:64]:
                if action != "store" and len(reads) < MAX_POLLED:
                    reads[space, int(address), size] = None

        seen: set[int] = set()
        self.count = note  # type: ignore[method-assign,assignment]
        try:
            for _ in range(MAX_SPIN_BLOCKS):
                state = (g.block, g.vector.tobytes(), g.scalar.tobytes(), g.scc.tobytes())
                signature = hash(state)
                if signature in seen:
                    self.polled[int(g.waves[0])] = list(reads)
                    return True
                seen.add(signature)
                self._run_group(g, 1, True)
                if g not in self.groups or g.state != "run":
                    return False
        finally:
            del self.count
        return False

    def waiting(self) -> list[str]:
        """Who waits where, one line per group, with the addresses it polls and what they hold."""
        instructions = self.launch.bound.program.instructions
        lines = []
        for g in self.groups:
            inst = instructions[g.pc]
            x, y, z = (int(v) for v in self.workgroup_id[int(g.waves[0])])
            waves = ", ".join(str(int(self.wave_idx[w])) for w in g.waves[:8]) + (", ..." if g.n > 8 else "")
            what = "waits at barrier" if g.state == "barrier" else "spins at"
            lines.append(
                f"{g.n} wave(s) from workgroup ({x}, {y}, {z}), wave {waves}: "
                f"{what} `{inst.text}` (listing line {inst.line_no})"
                + (f", source {inst.source}" if inst.source else "")
                + "".join(self._value_at(*read) for read in self.polled.get(int(g.waves[0]), ()))
            )
        return lines

    def _value_at(self, space: str, address: int, size: int) -> str:
        if space not in ("global", "scalar"):
            return f", reads {space} byte {address}"
        found = self.memory.find(address, address + size)
        if found is None:
            return f", reads {address:#x}"
        raw = found.bytes[address - found.base : address - found.base + size].tobytes()
        return f", reads {address:#x} of {found.name}, which holds {int.from_bytes(raw, 'little'):#x}"

    def _barrier_deadlock(self) -> Finding:
        return DeadlockError(
            "waves wait at a barrier that the other waves of their workgroup never reach",
            None,
            tuple(self.waiting()),
        )


__all__ = ["Cohort"]
