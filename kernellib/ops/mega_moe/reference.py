# SPDX-License-Identifier: Apache-2.0
"""Two references for MegaMoE, always used together.

* ``oracle_fp32``: unquantised activations, dequantised weights, everything in fp32. The kernels differ
  from it by the quantisation of activations (about 0.06 relative): a loose bound, which alone would hide a
  swapped layout of little effect.
* ``oracle_quantized``: rounds wherever the kernels round, and nowhere else: x to e4m3 by 1x32 blocks, h
  likewise, the weighted row to bf16 or to e4m3 blocks, the sum to bf16. The kernels differ from it only in
  the order of fp32 sums and the last bits of exp: 1e-3 is already generous.

Both walk expert by expert, so that one expert's weights are in memory at a time, and are made of
matrix products: 128 tokens a rank at Kimi-K3's size need a few minutes and under 16 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernellib.numerics import mx

from .config import Activation, MegaMoEConfigError, MegaMoEShape, Wire
from .routing import Routing
from .weights import ExpertSource, bf16

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def situv2(gate: F32, up: F32, beta: float = 4.0, linear_beta: float = 25.0) -> F32:
    """[b tanh(g/b) sigmoid(g)] * [lb tanh(u/lb)], in fp32."""
    b, lb = np.float32(beta), np.float32(linear_beta)
    return np.asarray(b * np.tanh(gate / b) * _sigmoid(gate) * (lb * np.tanh(up / lb)), dtype=np.float32)


def silu(gate: F32, up: F32) -> F32:
    """g sigmoid(g) * u, in fp32."""
    return gate * _sigmoid(gate) * up


def _sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(1.0) / (np.float32(1.0) + np.exp(-x)), dtype=np.float32)


def activate(activation: Activation, shape: MegaMoEShape, gate: F32, up: F32) -> F32:
    """The activation by name.

    Raises:
        MegaMoEConfigError: an activation that does not exist.
    """
    if activation == "situv2":
        return situv2(gate, up, shape.situ_beta, shape.situ_linear_beta)
    if activation == "silu":
        return silu(gate, up)
    raise MegaMoEConfigError(f"activation got {activation!r}, wanted 'situv2' or 'silu'")


@dataclass(frozen=True)
class _Rounding:
    """Where a reference rounds: each a function from fp32 rows to fp32 rows."""

    inputs: Callable[[F32], F32]
    hidden: Callable[[F32], F32]
    wire: Callable[[F32], F32]


def _keep(rows: F32) -> F32:
    return rows


def _through_e4m3(rows: F32) -> F32:
    return mx.quantize(rows, mx.E4M3).dequantize()


def oracle_fp32(
    shape: MegaMoEShape,
    inputs: Sequence[F32],
    routing: Routing,
    experts: ExpertSource,
    activation: Activation = "situv2",
) -> list[F32]:
    """The layer without quantised activations, in fp32.

    Args:
        shape: the layer.
        inputs: for each rank fp32 [tokens, model_dim] (bf16 values).
        routing: routes of these tokens.
        experts: weights by global expert id.
        activation: "situv2" or "silu".

    Returns:
        For each rank fp32 [tokens, model_dim]; a token without a route is zero.
    """
    return _layer(shape, inputs, routing, experts, activation, _Rounding(_keep, _keep, _keep))


def oracle_quantized(
    shape: MegaMoEShape,
    inputs: Sequence[F32],
    routing: Routing,
    experts: ExpertSource,
    activation: Activation = "situv2",
    wire: Wire = "bf16",
) -> list[F32]:
    """The layer with every rounding of the kernels; arguments as ``oracle_fp32``.

    Args:
        wire: "bf16" or "fp8_blockwise_1x32": the format of the weighted rows that are summed.

    Returns:
        For each rank fp32 [tokens, model_dim], values of bf16.
    """
    on_wire = bf16 if wire == "bf16" else _through_e4m3
    rounding = _Rounding(_through_e4m3, _through_e4m3, on_wire)
    return [bf16(rows) for rows in _layer(shape, inputs, routing, experts, activation, rounding)]


def _layer(
    shape: MegaMoEShape,
    inputs: Sequence[F32],
    routing: Routing,
    experts: ExpertSource,
    activation: Activation,
    rounding: _Rounding,
) -> list[F32]:
    offsets = np.concatenate([[0], np.cumsum(routing.tokens_per_rank)]).astype(np.int64)
    x = rounding.inputs(np.concatenate([np.asarray(rows, np.float32) for rows in inputs]))
    ids, weights = np.concatenate(routing.expert_ids), np.concatenate(routing.weights)
    if x.shape != (offsets[-1], shape.model_dim) or ids.shape != (offsets[-1], shape.top_k):
        raise MegaMoEConfigError(
            f"inputs got {list(x.shape)}, wanted {[int(offsets[-1]), shape.model_dim]} as the routing has"
        )
    rows: F32 = np.zeros((len(x), shape.top_k, shape.model_dim), np.float32)
    for expert, tokens, slots in _by_expert(ids):
        w1, w2 = experts(expert).dequantized()
        product = x[tokens] @ w1.T
        gate, up = product[:, : shape.inter_dim], product[:, shape.inter_dim :]
        hidden = rounding.hidden(activate(activation, shape, gate, up))
        weighted = (hidden @ w2.T) * weights[tokens, slots][:, None]
        rows[tokens, slots] = rounding.wire(weighted)
    total = np.zeros((len(x), shape.model_dim), np.float32)
    for slot in range(shape.top_k):  # in the kernel's order; a dropped route adds nothing
        total += rows[:, slot]
    return [total[offsets[rank] : offsets[rank + 1]] for rank in range(len(inputs))]


def _by_expert(ids: npt.NDArray[np.int32]) -> list[tuple[int, I64, I64]]:
    """(expert, tokens, slots) of every expert that has a route, ascending."""
    tokens, slots = np.nonzero(ids >= 0)
    chosen = ids[tokens, slots]
    order = np.argsort(chosen, kind="stable")
    found, starts = np.unique(chosen[order], return_index=True)
    groups = np.split(order, starts[1:])
    return [(int(e), tokens[g], slots[g]) for e, g in zip(found, groups, strict=False)]


def relative_l2(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """|actual - expected| / |expected| over all elements, in float64; not finite when ``actual`` is not."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if a.shape != e.shape:
        raise MegaMoEConfigError(f"actual got shape {a.shape}, wanted {e.shape}")
    norm = float(np.linalg.norm(e))
    error = float(np.linalg.norm(a - e))
    return error / norm if norm > 0.0 else (0.0 if error == 0.0 else float("inf"))


def make_inputs(shape: MegaMoEShape, tokens_per_rank: Sequence[int], seed: int) -> list[F32]:
    """Normal bf16 tokens for every rank, as fp32 values; each from (seed, rank)."""
    return [
        bf16(np.random.default_rng([seed, rank]).standard_normal((tokens, shape.model_dim), np.float32))
        for rank, tokens in enumerate(tokens_per_rank)
    ]
