# SPDX-License-Identifier: Apache-2.0
"""The closures that execute a vector ALU instruction: a fast one for whole registers, a general one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import float32
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.lanes import apply_dpp
from kernellib.emulator.binding.modes import flush_function
from kernellib.emulator.binding.results import Writer
from kernellib.emulator.binding.sources import Array, Fetch
from kernellib.emulator.binding.vector_plan import Plan
from kernellib.emulator.errors import UnsupportedModeError
from kernellib.emulator.instructions.registry import AluDef
from kernellib.emulator.state import FloatMode, WaveGroup

Step = Callable[[WaveGroup], Any]


def fast_step(definition: AluDef, slots: list[int], writer: Writer, general: Step) -> Step:
    """Direct numpy call on views when every lane is on; `general` otherwise."""
    function, out = definition.function, writer.slot
    if out is None:
        return general
    if not definition.has_out:
        return _fast_copy_step(definition, slots, out, general)
    if len(slots) == 2:
        a, b = slots

        def step2(g: WaveGroup) -> None:
            if g.fast:
                views = g.views
                function(views[a], views[b], out=views[out])
            else:
                general(g)

        return step2
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


def _flushers(plan: Plan) -> tuple[list[Any], list[Any]]:
    signature = plan.definition.signature
    return [flush_function(t) for t in signature.sources], [flush_function(t) for t in signature.results]


def _finisher(plan: Plan) -> Callable[[Array, FloatMode], Array] | None:
    """Output modifier and clamp of result 0, or None.

    The output modifier is ignored in IEEE mode and where output denormals are kept (CDNA4 ISA 6.2.2).
    """
    omod, clamp = plan.omod, plan.clamp and "clamp" not in plan.definition.wants
    if omod == 1.0 and not clamp:
        return None
    base = plan.definition.signature.results[0].base

    def finish(value: Array, mode: FloatMode) -> Array:
        keeps_denormals = (mode.denorm32 if base == "f32" else mode.denorm64_16) & 2
        if omod != 1.0 and not mode.ieee and not keeps_denormals:
            value = float32.output_modifier(value, omod)
        return float32.clamp01(value, mode.dx10_clamp) if clamp else value

    return finish


def general_step(
    plan: Plan, fetches: list[Fetch], writers: list[Writer], keywords: dict[str, Callable[[WaveGroup], Any]]
) -> Step:
    """Fetch, move lanes, flush, compute, finish, write: right for every form."""
    definition, dpp = plan.definition, plan.dpp
    function, signature = definition.function, definition.signature
    names = list(keywords.items())
    is_float = any(t.is_float or t.form == "mix" for t in (*signature.sources, *signature.results))
    flush_in, flush_out = _flushers(plan)
    finish, moved_sign = _finisher(plan), plan.moved_sign
    inst = plan.inst
    # a matrix instruction puts its result straight into the registers: it has read its operands by then
    target = writers[0].slot if definition.kind == "mfma" and definition.has_out and finish is None else None

    def step(g: WaveGroup) -> None:
        args = [fetch(g) for fetch in fetches]
        lanes = None if definition.ignores_exec else g.exec
        if dpp is not None:
            args[0], writable = apply_dpp(dpp, args[0], g.exec)
            if any(moved_sign):
                args[0] = src.signed(args[0], signature.sources[0], *moved_sign)
            if writable is not None:
                lanes = writable & g.lane_mask
        flush = is_float and not g.mode.is_plain
        if flush:
            if g.mode.round32 or g.mode.round64_16:
                raise UnsupportedModeError(f"{inst.text} (line {inst.line_no}) under rounding mode {g.mode}")
            args = [f(a, g.mode, 1) if f else a for f, a in zip(flush_in, args, strict=True)]
        if definition.cross_lane:
            args = [_full_lanes(a, g.n) for a in args]
        if target is not None and not flush:
            function(*args, **{name: get(g) for name, get in names}, out=g.views[target])
            return
        values = function(*args, **{name: get(g) for name, get in names}) if names else function(*args)
        outputs = values if isinstance(values, tuple) else (values,)
        if len(outputs) != len(writers):
            raise TypeError(f"{definition.mnemonic} returned {len(outputs)} results, wants {len(writers)}")
        if len(outputs) > 1:
            outputs = tuple(
                o.copy() if isinstance(o, np.ndarray) and o.base is not None else o for o in outputs
            )
        for index, (writer, value) in enumerate(zip(writers, outputs, strict=True)):
            result = value if index or finish is None else finish(value, g.mode)
            if flush and flush_out[index]:
                result = flush_out[index](result, g.mode, 2)
            writer.write(g, result, lanes)

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
