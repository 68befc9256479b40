# SPDX-License-Identifier: Apache-2.0
"""Kernels of other kinds: causal attention, an int8 GEMM, a scan by DPP, an indexed array, a grid barrier."""

from __future__ import annotations

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm as ml
from flydsl._mlir.dialects import rocdl as mr

from tests.emulator.kernels.common import AGENT, LOG2E, ORDER, T, exp2, gp, shared, wave_id

LOWEST = -3.0e38


def _over_row(value, op):
    """Every lane gets the reduction over its 16 lanes."""
    for step in range(4):
        value = op(value, fx.shuffle_xor(value, 1 << step, 64))
    return value


@functools.cache
def causal_attention(dim: int):
    """out = softmax(Q K^T scale, causal) V of f16 [heads, seq, dim], softmax online over tiles of 32 keys.

    A wave takes 16 queries; seq a multiple of 64, dim of 32.  The weights change their layout from an MFMA
    result to an operand through LDS rows of 40 halves, each wave's own.
    """

    @flyc.kernel(name=f"user_attention_{dim}")
    def kernel(q: fx.Int64, k: fx.Int64, v: fx.Int64, out: fx.Int64, seq: fx.Int32, scale: fx.Float32):
        lane, wave = fx.thread_idx.x % 64, wave_id()
        row, group = lane % 16, lane // 16
        base = fx.block_idx.y * seq * dim
        first = (fx.block_idx.x * 4 + wave) * 16
        weights = shared(fx.Float16, 4 * 16 * 40).ptr + wave * 640

        def eight(tensor, at):
            return fx.generic_load(gp(tensor, fx.Float16, 16) + (base + at), count=8)

        queries = [eight(q, (first + row) * dim + c * 32 + group * 8) for c in range(dim // 32)]
        acc = [fx.full(4, 0.0, fx.Float32) for _ in range(dim // 16)]
        top = [fx.Float32(LOWEST) for _ in range(4)]
        total = [fx.Float32(0.0) for _ in range(4)]
        for tile in range(0, (first + 16 + 31) // 32, 1, unroll=1):
            key = fx.Int32(tile) * 32
            scores = []
            for half in fx.range_constexpr(2):
                c = fx.full(4, 0.0, fx.Float32)
                for part in fx.range_constexpr(dim // 32):
                    keys = eight(k, (key + half * 16 + row) * dim + part * 32 + group * 8)
                    c = fx.Vector(fx.rocdl.mfma_f32_16x16x32_f16(T.vec(4, T.f32), [queries[part], keys, c]))
                scores.append(c)
            factors = []
            for i in fx.range_constexpr(4):
                query = first + group * 4 + i
                low = (key + row <= query).select(scores[0][i] * scale, fx.Float32(LOWEST))
                high = (key + 16 + row <= query).select(scores[1][i] * scale, fx.Float32(LOWEST))
                new = fx.maxnumf(_over_row(fx.maxnumf(low, high), fx.maxnumf), top[i])
                low, high = exp2((low - new) * LOG2E), exp2((high - new) * LOG2E)
                factor = exp2((top[i] - new) * LOG2E)
                total[i] = total[i] * factor + _over_row(low + high, lambda a, b: a + b)
                top[i] = new
                factors.append(factor)
                fx.generic_store(weights + ((group * 4 + i) * 40 + row), low.to(fx.Float16))
                fx.generic_store(weights + ((group * 4 + i) * 40 + 16 + row), high.to(fx.Float16))
            left = fx.generic_load(weights + (row * 40 + group * 8), count=8)
            for j in fx.range_constexpr(dim // 16):
                column = base + (key + group * 8) * dim + j * 16 + row
                right = fx.Vector.from_elements([gp(v, fx.Float16)[column + e * dim] for e in range(8)])
                scaled = acc[j] * fx.Vector.from_elements(factors)
                acc[j] = fx.Vector(fx.rocdl.mfma_f32_16x16x32_f16(T.vec(4, T.f32), [left, right, scaled]))
        for j in fx.range_constexpr(dim // 16):
            for i in fx.range_constexpr(4):
                value = (acc[j][i] / total[i]).to(fx.Float16)
                gp(out, fx.Float16)[base + (first + group * 4 + i) * dim + j * 16 + row] = value

    @flyc.jit
    def run(
        q: fx.Int64, k: fx.Int64, v: fx.Int64, out: fx.Int64, seq: fx.Int32, heads: fx.Int32,
        scale: fx.Float32
    ):  # fmt: skip
        kernel(q, k, v, out, seq, scale).launch(grid=(seq // 64, heads), block=(256,))

    return run


@functools.cache
def gemm_int8():
    """int8 = clamp(round(A B^T scale_a[m] scale_b[n])), 16x16x64 MFMA, a wave a tile; K a multiple of 64."""

    @flyc.kernel(name="user_gemm_int8")
    def kernel(
        a: fx.Int64, b: fx.Int64, scale_a: fx.Int64, scale_b: fx.Int64, c: fx.Int64, n: fx.Int32, k: fx.Int32
    ):  # fmt: skip
        row, group = fx.thread_idx.x % 16, fx.thread_idx.x // 16
        first_m, first_n = fx.block_idx.x * 16, fx.block_idx.y * 16
        acc, zero = fx.full(4, 0, fx.Int32), fx.Int32(0).ir_value()
        for step in range(0, k // 64, 1, unroll=1):
            at = fx.Int32(step) * 64 + group * 16
            left = fx.generic_load(gp(a, fx.Int32, 16) + ((first_m + row) * k + at) // 4, count=4)
            right = fx.generic_load(gp(b, fx.Int32, 16) + ((first_n + row) * k + at) // 4, count=4)
            operands = [left.ir_value(), right.ir_value(), acc.ir_value(), zero, zero, zero]
            name = "llvm.amdgcn.mfma.i32.16x16x64.i8"
            acc = fx.Vector(ml.call_intrinsic(T.vec(4, T.i32), name, operands, [], []))
        by_column = gp(scale_b, fx.Float32)[first_n + row]
        for i in fx.range_constexpr(4):
            m = first_m + group * 4 + i
            value = fx.Float32(acc[i]) * gp(scale_a, fx.Float32)[m] * by_column
            rounded = fx.roundeven(fx.clampf(value, -128.0, 127.0))
            gp(c, fx.Int8)[m * n + first_n + row] = rounded.to(fx.Int8)

    @flyc.jit
    def run(
        a: fx.Int64, b: fx.Int64, scale_a: fx.Int64, scale_b: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32,
        k: fx.Int32
    ):  # fmt: skip
        kernel(a, b, scale_a, scale_b, c, n, k).launch(grid=(m // 16, n // 16), block=(64,))

    return run


@functools.cache
def segmented_scan():
    """Running float sums that start again where `heads` is not 0 and every 64 elements; a wave each."""
    steps = ((0x111, 0xF), (0x112, 0xF), (0x114, 0xF), (0x118, 0xF), (0x142, 0xA), (0x143, 0xC))

    @flyc.kernel(name="user_segmented_scan")
    def kernel(x: fx.Int64, heads: fx.Int64, out: fx.Int64):
        i = fx.block_idx.x * 64 + fx.thread_idx.x
        value, head = gp(x, fx.Float32)[i], gp(heads, fx.Int32)[i]
        for control, rows in steps:  # row_shr 1, 2, 4, 8, row_bcast 15 and 31
            moved = mr.update_dpp(
                T.f32, fx.Float32(0.0).ir_value(), value.ir_value(), control, rows, 15, False
            )
            flag = mr.update_dpp(T.i32, fx.Int32(0).ir_value(), head.ir_value(), control, rows, 15, False)
            value = (head == 0).select(value + fx.Float32(moved), value)
            head = head | fx.Int32(flag)
        gp(out, fx.Float32)[i] = value

    @flyc.jit
    def run(x: fx.Int64, heads: fx.Int64, out: fx.Int64, blocks: fx.Int32):
        kernel(x, heads, out).launch(grid=(blocks,), block=(64,))

    return run


@functools.cache
def count_nibbles():
    """Each lane counts its 16 nibbles in an array of registers that it indexes by their values.

    x: int64 [n], out: int32 [n, 16], blocks of 64.
    """

    @flyc.kernel(name="user_count_nibbles")
    def kernel(x: fx.Int64, out: fx.Int64):
        t = fx.block_idx.x * 64 + fx.thread_idx.x
        counts = fx.make_rmem_tensor(16, fx.Int32)
        for i in fx.range_constexpr(16):
            counts[i] = fx.Int32(0)
        word = gp(x, fx.Int64)[t]
        for i in range(0, 16, 1, unroll=1):
            nibble = ((word >> (fx.Int64(i) * 4)) & 15).to(fx.Int32)
            counts[nibble] = counts[nibble] + 1
        for i in range(0, 16, 1, unroll=1):
            gp(out, fx.Int32)[t * 16 + fx.Int32(i)] = counts[fx.Int32(i)]

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, blocks: fx.Int32):
        kernel(x, out).launch(grid=(blocks,), block=(64,))

    return run


@functools.cache
def heat_steps():
    """`steps` steps of a ring of n = 128 blocks floats, `a` to `b` and back, with a barrier over the grid.

    `count`: int32, zero; all workgroups must be resident.
    """

    @flyc.kernel(name="user_heat_steps")
    def kernel(a: fx.Int64, b: fx.Int64, count: fx.Int64, n: fx.Int32, steps: fx.Int32, blocks: fx.Int32):
        t = fx.thread_idx.x
        i = fx.block_idx.x * 128 + t
        left = (i == 0).select(n - 1, i - 1)
        right = (i == n - 1).select(fx.Int32(0), i + 1)
        arrived = gp(count, fx.Int32)
        for step in range(0, steps, 1, unroll=1):
            odd = (fx.Int32(step) & 1) == 1
            source, target = gp(odd.select(b, a), fx.Float32), gp(odd.select(a, b), fx.Float32)
            target[i] = source[left] * 0.25 + source[i] * 0.5 + source[right] * 0.25
            fx.memory_fence(ordering=ORDER.Release, syncscope=AGENT)
            fx.barrier()
            if t == 0:
                fx.atomic_add(arrived, fx.Int32(1), syncscope=AGENT)
                seen = fx.generic_load(arrived, memory_order=ORDER.Monotonic, syncscope=AGENT)
                while seen < (fx.Int32(step) + 1) * blocks:
                    fx.rocdl.s_sleep(2)
                    seen = fx.generic_load(arrived, memory_order=ORDER.Monotonic, syncscope=AGENT)
            fx.barrier()
            fx.memory_fence(ordering=ORDER.Acquire, syncscope=AGENT)

    @flyc.jit
    def run(a: fx.Int64, b: fx.Int64, count: fx.Int64, n: fx.Int32, steps: fx.Int32, blocks: fx.Int32):
        kernel(a, b, count, n, steps, blocks).launch(grid=(blocks,), block=(128,))

    return run
