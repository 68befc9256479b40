# SPDX-License-Identifier: Apache-2.0
"""Hazards that gfx950 does not interlock: too few wait states between two instructions.

The compiler pads them with s_nop; hand-written or edited listings may not.  The check is static: for every
instruction the registers written within the last wait states on any path that leads to it are known, so it
costs nothing while running.  An instruction that breaks a rule raises MissingNopError when (and only when) it
is executed.

Every instruction counts as one wait state, `s_nop N` as N + 1.  Rules and where each is published ("ISA": AMD
CDNA3/CDNA4 ISA, table "Required software-inserted wait states"; "LLVM": GCNHazardRecognizer, the facts it
encodes for gfx940/gfx950):

=====================================================================================  =====  ==========
VALU writes VGPR, DPP reads it                                                             2  ISA, LLVM
VALU writes EXEC, DPP instruction                                                          5  ISA, LLVM
VALU writes VGPR, v_permlane16/32_swap uses it (gfx950)                                    2  LLVM
v_rcp, v_rsq, v_sqrt, v_exp, v_log, v_sin, v_cos result, other VALU reads it               1  ISA, LLVM
result moved by op_sel or SDWA dst_sel, VALU reads it                                      1  ISA, LLVM
VALU writes SGPR or VCC, VALU reads it                                                     2  ISA, LLVM
VALU writes VCC, v_div_fmas                                                                4  ISA, LLVM
VALU writes SGPR, vector memory instruction reads it                                       5  ISA, LLVM
VALU writes SGPR, v_readlane/v_writelane uses it as lane select                            4  ISA, LLVM
VALU writes VGPR, v_readlane/v_readfirstlane reads it                                      1  ISA, LLVM
VALU writes EXEC, v_readlane/v_readfirstlane/v_writelane                                   4  ISA, LLVM
store of 3 or 4 dwords, VALU overwrites the data                                           2  ISA, LLVM
VALU writes VGPR, MFMA reads it                                                            2  ISA, LLVM
VALU writes EXEC, MFMA                                                                     4  ISA, LLVM
dot product (v_dot*) writes VGPR, other VALU or memory instruction uses or overwrites it    3  LLVM
MFMA of P passes writes registers, VALU or memory instruction uses or overwrites them    P+4  LLVM
MFMA of P passes writes registers, MFMA reads them as A or B                             P+4  LLVM
=====================================================================================  =====  ==========

P is the number of 4-cycle passes (AMD, "Matrix Core Programming on AMD CDNA3 and CDNA4", table of cycles);
for shapes whose count is not in that table the smallest count (2) is assumed, for which P+3 states are
enough.  Rules that only cost time, or that differ between sources, are left out, so that compiled code raises
no false alarm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kernellib.emulator.assembly import Instruction, Program
from kernellib.emulator.instructions import lookup, split_mnemonic
from kernellib.emulator.instructions.registry import AluDef, ControlDef, MemoryDef
from kernellib.emulator.operands import EXEC, M0, VCC, Operand
from kernellib.emulator.waits import SGPR_BIT, register_bits, register_name

HORIZON = 21
EXEC_BITS, VCC_BITS = 3 << (SGPR_BIT + EXEC), 3 << (SGPR_BIT + VCC)
VECTOR_BITS = (1 << SGPR_BIT) - 1
LANE_MOVES = frozenset({"v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32"})
# (fact, wait states) of every rule; the fact names an attribute of Written, the reader decides which
# registers
WRITE_KINDS = ("valu", "trans", "moved", "wide_store", "dot", "mfma2", "mfma4", "mfma8", "mfma16")


@dataclass(frozen=True)
class Effects:
    """What one instruction reads and writes, as register bit masks, and what kind it is."""

    reads: int = 0
    writes: int = 0
    wait_states: int = 1
    is_valu: bool = False
    is_mfma: bool = False
    is_trans: bool = False
    is_memory: bool = False
    is_dpp: bool = False
    moved: bool = False
    wide_store_data: int = 0
    mfma_ab: int = 0
    lane_select: int = 0
    passes: int = 0
    mnemonic: str = ""


State = tuple[tuple[int, ...], ...]
EMPTY: State = tuple((0,) * len(WRITE_KINDS) for _ in range(HORIZON))


def mfma_passes(inst: Instruction, mnemonic: str) -> int:
    """Passes (of 4 cycles) of an MFMA instruction; an 8-bit operand doubles those of the f8f6f4 forms."""
    match = re.search(r"_(\d+)x(\d+)x(\d+)", mnemonic)
    if match is None:
        return 2
    rows, k = int(match.group(1)), int(match.group(3))
    if mnemonic.endswith("f8f6f4"):
        narrow = all(int(str(inst.modifiers.get(name, 0))) >= 2 for name in ("cbsz", "blgp"))
        return (4 if rows == 16 else 8) * (1 if narrow else 2)
    if rows == 32:
        return 8 if k >= 8 else 2
    if rows == 16:
        return 4 if k >= 16 else 2
    return 2


def _mask(operands: Sequence[Operand]) -> int:
    mask = 0
    for operand in operands:
        mask |= register_bits(operand)
    return mask


def effects(inst: Instruction) -> Effects:
    """Reads, writes and kind of an instruction; instructions that are not known have none."""
    definition = lookup(inst.mnemonic)
    base, encoding = split_mnemonic(inst.mnemonic)
    if isinstance(definition, AluDef) and not base.startswith("ds_"):
        return _alu_effects(inst, definition, base, encoding)
    if isinstance(definition, AluDef):
        return Effects(_mask(inst.operands[1:]), _mask(inst.operands[:1]), is_memory=True, mnemonic=base)
    if isinstance(definition, MemoryDef):
        return _memory_effects(inst, definition, base)
    if isinstance(definition, ControlDef) and base == "s_nop" and inst.operands:
        value = inst.operands[0].value
        return Effects(wait_states=int(value) + 1 if isinstance(value, int) else 1, mnemonic=base)
    return Effects(mnemonic=base)


def _alu_effects(inst: Instruction, definition: AluDef, base: str, encoding: str) -> Effects:
    signature = definition.signature
    num_results = sum(t.in_text for t in signature.results)
    results, sources = inst.operands[:num_results], inst.operands[num_results:]
    reads, writes = _mask(sources), _mask(results)
    if any(t.form == "old" for t in signature.sources):
        reads |= writes & VECTOR_BITS
    if any(t.form == "vcc" for t in signature.sources):
        reads |= VCC_BITS
    if any(t.form == "exec" for t in signature.results):
        writes |= EXEC_BITS
    if definition.is_scalar:
        return Effects(reads, writes, mnemonic=base)
    op_sel = inst.modifiers.get("op_sel", ())
    moved = bool(isinstance(op_sel, tuple) and len(op_sel) > len(sources) and op_sel[-1])
    moved |= encoding == "sdwa" and inst.modifiers.get("dst_sel", "DWORD") != "DWORD"
    is_mfma = definition.kind == "mfma"
    is_lane_select = base in ("v_readlane_b32", "v_writelane_b32") and len(sources) > 1
    return Effects(
        reads, writes, is_valu=True, is_mfma=is_mfma, is_trans=definition.transcendental,
        is_dpp=encoding == "dpp" or any("row_" in name or name == "quad_perm" for name in inst.modifiers),
        moved=moved, mfma_ab=_mask(sources[:2]) if is_mfma else 0,
        lane_select=register_bits(sources[1]) if is_lane_select else 0,
        passes=mfma_passes(inst, base) if is_mfma else 0, mnemonic=base,
    )  # fmt: skip


def _memory_effects(inst: Instruction, definition: MemoryDef, base: str) -> Effects:
    is_vector = definition.space not in ("scalar", "scalar_buffer")
    data_first = definition.action == "load" and "lds" not in inst.modifiers
    result = inst.operands[:1] if data_first else ()
    wide = 0
    if definition.action == "store" and definition.bytes_per_lane > 8 and definition.space != "lds":
        by_register = definition.space == "buffer" and any(
            o.kind == "sgpr" and o.count == 1 for o in inst.operands
        )
        if not by_register:
            data = inst.operands[0 if definition.space == "buffer" else 1]
            wide = register_bits(data)
    reads = _mask(inst.operands[len(result) :])
    if definition.action == "load_to_lds" or "lds" in inst.modifiers:
        reads |= 1 << (SGPR_BIT + M0)
    return Effects(reads, _mask(result), is_memory=is_vector, wide_store_data=wide, mnemonic=base)


def advance(state: State, effect: Effects) -> State:
    """The state after an instruction: facts age by its wait states, its own writes become the newest."""
    valu = effect.writes if effect.is_valu and not effect.is_mfma else 0
    newest = (
        valu,
        effect.writes if effect.is_trans else 0,
        effect.writes if effect.moved else 0,
        effect.wide_store_data,
        effect.writes if effect.mnemonic.startswith("v_dot") else 0,
        *(effect.writes if effect.passes == passes else 0 for passes in (2, 4, 8, 16)),
    )
    nothing = (0,) * len(WRITE_KINDS)
    if effect.wait_states >= HORIZON:
        return EMPTY
    aged = (newest,) if effect.wait_states == 1 and effect.mnemonic != "s_nop" else ()
    padding = (nothing,) * (effect.wait_states - len(aged))
    return (*aged, *padding, *state)[:HORIZON]


def join(a: State, b: State) -> State:
    """Facts that hold on either path."""
    if a == b:
        return a
    return tuple(tuple(x | y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


def check(state: State, effect: Effects) -> str | None:
    """The first rule that an instruction breaks, in words, or None."""
    for kind, mask, needed, reason in rules(effect):
        column = WRITE_KINDS.index(kind)
        for since in range(min(needed, HORIZON)):
            hit = state[since][column] & mask
            if hit:
                what = "EXEC" if hit & EXEC_BITS else register_name(hit)
                return f"{reason} ({what}): {needed} wait states are needed, there are {since}"
    return None


def rules(effect: Effects) -> list[tuple[str, int, int, str]]:
    """(kind of earlier write, registers, wait states, words) for an instruction as the later one."""
    found: list[tuple[str, int, int, str]] = []
    vectors, scalars = effect.reads & VECTOR_BITS, effect.reads & ~VECTOR_BITS & ~EXEC_BITS
    if effect.is_valu and not effect.is_mfma:
        if not effect.is_trans:
            found.append(("trans", vectors, 1, "transcendental result read by the next vector instruction"))
        found.append(("moved", vectors, 1, "result placed by op_sel or dst_sel read by the next instruction"))
        found.append(("valu", scalars, 2, "scalar register written by a vector instruction and read by one"))
        found.append(("wide_store", effect.writes & VECTOR_BITS, 2, "data of a wide store overwritten"))
        if effect.is_dpp:
            found.append(("valu", vectors, 2, "vector register read through DPP"))
            found.append(("valu", EXEC_BITS, 5, "EXEC written by a vector instruction before DPP"))
        if effect.mnemonic.startswith("v_permlane"):
            found.append(("valu", vectors, 2, "vector register exchanged by v_permlane"))
        if effect.mnemonic.startswith("v_div_fmas"):
            found.append(("valu", VCC_BITS, 4, "VCC written before v_div_fmas"))
        if effect.mnemonic in LANE_MOVES:
            found.append(("valu", EXEC_BITS, 4, "EXEC written by a vector instruction before a lane move"))
            found.append(
                ("valu", effect.lane_select & ~VECTOR_BITS, 4, "lane select written by a vector instruction")
            )
            if effect.mnemonic != "v_writelane_b32":
                found.append(("valu", vectors, 1, "vector register read by a lane move"))
    if effect.is_memory and not effect.mnemonic.startswith("ds_"):
        found.append(
            ("valu", scalars, 5, "scalar register written by a vector instruction, read by a memory one")
        )
    if effect.is_mfma:
        found.append(
            ("valu", vectors, 2, "vector register written just before a matrix instruction reads it")
        )
        found.append(("valu", EXEC_BITS, 4, "EXEC written by a vector instruction before a matrix one"))
    touched = effect.mfma_ab if effect.is_mfma else vectors | (effect.writes & VECTOR_BITS)
    if effect.is_valu or effect.is_memory:
        for passes in (2, 4, 8, 16):
            needed = passes + (3 if passes == 2 else 4)
            found.append((f"mfma{passes}", touched, needed, "matrix result touched before it is written"))
        if not effect.mnemonic.startswith("v_dot"):
            found.append(("dot", touched, 3, "dot product result touched before it is written"))
    return found


@dataclass
class _Block:
    effects: list[tuple[Instruction, Effects]]
    successors: list[int]
    entry: State | None = field(default=None)


def find_hazards(program: Program, first_of_block: Sequence[int]) -> dict[int, str]:
    """Instruction index -> broken rule, over every path of the program's control flow."""
    blocks = _control_flow(program, first_of_block)
    entries = {kernel.entry for kernel in program.kernels.values()} or {0}
    numbers = {first: number for number, first in enumerate(first_of_block)}
    pending = [numbers[entry] for entry in entries if entry in numbers]
    for number in pending:
        blocks[number].entry = EMPTY
    broken: dict[int, str] = {}
    while pending:
        block = blocks[pending.pop()]
        state = block.entry
        assert state is not None
        for inst, effect in block.effects:
            problem = check(state, effect)
            if problem is not None:
                broken.setdefault(inst.index, problem)
            state = advance(state, effect)
        for successor in block.successors:
            known = blocks[successor].entry
            joined = state if known is None else join(known, state)
            if joined != known:
                blocks[successor].entry = joined
                pending.append(successor)
    return broken


def _control_flow(program: Program, first_of_block: Sequence[int]) -> list[_Block]:
    numbers = {first: number for number, first in enumerate(first_of_block)}
    blocks = []
    for number, first in enumerate(first_of_block):
        last = first_of_block[number + 1] if number + 1 < len(first_of_block) else len(program.instructions)
        instructions = program.instructions[first:last]
        tail = instructions[-1]
        base = split_mnemonic(tail.mnemonic)[0]
        successors = []
        if base not in ("s_branch", "s_endpgm", "s_setpc_b64", "s_trap") and last in numbers:
            successors.append(numbers[last])
        if base == "s_branch" or base.startswith("s_cbranch"):
            target = program.labels.get(tail.operands[0].text, -1) if tail.operands else -1
            if target in numbers:
                successors.append(numbers[target])
        blocks.append(_Block([(inst, effects(inst)) for inst in instructions], successors))
    return blocks
