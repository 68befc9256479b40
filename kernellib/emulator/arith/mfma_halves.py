# SPDX-License-Identifier: Apache-2.0
"""Decodes bf16 and f16 operands of matrix instructions to float64, with K outermost in memory.

Whole rows of lanes move at once so, and the product reads both operands the way it likes best.  The arrays
and their views are made once for each shape and thread: at the size of a step, making them costs as much as
filling them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np

from kernellib.emulator.arith.formats import Array
from kernellib.emulator.arith.mfma_layout import LANES
from kernellib.emulator.recycled import Recycled

Key = tuple[int, int, int, int, int]


class _Buffers:
    """For operands of R registers of n waves."""

    def __init__(self, key: Key) -> None:
        num_registers, n, rows, blocks, pieces = self.key = key
        groups = LANES // (rows * blocks)
        # float32 whose upper halves are written, and whose lower halves stay zero
        singles = np.zeros((num_registers, 2, n, LANES, 2), np.uint16)
        self.low, self.high = singles[:, 0, :, :, 1], singles[:, 1, :, :, 1]
        self.singles = self.by_k(singles.view(np.float32)[..., 0])
        pairs = []
        for _ in range(2):  # A and B of one instruction
            values = np.empty((n, blocks, pieces, groups, num_registers // pieces, 2, rows))
            pairs.append((values, values.reshape(n, blocks, -1, rows).swapaxes(-1, -2)))
        self.turns: Iterator[tuple[Array, Array]] = itertools.cycle(pairs)

    def by_k(self, items: Array) -> Array:
        """Items [R, 2, n, 64] as a view [n, blocks, pieces, groups, R / pieces, 2, rows]: K in the middle."""
        num_registers, n, rows, blocks, pieces = self.key
        groups = LANES // (rows * blocks)
        split = items.reshape(pieces, num_registers // pieces, 2, n, groups, blocks, rows)
        return split.transpose(3, 5, 0, 4, 1, 2, 6)


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers = Recycled(_Buffers, limit=16)


_kept = _Kept()


def _buffers(registers: Array, rows: int, blocks: int, pieces: int) -> _Buffers:
    return _kept.buffers[registers.shape[0], registers.shape[1], rows, blocks, pieces]


def _halves(registers: Array, dtype: type) -> Array:
    """uint32 [R, n, 64] as [R, n, 128] of 16 bits (a constant operand has no lanes of its own: copied)."""
    return (registers if registers.strides[-1] == 4 else np.ascontiguousarray(registers)).view(dtype)


def decode_bf16(registers: Array, rows: int, blocks: int, pieces: int) -> Array:
    """uint32 [R, n, 64] to float64 [n, blocks, rows, K], valid until the next but one of that shape.

    Args:
        rows: M for A, N for B.
        pieces: 1, or 2 for operands that are split into halves of K.
    """
    buffers = _buffers(registers, rows, blocks, pieces)
    halves = _halves(registers, np.uint16)
    buffers.low[...] = halves[..., 0::2]
    buffers.high[...] = halves[..., 1::2]
    values, matrix = next(buffers.turns)
    np.copyto(values, buffers.singles)
    return matrix


def decode_f16(registers: Array, rows: int, blocks: int, pieces: int) -> Array:
    """The same for f16."""
    buffers = _buffers(registers, rows, blocks, pieces)
    halves = _halves(registers, np.float16)
    values, matrix = next(buffers.turns)
    np.copyto(values, buffers.by_k(np.moveaxis(halves.reshape(*registers.shape, 2), -1, 1)))
    return matrix
