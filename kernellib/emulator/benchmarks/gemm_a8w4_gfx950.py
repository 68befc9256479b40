# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Benchmark kernel: scaled fp8 x fp4 GEMM, C[m, n] = sum_k A[m, k] B[n, k], float32 result.

A is e4m3 [m, k], B e2m1 [n, k / 2] (low nibble first), each with an e8m0 scale per row and 32 of K.  A
workgroup of four waves makes 64x64 outputs, a wave 32x32 by four v_mfma_scale_f32_16x16x128_f8f6f4 for each
128 of K.  An fp8 row's share of a lane lies in two 16-byte pieces 64 bytes apart, an fp4 row's in one.
"""

import functools
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from kernellib.emulator.benchmarks.tiles_gfx950 import TILE_ROWS, T, chunk_of, fill, gp, request

STEP = 256
CHUNKS_A, CHUNKS_B = STEP // 16, STEP // 32
SCALES = STEP // 32
FP8, FP4 = 0, 4


@fx.struct
class Tiles:
    """One step of A and of B."""

    a: fx.Array[fx.Int32, TILE_ROWS * CHUNKS_A * 4, 16]
    b: fx.Array[fx.Int32, TILE_ROWS * CHUNKS_B * 4, 16]


def _scales(source, row, k, step, group):
    """The lane's scale of each 128 of K in this step: K block 4 * i + group."""
    pointer = gp(source, fx.Uint8, 1) + row * (k >> 5) + step * SCALES + group
    return [
        fx.Int32(fx.generic_load(pointer + i * 4, dtype=fx.Uint8)) for i in fx.range_constexpr(STEP // 128)
    ]


@functools.cache
def build() -> Any:
    """launcher(a, scale_a, b, scale_b, c, m, n, k): addresses; m and n multiples of 64, k of 256."""

    @flyc.kernel(name="bench_gemm_a8w4", known_block_size=[256, 1, 1])
    def kernel(
        a: fx.Int64, scale_a: fx.Int64, b: fx.Int64, scale_b: fx.Int64, c: fx.Int64, n: fx.Int32, k: fx.Int32
    ) -> None:
        lane = fx.thread_idx.x & 63
        wave = fx.Int32(fx.rocdl.readfirstlane(T.i32, fx.thread_idx.x >> 6))
        row, group = lane & 15, lane >> 4
        tiles = fx.SharedAllocator().allocate(Tiles).peek()
        first_m, first_n = fx.block_idx.x * TILE_ROWS, fx.block_idx.y * TILE_ROWS
        rows_m = [(wave >> 1) * 32 + t * 16 + row for t in range(2)]
        rows_n = [(wave & 1) * 32 + t * 16 + row for t in range(2)]
        acc = [fx.full(4, 0.0, fx.Float32) for _ in range(4)]
        for step in range(0, k >> (STEP.bit_length() - 1), 1, unroll=1):  # type: ignore[call-overload]
            fill(tiles.a, request(a, k, first_m, step * STEP, CHUNKS_A), CHUNKS_A)
            fill(tiles.b, request(b, k >> 1, first_n, step * (STEP // 2), CHUNKS_B), CHUNKS_B)
            sa = [_scales(scale_a, first_m + r, k, step, group) for r in rows_m]
            sb = [_scales(scale_b, first_n + r, k, step, group) for r in rows_n]
            fx.barrier()
            for i in fx.range_constexpr(STEP // 128):
                xs = [chunk_of(tiles.a, r, i * 8 + group, CHUNKS_A) for r in rows_m]
                upper = [chunk_of(tiles.a, r, i * 8 + 4 + group, CHUNKS_A) for r in rows_m]
                ys = [chunk_of(tiles.b, r, i * 4 + group, CHUNKS_B) for r in rows_n]
                for t in fx.range_constexpr(4):
                    x = xs[t // 2].shuffle(upper[t // 2], list(range(8)))
                    operands = [x, ys[t % 2], acc[t], FP8, FP4, 0, sa[t // 2][i], 0, sb[t % 2][i]]
                    acc[t] = fx.Vector(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(T.vec(4, T.f32), operands))
            fx.barrier()
        for t in fx.range_constexpr(4):
            out_row = first_m + (wave >> 1) * 32 + t // 2 * 16 + group * 4
            out = gp(c, fx.Float32, 4) + out_row * n + (first_n + rows_n[t % 2])
            for i in fx.range_constexpr(4):
                out[i * n] = acc[t][i]

    @flyc.jit
    def run(
        a: fx.Int64, scale_a: fx.Int64, b: fx.Int64, scale_b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32,
        k: fx.Int32
    ) -> None:  # fmt: skip
        grid = (m // TILE_ROWS, n // TILE_ROWS)
        kernel(a, scale_a, b, scale_b, c, n, k).launch(grid=grid, block=(256,))

    return run
