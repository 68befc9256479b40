# SPDX-License-Identifier: Apache-2.0
"""Kernels that reduce rows: transpose, softmax, layer norm, top-k."""

from __future__ import annotations

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx

from tests.emulator.kernels.common import LOG2E, ballot, exp2, gp, shared, wave_reduce

TILE = 32
ROWS_PER_PASS = 8


@functools.cache
def transpose():
    """out[c, r] = x[r, c] of float32 [rows, cols], through a padded 32x33 tile; ragged edges are masked."""

    @flyc.kernel(name="user_transpose", known_block_size=[TILE, ROWS_PER_PASS, 1])
    def kernel(x: fx.Int64, out: fx.Int64, rows: fx.Int32, cols: fx.Int32):
        tile = shared(fx.Float32, TILE * (TILE + 1), 4)
        tx, ty = fx.thread_idx.x, fx.thread_idx.y
        col = fx.block_idx.x * TILE + tx
        for i in fx.range_constexpr(TILE // ROWS_PER_PASS):
            row = fx.block_idx.y * TILE + ty + i * ROWS_PER_PASS
            if row < rows and col < cols:
                tile[(ty + i * ROWS_PER_PASS) * (TILE + 1) + tx] = gp(x, fx.Float32)[row * cols + col]
        fx.barrier()
        out_col = fx.block_idx.y * TILE + tx
        for i in fx.range_constexpr(TILE // ROWS_PER_PASS):
            out_row = fx.block_idx.x * TILE + ty + i * ROWS_PER_PASS
            if out_row < cols and out_col < rows:
                value = tile[tx * (TILE + 1) + ty + i * ROWS_PER_PASS]
                gp(out, fx.Float32)[out_row * rows + out_col] = value

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, rows: fx.Int32, cols: fx.Int32):
        grid = ((cols + TILE - 1) // TILE, (rows + TILE - 1) // TILE)
        kernel(x, out, rows, cols).launch(grid=grid, block=(TILE, ROWS_PER_PASS))

    return run


@functools.cache
def softmax():
    """out[r] = softmax(x[r]) of float32 [rows, cols]: one workgroup a row, online maximum and sum."""
    threads = 256

    @flyc.kernel(name="user_softmax")
    def kernel(x: fx.Tensor, out: fx.Tensor, cols: fx.Int32):
        t = fx.thread_idx.x
        scratch = shared(fx.Float32, 8)
        source = fx.get_iter(x) + fx.block_idx.x * cols
        target = fx.get_iter(out) + fx.block_idx.x * cols
        # finite, so that -inf elements and lanes without an element give weight 0 and no NaN
        top, total = fx.Float32(-3.0e38), fx.Float32(0.0)
        for i in range(t, cols, threads, unroll=1):
            value = source[i]
            higher = fx.maxnumf(top, value)
            total = total * exp2((top - higher) * LOG2E) + exp2((value - higher) * LOG2E)
            top = higher
        wave_top = wave_reduce(top, fx.maxnumf)
        wave_total = wave_reduce(total * exp2((top - wave_top) * LOG2E), lambda a, b: a + b)
        if t % 64 == 0:
            scratch[t // 64] = wave_top
            scratch[4 + t // 64] = wave_total
        fx.barrier()
        tops = scratch.ptr.load(fx.Float32x4)
        totals = (scratch.ptr + 4).load(fx.Float32x4)
        row_top = tops.reduce("max")
        row_total = fx.Float32(0.0)
        for w in fx.range_constexpr(4):
            row_total = row_total + totals[w] * exp2((tops[w] - row_top) * LOG2E)
        inverse = 1.0 / row_total
        for i in range(t, cols, threads, unroll=1):
            target[i] = exp2((source[i] - row_top) * LOG2E) * inverse

    @flyc.jit
    def run(x: fx.Tensor, out: fx.Tensor, rows: fx.Int32, cols: fx.Int32):
        kernel(x, out, cols).launch(grid=(rows,), block=(threads,))

    return run


@functools.cache
def layer_norm(cols: int):
    """out = (x - mean) / sqrt(var + eps) * gamma + beta of bf16 [rows, cols]; a wave a row, two passes."""
    chunks = cols // 512
    assert cols == 512 * chunks

    @flyc.kernel(name=f"user_layer_norm_{cols}")
    def kernel(
        x: fx.Tensor, gamma: fx.Tensor, beta: fx.Tensor, out: fx.Tensor, rows: fx.Int32, eps: fx.Float32
    ):
        lane = fx.thread_idx.x % 64
        row = fx.block_idx.x * 4 + fx.thread_idx.x // 64
        if row < rows:
            place = [c * 512 + lane * 8 for c in range(chunks)]
            source = fx.get_iter(x) + row * cols
            values = [fx.generic_load(source + p, count=8).to(fx.Float32) for p in place]
            total = fx.Float32(0.0)
            for v in values:
                total = total + v.reduce("add")
            mean = wave_reduce(total, lambda a, b: a + b) * (1.0 / cols)
            centred = [v - mean for v in values]
            squares = fx.Float32(0.0)
            for v in centred:
                squares = squares + (v * v).reduce("add")
            variance = wave_reduce(squares, lambda a, b: a + b) * (1.0 / cols)
            inverse = fx.rsqrt(variance + eps)
            for p, v in zip(place, centred, strict=True):
                g = fx.generic_load(fx.get_iter(gamma) + p, count=8).to(fx.Float32)
                b = fx.generic_load(fx.get_iter(beta) + p, count=8).to(fx.Float32)
                y = (v * inverse * g + b).to(fx.BFloat16)
                fx.generic_store(fx.get_iter(out) + (row * cols + p), y)

    @flyc.jit
    def run(
        x: fx.Tensor, gamma: fx.Tensor, beta: fx.Tensor, out: fx.Tensor, rows: fx.Int32, eps: fx.Float32
    ):  # fmt: skip
        kernel(x, gamma, beta, out, rows, eps).launch(grid=((rows + 3) // 4,), block=(256,))

    return run


@functools.cache
def top_k(cols: int, k: int):
    """The k largest of each float32 row and where they are, in falling order, ties to the lower index.

    A wave a row; each lane keeps cols / 64 values in registers, and every round takes the wave's largest:
    a maximum by shuffles, a ballot for who has it, and the winner drops it.
    """
    per_lane = cols // 64
    assert cols == 64 * per_lane

    @flyc.kernel(name=f"user_top_{k}_of_{cols}")
    def kernel(x: fx.Int64, values: fx.Int64, indices: fx.Int64):
        lane, row = fx.thread_idx.x, fx.block_idx.x
        # lane l holds elements l * per_lane ..: the lowest lane with the maximum has the lowest index
        held = [gp(x, fx.Float32)[row * cols + lane * per_lane + i] for i in range(per_lane)]
        for rank in fx.range_constexpr(k):
            best, where = held[0], fx.Int32(0)
            for i in fx.range_constexpr(1, per_lane):
                better = held[i] > best
                best = better.select(held[i], best)
                where = better.select(fx.Int32(i), where)
            top = wave_reduce(best, fx.maxnumf)
            mask = ballot(best == top)
            winner = fx.ctpop((mask & (fx.Int64(0) - mask)) - 1).to(fx.Int32)
            if lane == winner:
                gp(values, fx.Float32)[row * k + rank] = best
                gp(indices, fx.Int32)[row * k + rank] = lane * per_lane + where
            for i in fx.range_constexpr(per_lane):
                drop = (lane == winner) & (where == i)
                held[i] = drop.select(fx.Float32(float("-inf")), held[i])

    @flyc.jit
    def run(x: fx.Int64, values: fx.Int64, indices: fx.Int64, rows: fx.Int32):
        kernel(x, values, indices).launch(grid=(rows,), block=(64,))

    return run
