# SPDX-License-Identifier: Apache-2.0
"""Notebook 01: the two fused launches against both oracles.

Both, always: the fp32 oracle (loose) sees a wrong formula, the quantisation-aware one (tight) sees a swapped
layout whose effect drowns in the quantisation's. An output that was never written is NaN and fails both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernellib.ops.mega_moe.api import ExpertIdError
from kernellib.ops.mega_moe.config import ACTIVATIONS, WIRES
from kernellib.ops.mega_moe.reference import relative_l2
from kernellib.ops.mega_moe.routing import KINDS
from kernellib.symmetric import SymmetricHeap

from ..artifact import Claim
from .counts import Counter
from .runs import (
    Request,
    Run,
    make_layer,
    oracles,
    rank_tensors,
    run,
    run_ranks,
    sample_rows,
    used_experts,
)
from .setup import Setup, pack_rank

TIGHT = 1e-3  # against the oracle that rounds where the kernels round
LOOSE = (0.01, 0.08)  # against fp32: quantisation must show, and must not exceed what e4m3 blocks cost
BLOCK = 32  # columns of a cell of the error map


@dataclass(frozen=True)
class Checked:
    """A run and its errors.

    Attributes:
        run: the run.
        fp32, quantized: relative L2 error over all ranks against each oracle; infinite for a failed run.
        num_unwritten: output elements that are not finite.
    """

    run: Run
    fp32: float
    quantized: float
    num_unwritten: int

    @property
    def right(self) -> bool:
        return self.quantized <= TIGHT and self.fp32 <= LOOSE[1] and self.num_unwritten == 0


def check(setup: Setup, found: Run) -> Checked:
    """Compares a run with both oracles."""
    if found.failure is not None:
        return Checked(found, float("inf"), float("inf"), 0)
    out = _sampled(found.outputs)
    unwritten = sum(int((~np.isfinite(rows)).sum()) for rows in found.outputs)
    fp32, quantized = (np.concatenate(oracle) for oracle in oracles(setup, found.request))
    return Checked(
        found,
        _finite(relative_l2(out, fp32)),
        _finite(relative_l2(out, quantized)),
        unwritten,
    )


def _sampled(outputs: Sequence[Any]) -> Any:
    return np.concatenate([rows[sample_rows(len(rows))] for rows in outputs])


def _finite(error: float) -> float:
    return error if np.isfinite(error) else float("inf")


def bucket_requests(setup: Setup) -> list[Request]:
    """Each bucket's tuned configuration; few tokens with the bf16 wire, many with fp8, as "auto" chooses."""
    return [
        Request(
            f"{bucket}",
            setup.tuned(bucket),
            setup.tokens(bucket),
            seed=setup.seed + bucket,
            wire="bf16" if bucket <= 128 else "fp8_blockwise_1x32",
        )
        for bucket in setup.buckets
    ]


def routing_requests(setup: Setup) -> list[Request]:
    """Every routing with the first bucket's configuration."""
    config, tokens = setup.tuned(setup.buckets[0]), setup.tokens(max(setup.buckets[0], 4))
    return [Request(kind, config, tokens, kind=kind, seed=setup.seed) for kind in KINDS]


def variant_requests(setup: Setup) -> list[Request]:
    """Both activations and both wire formats, one changed at a time."""
    config, tokens = setup.tuned(setup.buckets[0]), setup.tokens(max(setup.buckets[0], 4))
    base = Request("situv2, bf16", config, tokens, seed=setup.seed)
    found = [base]
    found += [replace(base, name=f"{a}, bf16", activation=a) for a in ACTIVATIONS if a != base.activation]  # type: ignore[arg-type]
    found += [replace(base, name=f"situv2, {w}", wire=w) for w in WIRES if w != base.wire]  # type: ignore[arg-type]
    return found


def run_checked(setup: Setup, requests: Sequence[Request]) -> list[Checked]:
    """Runs and checks."""
    return [check(setup, found) for found in run(setup, requests)]


@dataclass(frozen=True)
class Repeated:
    """Two calls of one layer, the second with other values.

    Attributes:
        first_kept: whether the first call's output is what it was after the second call.
        again_equal: whether the first call, repeated, gives the same bits.
        errors: relative L2 of either call against its quantisation-aware oracle.
        replayed: the same for a captured graph after its inputs changed in place; None without a GPU.
    """

    first_kept: bool
    again_equal: bool
    errors: tuple[float, float]
    replayed: float | None


def repeat_job(
    heap: SymmetricHeap, _: Counter | None, setup: Setup, requests: tuple[Request, Request]
) -> dict[str, Any]:
    """Calls on this rank, back to back with no meeting in between but the ranks' own agreement."""
    weights = pack_rank(setup, heap.rank, heap.device, used_experts(setup, requests))
    moe = make_layer(setup, requests[0], heap, weights)
    arguments = [rank_tensors(setup, request, heap) for request in requests]
    one = moe(*arguments[0])
    kept = one.clone()
    two = moe(*arguments[1])
    again = moe(*arguments[0])
    result = {
        "kept": torch.equal(one, kept),
        "again": torch.equal(one, again),
        "outs": [one.float().cpu().numpy(), two.float().cpu().numpy()],
        "replayed": None,
    }
    if heap.device.type == "cuda":
        x, route_weights, ids = (tensor.clone() for tensor in arguments[0])
        out, graph = torch.empty_like(one), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(x, route_weights, ids, out)
        for tensor, value in zip((x, route_weights, ids), arguments[1], strict=True):
            tensor.copy_(value)
        heap.barrier()
        graph.replay()
        torch.cuda.synchronize()
        result["replayed"] = out.float().cpu().numpy()
    moe.close()
    return result


def check_repeat(setup: Setup) -> Repeated:
    """One layer called again and again with other values; on a GPU also a graph replayed."""
    config, tokens = setup.tuned(setup.buckets[0]), setup.tokens(max(setup.buckets[0], 4))
    requests = tuple(Request("repeat", config, tokens, seed=setup.seed + i) for i in range(2))
    ranks = run_ranks(setup, repeat_job, requests)
    errors = []
    for index, request in enumerate(requests):
        expected = np.concatenate(oracles(setup, request)[1])
        errors.append(relative_l2(_sampled([rank["outs"][index] for rank in ranks]), expected))
    replayed = None
    if ranks[0]["replayed"] is not None:
        expected = np.concatenate(oracles(setup, requests[1])[1])
        replayed = _finite(relative_l2(_sampled([rank["replayed"] for rank in ranks]), expected))
    return Repeated(
        all(rank["kept"] for rank in ranks),
        all(rank["again"] for rank in ranks),
        (_finite(errors[0]), _finite(errors[1])),
        replayed,
    )


@dataclass(frozen=True)
class Bounds:
    """What became of a call with one id out of range on the last rank.

    Attributes:
        texts: the error's text on each rank; empty where none was raised.
        others_equal: whether every other route gave what it gives with that one dropped by -1.
    """

    texts: tuple[str, ...]
    others_equal: bool


def bounds_job(heap: SymmetricHeap, _: Counter | None, setup: Setup, request: Request) -> dict[str, Any]:
    """A call with an id out of range, then one with -1 in its place."""
    weights = pack_rank(setup, heap.rank, heap.device, used_experts(setup, [request]))
    moe = make_layer(setup, request, heap, weights)
    x, route_weights, ids = rank_tensors(setup, request, heap)
    dropped, wrong, out = ids.clone(), ids.clone(), torch.full_like(x, float("nan"))
    if heap.rank == heap.num_ranks - 1:
        dropped[-1, -1], wrong[-1, -1] = -1, setup.shape.num_experts
    text = ""
    try:
        moe(x, route_weights, wrong, out)
    except ExpertIdError as error:
        text = str(error)
    equal = torch.equal(out, moe(x, route_weights, dropped))
    moe.close()
    return {"text": text, "equal": equal}


def check_bounds(setup: Setup) -> Bounds:
    """The bounds check, compiled in, with one id out of range."""
    config, tokens = setup.tuned(setup.buckets[0]), setup.tokens(max(setup.buckets[0], 4))
    request = Request("bounds", config, tokens, seed=setup.seed, bounds_check=True)
    ranks = run_ranks(setup, bounds_job, request)
    return Bounds(tuple(rank["text"] for rank in ranks), all(rank["equal"] for rank in ranks))


def told_apart(setup: Setup, variants: Sequence[Checked]) -> float:
    """Relative L2 between what SiTUv2 gave and what the SiLU oracle wants: far from zero."""
    situ = next(found.run for found in variants if found.run.request.activation == "situv2")
    silu = oracles(setup, replace(situ.request, activation="silu"))[1]
    return relative_l2(_sampled(situ.outputs), np.concatenate(silu)) if situ.outputs else 0.0


def _all_right(name: str, found: Sequence[Checked]) -> Claim:
    worst = max(found, key=lambda entry: entry.quantized)
    wrong = [
        f"{entry.run.request.name} ({entry.run.failure or f'{entry.quantized:.2e}'})"
        for entry in found
        if not entry.right
    ]
    detail = f"largest relL2 {worst.quantized:.2e} at {worst.run.request.name}, wanted at most {TIGHT:g}"
    return Claim.check(name, not wrong, "wrong: " + ", ".join(wrong) if wrong else detail, "checked")


def correctness_claims(
    buckets: Sequence[Checked],
    routings: Sequence[Checked],
    variants: Sequence[Checked],
    apart: float,
    repeated: Repeated,
    bounds: Bounds,
) -> list[Claim]:
    """The claims of notebook 01."""
    loose = [entry.fp32 for entry in (*buckets, *variants)]
    unwritten = sum(entry.num_unwritten for entry in (*buckets, *routings, *variants))
    replay = "no GPU, no graph" if repeated.replayed is None else f"replay {repeated.replayed:.2e}"
    errors = [*repeated.errors, *([] if repeated.replayed is None else [repeated.replayed])]
    return [
        _all_right("every bucket's configuration agrees with the quantisation-aware oracle", buckets),
        _all_right("every routing agrees with the quantisation-aware oracle", routings),
        _all_right("both activations and both wire formats agree with their own oracles", variants),
        Claim.check(
            "against fp32 the error is that of quantisation",
            all(LOOSE[0] <= error <= LOOSE[1] for error in loose),
            f"relL2 {min(loose):.3f} to {max(loose):.3f}, wanted {LOOSE[0]:g} to {LOOSE[1]:g}",
            "checked",
        ),
        Claim.check(
            "every output element is written",
            unwritten == 0,
            f"{unwritten} elements unwritten or not finite, wanted 0",
            "checked",
        ),
        Claim.check(
            "SiTUv2 is not SiLU",
            apart > 10 * TIGHT,
            f"relL2 {apart:.3g} between the kernel's SiTUv2 and SiLU's oracle, wanted above {10 * TIGHT:g}",
            "checked",
        ),
        Claim.check(
            "calls follow their own inputs and leave earlier outputs alone",
            repeated.first_kept and repeated.again_equal and all(error <= TIGHT for error in errors),
            f"first output kept: {repeated.first_kept}; repeated call bit-equal: {repeated.again_equal}; "
            f"relL2 {repeated.errors[0]:.2e}, {repeated.errors[1]:.2e}; {replay}",
            "checked",
        ),
        Claim.check(
            "an expert id out of range is reported on every rank, and only its route is dropped",
            all(bounds.texts) and len(set(bounds.texts)) == 1 and bounds.others_equal,
            bounds.texts[0] or "nothing was reported",
            "checked",
        ),
    ]
