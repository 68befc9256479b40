# SPDX-License-Identifier: Apache-2.0
"""The 6-bit formats E2M3 ("fp6", largest 7.5) and E3M2 ("bf6", largest 28), and their packing: 32 in 6
registers.

Source: CDNA4 ISA, table 30 and 7.1.4: item 0 in bits 5:0 of the 192-bit group, item 1 in bits 11:6, and so on
across register boundaries.
"""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith.formats import Array
from kernellib.emulator.arith.smallfloat import E2M3, E3M2

__all__ = ["E2M3", "E3M2", "pack", "unpack"]

NUM_ITEMS = 32
NUM_REGISTERS = 6


def unpack(registers: Array) -> Array:
    """[6, ...] uint32 registers to [32, ...] uint8 codes."""
    words = registers.astype(np.uint64)
    # Three registers at a time hold 16 items; 64-bit words reach across the boundary inside a group.
    items = []
    for item in range(NUM_ITEMS):
        first, offset = divmod(item * 6, 32)
        value = words[first] >> np.uint64(offset)
        if offset > 26:
            value = value | (words[first + 1] << np.uint64(32 - offset))
        items.append((value & np.uint64(0x3F)).astype(np.uint8))
    return np.stack(items)


def pack(codes: Array) -> Array:
    """[32, ...] codes (low 6 bits used) to [6, ...] uint32 registers."""
    registers = np.zeros((NUM_REGISTERS, *codes.shape[1:]), np.uint64)
    for item in range(NUM_ITEMS):
        first, offset = divmod(item * 6, 32)
        value = (codes[item].astype(np.uint64) & np.uint64(0x3F)) << np.uint64(offset)
        registers[first] |= value
        if offset > 26:
            registers[first + 1] |= value >> np.uint64(32)
    return (registers & np.uint64(0xFFFFFFFF)).astype(np.uint32)
