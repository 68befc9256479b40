# SPDX-License-Identifier: Apache-2.0
"""Binds a vector ALU instruction to registers: one closure per instruction, made once per program.

The common case (whole registers or constants in, one register out, every lane on, plain float mode) becomes a
single numpy call on cached views.  Everything else takes the general path: fetch, modify, compute, merge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.lanes import (
    DPP_CONTROLS,
    Dpp,
    apply_dpp,
    sdwa_select,
    take_dpp,
    take_select,
)
from kernellib.emulator.binding.results import Writer, bind_result
from kernellib.emulator.binding.sources import Array, BindContext, Fetch, refuse
from kernellib.emulator.errors import UnsupportedModeError
from kernellib.emulator.instructions.registry import BINDER_KEYWORDS, AluDef, OperandType, split_mnemonic
from kernellib.emulator.operands import M0, ModifierValue, Operand
from kernellib.emulator.state import WaveGroup

Step = Callable[[WaveGroup], Any]
U32 = np.dtype(np.uint32)


@dataclass
class _Plan:
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

    def flag(self, which: tuple[int, ...], position: int, default: int) -> int:
        return which[position] if position < len(which) else default


def bind_vector(ctx: BindContext, inst: Instruction, definition: AluDef) -> Step:
    """The closure that executes `inst` for a group.  Raises UnsupportedOperandError for an unknown form."""
    signature = definition.signature
    if len(inst.operands) != signature.num_text_operands:
        raise refuse(inst, f"wants {signature.num_text_operands} operands, got {len(inst.operands)}")
    plan = _take_modifiers(
        _Plan(ctx, inst, definition, dict(inst.modifiers), split_mnemonic(inst.mnemonic)[1])
    )
    text = list(inst.operands)
    results: list[Operand | None] = [text.pop(0) if t.in_text else None for t in signature.results]
    slots: list[int | None] = []
    fetches: list[Fetch] = []
    position = 0
    for source in signature.sources:
        if source.form == "imm":
            fetches.append(_immediate(plan, text.pop(0)))
            slots.append(None)
            continue
        operand = text.pop(0) if source.in_text else None
        if source.form == "old":
            operand, source = results[source.count], signature.results[source.count]  # noqa: PLW2901
            if operand is None:
                raise refuse(inst, "reads the previous value of a result that has none")
            slot, fetch = _old_source(plan, source, operand)
        else:
            slot, fetch = _source(plan, source, operand, position)
            position += 1
        slots.append(slot)
        fetches.append(fetch)
    keywords = _keywords(plan)
    if plan.modifiers:
        raise refuse(inst, f"modifier {next(iter(plan.modifiers))!r} has no meaning here")
    writers = [
        bind_result(
            ctx, inst, t, operand, index, definition, plan.op_sel, plan.encoding, dict(inst.modifiers)
        )
        for index, (t, operand) in enumerate(zip(signature.results, results, strict=True))
    ]
    general = _general_step(plan, fetches, writers, keywords)
    if plan.dpp or keywords or plan.clamp or plan.omod != 1.0 or len(writers) != 1 or definition.cross_lane:
        return general
    if any(slot is None for slot in slots):
        return general
    return _fast_step(definition, [s for s in slots if s is not None], writers[0], general)


# ------------------------------------------------------------------------------------------------ modifiers
def _take_modifiers(plan: _Plan) -> _Plan:
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
    _check_selects(plan)
    return plan


def _check_selects(plan: _Plan) -> None:
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
    if packed or "op_sel" in plan.definition.wants:
        return
    kinds = [t for t in signature.sources if t.in_text] + list(signature.results[:1])
    for position, bit in enumerate(plan.op_sel):
        if bit and (position >= len(kinds) or kinds[position].dtype.itemsize != 2):
            raise refuse(plan.inst, f"op_sel bit {position} selects half of an operand that has no halves")


def _keywords(plan: _Plan) -> dict[str, Callable[[WaveGroup], Any]]:
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


def _immediate(plan: _Plan, operand: Operand) -> Fetch:
    if operand.kind != "const" or not isinstance(operand.value, int) or operand.neg:
        raise refuse(plan.inst, f"{operand.text}: wants an integer constant")
    value = operand.value
    return lambda g: value


# ------------------------------------------------------------------------------------------------ sources
def _old_source(plan: _Plan, result: OperandType, operand: Operand) -> tuple[int | None, Fetch]:
    """The previous value of a result, typed like it, without any source modifier."""
    bare = _Plan(plan.ctx, plan.inst, plan.definition, {}, "")
    if result.dtype.itemsize == 2 and result.form == "lane":
        # the half that will be written: op_sel's result bit
        half = plan.flag(plan.op_sel, sum(t.in_text for t in plan.definition.signature.sources), 0)
        slot = src.vgpr_part_slot(plan.ctx, src.vector_row(plan.ctx, operand), half, result.dtype)
        return slot, src.fetch_slot(slot)
    return _source(bare, result, operand, 99)


def _source(  # noqa: PLR0911 (one return per operand form)
    plan: _Plan, kind: OperandType, operand: Operand | None, position: int
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
    if kind.form == "packed16":
        return None, _packed16(plan, kind, operand, position)
    if kind.form == "packed32":
        return _packed32(plan, kind, operand, position)
    if kind.form == "mix":
        return None, _mix(plan, operand, position)
    if kind.form == "multi":
        return _multi(plan, kind, operand)
    if operand.sext and plan.encoding != "sdwa":
        raise refuse(inst, "sext() belongs to SDWA")
    if (operand.neg or operand.abs) and kind.base[0] in "ui":
        raise refuse(inst, f"neg/abs on an integer operand ({operand.text})")
    slot, fetch = _plain(plan, kind, operand, position)
    if position == 0 and plan.dpp is not None:
        slot = None
        if kind.dtype.itemsize > 4 and kind.form == "lane" and operand.kind == "const":
            raise refuse(inst, "DPP source must be a vector register")
    if operand.neg or operand.abs:
        return None, src.with_sign(fetch, kind, operand.neg, operand.abs)
    return slot, fetch


def _expect_count(plan: _Plan, operand: Operand, count: int) -> None:
    if operand.is_register and operand.count != count:
        raise refuse(plan.inst, f"{operand.text}: wants {count} register(s), got {operand.count}")


def _plain(plan: _Plan, kind: OperandType, operand: Operand, position: int) -> tuple[int | None, Fetch]:
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


def _sdwa_source(plan: _Plan, kind: OperandType, operand: Operand, position: int) -> Fetch:
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


def _raw_dword(plan: _Plan, kind: OperandType, operand: Operand) -> Fetch:
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


def _packed16(plan: _Plan, kind: OperandType, operand: Operand, position: int) -> Fetch:
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


def _packed32(plan: _Plan, kind: OperandType, operand: Operand, position: int) -> tuple[int | None, Fetch]:
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


def _mix(plan: _Plan, operand: Operand, position: int) -> Fetch:
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


def _multi(plan: _Plan, kind: OperandType, operand: Operand) -> tuple[int | None, Fetch]:
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


# ------------------------------------------------------------------------------------------------ steps
def _fast_step(definition: AluDef, slots: list[int], writer: Writer, general: Step) -> Step:
    """Direct numpy call on views when every lane is on; `general` otherwise."""
    function, out = definition.function, writer.slot
    if out is None:
        return general
    if not definition.has_out:
        return _fast_copy_step(definition, slots, out, general)
    keyword = not definition.is_ufunc
    if keyword:
        return _fast_keyword_step(function, slots, out, general)
    if len(slots) == 1:
        (a,) = slots

        def step1(g: WaveGroup) -> None:
            if g.fast:
                views = g.views
                function(views[a], out=views[out])
            else:
                general(g)

        return step1
    if len(slots) == 2:
        a, b = slots

        def step2(g: WaveGroup) -> None:
            if g.fast:
                views = g.views
                function(views[a], views[b], out=views[out])
            else:
                general(g)

        return step2
    return general


def _fast_keyword_step(function: Callable[..., Any], slots: list[int], out: int, general: Step) -> Step:
    if len(slots) == 3:
        a, b, c = slots

        def step3(g: WaveGroup) -> None:
            if g.fast:
                views = g.views
                function(views[a], views[b], views[c], out=views[out])
            else:
                general(g)

        return step3

    def step(g: WaveGroup) -> None:
        if g.fast:
            views = g.views
            function(*[views[s] for s in slots], out=views[out])
        else:
            general(g)

    return step


def _fast_copy_step(definition: AluDef, slots: list[int], out: int, general: Step) -> Step:
    function, dtype = definition.function, definition.signature.results[0].dtype

    def step(g: WaveGroup) -> None:
        if g.fast:
            views = g.views
            result = function(*[views[s] for s in slots])
            if result.dtype != dtype:
                result = reinterpret(result, dtype)
            views[out][...] = result
        else:
            general(g)

    return step


def reinterpret(result: Array, dtype: np.dtype[Any]) -> Array:
    """A result as the declared dtype; only the sign or kind may differ, never the width."""
    result = np.asarray(result)
    if result.dtype == dtype:
        return result
    if result.dtype.itemsize != dtype.itemsize:
        raise TypeError(f"instruction definition returned {result.dtype}, its signature says {dtype}")
    typed: Array = result.view(dtype)
    return typed


def _flushers(plan: _Plan) -> tuple[list[Any], list[Any]]:
    from kernellib.emulator.binding.modes import flush_function  # noqa: PLC0415 (cycle)

    signature = plan.definition.signature
    return [flush_function(t) for t in signature.sources], [flush_function(t) for t in signature.results]


def _general_step(
    plan: _Plan, fetches: list[Fetch], writers: list[Writer], keywords: dict[str, Callable[[WaveGroup], Any]]
) -> Step:
    definition, dpp = plan.definition, plan.dpp
    function, signature = definition.function, definition.signature
    names = list(keywords.items())
    is_float = any(t.is_float or t.form == "mix" for t in (*signature.sources, *signature.results))
    flush_in, flush_out = _flushers(plan)
    clamp = plan.clamp and "clamp" not in definition.wants
    omod = plan.omod
    inst = plan.inst

    def step(g: WaveGroup) -> None:
        args = [fetch(g) for fetch in fetches]
        lanes = None if definition.ignores_exec else g.exec
        if dpp is not None:
            args[0], writable = apply_dpp(dpp, args[0], g.exec)
            if writable is not None:
                lanes = writable & g.lane_mask
        flush = is_float and not g.mode.is_plain
        if flush:
            if g.mode.round32 or g.mode.round64_16:
                raise UnsupportedModeError(f"{inst.text} (line {inst.line_no}) under rounding mode {g.mode}")
            args = [f(a, g.mode) if f else a for f, a in zip(flush_in, args, strict=True)]
        if definition.cross_lane:
            args = [_full_lanes(a, g.n) for a in args]
        values = function(*args, **{name: get(g) for name, get in names}) if names else function(*args)
        outputs = values if isinstance(values, tuple) else (values,)
        if len(outputs) != len(writers):
            raise TypeError(f"{definition.mnemonic} returned {len(outputs)} results, wants {len(writers)}")
        if len(outputs) > 1:
            outputs = tuple(
                o.copy() if isinstance(o, np.ndarray) and o.base is not None else o for o in outputs
            )
        for index, (writer, value) in enumerate(zip(writers, outputs, strict=True)):
            if index == 0 and omod != 1.0:
                value = value * value.dtype.type(omod)  # noqa: PLW2901
            if index == 0 and clamp:
                value = np.clip(np.where(np.isnan(value), value.dtype.type(0), value), 0, 1)  # noqa: PLW2901
            if flush and flush_out[index]:
                value = flush_out[index](value, g.mode)  # noqa: PLW2901
            writer.write(g, value, lanes)

    return step


def _full_lanes(value: Any, n: int) -> Any:
    """Broadcast an operand to [..., n, 64]; immediates stay as they are."""
    if not isinstance(value, np.ndarray):
        return value
    if value.shape[-2:] == (n, 64):
        return value
    if value.ndim == 2 and value.shape == (n, 1):
        return value  # wave-uniform operand (lane select): the function wants one value per wave
    return np.broadcast_to(value, (*value.shape[:-2], n, 64))
