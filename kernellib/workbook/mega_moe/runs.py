# SPDX-License-Identifier: Apache-2.0
"""Runs of the layer on all ranks: threads of an emulated world, or one process for each MI355X.

The function that a rank runs is the same on both; only the heap differs.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kernellib.ops.mega_moe.api import MegaMoE
from kernellib.ops.mega_moe.config import Activation, MegaMoEConfig, Wire
from kernellib.ops.mega_moe.reference import make_inputs, oracle_fp32, oracle_quantized
from kernellib.ops.mega_moe.routing import Routing, make_routing
from kernellib.ops.mega_moe.serial import serial_baseline
from kernellib.symmetric import SymmetricHeap

from .counts import Counter, Counts, rank_counters, total
from .setup import Setup, experts_of, pack_rank

F32 = npt.NDArray[np.float32]
Arm = Literal["fused", "serial"]
ORACLE_TOKENS = 4  # of a rank; the others are looked at for values that were never written


class RankFailedError(RuntimeError):
    """A rank's process ended with an error; the text is its traceback."""


@dataclass(frozen=True)
class Request:
    """One call of all ranks.

    Attributes:
        name: for tables.
        config: how the kernels divide the work.
        tokens: of each rank ("ragged" routings take it as the largest).
        kind: of routing.
        seed: of tokens and routes.
        activation, wire, bounds_check: as the layer has them.
        arm: the fused layer or the serial baseline.
    """

    name: str
    config: MegaMoEConfig
    tokens: int
    kind: str = "uniform"
    seed: int = 0
    activation: Activation = "situv2"
    wire: Wire = "bf16"
    bounds_check: bool = False
    arm: Arm = "fused"


@dataclass(frozen=True)
class Run:
    """What came of a request.

    Attributes:
        request: the request.
        outputs: fp32 [tokens, model_dim] of each rank; what was never written is NaN.
        counts: on the emulator, when asked for.
        failure: the error of the first rank that raised, when one did; then there are no outputs.
    """

    request: Request
    outputs: list[F32] = field(repr=False)
    counts: Counts | None = None
    failure: str | None = None


def routing_of(setup: Setup, request: Request) -> Routing:
    """The routes of a request."""
    return make_routing(request.kind, setup.shape, setup.num_ranks, request.tokens, request.seed)


def sample_rows(num_tokens: int) -> npt.NDArray[np.int64]:
    """The tokens of a rank that oracles are computed for: all of a few, a few of many."""
    count = min(num_tokens, ORACLE_TOKENS)
    return np.unique(np.linspace(0, max(num_tokens - 1, 0), count).astype(np.int64))


@lru_cache(maxsize=64)
def oracles(setup: Setup, request: Request) -> tuple[list[F32], list[F32]]:
    """(fp32 oracle, quantisation-aware oracle) of a request, for each rank: rows ``sample_rows``."""
    whole = routing_of(setup, request)
    rows = [sample_rows(count) for count in whole.tokens_per_rank]
    inputs = make_inputs(setup.shape, whole.tokens_per_rank, request.seed)
    routing = Routing(
        whole.name,
        tuple(ids[chosen] for ids, chosen in zip(whole.expert_ids, rows, strict=True)),
        tuple(weights[chosen] for weights, chosen in zip(whole.weights, rows, strict=True)),
    )
    sampled = [part[chosen] for part, chosen in zip(inputs, rows, strict=True)]
    experts = experts_of(setup.shape)
    return (
        oracle_fp32(setup.shape, sampled, routing, experts, request.activation),
        oracle_quantized(setup.shape, sampled, routing, experts, request.activation, request.wire),
    )


# --------------------------------------------------------------------------------------- on a rank


def rank_tensors(
    setup: Setup, request: Request, heap: SymmetricHeap
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, route_weights, expert_ids of this rank."""
    routing, rank = routing_of(setup, request), heap.rank
    inputs = make_inputs(setup.shape, routing.tokens_per_rank, request.seed)
    arrays = (inputs[rank], routing.weights[rank], routing.expert_ids[rank])
    x, weights, ids = (torch.from_numpy(array).to(heap.device) for array in arrays)
    return x.bfloat16(), weights, ids


def make_layer(setup: Setup, request: Request, heap: SymmetricHeap, weights: Any) -> MegaMoE:
    """This rank's layer for a request."""
    return MegaMoE(
        setup.shape,
        heap.rank,
        heap,
        weights,
        setup.capacity,
        config=request.config,
        activation=request.activation,
        wire=request.wire,
        bounds_check=request.bounds_check,
    )


def used_experts(setup: Setup, requests: Sequence[Request]) -> frozenset[int]:
    """Experts that any of the requests sends a row to."""
    ids = np.concatenate(
        [ids.ravel() for request in requests for ids in routing_of(setup, request).expert_ids]
    )
    return frozenset(int(expert) for expert in np.unique(ids) if expert >= 0)


def _one(
    setup: Setup, request: Request, heap: SymmetricHeap, weights: Any, counter: Counter | None
) -> dict[str, Any]:
    moe = make_layer(setup, request, heap, weights)
    call = moe if request.arm == "fused" else serial_baseline(moe)
    x, route_weights, ids = rank_tensors(setup, request, heap)
    out = torch.full_like(x, float("nan"))
    counters = None
    if counter is None:
        call(x, route_weights, ids, out)
    else:
        addresses = heap.exchange("regions", moe.region_range())
        _, counters = counter.count(
            addresses, heap.rank, heap.barrier, lambda: call(x, route_weights, ids, out)
        )
    result = {"out": out.float().cpu().numpy(), "counters": counters, "tiles": moe.tile_rows()}
    moe.close()
    return result


def forward_job(
    heap: SymmetricHeap, counter: Counter | None, setup: Setup, requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Every request in turn on this rank; an error of one, which all ranks share, does not stop the rest."""
    weights = pack_rank(setup, heap.rank, heap.device, used_experts(setup, requests))
    found: list[dict[str, Any]] = []
    for request in requests:
        try:
            found.append(_one(setup, request, heap, weights, counter))
        except ValueError as error:  # contract, configuration: raised alike on every rank
            found.append({"failure": f"{type(error).__name__}: {error}"})
    return found


# -------------------------------------------------------------------------------------- all ranks

Job = Callable[..., Any]


def run_ranks(setup: Setup, job: Job, *arguments: Any, count: bool = False) -> list[Any]:
    """``job(heap, counter, setup, *arguments)`` on every rank; returns the results by rank.

    Args:
        setup: decides where.
        job: a module's own function; the counter is None unless counting.
        arguments: anything that pickles.
        count: whether to count, on the emulator.

    Raises:
        RankFailedError: a process failed. On the emulator a rank's own error is raised.
    """
    if setup.is_emulated:
        return _run_emulated(setup, job, arguments, count)
    return _run_processes(setup, job, arguments)


def _run_emulated(setup: Setup, job: Job, arguments: tuple[Any, ...], count: bool) -> list[Any]:
    from kernellib.emulator import Rank, emulated  # noqa: PLC0415  (only where it is used)
    from kernellib.symmetric.emulated_provider import emulated_heap  # noqa: PLC0415

    with emulated() as session:
        make_counter = rank_counters(session)

        def host(rank: Rank) -> Any:
            heap = emulated_heap(rank, setup.num_cu)
            return job(heap, make_counter() if count else None, setup, *arguments)

        found: list[Any] = session.create_world(setup.num_ranks).run(host)
        return found


def _run_processes(setup: Setup, job: Job, arguments: tuple[Any, ...]) -> list[Any]:
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_process, args=(rank, port, setup, job, arguments, results))
        for rank in range(setup.num_ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, result, failure = results.get()
            if failure is not None:
                raise RankFailedError(f"rank {rank}:\n{failure}")
            found[rank] = result
    finally:
        for process in processes:
            process.join(timeout=30 if len(found) == len(processes) else 1)
            if process.is_alive():
                process.terminate()
    return [found[rank] for rank in range(setup.num_ranks)]


def _process(
    rank: int, port: int, setup: Setup, job: Job, arguments: tuple[Any, ...], results: Any
) -> None:  # pragma: no cover  (one GPU for each process)
    import torch.distributed as dist  # noqa: PLC0415

    from kernellib.symmetric.mori_provider import mori_heap  # noqa: PLC0415

    try:
        torch.cuda.set_device(rank)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=setup.num_ranks)
        with mori_heap() as heap:
            result = job(heap, None, setup, *arguments)
        dist.destroy_process_group()
        results.put((rank, result, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run(setup: Setup, requests: Sequence[Request], *, count: bool = False) -> list[Run]:
    """Every request on all ranks, in one world.

    Args:
        count: whether to count what each does; only the emulator can.
    """
    by_rank = run_ranks(setup, forward_job, tuple(requests), count=count and setup.is_emulated)
    runs = []
    for index, request in enumerate(requests):
        found = [results[index] for results in by_rank]
        failure = next((result["failure"] for result in found if "failure" in result), None)
        if failure is not None:
            runs.append(Run(request, [], None, failure))
            continue
        counts = None
        if found[0]["counters"] is not None:
            tiles = [result["tiles"] for result in found]
            counts = total([result["counters"] for result in found], tiles, request.config.tile_m)
        runs.append(Run(request, [result["out"] for result in found], counts))
    return runs
