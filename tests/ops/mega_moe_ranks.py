# SPDX-License-Identifier: Apache-2.0
"""Drives the MegaMoE kernels on emulated ranks, without the operator's host code: layout, regions, launches.

Everything that a kernel must not read before it is written is poison: regions, outputs, what lies beside
dropped routes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import flydsl.expr as fx
import ml_dtypes
import numpy as np
import torch
from flydsl.compiler.jit_function import _build_call_state

from kernellib.emulator.session import Session
from kernellib.emulator.world import Rank, World
from kernellib.ops.mega_moe import quantize_gfx950, stage1_gfx950, stage2_gfx950
from kernellib.ops.mega_moe.config import Activation, MegaMoEConfig, MegaMoEShape, Wire
from kernellib.ops.mega_moe.layout import SymmetricLayout
from kernellib.ops.mega_moe.reference import make_inputs, oracle_quantized
from kernellib.ops.mega_moe.routing import Routing, make_routing
from kernellib.ops.mega_moe.stage1_gfx950 import Stage1
from kernellib.ops.mega_moe.stage2_gfx950 import Stage2
from kernellib.ops.mega_moe.weights import ExpertSource, PackedWeights, pack_experts, random_experts

POISON = 0xA5
BF16_POISON = 0x7FC1  # a NaN


_compiled: dict[Any, Callable[[tuple[Any, ...]], Any]] = {}
_lock = threading.Lock()


def emulate(launcher: Any, *numbers: int) -> None:
    """Launches on the emulator; traces and compiles a launcher once, in whichever rank comes first."""
    arguments = (*numbers, fx.Stream(None))
    with _lock:
        if launcher not in _compiled:
            launcher._compile_only(*arguments)
            _compiled[launcher] = _build_call_state(launcher._sig, arguments, launcher._last_compiled[1])
    _compiled[launcher](arguments)


@dataclass
class Call:
    """One forward call of all ranks: inputs, device buffers, outputs."""

    inputs: list[np.ndarray]
    routing: Routing
    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    codes: list[torch.Tensor]
    scales: list[torch.Tensor]
    out: list[torch.Tensor]

    @property
    def token_class(self) -> int:
        return max(self.routing.tokens_per_rank)

    def results(self) -> list[np.ndarray]:
        """fp32 [tokens, model_dim] of each rank; rows past the last token must be untouched."""
        found = []
        for out, tokens in zip(self.out, self.routing.tokens_per_rank, strict=True):
            assert (out[tokens:] == BF16_POISON).all(), "rows past the last token were written"
            found.append(out[:tokens].numpy().view(ml_dtypes.bfloat16).astype(np.float32))
        return found


def make_call(layout: SymmetricLayout, routing: Routing, seed: int) -> Call:
    """Buffers of one call; a spare token's worth of poison behind each."""
    dim, top_k = layout.shape.model_dim, layout.shape.top_k
    inputs = make_inputs(layout.shape, routing.tokens_per_rank, seed)
    call = Call(inputs, routing, [], [], [], [], [], [])
    for rank, tokens in enumerate(routing.tokens_per_rank):
        x = np.full((tokens + 1, dim), BF16_POISON, np.uint16)
        x[:tokens] = inputs[rank].astype(ml_dtypes.bfloat16).view(np.uint16)
        ids = np.full((tokens + 1, top_k), 0x5A5A5A, np.int32)
        ids[:tokens] = routing.expert_ids[rank]
        weights = np.full((tokens + 1, top_k), np.nan, np.float32)
        weights[:tokens] = routing.weights[rank]
        call.x.append(torch.from_numpy(x.view(np.int16)))
        call.ids.append(torch.from_numpy(ids))
        call.weights.append(torch.from_numpy(weights))
        call.codes.append(torch.full((tokens + 1, dim), POISON, dtype=torch.uint8))
        scale_bytes = layout.input_scales.row_bytes
        call.scales.append(torch.full((tokens + 1, scale_bytes), POISON, dtype=torch.uint8))
        call.out.append(torch.full((tokens + 1, dim), BF16_POISON, dtype=torch.int16))
    return call


@dataclass
class Ranks:
    """The ranks of one layer on an emulator session.

    Attributes:
        layout, config, activation, bounds_check: what the kernels are compiled for.
        experts: weights by global id.
    """

    session: Session
    layout: SymmetricLayout
    config: MegaMoEConfig
    experts: ExpertSource
    activation: Activation = "situv2"
    bounds_check: bool = False
    packed: Sequence[PackedWeights] | None = None
    world: World = field(init=False)
    regions: list[torch.Tensor] = field(init=False)
    peers: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        self.config.check_shape(layout.shape)
        self.world = self.session.create_world(layout.num_ranks)
        self.regions = self.world.allocate((layout.num_bytes,), torch.uint8, POISON)
        for region in self.regions:
            for buffer in layout.buffers.values():
                if buffer.zeroed:
                    buffer.view(region.numpy())[...] = 0
                else:
                    self.session.poison(region[buffer.offset : buffer.offset + buffer.num_bytes])
        self.peers = torch.tensor([region.data_ptr() for region in self.regions])
        self.session.register(self.peers)
        self.register_weights()

    def register_weights(self) -> None:
        """Packs them unless they are given."""
        if self.packed is None:
            local = self.layout.experts_per_rank
            self.packed = [
                pack_experts(self.layout.shape, [self.experts(rank * local + i) for i in range(local)])
                for rank in range(self.layout.num_ranks)
            ]
        for weights in self.packed:
            for tensor in (weights.w1, weights.w1_scales, weights.w2, weights.w2_scales):
                self.session.register(tensor)

    @property
    def stage1(self) -> Stage1:
        return Stage1(self.layout, self.config, self.activation, self.bounds_check)

    @property
    def stage2(self) -> Stage2:
        return Stage2(self.layout, self.config)

    def buffer(self, rank: int, name: str) -> np.ndarray:
        """A buffer of a rank's region."""
        return self.layout.buffers[name].view(self.regions[rank].numpy())

    def launch(self, what: str, launcher: Any, *arguments: int) -> None:
        """Launches a kernel; ``what`` says which."""
        emulate(launcher, *arguments)

    def quantize(self, call: Call, rank: int) -> None:
        tokens = call.routing.tokens_per_rank[rank]
        if tokens:
            dim = self.layout.shape.model_dim
            addresses = [tensor[rank].data_ptr() for tensor in (call.x, call.codes, call.scales)]
            self.launch("quantize", quantize_gfx950.build(dim), *addresses, tokens)

    def run_stage1(self, call: Call, rank: int, stage: Stage1 | None = None) -> None:
        assert self.packed is not None
        tokens = call.routing.tokens_per_rank[rank]
        tensors = (call.codes, call.scales, call.weights, call.ids)
        self.launch(
            "stage1",
            stage1_gfx950.build(stage or self.stage1),
            self.peers.data_ptr(),
            rank,
            tokens,
            *(tensor[rank].data_ptr() for tensor in tensors),
            self.packed[rank].w1.data_ptr(),
            self.packed[rank].w1_scales.data_ptr(),
        )

    def run_stage2(self, call: Call, rank: int, stage: Stage2 | None = None) -> None:
        assert self.packed is not None
        stage = stage or self.stage2
        self.launch(
            "stage2",
            stage2_gfx950.build(stage),
            self.peers.data_ptr(),
            rank,
            call.routing.tokens_per_rank[rank],
            stage.num_gemm(call.token_class),
            call.ids[rank].data_ptr(),
            self.packed[rank].w2.data_ptr(),
            self.packed[rank].w2_scales.data_ptr(),
            call.out[rank].data_ptr(),
        )

    def run(self, *calls: Call, before: Callable[[Rank], None] | None = None) -> None:
        """Calls back to back, every rank on its own, with nothing between them but stream order."""
        for call in calls:
            for tensors in (call.x, call.ids, call.weights):
                for tensor in tensors:
                    self.session.register(tensor)
            for tensors in (call.codes, call.scales, call.out):
                for tensor in tensors:
                    self.session.poison(tensor)

        def host(rank: Rank) -> None:
            if before is not None:
                before(rank)
            for call in calls:
                self.quantize(call, rank.index)
                self.run_stage1(call, rank.index)
                self.run_stage2(call, rank.index)

        self.world.run(host)

    def expected(self, call: Call) -> list[np.ndarray]:
        shape, wire = self.layout.shape, self.layout.wire
        return oracle_quantized(shape, call.inputs, call.routing, self.experts, self.activation, wire)


def small_ranks(
    session: Session,
    shape: MegaMoEShape,
    num_ranks: int,
    config: MegaMoEConfig,
    capacity: int = 8,
    wire: Wire = "bf16",
    activation: Activation = "situv2",
    seed: int = 3,
    bounds_check: bool = False,
) -> Ranks:
    """Ranks with random experts."""
    layout = SymmetricLayout(shape, num_ranks, capacity, wire)
    return Ranks(session, layout, config, random_experts(shape, seed), activation, bounds_check)


def routed_call(ranks: Ranks, kind: str, tokens: int | Sequence[int], seed: int) -> Call:
    """A call of a routing kind with inputs of its own."""
    layout = ranks.layout
    routing = make_routing(kind, layout.shape, layout.num_ranks, tokens, seed)
    return make_call(layout, routing, seed)
