# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""GEMM1 of one tile: gate and up products, activation, requantisation to e4m3 + e8m0, for gfx950.

A wave owns 32 hidden columns, one scale block: two row tiles of the gate matrix and the two of the up
matrix that belong to them, so that a lane holds gate and up of the same element and the activation needs
no exchange. Codes are transposed through LDS to be stored 16 bytes a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import MFMA_N, SCALE_BLOCK, Activation, MegaMoEConfig, MegaMoEShape
from .device_gfx950 import (
    LANES,
    T,
    e4m3_scale,
    larger,
    magnitude_bits,
    max_across,
    pack_e4m3,
    pointer,
    wave_id,
)
from .gemm_gfx950 import OUTPUTS_PER_LANE, PIECE, GemmPlan, multiply_tile, weight_tile_addresses
from .layout import LdsLayout, PackedMatrixLayout, ScaleOrder
from .weights import matrix_layouts

LOG2_E = 1.4426950408889634
TILES_PER_BLOCK = SCALE_BLOCK // MFMA_N


@dataclass(frozen=True)
class Gemm1:
    """The compile-time facts of GEMM1.

    Attributes:
        shape, config, activation: as the layer has them.
    """

    shape: MegaMoEShape
    config: MegaMoEConfig
    activation: Activation

    @property
    def plan(self) -> GemmPlan:
        # Weights of the next chunk are always requested ahead: the two-stage switch is GEMM2's.
        tiles = 2 * TILES_PER_BLOCK
        return GemmPlan(self.shape.model_dim, self.config.tile_m, self.config.gemm1_waves, tiles, False)

    @property
    def matrix(self) -> PackedMatrixLayout:
        return matrix_layouts(self.shape)[0]

    @property
    def tile_columns(self) -> int:
        """Hidden columns of a tile."""
        return self.config.gemm1_tile_n // 2

    @property
    def num_column_tiles(self) -> int:
        return self.shape.inter_dim // self.tile_columns

    @property
    def hidden_scales(self) -> ScaleOrder:
        return ScaleOrder(self.shape.inter_dim)

    @property
    def lds_bytes(self) -> int:
        """Of the product, reused for the codes of the tile."""
        return LdsLayout(self.shape, self.config, "bf16", 1).gemm1_bytes  # whatever the wire and ranks


def _exp2(x: Any) -> Any:
    return fx.Float32(fx.rocdl.exp2(T.f32, x.ir_value()))


def _reciprocal(x: Any) -> Any:
    return fx.Float32(fx.rocdl.rcp(T.f32, x))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x); 0 and 1 at the ends, NaN for NaN."""
    return _reciprocal(_exp2(x * fx.Float32(-LOG2_E)) + fx.Float32(1.0))


def tanh(x: Any) -> Any:
    """Relative error of a few units in the last place: the series below 1/4, where 1 - 2 / (e^2x + 1) cancels
    (next term 1382/155925 x^11: 8e-9 of x at 1/4), that form above."""
    square = x * x
    series = fx.Float32(62.0 / 2835.0)
    for coefficient in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0):
        series = fx.fma(series, square, fx.Float32(coefficient))
    magnitude = fx.absf(x)
    large = fx.Float32(1.0) - fx.Float32(2.0) * _reciprocal(
        _exp2(magnitude * fx.Float32(2 * LOG2_E)) + fx.Float32(1.0)
    )
    return (magnitude < 0.25).select(series * x, fx.copysign(large, x))


def activate(shape: MegaMoEShape, activation: Activation, gate: Any, up: Any) -> Any:
    """The activation of one gate and one up value, fp32."""
    if activation == "silu":
        return gate * sigmoid(gate) * up
    beta, linear_beta = shape.situ_beta, shape.situ_linear_beta
    gated = fx.Float32(beta) * tanh(gate * fx.Float32(1.0 / beta)) * sigmoid(gate)
    return gated * (fx.Float32(linear_beta) * tanh(up * fx.Float32(1.0 / linear_beta)))


def _column_tiles(gemm: Gemm1, column_tile: Any) -> list[Any]:
    """This wave's weight row tiles: two of the gates, then the two ups beside them."""
    first = column_tile * (gemm.tile_columns // MFMA_N) + wave_id() * TILES_PER_BLOCK
    up = gemm.shape.inter_dim // MFMA_N
    return [first + offset + part for part in (0, up) for offset in range(TILES_PER_BLOCK)]


def _quantize_rows(gemm: Gemm1, sums: list[Any], tile: int) -> tuple[list[Any], list[Any]]:
    """For each of the lane's four rows of a tile of 16: its two codes in an Int32's low bytes, and E."""
    codes, scales = [], []
    for i in range(OUTPUTS_PER_LANE):
        gates_ups = [sums[tile * 2 * TILES_PER_BLOCK + j][i] for j in range(2 * TILES_PER_BLOCK)]
        hidden = [
            activate(gemm.shape, gemm.activation, gates_ups[j], gates_ups[j + TILES_PER_BLOCK])
            for j in range(TILES_PER_BLOCK)
        ]
        amax = larger(magnitude_bits(hidden[0]), magnitude_bits(hidden[1]))
        scale = e4m3_scale(max_across(amax, MFMA_N))
        codes.append(pack_e4m3([hidden[0], hidden[1], hidden[0], hidden[1]], scale))
        scales.append(scale)
    return codes, scales


@flyc.jit
def gemm1_tile(
    gemm, lds, rows, row_scales, num_rows, w1, w1_scales, expert, column_tile, hidden, hidden_row_scales
):
    """Computes and stores one tile of hidden rows.

    Args:
        gemm: Gemm1.
        lds: Int32 pointer to ``gemm.lds_bytes`` of LDS; may be reused after the next barrier.
        rows, row_scales: addresses of the tile's first input row and its scales.
        num_rows: valid rows, at least 1, at most tile_m; others are neither read nor written.
        w1, w1_scales: addresses of the rank's packed matrices; expert the local expert.
        column_tile: which tile of hidden columns.
        hidden, hidden_row_scales: addresses of the tile's first output row, all columns, and its scales.
    """
    lane = fx.thread_idx.x % LANES
    weights, scales = weight_tile_addresses(
        gemm.matrix, w1, w1_scales, expert, _column_tiles(gemm, column_tile)
    )
    sums = multiply_tile(gemm.plan, lds, rows, row_scales, num_rows, weights, scales)
    block = column_tile * (gemm.tile_columns // SCALE_BLOCK) + wave_id()
    step, group = block // 4, block % 4
    scale_byte = 16 * (step // 4) + 4 * group + step % 4
    codes_lds = fx.recast_iter(fx.Uint8, lds)
    for tile in fx.range_constexpr(gemm.plan.m_tiles):
        codes, row_e = _quantize_rows(gemm, sums, tile)
        for i in fx.range_constexpr(OUTPUTS_PER_LANE):
            row = tile * 16 + lane // 16 * OUTPUTS_PER_LANE + i
            byte = row * gemm.tile_columns + wave_id() * SCALE_BLOCK + lane % 16
            fx.generic_store(codes_lds + byte, codes[i].to(fx.Uint8))
            fx.generic_store(codes_lds + byte + MFMA_N, (codes[i] >> 8).to(fx.Uint8))
            if (lane % 16 == 0) & (row < num_rows):
                target = pointer(hidden_row_scales + fx.Int64(row) * gemm.hidden_scales.row_bytes, fx.Uint8)
                fx.generic_store(target + scale_byte, row_e[i].to(fx.Uint8))
    fx.barrier()
    pieces_per_row = gemm.tile_columns // PIECE
    num_pieces = gemm.config.tile_m * pieces_per_row
    for first in fx.range_constexpr(0, num_pieces, gemm.plan.num_threads):
        number = fx.thread_idx.x + first
        row, piece = number // pieces_per_row, number % pieces_per_row
        if (row < num_rows) & (number < num_pieces):
            value = fx.generic_load(lds + number * (PIECE // 4), count=PIECE // 4)
            address = (
                hidden + fx.Int64(row) * gemm.shape.inter_dim + fx.Int64(column_tile * gemm.tile_columns)
            )
            fx.generic_store(pointer(address, fx.Int32, PIECE) + piece * (PIECE // 4), value)
