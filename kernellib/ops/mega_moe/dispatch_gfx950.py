# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
# ruff: noqa: SIM102 (an outer `if` decided while tracing, an inner one on the device: they cannot merge)
"""How ranks agree where rows go, and how the rows get there, for gfx950.

1. ``publish_histogram``: a rank counts its routes by expert and stores each count at the expert's owner.
2. ``plan``: the owner lays rows out expert-major, padded to the M tile, describes the tiles, and stores
   each source rank's first rows back at that rank.
3. ``dispatch``: a wave takes a route, copies row, scales, weight and source code to the owner, and counts it
   into the tile's readiness.

Every message is data, a release by each wave that wrote some, a barrier, then a flag that holds the call's
epoch; every reader waits for the flag, then acquires in each wave. Buffers alternate with the epoch's
parity, and the planner initialises the counters of its parity before anyone may touch them, so that nothing
is reset between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import MegaMoEConfig
from .device_gfx950 import (
    AGENT,
    LANES,
    SYSTEM,
    acquire,
    add_relaxed,
    lane_id,
    pointer,
    release,
    smaller,
    store_relaxed,
    wait_until_equal,
    wave_id,
    wave_uniform,
)
from .layout import META_WORDS, SOURCE_INDEX_BITS, SymmetricLayout

READY_EPOCH_SHIFT = 16  # tile_ready holds epoch << 16 | rows present
ROUTES_PER_RELEASE = 4  # rows a wave copies before it releases and counts them
WORKGROUP = fx.rocdl.SyncScope.Workgroup
COPY_BYTES = LANES * 16


@dataclass(frozen=True)
class Coordination:
    """The compile-time facts of dispatch.

    Attributes:
        layout: the symmetric buffers.
        config: tiles and workgroups.
        num_waves: waves of a workgroup.
        bounds_check: whether expert ids that are neither -1 nor an expert's are reported.
    """

    layout: SymmetricLayout
    config: MegaMoEConfig
    num_waves: int
    bounds_check: bool

    @property
    def num_threads(self) -> int:
        return self.num_waves * LANES

    @property
    def num_experts(self) -> int:
        return self.layout.shape.num_experts

    @property
    def local_experts(self) -> int:
        return self.layout.experts_per_rank


@dataclass
class Call:
    """What is the same for every workgroup of a launch; traced values.

    Attributes:
        region: this rank's symmetric region. peers: table of all ranks' regions.
        rank, epoch, parity: of this rank, of this call, of its epoch.
        num_tokens: of this rank.
    """

    region: Any
    peers: Any
    rank: Any
    epoch: Any
    parity: Any
    num_tokens: Any


def at(layout: SymmetricLayout, call: Call, name: str, region: Any = None) -> Any:
    """Address of a double-buffered buffer's half for this call, on this rank or in another's region."""
    base = call.region if region is None else region
    return base + layout.offset(name) + fx.Int64(call.parity) * layout.stride(name)


def of_region(layout: SymmetricLayout, region: Any, name: str) -> Any:
    """Address of a buffer that is not double-buffered. (A function, because a method call on a name inside a
    device branch makes the tracer carry that name as a device value.)"""
    return region + layout.offset(name)


def peer_region(call: Call, rank: Any) -> Any:
    return fx.generic_load(pointer(call.peers, fx.Int64) + rank)


def words(address: Any) -> Any:
    return pointer(address, fx.Int32)


@flyc.jit
def _raise_flags(p, call, name):
    """Stores the epoch under this rank's index in flag buffer ``name`` of every rank: the first lanes."""
    for peer in range(fx.thread_idx.x, fx.Int32(p.layout.num_ranks), p.num_threads):
        flag = at(p.layout, call, name, peer_region(call, peer)) + fx.Int64(call.rank) * 4
        store_relaxed(flag, call.epoch, SYSTEM)


@flyc.jit
def wait_for_all_ranks(p, call, name):
    """Waits until every rank has raised its flag here, then acquires in every wave."""
    for peer in range(fx.thread_idx.x, fx.Int32(p.layout.num_ranks), p.num_threads):
        wait_until_equal(at(p.layout, call, name) + fx.Int64(peer) * 4, call.epoch, SYSTEM)
    fx.barrier()
    acquire(SYSTEM)


@flyc.jit
def _report(p, call, route, expert):
    """Counts an expert id out of range, and keeps the first one's place."""
    errors = of_region(p.layout, call.region, "errors")
    if add_relaxed(errors, fx.Int32(1), AGENT) == 0:
        top_k = p.layout.shape.top_k
        for i, value in enumerate((route // top_k, route % top_k, expert)):
            fx.generic_store(words(errors) + i + 1, value)


@flyc.jit
def publish_histogram(p, call, lds, expert_ids):
    """One workgroup counts this rank's routes and stores the counts at the experts' owners."""
    thread = fx.thread_idx.x
    cursor = words(at(p.layout, call, "cursor"))
    for expert in range(thread, fx.Int32(p.num_experts), p.num_threads):
        fx.generic_store(lds + expert, fx.Int32(0))
        fx.generic_store(cursor + expert, fx.Int32(0))
    fx.barrier()
    num_routes = call.num_tokens * p.layout.shape.top_k
    for route in range(thread, num_routes, p.num_threads):
        expert = fx.generic_load(words(expert_ids) + route)
        if fx.Uint32(expert) < fx.Uint32(p.num_experts):
            fx.atomic_add(lds + expert, fx.Int32(1), syncscope=WORKGROUP)
        if fx.const_expr(p.bounds_check):
            if (expert < -1) | (expert >= p.num_experts):
                _report(p, call, route, expert)
    fx.barrier()
    for expert in range(thread, fx.Int32(p.num_experts), p.num_threads):
        owner, local = expert // p.local_experts, expert % p.local_experts
        counts = words(at(p.layout, call, "hist", peer_region(call, owner)))
        fx.generic_store(counts + call.rank * p.local_experts + local, fx.generic_load(lds + expert))
    release(SYSTEM)
    fx.barrier()
    _raise_flags(p, call, "hist_flag")


@flyc.jit
def _lay_out_experts(p, call, lds):
    """Sums each local expert's rows, finds its first tile, and stores every source rank its first row.

    LDS: rows of each local expert, then its first tile."""
    thread, ranks, tile_m = fx.thread_idx.x, p.layout.num_ranks, p.config.tile_m
    hist = words(at(p.layout, call, "hist"))
    first_tiles = lds + p.local_experts
    for expert in range(thread, fx.Int32(p.local_experts), p.num_threads):
        total = fx.Int32(0)
        for source in fx.range_constexpr(ranks):
            total = total + fx.generic_load(hist + source * p.local_experts + expert)
        fx.generic_store(lds + expert, total)
    fx.barrier()
    for expert in range(thread, fx.Int32(p.local_experts), p.num_threads):
        tile = fx.Int32(0)
        for other in range(fx.Int32(0), expert, 1):
            tile = tile + (fx.generic_load(lds + other) + (tile_m - 1)) // tile_m
        fx.generic_store(first_tiles + expert, tile)
        row = tile * tile_m
        for source in fx.range_constexpr(ranks):
            bases = words(at(p.layout, call, "row_base", peer_region(call, fx.Int32(source))))
            fx.generic_store(bases + call.rank * p.local_experts + expert, row)
            row = row + fx.generic_load(hist + source * p.local_experts + expert)
        if expert == p.local_experts - 1:
            num_tiles = tile + (fx.generic_load(lds + expert) + (tile_m - 1)) // tile_m
            fx.generic_store(words(at(p.layout, call, "num_tiles")), num_tiles)
    fx.barrier()


@flyc.jit
def _describe_tiles(p, call, lds):
    """Writes each tile's metadata and readiness (padding counts as present); clears its queue slot."""
    tile_m = p.config.tile_m
    meta = pointer(at(p.layout, call, "tile_meta"), fx.Int32, META_WORDS * 4)
    ready, queue = words(at(p.layout, call, "tile_ready")), words(at(p.layout, call, "ready_queue"))
    for expert in range(fx.Int32(0), fx.Int32(p.local_experts), 1):
        rows = fx.generic_load(lds + expert)
        first_tile = fx.generic_load(lds + p.local_experts + expert)
        num_tiles = (rows + (tile_m - 1)) // tile_m
        for i in range(fx.thread_idx.x, num_tiles, p.num_threads):
            tile = first_tile + i
            valid = smaller(rows - i * tile_m, fx.Int32(tile_m))
            entry = fx.Vector.from_elements([expert, tile * tile_m, valid, fx.Int32(0)], fx.Int32)
            fx.generic_store(meta + tile * META_WORDS, entry)
            fx.generic_store(ready + tile, (call.epoch << READY_EPOCH_SHIFT) | (fx.Int32(tile_m) - valid))
            fx.generic_store(queue + tile, fx.Int32(0))


@flyc.jit
def plan(p, call, lds):
    """One workgroup of the owner turns all ranks' counts into tiles, then tells the ranks and itself."""
    thread = fx.thread_idx.x
    wait_for_all_ranks(p, call, "hist_flag")
    _lay_out_experts(p, call, lds)
    _describe_tiles(p, call, lds)
    for shard in range(thread, fx.Int32(p.config.num_queue_shards), p.num_threads):
        fx.generic_store(words(at(p.layout, call, "gemm1_heads")) + shard, fx.Int32(0))
    if thread == 0:
        for name in ("gemm2_head", "gemm2_done", "ready_tail"):
            fx.generic_store(words(at(p.layout, call, name)), fx.Int32(0))
    release(SYSTEM)
    fx.barrier()
    _raise_flags(p, call, "base_flag")
    if thread == 0:
        store_relaxed(at(p.layout, call, "plan_flag"), call.epoch, AGENT)


@flyc.jit
def _copy_row(source, target, num_bytes, width):
    """A wave copies ``num_bytes``, ``width`` bytes a lane and turn."""
    lane = lane_id()
    for first in fx.range_constexpr(0, num_bytes, LANES * width):
        byte = lane * width + first
        if byte < num_bytes:
            value = fx.generic_load(pointer(source, fx.Int32, width) + byte // 4, count=width // 4)
            fx.generic_store(pointer(target, fx.Int32, width) + byte // 4, value)


@flyc.jit
def _send_route(p, call, codes, scales, route_weights, route, expert):
    """One wave sends one route; returns (owner's region, tile)."""
    layout = p.layout
    lane = lane_id()
    dim, scale_bytes = layout.shape.model_dim, layout.input_scales.row_bytes
    token, slot = route // layout.shape.top_k, route % layout.shape.top_k
    owner, local = expert // p.local_experts, expert % p.local_experts
    region = peer_region(call, owner)
    position = fx.Int32(0)
    if lane == 0:
        position = add_relaxed(at(layout, call, "cursor") + fx.Int64(expert) * 4, fx.Int32(1), AGENT)
    base = fx.generic_load(words(at(layout, call, "row_base")) + owner * p.local_experts + local)
    row = wave_uniform(base + position)
    row64 = fx.Int64(row)
    _copy_row(codes + fx.Int64(token) * dim, of_region(layout, region, "rows") + row64 * dim, dim, 16)
    target = of_region(layout, region, "row_scales") + row64 * scale_bytes
    _copy_row(scales + fx.Int64(token) * scale_bytes, target, scale_bytes, 4)
    row_weight = words(of_region(layout, region, "row_weight")) + row
    row_source = words(of_region(layout, region, "row_source")) + row
    source = (call.rank * layout.capacity + token) | (slot << SOURCE_INDEX_BITS)
    if lane == 0:
        fx.generic_store(row_weight, fx.generic_load(words(route_weights) + route))
        fx.generic_store(row_source, source)
    return region, row // p.config.tile_m


@flyc.jit
def _count_row(p, call, region, tile):
    """One lane counts a row into its tile; in ready order the last one queues the tile."""
    counter = at(p.layout, call, "tile_ready", region) + fx.Int64(tile) * 4
    before = add_relaxed(counter, fx.Int32(1), SYSTEM)
    if fx.const_expr(p.config.tile_order == "ready"):
        if before == ((call.epoch << READY_EPOCH_SHIFT) | (p.config.tile_m - 1)):
            # The other rows' waves released to the counter: what they wrote comes before this lane's flag.
            acquire(SYSTEM)
            release(SYSTEM)
            place = add_relaxed(at(p.layout, call, "ready_tail", region), fx.Int32(1), SYSTEM)
            entry = at(p.layout, call, "ready_queue", region) + fx.Int64(place) * 4
            store_relaxed(entry, tile + 1, SYSTEM)


@flyc.jit
def dispatch(p, call, codes, scales, route_weights, expert_ids):
    """A dispatch workgroup's waves send every num_dispatch_cu * num_waves-th route."""
    wait_for_all_ranks(p, call, "base_flag")
    lane = lane_id()
    step = p.config.num_dispatch_cu * p.num_waves
    num_routes = call.num_tokens * p.layout.shape.top_k
    first = fx.block_idx.x * p.num_waves + wave_id()
    for start in range(first, num_routes, step * ROUTES_PER_RELEASE):
        my_region, my_tile = fx.Int64(0), fx.Int32(0)  # lane i counts the i-th route
        for i in fx.range_constexpr(ROUTES_PER_RELEASE):
            route = start + i * step
            region, tile = fx.Int64(0), fx.Int32(0)
            if route < num_routes:
                expert = wave_uniform(fx.generic_load(words(expert_ids) + route))
                if fx.Uint32(expert) < fx.Uint32(p.num_experts):
                    region, tile = _send_route(p, call, codes, scales, route_weights, route, expert)
            my_region = (lane == i).select(region, my_region)
            my_tile = (lane == i).select(tile, my_tile)
        release(SYSTEM)
        if my_region != 0:
            _count_row(p, call, my_region, my_tile)
