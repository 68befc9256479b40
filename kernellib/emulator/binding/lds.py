# SPDX-License-Identifier: Apache-2.0
"""Binds LDS instructions (DS encoding): reads, writes, pairs, atomics, transposing reads.

Addresses are bytes within the workgroup's LDS, `VGPR + offset`; `offset0`/`offset1` of the pair forms count
elements (64 elements in the st64 forms).  An access past the workgroup's allocation is an OutOfBoundsError
(the hardware would drop it silently).  ds_swizzle, ds_permute and ds_bpermute touch no memory: they are
vector definitions that `bind_exchange` issues through the LDS counter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.addresses import gather, scatter
from kernellib.emulator.binding.memory import (
    MemoryPlan,
    make_issue,
    missing_wait,
    select_lanes,
    take_common,
)
from kernellib.emulator.binding.movers import RegisterMover, combine_atomic
from kernellib.emulator.binding.place import place_in_lds, usual_items
from kernellib.emulator.binding.sources import BindContext, Fetch, refuse
from kernellib.emulator.binding.transpose import bind_transpose
from kernellib.emulator.binding.vector import bind_vector
from kernellib.emulator.instructions.registry import AluDef, MemoryDef
from kernellib.emulator.operands import Operand
from kernellib.emulator.state import WaveGroup
from kernellib.emulator.waits import Outstanding, register_bits

Step = Callable[[WaveGroup], Any]
U32 = np.dtype(np.uint32)


def _address_slot(plan: MemoryPlan, operand: Operand) -> int:
    """Slot of the byte addresses within the workgroup's LDS, without the instruction's offset."""
    if operand.kind != "vgpr" or operand.count != 1:
        raise refuse(plan.inst, f"{operand.text}: an LDS address is one VGPR")
    return src.vgpr_slot(plan.ctx, src.vector_row(plan.ctx, operand), U32)


def _address(slot: int) -> Fetch:
    """The addresses as int64 [n, 64]."""
    return lambda g: g.views[slot].astype(np.int64)


def _element_offsets(plan: MemoryPlan) -> list[int]:
    """Byte offsets of the one or two elements of an access."""
    definition, modifiers = plan.definition, plan.modifiers
    if not definition.pairs:
        if not 0 <= plan.offset <= 0xFFFF:
            raise refuse(plan.inst, f"offset {plan.offset} does not fit 16 bits")
        return [plan.offset]
    unit = definition.bytes_per_lane // 2 * (64 if definition.stride64 else 1)
    offsets = []
    for name in ("offset0", "offset1"):
        value = modifiers.pop(name, 0)
        if not isinstance(value, int) or not 0 <= value <= 255:
            raise refuse(plan.inst, f"{name}:{value} does not fit 8 bits")
        offsets.append(value * unit)
    return offsets


def bind_lds(ctx: BindContext, inst: Instruction, definition: MemoryDef) -> tuple[Step, int]:
    """(step, registers read) of an LDS instruction."""
    plan = MemoryPlan(ctx, inst, definition, dict(inst.modifiers))
    if plan.modifiers.pop("gds", False):
        raise refuse(inst, "gds does not exist on this target")
    take_common(plan, ("offset0", "offset1"))
    offsets = _element_offsets(plan)
    if plan.modifiers:
        raise refuse(inst, f"modifier {next(iter(plan.modifiers))!r} has no meaning here")
    text = list(inst.operands)
    returns = definition.action == "load" or definition.always_returns
    data_count = {"load": 0, "store": 2 if definition.pairs else 1}.get(
        definition.action, 2 if definition.compares else 1
    )
    if len(text) != 1 + returns + data_count:
        raise refuse(inst, f"wants {1 + returns + data_count} operands, got {len(text)}")
    if returns:
        plan.result = text.pop(0)
    slot = _address_slot(plan, text.pop(0))
    address = _address(slot)
    issue = make_issue(plan, "lds")
    if definition.transpose:
        return bind_transpose(plan, address, offsets[0], issue), plan.source_mask
    if definition.action == "load":
        return _load(plan, slot, offsets, issue), plan.source_mask
    if definition.action == "store":
        return _store(plan, slot, offsets, text, issue), plan.source_mask
    return _atomic(plan, address, offsets[0], text, issue), plan.source_mask


def bind_exchange(ctx: BindContext, inst: Instruction, definition: AluDef) -> tuple[Step, int]:
    """(step, registers read) of ds_swizzle_b32, ds_permute_b32, ds_bpermute_b32: the result needs a wait."""
    if not inst.operands:
        raise refuse(inst, "wants operands")
    compute = bind_vector(ctx, inst, definition)
    result = inst.operands[0]
    mask = register_bits(result)
    operation = Outstanding(mask, inst, "lds")
    touched = 0
    for operand in inst.operands[1:]:
        touched |= register_bits(operand)

    def step(g: WaveGroup) -> None:
        if mask & g.pending:
            other = g.waits.conflicts(mask, "lds")
            if other is not None:
                raise missing_wait(g, inst, mask & other.mask, other, "overwrites")
        compute(g)
        g.waits.issue(operation)
        g.pending |= mask
        g.cohort.lds_issued(g.waves)

    return step, touched


def _load(plan: MemoryPlan, slot: int, offsets: list[int], issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    result = plan.result
    assert result is not None
    one = definition.bytes_per_lane // len(offsets)
    registers = max(one // 4, 1)
    movers = [
        RegisterMover(
            plan.ctx, inst, definition, result, register=i * registers, registers=registers * len(offsets)
        )
        for i in range(len(offsets))
    ]
    piece, size, address = movers[0].piece, definition.bytes_per_lane, _address(slot)
    pieces, find = range(one // piece), usual_items(offsets, one, piece)

    def usual(g: WaveGroup) -> bool:
        raw = g.views[slot]
        numbers = find(g, raw)
        if numbers is None:
            return False
        g.cohort.count("lds", "load", inst.mnemonic, size, raw, g)
        view = g.cohort.lds.view(piece, 0)
        loaded = [[view.take(number + at if at else number) for at in pieces] for number in numbers]
        for mover, items in zip(movers, loaded, strict=True):
            mover.write(g, items, None, None)
        return True

    def step(g: WaveGroup) -> None:
        issue(g)
        if usual(g):
            return
        local, waves, lanes = select_lanes(g, address(g))
        if not local.size:
            return
        g.cohort.count("lds", "load", inst.mnemonic, size, local, g)
        loaded = []
        for offset in offsets:
            place = place_in_lds(g, inst, local + offset, one, waves, lanes, "load")
            loaded.append(
                [gather(g.cohort.lds, place + at if at else place, piece) for at in range(0, one, piece)]
            )
        for mover, items in zip(movers, loaded, strict=True):
            mover.write(g, items, waves, lanes)

    return step


def _store(
    plan: MemoryPlan,
    slot: int,
    offsets: list[int],
    data: list[Operand],
    issue: Callable[[WaveGroup], None],
) -> Step:
    definition, inst = plan.definition, plan.inst
    one = definition.bytes_per_lane // len(offsets)
    movers = [RegisterMover(plan.ctx, inst, definition, operand) for operand in data]
    piece, size, address = movers[0].piece, definition.bytes_per_lane, _address(slot)
    find = usual_items(offsets, one, piece)

    def usual(g: WaveGroup) -> bool:
        raw = g.views[slot]
        numbers = find(g, raw)
        if numbers is None:
            return False
        g.cohort.count("lds", "store", inst.mnemonic, size, raw, g)
        view = g.cohort.lds.view(piece, 0)
        for mover, number in zip(movers, numbers, strict=True):
            for at, items in enumerate(mover.read(g, None, None)):
                view[(number + at if at else number).reshape(-1)] = items.view(view.dtype)
        return True

    def step(g: WaveGroup) -> None:
        issue(g)
        if usual(g):
            g.cohort.launch.stores += 1
            return
        local, waves, lanes = select_lanes(g, address(g))
        if not local.size:
            return
        g.cohort.count("lds", "store", inst.mnemonic, size, local, g)
        for mover, offset in zip(movers, offsets, strict=True):
            place = place_in_lds(g, inst, local + offset, one, waves, lanes, "store").reshape(-1)
            for number, items in enumerate(mover.read(g, waves, lanes)):
                target = place + number * piece if number else place
                if g.cohort.lds_delay is not None:
                    owner = np.repeat(g.waves, 64) if waves is None else g.waves[waves]
                    g.cohort.lds_delay.store(owner, target, items)
                else:
                    scatter(g.cohort.lds, target, items)
        g.cohort.launch.stores += 1

    return step


def _atomic(
    plan: MemoryPlan, address: Fetch, offset: int, data: list[Operand], issue: Callable[[WaveGroup], None]
) -> Step:
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    # ds_cmpst: the first data operand is the compare value, the second the new one; the function takes (new,
    # compare)
    ordered = data[::-1] if definition.compares else data
    movers = [RegisterMover(plan.ctx, inst, definition, operand) for operand in ordered]
    sink = RegisterMover(plan.ctx, inst, definition, plan.result) if plan.result is not None else None

    def step(g: WaveGroup) -> None:
        issue(g)
        local, waves, lanes = select_lanes(g, address(g))
        if not local.size:
            return
        g.cohort.count("lds", "atomic", inst.mnemonic, size, local, g)
        place = place_in_lds(g, inst, local + offset, size, waves, lanes, "atomic").reshape(-1)
        operands = [mover.read(g, waves, lanes)[0] for mover in movers]
        old = combine_atomic(definition, g.cohort.lds, place, operands)
        g.cohort.launch.stores += 1
        if sink is not None:
            sink.write(g, [old if waves is not None else old.reshape(g.n, 64)], waves, lanes)

    return step
