# SPDX-License-Identifier: Apache-2.0
"""Kernels with plain memory access patterns, whose lines and bank conflicts can be worked out by hand."""

from __future__ import annotations

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx

from tests.emulator.kernels.common import gp, shared


@functools.cache
def strided_load():
    """out[64 b + t] = x[t * stride], 64 lanes a workgroup."""

    @flyc.kernel(name="access_strided_load")
    def kernel(x: fx.Int64, out: fx.Int64, stride: fx.Int32):
        t = fx.thread_idx.x
        gp(out, fx.Float32)[fx.block_idx.x * 64 + t] = gp(x, fx.Float32)[t * stride]

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, stride: fx.Int32, blocks: fx.Int32):
        kernel(x, out, stride).launch(grid=(blocks,), block=(64,))

    return run


@functools.cache
def lds_column(pitch: int):
    """A wave fills 64 rows of `pitch` floats with their index, and reads one column: out[t] = t * pitch."""

    @flyc.kernel(name=f"access_lds_column_{pitch}")
    def kernel(out: fx.Int64):
        t = fx.thread_idx.x
        tile = shared(fx.Float32, 64 * pitch, 4)
        for i in range(0, pitch, 1, unroll=1):
            at = fx.Int32(i) * 64 + t
            tile[at] = fx.Float32(at)
        fx.barrier()
        gp(out, fx.Float32)[t] = tile[t * pitch]

    @flyc.jit
    def run(out: fx.Int64):
        kernel(out).launch(grid=1, block=64)

    return run
