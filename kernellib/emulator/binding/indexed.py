# SPDX-License-Identifier: Apache-2.0
"""VGPR indexing: s_set_gpr_idx_on, v_mov_b32 whose register number gets M0[7:0] added, s_set_gpr_idx_off.

Compilers make it of arrays in registers that are indexed by a value of the run.  Semantics: CDNA4 ISA 12.3
(S_SET_GPR_IDX_ON: M0[7:0] = S0[7:0], M0[15:12] = the operands that are indexed) and "VGPR indexing": SRC0
adds the index to the first source if it is a VGPR, DST to the result.  LLVM puts nothing but v_mov_b32
between on and off, in one basic block; everything else is refused there, and so are other ways to steer the
mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.memory import missing_wait
from kernellib.emulator.binding.sources import Array, BindContext, refuse
from kernellib.emulator.errors import OutOfBoundsError
from kernellib.emulator.instructions.registry import split_mnemonic
from kernellib.emulator.operands import M0, Operand
from kernellib.emulator.state import WaveGroup

Step = Callable[[WaveGroup], Any]
SRC0, DST = 1, 8
_FLAGS = {"SRC0": SRC0, "SRC1": 2, "SRC2": 4, "DST": DST}


def index_flags(inst: Instruction) -> int:
    """The operands that `s_set_gpr_idx_on s2, gpr_idx(SRC0,DST)` (or a number) names, as a bit set."""
    if len(inst.operands) != 2 or inst.modifiers:
        raise refuse(inst, "wants an index and gpr_idx(...)")
    operand = inst.operands[1]
    if operand.kind == "const" and isinstance(operand.value, int) and 0 <= operand.value < 16:
        return operand.value
    match = re.fullmatch(r"gpr_idx\(([\w\s,]*)\)", operand.text)
    names = [name.strip() for name in match.group(1).split(",") if name.strip()] if match else ["?"]
    if not set(names) <= set(_FLAGS) or len(set(names)) != len(names):
        raise refuse(inst, f"{operand.text}: wants gpr_idx of SRC0, SRC1, SRC2, DST, or their four bits")
    return sum(_FLAGS[name] for name in names)


def bind_index_on(ctx: BindContext, inst: Instruction, flags: int) -> Step:
    """s_set_gpr_idx_on: the index into M0[7:0], the flags into M0[15:12]; other bits of M0 stay."""
    operand = inst.operands[0]
    if operand.kind == "const" and isinstance(operand.value, int):
        value = np.uint32(operand.value & 0xFF)
        index: Callable[[WaveGroup], Any] = lambda g: value  # noqa: E731 (its twin reads a register)
    elif operand.kind == "sgpr" and operand.count == 1 and operand.index < 128:
        register = operand.index
        index = lambda g: g.scalar[:, register] & np.uint32(0xFF)  # noqa: E731
    else:
        raise refuse(inst, f"{operand.text}: wants an SGPR or a constant")
    keep, bits = np.uint32(0xFFFF0F00), np.uint32(flags << 12)

    def step(g: WaveGroup) -> None:
        g.scalar[:, M0] = (g.scalar[:, M0] & keep) | bits | index(g)

    return step


def bind_indexed_move(ctx: BindContext, inst: Instruction, flags: int) -> Step:
    """v_mov_b32 in VGPR indexing mode.

    Raises UnsupportedOperandError for every other vector or memory instruction.  The step raises
    OutOfBoundsError when a register that the kernel does not have is indexed.
    """
    base, encoding = split_mnemonic(inst.mnemonic)
    if base != "v_mov_b32" or encoding not in ("", "e32", "e64") or inst.modifiers or len(inst.operands) != 2:
        raise refuse(inst, "VGPR indexing (s_set_gpr_idx_on) is known for a plain v_mov_b32 only")
    result, source = inst.operands
    if result.kind != "vgpr" or result.count != 1 or source.count != 1 or source.neg or source.abs:
        raise refuse(inst, "VGPR indexing wants single registers")
    from_vgpr, to_index = source.kind == "vgpr", bool(flags & DST)
    from_index = bool(flags & SRC0) and from_vgpr
    if from_vgpr:
        fetch: src.Fetch = lambda g: None  # noqa: E731 (read by row)
    elif source.kind == "sgpr" and source.index < 128:
        fetch = src.fetch_slot(src.sgpr_slot(ctx, source.index, np.dtype(np.uint32)))
    elif source.kind == "const":
        value = src.constant(inst, source, "b32", np.dtype(np.uint32), 2)
        fetch = lambda g: value  # noqa: E731
    else:
        raise refuse(inst, f"{source.text}: wants a VGPR, an SGPR or a constant")

    def rows(g: WaveGroup, operand: Operand, indexed: bool) -> Array:
        found = np.full(g.n, operand.index, np.int64)
        if indexed:
            found += g.scalar[:, M0] & np.uint32(0xFF)
            bad = np.nonzero(found >= ctx.num_vgprs)[0]
            if len(bad):
                raise OutOfBoundsError(
                    f"`{inst.text}` with index {int(found[bad[0]]) - operand.index} names "
                    f"v{int(found[bad[0]])}, the kernel has {ctx.num_vgprs} vector registers",
                    g.cohort.location(g, inst, int(bad[0]), None, None),
                )
        return found

    def step(g: WaveGroup) -> None:
        target = rows(g, result, to_index)
        origin = rows(g, source, from_index) if from_vgpr else None
        named = [target] if origin is None else [target, origin]
        mask = sum(1 << row for row in np.unique(np.concatenate(named)).tolist())
        if mask & g.pending:
            other = g.waits.find(mask)
            if other is not None:
                raise missing_wait(g, inst, mask & other.mask, other, "touches")
        waves = np.arange(g.n)
        values = np.broadcast_to(fetch(g), (g.n, 64)) if origin is None else g.vector[origin, waves]
        if g.exec is not None:
            values = np.where(g.exec, values, g.vector[target, waves])
        g.vector[target, waves] = values
        # what sanitizers know of single registers does not reach into an array: its elements count as written
        g.written |= sum(1 << row for row in np.unique(target).tolist())

    return step
