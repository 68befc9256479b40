# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Benchmark kernel: RMSNorm of bf16 rows, out = bf16(x * rsqrt(mean(x^2) + eps) * weight), float32 inside.

A workgroup of 256 lanes a row; a lane keeps its cols / 256 elements in registers between the two passes.
"""

import functools
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from kernellib.emulator.benchmarks.tiles_gfx950 import gp

THREADS = 256
PER_LOAD = 8


@functools.cache
def build(cols: int) -> Any:
    """launcher(x, weight, out, rows, eps): addresses of bf16 [rows, cols]; cols a multiple of 2048."""
    loads = cols // (THREADS * PER_LOAD)
    assert cols == loads * THREADS * PER_LOAD

    @flyc.kernel(name=f"bench_rmsnorm_{cols}", known_block_size=[THREADS, 1, 1])
    def kernel(x: fx.Int64, weight: fx.Int64, out: fx.Int64, eps: fx.Float32) -> None:
        t = fx.thread_idx.x
        partial = fx.SharedAllocator().allocate(fx.Array[fx.Float32, 4, 16]).peek()
        row = fx.block_idx.x * cols
        places = [i * THREADS * PER_LOAD + t * PER_LOAD for i in range(loads)]
        source = gp(x, fx.BFloat16, 16) + row
        values = [fx.generic_load(source + p, count=PER_LOAD).to(fx.Float32) for p in places]
        gammas = [fx.generic_load(gp(weight, fx.BFloat16, 16) + p, count=PER_LOAD) for p in places]
        squares = fx.full(PER_LOAD, 0.0, fx.Float32)
        for v in values:
            squares = fx.fma(v, v, squares)
        total = squares.reduce("add")
        for step in fx.range_constexpr(6):
            total = total + fx.shuffle_xor(total, 1 << step, 64)
        if t % 64 == 0:
            partial[t // 64] = total
        fx.barrier()
        mean = partial.ptr.load(fx.Float32x4).reduce("add") * (1.0 / cols)
        inverse = fx.rsqrt(mean + eps)
        target = gp(out, fx.BFloat16, 16) + row
        for p, v, gamma in zip(places, values, gammas, strict=True):
            fx.generic_store(target + p, (v * inverse * gamma.to(fx.Float32)).to(fx.BFloat16))

    @flyc.jit
    def run(x: fx.Int64, weight: fx.Int64, out: fx.Int64, rows: fx.Int32, eps: fx.Float32) -> None:
        kernel(x, weight, out, eps).launch(grid=(rows,), block=(THREADS,))

    return run
