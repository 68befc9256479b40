# SPDX-License-Identifier: Apache-2.0
"""DPP lane permutations and SDWA sub-register selection (CDNA ISA, "Data parallel processing" and "SDWA")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding.sources import refuse
from kernellib.emulator.operands import ModifierValue

Array = np.ndarray[Any, Any]
LANES = np.arange(64)
SDWA_SELECT = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
               "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32)}  # fmt: skip
DPP_CONTROLS = ("quad_perm", "row_shl", "row_shr", "row_ror", "wave_shl", "wave_rol", "wave_shr", "wave_ror",
                "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast")  # fmt: skip


@dataclass(frozen=True)
class Dpp:
    """One DPP control.

    `source`: the lane each lane reads, -1 for none; `writable`: lanes that row_mask and bank_mask leave
    enabled; `zero_invalid`: bound_ctrl, a lane without source reads 0 instead of not being written.
    """

    source: Array
    writable: Array
    zero_invalid: bool


def dpp_source(name: str, value: ModifierValue) -> Any:  # noqa: PLR0911
    """Source lane per lane (-1: none), or None when the control does not exist."""
    row, pos = LANES & ~15, LANES & 15
    if name == "row_mirror":
        return row | (15 - pos)
    if name == "row_half_mirror":
        return (LANES & ~7) | (7 - (LANES & 7))
    if name == "quad_perm":
        if not isinstance(value, tuple) or len(value) != 4 or not all(0 <= v < 4 for v in value):
            return None
        return (LANES & ~3) | np.array(value)[LANES & 3]
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name == "row_bcast" and value == 15:  # last lane of each row to the whole next row
        return np.where(LANES >= 16, row - 1, -1)
    if name == "row_bcast" and value == 31:  # lane 31 to rows 2 and 3
        return np.where(LANES >= 32, 31, -1)
    if name == "row_newbcast" and 0 <= value < 16:
        return row | value
    if name in ("row_shl", "row_shr", "row_ror") and 1 <= value < 16:
        if name == "row_ror":
            return row | ((pos - value) & 15)
        moved = pos + value if name == "row_shl" else pos - value
        return np.where((moved >= 0) & (moved < 16), row | (moved & 15), -1)
    if name.startswith("wave_") and value == 1:
        step = 1 if name in ("wave_shl", "wave_rol") else -1
        moved = LANES + step
        return (
            moved & 63
            if name in ("wave_rol", "wave_ror")
            else np.where((moved >= 0) & (moved < 64), moved, -1)
        )
    return None


def take_dpp(inst: Instruction, modifiers: dict[str, ModifierValue]) -> Dpp:
    """Consume the DPP modifiers of an instruction."""
    controls = [name for name in DPP_CONTROLS if name in modifiers]
    if len(controls) != 1:
        raise refuse(inst, "DPP wants exactly one lane control")
    source = dpp_source(controls[0], modifiers.pop(controls[0]))
    if source is None:
        raise refuse(inst, f"DPP control {controls[0]} has no such value")
    row_mask, bank_mask = modifiers.pop("row_mask", 15), modifiers.pop("bank_mask", 15)
    bound = modifiers.pop("bound_ctrl", None)
    if not isinstance(row_mask, int) or not isinstance(bank_mask, int) or bound not in (None, 0, 1):
        raise refuse(inst, "row_mask, bank_mask or bound_ctrl is malformed")
    writable = ((row_mask >> (LANES // 16)) & 1).astype(bool) & ((bank_mask >> (LANES // 4 % 4)) & 1).astype(
        bool
    )
    # LLVM prints the set bit as bound_ctrl:1, older versions as bound_ctrl:0; an unset bit is not printed.
    return Dpp(source, writable, bound is not None)


def apply_dpp(dpp: Dpp, value: Array, exec_mask: Array | None) -> tuple[Array, Array | None]:
    """(permuted value, lanes that may be written or None for all).

    A source lane that is out of range or switched off by EXEC is invalid: with bound_ctrl it reads 0,
    otherwise the destination lane keeps its value.
    """
    full = np.broadcast_to(value, (value.shape[0], 64)) if value.shape[-1:] != (64,) else value
    moved = np.take(full, dpp.source, axis=-1, mode="wrap")
    valid = dpp.source >= 0
    if exec_mask is not None:
        valid = valid & np.take(exec_mask, dpp.source, axis=-1, mode="wrap")
    if valid.all():
        return moved, None if dpp.writable.all() else dpp.writable
    if dpp.zero_invalid:
        moved = np.where(valid, moved, np.zeros((), moved.dtype))
        return moved, None if dpp.writable.all() else dpp.writable
    return moved, valid & dpp.writable


def sdwa_select(value: Array, select: str, sext: bool) -> Array:
    """The selected byte or word of uint32 values, zero- or sign-extended to 32 bits."""
    shift, width = SDWA_SELECT[select]
    if width == 32:
        return value
    part = (value >> np.uint32(shift)) & np.uint32((1 << width) - 1)
    if sext:
        sign = np.uint32(1 << (width - 1))
        part = (part ^ sign) - sign
    return part


def sdwa_merge(old: Array, value: Array, select: str, unused: str) -> Array:
    """Place the low bits of uint32 `value` at `select`; the rest is padded, sign-extended or kept."""
    shift, width = SDWA_SELECT[select]
    if width == 32:
        return value
    mask = np.uint32(((1 << width) - 1) << shift)
    placed = (value << np.uint32(shift)) & mask
    if unused == "UNUSED_PRESERVE":
        return (old & ~mask) | placed
    if unused == "UNUSED_SEXT":  # bits above are copies of the sign, bits below are zero
        negative = (placed >> np.uint32(shift + width - 1)) & np.uint32(1)
        above = np.uint32((0xFFFFFFFF << (shift + width)) & 0xFFFFFFFF)
        return placed | np.where(negative != 0, above, np.uint32(0))
    return placed


def take_select(inst: Instruction, modifiers: dict[str, ModifierValue], name: str, default: str) -> str:
    """Consume an SDWA select modifier."""
    value = modifiers.pop(name, default)
    if not isinstance(value, str) or not re.fullmatch(r"BYTE_[0-3]|WORD_[01]|DWORD", value):
        raise refuse(inst, f"{name}:{value} is not a byte, word or dword")
    return value
