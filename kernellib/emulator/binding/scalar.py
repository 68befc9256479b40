# SPDX-License-Identifier: Apache-2.0
"""Binds a scalar ALU instruction: one value per wave, arrays [n]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.sources import Array, BindContext, Fetch, refuse
from kernellib.emulator.instructions.registry import AluDef, OperandType
from kernellib.emulator.operands import EXEC, VCC, Operand
from kernellib.emulator.state import WaveGroup

Step = Callable[[WaveGroup], Any]


def bind_scalar(ctx: BindContext, inst: Instruction, definition: AluDef) -> Step:
    """The closure that executes a scalar instruction for a group."""
    signature = definition.signature
    if len(inst.operands) != signature.num_text_operands:
        raise refuse(inst, f"wants {signature.num_text_operands} operands, got {len(inst.operands)}")
    if inst.modifiers:
        raise refuse(inst, f"modifier {next(iter(inst.modifiers))!r} has no meaning here")
    text = list(inst.operands)
    results: list[Operand | None] = [text.pop(0) if t.in_text else None for t in signature.results]
    fetches: list[Fetch] = []
    for source in signature.sources:
        if source.form == "old":
            fetches.append(_register(ctx, inst, signature.results[source.count], results[source.count]))
        elif source.form == "imm":
            fetches.append(_immediate(inst, source, text.pop(0)))
        elif source.form == "scc":
            fetches.append(lambda g: g.scc)
        elif source.form in ("exec", "vcc"):
            pair = EXEC // 2 if source.form == "exec" else VCC // 2
            fetches.append(_mask_bits(pair))
        else:
            fetches.append(_register(ctx, inst, source, text.pop(0)))
    writers = [_writer(ctx, inst, t, r) for t, r in zip(signature.results, results, strict=True)]
    wants = definition.wants - {"mode"}
    if wants:
        raise refuse(inst, f"definition asks for {sorted(wants)}, which scalar instructions do not have")
    function, takes_mode = definition.function, "mode" in definition.wants
    if len(writers) == 1 and not takes_mode:
        (write,) = writers
        return lambda g: write(g, function(*[fetch(g) for fetch in fetches]))

    def step(g: WaveGroup) -> None:
        args = [fetch(g) for fetch in fetches]
        values = function(*args, mode=g.mode) if takes_mode else function(*args)
        outputs = values if isinstance(values, tuple) else (values,)
        if len(outputs) != len(writers):
            raise TypeError(f"{definition.mnemonic} returned {len(outputs)} results, wants {len(writers)}")
        if len(outputs) > 1:
            outputs = tuple(
                o.copy() if isinstance(o, np.ndarray) and o.base is not None else o for o in outputs
            )
        for write, value in zip(writers, outputs, strict=True):
            write(g, value)

    return step


def _mask_bits(pair: int) -> Fetch:
    """EXEC or VCC as uint64 [n]."""
    return lambda g: g.scalar64[:, pair]


def _immediate(inst: Instruction, kind: OperandType, operand: Operand) -> Fetch:
    """A 16-bit immediate as the definition wants it: sign- or zero-extended to a 32-bit numpy scalar."""
    if (
        operand.kind != "const"
        or not isinstance(operand.value, int)
        or not -0x8000 <= operand.value <= 0xFFFF
    ):
        raise refuse(inst, f"{operand.text}: wants a 16-bit immediate")
    low = operand.value & 0xFFFF
    signed = kind.base == "i32"
    value = np.array(low - 0x10000 if signed and low >= 0x8000 else low, dtype=kind.dtype)
    return lambda g: value


def _register(ctx: BindContext, inst: Instruction, kind: OperandType, operand: Operand | None) -> Fetch:
    if operand is None:
        raise refuse(inst, "operand is missing")
    if operand.neg or operand.abs or operand.sext:
        raise refuse(inst, f"{operand.text}: scalar instructions have no source modifiers")
    if operand.kind == "const":
        value: Array = src.constant(inst, operand, kind.base, kind.dtype, 1)
        return lambda g: value
    if operand.kind != "sgpr":
        raise refuse(inst, f"{operand.text}: wants a scalar register or a constant")
    special = src.special_source(operand)
    if special is not None:
        if kind.dtype.itemsize != 4:
            raise refuse(inst, f"{operand.text} is a 32-bit operand")
        return lambda g: special(g).view(kind.dtype)
    width = max(kind.dtype.itemsize // 4, 1)
    if operand.count != width or (width == 2 and operand.index % 2):
        raise refuse(inst, f"{operand.text}: wants {width} aligned scalar register(s)")
    return src.fetch_slot(src.sgpr_slot(ctx, operand.index, kind.dtype, vector=False))


def _writer(
    ctx: BindContext, inst: Instruction, kind: OperandType, operand: Operand | None
) -> Callable[..., None]:
    if kind.form == "scc":
        return _write_scc
    if kind.form == "exec":
        return _write_exec
    if operand is None or operand.kind != "sgpr" or operand.index >= 128:
        raise refuse(inst, f"result {operand.text if operand else ''}: wants a scalar register")
    width = max(kind.dtype.itemsize // 4, 1)
    if operand.count != width or (width == 2 and operand.index % 2):
        raise refuse(inst, f"result {operand.text}: wants {width} aligned scalar register(s)")
    slot, dtype = src.sgpr_slot(ctx, operand.index, kind.dtype, vector=False), kind.dtype
    to_exec = operand.index in (EXEC, EXEC + 1)

    def write(g: WaveGroup, value: Any) -> None:
        if value.dtype != dtype:
            if value.dtype.itemsize != dtype.itemsize:
                raise TypeError(f"instruction definition returned {value.dtype}, its signature says {dtype}")
            value = value.view(dtype)
        g.views[slot][...] = value
        if to_exec:
            g.refresh_exec()

    return write


def _write_scc(g: WaveGroup, value: Any) -> None:
    if value.dtype != np.bool_:
        raise TypeError(f"instruction definition returned {value.dtype} as scc, wants bool")
    g.scc[...] = value


def _write_exec(g: WaveGroup, value: Any) -> None:
    g.scalar64[:, EXEC // 2] = value
    g.refresh_exec()
