# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's real shape on eight emulated ranks, one token each, through the kernels of the tuned table."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from mega_moe_ranks import Ranks, make_call

from kernellib.emulator import emulated
from kernellib.ops.mega_moe.config import KIMI_K3, select_config
from kernellib.ops.mega_moe.layout import SymmetricLayout
from kernellib.ops.mega_moe.reference import oracle_fp32, relative_l2
from kernellib.ops.mega_moe.routing import Routing, make_routing
from kernellib.ops.mega_moe.weights import ExpertSource, PackedWeights, matrix_layouts, random_experts

RANKS = 8
SEED = 123


def routed_weights(experts: ExpertSource, routing: Routing, rank: int) -> PackedWeights:
    """A rank's weights, only the experts that get a row filled in: the others' pages are never touched."""
    first, second = matrix_layouts(KIMI_K3)
    local = KIMI_K3.experts_per_rank(RANKS)
    each = (first.element_bytes, first.scale_bytes, second.element_bytes, second.scale_bytes)
    tensors = [torch.empty(size * local, dtype=torch.uint8) for size in each]
    counts = routing.rows_per_expert(KIMI_K3.num_experts)
    for index in np.flatnonzero(counts[rank * local : (rank + 1) * local]).tolist():
        expert = experts(rank * local + index)
        packed = (*first.pack(expert.w1, expert.w1_scales), *second.pack(expert.w2, expert.w2_scales))
        for tensor, size, part in zip(tensors, each, packed, strict=True):
            tensor[index * size : (index + 1) * size] = torch.from_numpy(part)
    return PackedWeights(KIMI_K3, local, *tensors)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_token_a_rank() -> None:
    """relL2 between 0.03 and 0.06 against fp32, which has no rounding of activations; at most 1e-3 against
    the oracle that has."""
    experts = random_experts(KIMI_K3, SEED)
    routing = make_routing("uniform", KIMI_K3, RANKS, 1, SEED)
    layout = SymmetricLayout(KIMI_K3, RANKS, 1, "bf16")
    started = time.perf_counter()
    packed = [routed_weights(experts, routing, rank) for rank in range(RANKS)]
    print(f"weights {time.perf_counter() - started:.0f} s", flush=True)
    with emulated(sanitize="none") as session:
        ranks = Ranks(session, layout, select_config(KIMI_K3, RANKS, 1), experts, packed=packed)
        call = make_call(layout, routing, SEED)
        started = time.perf_counter()
        ranks.run(call)
        print(f"kernels {time.perf_counter() - started:.0f} s", flush=True)
        for launch in session.launches:
            print(f"{launch.kernel_name[:16]}: {launch.seconds:.1f} s, {launch.num_waves} waves")
    got, started = np.concatenate(call.results()), time.perf_counter()
    tight = relative_l2(got, np.concatenate(ranks.expected(call)))
    loose = relative_l2(got, np.concatenate(oracle_fp32(KIMI_K3, call.inputs, routing, experts)))
    print(f"oracles {time.perf_counter() - started:.0f} s; relL2 {tight:.2e} quantised, {loose:.4f} fp32")
    assert tight <= 1e-3
    assert 0.03 <= loose <= 0.06
