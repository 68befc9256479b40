# SPDX-License-Identifier: Apache-2.0
"""``MegaMoE``: an expert-parallel mixture of experts in two fused launches, with its contract.

quantize  x -> e4m3 codes, one e8m0 scale for 32 elements
stage 1   rows to their experts' ranks, GEMM1, activation, requantisation
stage 2   GEMM2, times the route weight, rows home, their sum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from kernellib.ops.contract import Violation, check_tensors
from kernellib.symmetric import SymmetricHeap, SymmetricRegion

from .config import (
    KIMI_K3,
    Activation,
    MegaMoEConfig,
    MegaMoEShape,
    Wire,
    resolve_wire,
    select_config,
    token_class,
)
from .contract import (
    CallArguments,
    LayerRequest,
    agreed_fields,
    bounds_check_enabled,
    call_specs,
    check_call,
    check_heap,
    check_layer,
    check_token_class,
    check_weights,
    disagreements,
    inspected,
    merge,
    raise_alike,
    supports_mega_moe,
)
from .layout import NUM_ERROR_WORDS, NUM_PARITIES, SymmetricLayout
from .weights import PackedWeights

__all__ = [
    "KIMI_K3",
    "ExpertIdError",
    "MegaMoE",
    "MegaMoEConfig",
    "MegaMoEShape",
    "QuantizedTokens",
    "Stage1Result",
    "supports_mega_moe",
]


class ExpertIdError(ValueError):
    """The device's bounds check met expert ids that are neither -1 nor an expert's; they were dropped."""


@dataclass(frozen=True, eq=False)
class QuantizedTokens:
    """Tokens as stage 1 takes them.

    Attributes:
        codes: uint8 [tokens, model_dim], e4m3 (OCP).
        scales: uint8 [tokens, ScaleOrder(model_dim).row_bytes], e8m0 in the kernels' order.
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, eq=False)
class Stage1Result:
    """What stage 2 needs of its stage 1; the hidden rows themselves are in the layer's symmetric memory.

    Attributes:
        num_tokens: of this rank.
        token_class: what the ranks agreed on.
        agreed: whether by an exchange (then stage 2 exchanges, too) or by the caller's word.
        config: selected by it.
        expert_ids: of the call.
        quantized, route_weights: kept alive until stage 2 has been launched.
    """

    num_tokens: int
    token_class: int
    agreed: bool
    config: MegaMoEConfig
    expert_ids: torch.Tensor
    quantized: QuantizedTokens
    route_weights: torch.Tensor


class MegaMoE:
    """y[t] = sum over slots s of route_weights[t, s] * expert[expert_ids[t, s]](x[t]), experts of all ranks.

    Construction is collective, and so is every call: all ranks make the same calls in the same order, with
    their own tokens, none among them. Before a launch the ranks meet on the host; a clause that any rank
    breaks, or a setting that is not the same everywhere, raises the same error on every rank.

    Args:
        shape: what the layer computes; ``KIMI_K3`` or another.
        rank: this rank, the heap's.
        heap: symmetric memory; decides where the kernels run. One region is allocated from it.
        weights: this rank's experts, ``pack_experts`` of ids rank * n .. rank * n + n - 1, on heap.device.
        max_tokens_per_rank: capacity, a power of two.
        config: "tuned" or "generic", tables by token class, scaled to the device's compute units; or one
            MegaMoEConfig for every call, taken as it is.
        activation: "situv2" (with the shape's betas) or "silu".
        wire: format of the rows that come back: "bf16", "fp8_blockwise_1x32", or "auto": bf16 up to a
            capacity of 128 tokens, fp8 above, where bytes matter more.
        bounds_check: compile in the check of expert ids; also on when the environment variable
            KERNELLIB_MEGA_MOE_BOUNDS_CHECK is 1. Its findings raise ExpertIdError after the call.
        input_format: of quantised activations; "e4m3".
        output_dtype: torch.bfloat16.

    Expert ids of -1 drop the route. Others out of range are refused where the host can see them; on a GPU
    they are reported with ``bounds_check`` and otherwise dropped like -1, never followed.

    Raises:
        ContractError: on every rank alike; ``.report`` lists every clause that fails, by rank.

    Example (two emulated ranks):
        >>> from kernellib.emulator import emulated
        >>> from kernellib.symmetric.emulated_provider import emulated_heap
        >>> from kernellib.ops.mega_moe.weights import pack_experts, random_experts
        >>> shape = MegaMoEShape(4, 128, 128, 2)
        >>> def host(rank):
        ...     experts = random_experts(shape, 0)
        ...     weights = pack_experts(shape, [experts(2 * rank.index + i) for i in range(2)])
        ...     moe = MegaMoE(shape, rank.index, emulated_heap(rank), weights, 4)
        ...     x = torch.ones(rank.index, 128, dtype=torch.bfloat16)
        ...     ids = torch.tensor([[0, 3]] * rank.index, dtype=torch.int32).reshape(-1, 2)
        ...     return tuple(moe(x, torch.ones(rank.index, 2), ids).shape)
        >>> with emulated() as session:
        ...     session.create_world(2).run(host)
        [(0, 128), (1, 128)]
    """

    def __init__(
        self,
        shape: MegaMoEShape,
        rank: int,
        heap: SymmetricHeap,
        weights: PackedWeights,
        max_tokens_per_rank: int,
        config: Literal["tuned", "generic"] | MegaMoEConfig = "tuned",
        activation: Activation = "situv2",
        wire: Wire | Literal["auto"] = "auto",
        bounds_check: bool = False,
        input_format: Literal["e4m3"] = "e4m3",
        output_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        is_heap = isinstance(heap, SymmetricHeap)
        request = LayerRequest(
            shape,
            heap.num_ranks if is_heap else None,
            max_tokens_per_rank,
            config,
            activation,
            wire,
            bounds_check,
            input_format,
            output_dtype,
            weights,
        )
        heap_violations = check_heap(heap, rank)
        if not is_heap or heap.closed:
            raise_alike(heap_violations)
        violations = [
            *heap_violations,
            *inspected(lambda: check_layer(request, heap.num_cu)),
            *inspected(lambda: check_weights(weights, request, heap.device), "weights"),
        ]
        answers = heap.exchange("construct mega_moe", (violations, agreed_fields(request)))
        differing = disagreements([fields for _, fields in answers])
        raise_alike([*merge([found for found, _ in answers]), *differing])

        self.shape, self.rank, self.heap, self.weights = shape, rank, heap, weights
        self.activation = activation
        self.bounds_check = bounds_check_enabled(bounds_check)
        self.output_dtype = output_dtype
        self._config = config
        self.layout = SymmetricLayout(
            shape, heap.num_ranks, max_tokens_per_rank, resolve_wire(wire, max_tokens_per_rank)
        )
        self._number = heap.num_exchanges
        self._pending: Stage1Result | None = None
        self._closed = False
        self._region = _prepare_region(heap, self.layout)

    # ------------------------------------------------------------------------------------- facts

    @property
    def capacity(self) -> int:
        """Most tokens of a rank in a call."""
        return self.layout.capacity

    @property
    def wire(self) -> Wire:
        """Format of the rows that come back, "auto" decided."""
        return self.layout.wire

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    def config_for(self, tokens: int) -> MegaMoEConfig:
        """The configuration of a token class: the given one, or the table's, scaled to the device."""
        if isinstance(self._config, MegaMoEConfig):
            return self._config
        found = select_config(self.shape, self.num_ranks, tokens, self._config)
        return found.scaled(self.shape, min(self.heap.num_cu, found.num_cu))

    # ------------------------------------------------------------------------------------- calls

    def __call__(
        self,
        x: torch.Tensor,
        route_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        token_class: int | None = None,
    ) -> torch.Tensor:
        """The layer. Collective.

        Args:
            x: bf16 [tokens, model_dim], 16-byte aligned; contiguous, as every tensor here.
            route_weights: fp32 [tokens, top_k]; NaN and Inf are multiplied like others. What stands beside a
                dropped route is not looked at.
            expert_ids: int32 [tokens, top_k], global ids; -1 drops the route, an expert may be named twice.
            out: bf16 [tokens, model_dim] to write to; shares no byte with another argument.
            token_class: the largest token count of any rank, when the caller knows it: all ranks pass the
                same. None: the ranks agree through the host, which needs no GPU and is allowed while a graph
                is captured (the graph keeps the configuration). With a class given they do not meet, and a
                rank whose own arguments are refused raises alone.

        Returns:
            bf16 [tokens, model_dim]: ``out``, or a new tensor that no later call touches.

        Raises:
            ContractError: as described at the class; nothing was launched on any rank.
            ExpertIdError: on every rank, with ``bounds_check``, after the call; never during capture.
        """
        arguments = CallArguments(x=x, route_weights=route_weights, expert_ids=expert_ids, out=out)
        agreed = self._begin("call", arguments, token_class)
        quantized = self._quantize(x)
        result = self._run_stage1(quantized, arguments, agreed, token_class is None)
        return self._run_stage2(result, out)

    def forward_prequantized(
        self,
        quantized: QuantizedTokens,
        route_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        token_class: int | None = None,
    ) -> torch.Tensor:
        """The layer on tokens that ``quantize`` has been given before; otherwise as a call. Collective."""
        arguments = _arguments(quantized, route_weights, expert_ids, out)
        agreed = self._begin("forward_prequantized", arguments, token_class)
        result = self._run_stage1(quantized, arguments, agreed, token_class is None)
        return self._run_stage2(result, out)

    def quantize(self, x: torch.Tensor) -> QuantizedTokens:
        """bf16 [tokens, model_dim] -> e4m3 codes and scales, in one launch. Not collective.

        Raises:
            ContractError: x is not as above; on this rank alone.
        """
        self._require_open()
        raise_alike(check_tensors(call_specs(self.shape, CallArguments(x=x))[:1], self.heap.device.type))
        return self._quantize(x)

    def stage1(
        self,
        quantized: QuantizedTokens,
        route_weights: torch.Tensor,
        expert_ids: torch.Tensor,
        token_class: int | None = None,
    ) -> Stage1Result:
        """Dispatch and GEMM1, in one launch. Collective; ``stage2`` of its result must follow.

        Raises:
            ContractError: as a call's; clause "order" when stage 2 of an earlier stage 1 has not run.
        """
        arguments = _arguments(quantized, route_weights, expert_ids, None)
        agreed = self._begin("stage1", arguments, token_class)
        return self._run_stage1(quantized, arguments, agreed, token_class is None)

    def stage2(self, result: Stage1Result, out: torch.Tensor | None = None) -> torch.Tensor:
        """GEMM2 and combine, in one launch. Collective.

        Args:
            result: of the stage 1 that went before.
            out: as a call's.

        Raises:
            ContractError: as a call's; clause "order" when ``result`` is not the last stage 1's.
        """
        self._require_open()
        violations: list[Violation] = []
        if not isinstance(result, Stage1Result) or result is not self._pending:
            got, wanted = type(result).__name__, "the result of the last stage1, used once"
            violations.append(Violation("order", "result", got, wanted, "call stage1 first"))
        elif out is not None:
            given = _arguments(result.quantized, result.route_weights, result.expert_ids, out)
            violations = inspected(
                lambda: check_tensors(call_specs(self.shape, given), self.heap.device.type)
            )
        if isinstance(result, Stage1Result) and not result.agreed:
            raise_alike(violations)
        else:
            raise_alike(merge(self.heap.exchange(f"mega_moe {self._number} stage2", violations)))
        return self._run_stage2(result, out)

    def tile_rows(self) -> list[int]:
        """Valid rows of each M tile that this rank's experts had in the last call, as its planner laid them
        out. Waits for the device; not collective."""
        self._require_open()
        if self._region.memory.device.type == "cuda":
            torch.cuda.synchronize(self._region.memory.device)

        def view(name: str) -> torch.Tensor:
            buffer = self.layout.buffers[name]
            raw = self._region.memory[buffer.offset : buffer.offset + buffer.num_bytes].cpu()
            return raw.view(torch.int32).view(buffer.shape)

        parity = int(view("epoch")[0]) % NUM_PARITIES
        num_tiles = int(view("num_tiles")[parity])
        rows: list[int] = view("tile_meta")[parity, :num_tiles, 2].tolist()
        return rows

    def region_range(self) -> tuple[int, int]:
        """(address, bytes) of this rank's part of the layer's symmetric memory."""
        return self._region.memory.data_ptr(), self._region.num_bytes

    def close(self) -> None:
        """Gives the layer's symmetric memory back. Collective. Later calls are refused, a second close does
        nothing, nor one after the heap's, which frees the memory, too."""
        if self._closed or self.heap.closed:
            return
        self.heap.free(self._region)
        self._closed = True

    def raise_reported_ids(self) -> None:
        """Raises ExpertIdError when the device's bounds check has met ids out of range since the last look,
        on any rank. Collective; waits for the device. Calls do this themselves, but while a graph is captured
        or replayed they cannot: look after a replay.
        """
        if not self.bounds_check:
            return
        self._require_open()
        words = self.layout.buffers["errors"]
        view = self._region.memory[words.offset : words.offset + words.num_bytes]
        found = view.cpu().view(torch.int32).tolist()
        view.zero_()
        told = [
            f"rank {rank}: {count} ids, one of them {expert} at token {token}, slot {slot}"
            for rank, (count, token, slot, expert) in enumerate(
                self.heap.exchange(f"mega_moe {self._number} errors", found[:NUM_ERROR_WORDS])
            )
            if count
        ]
        if told:
            wanted = f"-1 or 0 .. {self.shape.num_experts - 1}"
            raise ExpertIdError(
                f"expert_ids: {'; '.join(told)}; wanted {wanted}; these routes were dropped: drop a route "
                "with -1"
            )

    # ----------------------------------------------------------------------------------- internals

    def _require_open(self) -> None:
        """Closing is collective, so that every rank raises here, and nobody needs to be told."""
        for what, closed in (("layer", self._closed), ("heap", self.heap.closed)):
            if closed:
                raise_alike([Violation("order", what, "closed", "open", "make a new layer on an open heap")])

    def _begin(self, what: str, arguments: CallArguments, given_class: object) -> int:
        """Checks a call's contract on all ranks; returns the token class they select by."""
        self._require_open()
        violations = inspected(
            lambda: check_call(self.shape, self.capacity, arguments, self.heap.device.type, self.bounds_check)
        )
        if self._pending is not None:
            got = "stage1 again" if what == "stage1" else what
            remedy = "call stage2 with the result of the last stage1 first"
            violations.append(Violation("order", what, got, "stage2 of the last stage1", remedy))
        tokens = arguments.num_tokens
        if given_class is not None:
            raise_alike([*violations, *check_token_class(given_class, tokens, self.capacity)])
            return cast(int, given_class)
        answers = self.heap.exchange(f"mega_moe {self._number} {what}", (violations, tokens))
        raise_alike(merge([found for found, _ in answers]))
        return token_class([count for _, count in answers])

    def _quantize(self, x: torch.Tensor) -> QuantizedTokens:
        from .quantize_gfx950 import build  # noqa: PLC0415  (loads the compiler, which takes seconds)

        tokens = x.shape[0]
        codes = x.new_empty((tokens, self.shape.model_dim), dtype=torch.uint8)
        scales = x.new_empty((tokens, self.layout.input_scales.row_bytes), dtype=torch.uint8)
        if tokens:
            self._launch(build, self.shape.model_dim, (x, codes, scales), (tokens,))
        return QuantizedTokens(codes, scales)

    def _run_stage1(
        self, quantized: QuantizedTokens, arguments: CallArguments, agreed: int, exchanged: bool
    ) -> Stage1Result:
        tokens, config = cast(int, arguments.num_tokens), self.config_for(agreed)
        result = Stage1Result(
            tokens, agreed, exchanged, config, arguments.expert_ids, quantized, arguments.route_weights
        )
        self._launch_stage1(result)
        self._pending = result
        return result

    def _launch_stage1(self, call: Stage1Result, phases: Sequence[str] | None = None) -> None:
        from .stage1_gfx950 import PHASES, Stage1, build  # noqa: PLC0415

        parts = PHASES if phases is None else tuple(phases)
        stage = Stage1(self.layout, call.config, self.activation, self.bounds_check, parts)
        quantized, weights = call.quantized, self.weights
        tensors = (quantized.codes, quantized.scales, call.route_weights, call.expert_ids)
        numbers = (self.rank, call.num_tokens)
        self._launch(build, stage, (*tensors, weights.w1, weights.w1_scales), (), numbers)

    def _run_stage2(self, result: Stage1Result, out: torch.Tensor | None) -> torch.Tensor:
        shape = (result.num_tokens, self.shape.model_dim)
        target = torch.empty(shape, dtype=self.output_dtype, device=self.heap.device) if out is None else out
        self._launch_stage2(result, target)
        self._pending = None
        self._look_at_reports()
        return target

    def _look_at_reports(self) -> None:
        if not _capturing(self.heap.device):
            self.raise_reported_ids()

    def _launch_stage2(
        self, call: Stage1Result, out: torch.Tensor, phases: Sequence[str] | None = None
    ) -> None:
        from .stage2_gfx950 import PHASES, Stage2, build  # noqa: PLC0415

        stage = Stage2(self.layout, call.config, PHASES if phases is None else tuple(phases))
        tensors = (call.expert_ids, self.weights.w2, self.weights.w2_scales, out)
        numbers = (self.rank, call.num_tokens, stage.num_gemm(call.token_class))
        self._launch(build, stage, tensors, (), numbers)

    def _launch(
        self,
        build: Callable[[Any], Any],
        stage: object,
        tensors: Sequence[torch.Tensor],
        after: tuple[int, ...],
        before: tuple[int, ...] | None = None,
    ) -> None:
        """A launch: for a stage the table of regions and ``before``, then addresses, then ``after``."""
        from .launching import launch  # noqa: PLC0415

        for tensor in tensors:
            self.heap.expose(tensor)
        head = () if before is None else (self._region.peers.data_ptr(), *before)
        addresses = [tensor.data_ptr() for tensor in tensors]
        launch(self.heap.target, build, stage, (*head, *addresses, *after), self.heap.device)


def _prepare_region(heap: SymmetricHeap, layout: SymmetricLayout) -> SymmetricRegion:
    """The layer's symmetric memory, its counters zero on every rank before any rank goes on."""
    region = heap.allocate(f"mega_moe {layout.name}", layout.num_bytes)
    for buffer in layout.buffers.values():
        if buffer.zeroed:
            region.memory[buffer.offset : buffer.offset + buffer.num_bytes].zero_()
    heap.barrier()
    return region


def _arguments(quantized: object, route_weights: object, expert_ids: object, out: object) -> CallArguments:
    if not isinstance(quantized, QuantizedTokens):  # then its kind is told twice, as codes and as scales
        quantized = QuantizedTokens(cast(Any, quantized), cast(Any, quantized))
    codes, scales = quantized.codes, quantized.scales
    return CallArguments(None, codes, scales, route_weights, expert_ids, out, prequantized=True)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
