# SPDX-License-Identifier: Apache-2.0
"""Steps of memory instructions whose effects go through a chip's caches (the relaxed twins of binding/)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.binding.addresses import Resolver, scatter
from kernellib.emulator.binding.buffer import BufferAddress, count_served
from kernellib.emulator.binding.memory import direct_stride, out_of_alignment, select_lanes, widen_direct
from kernellib.emulator.binding.movers import RegisterMover
from kernellib.emulator.binding.sources import Array, Fetch
from kernellib.emulator.errors import OutOfBoundsError
from kernellib.emulator.operands import M0, Operand
from kernellib.emulator.relaxed.chip import AGENT, L2, SYSTEM
from kernellib.emulator.relaxed.pending import Loads
from kernellib.emulator.sanitizers.monitor import WORKGROUP, Access
from kernellib.emulator.state import WaveGroup
from kernellib.emulator.waits import Outstanding

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.binding.memory import MemoryPlan

Step = Callable[[WaveGroup], Any]


def scope_level(plan: MemoryPlan) -> int:
    """How far down an access reaches (LLVM AMDGPU guide, memory model gfx942, table of code sequences).

    Loads and stores: sc1 agent, sc0 sc1 system, otherwise the L1 may answer.  Atomics bypass the L1 and use
    sc0 for "returns the value before": sc1 system, otherwise agent.
    """
    if plan.definition.action == "atomic":
        return SYSTEM if "sc1" in plan.cache else AGENT
    if "sc1" not in plan.cache:
        return L2
    return SYSTEM if "sc0" in plan.cache else AGENT


@functools.lru_cache(maxsize=64)
def _all_lanes(num_waves: int) -> tuple[Array, Array]:
    waves, lanes = np.divmod(np.arange(64 * num_waves), 64)
    waves.flags.writeable = lanes.flags.writeable = False
    return waves, lanes


@dataclass
class Located:
    """Lanes of one access: addresses int64 [k], wave (within the group) and lane of each.

    `ends`, `limits`: for buffers, the offset that the range check looks at and what it may not exceed, or
    None when every lane is in range.  `full`: every lane of every wave is on.
    """

    address: Array
    waves: Array
    lanes: Array
    full: bool
    offset: Array | None = None
    limit: Array | None = None

    def inside(self, at: int, size: int) -> Array | None:
        """Which lanes may access `size` bytes at byte `at` of their datum; None: all."""
        if self.offset is None or self.limit is None:
            return None
        allowed: Array = self.offset + (at + size) <= self.limit
        return None if allowed.all() else allowed

    def part(self, which: Array | None) -> Located:
        """Some of the lanes."""
        if which is None:
            return self
        return Located(self.address[which], self.waves[which], self.lanes[which], False)


Locate = Callable[[WaveGroup], Located]


def locate_global(addresses: Fetch) -> Locate:
    """Lanes of a global or flat instruction."""

    def locate(g: WaveGroup) -> Located:
        address, waves, lanes = select_lanes(g, addresses(g))
        if waves is None or lanes is None:
            return Located(address.reshape(-1), *_all_lanes(g.n), True)
        return Located(address, waves, lanes, False)

    return locate


def locate_buffer(where: BufferAddress) -> Locate:
    """Lanes of a buffer instruction."""

    def locate(g: WaveGroup) -> Located:
        address, offset, limit = where.compute(g)
        offset, limit = np.broadcast_to(offset, (g.n, 64)), np.broadcast_to(limit, (g.n, 64))
        if g.exec is None:
            return Located(address.reshape(-1), *_all_lanes(g.n), True, offset.reshape(-1), limit.reshape(-1))
        waves, lanes = np.nonzero(g.exec)
        return Located(address[waves, lanes], waves, lanes, False, offset[waves, lanes], limit[waves, lanes])

    return locate


def by_allocation(g: WaveGroup, resolver: Resolver, at: Located) -> list[tuple[Any, Any]]:
    """(allocation, which lanes) for each allocation that the lanes' data lie in; raises for bad addresses."""
    allocation = resolver.resolve(g, at.address, at.waves, at.lanes)
    if allocation is not None:
        return [(allocation, slice(None))]
    parts = []
    todo = np.ones(len(at.address), np.bool_)
    while todo.any():
        first = int(at.address[int(np.argmax(todo))])
        found = g.cohort.memory.find(first, first + resolver.size)
        assert found is not None, "Resolver has checked every address"
        inside = todo & (at.address >= found.base) & (at.address + resolver.size <= found.end)
        parts.append((found, np.nonzero(inside)[0]))
        todo &= ~inside
    return parts


def _units(size: int, piece: int, checked: bool) -> int:
    """Bytes moved at a time: whole items, or what a buffer's range check looks at."""
    return min(size, 4) if checked else piece


def _tell(
    g: WaveGroup,
    inst: Instruction,
    allocation: Any,
    lanes: Located,
    part: Any,
    size: int,
    action: str,
    level: int,
) -> None:
    monitor = g.cohort.launch.monitor
    if monitor is not None:
        if level == L2 and "sc0" in inst.modifiers:
            level = WORKGROUP
        offsets = lanes.address[part] - allocation.base
        monitor.access(
            Access(g, inst, allocation, offsets, size, action, level, lanes.waves[part], lanes.lanes[part])
        )


def _count(g: WaveGroup, inst: Instruction, action: str, size: int, at: Located) -> None:
    """Count an access; lanes that a buffer's range check turns away ask for nothing."""
    if at.offset is None or at.limit is None:
        g.cohort.count("global", action, inst.mnemonic, size, at.address, g, (at.waves, at.lanes))
    else:
        count_served(g, inst, action, size, at.address, at.limit - at.offset, at.waves, at.lanes)


def _gather(g: WaveGroup, resolver: Resolver, at: Located, shift: int, unit: int, level: int) -> Array:
    """u{unit} items at byte `shift` of every lane's datum; 0 for lanes out of a buffer's range."""
    which = at.inside(shift, unit)
    lanes = at.part(which)
    chip, cu = g.cohort.launch.chip, g.cohort.cu[g.waves]
    result: Array | None = None
    total = len(at.address)
    if not len(lanes.address):
        return np.zeros(total, f"u{unit}")
    if shift:
        lanes = Located(lanes.address + shift, lanes.waves, lanes.lanes, lanes.full)
    for allocation, part in by_allocation(g, resolver, lanes):
        _tell(g, resolver.inst, allocation, lanes, part, unit, "load", level)
        items = chip.load(
            allocation, lanes.address[part] - allocation.base, unit, cu[lanes.waves[part]], level
        )
        if which is None and isinstance(part, slice):
            return np.asarray(items)
        if result is None:
            result = np.zeros(total, items.dtype)
        place = np.arange(total) if which is None else np.nonzero(which)[0]
        result[place[part]] = items
    assert result is not None
    return result


def _join(words: list[Array], unit: int, piece: int) -> list[Array]:
    if unit == piece:
        return words
    joined = np.ascontiguousarray(np.stack(words, axis=-1))
    return [joined.view("u8" if piece == 8 else "c16")[..., 0]]


def load_step(plan: MemoryPlan, locate: Locate, issue: Callable[[WaveGroup], None], checked: bool) -> Step:
    """A load into registers."""
    definition, inst = plan.definition, plan.inst
    size, level = definition.bytes_per_lane, scope_level(plan)
    mover = RegisterMover(plan.ctx, inst, definition, plan.result)
    whole, single = Resolver(inst, mover.piece, "load"), Resolver(inst, min(size, 4), "load")
    mask = plan.result_mask

    def step(g: WaveGroup) -> None:
        issue(g)
        cohort = g.cohort
        cohort.queue.issued[g.waves] += 1
        at = locate(g)
        if not len(at.address):
            return
        _count(g, inst, "load", size, at)
        if cohort.queue.loads:
            cohort.queue.before(g, at.address, size, mask)
        split = checked and at.inside(0, size) is not None
        unit = _units(size, mover.piece, split)
        resolver = single if split else whole
        if not split and cohort.queue.late() and _put_off(g, plan, mover, whole, at, level, mask):
            return
        words = [_gather(g, resolver, at, shift, unit, level) for shift in range(0, size, unit)]
        items = _join(words, unit, mover.piece)
        if at.full:
            mover.write(g, [item.reshape(g.n, 64) for item in items], None, None)
        else:
            mover.write(g, items, at.waves, at.lanes)

    return step


def _put_off(
    g: WaveGroup,
    plan: MemoryPlan,
    mover: RegisterMover,
    resolver: Resolver,
    at: Located,
    level: int,
    mask: int,
) -> bool:
    """Let a load take its values when a wait covers it; False when its lanes reach several allocations."""
    parts = by_allocation(g, resolver, at)
    size = plan.definition.bytes_per_lane
    allocation = parts[0][0]
    offsets = at.address - allocation.base
    if len(parts) > 1 or int(offsets.max()) + size > allocation.size:
        return False
    _tell(g, plan.inst, allocation, at, slice(None), size, "load", level)
    wave = g.waves[at.waves]
    cohort = g.cohort
    cohort.queue.put_off(
        Loads(wave, wave, at.lanes, cohort.cu[wave], allocation, offsets, size, level, mover, mask)
    )
    return True


def store_step(plan: MemoryPlan, locate: Locate, issue: Callable[[WaveGroup], None], checked: bool) -> Step:
    """A store from registers."""
    definition, inst = plan.definition, plan.inst
    size, level = definition.bytes_per_lane, scope_level(plan)
    mover = RegisterMover(plan.ctx, inst, definition, plan.data)
    whole, single = Resolver(inst, mover.piece, "store"), Resolver(inst, min(size, 4), "store")

    def step(g: WaveGroup) -> None:
        issue(g)
        cohort = g.cohort
        cohort.queue.issued[g.waves] += 1
        at = locate(g)
        if not len(at.address):
            return
        _count(g, inst, "store", size, at)
        if cohort.queue.loads:
            cohort.queue.before(g, at.address, size)
        items = mover.read(g, None if at.full else at.waves, None if at.full else at.lanes)
        split = checked and at.inside(0, size) is not None
        unit = _units(size, mover.piece, split)
        if unit < mover.piece:
            words = np.ascontiguousarray(items[0]).view(f"u{unit}").reshape(len(items[0]), -1)
            items = [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]
        for number, item in enumerate(items):
            _scatter(g, single if split else whole, at, number * unit, item, level)
        cohort.launch.stores += 1

    return step


def _scatter(g: WaveGroup, resolver: Resolver, at: Located, shift: int, items: Array, level: int) -> None:
    which = at.inside(shift, items.dtype.itemsize)
    lanes = at.part(which)
    if not len(lanes.address):
        return
    if which is not None:
        items = items[which]
    if shift:
        lanes = Located(lanes.address + shift, lanes.waves, lanes.lanes, lanes.full)
    cohort = g.cohort
    cu = cohort.cu[g.waves]
    for allocation, part in by_allocation(g, resolver, lanes):
        waves = lanes.waves[part]
        owner = cu[waves]
        _tell(g, resolver.inst, allocation, lanes, part, items.dtype.itemsize, "store", level)
        lines = cohort.launch.chip.store(
            allocation, lanes.address[part] - allocation.base, items[part], owner, level
        )
        cohort.queue.add_stores(g.waves[waves], owner, lines)


def atomic_step(
    plan: MemoryPlan, locate: Locate, issue: Callable[[WaveGroup], None], result: Operand | None
) -> Step:
    """A read-modify-write; `result` the registers that get the value before."""
    definition, inst = plan.definition, plan.inst
    size, level = definition.bytes_per_lane, scope_level(plan)
    source = RegisterMover(plan.ctx, inst, definition, plan.data, doubled=definition.compares)
    sink = RegisterMover(plan.ctx, inst, definition, result) if result is not None else None
    resolver = Resolver(inst, size, "store")

    def step(g: WaveGroup) -> None:
        issue(g)
        cohort = g.cohort
        cohort.queue.issued[g.waves] += 1
        at = locate(g)
        if not len(at.address):
            return
        _count(g, inst, "atomic", size, at)
        if cohort.queue.loads:
            cohort.queue.before(g, at.address, size, plan.result_mask)
        operands = source.read(g, None if at.full else at.waves, None if at.full else at.lanes)
        which = at.inside(0, size)
        lanes = at.part(which)
        old = np.zeros(len(at.address), f"u{size}")
        if len(lanes.address):
            if which is not None:
                operands = [operand[which] for operand in operands]
            if (lanes.address & (size - 1)).any():
                bad = int(np.argmax((lanes.address & (size - 1)) != 0))
                raise out_of_alignment(g, inst, int(lanes.address[bad]), size, bad, lanes.waves, lanes.lanes)
            before = np.zeros(len(lanes.address), f"u{size}")
            cu = cohort.cu[g.waves]
            for allocation, part in by_allocation(g, resolver, lanes):
                _tell(g, resolver.inst, allocation, lanes, part, size, "atomic", level)
                before[part] = cohort.launch.chip.atomic(
                    definition,
                    allocation,
                    lanes.address[part] - allocation.base,
                    [operand[part] for operand in operands],
                    cu[lanes.waves[part]],
                    level,
                )
            old[slice(None) if which is None else which] = before
            cohort.launch.stores += 1
        if sink is not None:
            if at.full:
                sink.write(g, [old.reshape(g.n, 64)], None, None)
            else:
                sink.write(g, [old], at.waves, at.lanes)

    return step


def direct_step(plan: MemoryPlan, locate: Locate) -> Step:
    """A load into the LDS: lane i's datum lands at M0 + offset + i * `direct_stride`."""
    definition, inst = plan.definition, plan.inst
    size, level, shift = definition.bytes_per_lane, scope_level(plan), plan.offset
    unit = min(size, 4)
    resolver = Resolver(inst, unit, "load")  # the data are read in pieces of this size
    nothing = Outstanding(0, inst, "vmem")
    lane_offset = np.arange(64, dtype=np.int64) * direct_stride(size)

    def step(g: WaveGroup) -> None:
        cohort = g.cohort
        cohort.queue.issued[g.waves] += 1
        at = locate(g)
        if not len(at.address):
            g.waits.issue(nothing)
            return
        _count(g, inst, "load", size, at)
        target = (g.scalar[:, M0 : M0 + 1].astype(np.int64) + shift) + lane_offset
        target = target[at.waves, at.lanes]
        if int(target.min()) < 0 or int(target.max()) + max(size, 4) > cohort.lds_bytes:
            bad = int(np.argmax(target))
            raise OutOfBoundsError(
                f"direct-to-LDS load writes LDS byte {int(target[bad])}, "
                f"the workgroup has {cohort.lds_bytes}",
                cohort.location(g, inst, int(at.waves[bad]), int(at.lanes[bad]), int(target[bad])),
            )
        target = target + cohort.lds_base[g.waves][at.waves]
        cohort.direct_load(g, inst, target, size)
        for byte in range(0, size, unit):
            items = _gather(g, resolver, at, byte, unit, level)
            scatter(cohort.lds, target + byte, widen_direct(items, definition.data.base))
        cohort.launch.stores += 1

    return step
