# SPDX-License-Identifier: Apache-2.0
"""Binds buffer instructions: the descriptor, its range check, and direct-to-LDS loads.

Descriptor (CDNA ISA, "Buffer resource descriptor"): base 47:0, stride 61:48, swizzle enable 63, num_records
95:64, add-tid enable 119.  Address = base + soffset + offset + stride * index, offset = (offen ? VGPR : 0) +
immediate.

Range check of a raw access (stride 0, or no idxen): a dword (byte, short) is out of range when offset +
soffset + its size exceeds num_records; each dword of a wider access is checked on its own.  Structured
accesses (stride > 0 and idxen, no swizzle): out of range when index >= num_records or offset + size > stride.
Loads then give 0, stores and atomics are dropped. Swizzled buffers and add-tid addressing are refused.

That an access without idxen is raw whatever the stride: Mesa's radeonsi driver, in its notes on NUM_RECORDS
for GFX9 (vector memory without IDXEN, or STRIDE 0: bytes).  Compilers rely on it: MLIR's
amdgpu.fat_raw_buffer_cast with cacheSwizzleStride puts, for gfx942 and gfx950, a stride and bit 62 (the
cache's swizzle) into the descriptors of raw accesses, whose validBytes are bytes.

Published sources disagree on both rules.  Whether soffset counts: the GCN3 and Vega documents subtract it
from num_records, the CDNA4 document checks instruction offset plus VGPR only (9.1.5), and LLVM says of its
raw buffer intrinsics that soffset is "excluded from bounds checking".  Whether an offset past the stride
fails: GCN and Vega yes, CDNA4 does not say so.  The strict reading is implemented in both cases: what it lets
through is in range by every source, so a kernel that is right here never leans on the lax one, and one that
does lean on it reads zeros or loses stores here, where its test can see it.  The conformance tests accept
either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.addresses import Resolver, gather, scatter
from kernellib.emulator.binding.memory import (
    MemoryPlan,
    direct_stride,
    make_issue,
    out_of_alignment,
    select_lanes,
    take_common,
    widen_direct,
)
from kernellib.emulator.binding.movers import RegisterMover, combine_atomic
from kernellib.emulator.binding.sources import Array, BindContext, Fetch, refuse
from kernellib.emulator.errors import OutOfBoundsError, UnsupportedOperandError
from kernellib.emulator.instructions.registry import MemoryDef
from kernellib.emulator.operands import M0, Operand
from kernellib.emulator.state import WaveGroup
from kernellib.emulator.waits import Outstanding, PendingKind, register_bits

Step = Callable[[WaveGroup], Any]
U32, I64 = np.dtype(np.uint32), np.dtype(np.int64)


class BufferAddress:
    """Computes, per step, each lane's address and which of its pieces are in range."""

    def __init__(self, plan: MemoryPlan, vaddr: Operand, descriptor: Operand, soffset: Operand) -> None:
        ctx, inst = plan.ctx, plan.inst
        self.inst = inst
        self.offen, self.idxen = (
            bool(plan.modifiers.pop("offen", False)),
            bool(plan.modifiers.pop("idxen", False)),
        )
        wanted = self.offen + self.idxen
        if (vaddr.kind != "off") != bool(wanted) or (
            wanted and (vaddr.kind != "vgpr" or vaddr.count != wanted)
        ):
            raise refuse(inst, f"{vaddr.text}: offen and idxen want {wanted or 'no'} address register(s)")
        if descriptor.kind != "sgpr" or descriptor.count != 4 or descriptor.index % 4:
            raise refuse(inst, f"{descriptor.text}: wants a buffer descriptor in four aligned SGPRs")
        self.descriptor = descriptor.index
        self.immediate = plan.offset
        if not 0 <= self.immediate < 4096:
            raise refuse(inst, f"buffer offset {self.immediate} does not fit 12 bits")
        row = src.vector_row(ctx, vaddr) if wanted else 0
        self.index = src.fetch_slot(src.vgpr_slot(ctx, row, U32)) if self.idxen else None
        self.offset = src.fetch_slot(src.vgpr_slot(ctx, row + self.idxen, U32)) if self.offen else None
        self.soffset = self._soffset(ctx, soffset)

    def _soffset(self, ctx: BindContext, operand: Operand) -> Fetch:
        if operand.kind == "const" and isinstance(operand.value, int):
            value = np.int64(operand.value & 0xFFFFFFFF)
            return lambda g: value
        if operand.kind == "sgpr" and operand.count == 1:
            slot = src.sgpr_slot(ctx, operand.index, U32)
            return lambda g: g.views[slot].astype(np.int64)
        raise refuse(self.inst, f"{operand.text}: wants one SGPR or a constant")

    def compute(self, g: WaveGroup) -> tuple[Array, Array, Array]:
        """(address, offset to check, limit), int64; address and offset are [n, 64], limit [n, 1]."""
        words = g.scalar[:, self.descriptor : self.descriptor + 4]
        base = (words[:, 0].astype(np.int64) | (words[:, 1].astype(np.int64) & 0xFFFF) << 32)[:, None]
        stride = (words[:, 1].astype(np.int64) >> 16 & 0x3FFF)[:, None]
        if (words[:, 1] >> 31).any() or (words[:, 3] >> 23 & 1).any():
            raise UnsupportedOperandError(
                "swizzled or add-tid buffer descriptor", self.inst.line_no, self.inst.text
            )
        records = words[:, 2].astype(np.int64)[:, None]
        offset = np.full((g.n, 64), self.immediate, np.int64)
        if self.offset is not None:
            offset += self.offset(g)
        soffset = self.soffset(g)
        relative = offset + soffset
        if self.index is None or not stride.any():
            return base + relative, relative, records
        index = self.index(g).astype(np.int64)
        address = base + relative + stride * index
        # An index past the end fails whatever its offset: give it an offset that no stride admits.
        checked = np.where(index < records, offset, np.int64(1) << 40)
        raw = stride == 0  # waves of a group may hold different descriptors
        return address, np.where(raw, relative, checked), np.where(raw, records, stride)


def bind_buffer(ctx: BindContext, inst: Instruction, definition: MemoryDef) -> tuple[Step, int]:
    """(step, registers read) of a buffer load, store, atomic or direct-to-LDS load."""
    plan = MemoryPlan(ctx, inst, definition, dict(inst.modifiers))
    to_lds = bool(plan.modifiers.pop("lds", False))
    take_common(plan, ("offen", "idxen"))
    text = list(inst.operands)
    if len(text) != (3 if to_lds else 4):
        raise refuse(inst, f"wants {3 if to_lds else 4} operands, got {len(text)}")
    data = None if to_lds else text.pop(0)
    address = BufferAddress(plan, *text)
    if to_lds:
        if definition.action != "load" or definition.half:
            raise refuse(inst, "lds belongs to plain loads")
        touched = plan.source_mask | register_bits(Operand("sgpr", "m0", M0))
        if ctx.instrumented:
            return _relaxed(plan, address, "vmem", None, True), touched
        return _load_to_lds(plan, address), touched
    returns = definition.action == "load" or (definition.action == "atomic" and "sc0" in plan.cache)
    if returns:
        plan.result = data
    plan.data = data
    kind: PendingKind = "vmem" if returns else "store"
    access = {"load": _load, "store": _store, "atomic": _atomic}[definition.action]
    touched = plan.source_mask | (register_bits(data) if definition.action != "load" and data else 0)
    if ctx.instrumented:
        result = data
        if returns and data is not None and definition.compares:
            result = Operand(data.kind, data.text, data.index, data.count // 2)
        return _relaxed(plan, address, kind, result if returns else None, False), touched
    return access(plan, address, make_issue(plan, kind)), touched


def _relaxed(
    plan: MemoryPlan, where: BufferAddress, kind: PendingKind, result: Operand | None, to_lds: bool
) -> Step:
    from kernellib.emulator.relaxed import hooks  # noqa: PLC0415 (it builds on this module)

    return hooks.buffer_step(plan, where, kind, result, to_lds)


def _load(plan: MemoryPlan, where: BufferAddress, issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    mover = RegisterMover(plan.ctx, inst, definition, plan.result)
    size = definition.bytes_per_lane
    unit = min(size, 4)
    resolver = Resolver(inst, unit, "load")
    whole = Resolver(inst, size, "load")

    def step(g: WaveGroup) -> None:
        issue(g)
        address, offset, limit = where.compute(g)
        offset = offset + size  # end of the access
        inside = offset <= limit
        address, waves, lanes = select_lanes(g, address)
        if not address.size:
            return
        inside = inside if waves is None else inside[waves, lanes]
        if inside.all():
            g.cohort.count("global", "load", inst.mnemonic, size, address, g)
            allocation = whole.resolve(g, address, waves, lanes)
            if allocation is not None:
                offsets = address - allocation.base
                items = [gather(allocation, offsets + at, mover.piece) for at in range(0, size, mover.piece)]
                mover.write(g, items, waves, lanes)
                return
        ends = np.broadcast_to(offset - size, (g.n, 64))
        ends = ends if waves is None else ends[waves, lanes]
        bound = np.broadcast_to(limit, (g.n, 64))
        bound = bound if waves is None else bound[waves, lanes]
        count_served(g, inst, "load", size, address, bound - ends, waves, lanes)
        words = [_checked_gather(g, resolver, address + at, ends + at + unit <= bound, unit, waves, lanes)
                 for at in range(0, size, unit)]  # fmt: skip
        mover.write(g, _join(words, mover.piece), waves, lanes)

    return step


def count_served(
    g: WaveGroup,
    inst: Instruction,
    action: str,
    size: int,
    address: Array,
    room: Array,
    waves: Array | None,
    lanes: Array | None,
) -> None:
    """Count what the lanes of a buffer access of `size` bytes ask the memory for: their pieces in range.

    `room`: bytes from each lane's offset to its limit.  A lane out of range asks for nothing; one whose first
    dwords are in range asks for those (an atomic for all or nothing).
    """
    if (room >= size).all():
        g.cohort.count("global", action, inst.mnemonic, size, address, g)
        return
    unit = size if action == "atomic" else min(size, 4)
    served = np.clip(room // unit * unit, 0, size)
    for part in np.unique(served[served > 0]).tolist():
        which = np.nonzero(served == part)
        wave_of = which[0] if waves is None else waves[which[0]]
        lane_of = which[-1] if lanes is None else lanes[which[0]]
        g.cohort.count("global", action, inst.mnemonic, part, address[which], g, (wave_of, lane_of))


def _join(words: list[Array], piece: int) -> list[Array]:
    """Dwords of a datum as items of the mover's size."""
    if len(words) == 1 or piece == 4:
        return words
    joined = np.ascontiguousarray(np.stack(words, axis=-1))
    return [joined.view("u8" if piece == 8 else "c16")[..., 0]]


def _checked_gather(
    g: WaveGroup,
    resolver: Resolver,
    address: Array,
    inside: Array,
    unit: int,
    waves: Array | None,
    lanes: Array | None,
) -> Array:
    """Items of lanes in range; 0 elsewhere."""
    result = np.zeros(address.shape, f"u{unit}")
    if not inside.any():
        return result
    which = np.nonzero(inside)
    wave_of = which[0] if waves is None else waves[which[0]]
    lane_of = which[-1] if lanes is None else lanes[which[0]]
    wanted = address[which]
    allocation = resolver.resolve(g, wanted, wave_of, lane_of)
    if allocation is None:
        raise OutOfBoundsError(
            "one buffer access reads several allocations", g.cohort.location(g, resolver.inst, 0, None, None)
        )
    result[which] = gather(allocation, wanted - allocation.base, unit)
    return result


def _store(plan: MemoryPlan, where: BufferAddress, issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    mover = RegisterMover(plan.ctx, inst, definition, plan.data)
    size = definition.bytes_per_lane
    unit = min(size, 4)
    resolver = Resolver(inst, unit, "store")

    def step(g: WaveGroup) -> None:
        issue(g)
        address, offset, limit = where.compute(g)
        address, waves, lanes = select_lanes(g, address)
        if not address.size:
            return
        start = np.broadcast_to(offset, (g.n, 64))
        bound = np.broadcast_to(limit, (g.n, 64))
        start, bound = (start, bound) if waves is None else (start[waves, lanes], bound[waves, lanes])
        start, bound, flat = start.reshape(-1), bound.reshape(-1), address.reshape(-1)
        all_waves, all_lanes = np.nonzero(g.lane_mask) if waves is None else (waves, lanes)
        count_served(g, inst, "store", size, flat, bound - start, all_waves, all_lanes)
        words = _dwords(mover.read(g, waves, lanes), unit)
        for number, word in enumerate(words):
            at = number * unit
            keep = np.nonzero(start + at + unit <= bound)[0]
            if not len(keep):
                continue
            target = flat[keep] + at
            allocation = resolver.resolve(g, target, all_waves[keep], all_lanes[keep])  # type: ignore[index]
            if allocation is None:
                raise OutOfBoundsError(
                    "one buffer store writes several allocations", g.cohort.location(g, inst, 0, None, None)
                )
            scatter(allocation, target - allocation.base, np.ascontiguousarray(word[keep]))
        g.cohort.launch.stores += 1

    return step


def _dwords(items: list[Array], unit: int) -> list[Array]:
    """Items of a store cut into dwords (or left alone when narrower)."""
    if items[0].dtype.itemsize <= 4:
        return items
    words = np.ascontiguousarray(items[0]).view(np.uint32).reshape(len(items[0]), -1)
    return [words[:, i] for i in range(words.shape[1])]


def _atomic(plan: MemoryPlan, where: BufferAddress, issue: Callable[[WaveGroup], None]) -> Step:
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    source = RegisterMover(plan.ctx, inst, definition, plan.data, doubled=definition.compares)
    first = plan.data
    sink = None
    if plan.result is not None and first is not None:
        half = Operand(first.kind, first.text, first.index, first.count // (2 if definition.compares else 1))
        sink = RegisterMover(plan.ctx, inst, definition, half)
    resolver = Resolver(inst, size, "store")

    def step(g: WaveGroup) -> None:
        issue(g)
        address, offset, limit = where.compute(g)
        keep = np.broadcast_to(offset + size <= limit, (g.n, 64)) & g.lane_mask
        waves, lanes = np.nonzero(g.lane_mask)
        if not len(waves):
            return
        operands = source.read(g, waves, lanes)
        room = np.broadcast_to(limit - offset, (g.n, 64))[waves, lanes]
        count_served(g, inst, "atomic", size, address[waves, lanes], room, waves, lanes)
        inside = np.nonzero(keep[waves, lanes])[0]
        old = np.zeros(len(waves), f"u{size}")
        if len(inside):
            target = address[waves, lanes][inside]
            if (target & (size - 1)).any():
                bad = int(np.nonzero(target & (size - 1))[0][0])
                raise out_of_alignment(g, inst, int(target[bad]), size, bad, waves[inside], lanes[inside])
            allocation = resolver.resolve(g, target, waves[inside], lanes[inside])
            if allocation is None:
                raise OutOfBoundsError(
                    "one atomic addresses several allocations", g.cohort.location(g, inst, 0, None, None)
                )
            old[inside] = combine_atomic(
                definition, allocation, target - allocation.base, [o[inside] for o in operands]
            )
            g.cohort.launch.stores += 1
        if sink is not None:
            sink.write(g, [old], waves, lanes)

    return step


def _load_to_lds(plan: MemoryPlan, where: BufferAddress) -> Step:
    """Lane i's datum lands at M0 + immediate offset + i * `direct_stride`; out-of-range lanes write zeros."""
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    unit = min(size, 4)
    resolver = Resolver(inst, unit, "load")
    nothing = Outstanding(0, inst, "vmem")  # with every lane off the counter still counts
    lane_offset = np.arange(64, dtype=np.int64) * direct_stride(size)
    immediate = plan.offset

    def step(g: WaveGroup) -> None:
        address, offset, limit = where.compute(g)
        offset, limit = np.broadcast_to(offset, (g.n, 64)), np.broadcast_to(limit, (g.n, 64))
        waves, lanes = np.nonzero(g.lane_mask)
        if not len(waves):
            g.waits.issue(nothing)
            return
        count_served(
            g, inst, "load", size, address[waves, lanes], (limit - offset)[waves, lanes], waves, lanes
        )
        cohort = g.cohort
        target = ((g.scalar[:, M0 : M0 + 1].astype(np.int64) + immediate) + lane_offset)[waves, lanes]
        if int(target.min()) < 0 or int(target.max()) + max(size, 4) > cohort.lds_bytes:
            bad = int(np.argmax(target))
            raise OutOfBoundsError(
                f"direct-to-LDS load at LDS byte {int(target[bad])}, the workgroup has {cohort.lds_bytes}",
                cohort.location(g, inst, int(waves[bad]), int(lanes[bad]), int(target[bad])),
            )
        target = target + cohort.lds_base[g.waves][waves]
        cohort.direct_load(g, inst, target, size)
        for at in range(0, size, unit):
            inside = offset[waves, lanes] + at + unit <= limit[waves, lanes]
            items = _checked_gather(g, resolver, address[waves, lanes] + at, inside, unit, waves, lanes)
            scatter(cohort.lds, target + at, widen_direct(items, definition.data.base))
        cohort.launch.stores += 1

    return step
