# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""GEMM2 of one tile: down projection, route weight, and the rows' way home, for gfx950.

A wave owns 64 columns. The weighted fp32 sums become bf16, or e4m3 with a scale for each 32 columns, pass
through LDS, and are stored 16 bytes a lane straight into the source rank's ``wire`` buffer: the source code
of a row says rank, token and slot, a table of region addresses where that rank's memory is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import MFMA_N, SCALE_BLOCK, WAVE_COLUMNS, MegaMoEConfig
from .device_gfx950 import (
    LANES,
    e4m3_scale,
    larger,
    magnitude_bits,
    max_across,
    pack_e4m3,
    pointer,
    wave_id,
)
from .gemm_gfx950 import OUTPUTS_PER_LANE, PIECE, GemmPlan, multiply_tile, weight_tile_addresses
from .layout import SOURCE_INDEX_BITS, LdsLayout, PackedMatrixLayout, SymmetricLayout
from .weights import matrix_layouts

TILES_PER_WAVE = WAVE_COLUMNS // MFMA_N
TILES_PER_BLOCK = SCALE_BLOCK // MFMA_N


@dataclass(frozen=True)
class Gemm2:
    """The compile-time facts of GEMM2.

    Attributes:
        layout: the symmetric buffers; gives shape, ranks, capacity and wire format.
        config: how the work is divided.
    """

    layout: SymmetricLayout
    config: MegaMoEConfig

    @property
    def plan(self) -> GemmPlan:
        shape, config = self.layout.shape, self.config
        return GemmPlan(shape.inter_dim, config.tile_m, config.gemm2_waves, TILES_PER_WAVE, config.b2stage)

    @property
    def matrix(self) -> PackedMatrixLayout:
        return matrix_layouts(self.layout.shape)[1]

    @property
    def columns(self) -> int:
        return self.config.gemm2_tile_n

    @property
    def num_column_tiles(self) -> int:
        return self.layout.shape.model_dim // self.columns

    @property
    def element_bytes(self) -> int:
        return 2 if self.layout.wire == "bf16" else 1

    @property
    def lds(self) -> LdsLayout:
        return LdsLayout(self.layout.shape, self.config, self.layout.wire, self.layout.num_ranks)

    @property
    def codes_bytes(self) -> int:
        return self.lds.gemm2_code_bytes

    @property
    def scales_per_row(self) -> int:
        return self.lds.gemm2_scales_per_row

    @property
    def lds_bytes(self) -> int:
        return self.lds.gemm2_bytes


def _stage_bf16(gemm: Gemm2, lds: Any, row: Any, values: list[Any]) -> None:
    """One row's four values of this lane into LDS as bf16: columns 16 j + r of the wave's 64."""
    halves = fx.recast_iter(fx.Int16, lds)
    first = row * gemm.columns + wave_id() * WAVE_COLUMNS + fx.thread_idx.x % MFMA_N
    for j, value in enumerate(values):
        fx.generic_store(halves + first + j * MFMA_N, value.to(fx.BFloat16).bitcast(fx.Int16))


@flyc.jit
def _stage_e4m3(gemm, lds, row, values):
    """The same as e4m3 codes, and the scales of the wave's two blocks behind them."""
    bytes_ = fx.recast_iter(fx.Uint8, lds)
    lane = fx.thread_idx.x % LANES
    first = row * gemm.columns + wave_id() * WAVE_COLUMNS + lane % MFMA_N
    for block in fx.range_constexpr(WAVE_COLUMNS // SCALE_BLOCK):
        a, b = values[block * TILES_PER_BLOCK], values[block * TILES_PER_BLOCK + 1]
        scale = e4m3_scale(max_across(larger(magnitude_bits(a), magnitude_bits(b)), MFMA_N))
        codes = pack_e4m3([a, b, a, b], scale)
        fx.generic_store(bytes_ + first + block * SCALE_BLOCK, codes.to(fx.Uint8))
        fx.generic_store(bytes_ + first + block * SCALE_BLOCK + MFMA_N, (codes >> 8).to(fx.Uint8))
        if lane % MFMA_N == 0:
            index = row * gemm.scales_per_row + wave_id() * (WAVE_COLUMNS // SCALE_BLOCK) + block
            fx.generic_store(bytes_ + gemm.codes_bytes + index, scale.to(fx.Uint8))


def _wire_address(gemm: Gemm2, peers: Any, source: Any) -> Any:
    """Address of a row's place in its source rank's wire buffer, from its source code (Int32, per lane)."""
    layout = gemm.layout
    index = source & ((1 << SOURCE_INDEX_BITS) - 1)
    slot = fx.Uint32(source) >> SOURCE_INDEX_BITS
    capacity_bits = layout.capacity.bit_length() - 1
    rank, token = index >> capacity_bits, index & (layout.capacity - 1)
    region = fx.generic_load(pointer(peers, fx.Int64) + rank)
    row = fx.Int64(token) * layout.shape.top_k + slot.to(fx.Int64)
    return region + layout.offset("wire") + row * layout.wire_row_bytes


@flyc.jit
def _send_rows(gemm, lds, peers, row_source, num_rows, column_tile):
    """Stores the staged tile, 16 bytes a lane, then the scales, two bytes a lane."""
    row_bytes = gemm.columns * gemm.element_bytes
    pieces_per_row = row_bytes // PIECE
    num_pieces = gemm.config.tile_m * pieces_per_row
    for first in fx.range_constexpr(0, num_pieces, gemm.plan.num_threads):
        number = fx.thread_idx.x + first
        row, piece = number // pieces_per_row, number % pieces_per_row
        if (row < num_rows) & (number < num_pieces):
            value = fx.generic_load(lds + number * (PIECE // 4), count=PIECE // 4)
            source = fx.generic_load(pointer(row_source, fx.Int32) + row)
            target = _wire_address(gemm, peers, source) + fx.Int64(column_tile * row_bytes + piece * PIECE)
            fx.generic_store(pointer(target, fx.Int32, PIECE), value)
    if fx.const_expr(gemm.scales_per_row > 0):
        pairs_per_row = gemm.scales_per_row // 2
        num_pairs = gemm.config.tile_m * pairs_per_row
        halves = fx.recast_iter(fx.Int16, lds)
        for first in fx.range_constexpr(0, num_pairs, gemm.plan.num_threads):
            number = fx.thread_idx.x + first
            row, pair = number // pairs_per_row, number % pairs_per_row
            if (row < num_rows) & (number < num_pairs):
                value = fx.generic_load(halves + gemm.codes_bytes // 2 + number)
                source = fx.generic_load(pointer(row_source, fx.Int32) + row)
                offset = gemm.layout.shape.model_dim + column_tile * gemm.scales_per_row + pair * 2
                target = _wire_address(gemm, peers, source) + fx.Int64(offset)
                fx.generic_store(pointer(target, fx.Int16), value)


@flyc.jit
def gemm2_tile(
    gemm,
    lds,
    hidden,
    hidden_row_scales,
    row_weight,
    row_source,
    num_rows,
    w2,
    w2_scales,
    expert,
    column_tile,
    peers,
):
    """Computes one tile of output columns and sends its rows home.

    Args:
        gemm: Gemm2.
        lds: Int32 pointer to ``gemm.lds_bytes`` of LDS; may be reused after the next barrier.
        hidden, hidden_row_scales: addresses of the tile's first hidden row and its scales.
        row_weight, row_source: addresses of the first row's route weight (fp32) and source code.
        num_rows: valid rows, at least 1; others are neither read nor sent.
        w2, w2_scales: addresses of the rank's packed matrices; expert the local expert.
        column_tile: which tile of output columns.
        peers: address of the table of region addresses, Int64 by rank.
    """
    lane = fx.thread_idx.x % LANES
    first_tile = column_tile * (gemm.columns // MFMA_N) + wave_id() * TILES_PER_WAVE
    tiles = [first_tile + j for j in range(TILES_PER_WAVE)]
    weights, scales = weight_tile_addresses(gemm.matrix, w2, w2_scales, expert, tiles)
    sums = multiply_tile(gemm.plan, lds, hidden, hidden_row_scales, num_rows, weights, scales)
    for tile in fx.range_constexpr(gemm.plan.m_tiles):
        for i in fx.range_constexpr(OUTPUTS_PER_LANE):
            row = tile * MFMA_N + lane // MFMA_N * OUTPUTS_PER_LANE + i
            inside = (row < num_rows).select(row, fx.Int32(0))
            weight = fx.generic_load(pointer(row_weight, fx.Float32) + inside)
            values = [sums[tile * TILES_PER_WAVE + j][i] * weight for j in range(TILES_PER_WAVE)]
            if fx.const_expr(gemm.layout.wire == "bf16"):
                _stage_bf16(gemm, lds, row, values)
            else:
                _stage_e4m3(gemm, lds, row, values)
    fx.barrier()
    _send_rows(gemm, lds, peers, row_source, num_rows, column_tile)
