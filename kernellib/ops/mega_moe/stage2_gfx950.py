# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Stage 2 for gfx950: GEMM2 with the rows sent home, then combine, in one launch.

Persistent (``persist_cu`` workgroups, all resident together): every workgroup multiplies, drawing tiles from
a counter or taking every persist_cu-th, then combines. Otherwise: one workgroup for each tile there may be,
and ``num_combine`` more, behind them in dispatch order, that combine; the former never wait, so that the
latter's waiting cannot keep them from starting.

The workgroup that completes a rank's tiles raises the rank's flag at all ranks; combine waits for the flags
of all. The last workgroup to leave ends the call by storing its epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .combine_gfx950 import Combine, combine
from .config import MegaMoEConfig, kernel_name
from .device_gfx950 import (
    AGENT,
    SYSTEM,
    acquire,
    add_relaxed,
    release,
    store_relaxed,
    wave_uniform,
)
from .dispatch_gfx950 import Coordination, at, of_region, peer_region, wait_for_all_ranks, words
from .gemm2_gfx950 import Gemm2, gemm2_tile
from .layout import LDS_SHARED_WORDS, META_WORDS, SymmetricLayout
from .stage1_gfx950 import begin_call

PHASES = ("gemm2", "combine")
MAX_COMBINE_WORKGROUPS = 64


@dataclass(frozen=True)
class Stage2:
    """Everything known when stage 2 is compiled.

    Attributes:
        layout, config: as the layer has them.
        phases: the parts of the stage in this launch; both in the fused one.
    """

    layout: SymmetricLayout
    config: MegaMoEConfig
    phases: tuple[str, ...] = PHASES

    @property
    def kernel_name(self) -> str:
        parts = "fused" if self.phases == PHASES else "_".join(self.phases)
        return kernel_name("stage2", self.config, layout=self.layout.name, parts=parts)

    @property
    def gemm(self) -> Gemm2:
        return Gemm2(self.layout, self.config)

    @property
    def coordination(self) -> Coordination:
        return Coordination(self.layout, self.config, self.config.gemm2_waves, False)

    @property
    def combine(self) -> Combine:
        return Combine(self.layout, self.config.gemm2_waves)

    @property
    def num_combine(self) -> int:
        """Workgroups that only combine."""
        multiplies_too = "gemm2" in self.phases and self.config.persist_cu > 0
        if multiplies_too or "combine" not in self.phases:
            return 0
        return min(MAX_COMBINE_WORKGROUPS, self.config.num_cu)

    def num_gemm(self, token_class: int) -> int:
        """Workgroups that multiply, enough for any routing of ``token_class`` tokens on each rank."""
        if "gemm2" not in self.phases:
            return 0
        if self.config.persist_cu:
            return self.config.persist_cu
        rows = self.layout.max_received_rows * max(token_class, 1) // self.layout.capacity
        tiles = min(rows, self.layout.experts_per_rank + rows // self.config.tile_m)
        return max(1, tiles * self.gemm.num_column_tiles)


@flyc.jit
def _compute_tile(s, call, lds, item, num_tiles, w2, w2_scales):
    layout, gemm = s.layout, s.gemm
    tile, column_tile = item // gemm.num_column_tiles, item % gemm.num_column_tiles
    meta = words(at(layout, call, "tile_meta")) + tile * META_WORDS
    expert, row, num_rows = (wave_uniform(fx.generic_load(meta + i)) for i in range(3))
    row64 = fx.Int64(row)
    gemm2_tile(
        gemm,
        lds,
        of_region(layout, call.region, "hidden") + row64 * layout.shape.inter_dim,
        of_region(layout, call.region, "hidden_row_scales") + row64 * layout.hidden_scales.row_bytes,
        of_region(layout, call.region, "row_weight") + row64 * 4,
        of_region(layout, call.region, "row_source") + row64 * 4,
        num_rows,
        w2,
        w2_scales,
        expert,
        column_tile,
        call.peers,
    )


@flyc.jit
def _draw(s, call, shared):
    """The next tile of the shared counter, for the whole workgroup."""
    if fx.thread_idx.x == 0:
        head = at(s.layout, call, "gemm2_head")
        fx.generic_store(shared, add_relaxed(head, fx.Int32(1), AGENT))
    fx.barrier()  # also between the last tile's use of LDS and the next one's
    return wave_uniform(fx.generic_load(shared))  # not written again before a tile's barriers


@flyc.jit
def _finish_tiles(s, call, num_done, num_items):
    """Counts this workgroup's tiles; whoever completes the rank's raises its flag at every rank.

    Without a tile on the rank, workgroup 0 does it: the others still wait for the flag."""
    release(SYSTEM)
    fx.barrier()
    if fx.thread_idx.x == 0:
        complete = (num_items == 0) & (fx.block_idx.x == 0)
        if num_done > 0:
            before = add_relaxed(at(s.layout, call, "gemm2_done"), num_done, AGENT)
            complete = before + num_done == num_items
        if complete:
            # Other workgroups released their rows to the counter; they come before the flags.
            acquire(SYSTEM)
            release(SYSTEM)
            for peer in fx.range_constexpr(s.layout.num_ranks):
                region = peer_region(call, fx.Int32(peer))
                flag = at(s.layout, call, "done_flag", region) + fx.Int64(call.rank) * 4
                store_relaxed(flag, call.epoch, SYSTEM)


@flyc.jit
def run_gemm2(s, call, lds, shared, num_gemm, w2, w2_scales):
    """This workgroup's share of the rank's tiles."""
    num_tiles = wave_uniform(fx.generic_load(words(at(s.layout, call, "num_tiles"))))
    num_items = num_tiles * s.gemm.num_column_tiles
    num_done = fx.Int32(0)
    if fx.const_expr(s.config.persist_cu > 0 and not s.config.persist_strided):
        # The draw opens the loop's body: at its end, its branch on thread 0 gave the loop two back edges, and
        # LLVM made an inner loop of one, in which the other lanes turned without thread 0.
        item = fx.Int32(0)
        while item < num_items:
            item = _draw(s, call, shared)
            if item < num_items:
                _compute_tile(s, call, lds, item, num_tiles, w2, w2_scales)
                num_done = num_done + 1
    else:
        for item in range(fx.block_idx.x, num_items, num_gemm):
            _compute_tile(s, call, lds, item, num_tiles, w2, w2_scales)
            num_done = num_done + 1
            fx.barrier()  # LDS is free for the next tile
    _finish_tiles(s, call, num_done, num_items)


@flyc.jit
def _leave(s, call, num_workgroups):
    """The last workgroup to leave ends the call. Its other waves may still be at work: they read the epoch
    before the barriers that lie behind, and the next launch waits for all."""
    if fx.thread_idx.x == 0:
        exits = of_region(s.layout, call.region, "exits")
        if add_relaxed(exits, fx.Int32(1), AGENT) == num_workgroups - 1:
            store_relaxed(exits, fx.Int32(0), AGENT)
            store_relaxed(of_region(s.layout, call.region, "epoch"), call.epoch, AGENT)


@flyc.jit
def _run_combine(s, call, expert_ids, out, first, count):
    wait_for_all_ranks(s.coordination, call, "done_flag")
    wire = of_region(s.layout, call.region, "wire")
    combine(s.combine, wire, expert_ids, call.num_tokens, out, first, count)


@cache
def build(s: Stage2) -> Callable[..., Any]:
    """The launcher ``(peers, rank, num_tokens, num_gemm, expert_ids, w2, w2_scales, out, stream)``.

    Tensors are passed as addresses; num_gemm is ``Stage2.num_gemm``."""
    p = s.coordination
    lds_words = (s.gemm.lds_bytes if "gemm2" in s.phases else 16) // 4

    @flyc.kernel(name=s.kernel_name, known_block_size=[p.num_threads, 1, 1])
    def stage2_kernel(
        peers: fx.Int64,
        rank: fx.Int32,
        num_tokens: fx.Int32,
        num_gemm: fx.Int32,
        expert_ids: fx.Int64,
        w2: fx.Int64,
        w2_scales: fx.Int64,
        out: fx.Int64,
    ) -> None:
        memory = fx.SharedAllocator().allocate(fx.Array[fx.Int32, lds_words + LDS_SHARED_WORDS, 16]).peek()
        lds, shared = memory.ptr, memory.ptr + lds_words
        call = begin_call(s.layout, peers, rank, num_tokens)
        if fx.const_expr(s.num_combine > 0 and "gemm2" in s.phases):
            if fx.block_idx.x < num_gemm:
                run_gemm2(s, call, lds, shared, num_gemm, w2, w2_scales)
            else:
                _run_combine(s, call, expert_ids, out, num_gemm, fx.Int32(s.num_combine))
        else:
            if fx.const_expr("gemm2" in s.phases):
                run_gemm2(s, call, lds, shared, num_gemm, w2, w2_scales)
            if fx.const_expr("combine" in s.phases):
                _run_combine(s, call, expert_ids, out, fx.Int32(0), num_gemm + s.num_combine)
        if fx.const_expr("combine" in s.phases):
            _leave(s, call, num_gemm + s.num_combine)

    @flyc.jit
    def stage2_launcher(
        peers: fx.Int64,
        rank: fx.Int32,
        num_tokens: fx.Int32,
        num_gemm: fx.Int32,
        expert_ids: fx.Int64,
        w2: fx.Int64,
        w2_scales: fx.Int64,
        out: fx.Int64,
        stream: fx.Stream,
    ) -> None:
        stage2_kernel(peers, rank, num_tokens, num_gemm, expert_ids, w2, w2_scales, out).launch(
            grid=(num_gemm + s.num_combine, 1, 1), block=p.num_threads, stream=stream
        )

    return stage2_launcher
