# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""The matrix product both GEMMs share: e4m3 rows times e2m1 weights, e8m0 scales, fp32 sums, for gfx950.

A workgroup multiplies ``tile_m`` rows by ``num_row_tiles`` tiles of 16 weight rows for each of its waves.
Rows pass through LDS in chunks of K, double-buffered, with 16-byte pieces XOR-swizzled by row so that the
16 lanes that read one column of pieces hit different banks; weights go from memory straight to registers,
since no two waves use the same ones and ``PackedMatrixLayout`` makes each load 1 KiB of consecutive bytes.

Placement in v_mfma_scale_f32_16x16x128_f8f6f4 (lane = 16 g + r): see ``layout``. The accumulator of lane
16 g + r holds weight row (column of the result) r and result rows 4 g .. 4 g + 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import MAX_K_CHUNK, MFMA_K, MFMA_M, MFMA_N
from .device_gfx950 import LANES, T, pointer, smaller
from .layout import PackedMatrixLayout, ScaleOrder, product_lds_bytes

PIECE = 16  # bytes of one LDS access
E4M3_FORMAT, E2M1_FORMAT = 0, 4  # cbsz and blgp of the instruction
STEPS_PER_SCALE_DWORD = 4
OUTPUTS_PER_LANE = 4  # rows of a 16x16 result that a lane holds


@dataclass(frozen=True)
class GemmPlan:
    """The compile-time facts of one product.

    Attributes:
        num_elements: K.
        tile_m: rows of the tile.
        num_waves: waves of the workgroup.
        num_row_tiles: tiles of 16 weight rows that each wave multiplies.
        two_stage_weights: keep two chunks of weights in registers ("b2stage").
    """

    num_elements: int
    tile_m: int
    num_waves: int
    num_row_tiles: int
    two_stage_weights: bool

    @property
    def k_chunk(self) -> int:
        return min(self.num_elements, MAX_K_CHUNK)

    @property
    def num_chunks(self) -> int:
        return self.num_elements // self.k_chunk

    @property
    def steps(self) -> int:
        """Instructions along K in a chunk."""
        return self.k_chunk // MFMA_K

    @property
    def m_tiles(self) -> int:
        return self.tile_m // MFMA_M

    @property
    def num_threads(self) -> int:
        return self.num_waves * LANES

    @property
    def stage_bytes(self) -> int:
        return self.tile_m * self.k_chunk

    @property
    def lds_bytes(self) -> int:
        return product_lds_bytes(self.num_elements, self.tile_m)

    @property
    def pieces_per_row(self) -> int:
        return self.k_chunk // PIECE

    @property
    def swizzle_mask(self) -> int:
        return 15 if self.pieces_per_row % 16 == 0 else 7

    @property
    def pieces_per_thread(self) -> int:
        return -(-self.stage_bytes // PIECE // self.num_threads)

    @property
    def row_scale_bytes(self) -> int:
        return ScaleOrder(self.num_elements).row_bytes


def operand_a_piece(step: int, half: int, group: Any) -> Any:
    """Which 16-byte piece of a row's chunk lane group ``group`` holds in half its registers: e4m3, so K =
    16 g .. in the first four and 64 + 16 g .. in the last four."""
    return step * (MFMA_K // PIECE) + half * 4 + group


def scale_group(lane_group: Any) -> Any:
    """Which scale dword of a row (``ScaleOrder``) a lane group supplies: that of logical blocks 32 g .., not
    of the elements it holds."""
    return lane_group


def _swizzled(plan: GemmPlan, row: Any, piece: Any) -> Any:
    """Byte of a stage where piece ``piece`` of row ``row`` lies."""
    return row * plan.k_chunk + (piece ^ (row & plan.swizzle_mask)) * PIECE


def _load_rows(plan: GemmPlan, rows_address: Any, num_rows: Any, chunk: Any) -> list[Any]:
    """Requests this thread's pieces of a chunk of the rows; rows past ``num_rows`` repeat the last one, so
    that nothing undefined is read (their results are never stored)."""
    pieces = []
    for i in range(plan.pieces_per_thread):
        number = fx.thread_idx.x + i * plan.num_threads
        row = smaller(number // plan.pieces_per_row, num_rows - 1)
        address = rows_address + fx.Int64(row) * plan.num_elements + fx.Int64(chunk * plan.k_chunk)
        source = pointer(address, fx.Int32, PIECE) + number % plan.pieces_per_row * (PIECE // 4)
        pieces.append(fx.generic_load(source, count=PIECE // 4))
    return pieces


@flyc.jit
def _store_rows(plan, lds, stage, pieces):
    """Puts this thread's pieces into a stage of LDS."""
    for i in fx.range_constexpr(plan.pieces_per_thread):
        number = fx.thread_idx.x + i * plan.num_threads
        row, piece = number // plan.pieces_per_row, number % plan.pieces_per_row
        byte = stage * plan.stage_bytes + _swizzled(plan, row, piece)
        if fx.const_expr((i + 1) * plan.num_threads * PIECE <= plan.stage_bytes):
            fx.generic_store(lds + byte // 4, pieces[i])
        else:  # noqa: PLR5501  (decided while tracing, the inner one on the device)
            if number * PIECE < plan.stage_bytes:
                fx.generic_store(lds + byte // 4, pieces[i])


def _load_row_scales(plan: GemmPlan, scales_address: Any, num_rows: Any, chunk: Any) -> list[Any]:
    """For each tile of 16 rows the dword of this lane's row and lane group: one byte for each step."""
    lane = fx.thread_idx.x % LANES
    dwords = []
    for tile in range(plan.m_tiles):
        row = smaller(tile * MFMA_M + lane % MFMA_M, num_rows - 1)
        source = pointer(scales_address + fx.Int64(row) * plan.row_scale_bytes, fx.Int32)
        group = scale_group(lane // MFMA_M)
        dwords.append(fx.generic_load(source + chunk * STEPS_PER_SCALE_DWORD + group))
    return dwords


def _load_weights(plan: GemmPlan, tiles: list[Any], chunk: Any) -> list[Any]:
    """Weights of a chunk: for each row tile and step the lane's 16 bytes."""
    lane = fx.thread_idx.x % LANES
    step_dwords = MFMA_N * MFMA_K // 2 // 4
    loaded = []
    for address in tiles:
        for step in range(plan.steps):
            offset = (chunk * plan.steps + step) * step_dwords
            source = pointer(address, fx.Int32, PIECE) + offset + lane * (PIECE // 4)
            loaded.append(fx.generic_load(source, count=PIECE // 4))
    return loaded


def _load_weight_scales(tiles: list[Any], chunk: Any) -> list[Any]:
    lane = fx.thread_idx.x % LANES
    return [fx.generic_load(pointer(address, fx.Int32) + chunk * LANES + lane) for address in tiles]


def _read_operand_a(plan: GemmPlan, lds: Any, stage: Any, tile: int, step: int) -> Any:
    """The lane's 32 bytes of row r: K = 16 g .. and 64 + 16 g .. of the step."""
    lane = fx.thread_idx.x % LANES
    row = tile * MFMA_M + lane % MFMA_M
    halves = []
    for half in range(2):
        piece = operand_a_piece(step, half, lane // MFMA_M)
        byte = stage * plan.stage_bytes + _swizzled(plan, row, piece)
        halves.append(fx.generic_load(lds + byte // 4, count=PIECE // 4))
    return halves[0].shuffle(halves[1], list(range(8)))


def _multiply_chunk(
    plan: GemmPlan,
    lds: Any,
    stage: Any,
    sums: list[Any],
    row_scales: list[Any],
    weights: list[Any],
    weight_scales: list[Any],
) -> list[Any]:
    sums = list(sums)
    for step in range(plan.steps):
        for tile in range(plan.m_tiles):
            a = _read_operand_a(plan, lds, stage, tile, step)
            for column in range(plan.num_row_tiles):
                index = tile * plan.num_row_tiles + column
                b = weights[column * plan.steps + step]
                operands = [a, b, sums[index], E4M3_FORMAT, E2M1_FORMAT]
                scales = [step, row_scales[tile], step, weight_scales[column]]
                sums[index] = fx.Vector(
                    fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(T.vec(4, T.f32), [*operands, *scales])
                )
    return sums


@flyc.jit
def multiply_tile(plan, lds, rows_address, scales_address, num_rows, weight_tiles, weight_scale_tiles):
    """The sums of a tile: list of Float32x4, row tile of the weights fastest, tile of 16 rows slowest.

    Args:
        plan: GemmPlan.
        lds: Int32 pointer to ``plan.lds_bytes`` of LDS, 16-byte aligned; free when all waves have returned
            (the function ends in a barrier).
        rows_address, scales_address: of the tile's first row, e4m3 [num_rows, K] and scales in ScaleOrder.
        num_rows: valid rows, at least 1.
        weight_tiles, weight_scale_tiles: addresses of this wave's row tiles, as PackedMatrixLayout has them.
    """
    sums = [fx.full(OUTPUTS_PER_LANE, 0.0, fx.Float32) for _ in range(plan.m_tiles * plan.num_row_tiles)]
    first = fx.Int32(0)
    _store_rows(plan, lds, first, _load_rows(plan, rows_address, num_rows, first))
    row_scales = _load_row_scales(plan, scales_address, num_rows, first)
    weights = _load_weights(plan, weight_tiles, first)
    weight_scales = _load_weight_scales(weight_scale_tiles, first)
    fx.barrier()
    if fx.const_expr(plan.num_chunks == 1):
        sums = _multiply_chunk(plan, lds, first, sums, row_scales, weights, weight_scales)
        fx.barrier()
    else:
        for chunk in range(0, plan.num_chunks, 1, unroll=1):
            # The last chunk asks for itself again, into the stage that nobody reads: no branch, and the bytes
            # are in the caches.
            ahead = smaller(chunk + 1, fx.Int32(plan.num_chunks - 1))
            next_rows = _load_rows(plan, rows_address, num_rows, ahead)
            next_row_scales = _load_row_scales(plan, scales_address, num_rows, ahead)
            next_weight_scales = _load_weight_scales(weight_scale_tiles, ahead)
            if fx.const_expr(plan.two_stage_weights):
                next_weights = _load_weights(plan, weight_tiles, ahead)
                fx.rocdl.sched_barrier(0)
            sums = _multiply_chunk(plan, lds, chunk & 1, sums, row_scales, weights, weight_scales)
            if fx.const_expr(not plan.two_stage_weights):
                next_weights = _load_weights(plan, weight_tiles, ahead)
            _store_rows(plan, lds, (chunk + 1) & 1, next_rows)
            row_scales, weights, weight_scales = next_row_scales, next_weights, next_weight_scales
            fx.barrier()
    return sums


def weight_tile_addresses(
    layout: PackedMatrixLayout, elements: Any, scales: Any, expert: Any, row_tiles: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Addresses of row tiles of one expert's matrix (scalars), elements and scales.

    64-bit throughout: a rank's experts exceed 4 GiB.
    """
    first = elements + fx.Int64(expert) * layout.element_bytes
    first_scale = scales + fx.Int64(expert) * layout.scale_bytes
    return (
        [first + fx.Int64(tile) * layout.row_tile_bytes for tile in row_tiles],
        [first_scale + fx.Int64(tile) * layout.row_tile_scale_bytes for tile in row_tiles],
    )
