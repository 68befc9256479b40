# SPDX-License-Identifier: Apache-2.0
"""Register layouts of matrix instructions, straight from the ISA document, and packing of matrices into
registers.

Source: AMD "CDNA4 Instruction Set Architecture Reference Guide", section 7.1.4 (general input and output
layout), section 7.1.5.1 (dense layouts of 8-bit and smaller operands of the F8F6F4 instructions), section
7.2.1 (scale layout).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from math import ceil
from typing import Any

import conformance_reference as ref
import numpy as np
from conformance_reference import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, Format

Array = np.ndarray[Any, Any]
LANES = 64
_NAME = re.compile(r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_(\w+)$")
ELEMENT: dict[str, Format | None] = {
    "f32": F32, "f16": F16, "bf16": BF16, "f64": F64, "i8": None,
    "fp8": E4M3, "bf8": E5M2,
}  # fmt: skip
F8F6F4: tuple[Format, ...] = (E4M3, E5M2, E2M3, E3M2, E2M1)  # by the value of cbsz and blgp


@dataclass(frozen=True)
class Shape:
    """Sizes of an instruction: `b` blocks of m x k times k x n."""

    m: int
    n: int
    k: int
    b: int
    result: str

    @property
    def items(self) -> int:
        """Consecutive K values that one lane holds (K_L of the ISA)."""
        return self.k // (LANES // (self.m * self.b))

    def source_lane(self, row: int, k: int, block: int) -> tuple[int, int]:
        """(lane, item) of A[block, row, k]; B[block, k, column] likewise with its column for the row."""
        return row + self.m * (block + self.b * (k // self.items)), k % self.items

    def result_place(self, i: int, j: int, block: int) -> tuple[int, int]:
        """(lane, item) of D[block, i, j]."""
        height = 1 if self.result == "f64" else 4
        blocks = ceil(LANES / (self.n * self.m / height))
        rows = (LANES // blocks) // self.n
        groups = self.m // (height * rows)
        item = i % height + height * (i // (height * rows) + groups * (block // blocks))
        return j + self.n * ((i // height) % rows + rows * (block % blocks)), item

    @property
    def result_items(self) -> int:
        """Elements of D in one lane."""
        return self.m * self.n * self.b // LANES


def parse(mnemonic: str) -> tuple[Shape, Format | None, Format | None]:
    """Shape and element formats of A and B (None: signed bytes)."""
    match = _NAME.match(mnemonic)
    assert match, mnemonic
    result, m, n, k, b, elements = match.groups()
    names = (
        elements.split("_")
        if elements in ("fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8")
        else [elements, elements]
    )
    return Shape(int(m), int(n), int(k), int(b or 1), result), ELEMENT[names[0]], ELEMENT[names[1]]


def pack_items(items: Array, bits: int) -> Array:
    """Items [lanes, count] of `bits` bits, packed densely and little-endian into 32-bit registers [registers,
    lanes].
    """
    lanes, count = items.shape
    wide = items.astype(np.uint64)
    stream = (wide[:, :, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)  # bits in ascending order
    packed = np.packbits(stream.reshape(lanes, count * bits).astype(np.uint8), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").T.copy()


@functools.cache
def _source_places(shape: Shape) -> Array:
    """[lanes, items]: which element of [b, rows, k], flattened, lies where."""
    places = np.zeros((LANES, shape.items), dtype=np.intp)
    for block in range(shape.b):
        for row in range(shape.m):
            for k in range(shape.k):
                places[shape.source_lane(row, k, block)] = (block * shape.m + row) * shape.k + k
    return places


def pack_source(shape: Shape, matrix: Array, bits: int) -> Array:
    """A matrix of encodings [b, rows, k] (B transposed: [b, columns, k]) in registers, general layout."""
    return pack_items(matrix.reshape(-1)[_source_places(shape)], bits)


def f8f6f4_k(shape: Shape, fmt: Format, group: int, item: int) -> int:
    """K of an item (0..31) of lane group `group`: 8-bit operands lie in two pieces of 16, smaller ones in one
    of 32.
    """
    if fmt.bits == 8:
        groups = LANES // shape.m
        return 16 * group + item if item < 16 else 16 * groups + 16 * group + item - 16
    return 32 * group + item


def pack_f8f6f4(shape: Shape, fmt: Format, matrix: Array, contiguous: bool = False) -> Array:
    """A matrix [rows, k] of encodings for an F8F6F4 instruction.  `contiguous` packs 8-bit operands the wrong
    way.
    """
    return pack_items(matrix.reshape(-1)[_f8f6f4_places(shape, fmt, contiguous)], fmt.bits)


@functools.cache
def _f8f6f4_places(shape: Shape, fmt: Format, contiguous: bool) -> Array:
    """[lanes, 32]: which element of [rows, k], flattened, lies where."""
    places = np.zeros((LANES, 32), dtype=np.intp)
    for lane in range(LANES):
        row, group = lane % shape.m, lane // shape.m
        for item in range(32):
            k = 32 * group + item if contiguous else f8f6f4_k(shape, fmt, group, item)
            places[lane, item] = row * shape.k + k
    return places


def pack_scales(shape: Shape, scales: Array) -> Array:
    """Scales [rows, k / 32] as one byte per lane: lane (row, group) has the scale of K block `group`."""
    return np.array([int(scales[lane % shape.m, lane // shape.m]) for lane in range(LANES)], dtype=np.uint32)


def pack_result(shape: Shape, matrix: Array) -> Array:
    """C [b, m, n] of bits as [items, lanes]."""
    return matrix.reshape(-1)[_result_places(shape)].astype(np.uint64 if shape.result == "f64" else np.uint32)


@functools.cache
def _result_places(shape: Shape) -> Array:
    """[items, lanes]: which element of D [b, m, n], flattened, lies where."""
    places = np.zeros((shape.result_items, LANES), dtype=np.intp)
    for block in range(shape.b):
        for i in range(shape.m):
            for j in range(shape.n):
                lane, item = shape.result_place(i, j, block)
                places[item, lane] = (block * shape.m + i) * shape.n + j
    return places


def unpack_result(shape: Shape, registers: Array) -> Array:
    """The inverse of `pack_result`."""
    out = np.zeros(shape.b * shape.m * shape.n, dtype=registers.dtype)
    out[_result_places(shape)] = registers
    return out.reshape(shape.b, shape.m, shape.n)


def values_of(fmt: Format, bits: Array) -> Array:
    """Encodings to float64 (exact for every format here)."""
    if fmt.bits <= 8:
        return _value_table(fmt)[bits.astype(np.intp)]
    table = {int(b): float(ref.decode(fmt, int(b)).fraction) for b in np.unique(bits)}
    return np.vectorize(table.__getitem__, otypes=[np.float64])(bits)


@functools.cache
def _value_table(fmt: Format) -> Array:
    """Values of all encodings of a narrow format; NaN where there is no number."""
    numbers = [ref.decode(fmt, bits) for bits in range(1 << fmt.bits)]
    return np.array([float(n.fraction) if n.kind == "num" else np.nan for n in numbers])


def exact_encodings(fmt: Format, low: int, high: int, step: float) -> list[int]:
    """Encodings of all nonzero multiples of `step` in [low, high] that the format has."""
    found = []
    for bits in range(1 << fmt.bits) if fmt.bits <= 8 else []:
        number = ref.decode(fmt, bits)
        if number.kind == "num" and number.man:
            value = float(number.fraction)
            if low <= abs(value) <= high and value / step == int(value / step):
                found.append(bits)
    return found
