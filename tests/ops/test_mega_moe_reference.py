# SPDX-License-Identifier: Apache-2.0
"""The references against a token-by-token loop in float64, and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernellib.numerics import mx
from kernellib.ops.mega_moe.config import MegaMoEConfigError, MegaMoEShape
from kernellib.ops.mega_moe.reference import (
    activate,
    make_inputs,
    oracle_fp32,
    oracle_quantized,
    relative_l2,
    silu,
    situv2,
)
from kernellib.ops.mega_moe.routing import KINDS, make_routing
from kernellib.ops.mega_moe.weights import bf16, random_experts

SHAPE = MegaMoEShape(16, 256, 128, 4)
RANKS, SEED = 8, 3
EXPERTS = random_experts(SHAPE, SEED)
print(f"seed {SEED}")


def loop(inputs: list, routing, activation: str, quantized: bool, wire: str) -> list:
    """The layer as its formula reads, one route at a time, in float64."""

    def q(values: np.ndarray) -> np.ndarray:
        if not quantized:
            return values
        return mx.quantize(values.astype(np.float32), mx.E4M3).dequantize().astype(np.float64)

    results = []
    for x, ids, weights in zip(inputs, routing.expert_ids, routing.weights, strict=True):
        out = np.zeros((len(x), SHAPE.model_dim))
        for token in range(len(x)):
            for slot in range(SHAPE.top_k):
                if ids[token, slot] < 0:
                    continue
                w1, w2 = (w.astype(np.float64) for w in EXPERTS(int(ids[token, slot])).dequantized())
                g, u = np.split(w1 @ q(x[token].astype(np.float64)), 2)
                sigmoid = 1 / (1 + np.exp(-g))
                if activation == "situv2":
                    h = 4 * np.tanh(g / 4) * sigmoid * (25 * np.tanh(u / 25))
                else:
                    h = g * sigmoid * u
                row = (w2 @ q(h)) * float(weights[token, slot])
                if quantized:
                    row = q(row) if wire != "bf16" else bf16(row).astype(np.float64)
                out[token] += row
        results.append(bf16(out) if quantized else out)
    return results


@pytest.mark.parametrize("activation", ["situv2", "silu"])
def test_fp32_oracle_is_the_formula(activation: str) -> None:
    routing = make_routing("padded", SHAPE, RANKS, 2, SEED)
    inputs = make_inputs(SHAPE, routing.tokens_per_rank, SEED)
    got = oracle_fp32(SHAPE, inputs, routing, EXPERTS, activation)  # type: ignore[arg-type]
    wanted = loop(inputs, routing, activation, False, "bf16")
    assert relative_l2(np.concatenate(got), np.concatenate(wanted)) < 2e-6


@pytest.mark.parametrize("wire", ["bf16", "fp8_blockwise_1x32"])
def test_quantized_oracle_rounds_where_the_kernels_do(wire: str) -> None:
    routing = make_routing("uniform", SHAPE, RANKS, 2, SEED)
    inputs = make_inputs(SHAPE, routing.tokens_per_rank, SEED)
    got = np.concatenate(oracle_quantized(SHAPE, inputs, routing, EXPERTS, "situv2", wire))  # type: ignore[arg-type]
    wanted = np.concatenate(loop(inputs, routing, "situv2", True, wire))
    assert relative_l2(got, wanted) < 5e-4
    assert (got == wanted).mean() > 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_references_are_a_quantisation_apart(kind: str) -> None:
    routing = make_routing(kind, SHAPE, RANKS, 3, SEED)
    inputs = make_inputs(SHAPE, routing.tokens_per_rank, SEED)
    exact = np.concatenate(oracle_fp32(SHAPE, inputs, routing, EXPERTS))
    rounded = np.concatenate(oracle_quantized(SHAPE, inputs, routing, EXPERTS))
    assert np.isfinite(rounded).all()  # the NaN weights of dropped routes are not used
    assert 0.02 < relative_l2(rounded, exact) < 0.08
    none = np.concatenate(routing.expert_ids).max(axis=1, initial=-1) < 0
    assert (exact[none] == 0).all()
    assert (rounded[none] == 0).all()


def test_fault_3_activations_are_far_apart() -> None:
    routing = make_routing("uniform", SHAPE, RANKS, 2, SEED)
    inputs = make_inputs(SHAPE, routing.tokens_per_rank, SEED)
    one, other = (
        np.concatenate(oracle_quantized(SHAPE, inputs, routing, EXPERTS, a)) for a in ("situv2", "silu")
    )
    assert relative_l2(one, other) > 0.02


def test_situv2_saturates_where_silu_grows() -> None:
    g, u = np.float32([0.0, 1.0, 100.0, -100.0]), np.float32([3.0, 2.0, 1000.0, -1000.0])
    expected = [
        4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(b / 25) for a, b in zip(g, u, strict=True)
    ]
    assert np.allclose(situv2(g, u), expected, rtol=1e-6, atol=1e-30)
    assert situv2(g, u)[2] == pytest.approx(100.0)
    assert silu(g, u)[2] == pytest.approx(1e5)
    assert np.isfinite(situv2(np.float32([3e38, -3e38]), np.float32([3e38, -3e38]))).all()


def test_fault_28_the_ranks_sum_is_the_single_rank_result() -> None:
    routing = make_routing("uniform", SHAPE, RANKS, 4, SEED)
    inputs = make_inputs(SHAPE, routing.tokens_per_rank, SEED)
    together = oracle_fp32(SHAPE, inputs, routing, EXPERTS)
    alone = type(routing)(
        "uniform", (np.concatenate(routing.expert_ids),), (np.concatenate(routing.weights),)
    )
    single = oracle_fp32(SHAPE, [np.concatenate(inputs)], alone, EXPERTS)
    assert np.array_equal(np.concatenate(together), single[0])


def test_wrong_arguments_are_named() -> None:
    routing = make_routing("uniform", SHAPE, RANKS, 2, SEED)
    with pytest.raises(MegaMoEConfigError, match="inputs"):
        oracle_fp32(SHAPE, make_inputs(SHAPE, [1] * RANKS, SEED), routing, EXPERTS)
    with pytest.raises(MegaMoEConfigError, match="activation"):
        activate("gelu", SHAPE, np.zeros(1, np.float32), np.zeros(1, np.float32))  # type: ignore[arg-type]
    with pytest.raises(MegaMoEConfigError, match="shape"):
        relative_l2([1.0], [1.0, 2.0])


def test_relative_l2_shows_nan() -> None:
    assert math.isnan(relative_l2([np.nan, 1.0], [1.0, 1.0]))
    assert relative_l2([0.0], [0.0]) == 0.0
    assert relative_l2([1.0], [0.0]) == math.inf
