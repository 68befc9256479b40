# SPDX-License-Identifier: Apache-2.0
"""Instructions that move data between lanes or between register files. Semantics: CDNA4 ISA 12.8, 12.11."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from kernellib.emulator.errors import UnsupportedOperandError
from kernellib.emulator.instructions.registry import define_vector, vector

Array = np.ndarray[Any, Any]

define_vector("v_accvgpr_read_b32", "b32 -> b32", np.positive)
define_vector("v_accvgpr_write_b32", "b32 -> b32", np.positive)
define_vector("v_accvgpr_mov_b32", "b32 -> b32", np.positive)


@vector("v_swap_b32", "old0, old1 -> b32, b32")
def v_swap_b32(a: Array, b: Array) -> tuple[Array, Array]:
    """Exchange two registers."""
    return b.copy(), a.copy()


@vector("v_permlane16_swap_b32", "old0, old1 -> b32, b32", cross_lane=True)
def v_permlane16_swap_b32(a: Array, b: Array) -> tuple[Array, Array]:
    """Odd rows of 16 lanes of a trade places with the even rows of b."""
    new_a, new_b = a.copy(), b.copy()
    for row in (0, 32):
        new_a[..., row + 16 : row + 32] = b[..., row : row + 16]
        new_b[..., row : row + 16] = a[..., row + 16 : row + 32]
    return new_a, new_b


@vector("v_readfirstlane_b32", "b32 -> s.b32", cross_lane=True, ignores_exec=True)
def v_readfirstlane_b32(value: Array, *, exec_mask: Array) -> Array:
    """The value of the lowest active lane; of lane 0 when none is active."""
    lane = np.argmax(np.broadcast_to(exec_mask, value.shape), axis=-1)
    return np.take_along_axis(value, lane[..., None], axis=-1)


@vector("v_readlane_b32", "b32, s.u32 -> s.b32", cross_lane=True, ignores_exec=True)
def v_readlane_b32(value: Array, lane: Array) -> Array:
    """The value of lane S1[5:0], active or not."""
    index = np.broadcast_to(lane[..., :1] & np.uint32(63), (*value.shape[:-1], 1)).astype(np.int64)
    return np.take_along_axis(value, index, axis=-1)


@vector("v_writelane_b32", "s.b32, s.u32, old -> b32", cross_lane=True, ignores_exec=True)
def v_writelane_b32(value: Array, lane: Array, old: Array) -> Array:
    """D with lane S1[5:0], active or not, replaced by S0."""
    return np.where(np.arange(64, dtype=np.uint32) == (lane & np.uint32(63)), value, old)


# ------------------------------------------------------------------------ permutations through the LDS
# crossbar They read and write no LDS memory, but are counted and waited for as LDS operations (CDNA4 ISA
# 11.3, 12.12).
def _pull(value: Array, source: Array, exec_mask: Array) -> Array:
    """The value of lane `source` for every lane; 0 where that lane is inactive."""
    source = np.broadcast_to(source, value.shape)
    active = np.take_along_axis(np.broadcast_to(exec_mask, value.shape), source, axis=-1)
    return np.where(active, np.take_along_axis(value, source, axis=-1), np.uint32(0))


@vector("ds_bpermute_b32", "u32, b32 -> b32", cross_lane=True)
def ds_bpermute_b32(address: Array, value: Array, *, offset: int, exec_mask: Array) -> Array:
    """D = S1 of lane (S0 + offset) / 4 % 64; an inactive source lane gives 0."""
    source = (((address + np.uint32(offset)) >> np.uint32(2)) & np.uint32(63)).astype(np.int64)
    return _pull(value, source, exec_mask)


@vector("ds_permute_b32", "u32, b32 -> b32", cross_lane=True)
def ds_permute_b32(address: Array, value: Array, *, offset: int, exec_mask: Array) -> Array:
    """Every active lane sends S1 to lane (S0 + offset) / 4 % 64; the highest sender wins, no sender gives
    0."""
    target = (((address + np.uint32(offset)) >> np.uint32(2)) & np.uint32(63)).astype(np.int64)
    active = np.broadcast_to(exec_mask, value.shape)
    result = np.zeros(value.shape, np.uint32)
    waves = np.arange(value.shape[0])
    for lane in range(64):
        sends = active[:, lane]
        result[waves[sends], target[sends, lane]] = value[sends, lane]
    return result


def parse_swizzle(offset: int | str) -> int:
    """The 16-bit offset of ds_swizzle_b32 from `offset:N` or `offset:swizzle(MODE, ...)`.

    Raises UnsupportedOperandError for a mode or an argument that the assembler does not know.
    """
    if isinstance(offset, int):
        return offset
    match = re.fullmatch(r"swizzle\(\s*(\w+)\s*,(.*)\)", offset)
    if match is None:
        raise UnsupportedOperandError(f"offset:{offset} is no swizzle")
    mode, arguments = match.group(1), [a.strip() for a in match.group(2).split(",")]
    if mode == "BITMASK_PERM":
        return _bitmask(arguments[0].strip('"'), offset)
    try:
        numbers = [int(a, 0) for a in arguments]
    except ValueError:
        raise UnsupportedOperandError(f"offset:{offset} has an argument that is no number") from None
    known = {
        "QUAD_PERM": (4, lambda a, b, c, d: 0x8000 | a | b << 2 | c << 4 | d << 6),
        "BROADCAST": (2, lambda size, lane: (0x20 - size) | lane << 5),
        "SWAP": (1, lambda size: 0x1F | size << 10),
        "REVERSE": (1, lambda size: 0x1F | (size - 1) << 10),
        "ROTATE": (2, lambda direction, count: 0xC000 | direction << 10 | count << 5),
        "FFT": (1, lambda mask: 0xE000 | mask),
    }
    if mode not in known or len(numbers) != known[mode][0] or not all(0 <= v <= 32 for v in numbers):
        raise UnsupportedOperandError(f"offset:{offset}: mode or arguments are not known")
    encoded: int = known[mode][1](*numbers)  # type: ignore[operator]
    return encoded


def _bitmask(text: str, offset: str) -> int:
    """A mask such as "01pip", highest bit first: 0, 1, p (keep), i (invert)."""
    if len(text) != 5 or set(text) - set("01pi"):
        raise UnsupportedOperandError(f"offset:{offset}: a bit mask has five characters of 0, 1, p, i")
    and_mask = int("".join("1" if c in "pi" else "0" for c in text), 2)
    or_mask = int("".join("1" if c == "1" else "0" for c in text), 2)
    xor_mask = int("".join("1" if c == "i" else "0" for c in text), 2)
    return and_mask | or_mask << 5 | xor_mask << 10


def swizzle_sources(offset: int) -> Array:
    """Source lane of every lane for a ds_swizzle offset (CDNA4 ISA, DS_SWIZZLE_B32)."""
    lane = np.arange(64)
    low, half = lane & 31, lane & 32
    if offset >= 0xE000:  # FFT: bit-reversed, keeping the masked low bits
        mask = offset & 31
        reversed_low = np.array([int(f"{v:05b}"[::-1], 2) for v in low])
        return (reversed_low >> bin(mask).count("1")) | (low & mask) | half
    if offset >= 0xC000:  # rotate
        rotate = (offset >> 5) & 31
        rotate, mask = (-rotate if offset & 0x400 else rotate), offset & 31
        return (low & mask) | ((low + rotate) & ~mask & 31) | half
    if offset & 0x8000:  # within four lanes
        return (lane & ~3) | ((offset >> (2 * (lane & 3))) & 3)
    and_mask, or_mask, xor_mask = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
    return (((low & and_mask) | or_mask) ^ xor_mask) | half


@vector("ds_swizzle_b32", "b32 -> b32", cross_lane=True)
def ds_swizzle_b32(value: Array, *, offset: int | str, exec_mask: Array) -> Array:
    """D = S0 of the lane that the offset's pattern names, within 32 lanes; an inactive source lane gives
    0."""
    source = _swizzle(offset)
    if exec_mask.all():
        return np.take(value, source, axis=-1)
    return _pull(value, source, exec_mask)


@cache
def _swizzle(offset: int | str) -> Array:
    return swizzle_sources(parse_swizzle(offset))
