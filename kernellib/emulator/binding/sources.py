# SPDX-License-Identifier: Apache-2.0
"""Views of registers and constants as typed numpy operands.

Everything that turns "operand 1 of this instruction, read as f16, high half, negated" into an array lives
here. An operand is either a *slot* (a view or a constant that needs no work per step) or a function of the
group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.errors import UnsupportedOperandError
from kernellib.emulator.instructions.registry import OperandType
from kernellib.emulator.operands import EXECZ, SCC, VCC, VCCZ, Operand
from kernellib.emulator.state import NUM_LANES, RegisterFile, SlotTable, WaveGroup, unpack_mask

Array = np.ndarray[Any, Any]
Fetch = Callable[[WaveGroup], Any]


@dataclass
class BindContext:
    """What binding one kernel shares: the slots, and where AGPRs begin in the vector file."""

    slots: SlotTable
    num_vgprs: int
    num_agprs: int
    ulp_bias: int = 0
    lds_granule: int = 4
    instrumented: bool = False  # memory instructions go through Launch.chip and tell Launch.monitor
    # whether A, B of a matrix instruction (by its index) are those of another one as well: a hint for speed
    reused: dict[int, tuple[bool, bool]] = field(default_factory=dict)


def refuse(inst: Instruction, message: str) -> UnsupportedOperandError:
    """The error for an operand or modifier that is not understood."""
    return UnsupportedOperandError(message, inst.line_no, inst.text)


def vector_row(ctx: BindContext, operand: Operand) -> int:
    """Row of the vector file that holds a VGPR or AGPR."""
    return operand.index + (ctx.num_vgprs if operand.kind == "agpr" else 0)


# --------------------------------------------------------------------------------------------- constants
def constant_bits(value: float, base: str, literal: bool = False) -> int:
    """Bits of an inline constant or literal as an operand of the given base type sees them.

    Integers are two's complement; floats take the operand's own format, 32-bit types (integers too) that of
    f32. A literal for f64 gives its upper half, for u64/b64 it is zero-extended, for i64 sign-extended.
    """
    width = {"8": 8, "16": 16, "32": 32, "64": 64}[base.lstrip("bfui")]
    if isinstance(value, float):
        if width == 64:
            return int(np.float64(value).view(np.uint64))
        if base == "bf16":
            return int(np.asarray(value, dtype=ml_dtypes.bfloat16).view(np.uint16))
        if width == 16:
            return int(np.float16(value).view(np.uint16))
        return int(np.float32(value).view(np.uint32)) & ((1 << width) - 1)
    if width == 64 and (literal or not -16 <= value <= 64) and -(1 << 31) <= value < 1 << 32:
        if base == "f64":
            return (int(value) & 0xFFFFFFFF) << 32
        if base == "i64":
            value = value - (1 << 32) if value >= 1 << 31 else value
    return int(value) & ((1 << width) - 1)


def constant(inst: Instruction, operand: Operand, base: str, dtype: np.dtype[Any], ndim: int = 0) -> Array:
    """An operand constant as a read-only array of shape [1] * ndim."""
    is_literal = isinstance(operand.value, int) and not -16 <= operand.value <= 64
    bits = constant_bits(operand.value, base, is_literal)
    if not is_literal and isinstance(operand.value, int) and not -(1 << 63) <= operand.value < 1 << 64:
        raise refuse(inst, f"constant {operand.text} does not fit")
    if isinstance(operand.value, int) and dtype.itemsize <= 4 and not -(1 << 31) <= operand.value < 1 << 32:
        raise refuse(inst, f"constant {operand.text} does not fit 32 bits")
    raw = np.array(bits, dtype=f"u{dtype.itemsize}").view(dtype)
    array = raw.reshape((1,) * ndim)
    array.flags.writeable = False
    return array


def constant_slot(ctx: BindContext, array: Array) -> int:
    """A slot whose view is the same array for every group."""
    key = ("const", array.dtype.str, array.tobytes(), array.shape)
    return ctx.slots.intern(key, lambda group: array)


# --------------------------------------------------------------------------------------------- register views
def vgpr_slot(ctx: BindContext, row: int, dtype: np.dtype[Any]) -> int:
    """[n, 64] view of one vector register."""
    return ctx.slots.intern(("v", row, dtype.str), lambda g: g.vector[row].view(dtype))


def vgpr_part_slot(ctx: BindContext, row: int, part: int, dtype: np.dtype[Any]) -> int:
    """[n, 64] strided view of half (2-byte dtype) or byte (1-byte dtype) `part` of one vector register."""
    parts = 4 // dtype.itemsize
    return ctx.slots.intern(("vp", row, part, dtype.str), lambda g: g.vector[row].view(dtype)[:, part::parts])


def vgpr_range_slot(ctx: BindContext, row: int, count: int, dtype: np.dtype[Any], step: int = 1) -> int:
    """[count, n, 64] view of consecutive vector registers; `step` -1 walks downwards from `row`."""

    def make(g: RegisterFile) -> Array:
        if step == 1:
            return g.vector[row : row + count].view(dtype)
        rows = np.lib.stride_tricks.as_strided(
            g.vector[row:], (count, *g.vector.shape[1:]), (step * g.vector.strides[0], *g.vector.strides[1:])
        )
        return rows.view(dtype)

    return ctx.slots.intern(("vr", row, count, step, dtype.str), make)


def sgpr_slot(ctx: BindContext, index: int, dtype: np.dtype[Any], vector: bool = True) -> int:
    """View of an SGPR (or an aligned pair, for 8-byte dtypes): [n, 1] for vector use, [n] for scalar use."""
    scaled = index * 4 // dtype.itemsize if dtype.itemsize >= 4 else index * (4 // dtype.itemsize)
    if vector:
        return ctx.slots.intern(
            ("s1", index, dtype.str), lambda g: g.scalar.view(dtype)[:, scaled : scaled + 1]
        )
    return ctx.slots.intern(("s", index, dtype.str), lambda g: g.scalar.view(dtype)[:, scaled])


def sgpr_range_slot(ctx: BindContext, index: int, count: int, dtype: np.dtype[Any]) -> int:
    """[count, n, 1] view of consecutive SGPRs."""
    return ctx.slots.intern(
        ("sr", index, count, dtype.str),
        lambda g: g.scalar.view(dtype)[:, index : index + count].T[:, :, None],
    )


def special_source(operand: Operand) -> Fetch | None:
    """VCCZ, EXECZ and SCC read as operands: computed when read, [n] uint32."""
    if operand.kind != "sgpr" or operand.index < VCCZ:
        return None
    if operand.index == SCC:
        return lambda g: g.scc.astype(np.uint32)
    pair = {VCCZ: VCC, EXECZ: 126}[operand.index]
    return lambda g: (g.scalar64[:, pair // 2] == 0).astype(np.uint32)


# --------------------------------------------------------------------------------------------- combinations
def fetch_slot(slot: int) -> Fetch:
    """A slot as a function of the group."""
    return lambda g: g.views[slot]


def fetch_pair(ctx: BindContext, row: int, dtype: np.dtype[Any]) -> Fetch:
    """[n, 64] of an 8-byte dtype from two consecutive vector registers."""
    low, high = vgpr_slot(ctx, row, np.dtype(np.uint32)), vgpr_slot(ctx, row + 1, np.dtype(np.uint32))

    def fetch(g: WaveGroup) -> Array:
        views = g.views
        lower = views[low]
        # copies, not shifts: numpy sends arithmetic between types through buffers
        halves = np.empty((*lower.shape, 2), np.uint32)
        halves[..., 0] = lower
        halves[..., 1] = views[high]
        typed: Array = halves.view(dtype)[..., 0]
        return typed

    return fetch


def fetch_mask(ctx: BindContext, inst: Instruction, operand: Operand | None) -> Fetch:
    """Lane mask operand (None: implicit VCC) as bool, [n, 64]."""
    if operand is None:
        return lambda g: unpack_mask(g.scalar, VCC)
    if operand.kind == "const":
        bits = int(constant_bits(operand.value, "b64")) if isinstance(operand.value, int) else None
        if bits is None:
            raise refuse(inst, f"{operand.text} as a lane mask")
        lanes = np.array([[bits >> lane & 1 for lane in range(NUM_LANES)]], dtype=np.bool_)
        return lambda g: lanes
    if operand.kind != "sgpr" or operand.count != 2 or operand.index % 2 or operand.index >= 128:
        raise refuse(inst, f"{operand.text} as a lane mask: wants an aligned SGPR pair or vcc")
    index = operand.index
    return lambda g: unpack_mask(g.scalar, index)


def with_sign(fetch: Fetch, operand_type: OperandType, neg: bool, absolute: bool) -> Fetch:
    """Apply |x| and -x to the sign bit: exact for NaN payloads and zeros too."""
    if not (neg or absolute):
        return fetch
    return lambda g: signed(fetch(g), operand_type, neg, absolute)


def signed(value: Array, operand_type: OperandType, neg: bool, absolute: bool) -> Array:
    """`with_sign` of an array."""
    dtype = operand_type.dtype
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = unsigned.type(1 << (8 * dtype.itemsize - 1))
    bits = value.view(unsigned)
    if absolute:
        bits = bits & ~sign
    if neg:
        bits = bits ^ sign
    result: Array = bits.view(dtype)
    return result
