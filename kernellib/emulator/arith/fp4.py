# SPDX-License-Identifier: Apache-2.0
"""The 4-bit format E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives): two to a byte, the first in the low
nibble.

Source: CDNA4 ISA, table 30 and 7.1.4.
"""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith.formats import Array
from kernellib.emulator.arith.smallfloat import E2M1

__all__ = ["E2M1", "pack", "unpack"]


def unpack(registers: Array) -> Array:
    """[R, ...] uint32 registers to [8 R, ...] uint8 codes, item 0 in bits 3:0."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32).reshape((1, 8) + (1,) * (registers.ndim - 1))
    codes = (registers[:, None] >> shifts) & np.uint32(15)
    return np.asarray(codes.astype(np.uint8).reshape(-1, *registers.shape[1:]))


def pack(codes: Array) -> Array:
    """[8 R, ...] codes (low 4 bits used) to [R, ...] uint32 registers."""
    grouped = (codes.astype(np.uint32) & np.uint32(15)).reshape(-1, 8, *codes.shape[1:])
    shifts = np.arange(0, 32, 4, dtype=np.uint32).reshape((1, 8) + (1,) * (codes.ndim - 1))
    return np.asarray(np.bitwise_or.reduce(grouped << shifts, axis=1))
