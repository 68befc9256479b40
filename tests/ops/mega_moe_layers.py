# SPDX-License-Identifier: Apache-2.0
"""MegaMoE on emulated ranks, for tests: layers, calls and what became of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernellib import emulator
from kernellib.ops.mega_moe.api import MegaMoE
from kernellib.ops.mega_moe.config import MegaMoEShape
from kernellib.ops.mega_moe.reference import make_inputs
from kernellib.ops.mega_moe.routing import Routing, make_routing
from kernellib.ops.mega_moe.weights import ExpertSource, PackedWeights, pack_experts, random_experts
from kernellib.symmetric import SymmetricHeap
from kernellib.symmetric.emulated_provider import emulated_heap

SMALL = MegaMoEShape(8, 128, 128, 2)
WEIGHT_SEED = 1


@functools.cache
def experts_of(shape: MegaMoEShape) -> ExpertSource:
    return functools.cache(random_experts(shape, WEIGHT_SEED))


@functools.cache
def packed_for(shape: MegaMoEShape, num_ranks: int, rank: int) -> PackedWeights:
    count = shape.experts_per_rank(num_ranks)
    return pack_experts(shape, (experts_of(shape)(rank * count + i) for i in range(count)))


def make_layer(shape: MegaMoEShape, heap: SymmetricHeap, capacity: Any, **options: Any) -> MegaMoE:
    weights = options.pop("weights", None) or packed_for(shape, heap.num_ranks, heap.rank)
    return MegaMoE(shape, options.pop("rank", heap.rank), heap, weights, capacity, **options)


@dataclass(frozen=True)
class Case:
    """Tokens and routes of every rank, and as tensors those of one."""

    inputs: list[Any]
    routing: Routing

    def tensors(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, route_weights, expert_ids."""
        return (
            torch.from_numpy(self.inputs[rank]).bfloat16(),
            torch.from_numpy(self.routing.weights[rank]),
            torch.from_numpy(self.routing.expert_ids[rank]),
        )


def make_case(shape: MegaMoEShape, kind: str, num_ranks: int, tokens: int | Sequence[int], seed: int) -> Case:
    routing = make_routing(kind, shape, num_ranks, tokens, seed)
    return Case(make_inputs(shape, routing.tokens_per_rank, seed), routing)


def on_ranks(
    num_ranks: int, host: Callable[[SymmetricHeap], Any], num_cu: int = 2, **session: Any
) -> tuple[list[Any], list[Any]]:
    """Runs ``host(heap)`` on every rank; returns (results by rank, launch reports). A rank's exception is its
    result."""

    def guarded(rank: emulator.Rank) -> Any:
        try:
            return host(emulated_heap(rank, num_cu))
        except Exception as error:
            return error

    with emulator.emulated(**session) as active:
        return active.create_world(num_ranks).run(guarded), active.launches


def results_of(results: list[Any]) -> list[Any]:
    """The results, when no rank raised; otherwise the first error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def run_case(
    shape: MegaMoEShape, case: Case, capacity: int, num_cu: int = 2, **options: Any
) -> list[np.ndarray[Any, Any]]:
    """One call of one layer; for each rank fp32 [tokens, model_dim], every element written."""

    def host(heap: SymmetricHeap) -> Any:
        x, weights, ids = case.tensors(heap.rank)
        out = torch.full_like(x, float("nan"))
        returned = make_layer(shape, heap, capacity, **options)(x, weights, ids, out)
        assert returned is out
        return out.float().numpy()

    results, _ = on_ranks(len(case.inputs), host, num_cu)
    return results_of(results)


def assert_same_error(results: list[Any], kind: type[Exception], *texts: str) -> None:
    """Every rank raised an error of that kind with the same text, in which ``texts`` occur."""
    assert [type(result) for result in results] == [kind] * len(results), results
    assert len({str(result) for result in results}) == 1, results
    for text in texts:
        assert text in str(results[0])
