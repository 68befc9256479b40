# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
# ruff: noqa: SIM102 (an outer `if` decided while tracing, an inner one on the device: they cannot merge)
"""Stage 1 for gfx950: planner, dispatch and GEMM1 in one persistent launch.

All ``num_cu`` workgroups are resident together. Workgroup 0 publishes the histogram and plans; the first
``num_dispatch_cu`` dispatch; then every workgroup draws GEMM1 tiles until there are none. A tile is taken
only after its rows have arrived: the wait for its readiness and the acquire come before its metadata or rows
are read, whether tiles are taken in the planner's order or in the order in which they became ready.

``phases`` cuts the same code into separate launches, which the serial baseline runs one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import Activation, MegaMoEConfig, kernel_name
from .device_gfx950 import (
    AGENT,
    SYSTEM,
    acquire,
    add_relaxed,
    load_relaxed,
    pointer,
    wait_until_equal,
    wave_uniform,
)
from .dispatch_gfx950 import (
    READY_EPOCH_SHIFT,
    Call,
    Coordination,
    at,
    dispatch,
    of_region,
    plan,
    publish_histogram,
    words,
)
from .gemm1_gfx950 import Gemm1, gemm1_tile
from .layout import LDS_SHARED_WORDS, META_WORDS, LdsLayout, SymmetricLayout

PHASES = ("histogram", "plan", "dispatch", "gemm1")


@dataclass(frozen=True)
class Stage1:
    """Everything known when stage 1 is compiled.

    Attributes:
        layout, config, activation, bounds_check: as the layer has them.
        phases: the parts of the stage in this launch; all of them in the fused one.
    """

    layout: SymmetricLayout
    config: MegaMoEConfig
    activation: Activation
    bounds_check: bool = False
    phases: tuple[str, ...] = PHASES

    @property
    def kernel_name(self) -> str:
        shape = self.layout.shape
        parts = "fused" if self.phases == PHASES else "_".join(self.phases)
        betas = f"{shape.situ_beta}b{shape.situ_linear_beta}" if self.activation == "situv2" else "none"
        return kernel_name(
            "stage1",
            self.config,
            layout=self.layout.name,
            act=self.activation,
            betas=betas,
            check=int(self.bounds_check),
            parts=parts,
        )

    @property
    def gemm(self) -> Gemm1:
        return Gemm1(self.layout.shape, self.config, self.activation)

    @property
    def coordination(self) -> Coordination:
        return Coordination(self.layout, self.config, self.config.gemm1_waves, self.bounds_check)

    @property
    def num_workgroups(self) -> int:
        if "gemm1" in self.phases:
            return self.config.num_cu
        return self.config.num_dispatch_cu if "dispatch" in self.phases else 1

    @property
    def work_bytes(self) -> int:
        """LDS that planner and GEMM use in turn."""
        lds = LdsLayout(self.layout.shape, self.config, self.layout.wire, self.layout.num_ranks)
        return max(
            lds.planner_bytes if {"histogram", "plan"} & set(self.phases) else 16,
            lds.gemm1_bytes if "gemm1" in self.phases else 16,
        )


@flyc.jit
def _wait_for_entry(address):
    """Spins until a queue slot is filled; returns tile + 1."""
    entry = load_relaxed(address, SYSTEM)
    while entry == 0:
        fx.rocdl.s_sleep(1)
        entry = load_relaxed(address, SYSTEM)
    return entry


@flyc.jit
def _await_tile(s, call, shared, place):
    """The tile at ``place`` of the order, once its rows are here and visible to every wave."""
    tile = place
    if fx.const_expr(s.config.tile_order == "ready"):
        if fx.thread_idx.x == 0:
            entry = _wait_for_entry(at(s.layout, call, "ready_queue") + fx.Int64(place) * 4)
            fx.generic_store(shared + 1, entry - 1)
        fx.barrier()
        tile = wave_uniform(fx.generic_load(shared + 1))
    else:
        if fx.thread_idx.x == 0:
            full = (call.epoch << READY_EPOCH_SHIFT) | s.config.tile_m
            wait_until_equal(at(s.layout, call, "tile_ready") + fx.Int64(place) * 4, full, SYSTEM)
        fx.barrier()
    acquire(SYSTEM)
    return tile


@flyc.jit
def _compute_tile(s, call, lds, shared, item, w1, w1_scales):
    gemm = s.gemm
    layout, shape = s.layout, s.layout.shape
    tile = _await_tile(s, call, shared, item // gemm.num_column_tiles)
    meta = words(at(layout, call, "tile_meta")) + tile * META_WORDS
    expert, row, num_rows = (wave_uniform(fx.generic_load(meta + i)) for i in range(3))
    row64 = fx.Int64(row)
    gemm1_tile(
        gemm,
        lds,
        of_region(layout, call.region, "rows") + row64 * shape.model_dim,
        of_region(layout, call.region, "row_scales") + row64 * layout.input_scales.row_bytes,
        num_rows,
        w1,
        w1_scales,
        expert,
        item % gemm.num_column_tiles,
        of_region(layout, call.region, "hidden") + row64 * shape.inter_dim,
        of_region(layout, call.region, "hidden_row_scales") + row64 * layout.hidden_scales.row_bytes,
    )


@flyc.jit
def run_gemm1(s, call, lds, shared, w1, w1_scales):
    """Draws tiles until every shard of the queue is empty, the workgroup's own shard first."""
    shards = s.config.num_queue_shards
    if fx.thread_idx.x == 0:
        wait_until_equal(at(s.layout, call, "plan_flag"), call.epoch, AGENT)
    fx.barrier()
    acquire(AGENT)
    num_tiles = wave_uniform(fx.generic_load(words(at(s.layout, call, "num_tiles"))))
    num_items = num_tiles * s.gemm.num_column_tiles
    turn = fx.Int32(0)
    while turn < shards:
        shard = (fx.block_idx.x + turn) % shards
        if fx.thread_idx.x == 0:
            head = at(s.layout, call, "gemm1_heads") + fx.Int64(shard) * 4
            fx.generic_store(shared, add_relaxed(head, fx.Int32(1), AGENT))
        fx.barrier()
        item = wave_uniform(fx.generic_load(shared)) * shards + shard
        fx.barrier()
        if item < num_items:
            _compute_tile(s, call, lds, shared, item, w1, w1_scales)
        else:
            turn = turn + 1


def begin_call(layout: SymmetricLayout, peers: Any, rank: Any, num_tokens: Any) -> Call:
    """Reads this rank's region and the call's epoch: one more than that of the last call that ended."""
    region = fx.generic_load(pointer(peers, fx.Int64) + rank)
    epoch = wave_uniform(load_relaxed(of_region(layout, region, "epoch"), AGENT) + 1)
    return Call(region, peers, rank, epoch, epoch & 1, num_tokens)


@cache
def build(s: Stage1) -> Callable[..., Any]:
    """The launcher ``(peers, rank, num_tokens, codes, scales, route_weights, expert_ids, w1, w1_scales,
    stream)``; tensors as addresses, peers the table of all ranks' regions."""
    p = s.coordination

    @flyc.kernel(name=s.kernel_name, known_block_size=[p.num_threads, 1, 1])
    def stage1_kernel(
        peers: fx.Int64,
        rank: fx.Int32,
        num_tokens: fx.Int32,
        codes: fx.Int64,
        scales: fx.Int64,
        route_weights: fx.Int64,
        expert_ids: fx.Int64,
        w1: fx.Int64,
        w1_scales: fx.Int64,
    ) -> None:
        memory = (
            fx.SharedAllocator().allocate(fx.Array[fx.Int32, s.work_bytes // 4 + LDS_SHARED_WORDS, 16]).peek()
        )
        lds, shared = memory.ptr, memory.ptr + s.work_bytes // 4
        call = begin_call(s.layout, peers, rank, num_tokens)
        if fx.const_expr("histogram" in s.phases):
            if fx.block_idx.x == 0:
                publish_histogram(p, call, lds, expert_ids)
        if fx.const_expr("plan" in s.phases):
            if fx.block_idx.x == 0:
                plan(p, call, lds)
        if fx.const_expr("dispatch" in s.phases):
            if fx.block_idx.x < s.config.num_dispatch_cu:
                dispatch(p, call, codes, scales, route_weights, expert_ids)
        if fx.const_expr("gemm1" in s.phases):
            run_gemm1(s, call, lds, shared, w1, w1_scales)

    @flyc.jit
    def stage1_launcher(
        peers: fx.Int64,
        rank: fx.Int32,
        num_tokens: fx.Int32,
        codes: fx.Int64,
        scales: fx.Int64,
        route_weights: fx.Int64,
        expert_ids: fx.Int64,
        w1: fx.Int64,
        w1_scales: fx.Int64,
        stream: fx.Stream,
    ) -> None:
        stage1_kernel(
            peers, rank, num_tokens, codes, scales, route_weights, expert_ids, w1, w1_scales
        ).launch(grid=(s.num_workgroups, 1, 1), block=p.num_threads, stream=stream)

    return stage1_launcher
