# SPDX-License-Identifier: Apache-2.0
"""Modifiers of a vector ALU instruction: what each means, and which forms refuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding.lanes import DPP_CONTROLS, Dpp, take_dpp, take_select
from kernellib.emulator.binding.sources import BindContext, refuse
from kernellib.emulator.instructions.registry import BINDER_KEYWORDS, AluDef
from kernellib.emulator.operands import M0, ModifierValue
from kernellib.emulator.state import WaveGroup


@dataclass
class Plan:
    """What binding one instruction has found out so far."""

    ctx: BindContext
    inst: Instruction
    definition: AluDef
    modifiers: dict[str, ModifierValue]
    encoding: str
    dpp: Dpp | None = None
    selects: dict[int, str] = field(default_factory=dict)
    op_sel: tuple[int, ...] = ()
    op_sel_hi: tuple[int, ...] = ()
    neg_lo: tuple[int, ...] = ()
    neg_hi: tuple[int, ...] = ()
    clamp: bool = False
    omod: float = 1.0
    # neg and abs of source 0 under DPP: they apply to the lanes as moved (a lane without source reads -0)
    moved_sign: tuple[bool, bool] = (False, False)

    @property
    def reused(self) -> tuple[bool, bool]:
        """Whether other matrix instructions have the same A, the same B (a hint for speed)."""
        return self.ctx.reused.get(self.inst.index, (False, False))

    def flag(self, which: tuple[int, ...], position: int, default: int) -> int:
        """Bit `position` of an op_sel-like list, or `default` where the text does not give it."""
        return which[position] if position < len(which) else default


def take_modifiers(plan: Plan) -> Plan:
    """Move what the binder itself handles from `plan.modifiers` into the plan's fields."""
    modifiers, inst, definition = plan.modifiers, plan.inst, plan.definition
    if any(name in modifiers for name in DPP_CONTROLS):
        plan.dpp = take_dpp(inst, modifiers)
    elif plan.encoding == "dpp":
        raise refuse(inst, "DPP encoding without a lane control")
    if plan.encoding == "sdwa":
        # results.py consumes dst_sel and dst_unused from its own copy
        modifiers.pop("dst_sel", None)
        modifiers.pop("dst_unused", None)
        for position in (0, 1):
            plan.selects[position] = take_select(inst, modifiers, f"src{position}_sel", "DWORD")
    for name in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi"):
        value = modifiers.pop(name, ())
        if not isinstance(value, tuple) or not all(v in (0, 1) for v in value) or len(value) > 4:
            raise refuse(inst, f"{name} wants a list of bits")
        setattr(plan, name, value)
    plan.clamp = bool(modifiers.pop("clamp", False))
    if "mul" in modifiers:
        plan.omod = {2: 2.0, 4: 4.0}.get(int(str(modifiers.pop("mul"))), 0.0)
    elif "div" in modifiers:
        plan.omod = {2: 0.5}.get(int(str(modifiers.pop("div"))), 0.0)
    if plan.omod == 0.0:
        raise refuse(inst, "output modifier is none of mul:2, mul:4, div:2")
    results = definition.signature.results
    is_float = bool(results) and (results[0].is_float or results[0].form == "mix")
    if plan.omod != 1.0 and not is_float:
        raise refuse(inst, "output modifier on an integer result")
    if plan.clamp and not is_float and "clamp" not in definition.wants:
        raise refuse(inst, "clamp on an integer result is not defined for this instruction")
    if (plan.clamp or plan.omod != 1.0) and is_float and results[0].base == "bf16":
        raise refuse(inst, "clamp or output modifier on a bf16 result is not defined")
    _check_selects(plan)
    return plan


def _check_selects(plan: Plan) -> None:
    """Refuse op_sel bits that no operand of the signature takes."""
    signature = plan.definition.signature
    forms = {t.form for t in (*signature.sources, *signature.results)}
    packed = bool(forms & {"packed16", "packed32", "mix"})
    if (
        (plan.op_sel_hi or plan.neg_lo or plan.neg_hi)
        and not packed
        and not ({"op_sel_hi", "neg_lo", "neg_hi"} & plan.definition.wants)
    ):
        raise refuse(plan.inst, "op_sel_hi, neg_lo and neg_hi belong to packed instructions")
    if packed:
        _check_whole_operands(plan)
    if packed or "op_sel" in plan.definition.wants:
        return
    kinds = [t for t in signature.sources if t.in_text] + list(signature.results[:1])
    for position, bit in enumerate(plan.op_sel):
        if bit and (position >= len(kinds) or kinds[position].dtype.itemsize != 2):
            raise refuse(plan.inst, f"op_sel bit {position} selects half of an operand that has no halves")


def _check_whole_operands(plan: Plan) -> None:
    """Refuse what has no meaning for a packed instruction's operand that is not packed itself.

    neg_lo, with or without neg_hi, negates it (`bind_source`): LLVM's matcher of v_dot2 sets both for a
    negated addend (AMDGPUDAGToDAGISel::SelectVOP3PMods).
    """
    for position, kind in enumerate(t for t in plan.definition.signature.sources if t.in_text):
        if kind.form in ("packed16", "packed32", "mix"):
            continue
        low, high, select = (plan.flag(bits, position, 0) for bits in (plan.neg_lo, plan.neg_hi, plan.op_sel))
        if select or (high and not low) or (low and not kind.is_float):
            raise refuse(plan.inst, f"modifier bit {position} is of an operand that has no halves")


def keywords(plan: Plan) -> dict[str, Callable[[WaveGroup], Any]]:
    """Keyword-only arguments that the semantics asked for."""
    found: dict[str, Callable[[WaveGroup], Any]] = {}
    for name in plan.definition.wants:
        if name == "exec_mask":
            found[name] = lambda g: g.lane_mask
        elif name == "mode":
            found[name] = lambda g: g.mode
        elif name == "m0":
            found[name] = lambda g: g.scalar[:, M0 : M0 + 1]
        elif name in BINDER_KEYWORDS:
            value: Any = plan.ctx.ulp_bias if name == "ulp_bias" else getattr(plan, name)
            found[name] = _always(value)
        else:
            number = plan.modifiers.pop(name, 0)
            found[name] = _always(number)
    return found


def _always(value: Any) -> Callable[[WaveGroup], Any]:
    return lambda g: value
