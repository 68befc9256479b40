# SPDX-License-Identifier: Apache-2.0
"""Binds a kernel once: every instruction to a closure, straight-line runs of them to basic blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernellib.emulator.assembly import Instruction, Program
from kernellib.emulator.binding.buffer import bind_buffer
from kernellib.emulator.binding.control import HANDLERS, ControlContext
from kernellib.emulator.binding.encoding import (
    check_exchange,
    check_fields,
    check_memory,
    check_registers,
    check_scalar,
    check_vector,
)
from kernellib.emulator.binding.indexed import bind_indexed_move
from kernellib.emulator.binding.lds import bind_exchange, bind_lds
from kernellib.emulator.binding.memory import bind_global, bind_scratch
from kernellib.emulator.binding.scalar import bind_scalar
from kernellib.emulator.binding.smem import bind_scalar_load
from kernellib.emulator.binding.sources import BindContext, refuse
from kernellib.emulator.binding.vector import bind_vector
from kernellib.emulator.errors import AssemblySyntaxError, MissingNopError, UnknownInstructionError
from kernellib.emulator.hazards import find_hazards
from kernellib.emulator.instructions import lookup
from kernellib.emulator.instructions.registry import AluDef, ControlDef, MemoryDef
from kernellib.emulator.operands import VCC
from kernellib.emulator.state import SlotTable, WaveGroup
from kernellib.emulator.waits import SGPR_BIT, register_bits

Step = Callable[[WaveGroup], Any]


@dataclass
class Block:
    """A straight-line run.

    `body`: (instruction index, registers touched, step) in order.  `end`: the same for the instruction that
    leaves the block, or None when it falls through to `next_block`.  `instructions`: every instruction of the
    block, for the counters (hints without a step included).
    """

    number: int
    body: list[tuple[int, int, Step]] = field(default_factory=list)
    end: tuple[int, int, Step] | None = None
    next_block: int = -5
    instructions: list[int] = field(default_factory=list)


@dataclass
class BoundProgram:
    """Blocks of a listing and what a register file for it needs."""

    program: Program
    blocks: list[Block]
    block_of: dict[int, int]
    slots: SlotTable
    num_vgprs: int
    num_agprs: int
    polls: frozenset[int] | None = (
        None  # LDS loads that wait for another wave, once asked (sanitizers/polls.py)
    )


def leaders(program: Program, relaxed: bool = False) -> list[int]:
    """Indices of instructions that start a basic block.

    `relaxed`: blocks end after whatever other waves may notice too, so that these can run in between.
    """
    found = {0} | {index for index in program.labels.values() if 0 <= index < len(program.instructions)}
    for inst in program.instructions:
        definition = lookup(inst.mnemonic)
        leaves = isinstance(definition, ControlDef) and definition.handler in (
            "endpgm", "branch", "cbranch", "barrier", "sleep", "trap", "getpc",
        )  # fmt: skip
        if leaves or (relaxed and _is_noticed(definition)):
            found.add(inst.index + 1)
    return sorted(leader for leader in found if leader < len(program.instructions))


def _is_noticed(definition: Any) -> bool:
    """Stores, atomics and waits."""
    if isinstance(definition, MemoryDef):
        return definition.action in ("store", "atomic")
    return isinstance(definition, ControlDef) and definition.handler in ("waitcnt", "cache")


def register_counts(program: Program) -> tuple[int, int]:
    """(VGPRs, AGPRs) that a listing names."""
    vgprs = agprs = 0
    for inst in program.instructions:
        for operand in inst.operands:
            if operand.kind == "vgpr":
                vgprs = max(vgprs, operand.index + operand.count)
            elif operand.kind == "agpr":
                agprs = max(agprs, operand.index + operand.count)
    return vgprs, agprs


def reused_operands(program: Program, first_of_block: list[int]) -> dict[int, tuple[bool, bool]]:
    """Whether A, B of each matrix instruction are those of another of its block as well, unwritten between.

    A hint that decoding such an operand once is worth while; nothing depends on it.
    """
    starts, found = set(first_of_block), dict[int, list[bool]]()
    seen: dict[tuple[int, str], tuple[int, int]] = {}  # (registers, mnemonic) -> (instruction, operand)
    for inst in program.instructions:
        if inst.index in starts:
            seen.clear()
        definition = lookup(inst.mnemonic)
        is_matrix = isinstance(definition, AluDef) and definition.kind == "mfma"
        if is_matrix and len(inst.operands) > 2:
            found[inst.index] = [False, False]
            for place in (0, 1):
                mask = register_bits(inst.operands[1 + place])
                key = mask, inst.mnemonic
                if key in seen:
                    other, position = seen[key]
                    found[other][position] = found[inst.index][place] = True
                elif mask:
                    seen[key] = inst.index, place
        if inst.operands:
            written = register_bits(inst.operands[0])
            for key in [key for key in seen if key[0] & written]:
                del seen[key]
    return {index: (a, b) for index, (a, b) in found.items()}


_VECTOR = ("v_", "ds_", "global_", "flat_", "buffer_", "scratch_")  # what VGPR indexing could concern


def bind_instruction(
    ctx: BindContext, control: ControlContext, inst: Instruction
) -> tuple[Step | None, int, bool]:
    """(step or None for a pure hint, registers touched, whether the block ends here)."""
    definition = lookup(inst.mnemonic)
    if definition is None:
        raise UnknownInstructionError(
            f"{inst.mnemonic} is not in the instruction table", inst.line_no, inst.text
        )
    check_registers(inst)
    check_fields(inst)
    if control.indexed is not None and inst.mnemonic.startswith(_VECTOR):
        # the registers that it really touches, its step looks at
        return bind_indexed_move(ctx, inst, control.indexed), 0, False
    if isinstance(definition, AluDef) and definition.mnemonic.startswith("ds_"):
        check_exchange(inst)
        return (*bind_exchange(ctx, inst, definition), False)
    if isinstance(definition, AluDef):
        if len(inst.operands) == definition.signature.num_text_operands:  # else the binder says what it wants
            (check_scalar if definition.is_scalar else check_vector)(inst, definition)
        touched = 0
        for operand in inst.operands:
            touched |= register_bits(operand)
        if any(t.form == "vcc" for t in definition.signature.sources):
            touched |= 3 << (SGPR_BIT + VCC)
        return (bind_scalar if definition.is_scalar else bind_vector)(ctx, inst, definition), touched, False
    if isinstance(definition, MemoryDef):
        check_memory(inst, definition)
        binder = {
            "global": bind_global, "flat": bind_global, "scratch": bind_scratch, "buffer": bind_buffer,
            "lds": bind_lds, "scalar": bind_scalar_load, "scalar_buffer": bind_scalar_load,
        }[definition.space]  # fmt: skip
        step, sources = binder(ctx, inst, definition)
        return step, sources, False
    assert isinstance(definition, ControlDef)
    handled, ends = HANDLERS[definition.handler](control, inst, definition)
    touched = 0
    if definition.handler in ("getreg", "setreg", "time", "index_on"):
        for operand in inst.operands:
            touched |= register_bits(operand)
    elif definition.handler == "cbranch" and definition.options["on"] == "vcc":
        touched = 3 << (SGPR_BIT + VCC)
    return handled, touched, ends


def _hazard_step(inst: Instruction, problem: str) -> Step:
    """A step that reports a hazard instead of executing."""

    def step(g: WaveGroup) -> None:
        raise MissingNopError(problem, g.cohort.location(g, inst, 0, None, None))

    return step


def bind_program(
    program: Program,
    ulp_bias: int = 0,
    min_vgprs: int = 1,
    min_agprs: int = 0,
    check_hazards: bool = True,
    instrumented: bool = False,
    relaxed: bool = False,
    check_registers: bool = False,
) -> BoundProgram:
    """Bind every instruction of a listing.

    `instrumented`: memory instructions go through `Launch.chip` and tell `Launch.monitor` (sanitizers/);
    `relaxed`: blocks are short; `check_registers`: reads of registers never written raise.
    `check_hazards`: an instruction that comes too soon after another (see hazards.py) raises when executed.

    Raises UnknownInstructionError / UnsupportedOperandError for the first instruction that is not understood,
    naming its line.
    """
    if not program.instructions:
        raise AssemblySyntaxError("the listing has no instructions")
    vgprs, agprs = register_counts(program)
    vgprs, agprs = max(vgprs, min_vgprs), max(agprs, min_agprs)
    first_of_block = leaders(program, relaxed)
    block_of = {leader: number for number, leader in enumerate(first_of_block)}
    ctx = BindContext(SlotTable(), vgprs, agprs, ulp_bias, instrumented=instrumented or relaxed)
    ctx.reused = reused_operands(program, first_of_block)
    control = ControlContext(ctx, program, block_of)
    hazards = find_hazards(program, first_of_block) if check_hazards else {}
    blocks = []
    for number, first in enumerate(first_of_block):
        last = first_of_block[number + 1] if number + 1 < len(first_of_block) else len(program.instructions)
        block = Block(number, next_block=block_of.get(last, -5))
        for inst in program.instructions[first:last]:
            indexed = control.indexed is not None
            step, touched, ends = bind_instruction(ctx, control, inst)
            if control.indexed is not None and (ends or inst.index + 1 == last):
                raise refuse(
                    inst, "VGPR indexing must be switched off in the basic block that switched it on"
                )
            block.instructions.append(inst.index)
            if inst.index in hazards and step is not None:
                step = _hazard_step(inst, hazards[inst.index])
            if check_registers and step is not None and not indexed:
                from kernellib.emulator.sanitizers.registers import checked  # noqa: PLC0415 (it builds on this)

                step = checked(inst, step)
            if ends:
                assert step is not None
                block.end = (inst.index, touched, step)
            elif step is not None:
                block.body.append((inst.index, touched, step))
        blocks.append(block)
    return BoundProgram(program, blocks, block_of, ctx.slots, vgprs, agprs)
