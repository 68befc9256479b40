# SPDX-License-Identifier: Apache-2.0
"""The baseline that the fused stages are compared with: the layer in steps, one launch after another.

    dispatch -> grouped expert GEMMs -> combine

=================  ===============================================================================
SerialKernels      this project's own kernels, their phases launched separately; on any heap
SerialMori         dispatch and combine of amd-mori (``mori.ops.EpDispatchCombineOp``), the experts by this
                   project's GEMMs as a layer of one rank; on MI355X
TorchSerial        plain torch on any device, all ranks in one process (serial_torch.py)
=================  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from kernellib.symmetric.local_provider import local_heap

from .api import MegaMoE, QuantizedTokens, Stage1Result
from .config import MegaMoEConfig
from .contract import CallArguments

DISPATCH_PHASES = ("histogram", "plan", "dispatch")


class SerialLayer(Protocol):
    """A baseline: called as the layer is, with the same result up to where each rounds.

    Attributes:
        launches: names of what a call launches, in order.
    """

    launches: tuple[str, ...]

    def __call__(
        self,
        x: torch.Tensor,
        route_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        token_class: int | None = None,
    ) -> torch.Tensor: ...


def serial_baseline(moe: MegaMoE) -> SerialLayer:
    """The serial baseline for a layer: with mori's own dispatch and combine where the heap is mori's,
    otherwise with this project's kernels launched separately. Collective."""
    return SerialMori(moe) if moe.heap.provider_name == "mori" else SerialKernels(moe)


class SerialKernels:
    """The fused kernels' phases, each in a launch of its own. Bit for bit the layer's result.

    Args:
        moe: the layer whose memory, weights and configurations are used; calls of both may alternate.
    """

    launches: tuple[str, ...] = ("quantize", "dispatch", "gemm1", "gemm2", "combine")

    def __init__(self, moe: MegaMoE) -> None:
        self._moe = moe

    def __call__(
        self,
        x: torch.Tensor,
        route_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        token_class: int | None = None,
    ) -> torch.Tensor:
        """As ``MegaMoE.__call__``. Collective."""
        moe = self._moe
        arguments = CallArguments(x=x, route_weights=route_weights, expert_ids=expert_ids, out=out)
        agreed = moe._begin("serial call", arguments, token_class)
        call = Stage1Result(
            x.shape[0],
            agreed,
            token_class is None,
            moe.config_for(agreed),
            expert_ids,
            moe._quantize(x),
            route_weights,
        )
        result = torch.empty_like(x) if out is None else out
        moe._launch_stage1(call, DISPATCH_PHASES)
        moe._launch_stage1(call, ("gemm1",))
        moe._launch_stage2(call, result, ("gemm2",))
        moe._launch_stage2(call, result, ("combine",))
        moe._look_at_reports()
        return result


class _LocalExperts(MegaMoE):
    """A rank's experts as a layer of one rank, with the configurations of the layer they belong to."""

    def __init__(self, moe: MegaMoE, capacity: int) -> None:
        self._whole = moe
        experts = moe.layout.experts_per_rank
        shape = replace(moe.shape, num_experts=experts, top_k=min(moe.shape.top_k, experts))
        weights = replace(moe.weights, shape=shape)
        # Between dispatch and combine there is no wire: rows stay bf16.
        super().__init__(
            shape, 0, local_heap(moe.heap), weights, capacity, activation=moe.activation, wire="bf16"
        )

    def config_for(self, tokens: int) -> MegaMoEConfig:
        return self._whole.config_for(-(-tokens // self._whole.num_ranks))


@dataclass(frozen=True)
class _Received:
    """What mori's dispatch returns, cut to the rows that there can be."""

    codes: torch.Tensor
    scales: torch.Tensor
    route_weights: torch.Tensor
    expert_ids: torch.Tensor
    num_rows: torch.Tensor


class SerialMori:
    """mori's dispatch and combine around this project's expert GEMMs.

    mori sends a token once to each rank that has one of its experts, and sums what the ranks send back: a
    rank weights and adds its own experts' rows first, so that a token's sum is rounded once for each rank and
    not once for each route. With the fp8 wire mori's own blocks are used ("fp8_blockwise").

    Facts, from the wheel's sources: negative ids are dropped; ``dispatch`` returns views of mori's buffers of
    world_size * max_num_inp_token_per_rank rows, the number of valid ones on the device; ``combine`` takes
    this rank's own ids and returns a view of max_num_inp_token_per_rank rows, which the next call overwrites.

    Args:
        moe: the layer; its heap must be mori's, whose process group mori's operator uses, too.
    """

    launches: tuple[str, ...] = (
        "quantize",
        "dispatch",
        "stage1 of one rank",
        "stage2 of one rank",
        "combine",
    )

    def __init__(self, moe: MegaMoE) -> None:
        from mori import ops  # noqa: PLC0415  (only where there is a GPU)

        self._moe = moe
        layout = moe.layout
        self._op: Any = ops.EpDispatchCombineOp(
            config=ops.EpDispatchCombineConfig(
                data_type=torch.float8_e4m3fn,
                rank=moe.rank,
                world_size=moe.num_ranks,
                hidden_dim=moe.shape.model_dim,
                scale_dim=layout.input_scales.row_bytes,
                scale_type_size=1,
                max_token_type_size=2,
                max_num_inp_token_per_rank=layout.capacity,
                num_experts_per_rank=layout.experts_per_rank,
                num_experts_per_token=moe.shape.top_k,
                quant_type="none" if moe.wire == "bf16" else "fp8_blockwise",
            )
        )
        received = moe.num_ranks * layout.capacity
        self._experts = _LocalExperts(moe, 1 << (received - 1).bit_length())

    def __call__(
        self,
        x: torch.Tensor,
        route_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        token_class: int | None = None,
    ) -> torch.Tensor:
        """As ``MegaMoE.__call__``. Collective."""
        moe = self._moe
        arguments = CallArguments(x=x, route_weights=route_weights, expert_ids=expert_ids, out=out)
        agreed = moe._begin("serial call", arguments, token_class)
        received = self._dispatch(moe._quantize(x), route_weights, expert_ids, agreed)
        rows = self._run_experts(received)
        combined, _ = self._op.combine(input=rows, weights=None, indices=expert_ids)
        result = torch.empty_like(x) if out is None else out
        return result.copy_(combined[: x.shape[0]])

    def _dispatch(
        self, quantized: QuantizedTokens, route_weights: torch.Tensor, expert_ids: torch.Tensor, agreed: int
    ) -> _Received:
        codes, weights, scales, ids, total = self._op.dispatch(
            input=quantized.codes.view(torch.float8_e4m3fn),
            weights=route_weights,
            scales=quantized.scales,
            indices=expert_ids,
        )
        rows = self._moe.num_ranks * agreed  # a rank sends a token at most once
        return _Received(codes[:rows].view(torch.uint8), scales[:rows], weights[:rows], ids[:rows], total)

    def _run_experts(self, received: _Received) -> torch.Tensor:
        """bf16 rows: each received token's sum over this rank's experts, by their weights."""
        ids, weights = self._local_routes(received)
        tokens = QuantizedTokens(received.codes, received.scales)
        return self._experts.forward_prequantized(tokens, weights, ids, token_class=len(ids))

    def _local_routes(self, received: _Received) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids among this rank's experts, -1 for other ranks' and for rows that hold nothing; routes that
        count come first, as many columns as a token can have here."""
        experts, columns = self._moe.layout.experts_per_rank, self._experts.shape.top_k
        local = received.expert_ids - self._moe.rank * experts
        row = torch.arange(len(local), device=local.device)[:, None]
        mine = (local >= 0) & (local < experts) & (row < received.num_rows)
        order = mine.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :columns]
        ids = torch.where(mine, local, -1).gather(1, order)
        return ids.to(torch.int32).contiguous(), received.route_weights.gather(1, order).contiguous()
