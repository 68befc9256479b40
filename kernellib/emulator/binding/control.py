# SPDX-License-Identifier: Apache-2.0
"""Branches, waits, barriers, sleeps, mode register: everything that steers a group instead of computing.

A handler returns a step and whether it ends its basic block.  A step that ends a block returns the number of
the next block, or one of the negative codes below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction, Program
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.indexed import bind_index_on as indexed_on
from kernellib.emulator.binding.indexed import index_flags
from kernellib.emulator.binding.sources import Array, BindContext, refuse
from kernellib.emulator.errors import TrapError
from kernellib.emulator.instructions.registry import ControlDef
from kernellib.emulator.operands import EXEC, VCC, Operand
from kernellib.emulator.state import FloatMode, WaveGroup
from kernellib.emulator.waits import parse_waitcnt

Step = Callable[[WaveGroup], Any]
END, BARRIER, SPLIT, YIELD = -1, -2, -3, -4

# Hardware registers of s_getreg/s_setreg (LLVM, "AMDGPU HwReg names").
HWREGS = {"HW_REG_MODE": 1, "HW_REG_STATUS": 2, "HW_REG_TRAPSTS": 3, "HW_REG_HW_ID": 4, "HW_REG_GPR_ALLOC": 5,
          "HW_REG_LDS_ALLOC": 6, "HW_REG_IB_STS": 7, "HW_REG_SH_MEM_BASES": 15, "HW_REG_XCC_ID": 20,
          "HW_REG_SQ_PERF_SNAPSHOT_DATA": 21}  # fmt: skip


class ControlContext:
    """What control handlers need: the program, and the block that starts at each instruction."""

    def __init__(self, ctx: BindContext, program: Program, block_of: dict[int, int]) -> None:
        self.ctx = ctx
        self.program = program
        self.block_of = block_of
        self.indexed: int | None = None  # the flags of VGPR indexing where it is on (indexed.py)

    def target(self, inst: Instruction, operand: Operand) -> int:
        """Block number that a branch operand names (a label, or a distance in dwords is refused)."""
        if operand.kind != "symbol":
            raise refuse(inst, f"branch target {operand.text} is not a label")
        index = self.program.labels.get(operand.text)
        if index is None or index < 0:
            raise refuse(inst, f"label {operand.text} is not defined in the code")
        if index not in self.block_of:
            raise refuse(inst, f"label {operand.text} has no instruction after it")
        return self.block_of[index]

    def next_block(self, inst: Instruction) -> int:
        """Block after this instruction; -5 stands for "ran off the end of the code"."""
        return self.block_of.get(inst.index + 1, -5)


def _expect(inst: Instruction, count: int) -> None:
    if len(inst.operands) != count or inst.modifiers:
        raise refuse(inst, f"wants {count} operand(s) and no modifier")


def _immediate(inst: Instruction, low: int, high: int) -> int:
    _expect(inst, 1)
    operand = inst.operands[0]
    if operand.kind != "const" or not isinstance(operand.value, int) or not low <= operand.value <= high:
        raise refuse(inst, f"{operand.text}: wants an integer in [{low}, {high}]")
    return operand.value


def bind_endpgm(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_endpgm: the waves of the group have ended."""
    if inst.operands:
        _immediate(inst, 0, 0xFFFF)
    return (lambda g: END), True


def bind_branch(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_branch."""
    _expect(inst, 1)
    target = control.target(inst, inst.operands[0])
    return (lambda g: target), True


def _condition(name: str) -> Callable[[WaveGroup], Array]:
    if name == "scc":
        return lambda g: g.scc
    pair = (VCC if name == "vcc" else EXEC) // 2
    return lambda g: g.scalar64[:, pair] != 0


def bind_cbranch(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_cbranch_{scc,vcc,exec}{0,1,z,nz}: waves of the group may disagree, then it splits."""
    _expect(inst, 1)
    taken, falls = control.target(inst, inst.operands[0]), control.next_block(inst)
    condition, sense = _condition(definition.options["on"]), bool(definition.options["sense"])

    def step(g: WaveGroup) -> int:
        truth = condition(g)
        if g.n == 1:
            return taken if bool(truth[0]) == sense else falls
        count = int(np.count_nonzero(truth))
        if count == g.n:
            return taken if sense else falls
        if count == 0:
            return falls if sense else taken
        g.targets = (truth.copy() if sense else ~truth, taken, falls)
        return SPLIT

    return step, True


def bind_nop(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step | None, bool]:
    """s_nop, s_setprio and other hints: no effect on results (s_nop counts for hazards.py)."""
    if definition.options.get("operands", 1):
        _immediate(inst, 0, 0xFFFF)
    else:
        _expect(inst, 0)
    return None, False


def bind_cache(
    control: ControlContext, inst: Instruction, definition: ControlDef
) -> tuple[Step | None, bool]:
    """Cache write-back and invalidation: nothing to do where every store is visible at once."""
    if inst.operands or set(inst.modifiers) - {"sc0", "sc1", "nt"}:
        raise refuse(inst, "cache instructions take only the scope bits sc0, sc1 and nt")
    if control.ctx.instrumented:
        from kernellib.emulator.relaxed import hooks  # noqa: PLC0415 (it builds on binding)

        return hooks.cache_step(inst, definition.mnemonic), False
    return None, False


def bind_waitcnt(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_waitcnt."""
    try:
        vmcnt, lgkmcnt = parse_waitcnt(inst.operands[0].text)
    except ValueError as error:
        raise refuse(inst, str(error)) from None

    def step(g: WaveGroup) -> None:
        cohort = g.cohort
        if cohort.lds_in_flight is None:
            g.pending = g.waits.wait(vmcnt, lgkmcnt)
            return
        landed: list[Array] = []
        g.pending = g.waits.wait(vmcnt, lgkmcnt, landed)
        for dwords in landed:
            cohort.lds_in_flight[dwords] = False

    if control.ctx.instrumented:
        from kernellib.emulator.relaxed import hooks  # noqa: PLC0415 (it builds on binding)

        def relaxed(g: WaveGroup) -> None:
            hooks.wait(g, vmcnt, lgkmcnt)
            step(g)

        return relaxed, False
    return step, False


def bind_barrier(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_barrier: the group's waves wait until their workgroups' other live waves arrive."""
    _expect(inst, 0)
    following = control.next_block(inst)

    def step(g: WaveGroup) -> int:
        g.block = following
        return BARRIER

    return step, True


def bind_sleep(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_sleep, s_sethalt: let the others run."""
    _immediate(inst, 0, 0xFFFF)
    following = control.next_block(inst)

    def step(g: WaveGroup) -> int:
        g.block = following
        return YIELD

    return step, True


def bind_trap(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_trap: the compiled code gave up (llvm.trap, an assertion)."""
    number = _immediate(inst, 0, 255)

    def step(g: WaveGroup) -> int:
        raise TrapError(f"the program executed s_trap {number}", g.cohort.location(g, inst, 0, None, None))

    return step, True


def bind_time(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_memtime, s_memrealtime: a count of the instructions this group has issued (no clock is emulated)."""
    _expect(inst, 1)
    operand = inst.operands[0]
    if operand.kind != "sgpr" or operand.count != 2 or operand.index % 2:
        raise refuse(inst, f"{operand.text}: wants an aligned SGPR pair")
    slot = src.sgpr_slot(control.ctx, operand.index, np.dtype(np.uint64), vector=False)

    def step(g: WaveGroup) -> None:
        g.views[slot][...] = np.uint64(g.cohort.launch.clock + g.issued)

    return step, False


def parse_hwreg(inst: Instruction, operand: Operand) -> tuple[int, int, int]:
    """(register, first bit, width) of `hwreg(NAME[, offset, width])` or its packed immediate."""
    if operand.kind == "const" and isinstance(operand.value, int):
        bits = operand.value & 0xFFFF
        return bits & 63, bits >> 6 & 31, (bits >> 11 & 31) + 1
    match = re.fullmatch(r"hwreg\(\s*(\w+)\s*(?:,\s*(\d+)\s*,\s*(\d+)\s*)?\)", operand.text)
    if not match:
        raise refuse(inst, f"{operand.text} is not a hardware register")
    name, offset, width = match.group(1), int(match.group(2) or 0), int(match.group(3) or 32)
    number = HWREGS.get(name, int(name) if name.isdigit() else -1)
    if number < 0 or offset + width > 32 or width < 1:
        raise refuse(inst, f"{operand.text} is not a hardware register of this target")
    return number, offset, width


def _hwreg_value(g: WaveGroup, inst: Instruction, number: int) -> Array:
    """32-bit value per wave of the hardware registers that have a meaning here."""
    if number == HWREGS["HW_REG_MODE"]:
        return np.full(g.n, g.mode.to_bits(), np.uint32)
    if number == HWREGS["HW_REG_XCC_ID"]:  # workgroups are dealt to the eight dies round robin
        return g.cohort.xcd[g.waves].astype(np.uint32)
    if number == HWREGS["HW_REG_TRAPSTS"]:
        return np.zeros(g.n, np.uint32)
    raise refuse(inst, f"hardware register {number} is not emulated")


def bind_getreg(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_getreg_b32."""
    _expect(inst, 2)
    result, source = inst.operands
    number, offset, width = parse_hwreg(inst, source)
    if result.kind != "sgpr" or result.count != 1:
        raise refuse(inst, f"{result.text}: wants one scalar register")
    if number not in (HWREGS["HW_REG_MODE"], HWREGS["HW_REG_XCC_ID"], HWREGS["HW_REG_TRAPSTS"]):
        raise refuse(inst, f"hardware register {source.text} is not emulated")
    slot = src.sgpr_slot(control.ctx, result.index, np.dtype(np.uint32), vector=False)
    mask = np.uint32((1 << width) - 1)

    def step(g: WaveGroup) -> None:
        g.views[slot][...] = (_hwreg_value(g, inst, number) >> np.uint32(offset)) & mask

    return step, False


def bind_setreg(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_setreg_b32, s_setreg_imm32_b32: only MODE can be written."""
    _expect(inst, 2)
    target, source = inst.operands
    number, offset, width = parse_hwreg(inst, target)
    if number != HWREGS["HW_REG_MODE"]:
        raise refuse(inst, f"hardware register {target.text} cannot be written here")
    mask = ((1 << width) - 1) << offset
    if source.kind == "const" and isinstance(source.value, int):
        value = source.value

        def fetch(g: WaveGroup) -> int:
            return value
    elif source.kind == "sgpr" and source.count == 1:
        slot = src.sgpr_slot(control.ctx, source.index, np.dtype(np.uint32), vector=False)

        def fetch(g: WaveGroup) -> int:
            values = g.views[slot]
            if (values != values[0]).any():
                raise refuse(inst, "waves of one group set different modes: not supported")
            return int(values[0])
    else:
        raise refuse(inst, f"{source.text}: wants a constant or a scalar register")

    def step(g: WaveGroup) -> None:
        bits = (g.mode.to_bits() & ~mask) | (fetch(g) << offset & mask)
        g.set_mode(FloatMode.from_bits(bits))

    return step, False


def bind_getpc(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_getpc_b64, s_setpc_b64, s_swappc_b64, s_call_b64: code addresses are not emulated."""
    raise refuse(
        inst, "code addresses (function calls, constant tables in the code section) are not emulated"
    )


def bind_index_on(control: ControlContext, inst: Instruction, definition: ControlDef) -> tuple[Step, bool]:
    """s_set_gpr_idx_on: vector instructions after it, up to s_set_gpr_idx_off, index their registers."""
    if control.indexed is not None:
        raise refuse(inst, "VGPR indexing is on already")
    control.indexed = index_flags(inst)
    return indexed_on(control.ctx, inst, control.indexed), False


def bind_index_off(
    control: ControlContext, inst: Instruction, definition: ControlDef
) -> tuple[Step | None, bool]:
    """s_set_gpr_idx_off."""
    _expect(inst, 0)
    if control.indexed is None:
        raise refuse(inst, "no s_set_gpr_idx_on before it in its basic block")
    control.indexed = None
    return None, False


HANDLERS: dict[str, Callable[[ControlContext, Instruction, ControlDef], tuple[Step | None, bool]]] = {
    name.removeprefix("bind_"): function
    for name, function in list(globals().items())
    if name.startswith("bind_")
}
