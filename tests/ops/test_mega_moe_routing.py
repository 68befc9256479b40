# SPDX-License-Identifier: Apache-2.0
"""Every routing kind has the property it is named for."""

from __future__ import annotations

import numpy as np
import pytest

from kernellib.ops.mega_moe.config import MegaMoEConfigError, MegaMoEShape
from kernellib.ops.mega_moe.routing import KINDS, Routing, make_routing, ragged_counts

SHAPE = MegaMoEShape(32, 128, 128, 4)
RANKS, TOKENS, SEED = 8, 48, 11


def routing(kind: str, tokens: int = TOKENS) -> Routing:
    return make_routing(kind, SHAPE, RANKS, tokens, SEED)


@pytest.mark.parametrize("kind", KINDS)
def test_routes_are_well_formed_and_reproducible(kind: str) -> None:
    r = routing(kind)
    again = routing(kind)
    assert len(r.expert_ids) == RANKS
    for ids, weights, other in zip(r.expert_ids, r.weights, again.expert_ids, strict=True):
        assert np.array_equal(ids, other)
        assert ids.dtype == np.int32
        assert weights.dtype == np.float32
        assert ids.shape == weights.shape == (len(ids), SHAPE.top_k)
        assert ((ids >= -1) & (ids < SHAPE.num_experts)).all()
        assert np.array_equal(np.isnan(weights), ids < 0)
        for row in ids:
            taken = row[row >= 0]
            assert len(set(taken.tolist())) == len(taken)
    assert r.rows_per_expert(SHAPE.num_experts).sum() == sum(int((ids >= 0).sum()) for ids in r.expert_ids)


def test_seeds_differ() -> None:
    other = make_routing("uniform", SHAPE, RANKS, TOKENS, SEED + 1)
    assert not np.array_equal(other.expert_ids[0], routing("uniform").expert_ids[0])


def test_skews() -> None:
    per_rank = SHAPE.num_experts // RANKS
    rows = routing("hot_rank").rows_per_expert(SHAPE.num_experts)
    assert rows[-per_rank:].sum() == rows.sum()  # top_k fits on the hot rank
    rows = routing("hot_expert").rows_per_expert(SHAPE.num_experts)
    assert rows.max() == RANKS * TOKENS
    rows = routing("mixed_skew").rows_per_expert(SHAPE.num_experts)
    assert rows.max() > 3 * rows.mean()
    rows = routing("uniform").rows_per_expert(SHAPE.num_experts)
    assert rows.max() < 2 * rows.mean()


def test_balanced_last_gives_the_remainder_to_a_prefix() -> None:
    rows = make_routing("balanced_last", SHAPE, RANKS, 5, SEED).rows_per_expert(SHAPE.num_experts)
    assert rows.max() - rows.min() <= 1
    assert (np.diff(rows) <= 0).all()


def test_one_expert_and_empty_experts() -> None:
    rows = routing("one_expert").rows_per_expert(SHAPE.num_experts)
    assert (rows > 0).sum() == 1
    assert rows.sum() == RANKS * TOKENS
    rows = routing("empty_experts").rows_per_expert(SHAPE.num_experts)
    assert rows[0] == rows[-1] == 0
    assert (rows == 0).sum() >= SHAPE.num_experts // 3


def test_padding_drops_some_routes_and_some_whole_tokens() -> None:
    ids = np.concatenate(routing("padded").expert_ids)
    dropped = ids < 0
    assert 0.2 < dropped.mean() < 0.6
    assert dropped.all(axis=1).any()
    assert (~dropped).all(axis=1).any()


def test_ragged_ranks_start_with_none_and_one() -> None:
    assert routing("ragged").tokens_per_rank == ragged_counts(RANKS, TOKENS)
    counts = ragged_counts(8, 48)
    assert counts[:2] == [0, 1]
    assert counts[-1] == 48
    assert ragged_counts(1, 5) == [5]
    assert ragged_counts(2, 5) == [0, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_at_all(kind: str) -> None:
    r = routing(kind, 0)
    assert r.tokens_per_rank == [0] * RANKS
    assert r.rows_per_expert(SHAPE.num_experts).sum() == 0


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(MegaMoEConfigError, match="kind"):
        routing("fair")
    with pytest.raises(MegaMoEConfigError, match="tokens"):
        make_routing("uniform", SHAPE, RANKS, [1, 2], SEED)
    with pytest.raises(MegaMoEConfigError, match="tokens"):
        make_routing("uniform", SHAPE, 2, [1, -2], SEED)
