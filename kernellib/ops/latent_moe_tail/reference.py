# SPDX-License-Identifier: Apache-2.0
"""What the latent MoE tail must compute: the production chain, a float64 oracle, and inputs to try.

Rounding points of the chain, found by comparing PyTorch's CPU kernels bit by bit with explicit fp32
arithmetic: rms_norm converts to fp32, sums the squares, divides by 3584, adds eps, takes 1 / sqrt(x),
multiplies by it and then by the weight, each step rounded to fp32, and rounds once to bf16. linear
accumulates in fp32 and rounds once. The add rounds once.

Subnormals: nothing in the chain flushes them on a CPU with AVX2, neither inputs nor results
(tests/ops/test_latent_moe_tail_reference.py looks), and the kernel keeps them as well. A CPU whose oneDNN
uses AMX or AVX512-BF16 dot products may flush in ``linear``, since those instructions treat subnormals
as zero [Intel SDM, VDPBF16PS, TDPBF16PS]; the oracle is the judge there.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from kernellib.numerics.bf16 import F64, round_to_bf16, to_float64
from kernellib.numerics.errors import ErrorReport, compare, neighbour_sums

from .config import LATENT_DIM, MODEL_DIM

InputKind = Literal["normal", "large", "tiny", "subnormal", "zeros", "one_nan", "one_inf"]
INPUT_KINDS: tuple[InputKind, ...] = get_args(InputKind)
ORACLE_BLOCK_ROWS = 512  # rows converted to float64 at a time: 15 MB instead of 205


class TailInputs(NamedTuple):
    """The operator's tensor arguments, in order: ``latent_moe_tail(*inputs)``."""

    routed: torch.Tensor
    norm_weight: torch.Tensor
    up_weight: torch.Tensor
    shared: torch.Tensor


def production_chain(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The three calls that the fused operator replaces, in bf16.

    Args:
        routed: [1, 3584]; norm_weight: [3584]; up_weight: [7168, 3584]; shared: [1, 7168]; all bf16.
        eps: added to the mean of squares.

    Returns:
        bf16 [1, 7168], a new tensor.
    """
    n = torch.nn.functional.rms_norm(routed, (routed.shape[-1],), norm_weight, eps)
    return torch.nn.functional.linear(n, up_weight) + shared


def oracle_f64(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[F64, F64]:
    """The chain's result with its rounding points and no other error.

    The statistics are fp32 by definition, so their rounding points belong to the result: the sum of
    squares is exact (float64) and rounded to fp32 once, then every step of the norm rounds to fp32 as in
    the chain, and n to bf16. An oracle without them would call one element of n in 10^5 wrong, where
    the fp32 steps cross a tie of bf16, and with it a few percent of the outputs. The projection is float64
    and rounded to bf16 once, and so is the sum with ``shared``.

    Args: as ``production_chain``.

    Returns:
        (p, y): float64 arrays [7168] of bf16 values, the rounded projection and the result.
    """
    n = normalise_exact(to_float64(routed).reshape(-1), to_float64(norm_weight), eps)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf propagate by IEEE rules
        blocks = torch.split(up_weight, ORACLE_BLOCK_ROWS)
        p = round_to_bf16(np.concatenate([to_float64(block) @ n for block in blocks]))
        y = round_to_bf16(p + to_float64(shared).reshape(-1))
    return p, y


def against_oracle(actual: Any, p: F64, y: F64, shared: torch.Tensor) -> ErrorReport:
    """A result of the tail against ``oracle_f64``'s (p, y), by the rule that every gate of the tail applies.

    An output is right when it lies within one unit in the last place of y, the unit taken at the larger of
    |p| and |y|, or equals bf16(p' + shared) for p' one of the two bf16 values next to p: the report's
    ``judged_ulp_error`` is then at most 1. The second part is for sums near a tie of bf16, see
    ``numerics.neighbour_sums``; without it a right kernel fails for some random seeds, as ``make_inputs(0)``
    did on an H200.

    Args:
        actual: bf16 [7168] or [1, 7168].
        p, y: from ``oracle_f64``.
        shared: the operator's argument.
    """
    addend = to_float64(shared).reshape(-1)
    flat = actual.reshape(-1)
    return compare(flat, y, magnitudes=(p,), alternatives=neighbour_sums(p, addend))


def normalise_exact(x: F64, gamma: F64, eps: float) -> F64:
    """n of bf16 values ``x`` and ``gamma``, each fp32 step rounded once; float64 array of bf16 values."""
    one = np.float32(1.0)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        x32, gamma32 = x.astype(np.float32), gamma.astype(np.float32)
        total = np.float32(np.sum(np.square(x32).astype(np.float64)))
        scale = one / np.sqrt(total / np.float32(LATENT_DIM) + np.float32(eps))
        return round_to_bf16(x32 * scale * gamma32)


def make_inputs(seed: int, kind: InputKind = "normal", device: str | torch.device = "cpu") -> TailInputs:
    """Random inputs of one kind; the same seed and kind give the same bits on every device.

    Kinds:
        normal: standard normal activations, norm weights near 1, weights scaled so that p is near 1.
        large: activations near 2^45 and weights near 2^60; fp32 still holds every sum.
        tiny: mean of squares far below eps, so that eps decides the scale; small weights and results.
        subnormal: routed, shared and p are bf16 subnormals, and so is an eighth of the weights.
        zeros: routed is zero (both signs), so that the result is shared.
        one_nan, one_inf: as normal with one NaN or infinity, in routed, norm_weight, up_weight or shared
            as seed % 4 is 0, 1, 2 or 3.

    Args:
        seed: of torch.Generator on the CPU.
        kind: one of ``INPUT_KINDS``.
        device: where the tensors end up.

    Raises:
        ValueError: ``kind`` is not one of them.
    """
    if kind not in INPUT_KINDS:
        raise ValueError(f"kind got {kind!r}, wanted one of {', '.join(INPUT_KINDS)}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(scale).to(torch.bfloat16)

    x_scale, w_scale, shared_scale = {
        "large": (2.0**45, 2.0**60, 2.0**66),
        "tiny": (2.0**-40, 2.0**-20, 2.0**-44),
        "subnormal": (2.0**-128, 2.0**-14, 2.0**-128),
    }.get(kind, (1.0, LATENT_DIM**-0.5, 1.0))
    routed = normal(1, LATENT_DIM, scale=x_scale)
    norm_weight = (1.0 + normal(LATENT_DIM, scale=0.1).float()).to(torch.bfloat16)
    up_weight = normal(MODEL_DIM, LATENT_DIM, scale=w_scale)
    shared = normal(1, MODEL_DIM, scale=shared_scale)
    if kind == "subnormal":
        up_weight[::8] = up_weight[::8] * 2.0**-116
    elif kind == "zeros":
        routed = torch.zeros_like(routed).copysign_(routed)
    inputs = TailInputs(routed, norm_weight, up_weight, shared)
    if kind in ("one_nan", "one_inf"):
        flat = inputs[seed % 4].view(-1)
        position = int(torch.randint(flat.numel(), (1,), generator=generator))
        flat[position] = float("nan") if kind == "one_nan" else float("inf")
    return TailInputs(*(tensor.to(device) for tensor in inputs))
