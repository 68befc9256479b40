# SPDX-License-Identifier: Apache-2.0
"""Matrix multiply-accumulate: D = A B + C for n waves at once.

Accumulation, as done here: a row's products (each exact in float64, but for f32 and f64 operands whose
product needs more than 53 bits) are summed in float64 in the order of numpy's matrix product, C is added last
in float64, and the sum is rounded once to float32 (nearest even, denormals kept). f64 operands: the same, so
the product of a lone pair may be rounded before C is added. i8 sums are exact and wrap, or saturate with
MODE.FP16_OVFL and clamp.

This is a documented choice, not the chip's bits. CDNA4 ISA 7.1.2 fixes only that rounding is to nearest even
and that denormals are kept; the order and the width of the hardware's sums are not published for gfx950.
Measurements exist for its predecessors (MMA-Sim, arXiv 2511.10909: CDNA1 to CDNA3, chains of fused
multiply-adds for f32 and f64, and sums of a few products of narrower formats that are cut to a common
exponent), not for this chip. Results here are at least as exact as any of those: the error is below half an
ulp of the result plus K 2**-53 of the sum of magnitudes. A kernel's check against the chip must therefore
allow for K float32 roundings; one that passes here with no tolerance may fail there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernellib.emulator.arith import e8m0, mfma_exact
from kernellib.emulator.arith import mfma_layout as layout
from kernellib.emulator.arith.formats import Array, flush_denormals
from kernellib.emulator.arith.mfma_halves import decode_bf16, decode_f16
from kernellib.emulator.arith.mfma_layout import Shape
from kernellib.emulator.arith.smallfloat import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFormat
from kernellib.emulator.recycled import Recycled

Decoder = Callable[[Array], Array]


class _Arrays(threading.local):
    """Temporary arrays of one thread: fresh ones of a matrix operation's size cost more than its sums."""

    def __init__(self) -> None:
        self.rings = Recycled(_ring, limit=64)
        self.sums: Recycled[tuple[Shape, int], _Sums] = Recycled(lambda key: _Sums(*key), limit=16)


def _ring(key: tuple[tuple[int, ...], Any]) -> Iterator[Array]:
    return itertools.cycle([np.empty(*key) for _ in range(2)])


_arrays = _Arrays()


def _scratch(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array that is this caller's until the next but one of its shape.

    One matrix operation has at most two of a shape in use, the two operands.  No more are kept: what is
    written next had better be in the processor's cache still.
    """
    return next(_arrays.rings[shape, dtype])


class _Sums:
    """Arrays of float64 for one shape and number of waves: the products, the result, and views of them."""

    def __init__(self, shape: Shape, num_waves: int) -> None:
        self.products = np.empty((num_waves, shape.blocks, shape.m, shape.n))
        self.total = np.empty((shape.num_outputs, num_waves, layout.LANES))
        # in the order of the result
        self.items = layout.output_view(self.products, shape)
        self.total_items = self.total.reshape(self.items.shape)

    @staticmethod
    def of(shape: Shape, num_waves: int) -> _Sums:
        """Those of this thread."""
        return _arrays.sums[shape, num_waves]


def _decode_f32(words: Array) -> Array:
    return np.asarray(words.view(np.float32).astype(np.float64))


def _decode_f64(words: Array) -> Array:
    return np.asarray(words.view(np.float64))


def _decode_i8(words: Array) -> Array:
    # |sum| <= 128 * 128 * 128 = 2**21: float32 sums are exact, and its matrix product is the fastest.
    return np.asarray(words.view(np.int8).astype(np.float32))


def _byte_decoder(fmt: SmallFormat) -> Decoder:
    # Two bytes at a time: a table of 65,536 pairs (1 MiB) halves the number of look-ups.
    codes = np.arange(1 << 16)
    pairs = _as_pairs(fmt.table[codes & 0xFF], fmt.table[codes >> 8])
    return lambda words: _look_up(pairs, words.view(np.uint16))


def _as_pairs(first: Array, second: Array) -> Array:
    """complex128 table whose entries stand for two float64."""
    return np.stack([first, second], axis=-1).astype(np.float64).view(np.complex128)[..., 0]


def _look_up(pairs: Array, codes: Array) -> Array:
    """float64 values of codes that stand for two each."""
    index = _scratch(codes.shape, np.intp)
    index[...] = codes
    values = _scratch(codes.shape, np.complex128)
    np.take(pairs, index, out=values, mode="clip")  # clip: no code exceeds the table, and out is not buffered
    return values.view(np.float64)


def _decode_fp6(fmt: SmallFormat) -> Decoder:
    table = fmt.table.astype(np.float64)

    def decode(words: Array) -> Array:
        triples = words.view(np.uint8).reshape(*words.shape[:-1], -1, 3).astype(np.uint32)
        joined = triples[..., 0] | (triples[..., 1] << np.uint32(8)) | (triples[..., 2] << np.uint32(16))
        codes = (joined[..., None] >> np.arange(0, 24, 6, dtype=np.uint32)) & np.uint32(63)
        return np.asarray(np.take(table, codes.reshape(*words.shape[:-1], -1)))

    return decode


def _decode_fp4(words: Array) -> Array:
    return _look_up(_FP4_PAIRS, words.view(np.uint8))


_FP4_PAIRS = _as_pairs(E2M1.table[np.arange(256) & 15], E2M1.table[np.arange(256) >> 4])


@dataclass(frozen=True)
class ItemType:
    """An operand element type.

    `decode` makes values of 32-bit words that have K innermost, [..., words along K].  `by_k`, where given,
    makes values [n, blocks, rows, K] of registers, with K outermost in memory (`mfma_halves`).
    """

    name: str
    bits: int
    decode: Decoder | None
    by_k: Callable[[Array, int, int, int], Array] | None = None

    def num_registers(self, shape: Shape, rows: int) -> int:
        """Registers per lane of an operand of `rows` rows."""
        return shape.k * rows * shape.blocks * self.bits // (layout.LANES * 32)

    def pieces(self, shape: Shape, rows: int) -> int:
        """2 where an operand comes in two halves of K: 8- and 16-bit items that fill more than 16 bytes."""
        return 2 if self.bits in (8, 16) and self.num_registers(shape, rows) > 4 else 1


F64 = ItemType("f64", 64, _decode_f64)
F32 = ItemType("f32", 32, _decode_f32)
BF16 = ItemType("bf16", 16, None, decode_bf16)
F16 = ItemType("f16", 16, None, decode_f16)
I8 = ItemType("i8", 8, _decode_i8)
FP8 = ItemType("fp8", 8, _byte_decoder(E4M3))
BF8 = ItemType("bf8", 8, _byte_decoder(E5M2))
FP6 = ItemType("fp6", 6, _decode_fp6(E2M3))
BF6 = ItemType("bf6", 6, _decode_fp6(E3M2))
FP4 = ItemType("fp4", 4, _decode_fp4)
F8F6F4_FORMATS = (FP8, BF8, FP6, BF6, FP4)
"""Operand types by the value of CBSZ (A) and BLGP (B); CDNA4 ISA 7.1.5."""


def operand(registers: Array, item: ItemType, shape: Shape, rows: int, pieces: int = 0) -> Array:
    """Decode an operand: uint32 [R, n, 64] to values [n, blocks, rows, K], in memory reused soon.

    `pieces`: how many stretches of K a lane holds; 0: what the item type says.
    """
    pieces = pieces or item.pieces(shape, rows)
    if item.by_k is not None:
        return item.by_k(registers, rows, shape.blocks, pieces)
    assert item.decode is not None
    # The gather puts a lane's registers side by side, so that pairs join to 64-bit items as well.
    return item.decode(layout.operand_to_rows(registers, rows, shape.blocks, pieces))


def multiply_accumulate(
    a: Array, b: Array, c: Array, shape: Shape, *, saturate: bool = False, out: Array | None = None
) -> Array:
    """D items [num_outputs, n, 64] of decoded operands and C items of float32 or int32.

    Args:
        a: [n, blocks, M, K], b: [n, blocks, N, K] values (float64, or float32 where that is exact).
        c: [num_outputs, n, 64] float32, float64 or int32; decides the result's type.
        saturate: overflow to the largest finite value instead of infinity, or int32 saturation.
        out: where to put D, of its type; may share memory with C.
    """
    with np.errstate(all="ignore"):
        if c.dtype == np.int32:
            return _accumulate_integers(np.matmul(a, b.swapaxes(-1, -2)), c, shape, saturate, out)
        sums = _Sums.of(shape, len(a))
        np.matmul(a, b.swapaxes(-1, -2), out=sums.products)
        return _accumulate(sums, c, saturate, out)


def _accumulate_integers(products: Array, c: Array, shape: Shape, saturate: bool, out: Array | None) -> Array:
    """D items of the products' sums [n, blocks, M, N], float32 that are integers."""
    total = layout.matrix_to_output(products, shape).astype(np.int64) + c
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    result = total.astype(np.uint64).astype(np.uint32).view(np.int32)
    if out is None:
        return result
    out[...] = result
    return out


def _accumulate(sums: _Sums, c: Array, saturate: bool, out: Array | None) -> Array:
    """D items of the sums in `sums.products`."""
    # Passes of one type each (numpy sends arithmetic between types through small buffers), of which only the
    # sum has to look for its operand in another order.
    np.copyto(sums.total, c)
    np.add(sums.items, sums.total_items, out=sums.total_items)
    result = np.empty(sums.total.shape, c.dtype) if out is None else out
    np.copyto(result, sums.total, casting="same_kind")
    if saturate:
        largest = np.finfo(c.dtype).max
        result[...] = np.where(np.isinf(result), np.copysign(largest, result), result)
    return result


def mfma(
    a: Array, b: Array, c: Array, shape: Shape, *, types: tuple[ItemType, ItemType],
    cbsz: int = 0, abid: int = 0, blgp: int = 0, saturate: bool = False, flush_inputs: bool = False,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """A dense MFMA on registers.

    Args:
        a, b: uint32 [R, n, 64]; c: [num_outputs, n, 64] in the accumulator's type.
        types: element types of A and B.
        cbsz, abid, blgp: lane broadcasts (for f64, blgp negates A, B, C instead; CDNA4 ISA 7.1.6.4).
        flush_inputs: MODE forbids float32 input denormals (only f32 operands look at MODE; 7.4).
    """
    if types[0] is F64:
        left, right = (operand(v, F64, shape, r) for v, r in ((a, shape.m), (b, shape.n)))
        signs = [-1.0 if blgp >> bit & 1 else 1.0 for bit in range(3)]
        return multiply_accumulate(left * signs[0], right * signs[1], c * signs[2], shape, out=out)
    left = operand(layout.broadcast_a(a, cbsz, abid), types[0], shape, shape.m)
    right = operand(layout.permute_b(b, blgp), types[1], shape, shape.n)
    if flush_inputs and types[0] is F32:
        left, right = (flush_denormals(v.astype(np.float32)).astype(np.float64) for v in (left, right))
    return multiply_accumulate(left, right, c, shape, saturate=saturate, out=out)


def mfma_f8f6f4(
    a: Array, b: Array, c: Array, shape: Shape, *, formats: tuple[int, int],
    scales: tuple[Array, Array] | None = None, saturate: bool = False,
    reused: tuple[bool, bool] = (False, False), out: Array | None = None,
) -> Array:  # fmt: skip
    """v_mfma_f32_16x16x128_f8f6f4, v_mfma_f32_32x32x64_f8f6f4 and their v_mfma_scale forms.

    Args:
        a, b: uint32 [R, n, 64], R at least what the format needs (8, 6 or 4 registers).
        formats: (CBSZ, BLGP), indices into `F8F6F4_FORMATS`.
        scales: E8M0 bytes of A and B, uint8 [n, 64] each, or None for the unscaled forms.
        reused: whether A, B are worth keeping decoded: other instructions will have the same.
    Each operand follows its own format's placement. The sum of the 32 products of a K block is multiplied by
    the block's two scales before the blocks are added up; 255 makes it NaN (CDNA4 ISA 7.2).
    """
    items = F8F6F4_FORMATS[formats[0]], F8F6F4_FORMATS[formats[1]]
    sides = [
        (registers[: item.num_registers(shape, rows)], item, rows)
        for registers, item, rows in zip((a, b), items, (shape.m, shape.n), strict=True)
    ]
    sums = _Sums.of(shape, a.shape[1])
    if _exact_sums(sides, shape, scales or (None, None), reused, sums.products):
        return _accumulate(sums, c, saturate, out)
    left, right = (operand(registers, item, shape, rows) for registers, item, rows in sides)
    if scales is None:
        return multiply_accumulate(left, right, c, shape, saturate=saturate, out=out)
    blocks = shape.k // 32
    num_waves = left.shape[0]
    left = left.reshape(num_waves, shape.m, blocks, 32).swapaxes(1, 2)
    right = right.reshape(num_waves, shape.n, blocks, 32).transpose(0, 2, 3, 1)
    scale_a, scale_b = (
        e8m0.VALUES[layout.scales_to_rows(scale, rows)].swapaxes(1, 2)
        for scale, rows in zip(scales, (shape.m, shape.n), strict=True)
    )
    products = _scratch((num_waves, blocks, shape.m, shape.n), np.float64)
    with np.errstate(all="ignore"):
        np.matmul(left, right, out=products)
        products *= scale_a[..., :, None]
        products *= scale_b[..., None, :]
        products.sum(axis=1, out=sums.products[:, 0])
        return _accumulate(sums, c, saturate, out)


def _exact_sums(
    sides: list[tuple[Array, ItemType, int]],
    shape: Shape,
    scales: tuple[Array | None, Array | None],
    reused: tuple[bool, bool],
    out: Array,
) -> bool:
    """Put the sums of products [n, 1, M, N] into `out` where their order cannot matter (`mfma_exact`)."""
    if any(item.name not in mfma_exact.CODES for _, item, _ in sides):
        return False
    made = []
    for (registers, item, rows), scale, again in zip(sides, scales, reused, strict=True):
        side = mfma_exact.prepare(registers, item.name, rows, scale, again)
        if side is None:
            return False
        made.append(side)
    left, right = made
    if not mfma_exact.exact(left, right, shape):
        return False
    with np.errstate(all="ignore"):
        mfma_exact.multiply(left, right, reused, out[:, 0])
    return True


def smfmac(
    a: Array, b: Array, c: Array, index: Array, shape: Shape, *, types: tuple[ItemType, ItemType],
    cbsz: int = 0, abid: int = 0, saturate: bool = False,
) -> Array:  # fmt: skip
    """v_smfmac: D = C + A B with A 4:2 sparse along K.

    Args:
        a: uint32 [R, n, 64], the two nonzero of every four elements; b: dense, twice the registers.
        index: uint32 [n, 64]; two bits per stored element of A give its place in its group of four.
        cbsz, abid: choose the set of indices where a register holds several: with CBSZ 0 set ABID, else set
        0.
    A lane's elements of A are one stretch of K in every shape, while B of more than 16 bytes comes in two
    pieces (`mfma_layout`): the two differ, as probes on MI350 by two public projects agree (one-hot operands
    for 16x16x64 f16 and bf16; random matrices for 16x16x64, 32x32x32, 16x16x128 and 32x32x64).
    Source: CDNA4 ISA 7.5.
    """
    item = types[0]
    num_items = shape.k // 2 * shape.m // layout.LANES  # stored elements of A per lane
    num_sets = 32 // (2 * num_items)
    chosen = abid % num_sets if cbsz % 4 == 0 else 0
    bits = (index >> np.uint32(chosen * 2 * num_items)).astype(np.int64)
    places = (bits[None] >> (2 * np.arange(num_items)).reshape(-1, 1, 1)) & 3
    stored = _items(a, item.bits)
    dense = np.zeros((num_items * 2, *stored.shape[1:]), stored.dtype)
    for which in range(num_items):
        target = which // 2 * 4 + places[which]
        np.put_along_axis(dense, target[None], stored[which][None], axis=0)
    registers = _registers(dense)
    left = operand(registers, item, shape, shape.m, pieces=1)
    right = operand(b, types[1], shape, shape.n)
    return multiply_accumulate(left, right, c, shape, saturate=saturate)


def _items(registers: Array, bits: int) -> Array:
    """uint32 [R, n, 64] to raw items [R * 32 / bits, n, 64] of uint8 or uint16."""
    dtype = np.uint8 if bits == 8 else np.uint16
    split = np.ascontiguousarray(registers)[..., None].view(dtype)
    return np.ascontiguousarray(np.moveaxis(split, -1, 1)).reshape(-1, *registers.shape[1:])


def _registers(items: Array) -> Array:
    """The inverse of `_items`."""
    per_register = 4 // items.dtype.itemsize
    split = items.reshape(-1, per_register, *items.shape[1:])
    return np.ascontiguousarray(np.moveaxis(split, 1, -1)).view(np.uint32)[..., 0]
