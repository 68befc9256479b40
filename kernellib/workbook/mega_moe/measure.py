# SPDX-License-Identifier: Apache-2.0
"""Paired timing of two arms on all ranks, on GPUs only: AB, BA, ..., with an A/A control.

Each rank captures each arm in a graph and times replays with device events, after a barrier; the time of a
trial is the slowest rank's. Inputs change between trials, in place. Kimi-K3's weights are 2 GB a rank, more
than any cache. Nothing here runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernellib.bench.device import EVENT_RESOLUTION_S
from kernellib.bench.stats import Interval, bootstrap_median, slowest_rank
from kernellib.ops.mega_moe.serial import serial_baseline
from kernellib.symmetric import SymmetricHeap

from .counts import Counter
from .runs import Request, make_layer, rank_tensors, run_ranks, used_experts
from .setup import Setup, pack_rank

REPLAYS = 10  # of the graph in a sample
VARIANTS = 3  # sets of inputs that trials rotate over
ARMS = ("baseline", "tested", "control")

# Turns a call into a function that runs it REPLAYS times and returns seconds for one.
Timer = Callable[[Callable[[], Any], SymmetricHeap], Callable[[], float]]


@dataclass(frozen=True)
class Timing:
    """Two arms, timed.

    Attributes:
        samples_s: seconds of each trial, slowest rank, by arm: "baseline", "tested", "control".
        ratio: baseline / tested; above 1 the tested arm is faster.
        control: baseline / a second capture of the baseline: must contain 1.
    """

    samples_s: dict[str, list[float]]
    ratio: Interval
    control: Interval

    @property
    def valid(self) -> bool:
        return self.control.contains_one

    @property
    def verdict(self) -> str:
        return self.ratio.verdict if self.valid else "invalid: the control differs from itself"


def graph_timer(
    call: Callable[[], Any], heap: SymmetricHeap
) -> Callable[[], float]:  # pragma: no cover  (needs a GPU)
    """Captures ``call``; a sample is the mean of REPLAYS replays between two events."""
    call()
    heap.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def sample() -> float:
        heap.barrier()
        graph.replay()  # untimed: clocks up, ranks together
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / REPLAYS

    return sample


def time_job(
    heap: SymmetricHeap,
    _: Counter | None,
    setup: Setup,
    baseline: Request,
    tested: Request,
    trials: int,
    timer: Timer,
) -> dict[str, list[float]]:
    """This rank's seconds, by arm."""
    weights = pack_rank(setup, heap.rank, heap.device, used_experts(setup, [baseline, tested]))
    variants = [
        rank_tensors(setup, Request("", baseline.config, baseline.tokens, baseline.kind, seed), heap)
        for seed in range(baseline.seed, baseline.seed + VARIANTS)
    ]
    x, route_weights, ids = (tensor.clone() for tensor in variants[0])
    out = torch.empty_like(x)
    samplers, layers = {}, []
    for arm, request in zip(ARMS, (baseline, tested, baseline), strict=True):
        moe = make_layer(setup, request, heap, weights)
        call = moe if request.arm == "fused" else serial_baseline(moe)
        layers.append(moe)

        def step(call: Callable[..., Any] = call) -> Any:
            return call(x, route_weights, ids, out)

        samplers[arm] = timer(step, heap)
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for trial in range(trials):
        for tensor, value in zip((x, route_weights, ids), variants[trial % VARIANTS], strict=True):
            tensor.copy_(value)
        for arm in ARMS if trial % 2 == 0 else ARMS[::-1]:
            samples[arm].append(samplers[arm]())
    for moe in layers:
        moe.close()
    return samples


def measure(
    setup: Setup, baseline: Request, tested: Request, *, trials: int, timer: Timer | None = None
) -> Timing | None:
    """Times two arms on all ranks; None on the emulator, where nothing can be timed.

    Args:
        setup: where.
        baseline, tested: the arms; the same tokens and routes. Both must have been checked before.
        trials: alternating paired trials.
        timer: of tests; None for graphs and device events.
    """
    if setup.is_emulated and timer is None:
        return None
    by_rank = run_ranks(setup, time_job, baseline, tested, trials, timer or graph_timer)
    return summarise(by_rank)


def summarise(by_rank: Sequence[dict[str, list[float]]]) -> Timing:
    """The slowest rank of each trial, and the paired ratios."""
    samples = {
        arm: [slowest_rank(times) for times in zip(*(rank[arm] for rank in by_rank), strict=True)]
        for arm in ARMS
    }
    return Timing(samples, _ratio(samples, "tested"), _ratio(samples, "control"))


def _ratio(samples: dict[str, list[float]], arm: str) -> Interval:
    """Median and interval of baseline / arm over trials, widened by what the timer cannot resolve."""
    pairs = list(zip(samples["baseline"], samples[arm], strict=True))
    found = bootstrap_median([baseline / tested for baseline, tested in pairs])
    blur = EVENT_RESOLUTION_S / REPLAYS / min(min(pair) for pair in pairs)
    return Interval(found.median, found.low * (1 - blur), found.high * (1 + blur), found.confidence)
