# SPDX-License-Identifier: Apache-2.0
"""One GEMM tile as a launch of its own, for tests. Device code: traced, not type-checked."""

from __future__ import annotations

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx

from kernellib.ops.mega_moe.combine_gfx950 import combine
from kernellib.ops.mega_moe.gemm1_gfx950 import gemm1_tile
from kernellib.ops.mega_moe.gemm2_gfx950 import gemm2_tile


@functools.cache
def gemm1_launcher(gemm, name):
    """(rows, row_scales, num_rows, w1, w1_scales, expert, hidden, hidden_scales): a tile's rows, every
    column, one workgroup for each column tile."""

    @flyc.kernel(name=name, known_block_size=[gemm.plan.num_threads, 1, 1])
    def kernel(
        rows: fx.Int64,
        row_scales: fx.Int64,
        num_rows: fx.Int32,
        w1: fx.Int64,
        w1_scales: fx.Int64,
        expert: fx.Int32,
        hidden: fx.Int64,
        hidden_scales: fx.Int64,
    ):
        lds = fx.SharedAllocator().allocate(fx.Array[fx.Int32, gemm.lds_bytes // 4, 16]).peek().ptr
        column_tile = fx.block_idx.x
        gemm1_tile(
            gemm, lds, rows, row_scales, num_rows, w1, w1_scales, expert, column_tile, hidden, hidden_scales
        )

    @flyc.jit
    def launcher(
        rows: fx.Int64,
        row_scales: fx.Int64,
        num_rows: fx.Int32,
        w1: fx.Int64,
        w1_scales: fx.Int64,
        expert: fx.Int32,
        hidden: fx.Int64,
        hidden_scales: fx.Int64,
    ):
        kernel(rows, row_scales, num_rows, w1, w1_scales, expert, hidden, hidden_scales).launch(
            grid=(gemm.num_column_tiles, 1, 1), block=gemm.plan.num_threads
        )

    return launcher


@functools.cache
def gemm2_launcher(gemm, name):
    """(hidden, hidden_scales, row_weight, row_source, num_rows, w2, w2_scales, expert, peers)."""

    @flyc.kernel(name=name, known_block_size=[gemm.plan.num_threads, 1, 1])
    def kernel(
        hidden: fx.Int64,
        hidden_scales: fx.Int64,
        row_weight: fx.Int64,
        row_source: fx.Int64,
        num_rows: fx.Int32,
        w2: fx.Int64,
        w2_scales: fx.Int64,
        expert: fx.Int32,
        peers: fx.Int64,
    ):
        lds = fx.SharedAllocator().allocate(fx.Array[fx.Int32, gemm.lds_bytes // 4, 16]).peek().ptr
        column_tile = fx.block_idx.x
        gemm2_tile(
            gemm,
            lds,
            hidden,
            hidden_scales,
            row_weight,
            row_source,
            num_rows,
            w2,
            w2_scales,
            expert,
            column_tile,
            peers,
        )

    @flyc.jit
    def launcher(
        hidden: fx.Int64,
        hidden_scales: fx.Int64,
        row_weight: fx.Int64,
        row_source: fx.Int64,
        num_rows: fx.Int32,
        w2: fx.Int64,
        w2_scales: fx.Int64,
        expert: fx.Int32,
        peers: fx.Int64,
    ):
        kernel(hidden, hidden_scales, row_weight, row_source, num_rows, w2, w2_scales, expert, peers).launch(
            grid=(gemm.num_column_tiles, 1, 1), block=gemm.plan.num_threads
        )

    return launcher


@functools.cache
def combine_launcher(c):
    """(wire, expert_ids, num_tokens, out, skipped): two workgroups, as if ``skipped`` had come before them
    and none came after."""

    @flyc.kernel(name=f"combine_{c.layout.name}", known_block_size=[c.num_waves * 64, 1, 1])
    def kernel(wire: fx.Int64, expert_ids: fx.Int64, num_tokens: fx.Int32, out: fx.Int64, skipped: fx.Int32):
        combine(c, wire, expert_ids, num_tokens, out, -skipped, skipped + 2)

    @flyc.jit
    def launcher(
        wire: fx.Int64,
        expert_ids: fx.Int64,
        num_tokens: fx.Int32,
        out: fx.Int64,
        skipped: fx.Int32,
        stream: fx.Stream,
    ):
        kernel(wire, expert_ids, num_tokens, out, skipped).launch(
            grid=(2, 1, 1), block=c.num_waves * 64, stream=stream
        )

    return launcher
