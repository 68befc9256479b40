# SPDX-License-Identifier: Apache-2.0
"""Products of fp8, bf8 and fp4 operands with E8M0 scales, where float64 provably rounds nothing.

Every product is then a multiple of one power of two, and all of an output's products together stay below
2**53 of it: whatever the order of the sum, each partial sum is a float64, and the result has the bits that
the general way (`mfma.mfma_f8f6f4`) gives.  So the scales may be put into the operands, the blocks of K need
no products of their own, and K may run in the order in which the registers hold it.  `Operand.low` and `high`
are what the proof needs; `exact` is the proof.

Decoded operands are kept for the instructions that use the same registers again (a wave of a GEMM multiplies
each of its rows of A with each of its columns of B): found by content, never by name, so that they cannot be
stale.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kernellib.emulator.arith import e8m0
from kernellib.emulator.arith.formats import Array
from kernellib.emulator.arith.mfma_layout import LANES, Shape
from kernellib.emulator.arith.smallfloat import E2M1, E4M3, E5M2, SmallFormat
from kernellib.emulator.recycled import Recycled

BLOCK = 32  # items of K that share a scale
SIGNIFICAND_BITS = 53
CACHED = 12
CACHED_BYTES = 24 << 20
SLICE = 16  # waves decoded at a time: their look-up indices stay in the processor's cache


class Codes:
    """A format of 8 or 4 bits: values by code, and bounds of them.

    `low`: every finite value is a multiple of 2**low.  `high[code]`: magnitudes up to that of the code (of
    its lower bits, without the sign) are below 2**high, NaN and infinity set aside: they make a result NaN or
    infinite in any order.
    """

    def __init__(self, fmt: SmallFormat, bits: int) -> None:
        self.bits = bits
        self.table = fmt.table.astype(np.float64)
        magnitudes = self.table[: 1 << (bits - 1)]
        finite = magnitudes[np.isfinite(magnitudes)]
        self.low = int(np.frexp(finite[finite > 0].min())[1]) - 1
        bounds = np.where(np.isfinite(magnitudes), magnitudes, finite.max())
        self.high = np.maximum(np.frexp(bounds)[1], self.low)


CODES = {"fp8": Codes(E4M3, 8), "bf8": Codes(E5M2, 8), "fp4": Codes(E2M1, 4)}


@dataclass
class Operand:
    """An operand of n waves: `values` float64 [n, K, rows], scaled, K in the order (item of block, block)."""

    codes: Codes
    registers: Array  # uint32 [R, n, 64]
    scale: Array | None  # E8M0 bytes [n, 64]
    low: int
    high: int
    rows: int
    decoded: Array | None = None

    def values(self, use: str, kept: bool) -> Array:
        """Decoded on first use; into memory that is reused soon unless `kept`."""
        if self.decoded is None:
            n = self.registers.shape[1]
            shape = n, BLOCK * (LANES // self.rows), self.rows
            into = np.empty(shape) if kept else _kept.spare[use, shape, np.float64]
            _decode(self, into.reshape(n, BLOCK, LANES))
            self.decoded = into
        return self.decoded


class _Kept(threading.local):
    """Operands of one thread that are used again, and arrays for those that are not."""

    def __init__(self) -> None:
        self.operands: OrderedDict[tuple[object, ...], Operand] = OrderedDict()
        # by (use, shape, dtype): an array that is its caller's until the next of that use
        self.spare: Recycled[tuple[str, tuple[int, ...], type], Array] = Recycled(
            lambda key: np.empty(key[1], key[2]), limit=32
        )


_kept = _Kept()


def prepare(registers: Array, name: str, rows: int, scale: Array | None, reused: bool) -> Operand | None:
    """The operand in uint32 [R, n, 64], not decoded yet; None for a NaN scale.  `reused`: keep it."""
    codes = CODES[name]
    if not reused:
        return _make(registers, codes, rows, scale)
    key = (name, rows, registers.shape, registers[0, 0].tobytes())
    found = _kept.operands.get(key)
    if found is not None and _same(found, registers, scale):
        _kept.operands.move_to_end(key)
        return found
    made = _make(registers.copy(), codes, rows, None if scale is None else scale.copy())
    if made is not None:
        _kept.operands[key] = made
        _kept.operands.move_to_end(key)
        size = registers[0].size * BLOCK * 8
        while len(_kept.operands) > max(min(CACHED, CACHED_BYTES // size), 2):
            _kept.operands.popitem(last=False)
    return made


def _same(kept: Operand, registers: Array, scale: Array | None) -> bool:
    if not np.array_equal(registers, kept.registers):
        return False
    if scale is None or kept.scale is None:
        return scale is kept.scale
    return np.array_equal(scale, kept.scale)


def _make(registers: Array, codes: Codes, rows: int, scale: Array | None) -> Operand | None:
    least = most = 0
    if scale is not None:
        least, most = int(scale.min()) - e8m0.BIAS, int(scale.max()) - e8m0.BIAS
        if most == e8m0.NAN - e8m0.BIAS:
            return None
    largest = -1
    if codes.bits == 8:
        largest = int((registers & np.uint32(0x7F7F7F7F)).view(np.uint8).max())
    high = int(codes.high[largest]) + most
    return Operand(codes, registers, scale, codes.low + least, high, rows)


def exact(left: Operand, right: Operand, shape: Shape) -> bool:
    """Whether no sum of products, in whatever order, needs more than the 53 bits of a float64."""
    bits = left.high + right.high + (shape.k - 1).bit_length() - left.low - right.low
    return bits <= SIGNIFICAND_BITS


def multiply(left: Operand, right: Operand, reused: tuple[bool, bool], out: Array) -> None:
    """Sums of scaled products into out, float64 [n, M, N].  `reused`: as `prepare` was told."""
    a, b = left.values("left", reused[0]), right.values("right", reused[1])
    np.matmul(a.swapaxes(1, 2), b, out=out)


def _words(registers: Array, codes: Codes, rows: int) -> Array:
    """uint32 [n, words of a block, 64]: the words of block b, row i in lane (b, i).

    A lane holds 32 items.  Of 4 bits they are one block.  Of 8 bits they lie in two pieces of 16 (CDNA4 ISA
    7.1.5.1), and two neighbouring groups of lanes have the halves of a block (`mfma_layout`).
    """
    num_registers, n = registers.shape[:2]
    if codes.bits == 4:
        return np.ascontiguousarray(registers.transpose(1, 0, 2))
    split = registers.reshape(2, num_registers // 2, n, LANES // rows // 2, 2, rows)
    return np.ascontiguousarray(split.transpose(2, 4, 1, 0, 3, 5)).reshape(n, num_registers, LANES)


def _decode(operand: Operand, values: Array) -> None:
    """Scaled values of the operand's registers, into values [n, 32, 64]: item of block, (block, row)."""
    for first in range(0, len(values), SLICE):
        some = slice(first, first + SLICE)
        words = _words(operand.registers[:, some], operand.codes, operand.rows)
        index = _kept.spare["index", (len(words), BLOCK, LANES), np.intp]
        _codes(words, operand.codes.bits, index)
        part = values[some]
        np.take(operand.codes.table, index, out=part, mode="clip")  # clip: out is not buffered then
        if operand.scale is not None:
            part *= e8m0.VALUES[operand.scale[some, None]]


def _codes(words: Array, bits: int, index: Array) -> None:
    """The codes in `words` [n, words, 64], into index [n, 32, 64]."""
    n, count = words.shape[:2]
    if bits == 8:
        index.reshape(n, count, 4, LANES)[...] = _bytes(words)
        return
    pairs = index.reshape(n, count, 4, 2, LANES)
    pairs[:, :, :, 0] = _bytes(words & np.uint32(0x0F0F0F0F))
    pairs[:, :, :, 1] = _bytes((words >> np.uint32(4)) & np.uint32(0x0F0F0F0F))


def _bytes(words: Array) -> Array:
    """uint8 [n, words, 4, 64] of uint32 [n, words, 64] (a view)."""
    return words.view(np.uint8).reshape(*words.shape, 4).swapaxes(-1, -2)
