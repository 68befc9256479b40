# SPDX-License-Identifier: Apache-2.0
"""The serial baseline in plain torch, on any device: all ranks' work in one process, in three steps.

It rounds where the kernels round (activations to e4m3 blocks, rows on the wire, the sum to bf16), with its
own arithmetic: torch operations on whole tensors, nothing shared with the numpy references but the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernellib.numerics import mx

from .config import SCALE_BLOCK, Activation, MegaMoEShape, Wire
from .layout import PackedMatrixLayout
from .weights import PackedWeights, matrix_layouts

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX_BITS = 0x43E0_0000  # 448 as fp32
MANTISSA = 23
INF_BITS = 0x7F80_0000


def round_e4m3_blocks(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., K], through e4m3 with one e8m0 scale for 32 elements and back: the rule of
    ``kernellib.numerics.mx``, on the bits of fp32."""
    blocks = rows.reshape(*rows.shape[:-1], -1, SCALE_BLOCK)
    amax_bits = (blocks.contiguous().view(torch.int32) & 0x7FFF_FFFF).amax(dim=-1, keepdim=True)
    mantissa_of_max = E4M3_MAX_BITS & ((1 << MANTISSA) - 1)
    exponent = (amax_bits >> MANTISSA) - mx.E4M3.max_exponent
    exponent += ((amax_bits & ((1 << MANTISSA) - 1)) > mantissa_of_max).to(torch.int32)
    exponent = exponent.clamp_min(0)
    inverse = torch.ldexp(torch.ones_like(blocks[..., :1]), mx.E8M0_BIAS - exponent)
    codes = (blocks * inverse).to(torch.float8_e4m3fn).to(torch.float32)
    values = torch.ldexp(codes, exponent - mx.E8M0_BIAS)
    return torch.where(amax_bits >= INF_BITS, torch.nan, values).reshape(rows.shape)


def dequantize_matrix(
    matrix: PackedMatrixLayout, elements: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Packed e2m1 bytes and e8m0 scales of one matrix -> fp32 [N, K], exact."""
    rows, size = matrix.num_rows, matrix.num_elements
    tiles = elements.view(matrix.num_row_tiles, size // 128, 4, 16, 16).permute(0, 3, 1, 2, 4)
    nibbles = torch.stack((tiles & 0xF, tiles >> 4), dim=-1).reshape(rows, size).to(torch.int64)
    magnitudes = torch.tensor(E2M1_VALUES, device=elements.device)[nibbles & 7]
    values = torch.where(nibbles >= 8, -magnitudes, magnitudes)
    stored = scales.view(matrix.num_row_tiles, -1, 4, 16, 4).permute(0, 3, 1, 4, 2)
    exponents = stored.reshape(rows, -1)[:, : size // SCALE_BLOCK].to(torch.int32) - mx.E8M0_BIAS
    blocks = values.view(rows, -1, SCALE_BLOCK)
    return torch.ldexp(blocks, exponents[..., None]).reshape(rows, size)


def activate(
    shape: MegaMoEShape, activation: Activation, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """SiTUv2 or SiLU, fp32."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    beta, linear = shape.situ_beta, shape.situ_linear_beta
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear * torch.tanh(up / linear))


@dataclass(frozen=True)
class Dispatched:
    """Rows sorted by expert.

    Attributes:
        rows: fp32 [routes, model_dim], values of e4m3 blocks.
        weights: fp32 [routes].
        places: int64 [routes]: token * top_k + slot, tokens counted over all ranks.
        counts: rows of each expert, on the host.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    counts: list[int]


class TorchSerial:
    """dispatch, experts, combine in plain torch; call it with every rank's tensors at once.

    Args:
        shape: the layer.
        weights: of each rank, on the device that the tokens will be on.
        activation, wire: as ``MegaMoE`` has them; the wire's name, not "auto".

    Example:
        >>> from kernellib.ops.mega_moe.weights import pack_experts, random_experts
        >>> shape = MegaMoEShape(2, 128, 128, 1)
        >>> serial = TorchSerial(shape, [pack_experts(shape, map(random_experts(shape, 0), (0, 1)))])
        >>> x = torch.ones(3, 128, dtype=torch.bfloat16)
        >>> [y.shape for y in serial([x], [torch.ones(3, 1)], [torch.zeros(3, 1, dtype=torch.int32)])]
        [torch.Size([3, 128])]
    """

    launches: tuple[str, ...] = ("dispatch", "grouped expert GEMMs", "combine")

    def __init__(
        self,
        shape: MegaMoEShape,
        weights: Sequence[PackedWeights],
        activation: Activation = "situv2",
        wire: Wire = "bf16",
    ) -> None:
        per_rank = shape.experts_per_rank(len(weights))
        for part in weights:
            part.require(shape, per_rank)
        self._shape, self._weights = shape, tuple(weights)
        self._per_rank = per_rank
        self._activation: Activation = activation
        self._wire: Wire = wire

    def __call__(
        self,
        x: Sequence[torch.Tensor],
        route_weights: Sequence[torch.Tensor],
        expert_ids: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Every rank's tensors as a call of ``MegaMoE`` takes them -> every rank's output, bf16."""
        tokens = [len(part) for part in x]
        sent = self.dispatch(torch.cat(list(x)), torch.cat(list(route_weights)), torch.cat(list(expert_ids)))
        out = self.combine(sent, self.experts(sent), sum(tokens))
        return list(torch.split(out, tokens))

    def dispatch(self, x: torch.Tensor, route_weights: torch.Tensor, expert_ids: torch.Tensor) -> Dispatched:
        """Quantises the tokens and gathers a row for each route that is taken, in expert order."""
        ids = expert_ids.reshape(-1).to(torch.int64)
        taken = ((ids >= 0) & (ids < self._shape.num_experts)).nonzero().squeeze(1)
        order = ids[taken].argsort(stable=True)
        places = taken[order]
        counts = torch.bincount(ids[places], minlength=self._shape.num_experts).tolist()
        rows = round_e4m3_blocks(x.float())[places // self._shape.top_k]
        return Dispatched(rows, route_weights.reshape(-1)[places], places, counts)

    def experts(self, sent: Dispatched) -> torch.Tensor:
        """fp32 [routes, model_dim]: each row through its expert, weighted and rounded as on the wire."""
        first, second = matrix_layouts(self._shape)
        found = []
        for expert, rows in enumerate(torch.split(sent.rows, sent.counts)):
            if not len(rows):
                continue
            weights, local = self._weights[expert // self._per_rank], expert % self._per_rank
            w1 = dequantize_matrix(
                first,
                weights.w1[local * first.element_bytes :][: first.element_bytes],
                weights.w1_scales[local * first.scale_bytes :][: first.scale_bytes],
            )
            w2 = dequantize_matrix(
                second,
                weights.w2[local * second.element_bytes :][: second.element_bytes],
                weights.w2_scales[local * second.scale_bytes :][: second.scale_bytes],
            )
            gate, up = torch.split(rows @ w1.T, self._shape.inter_dim, dim=1)
            hidden = round_e4m3_blocks(activate(self._shape, self._activation, gate, up))
            found.append(hidden @ w2.T)
        weighted = (torch.cat(found) if found else sent.rows) * sent.weights[:, None]
        return weighted.bfloat16().float() if self._wire == "bf16" else round_e4m3_blocks(weighted)

    def combine(self, sent: Dispatched, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """bf16 [tokens, model_dim]: each token's rows summed in fp32, slot by slot."""
        by_place = rows.new_zeros((num_tokens * self._shape.top_k, self._shape.model_dim))
        by_place[sent.places] = rows
        total = rows.new_zeros((num_tokens, self._shape.model_dim))
        for slot in range(self._shape.top_k):
            total += by_place.view(num_tokens, self._shape.top_k, -1)[:, slot]
        return total.bfloat16()
