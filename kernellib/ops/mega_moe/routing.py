# SPDX-License-Identifier: Apache-2.0
"""Routings to test and measure with: which experts each token of each rank goes to, and with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .config import MegaMoEConfigError, MegaMoEShape

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
DROPPED = -1  # the expert id of a route that is not taken


@dataclass(frozen=True)
class Routing:
    """The routes of every rank's tokens.

    Attributes:
        name: the kind.
        expert_ids: for each rank int32 [tokens, top_k]; -1 drops the route.
        weights: for each rank fp32 [tokens, top_k]; what stands beside a dropped route is poison (NaN).
    """

    name: str
    expert_ids: tuple[I32, ...]
    weights: tuple[F32, ...]

    @property
    def tokens_per_rank(self) -> list[int]:
        return [len(ids) for ids in self.expert_ids]

    def rows_per_expert(self, num_experts: int) -> npt.NDArray[np.int64]:
        """How many routes each expert receives, over all ranks."""
        ids = np.concatenate([ids.ravel() for ids in self.expert_ids])
        return np.bincount(ids[ids >= 0], minlength=num_experts)


def _choose(rng: np.random.Generator, preference: npt.NDArray[np.float64], top_k: int) -> I32:
    """top_k distinct experts for each row of preferences (log weights), by the Gumbel-top-k trick."""
    noisy = preference + rng.gumbel(size=preference.shape)
    return np.argsort(-noisy, axis=1)[:, :top_k].astype(np.int32)


def _weights(rng: np.random.Generator, ids: I32) -> F32:
    raw = rng.uniform(0.1, 1.0, ids.shape)
    weights = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)
    return np.where(ids == DROPPED, np.float32(np.nan), weights)


def _preference(kind: str, shape: MegaMoEShape, num_ranks: int, rank: int) -> npt.NDArray[np.float64]:
    """Log preference for each expert, as seen by the tokens of ``rank``."""
    experts = np.arange(shape.num_experts)
    owner = experts // shape.experts_per_rank(num_ranks)
    match kind:
        case "hot_rank":
            preferred = owner == num_ranks - 1
        case "hot_expert":
            preferred = experts == shape.num_experts // 3
        case "mixed_skew":  # each rank has favourites of its own, some shared
            rng = np.random.default_rng(rank)
            favourites = -2.0 * np.log(1.0 + rng.permutation(shape.num_experts))
            return np.asarray(favourites + np.where(experts % 7 == 0, 2.0, 0.0), dtype=np.float64)
        case "empty_experts":  # a third of the experts, the first and last among them, get nothing
            empty = (experts % 3 == 0) | (experts == shape.num_experts - 1)
            return np.asarray(np.where(empty, -1e9, 0.0), dtype=np.float64)
        case _:
            preferred = np.zeros(shape.num_experts, np.bool_)
    return np.asarray(np.where(preferred, 30.0, 0.0), dtype=np.float64)


def _balanced_last(shape: MegaMoEShape, num_ranks: int, tokens: Sequence[int]) -> tuple[I32, ...]:
    """Round robin over all experts, so that every expert has the same rows, but for the last, which take
    what remains."""
    offsets = np.concatenate([[0], np.cumsum(tokens)])
    found = []
    for rank in range(num_ranks):
        first = (offsets[rank] + np.arange(tokens[rank]))[:, None] * shape.top_k
        found.append(((first + np.arange(shape.top_k)) % shape.num_experts).astype(np.int32))
    return tuple(found)


def _drop_some(rng: np.random.Generator, ids: I32) -> I32:
    """-1 in a third of the routes; some tokens lose all of theirs."""
    drop = rng.uniform(size=ids.shape) < 1 / 3
    drop[rng.uniform(size=len(ids)) < 1 / 8] = True
    return np.where(drop, DROPPED, ids).astype(np.int32)


KINDS = (
    "uniform",
    "hot_rank",
    "hot_expert",
    "balanced_last",
    "mixed_skew",
    "one_expert",
    "empty_experts",
    "padded",
    "ragged",
)


def make_routing(
    kind: str, shape: MegaMoEShape, num_ranks: int, tokens: int | Sequence[int], seed: int
) -> Routing:
    """A routing of the given kind, reproducible from ``seed``.

    Args:
        kind: "uniform"; "hot_rank", the last rank's experts first; "hot_expert", one expert in every
            token's list; "balanced_last", round robin; "mixed_skew", a power law of its own on each rank;
            "one_expert", one route a token, all to the same expert, the rest -1; "empty_experts", a third
            of the experts unused; "padded", random -1 routes; "ragged", rank r has 0, 1, ... tokens.
        shape: gives experts and top_k; distinct experts within a token.
        num_ranks: ranks.
        tokens: of every rank, or one for each. "ragged" takes the largest as its maximum and gives the
            first rank none, the second one, the last the maximum.
        seed: any int.

    Raises:
        MegaMoEConfigError: an unknown kind, or a wrong number of token counts.
    """
    counts = [tokens] * num_ranks if isinstance(tokens, int) else list(tokens)
    if kind not in KINDS:
        raise MegaMoEConfigError(f"kind got {kind!r}, wanted one of {', '.join(KINDS)}")
    if len(counts) != num_ranks or any(count < 0 for count in counts):
        raise MegaMoEConfigError(f"tokens got {counts}, wanted {num_ranks} counts, none negative")
    if kind == "ragged":
        counts = ragged_counts(num_ranks, max(counts))
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    if kind == "balanced_last":
        ids = _balanced_last(shape, num_ranks, counts)
    elif kind == "one_expert":
        only = int(rng.integers(shape.num_experts))
        ids = tuple(np.full((count, shape.top_k), DROPPED, np.int32) for count in counts)
        for array in ids:
            array[np.arange(len(array)), rng.integers(0, shape.top_k, len(array))] = only
    else:
        drawn = []
        for rank, count in enumerate(counts):
            preference = np.tile(_preference(kind, shape, num_ranks, rank), (count, 1))
            chosen = _choose(rng, preference, shape.top_k)
            drawn.append(_drop_some(rng, chosen) if kind == "padded" else chosen)
        ids = tuple(drawn)
    return Routing(kind, ids, tuple(_weights(rng, array) for array in ids))


def ragged_counts(num_ranks: int, maximum: int) -> list[int]:
    """[0, 1, ..., maximum], evenly spread in between."""
    if num_ranks == 1:
        return [maximum]
    counts = [round(maximum * rank / (num_ranks - 1)) for rank in range(num_ranks)]
    if num_ranks > 2:
        counts[1] = min(1, maximum)
    return counts
