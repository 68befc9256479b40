# SPDX-License-Identifier: Apache-2.0
"""Reads of registers that a wave has never written.

A register counts as written once some lane of the wave has written it: what the other lanes hold is not
followed, as compiled code reads registers that only some lanes have written and drops the rest.  What a
result register keeps (DPP's and SDWA's old value) is no read either, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.errors import UninitialisedRegisterError
from kernellib.emulator.hazards import effects
from kernellib.emulator.instructions import lookup
from kernellib.emulator.instructions.registry import AluDef, ControlDef
from kernellib.emulator.operands import VCC
from kernellib.emulator.state import POISON, WaveGroup
from kernellib.emulator.waits import SGPR_BIT, register_bits, register_name

if TYPE_CHECKING:
    from kernellib.emulator.scheduler import Cohort

Step = Callable[[WaveGroup], Any]


_PACKED_32 = ("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32")


def _picked(inst: Instruction, position: int, pair: int) -> int:
    """Of a source's register pair those that op_sel (for the low result) and op_sel_hi (for the high one)
    pick. v_pk_mov_b32 has one result from each source, which op_sel picks."""

    def bit(name: str, default: int) -> int:
        given = inst.modifiers.get(name, ())
        return int(given[position]) if isinstance(given, tuple) and position < len(given) else default

    first = pair & -pair
    low, high = bit("op_sel", 0), bit("op_sel_hi", 1)
    return pair & (first << low | (0 if inst.mnemonic == "v_pk_mov_b32" else first << high))


def reads_and_writes(inst: Instruction) -> tuple[int, int]:
    """Register bits that an instruction names as sources, and those it writes."""
    definition = lookup(inst.mnemonic)
    effect = effects(inst)
    reads, writes = effect.reads, effect.writes
    if isinstance(definition, AluDef) and not definition.mnemonic.startswith("ds_"):
        reads = 0
        sources = inst.operands[sum(t.in_text for t in definition.signature.results) :]
        for position, operand in enumerate(sources):
            bits = register_bits(operand)
            reads |= _picked(inst, position, bits) if inst.mnemonic in _PACKED_32 else bits
        if any(t.form == "vcc" for t in definition.signature.sources):
            reads |= 3 << (SGPR_BIT + VCC)
    elif isinstance(definition, ControlDef):
        if definition.handler == "cbranch" and definition.options["on"] == "vcc":
            reads |= 3 << (SGPR_BIT + VCC)
        elif definition.handler in ("getreg", "time"):
            writes |= register_bits(inst.operands[0])
    elif (definition is not None and getattr(definition, "always_returns", False)) or "sc0" in inst.modifiers:
        result = inst.operands[0]
        if getattr(definition, "action", "") == "atomic":
            writes |= register_bits(result)
            if getattr(definition, "space", "") != "buffer":
                reads = 0
                for operand in inst.operands[1:]:
                    reads |= register_bits(operand)
    return reads, writes


def checked(inst: Instruction, step: Step) -> Step:
    """`step`, which raises when it reads a register that was never written."""
    reads, writes = reads_and_writes(inst)

    def run(g: WaveGroup) -> Any:
        missing = reads & ~g.written
        if missing:
            raise UninitialisedRegisterError(
                f"`{inst.text}` reads {register_name(missing)}, which this wave has not written",
                g.cohort.location(g, inst, 0, None, None),
            )
        result = step(g)
        g.written |= writes
        return result

    return run


def initially_written(cohort: Cohort) -> int:
    """Register bits that the launch has set."""
    regs, bound = cohort.regs, cohort.launch.bound
    mask = 0
    for row in range(bound.num_vgprs):
        if (regs.vector[row] != POISON).any():
            mask |= 1 << row
    for index in np.nonzero((regs.scalar != POISON).any(axis=0))[0]:
        mask |= 1 << (SGPR_BIT + int(index))
    return mask
