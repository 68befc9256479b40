# SPDX-License-Identifier: Apache-2.0
"""Stage 1 and stage 2 on emulated ranks against the quantisation-aware oracle, which rounds where they do.

Shapes are small, the kernels are the real ones. Every output, region and padding byte is poison beforehand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from mega_moe_ranks import Call, Ranks, make_call, routed_call, small_ranks

from kernellib.emulator import emulated
from kernellib.ops.mega_moe.config import (
    ACTIVATIONS,
    BUCKETS,
    KIMI_K3,
    KIMI_K3_TABLE,
    TILE_ORDERS,
    WIRES,
    MegaMoEConfig,
    MegaMoEShape,
    generic_config,
)
from kernellib.ops.mega_moe.layout import decode_source
from kernellib.ops.mega_moe.reference import relative_l2
from kernellib.ops.mega_moe.routing import KINDS, Routing

SHAPE = MegaMoEShape(16, 256, 256, 4)
TINY = MegaMoEShape(4, 128, 128, 2)
RANKS = 8
SEED = 3
TOLERANCE = 1e-3
SMALL = MegaMoEConfig(
    tile_m=16, gemm1_tile_n=256, gemm2_tile_n=256, num_dispatch_cu=2, num_cu=4, num_queue_shards=2
)
READY = replace(SMALL, tile_order="ready", num_queue_shards=3)


def check(ranks: Ranks, *calls: Call) -> None:
    """Every rank's output of every call; nothing is left behind that the next call would trip over."""
    for number, call in enumerate(calls):
        for rank, (got, expected) in enumerate(zip(call.results(), ranks.expected(call), strict=True)):
            error = relative_l2(got, expected)
            assert error <= TOLERANCE, f"call {number}, rank {rank}: relL2 {error}, {call.routing.name}"
    for rank in range(ranks.layout.num_ranks):
        assert ranks.buffer(rank, "exits").item() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", TILE_ORDERS)
def test_every_routing_in_both_orders(kind: str, order: str) -> None:
    """Two calls back to back with different inputs, the second with fewer tokens."""
    index = KINDS.index(kind) + TILE_ORDERS.index(order)
    config = SMALL if order == "expert" else READY
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, RANKS, config, wire=WIRES[index % 2])
        calls = [routed_call(ranks, kind, tokens, SEED + tokens) for tokens in (5, 3)]
        ranks.run(*calls)
        check(ranks, *calls)


COMBINATIONS = list(itertools.product(KINDS, TILE_ORDERS, WIRES, ACTIVATIONS))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "order", "wire", "activation"), COMBINATIONS)
def test_every_combination(kind: str, order: str, wire: str, activation: str) -> None:
    config = SMALL if order == "expert" else READY
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, RANKS, config, wire=wire, activation=activation, seed=SEED + 1)
        calls = [routed_call(ranks, kind, tokens, SEED + tokens) for tokens in (4, 6)]
        ranks.run(*calls)
        check(ranks, *calls)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 50))]
)
def test_any_schedule_and_all_sanitizers(seed: int) -> None:
    """Relaxed memory, random schedules, two calls back to back: right, and nothing is found. Unwritten bytes
    of regions and buffers are poison, races are looked for in global memory and LDS."""
    kind, config = KINDS[seed % len(KINDS)], (SMALL, READY)[seed // 2 % 2]
    config = replace(config, num_cu=3, persist_cu=2 * (seed % 3), persist_strided=seed % 3 == 2)
    shape, num_ranks = (TINY, 2) if seed < 2 else (SHAPE, RANKS)
    with emulated(mode="relaxed", schedule_seed=seed, sanitize="all") as session:
        ranks = small_ranks(session, shape, num_ranks, config.scaled(shape, 3), wire=WIRES[seed % 2])
        calls = [routed_call(ranks, kind, tokens, SEED + tokens) for tokens in (3, 2)]
        ranks.run(*calls)
        check(ranks, *calls)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_asked_for_is_computed(activation: str) -> None:
    """Right against its own reference, wrong against the other's."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 2, SMALL, activation=activation)
        call = routed_call(ranks, "uniform", 5, SEED)
        ranks.run(call)
        check(ranks, call)
        ranks.activation = ACTIVATIONS[1 - ACTIVATIONS.index(activation)]
        for got, other in zip(call.results(), ranks.expected(call), strict=True):
            assert relative_l2(got, other) > 10 * TOLERANCE


def scaled_configs() -> dict[str, tuple[MegaMoEConfig, int, str]]:
    """name -> (configuration, tokens, wire): every bucket of both tables, on 4 workgroups instead of 256."""
    found: dict[str, tuple[MegaMoEConfig, int, str]] = {}
    for i, bucket in enumerate(BUCKETS):
        tokens = min(bucket, 24)
        tables = (("tuned", KIMI_K3_TABLE[bucket]), ("generic", generic_config(KIMI_K3, RANKS, bucket)))
        for j, (table, config) in enumerate(tables):
            found[f"{table}-{bucket}"] = (config.scaled(SHAPE, 4), tokens, WIRES[(i + j) % 2])
    return found


SCALED = scaled_configs()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALED)
def test_every_buckets_configuration(name: str) -> None:
    config, tokens, wire = SCALED[name]
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, RANKS, config, capacity=32, wire=wire)
        calls = [routed_call(ranks, "mixed_skew", count, SEED) for count in (tokens, max(1, tokens - 1))]
        ranks.run(*calls)
        check(ranks, *calls)


STAGE2_CONFIGS = {
    "one_each": {},
    "one_each_b2": {"b2stage": True},
    "persistent": {"persist_cu": 3},
    "persistent_b2": {"persist_cu": 3, "b2stage": True},
    "strided": {"persist_cu": 3, "persist_strided": True},
    "strided_b2": {"persist_cu": 3, "persist_strided": True, "b2stage": True},
}


@pytest.mark.parametrize("name", STAGE2_CONFIGS)
def test_every_schedule_of_stage_2(name: str) -> None:
    """Two K chunks, two column tiles, more tiles than workgroups, ragged tokens."""
    shape = MegaMoEShape(6, 256, 1024, 3)
    config = replace(SMALL, gemm1_tile_n=512, gemm2_tile_n=128, **STAGE2_CONFIGS[name])
    with emulated() as session:
        ranks = small_ranks(session, shape, 3, config, wire=WIRES[len(name) % 2])
        calls = [routed_call(ranks, "ragged", 6, SEED + i) for i in range(2)]
        ranks.run(*calls)
        check(ranks, *calls)


@pytest.mark.parametrize("tokens", [[0] * 4, [0, 0, 0, 5], [5, 0, 0, 0], [0, 1, 2, 7], [8, 8, 8, 8]])
@pytest.mark.parametrize("order", TILE_ORDERS)
def test_ranks_with_few_tokens_or_none(tokens: Sequence[int], order: str) -> None:
    """Up to the capacity of 8; then the same ranks in the opposite order."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 4, SMALL if order == "expert" else READY)
        calls = [routed_call(ranks, "uniform", counts, SEED) for counts in (tokens, tokens[::-1], [1] * 4)]
        ranks.run(*calls)
        check(ranks, *calls)


def test_one_rank_alone() -> None:
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 1, SMALL)
        calls = [routed_call(ranks, "uniform", tokens, SEED) for tokens in (8, 1)]
        ranks.run(*calls)
        check(ranks, *calls)


BACK_TO_BACK = {
    "one_each": (MegaMoEShape(12, 256, 256, 4), 3, READY, 7),
    "drawn": (TINY, 2, replace(READY, persist_cu=3).scaled(TINY, 4), 4),
    "strided": (TINY, 2, replace(SMALL, persist_cu=3, persist_strided=True).scaled(TINY, 4), 4),
}


@pytest.mark.parametrize("name", BACK_TO_BACK)
def test_many_calls_back_to_back(name: str) -> None:
    """Epochs turn over several times, so that both parities' counters are used again; inputs, routings and
    token counts differ each time, and every call's output is looked at when all have ended."""
    shape, num_ranks, config, num_calls = BACK_TO_BACK[name]
    with emulated() as session:
        ranks = small_ranks(session, shape, num_ranks, config, wire="fp8_blockwise_1x32")
        kinds = ("uniform", "hot_rank", "ragged", "padded", "one_expert", "uniform", "empty_experts")
        calls = [routed_call(ranks, kind, 1 + i, SEED + i) for i, kind in enumerate(kinds[:num_calls])]
        ranks.run(*calls)
        check(ranks, *calls)
        for rank in range(num_ranks):
            assert ranks.buffer(rank, "epoch").item() == len(calls)


def test_epochs_pass_sixteen_bits() -> None:
    """A tile's readiness holds the epoch's low 16 bits: calls across the turn."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 2, SMALL)
        for rank in range(2):
            ranks.buffer(rank, "epoch")[...] = 0xFFFE
        calls = [routed_call(ranks, "uniform", 4, SEED + i) for i in range(3)]
        ranks.run(*calls)
        check(ranks, *calls)
        assert ranks.buffer(0, "epoch").item() == 0x10001


def test_what_was_dispatched() -> None:
    """Rows lie expert-major from a tile's start; source codes and weights are those of the routing."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 4, SMALL, capacity=16)
        call = routed_call(ranks, "mixed_skew", 9, SEED)
        ranks.run(call)
        check(ranks, call)
        parity, local = 1, ranks.layout.experts_per_rank
        counts = call.routing.rows_per_expert(SHAPE.num_experts)
        seen = set()
        for owner in range(4):
            meta = ranks.buffer(owner, "tile_meta")[parity]
            tiles = int(ranks.buffer(owner, "num_tiles")[parity])
            rows = counts[owner * local : (owner + 1) * local]
            assert tiles == sum(-(-int(n) // 16) for n in rows)
            for expert, first, valid, _ in meta[:tiles]:
                assert first % 16 == 0
                for row in range(first, first + valid):
                    rank, token, slot = decode_source(int(ranks.buffer(owner, "row_source")[row]), 16)
                    assert call.routing.expert_ids[rank][token, slot] == owner * local + expert
                    weight = ranks.buffer(owner, "row_weight")[row]
                    assert weight == call.routing.weights[rank][token, slot]
                    seen.add((rank, token, slot))
        assert len(seen) == sum(ids.size for ids in call.routing.expert_ids)


def damaged(routing: Routing, places: dict[tuple[int, int, int], int]) -> Routing:
    """A routing in which some ids are replaced."""
    ids = [array.copy() for array in routing.expert_ids]
    for (rank, token, slot), value in places.items():
        ids[rank][token, slot] = value
    return replace(routing, expert_ids=tuple(ids))


BAD_IDS = {(0, 1, 2): 16, (1, 0, 0): -2, (1, 3, 1): 0x7FFFFFFF, (1, 2, 3): -(1 << 31)}


@pytest.mark.parametrize("bounds_check", [True, False])
def test_expert_ids_out_of_range(bounds_check: bool) -> None:
    """They are dropped, and counted when the check is compiled in; -1 is dropped without a word."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 2, SMALL, bounds_check=bounds_check)
        routing = routed_call(ranks, "uniform", 4, SEED).routing
        call = make_call(ranks.layout, damaged(routing, {**BAD_IDS, (0, 0, 0): -1}), SEED)
        clean = damaged(routing, dict.fromkeys((*BAD_IDS, (0, 0, 0)), -1))
        ranks.run(call)
        expected = ranks.expected(replace(call, routing=clean))
        for got, wanted in zip(call.results(), expected, strict=True):
            assert relative_l2(got, wanted) <= TOLERANCE
        errors = [ranks.buffer(rank, "errors").tolist() for rank in range(2)]
        if not bounds_check:
            assert errors == [[0] * 4] * 2
            return
        assert [error[0] for error in errors] == [1, 3]
        for rank, (_, token, slot, value) in enumerate(errors):
            assert BAD_IDS[rank, token, slot] & 0xFFFFFFFF == value


@pytest.mark.parametrize("capacity", [16, 64, 512])
def test_capacities(capacity: int) -> None:
    """The last token of the capacity is used, and offsets follow it."""
    with emulated() as session:
        ranks = small_ranks(
            session,
            MegaMoEShape(8, 128, 128, 2),
            2,
            replace(SMALL, gemm1_tile_n=128, gemm2_tile_n=128),
            capacity=capacity,
            wire="fp8_blockwise_1x32",
        )
        call = routed_call(ranks, "uniform", [capacity, 3], SEED)
        ranks.run(call)
        check(ranks, call)


def test_every_output_element_is_written_and_nothing_else() -> None:
    """One token more than a multiple of everything; unrouted tokens are zero, not poison."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 2, SMALL, capacity=64)
        call = routed_call(ranks, "padded", 33, SEED)
        ranks.run(call)
        check(ranks, call)
        unrouted = [np.all(ids == -1, axis=1) for ids in call.routing.expert_ids]
        assert any(mask.any() for mask in unrouted)
        for got, mask in zip(call.results(), unrouted, strict=True):
            assert np.all(got[mask] == 0.0)
