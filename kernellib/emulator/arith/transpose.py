# SPDX-License-Identifier: Apache-2.0
"""The lane transposition of ds_read_b64_tr_b16/b8/b4 and ds_read_b96_tr_b6."""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith import fp4, fp6
from kernellib.emulator.arith.formats import Array

_ROW_LANES = 16
"""Lanes that exchange elements, and columns of the tile they hold."""


def transpose_tile(words: Array, bits: int) -> Array:
    """Exchange elements within groups of 16 lanes, as the transposing LDS reads do.

    Args:
        words: uint32 [R, n, 64], what each lane's address points at: R = 2 (64 bits), or 3 for 6-bit
        elements. bits: element width, 16, 8, 4 or 6; a lane reads E = 32 R / bits of them.
    Returns:
        uint32 [R, n, 64]. The 16 lanes of a group read a tile of E rows (K) of 16 columns (M or N): row k is
        read by lanes 16 k / E and following, E consecutive columns each. Lane i receives column i, rows 0 ..
        E - 1.

    Source: CDNA4 ISA 11.4 gives which K an instruction loads (16-bit: 4 per group of lanes; 8-bit: 8; 4- and
    6-bit: 16) and that lanes hold consecutive M or N; the order of lanes within a row is that of public
    gfx950 kernels (row (lane % 16) / 2, columns 8 (lane % 2) for 8-bit elements; rows of 4 lanes for 16-bit
    ones).
    """
    elements = _split(words, bits)
    count, num_waves = elements.shape[:2]
    lanes_per_row = _ROW_LANES // count
    # [element, wave, group, row, part] -> columns are part * count + element.
    tile = elements.reshape(count, num_waves, 64 // _ROW_LANES, count, lanes_per_row)
    received = tile.transpose(3, 1, 2, 4, 0).reshape(count, num_waves, 64)
    return _join(received, bits)


def _split(words: Array, bits: int) -> Array:
    """Elements [E, n, 64] of the registers, in ascending bit order."""
    if bits == 6:
        padded = np.concatenate([words, np.zeros_like(words)])
        return fp6.unpack(padded)[:16]
    if bits == 4:
        return fp4.unpack(words)
    dtype = np.dtype(f"u{bits // 8}")
    parts = np.ascontiguousarray(words)[..., None].view(dtype)
    return np.moveaxis(parts, -1, 1).reshape(-1, *words.shape[1:])


def _join(elements: Array, bits: int) -> Array:
    """The inverse of `_split`."""
    if bits == 6:
        return fp6.pack(np.concatenate([elements, np.zeros_like(elements)]))[:3]
    if bits == 4:
        return fp4.pack(elements)
    per_register = 32 // bits
    grouped = elements.reshape(-1, per_register, *elements.shape[1:])
    return np.ascontiguousarray(np.moveaxis(grouped, 1, -1)).view(np.uint32)[..., 0]
