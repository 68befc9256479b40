# SPDX-License-Identifier: Apache-2.0
"""Binds scalar memory loads (s_load_*, s_buffer_load_*) and scalar cache maintenance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.addresses import Resolver, gather
from kernellib.emulator.binding.memory import MemoryPlan, make_issue, take_common
from kernellib.emulator.binding.sources import Array, BindContext, Fetch, refuse
from kernellib.emulator.errors import MisalignedAccessError
from kernellib.emulator.instructions.registry import MemoryDef
from kernellib.emulator.operands import Operand
from kernellib.emulator.state import WaveGroup

Step = Callable[[WaveGroup], Any]
U32, I64 = np.dtype(np.uint32), np.dtype(np.int64)


def _scalar_offset(ctx: BindContext, inst: Instruction, operand: Operand) -> Fetch:
    """int64 [n]: an immediate (21-bit signed) or an SGPR (unsigned)."""
    if operand.kind == "const" and isinstance(operand.value, int):
        if not -(1 << 20) <= operand.value < 1 << 20:
            raise refuse(inst, f"offset {operand.text} does not fit 21 signed bits")
        value = np.int64(operand.value)
        return lambda g: value
    if operand.kind == "sgpr" and operand.count == 1:
        slot = src.sgpr_slot(ctx, operand.index, U32, vector=False)
        return lambda g: g.views[slot].astype(np.int64)
    raise refuse(inst, f"offset {operand.text}: wants an immediate or one SGPR")


def bind_scalar_load(ctx: BindContext, inst: Instruction, definition: MemoryDef) -> tuple[Step, int]:
    """(step, registers read) of a scalar load.

    The address is `base + offset` with its two low bits ignored.  A buffer load checks `offset` against the
    descriptor's size and returns 0 past it.
    """
    plan = MemoryPlan(ctx, inst, definition, dict(inst.modifiers))
    take_common(plan)
    if len(inst.operands) != 3:
        raise refuse(inst, f"wants 3 operands, got {len(inst.operands)}")
    plan.result, base, offset_operand = inst.operands
    is_buffer = definition.space == "scalar_buffer"
    count = max(definition.data.count, 1)
    if plan.result.kind != "sgpr" or plan.result.count != count:
        raise refuse(inst, f"{plan.result.text}: wants {count} scalar register(s)")
    if base.kind != "sgpr" or base.count != (4 if is_buffer else 2) or base.index % 2:
        raise refuse(inst, f"{base.text}: wants {4 if is_buffer else 2} aligned scalar registers")
    offset, extra = _scalar_offset(ctx, inst, offset_operand), np.int64(plan.offset)
    issue = make_issue(plan, "smem")
    size = 4 * count
    resolver = Resolver(inst, size, "load")
    first = plan.result.index
    base_slot = src.sgpr_slot(ctx, base.index, I64, vector=False)
    words_slot = ctx.slots.intern(("sx", first, count), lambda g: g.scalar[:, first : first + count])

    read: Callable[[WaveGroup, Any, Array, int, Array], Array] = _read_words
    if ctx.instrumented:
        read = functools.partial(_read_hooked, inst)

    def step(g: WaveGroup) -> None:
        issue(g)
        relative = offset(g) + extra
        limit = None
        start = g.views[base_slot]
        if is_buffer:
            start = start & np.int64((1 << 48) - 1)
            limit = g.scalar[:, base.index + 2].astype(np.int64)
        address = np.broadcast_to((start + relative) & np.int64(-4), (g.n,))
        if ctx.instrumented and bool(((start + relative) & 3).any()):
            raise MisalignedAccessError(
                "scalar load from an address that is not a multiple of 4: the low bits are ignored",
                g.cohort.location(g, inst, 0, None, int(np.broadcast_to(start + relative, (g.n,))[0])),
            )
        g.cohort.count("scalar", "load", inst.mnemonic, size, address, g)
        if limit is not None:
            g.views[words_slot][...] = _checked(
                g, inst, address, np.broadcast_to(relative, (g.n,)), limit, count, read
            )
            return
        uniform = not ctx.instrumented and bool((address == address[0]).all())
        wanted = address[:1] if uniform else address
        waves = np.arange(len(wanted))
        allocation = resolver.resolve(g, wanted, waves, waves * 0)
        g.views[words_slot][...] = read(g, allocation, wanted, count, waves)

    return step, plan.source_mask


def _read_words(g: WaveGroup, allocation: Any, address: Array, count: int, waves: Array) -> Array:
    """uint32 [k, count] from k addresses, which `waves` of the group ask for."""
    if allocation is None:
        rows = []
        for one in address:
            found = g.cohort.memory.find(int(one), int(one) + 4 * count)
            rows.append(_read_words(g, found, np.array([one]), count, waves))
        return np.concatenate(rows)
    offsets = (address - allocation.base)[:, None] + 4 * np.arange(count)
    return gather(allocation, offsets, 4)


def _read_hooked(
    inst: Instruction, g: WaveGroup, allocation: Any, address: Array, count: int, waves: Array
) -> Array:
    """The same through the caches, one address per wave."""
    from kernellib.emulator.relaxed import hooks  # noqa: PLC0415 (it builds on this module)

    if allocation is None:
        rows = np.zeros((len(address), count), np.uint32)
        for number, one in enumerate(address):
            found = g.cohort.memory.find(int(one), int(one) + 4 * count)
            assert found is not None, "Resolver has checked every address"
            offsets = np.array([[one - found.base]]) + 4 * np.arange(count)
            rows[number] = hooks.read_scalar(g, inst, found, offsets, waves[number : number + 1])[0]
        return rows
    return hooks.read_scalar(
        g, inst, allocation, (address - allocation.base)[:, None] + 4 * np.arange(count), waves
    )


def _checked(
    g: WaveGroup,
    inst: Instruction,
    address: Array,
    relative: Array,
    limit: Array,
    count: int,
    read: Callable[[WaveGroup, Any, Array, int, Array], Array],
) -> Array:
    """Buffer form: dwords at or past the descriptor's size read as 0."""
    result = np.zeros((g.n, count), np.uint32)
    resolver = Resolver(inst, 4, "load")
    for word in range(count):
        inside = (relative + 4 * word >= 0) & (relative + 4 * word + 4 <= limit)
        lanes = np.nonzero(inside)[0]
        if len(lanes):
            wanted = address[lanes] + 4 * word
            allocation = resolver.resolve(g, wanted, lanes, lanes * 0)
            result[lanes, word] = read(g, allocation, wanted, 1, lanes)[:, 0]
    return result
