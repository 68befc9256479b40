# SPDX-License-Identifier: Apache-2.0
"""Binds global, flat, scratch and buffer instructions: addresses, data movement, counters, waits.

Address forms (CDNA ISA, "Flat memory instructions", "Memory buffer instructions"):

* global: `v[a:a+1] off` (64-bit lane address) or `v, s[b:b+1]` (uniform base + unsigned 32-bit lane offset);
  `offset` is signed.
* scratch: `v, off`, `off, s`, `v, s` or `off, off` byte offsets into the lane's private memory.
* buffer: descriptor `s[r:r+3]`; see `buffer_offsets`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.addresses import (
    Resolver,
    gather,
    gather_rows,
    out_of_bounds,
    scatter,
    scatter_rows,
)
from kernellib.emulator.binding.movers import RegisterMover, combine_atomic
from kernellib.emulator.binding.sources import Array, BindContext, Fetch, refuse
from kernellib.emulator.errors import MissingWaitError, OutOfBoundsError
from kernellib.emulator.instructions.registry import MemoryDef
from kernellib.emulator.operands import M0, ModifierValue, Operand
from kernellib.emulator.state import WaveGroup
from kernellib.emulator.waits import Outstanding, PendingKind, register_bits, register_name

Step = Callable[[WaveGroup], Any]
U32, U64 = np.dtype(np.uint32), np.dtype(np.uint64)
CACHE_BITS = ("nt", "sc0", "sc1")


@dataclass
class MemoryPlan:
    """Operands of one memory instruction, sorted out."""

    ctx: BindContext
    inst: Instruction
    definition: MemoryDef
    modifiers: dict[str, ModifierValue]
    result: Operand | None = None
    data: Operand | None = None
    compare: Operand | None = None
    offset: int = 0
    cache: tuple[str, ...] = ()

    @property
    def source_mask(self) -> int:
        """Registers read: every register operand that is not the result."""
        mask = 0
        for operand in self.inst.operands:
            if operand is not self.result:
                mask |= register_bits(operand)
        return mask

    @property
    def result_mask(self) -> int:
        """Registers written when the operation returns."""
        return register_bits(self.result) if self.result is not None else 0


def take_common(plan: MemoryPlan, allowed: tuple[str, ...] = ()) -> None:
    """Consume offset and cache bits; refuse what is left and not in `allowed`."""
    offset = plan.modifiers.pop("offset", 0)
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise refuse(plan.inst, f"offset:{offset} is not a number")
    plan.offset = offset
    plan.cache = tuple(bit for bit in CACHE_BITS if plan.modifiers.pop(bit, False))
    for name in plan.modifiers:
        if name not in allowed:
            raise refuse(plan.inst, f"modifier {name!r} has no meaning here")


def make_issue(plan: MemoryPlan, kind: PendingKind) -> Callable[[WaveGroup], None]:
    """`issue(group)`: checks the result registers and enters the operation into its wait counter."""
    mask, inst = plan.result_mask, plan.inst
    operation = Outstanding(mask, inst, kind)

    def issue(g: WaveGroup) -> None:
        if mask & g.pending:
            other = g.waits.conflicts(mask, kind)
            if other is not None:
                raise missing_wait(g, inst, mask & other.mask, other, "overwrites")
        g.waits.issue(operation)
        g.pending |= mask

    if plan.ctx.instrumented and kind in ("lds", "smem", "flat"):

        def counted(g: WaveGroup) -> None:
            issue(g)
            g.cohort.lds_issued(g.waves)

        return counted
    return issue


def missing_wait(
    g: WaveGroup, inst: Instruction, mask: int, other: Outstanding, verb: str
) -> MissingWaitError:
    """The finding for a register touched too early."""
    counter = {"vmem": "vmcnt", "store": "vmcnt", "flat": "vmcnt and lgkmcnt"}.get(other.kind, "lgkmcnt")
    return MissingWaitError(
        f"`{inst.text}` {verb} {register_name(mask)}, which `{other.instruction.text}` "
        f"(listing line {other.instruction.line_no}) may not have written yet: "
        f"no s_waitcnt on {counter} covers it",
        g.cohort.location(g, inst, 0, None, None),
    )


# ------------------------------------------------------------------------------------------------ addresses
def global_addresses(plan: MemoryPlan, vaddr: Operand, saddr: Operand) -> Fetch:
    """int64 [n, 64] byte addresses of a global instruction."""
    ctx, inst, offset = plan.ctx, plan.inst, np.int64(plan.offset)
    if saddr.kind == "off":
        if vaddr.kind != "vgpr" or vaddr.count != 2:
            raise refuse(inst, f"{vaddr.text}: wants a 64-bit address in two VGPRs")
        row = src.vector_row(ctx, vaddr)
        low, high = src.vgpr_slot(ctx, row, U32), src.vgpr_slot(ctx, row + 1, U32)

        def pair(g: WaveGroup) -> Array:
            views = g.views
            upper = views[high]
            first = upper[0, 0]
            address = views[low].astype(np.int64)
            if (
                np.count_nonzero(upper == first) == upper.size
            ):  # the usual case: all lanes within one 4 GiB window
                address += (np.int64(first) << np.int64(32)) + offset
                return address
            address += upper.astype(np.int64) << np.int64(32)
            if offset:
                address += offset
            return address

        return pair
    if (
        saddr.kind != "sgpr"
        or saddr.count != 2
        or saddr.index % 2
        or vaddr.kind != "vgpr"
        or vaddr.count != 1
    ):
        raise refuse(inst, f"{vaddr.text}, {saddr.text}: wants a 32-bit VGPR offset and an SGPR pair")
    base, lane = (
        src.sgpr_slot(ctx, saddr.index, np.dtype(np.int64)),
        src.vgpr_slot(ctx, src.vector_row(ctx, vaddr), U32),
    )

    def uniform(g: WaveGroup) -> Array:
        address = g.views[lane].astype(np.int64)
        address += g.views[base] + offset
        return address

    return uniform


def select_lanes(g: WaveGroup, addresses: Array) -> tuple[Array, Array | None, Array | None]:
    """(addresses of the active lanes, their waves, their lanes); the latter None when every lane is on."""
    if g.exec is None:
        return addresses, None, None
    waves, lanes = np.nonzero(g.exec)
    return addresses[waves, lanes], waves, lanes


# ------------------------------------------------------------------------------------------------ global
def bind_global(ctx: BindContext, inst: Instruction, definition: MemoryDef) -> tuple[Step, int]:
    """(step, registers read) of a global or flat load, store or atomic."""
    plan = MemoryPlan(ctx, inst, definition, dict(inst.modifiers))
    take_common(plan)
    text = list(inst.operands)
    is_flat = definition.space == "flat"
    returns = definition.action == "load" or (
        definition.action == "atomic" and ("sc0" in plan.cache or definition.always_returns)
    )
    to_lds = definition.action == "load_to_lds"
    wanted = 2 + (0 if is_flat else 1) - (1 if to_lds or definition.action == "load" else 0) + bool(returns)
    if len(text) != wanted:
        raise refuse(inst, f"wants {wanted} operands, got {len(text)}")
    if returns:
        plan.result = text.pop(0)
    vaddr = text.pop(0)
    plan.data = text.pop(0) if definition.action in ("store", "atomic") else None
    saddr = text.pop(0) if text else Operand("off", "off")
    addresses = global_addresses(plan, vaddr, saddr)
    kind: PendingKind = "flat" if is_flat else "vmem" if returns or to_lds else "store"
    touched = plan.source_mask | (register_bits(Operand("sgpr", "m0", M0)) if to_lds else 0)
    if ctx.instrumented:
        from kernellib.emulator.relaxed import hooks  # noqa: PLC0415 (it builds on this module)

        return hooks.global_step(plan, addresses, kind), touched
    if to_lds:
        return _load_to_lds(plan, addresses), touched
    issue = make_issue(plan, kind)
    access = {"load": _load, "store": _store, "atomic": _atomic}[definition.action]
    return access(plan, addresses, issue), touched


def _load(plan: MemoryPlan, addresses: Fetch, issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    mover = RegisterMover(plan.ctx, inst, definition, plan.result)
    resolver = Resolver(inst, size, "load")
    piece = mover.piece
    lane_bytes = np.arange(64, dtype=np.int64) * size

    def step(g: WaveGroup) -> None:
        issue(g)
        address, waves, lanes = select_lanes(g, addresses(g))
        if not address.size:
            return
        if waves is None and piece == 16 and _side_by_side(address, lane_bytes):
            # Lanes side by side, as a tuned kernel loads: whole rows of 64 data instead of single ones.
            first = address[:, 0]
            allocation = resolver.resolve_rows(g, first, 64 * size)
            if allocation is not None:
                g.cohort.count("global", "load", inst.mnemonic, size, address, g)
                mover.write_rows(g, gather_rows(allocation, first - allocation.base, 64 * size))
                return
        allocation = resolver.resolve(g, address, waves, lanes)
        g.cohort.count("global", "load", inst.mnemonic, size, address, g)
        if allocation is None:
            items = [_gather_scattered(g, address, piece, at) for at in range(0, size, piece)]
        else:
            offsets = address - allocation.base
            items = [
                gather(allocation, offsets + at if at else offsets, piece) for at in range(0, size, piece)
            ]
        mover.write(g, items, waves, lanes)

    return step


def _side_by_side(address: Array, lane_bytes: Array) -> bool:
    """Whether in every wave of [n, 64] addresses lane i's is lane 0's plus `lane_bytes[i]`."""
    if int(address[0, 63]) - int(address[0, 0]) != int(lane_bytes[63]):  # no pass over all where one tells
        return False
    first = address[:, :1]
    if not (address[:, 63:] - first == lane_bytes[63]).all():
        return False
    return bool((address - first == lane_bytes).all())


def _gather_scattered(g: WaveGroup, address: Array, size: int, at: int) -> Array:
    """Lanes that read from several allocations: one gather per allocation."""
    flat = address.reshape(-1) + at
    result = np.zeros(flat.shape, f"V{size}" if size == 16 else f"u{size}")
    todo = np.ones(flat.shape, np.bool_)
    while todo.any():
        first = int(flat[todo][0])
        allocation = g.cohort.memory.find(first, first + size)
        assert allocation is not None, "Resolver has checked every address"
        inside = todo & (flat >= allocation.base) & (flat + size <= allocation.end)
        result[inside] = gather(allocation, flat[inside] - allocation.base, size).view(result.dtype)
        todo &= ~inside
    return (result.view("c16") if size == 16 else result).reshape(address.shape)


def _store(plan: MemoryPlan, addresses: Fetch, issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    mover = RegisterMover(plan.ctx, inst, definition, plan.data)
    resolver = Resolver(inst, size, "store")
    piece = mover.piece
    lane_bytes = np.arange(64, dtype=np.int64) * size

    def step(g: WaveGroup) -> None:
        issue(g)
        address, waves, lanes = select_lanes(g, addresses(g))
        if not address.size:
            return
        if waves is None and piece == 16 and _side_by_side(address, lane_bytes):
            first = address[:, 0]
            found = resolver.resolve_rows(g, first, 64 * size)
            if found is not None and found.writable:
                g.cohort.count("global", "store", inst.mnemonic, size, address, g)
                scatter_rows(found, first - found.base, mover.read_rows(g))
                g.cohort.launch.stores += 1
                return
        allocation = resolver.resolve(g, address, waves, lanes)
        g.cohort.count("global", "store", inst.mnemonic, size, address, g)
        flat = address.reshape(-1)
        for number, items in enumerate(mover.read(g, waves, lanes)):
            target = flat + number * piece if number else flat
            if allocation is not None:
                scatter(allocation, target - allocation.base, items)
            else:
                _scatter_scattered(g, target, items)
        g.cohort.launch.stores += 1

    return step


def _scatter_scattered(g: WaveGroup, flat: Array, items: Array) -> None:
    size = items.dtype.itemsize
    todo = np.ones(flat.shape, np.bool_)
    while todo.any():
        first = int(flat[todo][0])
        allocation = g.cohort.memory.find(first, first + size)
        assert allocation is not None, "Resolver has checked every address"
        inside = todo & (flat >= allocation.base) & (flat + size <= allocation.end)
        scatter(allocation, flat[inside] - allocation.base, items[inside])
        todo &= ~inside


def _atomic(plan: MemoryPlan, addresses: Fetch, issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    source = RegisterMover(plan.ctx, inst, definition, plan.data, doubled=definition.compares)
    sink = RegisterMover(plan.ctx, inst, definition, plan.result) if plan.result is not None else None
    resolver = Resolver(inst, size, "store")

    def step(g: WaveGroup) -> None:
        issue(g)
        address, waves, lanes = select_lanes(g, addresses(g))
        if not address.size:
            return
        flat = address.reshape(-1)
        if (flat & (size - 1)).any():
            bad = int(np.nonzero(flat & (size - 1))[0][0])
            raise out_of_alignment(g, inst, int(flat[bad]), size, bad, waves, lanes)
        allocation = resolver.resolve(g, address, waves, lanes)
        g.cohort.count("global", "atomic", inst.mnemonic, size, address, g)
        operands = source.read(g, waves, lanes)
        if allocation is None:
            old = _combine_scattered(g, definition, flat, operands, size)
        else:
            old = combine_atomic(definition, allocation, flat - allocation.base, operands)
        g.cohort.launch.stores += 1
        if sink is not None:
            sink.write(g, [old if waves is not None else old.reshape(address.shape)], waves, lanes)

    return step


def _combine_scattered(
    g: WaveGroup, definition: MemoryDef, flat: Array, operands: list[Array], size: int
) -> Array:
    """An atomic whose lanes address several allocations, as counters of several ranks: one at a time."""
    result = np.zeros(flat.shape, f"u{size}")
    todo = np.ones(flat.shape, np.bool_)
    while todo.any():
        first = int(flat[todo][0])
        allocation = g.cohort.memory.find(first, first + size)
        assert allocation is not None, "Resolver has checked every address"
        inside = todo & (flat >= allocation.base) & (flat + size <= allocation.end)
        result[inside] = combine_atomic(
            definition, allocation, flat[inside] - allocation.base, [operand[inside] for operand in operands]
        )
        todo &= ~inside
    return result


def out_of_alignment(
    g: WaveGroup,
    inst: Instruction,
    address: int,
    size: int,
    position: int,
    waves: Array | None,
    lanes: Array | None,
) -> Exception:
    """The finding for an address that the instruction requires to be aligned."""
    from kernellib.emulator.errors import MisalignedAccessError  # noqa: PLC0415

    wave = position // 64 if waves is None else int(waves[position])
    lane = position % 64 if lanes is None else int(lanes[position])
    return MisalignedAccessError(
        f"address {address:#x} is not a multiple of {size}", g.cohort.location(g, inst, wave, lane, address)
    )


def _load_to_lds(plan: MemoryPlan, addresses: Fetch) -> Step:
    """Direct-to-LDS load: lane i's datum lands at M0 + offset + i * `direct_stride`."""
    definition, inst = plan.definition, plan.inst
    size, offset = definition.bytes_per_lane, plan.offset
    piece = min(size, 4)
    resolver = Resolver(inst, size, "load")
    nothing = Outstanding(0, inst, "vmem")  # with every lane off the counter still counts
    lane_offset = np.arange(64, dtype=np.int64) * direct_stride(size)

    def step(g: WaveGroup) -> None:
        address, waves, lanes = select_lanes(g, addresses(g))
        if not address.size:
            g.waits.issue(nothing)
            return
        allocation = resolver.resolve(g, address, waves, lanes)
        g.cohort.count("global", "load", inst.mnemonic, size, address, g)
        if allocation is None:
            raise OutOfBoundsError(
                "one direct-to-LDS load reads several allocations", g.cohort.location(g, inst, 0, None, None)
            )
        target = (g.scalar[:, M0 : M0 + 1].astype(np.int64) + offset) + lane_offset
        target, _, _ = select_lanes(g, target)
        store_direct_to_lds(
            g,
            inst,
            allocation,
            (address - allocation.base).reshape(-1),
            target,
            size,
            piece,
            definition.data.base,
        )

    return step


def direct_stride(size: int) -> int:
    """LDS bytes between the data of neighbouring lanes: 4; 16 for 3 and 4 dwords (CDNA4 ISA 9.1.9, 10.3)."""
    return 4 if size <= 4 else 16


def widen_direct(items: Array, base: str) -> Array:
    """A byte or short as the dword that lands in the LDS: zero- or sign-extended."""
    if items.dtype.itemsize >= 4:
        return items
    if base.startswith("i"):
        return items.view(f"i{items.dtype.itemsize}").astype(np.int32).view(np.uint32)
    return items.astype(np.uint32)


def store_direct_to_lds(
    g: WaveGroup,
    inst: Instruction,
    allocation: Any,
    offsets: Array,
    target: Array,
    size: int,
    piece: int,
    base: str,
) -> None:
    """Copy `size` bytes per lane from a byte store into the LDS (shared with the buffer form)."""
    cohort = g.cohort
    waves = np.nonzero(g.lane_mask)[0]
    flat = target.reshape(-1)
    if int(flat.min()) < 0 or int(flat.max()) + max(size, 4) > cohort.lds_bytes:
        bad = int(np.argmax(flat))
        raise OutOfBoundsError(
            f"direct-to-LDS load writes LDS byte {int(flat[bad])}, the workgroup has {cohort.lds_bytes}",
            cohort.location(g, inst, int(waves[bad]), None, int(flat[bad])),
        )
    flat = flat + g.cohort.lds_base[g.waves][waves]
    cohort.direct_load(g, inst, flat, size)
    for at in range(0, size, piece):
        items = gather(allocation, offsets + at if at else offsets, piece)
        scatter(cohort.lds, flat + at, widen_direct(items, base))
    cohort.launch.stores += 1


# ------------------------------------------------------------------------------------------------ scratch
def bind_scratch(ctx: BindContext, inst: Instruction, definition: MemoryDef) -> tuple[Step, int]:
    """(step, registers read) of a scratch load or store."""
    plan = MemoryPlan(ctx, inst, definition, dict(inst.modifiers))
    take_common(plan)
    text = list(inst.operands)
    if len(text) != 3 or definition.action not in ("load", "store"):
        raise refuse(inst, f"wants 3 operands, got {len(text)}")
    if definition.action == "load":
        plan.result = text.pop(0)
        vaddr, saddr = text
    else:
        vaddr, plan.data, saddr = text
    parts: list[Fetch] = []
    if vaddr.kind == "vgpr" and vaddr.count == 1:
        parts.append(src.fetch_slot(src.vgpr_slot(ctx, src.vector_row(ctx, vaddr), U32)))
    elif vaddr.kind != "off":
        raise refuse(inst, f"{vaddr.text}: wants one VGPR or off")
    if saddr.kind == "sgpr" and saddr.count == 1:
        parts.append(src.fetch_slot(src.sgpr_slot(ctx, saddr.index, U32)))
    elif saddr.kind != "off":
        raise refuse(inst, f"{saddr.text}: wants one SGPR or off")
    size = definition.bytes_per_lane
    is_load = definition.action == "load"
    mover = RegisterMover(ctx, inst, definition, plan.result if is_load else plan.data)
    issue = make_issue(plan, "vmem" if is_load else "store")
    offset, piece = plan.offset, mover.piece

    def step(g: WaveGroup) -> None:
        issue(g)
        local = np.full((g.n, 64), offset, np.int64)
        for part in parts:
            local += part(g)
        local, waves, lanes = select_lanes(g, local)
        if not local.size:
            return
        cohort = g.cohort
        low, high = int(local.min()), int(local.max()) + size
        if low < 0 or high > cohort.scratch_bytes:
            flat = local.reshape(-1)
            bad = int(np.argmax(flat)) if high > cohort.scratch_bytes else int(np.argmin(flat))
            raise OutOfBoundsError(
                f"{size}-byte scratch access at byte {int(flat[bad])}, the lane has {cohort.scratch_bytes}",
                cohort.location(g, inst, bad // 64 if waves is None else int(waves[bad]), None, None),
            )
        cohort.count("scratch", definition.action, inst.mnemonic, size, local, g)
        # Lane-major placement: lane l of wave w owns bytes [(64 w + l) * scratch_bytes, ...).
        owner = g.waves[:, None] * 64 + np.arange(64) if waves is None else g.waves[waves] * 64 + lanes
        place = local + owner * cohort.scratch_stride
        if is_load:
            mover.write(
                g, [gather(cohort.scratch, place + at, piece) for at in range(0, size, piece)], waves, lanes
            )
        else:
            flat = place.reshape(-1)
            for number, items in enumerate(mover.read(g, waves, lanes)):
                scatter(cohort.scratch, flat + number * piece, items)

    return step, plan.source_mask


__all__ = ["bind_global", "bind_scratch", "make_issue", "missing_wait", "out_of_bounds", "select_lanes"]
