# SPDX-License-Identifier: Apache-2.0
"""Reads of registers that a wave has never written.

A register counts as written once some lane of the wave has written it: what the other lanes hold is not
followed, as compiled code reads registers that only some lanes have written and drops the rest.  What a
result register keeps (DPP's and SDWA's old value) is no read either, for the same reason.

Compiled code also computes with registers that nobody has written and drops the result: the high half of a
64-bit sum of which only the low half is wanted, a vector's fourth element of three.  So vector instructions
hand the fault on, and what shows (memory, addresses, branches, scalar registers) raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.errors import UninitialisedRegisterError
from kernellib.emulator.hazards import effects
from kernellib.emulator.instructions import lookup, split_mnemonic
from kernellib.emulator.instructions.registry import AluDef, ControlDef
from kernellib.emulator.operands import VCC
from kernellib.emulator.state import POISON, WaveGroup
from kernellib.emulator.waits import SGPR_BIT, register_bits, register_name

if TYPE_CHECKING:
    from kernellib.emulator.scheduler import Cohort

Step = Callable[[WaveGroup], Any]


# Second sources that compilers leave undefined when they want the low half of the result only.
_JUNK_SECOND = ("v_cvt_pk_bf16_f32", "v_cvt_pk_f16_f32", "v_cvt_pkrtz_f16_f32")
# Sources (by position) of two registers whose high one does not reach the result's low register.
_LOW_IS_FREE = {"v_mad_u64_u32": (2,), "v_mad_i64_i32": (2,), "v_lshlrev_b64": (1,), "v_lshl_add_u64": (0, 2)}
# Instructions that add to their result: what it held is a source.
_ACCUMULATING = ("v_fmac_", "v_mac_", "v_pk_fmac_", "v_dot")
_PACKED_32 = ("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32")


def _picked(inst: Instruction, position: int, pair: int, half: int) -> int:
    """Of a source's register pair the one that op_sel (for the low result) or op_sel_hi (`half` 1: for the
    high one) picks.  v_pk_mov_b32 has one result from each source, which op_sel picks."""

    def bit(name: str, default: int) -> int:
        given = inst.modifiers.get(name, ())
        return int(given[position]) if isinstance(given, tuple) and position < len(given) else default

    first = pair & -pair
    if inst.mnemonic == "v_pk_mov_b32":
        return pair & (first << bit("op_sel", 0)) if half == position else 0
    return pair & (first << (bit("op_sel_hi", 1) if half else bit("op_sel", 0)))


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
            if inst.mnemonic in _PACKED_32:
                bits = _picked(inst, position, bits, 0) | _picked(inst, position, bits, 1)
            reads |= bits
        if inst.mnemonic.startswith(_ACCUMULATING) and any(
            t.form == "old" for t in definition.signature.sources
        ):
            reads |= register_bits(inst.operands[0])
        if any(t.form == "vcc" for t in definition.signature.sources):
            reads |= 3 << (SGPR_BIT + VCC)
    elif isinstance(definition, ControlDef):
        more, results = _control(inst, definition)
        reads, writes = reads | more, writes | results
    elif (definition is not None and getattr(definition, "always_returns", False)) or "sc0" in inst.modifiers:
        result = inst.operands[0]
        if getattr(definition, "action", "") == "atomic":
            writes |= register_bits(result)
            if getattr(definition, "space", "") != "buffer":
                reads = 0
                for operand in inst.operands[1:]:
                    reads |= register_bits(operand)
    return reads, writes


def _control(inst: Instruction, definition: ControlDef) -> tuple[int, int]:
    """The same for what steers a wave."""
    if definition.handler == "cbranch" and definition.options["on"] == "vcc":
        return 3 << (SGPR_BIT + VCC), 0
    if definition.handler == "index_on":
        return register_bits(inst.operands[0]), 0
    if definition.handler in ("getreg", "time"):
        return 0, register_bits(inst.operands[0])
    return 0, 0


def flows(inst: Instruction, reads: int, writes: int) -> list[tuple[int, int]] | None:
    """(results, sources that they depend on) of a vector instruction that only computes; None of all others.

    Of 64-bit sums and left shifts the low half does not depend on the high half of a 64-bit source, and
    packed float32 results depend on what op_sel and op_sel_hi pick for them.
    """
    definition = lookup(inst.mnemonic)
    if not isinstance(definition, AluDef) or definition.is_scalar or inst.mnemonic.startswith("ds_"):
        return None
    results = definition.signature.results
    if any(t.form in ("scalar", "exec", "scc") for t in results):
        return None
    base, _ = split_mnemonic(inst.mnemonic)
    sources = inst.operands[sum(t.in_text for t in results) :]
    if base in _JUNK_SECOND and len(sources) > 1:
        return [(writes, reads & ~register_bits(sources[1]) | register_bits(sources[0]))]
    if base in _LOW_IS_FREE:
        highs = 0
        for position in _LOW_IS_FREE[base]:
            pair = register_bits(sources[position])
            highs |= pair & (pair - 1)
        low = register_bits(inst.operands[0])
        low &= -low
        return [(low, reads & ~highs), (writes & ~low, reads)]
    if base in _PACKED_32:
        low = writes & -writes
        halves = [0, 0]
        for position, operand in enumerate(sources):
            for half in (0, 1):
                halves[half] |= _picked(inst, position, register_bits(operand), half)
        return [(low, halves[0]), (writes & ~low, halves[1])]
    return [(writes, reads)]


def checked(inst: Instruction, step: Step) -> Step:
    """`step`, which raises when it uses a register that was never written.

    A vector instruction that only computes hands the fault on to its results, as compilers let such
    instructions read what they do not need; whatever then stores them, addresses memory with them or branches
    on them raises, and names the first that read.
    """
    reads, writes = reads_and_writes(inst)
    flow = flows(inst, reads, writes)

    def run(g: WaveGroup) -> Any:
        missing = reads & ~g.written
        if not missing:
            result = step(g)
            g.written |= writes
            return result
        origins = g.cohort.register_origins
        if flow is None:
            raise _finding(g, inst, missing, origins)
        result = step(g)
        tainted = 0
        for results, sources in flow:
            if missing & sources:
                tainted |= results
        if not g.lane_mask.all():  # other lanes keep what they had
            tainted &= ~g.written
        g.written = (g.written | writes) & ~tainted
        origin = next((origins[bit] for bit in _bits(missing) if bit in origins), (inst, missing))
        for bit in _bits(tainted):
            origins[bit] = origin
        return result

    return run


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _finding(
    g: WaveGroup, inst: Instruction, missing: int, origins: dict[int, tuple[Instruction, int]]
) -> UninitialisedRegisterError:
    origin, register = next((origins[bit] for bit in _bits(missing) if bit in origins), (inst, missing))
    then = "" if origin is inst else f"; `{inst.text}` (listing line {inst.line_no}) uses what comes of it"
    return UninitialisedRegisterError(
        f"`{origin.text}` reads {register_name(register)}, which this wave has not written{then}",
        g.cohort.location(g, origin, 0, None, None),
    )


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
