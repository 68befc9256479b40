# SPDX-License-Identifier: Apache-2.0
"""64-bit additions in halves: joining and splitting register pairs would cost more than the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.vector_plan import Plan
from kernellib.emulator.operands import Operand
from kernellib.emulator.state import WaveGroup

Step = Callable[[WaveGroup], Any]
U32 = np.dtype(np.uint32)


def _halves(plan: Plan, operand: Operand) -> tuple[int, int] | None:
    """Slots of the lower and upper dword of a 64-bit operand; None for what has none."""
    ctx = plan.ctx
    if operand.neg or operand.abs or operand.sext or not operand.is_register or operand.count != 2:
        return None
    if operand.kind == "sgpr":
        if src.special_source(operand) is not None:
            return None
        return src.sgpr_slot(ctx, operand.index, U32), src.sgpr_slot(ctx, operand.index + 1, U32)
    row = src.vector_row(ctx, operand)
    return src.vgpr_slot(ctx, row, U32), src.vgpr_slot(ctx, row + 1, U32)


def lshl_add_u64(plan: Plan, general: Step) -> Step:
    """v_lshl_add_u64 of register pairs by a constant shift with every lane on; `general` otherwise."""
    result, first, amount, second = plan.inst.operands
    target, a, c = (_halves(plan, operand) for operand in (result, first, second))
    if target is None or a is None or c is None or result.kind == "sgpr":
        return general
    if amount.kind != "const" or not isinstance(amount.value, int):
        return general
    (low, high), (a_low, a_high), (c_low, c_high) = target, a, c
    shift, rest = np.uint32(amount.value & 7), np.uint32(32 - (amount.value & 7))
    one = np.uint32(1)
    # pairs are aligned: the lower half may be written first, if an addend outlives it to tell the carry
    early = low != c_low or low != a_low or bool(shift)

    def step(g: WaveGroup) -> None:
        if g.exec is not None:
            general(g)
            return
        views = g.views
        lower, upper, addend = views[a_low], views[a_high], views[c_low]
        if shift:
            upper = (upper << shift) | (lower >> rest)
            lower = lower << shift
        total = np.add(lower, addend, out=views[low]) if early else lower + addend
        carry = total < (addend if low != c_low else lower)
        np.add(upper, views[c_high], out=views[high])
        if np.count_nonzero(carry):
            np.add(views[high], one, out=views[high], where=carry)
        if not early:
            views[low][...] = total

    return step
