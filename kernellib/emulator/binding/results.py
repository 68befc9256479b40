# SPDX-License-Identifier: Apache-2.0
"""Writes results into registers: exec-masked lanes, halves, bytes, pairs, lane masks and scalar results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.lanes import sdwa_merge, take_select
from kernellib.emulator.binding.sources import Array, BindContext, refuse
from kernellib.emulator.instructions.registry import AluDef, OperandType
from kernellib.emulator.operands import EXEC, ModifierValue, Operand
from kernellib.emulator.state import NUM_LANES, WaveGroup, pack_mask

U32, U16 = np.dtype(np.uint32), np.dtype(np.uint16)


@dataclass(frozen=True)
class Writer:
    """`write(group, value, lanes)` stores a result for the lanes of a bool mask (None: all).

    `slot` is the destination view when the whole result may be written straight into it.
    """

    write: Callable[[WaveGroup, Any, Array | None], None]
    slot: int | None = None


def bind_result(  # noqa: PLR0911 (one return per result form)
    ctx: BindContext,
    inst: Instruction,
    kind: OperandType,
    operand: Operand | None,
    index: int,
    definition: AluDef,
    op_sel: tuple[int, ...],
    encoding: str,
    modifiers: dict[str, ModifierValue],
) -> Writer:
    """The writer of one result of a vector instruction."""
    if kind.form == "exec":
        return Writer(_write_exec)
    if operand is None or not operand.is_register or operand.neg or operand.abs:
        raise refuse(inst, f"result {operand.text if operand else ''} is not a register")
    if kind.form == "mask":
        return _mask_writer(inst, operand)
    if kind.form == "scalar":
        return _scalar_writer(ctx, inst, kind, operand)
    if operand.kind == "sgpr":
        raise refuse(inst, f"result {operand.text}: wants a vector register")
    row = src.vector_row(ctx, operand)
    width = kind.dtype.itemsize
    registers = (
        kind.count * width // 4
        if kind.form == "multi"
        else 2
        if kind.form == "packed32"
        else max(width // 4, 1)
    )
    if operand.count != (registers or operand.count):
        raise refuse(inst, f"result {operand.text}: wants {registers} register(s)")
    if encoding == "sdwa":
        return _sdwa_writer(ctx, inst, kind, row, modifiers)
    if kind.form in ("multi", "packed32"):
        return _range_writer(ctx, kind, row, operand.count)
    if kind.form == "packed16":
        return _packed16_writer(ctx, kind, row)
    if width == 8:
        return _pair_writer(ctx, kind, row)
    if width == 4:
        return _dword_writer(ctx, kind, row)
    half = 0
    if index == 0 and "op_sel" not in definition.wants:
        position = sum(t.in_text for t in definition.signature.sources)
        half = op_sel[position] if position < len(op_sel) else 0
    keep = definition.high16 == "preserve" or half
    return _half_writer(ctx, kind, row, half, bool(keep))


def _store(view: Array, value: Any, lanes: Array | None, dtype: np.dtype[Any]) -> None:
    value = np.asarray(value)
    if value.dtype != dtype:
        if value.dtype.itemsize != dtype.itemsize:
            raise TypeError(f"instruction definition returned {value.dtype}, its signature says {dtype}")
        value = value.view(dtype)
    if lanes is None:
        view[...] = value
    else:
        np.copyto(view, value, where=lanes)


def _dword_writer(ctx: BindContext, kind: OperandType, row: int) -> Writer:
    slot, dtype = src.vgpr_slot(ctx, row, kind.dtype), kind.dtype
    return Writer(lambda g, value, lanes: _store(g.views[slot], value, lanes, dtype), slot)


def _range_writer(ctx: BindContext, kind: OperandType, row: int, count: int) -> Writer:
    if kind.dtype.itemsize == 8:
        pairs = [
            _pair_writer(ctx, OperandType(kind.base, "lane", kind.base), row + 2 * i)
            for i in range(count // 2)
        ]

        def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
            for pair, part in zip(pairs, value, strict=True):
                pair.write(g, part, lanes)

        return Writer(write)
    slot, dtype = src.vgpr_range_slot(ctx, row, count, kind.dtype), kind.dtype

    def write_range(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        if value.ndim == 1:  # constants only: one value per register
            value = value[:, None, None]
        _store(g.views[slot], value, lanes, dtype)

    return Writer(write_range, slot)


def _packed16_writer(ctx: BindContext, kind: OperandType, row: int) -> Writer:
    low, high = (src.vgpr_part_slot(ctx, row, part, kind.dtype) for part in (0, 1))
    dtype = kind.dtype

    def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        _store(g.views[low], value[0], lanes, dtype)
        _store(g.views[high], value[1], lanes, dtype)

    return Writer(write)


def _pair_writer(ctx: BindContext, kind: OperandType, row: int) -> Writer:
    low, high = src.vgpr_slot(ctx, row, U32), src.vgpr_slot(ctx, row + 1, U32)

    def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        bits = np.asarray(value)
        if bits.dtype.itemsize != 8:
            raise TypeError(f"instruction definition returned {bits.dtype}, its signature says {kind.base}")
        halves = np.ascontiguousarray(bits).view(np.uint32).reshape(*bits.shape, 2)
        _store(g.views[low], halves[..., 0], lanes, U32)
        _store(g.views[high], halves[..., 1], lanes, U32)

    return Writer(write)


def _half_writer(ctx: BindContext, kind: OperandType, row: int, half: int, keep: bool) -> Writer:
    part, whole, dtype = (
        src.vgpr_part_slot(ctx, row, half, kind.dtype),
        src.vgpr_slot(ctx, row, U32),
        kind.dtype,
    )

    def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        if keep:
            _store(g.views[part], value, lanes, dtype)
            return
        bits = np.asarray(value)
        if bits.dtype.itemsize != 2:
            raise TypeError(f"instruction definition returned {bits.dtype}, its signature says {kind.base}")
        _store(g.views[whole], bits.view(np.uint16).astype(np.uint32), lanes, U32)

    return Writer(write)


def _sdwa_writer(
    ctx: BindContext, inst: Instruction, kind: OperandType, row: int, modifiers: dict[str, ModifierValue]
) -> Writer:
    select = take_select(inst, modifiers, "dst_sel", "DWORD")
    unused = modifiers.pop("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"):
        raise refuse(inst, f"dst_unused:{unused}")
    if kind.form == "packed32" or (kind.form == "multi" and select == "DWORD"):
        return _range_writer(ctx, kind, row, max(kind.count, 2 if kind.form == "packed32" else 1))
    if kind.dtype.itemsize > 4 or kind.form == "multi":
        raise refuse(inst, "SDWA result selection on a register pair")
    whole, unsigned = src.vgpr_slot(ctx, row, U32), np.dtype(f"u{kind.dtype.itemsize}")
    policy = str(unused)

    def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        bits = np.asarray(value).view(unsigned).astype(np.uint32)
        _store(g.views[whole], sdwa_merge(g.views[whole], bits, select, policy), lanes, U32)

    return Writer(write)


def _mask_writer(inst: Instruction, operand: Operand) -> Writer:
    if operand.kind != "sgpr" or operand.count != 2 or operand.index % 2 or operand.index >= 128:
        raise refuse(inst, f"result {operand.text}: wants an aligned SGPR pair or vcc")
    first = 4 * operand.index
    to_exec = operand.index == EXEC

    def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        mask = np.broadcast_to(np.asarray(value), (g.n, NUM_LANES))
        if mask.dtype != np.bool_:
            raise TypeError(f"instruction definition returned {mask.dtype} as a lane mask, wants bool")
        if lanes is not None:
            mask = mask & lanes
        g.scalar.view(np.uint8)[:, first : first + 8] = pack_mask(mask)
        if to_exec:
            g.refresh_exec()

    return Writer(write)


def _write_exec(g: WaveGroup, value: Any, lanes: Array | None) -> None:
    mask = np.broadcast_to(np.asarray(value), (g.n, NUM_LANES))
    if lanes is not None:
        mask = mask & lanes
    g.scalar.view(np.uint8)[:, 4 * EXEC : 4 * EXEC + 8] = pack_mask(mask)
    g.refresh_exec()


def _scalar_writer(ctx: BindContext, inst: Instruction, kind: OperandType, operand: Operand) -> Writer:
    registers = max(kind.dtype.itemsize // 4, 1)
    if operand.kind != "sgpr" or operand.count != registers or operand.index >= 128:
        raise refuse(inst, f"result {operand.text}: wants {registers} scalar register(s)")
    if kind.dtype.itemsize == 8 and operand.index % 2:
        raise refuse(inst, f"result {operand.text}: a scalar register pair must be even-aligned")
    slot, dtype = src.sgpr_slot(ctx, operand.index, kind.dtype), kind.dtype
    to_exec = operand.index in (EXEC, EXEC + 1)

    def write(g: WaveGroup, value: Any, lanes: Array | None) -> None:
        result = np.asarray(value)
        if result.dtype.itemsize != dtype.itemsize:
            raise TypeError(f"instruction definition returned {result.dtype}, its signature says {dtype}")
        result = result.view(dtype)
        g.views[slot][...] = result if result.ndim == 2 else result.reshape(-1, 1)
        if to_exec:
            g.refresh_exec()

    return Writer(write)
