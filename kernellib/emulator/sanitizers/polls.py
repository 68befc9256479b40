# SPDX-License-Identifier: Apache-2.0
"""LDS loads that wait for another wave: those of a loop that does nothing but load and compare.

LLVM makes plain ds_read and ds_write of LDS atomics of workgroup scope, so the text does not say which words
are flags.  A loop that stores nothing and counts nothing, though, can only end because another wave writes
what it reads: that word is a flag, whatever the source called it.  The first look at it often stands before
the loop (compilers rotate loops): the last LDS load of a block that ends in a conditional branch to it or
around it.
"""

from __future__ import annotations

from kernellib.emulator.assembly import Instruction, Program
from kernellib.emulator.instructions import lookup
from kernellib.emulator.instructions.registry import MemoryDef

_COMPARES = ("v_cmp_", "s_cmp_", "s_cmpk_", "s_bitcmp")
_MOVES = ("v_mov_b32", "s_mov_b32", "s_mov_b64", "v_readfirstlane_b32", "v_cndmask_b32", "s_cselect_b64")
_MASKS = ("s_and_b64", "s_or_b64", "s_andn2_b64", "s_and_saveexec_b64", "v_and_b32", "s_and_b32")
_HINTS = ("s_waitcnt", "s_nop", "s_sleep")
_WAITING = (*_COMPARES, *_MOVES, *_MASKS, *_HINTS)
MAX_LOOP = 48  # instructions of a waiting loop, at most


def _is_lds_load(inst: Instruction) -> bool:
    definition = lookup(inst.mnemonic)
    return isinstance(definition, MemoryDef) and definition.space == "lds" and definition.action == "load"


def _target(program: Program, inst: Instruction) -> int:
    """Index of the instruction that a branch goes to, or -1."""
    if not inst.mnemonic.startswith(("s_cbranch_", "s_branch")) or not inst.operands:
        return -1
    return program.labels.get(inst.operands[0].text, -1)


def waiting_loops(program: Program) -> list[tuple[int, int]]:
    """(first, last) instruction of each loop that only loads and compares, LDS among it."""
    found = []
    for last, inst in enumerate(program.instructions):
        first = _target(program, inst)
        if not 0 <= first <= last < first + MAX_LOOP or inst.mnemonic == "s_branch":
            continue
        body = program.instructions[first:last]
        loads = [one for one in body if _is_lds_load(one)]
        if loads and all(one.mnemonic.startswith(_WAITING) for one in body if one not in loads):
            found.append((first, last))
    return found


def polling_loads(program: Program) -> frozenset[int]:
    """Indices of LDS loads that wait for another wave's store."""
    loops = waiting_loops(program)
    found = {
        inst.index for first, last in loops for inst in program.instructions[first:last] if _is_lds_load(inst)
    }
    leaders = {index for index in program.labels.values() if index >= 0}
    for first, last in loops:
        for branch in program.instructions:
            leads_in = _target(program, branch) == first or branch.index == first - 1
            if not leads_in or not branch.mnemonic.startswith("s_cbranch_") or first <= branch.index <= last:
                continue
            for index in range(branch.index - 1, max(branch.index - MAX_LOOP, -1), -1):
                inst = program.instructions[index]
                if _is_lds_load(inst):
                    found.add(index)
                if _is_lds_load(inst) or _target(program, inst) >= 0 or index in leaders:
                    break
    return frozenset(found)
