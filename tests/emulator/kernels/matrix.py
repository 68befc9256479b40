# SPDX-License-Identifier: Apache-2.0
"""Matrix kernels: bf16, fp8 and mxfp4 GEMMs with swizzled LDS, split-K with a semaphore, a load pipeline.

All GEMMs compute C[m, n] = sum_k A[m, k] B[n, k].  LDS rows are cut in 16-byte chunks; chunk c of row r lies
at chunk c ^ (r % chunks), so that the lanes of a wave, which read one chunk of many rows, hit different
banks.  No `from __future__ import annotations`: fx.struct wants types, not their names.
"""

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.rocdl import cdna4

from tests.emulator.kernels.common import AGENT, T, gp, shared, signal, wait_for, wave_id

TILE = 64


@fx.struct
class Tiles16:
    """Two 64-row tiles of 128-byte rows."""

    a: fx.Array[fx.Int32, TILE * 32, 16]
    b: fx.Array[fx.Int32, TILE * 32, 16]


@fx.struct
class Tiles4:
    """Two 64-row tiles of 256-byte rows."""

    a: fx.Array[fx.Int32, TILE * 64, 16]
    b: fx.Array[fx.Int32, TILE * 64, 16]


def stage(source, row_bytes, first_row, first_byte, rows, tile, chunks):
    """256 threads copy 64 rows of `chunks` 16-byte chunks into a swizzled tile; rows past the end are 0."""
    t = fx.thread_idx.x
    buffer = fx.rocdl.make_buffer_ptr(gp(source, fx.Int32, 16), num_records_bytes=fx.Int64(rows * row_bytes))
    resource = fx.rocdl.get_buffer_rsrc(buffer)
    for part in fx.range_constexpr(TILE * chunks // 256):
        index = part * 256 + t
        row, chunk = index // chunks, index % chunks
        offset = (first_row + row) * row_bytes + first_byte + chunk * 16
        data = fx.Vector(fx.rocdl.raw_ptr_buffer_load(T.vec(4, T.i32), resource, offset, 0, 0))
        fx.generic_store(tile.ptr + (row * chunks + (chunk ^ (row % chunks))) * 4, data)


def chunk_of(tile, row, chunk, chunks):
    """16 bytes of a swizzled tile, as Int32x4."""
    return fx.generic_load(tile.ptr + (row * chunks + (chunk ^ (row % chunks))) * 4, count=4)


@functools.cache
def gemm_bf16():
    """bf16 in, float32 out; K a multiple of 64, any M and N; four waves of 32x32 by 32x32x16 MFMA."""

    @flyc.kernel(name="user_gemm_bf16")
    def kernel(a: fx.Int64, b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32, k: fx.Int32):
        lane, wave = fx.thread_idx.x % 64, wave_id()
        tiles = fx.SharedAllocator().allocate(Tiles16).peek()
        first_m, first_n = fx.block_idx.x * TILE, fx.block_idx.y * TILE
        row = lane % 32
        acc = fx.full(16, 0.0, fx.Float32)
        for step in range(0, k // 64, 1, unroll=1):
            stage(a, k * 2, first_m, step * 128, m, tiles.a, 8)
            stage(b, k * 2, first_n, step * 128, n, tiles.b, 8)
            fx.barrier()
            for inner in fx.range_constexpr(4):
                chunk = inner * 2 + lane // 32
                left = chunk_of(tiles.a, (wave // 2) * 32 + row, chunk, 8).bitcast(fx.BFloat16)
                right = chunk_of(tiles.b, (wave % 2) * 32 + row, chunk, 8).bitcast(fx.BFloat16)
                acc = fx.Vector(fx.rocdl.mfma_f32_32x32x16_bf16(T.vec(16, T.f32), [left, right, acc]))
            fx.barrier()
        out_col = first_n + (wave % 2) * 32 + row
        for i in fx.range_constexpr(16):
            out_row = first_m + (wave // 2) * 32 + 8 * (i // 4) + 4 * (lane // 32) + i % 4
            if out_row < m and out_col < n:
                gp(c, fx.Float32)[out_row * n + out_col] = acc[i]

    @flyc.jit
    def run(a: fx.Int64, b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32, k: fx.Int32):
        grid = ((m + TILE - 1) // TILE, (n + TILE - 1) // TILE)
        kernel(a, b, c, m, n, k).launch(grid=grid, block=(256,))

    return run


@functools.cache
def gemm_fp8():
    """e4m3 in, a float32 scale per row of A and of B, bf16 out; M, N multiples of 64, K of 128."""

    @flyc.kernel(name="user_gemm_fp8")
    def kernel(
        a: fx.Int64, b: fx.Int64, scale_a: fx.Int64, scale_b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32,
        k: fx.Int32
    ):  # fmt: skip
        lane, wave = fx.thread_idx.x % 64, wave_id()
        tiles = fx.SharedAllocator().allocate(Tiles16).peek()
        first_m, first_n = fx.block_idx.x * TILE, fx.block_idx.y * TILE
        row, group = lane % 16, lane // 16
        acc = [fx.full(4, 0.0, fx.Float32) for _ in range(4)]
        for step in range(0, k // 128, 1, unroll=1):
            stage(a, k, first_m, step * 128, m, tiles.a, 8)
            stage(b, k, first_n, step * 128, n, tiles.b, 8)
            fx.barrier()
            for inner in fx.range_constexpr(4):
                # 32 values of K: eight bytes a lane, half a chunk
                place = inner * 2 + group // 2
                half = (group % 2) == 1
                left = chunk_of(tiles.a, wave * 16 + row, place, 8)
                left = half.select(left.shuffle(left, [2, 3]), left.shuffle(left, [0, 1])).bitcast(fx.Int64)[
                    0
                ]
                for j in fx.range_constexpr(4):
                    right = chunk_of(tiles.b, j * 16 + row, place, 8)
                    right = half.select(right.shuffle(right, [2, 3]), right.shuffle(right, [0, 1]))
                    operands = [left, right.bitcast(fx.Int64)[0], acc[j]]
                    acc[j] = fx.Vector(fx.rocdl.mfma_f32_16x16x32_fp8_fp8(T.vec(4, T.f32), operands))
            fx.barrier()
        for j in fx.range_constexpr(4):
            out_col = first_n + j * 16 + row
            by_column = gp(scale_b, fx.Float32)[out_col]
            for i in fx.range_constexpr(4):
                out_row = first_m + wave * 16 + group * 4 + i
                value = acc[j][i] * gp(scale_a, fx.Float32)[out_row] * by_column
                gp(c, fx.BFloat16)[out_row * n + out_col] = value.to(fx.BFloat16)

    @flyc.jit
    def run(
        a: fx.Int64, b: fx.Int64, scale_a: fx.Int64, scale_b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32,
        k: fx.Int32
    ):  # fmt: skip
        kernel(a, b, scale_a, scale_b, c, m, n, k).launch(grid=(m // TILE, n // TILE), block=(256,))

    return run


@functools.cache
def gemm_mxfp4():
    """e2m1 in (two a byte, low nibble first), e8m0 scales per 32 of K, float32 out; K a multiple of 512.

    Scales are packed [rows, K / 512, 4, 4] bytes: [g][i] belongs to K block 4 i + g of the 512, so that a
    lane of group g loads one dword and instruction i takes its byte i.
    """

    @flyc.kernel(name="user_gemm_mxfp4")
    def kernel(
        a: fx.Int64, b: fx.Int64, scale_a: fx.Int64, scale_b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32,
        k: fx.Int32
    ):  # fmt: skip
        lane, wave = fx.thread_idx.x % 64, wave_id()
        tiles = fx.SharedAllocator().allocate(Tiles4).peek()
        first_m, first_n = fx.block_idx.x * TILE, fx.block_idx.y * TILE
        row, group = lane % 16, lane // 16
        acc = [fx.full(4, 0.0, fx.Float32) for _ in range(4)]
        for step in range(0, k // 512, 1, unroll=1):
            stage(a, k // 2, first_m, step * 256, m, tiles.a, 16)
            stage(b, k // 2, first_n, step * 256, n, tiles.b, 16)
            words = (k // 512) * 4
            sa = gp(scale_a, fx.Int32)[(first_m + wave * 16 + row) * words + step * 4 + group]
            sb = [
                gp(scale_b, fx.Int32)[(first_n + j * 16 + row) * words + step * 4 + group] for j in range(4)
            ]
            fx.barrier()
            for i in fx.range_constexpr(4):
                left = chunk_of(tiles.a, wave * 16 + row, i * 4 + group, 16)
                for j in fx.range_constexpr(4):
                    right = chunk_of(tiles.b, j * 16 + row, i * 4 + group, 16)
                    operands = [left, right, acc[j], 4, 4, i, sa, i, sb[j]]
                    acc[j] = fx.Vector(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(T.vec(4, T.f32), operands))
            fx.barrier()
        for j in fx.range_constexpr(4):
            for i in fx.range_constexpr(4):
                out_row = first_m + wave * 16 + group * 4 + i
                gp(c, fx.Float32)[out_row * n + first_n + j * 16 + row] = acc[j][i]

    @flyc.jit
    def run(
        a: fx.Int64, b: fx.Int64, scale_a: fx.Int64, scale_b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32,
        k: fx.Int32
    ):  # fmt: skip
        kernel(a, b, scale_a, scale_b, c, m, n, k).launch(grid=(m // TILE, n // TILE), block=(256,))

    return run


@functools.cache
def gemm_split_k():
    """bf16 in and out, K cut over block_idx.z; parts of a tile add to `partial` in turn, by a semaphore.

    A workgroup makes 32x16 outputs, a wave 16x16.  `partial` float32 [m, n] and `semaphore` int32 per tile,
    zero before the launch; the last part rounds and leaves the semaphore at zero again.
    """

    @flyc.kernel(name="user_gemm_split_k")
    def kernel(
        a: fx.Int64, b: fx.Int64, c: fx.Int64, partial: fx.Int64, semaphore: fx.Int64, n: fx.Int32,
        k: fx.Int32, parts: fx.Int32
    ):  # fmt: skip
        lane, wave = fx.thread_idx.x % 64, wave_id()
        row, group = lane % 16, lane // 16
        first_m, first_n, part = fx.block_idx.x * 32 + wave * 16, fx.block_idx.y * 16, fx.block_idx.z
        share = k // parts
        acc = fx.full(4, 0.0, fx.Float32)
        for i in range(0, share // 32, 1, unroll=1):
            at = part * share + i * 32 + group * 8
            left = fx.generic_load(gp(a, fx.BFloat16, 16) + ((first_m + row) * k + at), count=8)
            right = fx.generic_load(gp(b, fx.BFloat16, 16) + ((first_n + row) * k + at), count=8)
            acc = fx.Vector(fx.rocdl.mfma_f32_16x16x32_bf16(T.vec(4, T.f32), [left, right, acc]))
        flag = semaphore + fx.Int64(fx.block_idx.x * (n // 16) + fx.block_idx.y) * 4
        wait_for(flag, part, AGENT)
        for i in fx.range_constexpr(4):
            place = (first_m + group * 4 + i) * n + first_n + row
            value = acc[i]
            if part > 0:
                value = value + gp(partial, fx.Float32)[place]
            if part == parts - 1:
                gp(c, fx.BFloat16)[place] = value.to(fx.BFloat16)
            if part < parts - 1:
                gp(partial, fx.Float32)[place] = value
        signal(flag, (part == parts - 1).select(fx.Int32(0), part + 1), AGENT)

    @flyc.jit
    def run(
        a: fx.Int64, b: fx.Int64, c: fx.Int64, partial: fx.Int64, semaphore: fx.Int64, m: fx.Int32,
        n: fx.Int32, k: fx.Int32, parts: fx.Int32
    ):  # fmt: skip
        kernel(a, b, c, partial, semaphore, n, k, parts).launch(grid=(m // 32, n // 16, parts), block=(128,))

    return run


@functools.cache
def column_sum():
    """out[c] = sum over rows of float32 x[rows, 1024 * blocks], in row order: rows stream through LDS.

    Loads go straight to LDS, two rows ahead, in a ring of three; only a partial wait stands between them.
    """
    stages = 3

    @flyc.kernel(name="user_column_sum")
    def kernel(x: fx.Int64, out: fx.Int64, rows: fx.Int32, cols: fx.Int32):
        t, wave = fx.thread_idx.x, wave_id()
        ring = shared(fx.Float32, stages * 1024)
        copy = fx.make_copy_atom(cdna4.GlobalLoadAsyncLDS128b(), fx.Float32)
        base = gp(x, fx.Float32, 16) + fx.block_idx.x * 1024

        def request(row, slot):
            source = fx.make_view(base + (row * cols + t * 4), fx.make_layout(4, 1))
            target = fx.make_view(ring.ptr + (slot * 1024 + wave * 256), fx.make_layout(4, 1))
            fx.copy(copy, source, target)
            fx.rocdl.asyncmark()

        request(fx.Int32(0), fx.Int32(0))
        request(fx.Int32(1), fx.Int32(1))
        total = fx.full(4, 0.0, fx.Float32)
        slot = fx.Int32(0)
        for row in range(0, rows - 2, 1, unroll=1):
            ahead = (slot == 0).select(fx.Int32(2), slot - 1)
            request(fx.Int32(row) + 2, ahead)
            fx.rocdl.wait_asyncmark(2)
            fx.barrier()
            total = total + fx.generic_load(ring.ptr + (slot * 1024 + t * 4), count=4)
            fx.barrier()
            slot = (slot == 2).select(fx.Int32(0), slot + 1)
        for left in fx.range_constexpr(2):
            fx.rocdl.wait_asyncmark(1 - left)
            fx.barrier()
            total = total + fx.generic_load(ring.ptr + (slot * 1024 + t * 4), count=4)
            slot = (slot == 2).select(fx.Int32(0), slot + 1)
        fx.generic_store(gp(out, fx.Float32, 16) + (fx.block_idx.x * 1024 + t * 4), total)

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, rows: fx.Int32, cols: fx.Int32):
        kernel(x, out, rows, cols).launch(grid=(cols // 1024,), block=(256,))

    return run
