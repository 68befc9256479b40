# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Benchmark kernel: bf16 GEMM, C[m, n] = sum_k A[m, k] B[n, k], float32 result.

A workgroup of four waves makes 64x64 outputs, a wave 32x32 by v_mfma_f32_32x32x16_bf16; 64 values of K a step
through swizzled LDS, the next step's loads in flight during a step's products.
"""

import functools
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from kernellib.emulator.benchmarks.tiles_gfx950 import TILE_ROWS, T, chunk_of, fill, gp, request

STEP = 64
CHUNKS = STEP * 2 // 16


@fx.struct
class Tiles:
    """One step of A and of B."""

    a: fx.Array[fx.Int32, TILE_ROWS * CHUNKS * 4, 16]
    b: fx.Array[fx.Int32, TILE_ROWS * CHUNKS * 4, 16]


@functools.cache
def build() -> Any:
    """launcher(a, b, c, m, n, k): addresses; m and n multiples of 64, k of 64."""

    @flyc.kernel(name="bench_gemm_bf16", known_block_size=[256, 1, 1])
    def kernel(a: fx.Int64, b: fx.Int64, c: fx.Int64, n: fx.Int32, k: fx.Int32) -> None:
        lane = fx.thread_idx.x & 63
        wave = fx.Int32(fx.rocdl.readfirstlane(T.i32, fx.thread_idx.x >> 6))
        tiles = fx.SharedAllocator().allocate(Tiles).peek()
        first_m, first_n = fx.block_idx.x * TILE_ROWS, fx.block_idx.y * TILE_ROWS
        row_m, row_n = (wave >> 1) * 32 + (lane & 31), (wave & 1) * 32 + (lane & 31)
        acc = fx.full(16, 0.0, fx.Float32)
        left = request(a, k * 2, first_m, fx.Int32(0), CHUNKS)
        right = request(b, k * 2, first_n, fx.Int32(0), CHUNKS)
        steps = k >> (STEP.bit_length() - 1)
        for step in range(0, steps, 1, unroll=1):  # type: ignore[call-overload]
            fill(tiles.a, left, CHUNKS)
            fill(tiles.b, right, CHUNKS)
            fx.barrier()
            # the last step loads its own tile again: cheaper than a branch
            ahead = fx.min(fx.Int32(step) + 1, steps - 1) * (STEP * 2)
            left = request(a, k * 2, first_m, ahead, CHUNKS)
            right = request(b, k * 2, first_n, ahead, CHUNKS)
            for i in fx.range_constexpr(STEP // 16):
                chunk = i * 2 + (lane >> 5)
                x = chunk_of(tiles.a, row_m, chunk, CHUNKS).bitcast(fx.BFloat16)
                y = chunk_of(tiles.b, row_n, chunk, CHUNKS).bitcast(fx.BFloat16)
                acc = fx.Vector(fx.rocdl.mfma_f32_32x32x16_bf16(T.vec(16, T.f32), [x, y, acc]))
            fx.barrier()
        out = gp(c, fx.Float32, 4) + (first_m + (wave >> 1) * 32 + 4 * (lane >> 5)) * n + (first_n + row_n)
        for i in fx.range_constexpr(16):
            out[(8 * (i // 4) + i % 4) * n] = acc[i]

    @flyc.jit
    def run(a: fx.Int64, b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32, k: fx.Int32) -> None:
        kernel(a, b, c, n, k).launch(grid=(m // TILE_ROWS, n // TILE_ROWS), block=(256,))

    return run
