# SPDX-License-Identifier: Apache-2.0
"""Fetches the sources of a vector ALU instruction: registers, parts of them, packed pairs, constants."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.lanes import sdwa_select
from kernellib.emulator.binding.sources import Array, Fetch, refuse
from kernellib.emulator.binding.vector_plan import Plan
from kernellib.emulator.instructions.registry import OperandType
from kernellib.emulator.operands import Operand
from kernellib.emulator.state import WaveGroup

U32 = np.dtype(np.uint32)


def immediate(plan: Plan, operand: Operand) -> Fetch:
    """An integer of the text, given to the semantics as a Python int."""
    if operand.kind != "const" or not isinstance(operand.value, int) or operand.neg:
        raise refuse(plan.inst, f"{operand.text}: wants an integer constant")
    value = operand.value
    return lambda g: value


def old_source(plan: Plan, result: OperandType, operand: Operand) -> tuple[int | None, Fetch]:
    """The previous value of a result, typed like it, without any source modifier."""
    bare = Plan(plan.ctx, plan.inst, plan.definition, {}, "")
    if result.dtype.itemsize == 2 and result.form == "lane":
        # the half that will be written: op_sel's result bit
        half = plan.flag(plan.op_sel, sum(t.in_text for t in plan.definition.signature.sources), 0)
        slot = src.vgpr_part_slot(plan.ctx, src.vector_row(plan.ctx, operand), half, result.dtype)
        return slot, src.fetch_slot(slot)
    return bind_source(bare, result, operand, 99)


def bind_source(
    plan: Plan, kind: OperandType, operand: Operand | None, position: int
) -> tuple[int | None, Fetch]:
    """(slot or None, fetch function) of one source operand."""
    ctx, inst = plan.ctx, plan.inst
    if kind.form in ("mask", "vcc"):
        if operand is not None and (operand.neg or operand.abs):
            raise refuse(inst, "source modifier on a lane mask")
        return None, src.fetch_mask(ctx, inst, operand)
    if operand is None or not (operand.is_register or operand.kind == "const"):
        raise refuse(
            inst, f"operand {operand.text if operand else '(implicit)'} is not a register or constant"
        )
    if kind.form in ("packed16", "packed32", "mix", "multi", "scale"):
        return _compound(plan, kind, operand, position)
    if operand.sext and plan.encoding != "sdwa":
        raise refuse(inst, "sext() belongs to SDWA")
    if (operand.neg or operand.abs) and kind.base[0] in "ui":
        raise refuse(inst, f"neg/abs on an integer operand ({operand.text})")
    slot, fetch = _plain(plan, kind, operand, position)
    if position == 0 and plan.dpp is not None:
        slot = None
        if kind.dtype.itemsize > 4 and kind.form == "lane" and operand.kind == "const":
            raise refuse(inst, "DPP source must be a vector register")
    if (operand.neg or operand.abs) and position == 0 and plan.dpp is not None:
        plan.moved_sign = (operand.neg, operand.abs)
        return None, fetch
    neg = operand.neg != bool(plan.flag(plan.neg_lo, position, 0) and "neg_lo" not in plan.definition.wants)
    if neg or operand.abs:
        return None, src.with_sign(fetch, kind, neg, operand.abs)
    return slot, fetch


def _compound(plan: Plan, kind: OperandType, operand: Operand, position: int) -> tuple[int | None, Fetch]:
    """Packed operands, register ranges, and the others with rules of their own."""
    if plan.selects and (plan.selects.get(position, "DWORD") != "DWORD" or kind.form == "packed16"):
        raise refuse(plan.inst, f"{operand.text}: SDWA on a packed operand or a register range")
    if kind.form == "packed16":
        return None, _packed16(plan, kind, operand, position)
    if kind.form == "packed32":
        return _packed32(plan, kind, operand, position)
    if kind.form == "mix":
        return None, _mix(plan, operand, position)
    return (None, _scale(plan, kind, operand)) if kind.form == "scale" else _multi(plan, kind, operand)


def _expect_count(plan: Plan, operand: Operand, count: int) -> None:
    if operand.is_register and operand.count != count:
        raise refuse(plan.inst, f"{operand.text}: wants {count} register(s), got {operand.count}")


def _plain(plan: Plan, kind: OperandType, operand: Operand, position: int) -> tuple[int | None, Fetch]:
    """Lane or scalar operand of 16, 32 or 64 bits, without sign modifiers."""
    ctx, inst, dtype = plan.ctx, plan.inst, kind.dtype
    if position in plan.selects:
        return None, _sdwa_source(plan, kind, operand, position)
    if operand.kind == "const":
        slot = src.constant_slot(ctx, src.constant(inst, operand, kind.base, dtype))
        return slot, src.fetch_slot(slot)
    special = src.special_source(operand)
    if special is not None:
        if dtype.itemsize != 4:
            raise refuse(inst, f"{operand.text} is a 32-bit operand")
        return None, lambda g: special(g)[:, None].view(dtype)
    _expect_count(plan, operand, max(dtype.itemsize // 4, 1))
    half = plan.flag(plan.op_sel, position, 0) if "op_sel" not in plan.definition.wants else 0
    if operand.kind == "sgpr":
        if dtype.itemsize == 8 and operand.index % 2:
            raise refuse(inst, f"{operand.text}: a scalar register pair must be even-aligned")
        if dtype.itemsize < 4 and half:
            key = ("sh", operand.index, dtype.str)
            column = operand.index * 2 + 1
            slot = ctx.slots.intern(key, lambda g: g.scalar.view(dtype)[:, column : column + 1])
        else:
            slot = src.sgpr_slot(ctx, operand.index, dtype)
        return slot, src.fetch_slot(slot)
    row = src.vector_row(ctx, operand)
    if kind.form == "scalar":
        raise refuse(inst, f"{operand.text}: wants a scalar register or constant")
    if dtype.itemsize == 8:
        return None, src.fetch_pair(ctx, row, dtype)
    if dtype.itemsize == 4:
        slot = src.vgpr_slot(ctx, row, dtype)
    else:
        slot = src.vgpr_part_slot(ctx, row, half, dtype)
    return slot, src.fetch_slot(slot)


def _sdwa_source(plan: Plan, kind: OperandType, operand: Operand, position: int) -> Fetch:
    ctx, dtype, select = plan.ctx, kind.dtype, plan.selects[position]
    if dtype.itemsize > 4 or kind.form != "lane":
        raise refuse(plan.inst, f"SDWA on operand {operand.text}")
    _expect_count(plan, operand, 1)
    if operand.kind == "const":
        raw = src.fetch_slot(src.constant_slot(ctx, src.constant(plan.inst, operand, kind.base, dtype)))
        return raw
    if operand.kind == "sgpr":
        raw = src.fetch_slot(src.sgpr_slot(ctx, operand.index, U32))
    else:
        raw = src.fetch_slot(src.vgpr_slot(ctx, src.vector_row(ctx, operand), U32))
    sext = operand.sext
    if dtype.itemsize == 4:
        return lambda g: sdwa_select(raw(g), select, sext).view(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return lambda g: sdwa_select(raw(g), select, sext).astype(unsigned).view(dtype)


def _raw_dword(plan: Plan, kind: OperandType, operand: Operand) -> Fetch:
    """One dword of a packed operand as uint32."""
    ctx = plan.ctx
    if operand.kind == "const":
        if operand.neg or operand.abs:
            raise refuse(plan.inst, f"source modifier on constant {operand.text}")
        if isinstance(operand.value, float):
            bits = np.uint32(src.constant_bits(operand.value, kind.base))
        else:
            bits = np.uint32(src.constant_bits(operand.value, "u32"))
        return src.fetch_slot(src.constant_slot(ctx, np.asarray(bits).reshape(1, 1)))
    _expect_count(plan, operand, 1)
    if operand.kind == "sgpr":
        return src.fetch_slot(src.sgpr_slot(ctx, operand.index, U32))
    return src.fetch_slot(src.vgpr_slot(ctx, src.vector_row(ctx, operand), U32))


def _packed16(plan: Plan, kind: OperandType, operand: Operand, position: int) -> Fetch:
    """[2, ...] of a 16-bit type: element i is the half that op_sel (i = 0) or op_sel_hi (i = 1) picks."""
    raw = _raw_dword(plan, kind, operand)
    halves = (plan.flag(plan.op_sel, position, 0), plan.flag(plan.op_sel_hi, position, 1))
    flips = (plan.flag(plan.neg_lo, position, 0), plan.flag(plan.neg_hi, position, 0))
    if any(flips) and not kind.is_float:
        raise refuse(plan.inst, "neg_lo/neg_hi on an integer operand")
    if operand.neg or operand.abs:
        raise refuse(plan.inst, f"{operand.text}: packed operands take neg_lo/neg_hi")
    dtype = kind.dtype

    def fetch(g: WaveGroup) -> Array:
        words = raw(g)
        both = np.empty((2, *words.shape), np.uint16)
        for element in (0, 1):
            both[element] = words >> np.uint32(16) if halves[element] else words & np.uint32(0xFFFF)
            if flips[element]:
                both[element] ^= np.uint16(0x8000)
        return both.view(dtype)

    return fetch


def _packed32(plan: Plan, kind: OperandType, operand: Operand, position: int) -> tuple[int | None, Fetch]:
    """[2, ...] of a 32-bit type: element i is the register that op_sel (i = 0) or op_sel_hi (i = 1) picks."""
    ctx, dtype = plan.ctx, kind.dtype
    low, high = plan.flag(plan.op_sel, position, 0), plan.flag(plan.op_sel_hi, position, 1)
    flips = (plan.flag(plan.neg_lo, position, 0), plan.flag(plan.neg_hi, position, 0))
    if any(flips) and not kind.is_float:
        raise refuse(plan.inst, "neg_lo/neg_hi on an integer operand")
    if operand.neg or operand.abs:
        raise refuse(plan.inst, f"{operand.text}: packed operands take neg_lo/neg_hi")
    if operand.kind == "const":
        # A 64-bit read of a constant has the constant in its low half; what the high half holds is not
        # published.
        if (low or high) and operand.value != 0:
            raise refuse(plan.inst, f"op_sel picks the upper half of constant {operand.text}")
        slot = src.constant_slot(ctx, src.constant(plan.inst, operand, kind.base, dtype))
    elif operand.kind == "sgpr":
        _expect_count(plan, operand, 2)
        index = operand.index
        columns = [index + low, index + high]
        # a fancy index copies: it must be taken again at every step
        return None, _flip(lambda g: g.scalar.view(dtype)[:, columns].T[:, :, None], flips, dtype)
    else:
        _expect_count(plan, operand, 2)
        row = src.vector_row(ctx, operand)
        if low == high:
            slot = src.vgpr_slot(ctx, row + low, dtype)
        else:
            slot = src.vgpr_range_slot(ctx, row + low, 2, dtype, high - low)
    if any(flips):
        return None, _flip(src.fetch_slot(slot), flips, dtype)
    return slot, src.fetch_slot(slot)


def _flip(fetch: Fetch, flips: tuple[int, int], dtype: np.dtype[Any]) -> Fetch:
    if not any(flips):
        return fetch
    signs = np.array([f << 31 for f in flips], np.uint32).reshape(2, 1, 1)
    return lambda g: (fetch(g).view(np.uint32) ^ signs).view(dtype)


def _mix(plan: Plan, operand: Operand, position: int) -> Fetch:
    """v_fma_mix source: op_sel_hi chooses f16 (then op_sel chooses the half) over f32."""
    is_half, half = plan.flag(plan.op_sel_hi, position, 0), plan.flag(plan.op_sel, position, 0)
    if plan.neg_lo or plan.neg_hi:
        raise refuse(plan.inst, "neg_lo/neg_hi on v_fma_mix: LLVM prints source modifiers")
    kind = OperandType("f32", "lane", "f32")
    bare = Operand(**{**operand.__dict__, "neg": False, "abs": False})
    if operand.kind == "const" and is_half:
        kind_half = OperandType("f16", "lane", "f16")
        value = src.constant(plan.inst, bare, "f16", kind_half.dtype).astype(np.float32)
        return src.with_sign(lambda g: value, kind, operand.neg, operand.abs)
    if operand.kind == "const":
        value = src.constant(plan.inst, bare, "f32", kind.dtype)
        return src.with_sign(lambda g: value, kind, operand.neg, operand.abs)
    raw = _raw_dword(plan, kind, bare)
    if not is_half:
        return src.with_sign(lambda g: raw(g).view(np.float32), kind, operand.neg, operand.abs)

    def fetch(g: WaveGroup) -> Array:
        words = raw(g)
        bits = (words >> np.uint32(16) if half else words & np.uint32(0xFFFF)).astype(np.uint16)
        value: Array = bits.view(np.float16).astype(np.float32)
        return value

    return src.with_sign(fetch, kind, operand.neg, operand.abs)


def _scale(plan: Plan, kind: OperandType, operand: Operand) -> Fetch:
    """E8M0 scales of v_mfma_scale: four bytes per lane of a VGPR, of which op_sel picks one.

    An SGPR or a constant gives its bits 30:23, the exponent of a float, whatever byte op_sel names (LLVM pull
    request 158117, "for all inline/SGPR constants, SP HW use bits [30:23] as the scale"): the byte is copied
    to all four places here.
    """
    if operand.neg or operand.abs or operand.sext:
        raise refuse(plan.inst, f"{operand.text}: no source modifiers on a scale")
    raw = _raw_dword(plan, kind, operand)
    if operand.kind in ("vgpr", "agpr"):
        return raw
    return lambda g: ((raw(g) >> np.uint32(23)) & np.uint32(0xFF)) * np.uint32(0x01010101)


def _multi(plan: Plan, kind: OperandType, operand: Operand) -> tuple[int | None, Fetch]:
    ctx, dtype = plan.ctx, kind.dtype
    if operand.neg or operand.abs or operand.sext:
        raise refuse(plan.inst, f"{operand.text}: no source modifiers on register ranges")
    if operand.kind == "const":
        slot = src.constant_slot(ctx, src.constant(plan.inst, operand, kind.base, dtype))
        return slot, src.fetch_slot(slot)
    registers = kind.count * dtype.itemsize // 4 or operand.count
    _expect_count(plan, operand, registers)
    if operand.kind == "sgpr":
        slot = src.sgpr_range_slot(ctx, operand.index, operand.count, dtype)
        return slot, src.fetch_slot(slot)
    row = src.vector_row(ctx, operand)
    if dtype.itemsize == 8:
        pairs = [src.fetch_pair(ctx, row + 2 * i, dtype) for i in range(operand.count // 2)]
        return None, lambda g: np.stack([pair(g) for pair in pairs])
    slot = src.vgpr_range_slot(ctx, row, operand.count, dtype)
    return slot, src.fetch_slot(slot)
