# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2 GiB in a rank's symmetric memory: rows, hidden rows and the wire of large capacities.

At Kimi-K3's shape and a capacity of 8192 the rows alone take 3.5 GiB. Here the memory is as large, but only
the pages that are used exist: between the launches of the stages' phases the rows of a few tokens are moved
to the end of their buffers. (Weights past 4 GiB: test_mega_moe_gemm.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from mega_moe_device import combine_launcher
from mega_moe_ranks import Ranks, emulate, make_call

from kernellib.emulator import emulated
from kernellib.ops.mega_moe.combine_gfx950 import Combine
from kernellib.ops.mega_moe.config import MegaMoEConfig, MegaMoEShape
from kernellib.ops.mega_moe.layout import SymmetricLayout
from kernellib.ops.mega_moe.reference import oracle_quantized, relative_l2
from kernellib.ops.mega_moe.routing import make_routing
from kernellib.ops.mega_moe.stage1_gfx950 import PHASES as STAGE1_PHASES
from kernellib.ops.mega_moe.stage1_gfx950 import Stage1
from kernellib.ops.mega_moe.stage2_gfx950 import Stage2
from kernellib.ops.mega_moe.weights import random_experts

SHAPE = MegaMoEShape(2, 512, 512, 2)
CAPACITY = 1 << 21
CONFIG = MegaMoEConfig(
    tile_m=16, gemm1_tile_n=512, gemm2_tile_n=512, num_dispatch_cu=1, num_cu=2, num_queue_shards=1
)
FAR = 1 << 31
SEED, TOKENS, PARITY = 5, 3, 1


@dataclass
class FarRanks(Ranks):
    """One rank, whose payload memory is neither filled nor marked: its pages stay unused."""

    def __post_init__(self) -> None:
        self.world = self.session.create_world(1)
        region = torch.empty(self.layout.num_bytes, dtype=torch.uint8)
        self.session.register(region)
        for buffer in self.layout.buffers.values():
            if buffer.zeroed:
                buffer.view(region.numpy())[...] = 0
        self.regions = [region]
        self.peers = torch.tensor([region.data_ptr()])
        self.session.register(self.peers)
        self.register_weights()


def move_tiles(ranks: FarRanks) -> int:
    """After the plan: the tiles' rows start at the first multiple of a tile whose bytes lie past FAR."""
    first = -(-FAR // SHAPE.model_dim // CONFIG.tile_m) * CONFIG.tile_m
    num_tiles = int(ranks.buffer(0, "num_tiles")[PARITY])
    assert (first + num_tiles * CONFIG.tile_m) <= ranks.layout.max_rows
    ranks.buffer(0, "row_base")[PARITY] += first
    ready, tile = ranks.buffer(0, "tile_ready")[PARITY], first // CONFIG.tile_m
    ready[tile : tile + num_tiles] = ready[:num_tiles]
    ranks.buffer(0, "tile_meta")[PARITY, :num_tiles, 1] += first
    return tile


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["bf16", "fp8_blockwise_1x32"])
def test_rows_hidden_rows_and_wire_past_2_gib(wire: str) -> None:
    layout = SymmetricLayout(SHAPE, 1, CAPACITY, wire)  # type: ignore[arg-type]
    with emulated() as session:
        ranks = FarRanks(session, layout, CONFIG, random_experts(SHAPE, SEED))
        call = make_call(layout, make_routing("uniform", SHAPE, 1, TOKENS, SEED), SEED)
        stages = [
            Stage1(layout, CONFIG, "situv2", phases=p) for p in (STAGE1_PHASES[:2], ("dispatch",), ("gemm1",))
        ]
        ranks.quantize(call, 0)
        ranks.run_stage1(call, 0, stages[0])
        tile = move_tiles(ranks)
        ranks.run_stage1(call, 0, stages[1])
        ready = ranks.buffer(0, "tile_ready")[PARITY]
        num_tiles = int(ranks.buffer(0, "num_tiles")[PARITY])
        assert (ready[tile : tile + num_tiles] & 0xFFFF == CONFIG.tile_m).all(), (
            "every row was counted far away"
        )
        ready[:num_tiles] = ready[tile : tile + num_tiles]
        ranks.run_stage1(call, 0, stages[2])
        token = FAR // layout.stride("wire") + 1
        first = tile * CONFIG.tile_m
        ranks.buffer(0, "row_source")[first : first + num_tiles * CONFIG.tile_m] += token
        ranks.run_stage2(call, 0, Stage2(layout, CONFIG, phases=("gemm2",)))
        found = ranks.buffer(0, "wire")[token : token + TOKENS]
        expected = oracle_quantized(SHAPE, call.inputs, call.routing, ranks.experts, "situv2", layout.wire)
    assert relative_l2(summed(layout, found), expected[0]) < 3e-3, f"not rounded to bf16, seed {SEED}"


def summed(layout: SymmetricLayout, rows: np.ndarray) -> np.ndarray:
    """The sum over slots of wire rows [tokens, top_k, bytes], fp32."""
    dim = layout.shape.model_dim
    if layout.wire == "bf16":
        return rows[..., : 2 * dim].copy().view(ml_dtypes.bfloat16).astype(np.float32).sum(axis=1)
    codes = rows[..., :dim].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = np.exp2(rows[..., dim : dim + dim // 32].astype(np.float32) - 127)
    return (codes * np.repeat(scales, 32, axis=-1)).sum(axis=1)


@pytest.mark.parametrize("wire", ["bf16", "fp8_blockwise_1x32"])
def test_combine_past_2_gib(wire: str) -> None:
    """The last token of a call of two million: its rows, and with the bf16 wire its output, lie past FAR."""
    shape = MegaMoEShape(4, 1024, 128, 2)
    layout = SymmetricLayout(shape, 1, 1 << 21, wire)  # type: ignore[arg-type]
    c = Combine(layout, 4)
    tokens = (1 << 20) + 2
    units = tokens * c.chunks_per_token
    rng = np.random.default_rng(SEED)
    memory = torch.empty(tokens * layout.stride("wire"), dtype=torch.uint8)
    rows = memory[-layout.stride("wire") :].numpy().reshape(1, 2, -1)
    values = rng.standard_normal((1, 2, 1024)).astype(np.float32)
    if wire == "bf16":
        rows[..., :2048] = values.astype(ml_dtypes.bfloat16).view(np.uint8)
    else:
        rows[..., :1024] = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        rows[..., 1024:1056] = rng.integers(120, 130, (1, 2, 32))
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    out = torch.empty(tokens, 1024, dtype=torch.int16)
    assert (tokens - 1) * layout.stride("wire") >= FAR
    assert out.numel() * 2 > FAR
    with emulated() as session:
        for tensor in (memory, ids, out):
            session.register(tensor)
        skipped = units // c.num_waves - 1  # workgroups that would have come before
        emulate(combine_launcher(c), memory.data_ptr(), ids.data_ptr(), tokens, out.data_ptr(), skipped)
    got = out[-1].numpy().view(ml_dtypes.bfloat16).astype(np.float32)
    assert relative_l2(got, summed(layout, rows)[0].astype(ml_dtypes.bfloat16).astype(np.float32)) == 0.0
