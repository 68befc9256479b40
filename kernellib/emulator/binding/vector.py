# SPDX-License-Identifier: Apache-2.0
"""Binds a vector ALU instruction to registers: one closure per instruction, made once per program.

The common case (whole registers or constants in, one register out, every lane on, plain float mode) becomes a
single numpy call on cached views.  Everything else takes the general path: fetch, modify, compute, merge.
`vector_plan` reads the modifiers, `vector_sources` fetches, `vector_steps` executes, `results` writes.
"""

from __future__ import annotations

from dataclasses import replace

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding.results import bind_result
from kernellib.emulator.binding.sources import BindContext, Fetch, refuse
from kernellib.emulator.binding.vector_plan import Plan, keywords, take_modifiers
from kernellib.emulator.binding.vector_sources import bind_source, immediate, old_source
from kernellib.emulator.binding.vector_steps import Step, fast_step, general_step
from kernellib.emulator.binding.wide import lshl_add_u64
from kernellib.emulator.instructions.registry import AluDef, split_mnemonic
from kernellib.emulator.operands import Operand


def bind_vector(ctx: BindContext, inst: Instruction, definition: AluDef) -> Step:
    """The closure that executes `inst` for a group.  Raises UnsupportedOperandError for an unknown form."""
    signature = definition.signature
    if len(inst.operands) != signature.num_text_operands:
        raise refuse(inst, f"wants {signature.num_text_operands} operands, got {len(inst.operands)}")
    plan = take_modifiers(Plan(ctx, inst, definition, dict(inst.modifiers), split_mnemonic(inst.mnemonic)[1]))
    if not plan.clamp and "clamp" in definition.wants and definition.unclamped is not None:
        definition = plan.definition = replace(
            definition, function=definition.unclamped, wants=frozenset(), has_out=True, is_ufunc=True
        )
    text = list(inst.operands)
    results: list[Operand | None] = [text.pop(0) if t.in_text else None for t in signature.results]
    slots: list[int | None] = []
    fetches: list[Fetch] = []
    position = 0
    for kind in signature.sources:
        if kind.form == "imm":
            fetches.append(immediate(plan, text.pop(0)))
            slots.append(None)
            continue
        operand = text.pop(0) if kind.in_text else None
        if kind.form == "old":
            operand = results[kind.count]
            if operand is None:
                raise refuse(inst, "reads the previous value of a result that has none")
            slot, fetch = old_source(plan, signature.results[kind.count], operand)
        else:
            slot, fetch = bind_source(plan, kind, operand, position)
            position += 1
        slots.append(slot)
        fetches.append(fetch)
    asked = keywords(plan)
    if plan.modifiers:
        raise refuse(inst, f"modifier {next(iter(plan.modifiers))!r} has no meaning here")
    writers = [
        bind_result(
            ctx, inst, t, operand, index, definition, plan.op_sel, plan.encoding, dict(inst.modifiers)
        )
        for index, (t, operand) in enumerate(zip(signature.results, results, strict=True))
    ]
    general = general_step(plan, fetches, writers, asked)
    if plan.dpp or asked or plan.clamp or plan.omod != 1.0 or len(writers) != 1 or definition.cross_lane:
        return general
    if definition.mnemonic == "v_lshl_add_u64":
        return lshl_add_u64(plan, general)
    if any(slot is None for slot in slots):
        return general
    return fast_step(definition, [s for s in slots if s is not None], writers[0], general)
