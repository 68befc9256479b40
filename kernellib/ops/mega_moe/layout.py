# SPDX-License-Identifier: Apache-2.0
"""Where everything lies: symmetric buffers, packed weights, scale order, source codes. Written once here
and read by host code, kernels, references and tests.

Matrix operands (v_mfma_scale_f32_16x16x128_f8f6f4; lane = 16 g + r, r = 0..15, g = 0..3):

* activations (e4m3, operand A, row r): two pieces of 16 bytes, K = 16 g .. 16 g + 15 and 64 + 16 g ..
  64 + 16 g + 15. Rows stay in natural order in memory.
* weights (e2m1, operand B, column r): one piece of 16 bytes, K = 32 g .. 32 g + 31, low nibble first.
* scales of either: the lane supplies that of K = 32 g .. 32 g + 31, whatever data it holds.

[AMD, "Matrix Core Programming on CDNA3 and CDNA4", FP8 and FP4 listings; CDNA4 ISA, 7.1.5.1, 7.2.1]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import (
    MAX_K_CHUNK,
    MAX_QUEUE_SHARDS,
    MFMA_K,
    MFMA_N,
    SCALE_BLOCK,
    MegaMoEConfig,
    MegaMoEConfigError,
    MegaMoEShape,
    Wire,
)

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

SOURCE_INDEX_BITS = 24
SOURCE_SLOT_BITS = 8
NUM_PARITIES = 2
MIN_TILE_M = 16
MAX_TILE_M = 128
META_WORDS = 4  # of a tile: local expert, first row, valid rows, reserved
ALIGNMENT = 256  # bytes: of every buffer in the symmetric region
NUM_ERROR_WORDS = 4  # of the bounds check: count, then token, slot and id of one offender


class LayoutError(ValueError):
    """Data in another layout than the reader's, or a layout that cannot be built."""


# ------------------------------------------------------------------------------------- source codes


def source_code(rank: int, token: int, slot: int, capacity: int) -> int:
    """Where a dispatched row came from: rank * capacity + token in 24 bits, its top-k slot in 8.

    Raises:
        LayoutError: a part is out of range.
    """
    index = rank * capacity + token
    if not 0 <= token < capacity or rank < 0 or index >= 1 << SOURCE_INDEX_BITS:
        raise LayoutError(
            f"rank {rank}, token {token} with capacity {capacity}: wanted an index within 24 bits"
        )
    if not 0 <= slot < 1 << SOURCE_SLOT_BITS:
        raise LayoutError(f"slot got {slot}, wanted 0 .. 255")
    return index | slot << SOURCE_INDEX_BITS


def decode_source(code: int, capacity: int) -> tuple[int, int, int]:
    """(rank, token, slot) of a source code."""
    index = code & ((1 << SOURCE_INDEX_BITS) - 1)
    return index // capacity, index % capacity, code >> SOURCE_INDEX_BITS


# -------------------------------------------------------------------------------------- scale order


@dataclass(frozen=True)
class ScaleOrder:
    """The order of a row's scale bytes: a lane's four K steps lie in one dword.

    The scale of logical block b = 4 s + g (K step s of 128 elements, lane group g) lies at byte
    16 (s // 4) + 4 g + s % 4, so that lane group g loads the dword at 16 (s // 4) + 4 g and instruction s
    selects its byte s % 4. Rows are padded to whole groups of 16 bytes with E = 0.

    Attributes:
        num_elements: K, a multiple of 128.
    """

    num_elements: int

    def __post_init__(self) -> None:
        if self.num_elements % MFMA_K or self.num_elements <= 0:
            raise LayoutError(f"num_elements got {self.num_elements}, wanted a multiple of {MFMA_K}")

    @property
    def num_blocks(self) -> int:
        return self.num_elements // SCALE_BLOCK

    @property
    def row_bytes(self) -> int:
        return -(-self.num_blocks // 16) * 16

    @cached_property
    def positions(self) -> I64:
        """Byte of each logical block."""
        block = np.arange(self.num_blocks)
        step, group = block // 4, block % 4
        return np.asarray(16 * (step // 4) + 4 * group + step % 4, dtype=np.int64)

    def to_device(self, scales: U8) -> U8:
        """[..., K / 32] in logical order -> [..., row_bytes]."""
        if scales.shape[-1] != self.num_blocks:
            raise LayoutError(f"scales got {scales.shape[-1]} in a row, wanted {self.num_blocks}")
        out = np.zeros((*scales.shape[:-1], self.row_bytes), np.uint8)
        out[..., self.positions] = scales
        return out

    def to_logical(self, stored: U8) -> U8:
        """The inverse of ``to_device``; padding bytes are not looked at."""
        if stored.shape[-1] != self.row_bytes:
            raise LayoutError(f"stored got {stored.shape[-1]} bytes in a row, wanted {self.row_bytes}")
        return stored[..., self.positions]


# ----------------------------------------------------------------------------------- packed weights

GATE_UP_SEPARATED = "gate_up_separated"  # rows: all gates, then all ups
GATE_UP_INTERLEAVED = "gate_up_interleaved"  # rows: gate 0, up 0, gate 1, up 1, ...
PLAIN = "plain"


@dataclass(frozen=True)
class PackedMatrixLayout:
    """A weight matrix [N, K] of e2m1 as the GEMM's B operand loads it.

    Element bytes: [N / 16][K / 128][64 lanes][16 bytes]; lane 16 g + r holds row r's K = 32 g .. 32 g + 31
    of its step. A wave's load of one step is 1 KiB, contiguous.
    Scale bytes: [N / 16][ceil(K / 512)][64 lanes][4 bytes]; byte j of lane 16 g + r is row r's scale of K
    block 32 (4 (4 q + j) + g), so one dword serves four steps.
    """

    num_rows: int
    num_elements: int

    def __post_init__(self) -> None:
        if self.num_rows % MFMA_N or self.num_elements % MFMA_K or min(self.num_rows, self.num_elements) < 1:
            raise LayoutError(
                f"matrix got [{self.num_rows}, {self.num_elements}], wanted multiples of [{MFMA_N}, {MFMA_K}]"
            )

    @property
    def num_row_tiles(self) -> int:
        return self.num_rows // MFMA_N

    @property
    def row_tile_bytes(self) -> int:
        """Element bytes of 16 rows."""
        return MFMA_N * self.num_elements // 2

    @property
    def step_bytes(self) -> int:
        return MFMA_N * MFMA_K // 2

    @property
    def element_bytes(self) -> int:
        return self.num_row_tiles * self.row_tile_bytes

    @property
    def scale_order(self) -> ScaleOrder:
        return ScaleOrder(self.num_elements)

    @property
    def row_tile_scale_bytes(self) -> int:
        return MFMA_N * self.scale_order.row_bytes

    @property
    def scale_bytes(self) -> int:
        return self.num_row_tiles * self.row_tile_scale_bytes

    def pack(self, nibbles: U8, scales: U8) -> tuple[U8, U8]:
        """Packed e2m1 [N, K / 2] and logical scales [N, K / 32] -> (element bytes, scale bytes), flat."""
        if nibbles.shape != (self.num_rows, self.num_elements // 2):
            raise LayoutError(
                f"nibbles got {nibbles.shape}, wanted {(self.num_rows, self.num_elements // 2)}"
            )
        tiles = nibbles.reshape(self.num_row_tiles, MFMA_N, self.num_elements // MFMA_K, 4, 16)
        stored = self.scale_order.to_device(scales).reshape(self.num_row_tiles, MFMA_N, -1, 4, 4)
        return (
            np.ascontiguousarray(tiles.transpose(0, 2, 3, 1, 4)).reshape(-1),
            np.ascontiguousarray(stored.transpose(0, 2, 3, 1, 4)).reshape(-1),
        )

    def unpack(self, elements: U8, scales: U8) -> tuple[U8, U8]:
        """The inverse of ``pack``."""
        tiles = elements.reshape(self.num_row_tiles, self.num_elements // MFMA_K, 4, MFMA_N, 16)
        nibbles = np.ascontiguousarray(tiles.transpose(0, 3, 1, 2, 4)).reshape(self.num_rows, -1)
        stored = scales.reshape(self.num_row_tiles, -1, 4, MFMA_N, 4).transpose(0, 3, 1, 2, 4)
        logical = self.scale_order.to_logical(np.ascontiguousarray(stored).reshape(self.num_rows, -1))
        return nibbles, logical


# ----------------------------------------------------------------------------------- LDS of a workgroup

LDS_SHARED_WORDS = 4  # behind the work area: a ticket, a queue entry


def product_lds_bytes(num_elements: int, tile_m: int) -> int:
    """Rows of a tile, a chunk of K at a time; double-buffered when there are several chunks."""
    chunk = min(num_elements, MAX_K_CHUNK)
    return tile_m * chunk * min(2, num_elements // chunk)


@dataclass(frozen=True)
class LdsLayout:
    """Bytes of LDS that the stages' workgroups take; their parts use one area in turn.

    Attributes:
        shape, config, wire: as the layer has them.
        num_ranks: ranks.
    """

    shape: MegaMoEShape
    config: MegaMoEConfig
    wire: Wire
    num_ranks: int

    @property
    def planner_bytes(self) -> int:
        """Counts by expert; later rows and first tile of each local expert."""
        local = self.shape.experts_per_rank(self.num_ranks)
        return _round_up(max(self.shape.num_experts, 2 * local) * 4, 16)

    @property
    def gemm1_bytes(self) -> int:
        """Of the product, reused for the codes of the tile."""
        codes = self.config.tile_m * self.config.gemm1_tile_n // 2
        return max(product_lds_bytes(self.shape.model_dim, self.config.tile_m), codes)

    @property
    def gemm2_code_bytes(self) -> int:
        """The tile's weighted rows on their way out, without scales."""
        return self.config.tile_m * self.config.gemm2_tile_n * (2 if self.wire == "bf16" else 1)

    @property
    def gemm2_scales_per_row(self) -> int:
        """Scale bytes of a tile row; 0 with the bf16 wire."""
        return 0 if self.wire == "bf16" else self.config.gemm2_tile_n // SCALE_BLOCK

    @property
    def gemm2_bytes(self) -> int:
        """Of the product, reused for the rows and scales that are sent."""
        staged = self.gemm2_code_bytes + self.config.tile_m * self.gemm2_scales_per_row
        return max(product_lds_bytes(self.shape.inter_dim, self.config.tile_m), _round_up(staged, 16))

    @property
    def stage1_bytes(self) -> int:
        """Of stage 1 in one launch."""
        return max(self.planner_bytes, self.gemm1_bytes) + 4 * LDS_SHARED_WORDS

    @property
    def stage2_bytes(self) -> int:
        """Of stage 2 in one launch."""
        return self.gemm2_bytes + 4 * LDS_SHARED_WORDS


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# -------------------------------------------------------------------------------- symmetric buffers


@dataclass(frozen=True)
class Buffer:
    """One buffer of the symmetric region.

    Attributes:
        name: its name.
        offset: bytes from the region's start, the same on every rank.
        dtype: numpy dtype.
        shape: elements.
        zeroed: whether it must be zero before the first launch. Others may hold anything.
    """

    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    zeroed: bool

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def view(self, region: U8) -> npt.NDArray[Any]:
        """This buffer as an array inside a rank's region (uint8)."""
        return region[self.offset : self.offset + self.num_bytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class SymmetricLayout:
    """Every buffer of a rank, at the same offset on each.

    Who writes: "self" is the rank that owns the memory, "peers" all ranks. All ``[2, ...]`` buffers are
    double-buffered by the parity of the call's epoch.

    Attributes:
        shape: the layer.
        num_ranks: ranks.
        capacity: most tokens of a rank, a power of two.
        wire: format of the rows that come back.
    """

    shape: MegaMoEShape
    num_ranks: int
    capacity: int
    wire: Wire

    def __post_init__(self) -> None:
        self.shape.experts_per_rank(self.num_ranks)
        if type(self.capacity) is not int or self.capacity < 1 or self.capacity & (self.capacity - 1):
            raise MegaMoEConfigError(f"capacity got {self.capacity!r}, wanted a power of two")
        if self.num_ranks * self.capacity > 1 << SOURCE_INDEX_BITS:
            raise MegaMoEConfigError(
                f"num_ranks * capacity got {self.num_ranks * self.capacity}, wanted at most 2^24"
            )

    @property
    def name(self) -> str:
        return f"{self.shape.name}r{self.num_ranks}t{self.capacity}{self.wire}"

    @property
    def experts_per_rank(self) -> int:
        return self.shape.experts_per_rank(self.num_ranks)

    @property
    def max_received_rows(self) -> int:
        """Rows a rank can receive at most: every route of every token. Nothing forbids that a token names an
        expert twice, and nothing on a GPU could see it before the rows are sent."""
        return self.num_ranks * self.capacity * self.shape.top_k

    @property
    def max_rows(self) -> int:
        """With every expert's rows padded to the largest M tile."""
        padded = self.max_received_rows + self.experts_per_rank * (MAX_TILE_M - 1)
        return -(-padded // MAX_TILE_M) * MAX_TILE_M

    def max_tiles(self, tile_m: int) -> int:
        """Tiles a rank can have at most: no expert has a tile without a row."""
        rows = self.max_received_rows
        return min(rows, self.experts_per_rank + rows // tile_m)

    @property
    def input_scales(self) -> ScaleOrder:
        return ScaleOrder(self.shape.model_dim)

    @property
    def hidden_scales(self) -> ScaleOrder:
        return ScaleOrder(self.shape.inter_dim)

    @property
    def wire_row_bytes(self) -> int:
        """A row on the way back: bf16 values, or e4m3 codes followed by e8m0 scales in logical order."""
        dim = self.shape.model_dim
        return 2 * dim if self.wire == "bf16" else -(-(dim + dim // SCALE_BLOCK) // 16) * 16

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        found: dict[str, Buffer] = {}
        offset = 0
        for name, dtype, shape, zeroed in self._specifications():
            found[name] = Buffer(name, offset, dtype, shape, zeroed)
            offset = -(-(offset + found[name].num_bytes) // ALIGNMENT) * ALIGNMENT
        return found

    def _specifications(self) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
        ranks, experts = self.num_ranks, self.experts_per_rank
        tiles, rows, two = self.max_tiles(MIN_TILE_M), self.max_rows, NUM_PARITIES
        # control, written by self
        yield "epoch", "u4", (1,), True  # of the last finished call
        yield "exits", "u4", (1,), True  # workgroups that have left stage 2
        yield "errors", "u4", (NUM_ERROR_WORDS,), True
        yield "cursor", "u4", (two, self.shape.num_experts), True  # next row of mine for each expert
        yield "plan_flag", "u4", (two,), True  # epoch of the plan
        yield "num_tiles", "u4", (two,), True
        yield "tile_meta", "i4", (two, tiles, META_WORDS), True
        yield "gemm1_heads", "u4", (two, MAX_QUEUE_SHARDS), True  # one for each queue shard
        yield "gemm2_head", "u4", (two,), True
        yield "gemm2_done", "u4", (two,), True  # finished GEMM2 tiles
        # control, written by peers
        yield "hist_flag", "u4", (two, ranks), True  # epoch, by source rank
        yield "hist", "u4", (two, ranks, experts), True  # rows that source rank has for my expert
        yield "base_flag", "u4", (two, ranks), True  # epoch, by owner rank
        yield "row_base", "u4", (two, ranks, experts), True  # first row at owner rank for my routes
        yield "tile_ready", "u4", (two, tiles), True  # epoch << 16 | rows present, padding counted
        yield "ready_tail", "u4", (two,), True  # tiles that have become ready
        yield "ready_queue", "u4", (two, tiles), True  # tile + 1, in that order
        yield "done_flag", "u4", (two, ranks), True  # epoch, by owner rank: its rows have been sent
        # payload, written by peers
        yield "rows", "u1", (rows, self.shape.model_dim), False
        yield "row_scales", "u1", (rows, self.input_scales.row_bytes), False
        yield "row_weight", "f4", (rows,), False
        yield "row_source", "u4", (rows,), False
        yield "wire", "u1", (self.capacity, self.shape.top_k, self.wire_row_bytes), False
        # payload, written by self
        yield "hidden", "u1", (rows, self.shape.inter_dim), False
        scale_bytes = self.hidden_scales
        # Padding bytes are loaded with their dword, and never selected.
        padded = scale_bytes.row_bytes != scale_bytes.num_blocks
        yield "hidden_row_scales", "u1", (rows, scale_bytes.row_bytes), padded

    @property
    def num_bytes(self) -> int:
        """Of one rank's region."""
        last = list(self.buffers.values())[-1]
        return -(-(last.offset + last.num_bytes) // ALIGNMENT) * ALIGNMENT

    def offset(self, name: str, *index: int) -> int:
        """Byte offset of an element (or of the sub-array at a shorter index)."""
        buffer = self.buffers[name]
        strides = np.dtype(buffer.dtype).itemsize * np.cumprod([1, *buffer.shape[:0:-1]])[::-1]
        return buffer.offset + int(sum(i * int(s) for i, s in zip(index, strides, strict=False)))

    def stride(self, name: str) -> int:
        """Bytes between elements of a buffer's first axis."""
        buffer = self.buffers[name]
        return buffer.num_bytes // buffer.shape[0]
