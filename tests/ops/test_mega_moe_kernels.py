# SPDX-License-Identifier: Apache-2.0
"""What holds for the kernels whatever the schedule: names, special values, ranks beside one another."""

from __future__ import annotations

import re
from dataclasses import replace

import flydsl.expr as fx
import ml_dtypes
import numpy as np
import pytest
import torch
from mega_moe_device import combine_launcher
from mega_moe_ranks import Call, emulate, make_call, routed_call, small_ranks

from kernellib.emulator import compile_to_assembly, emulated
from kernellib.numerics import mx
from kernellib.ops.mega_moe.combine_gfx950 import Combine
from kernellib.ops.mega_moe.config import MegaMoEConfig, MegaMoEShape
from kernellib.ops.mega_moe.layout import SymmetricLayout
from kernellib.ops.mega_moe.reference import relative_l2
from kernellib.ops.mega_moe.routing import Routing
from kernellib.ops.mega_moe.stage1_gfx950 import PHASES as STAGE1_PHASES
from kernellib.ops.mega_moe.stage1_gfx950 import Stage1
from kernellib.ops.mega_moe.stage1_gfx950 import build as build_stage1
from kernellib.ops.mega_moe.stage2_gfx950 import PHASES as STAGE2_PHASES
from kernellib.ops.mega_moe.stage2_gfx950 import Stage2
from kernellib.ops.mega_moe.stage2_gfx950 import build as build_stage2

SHAPE = MegaMoEShape(8, 256, 256, 3)
CONFIG = MegaMoEConfig(
    tile_m=16, gemm1_tile_n=256, gemm2_tile_n=256, num_dispatch_cu=2, num_cu=4, num_queue_shards=2
)
SEED = 11


def variants() -> list[Stage1 | Stage2]:
    """Stages that differ from the first of each kind in one choice."""
    layout = SymmetricLayout(SHAPE, 4, 16, "bf16")
    layouts = [
        layout,
        replace(layout, num_ranks=2),
        replace(layout, capacity=32),
        replace(layout, wire="fp8_blockwise_1x32"),
        *(replace(layout, shape=replace(SHAPE, **{name: value})) for name, value in SHAPE_CHANGES.items()),
    ]
    configs = [replace(CONFIG, **change) for change in CONFIG_CHANGES]
    found: list[Stage1 | Stage2] = []
    for one in layouts:
        found += [Stage1(one, CONFIG, "situv2"), Stage2(one, CONFIG)]
    for config in configs:
        found += [Stage1(layout, config, "situv2"), Stage2(layout, config)]
    found += [Stage1(layout, CONFIG, "silu"), Stage1(layout, CONFIG, "situv2", bounds_check=True)]
    found += [
        Stage1(replace(layout, shape=replace(SHAPE, **{name: 2.5})), CONFIG, "situv2")
        for name in ("situ_beta", "situ_linear_beta")
    ]
    found += [Stage1(layout, CONFIG, "situv2", phases=(phase,)) for phase in STAGE1_PHASES]
    found += [Stage2(layout, CONFIG, phases=(phase,)) for phase in STAGE2_PHASES]
    return found


SHAPE_CHANGES = {"num_experts": 16, "model_dim": 128, "inter_dim": 128, "top_k": 2}
CONFIG_CHANGES: tuple[dict[str, object], ...] = (
    {"tile_m": 32},
    {"gemm1_tile_n": 128},
    {"gemm2_tile_n": 128},
    {"num_dispatch_cu": 1},
    {"tile_order": "ready"},
    {"num_queue_shards": 3},
    {"b2stage": True},
    {"persist_cu": 2},
    {"persist_cu": 2, "persist_strided": True},
    {"num_cu": 5},
)


def test_no_two_variants_share_a_name() -> None:
    stages = variants()
    names = [stage.kernel_name for stage in stages]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice
    assert all(name.replace("_", "").isalnum() for name in names)


def test_a_name_says_what_was_chosen() -> None:
    stage = Stage1(SymmetricLayout(SHAPE, 4, 16, "fp8_blockwise_1x32"), CONFIG, "situv2", bounds_check=True)
    for part in (
        "stage1",
        "m16n256x256",
        "d2of4",
        "expert2",
        "act_situv2",
        "4p0b25p0",
        "check_1",
        "fp8_block",
    ):
        assert part in stage.kernel_name, part


def listings() -> dict[str, list[str]]:
    """The instructions of both stages, ready order, GEMM2 drawing tiles."""
    config = replace(CONFIG, tile_order="ready", persist_cu=4)
    layout = SymmetricLayout(SHAPE, 4, 16, "bf16")
    texts = {
        "stage1": compile_to_assembly(
            build_stage1(Stage1(layout, config, "situv2")), *[1] * 9, fx.Stream(None)
        ),
        "stage2": compile_to_assembly(build_stage2(Stage2(layout, config)), *[1] * 8, fx.Stream(None)),
    }
    return {
        stage: [line.strip() for line in text.splitlines() if line.startswith("\t") and line[1] != "."]
        for stage, text in texts.items()
    }


def test_releases_acquires_and_flags_as_the_memory_model_has_them() -> None:
    """LLVM AMDGPU guide, memory model gfx942: a release writes caches back (buffer_wbl2, both scope bits
    for other ranks) and waits before the store or atomic that publishes it; an acquire is a load with scope
    bits, its wait, and buffer_inv."""
    for stage, code in listings().items():
        releases = [i for i, line in enumerate(code) if line.startswith("buffer_wbl2")]
        assert len(releases) >= 2, stage
        for i in releases:
            assert code[i] == "buffer_wbl2 sc0 sc1", stage
            assert code[i + 1].startswith("s_waitcnt vmcnt(0)"), (stage, code[i : i + 3])
        acquires = [i for i, line in enumerate(code) if line.startswith("buffer_inv")]
        assert len(acquires) >= 2, stage
        spins = [i for i, line in enumerate(code) if line.startswith("s_sleep")]
        assert len(spins) == {"stage1": 4, "stage2": 1}[stage]
        for i in spins:
            poll = code[i + 1]
            assert re.match(r"global_load_dword v.* sc1$", poll), (stage, poll)
            assert code[i + 2].startswith("s_waitcnt vmcnt(0)"), (stage, code[i : i + 3])
        # An atomic that returns carries sc0; sc1 makes it one for all ranks.
        atomics = [line for line in code if line.startswith("global_atomic")]
        assert atomics
        assert all(re.search(r" sc0( sc1)?$", line) for line in atomics), atomics


def special_inputs(dim: int) -> dict[str, np.ndarray]:
    """Rows that hold one kind of value each."""
    rng = np.random.default_rng(SEED)
    ordinary = rng.standard_normal(dim)
    one_nan, one_inf, one_huge = ordinary.copy(), ordinary.copy(), ordinary.copy()
    one_nan[40], one_inf[77], one_huge[5] = np.nan, -np.inf, 3e38
    return {
        "zero": np.zeros(dim),
        "one_nan": one_nan,
        "ordinary": ordinary,
        "one_inf": one_inf,
        "subnormal": np.full(dim, 2.0**-130),
        "one_huge": one_huge,
        "tiny": ordinary * 2.0**-100,
        "small": ordinary * 2.0**-20,  # where 1 - 2 / (e^2x + 1) has no digit of tanh left
    }


@pytest.mark.parametrize("wire", ["bf16", "fp8_blockwise_1x32"])
@pytest.mark.parametrize("activation", ["situv2", "silu"])
def test_special_rows_stay_what_they_are(wire: str, activation: str) -> None:
    """Tokens of zeros, subnormals, huge values, Inf and NaN: NaN where the reference has it and nowhere else,
    and an ordinary token among them is untouched."""
    rows = special_inputs(SHAPE.model_dim)
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 2, CONFIG, wire=wire, activation=activation)
        call = routed_call(ranks, "uniform", len(rows), SEED)
        for rank in range(2):
            values = np.stack(list(rows.values())).astype(ml_dtypes.bfloat16)
            call.inputs[rank] = values.astype(np.float32)
            call.x[rank][: len(rows)] = torch.from_numpy(values.view(np.int16))
        ranks.run(call)
        with np.errstate(all="ignore"):
            references = ranks.expected(call)
    for got, expected in zip(call.results(), references, strict=True):
        for index, name in enumerate(rows):
            finite = np.isfinite(expected[index])
            assert np.array_equal(np.isfinite(got[index]), finite), name
            assert relative_l2(got[index][finite], expected[index][finite]) <= 1e-3, name
        assert not np.isfinite(got[1]).any()  # one_nan: every output sums over every input
        assert np.isfinite(got[2]).all()


def test_combine_reads_every_scale() -> None:
    """Each of the 256 scale bytes on the wire, 0 (2^-127, a subnormal) and 255 (NaN) among them."""
    c = Combine(SymmetricLayout(MegaMoEShape(8, 512, 128, 1), 1, 16, "fp8_blockwise_1x32"), 4)
    rng = np.random.default_rng(SEED)
    wire = np.zeros((16, c.layout.wire_row_bytes), np.uint8)
    wire[:, :512] = rng.integers(0, 0x7F, (16, 512)) | rng.integers(0, 2, (16, 512)) << 7
    wire[:, 512:528] = np.arange(256).reshape(16, 16)
    tensors = (torch.from_numpy(wire), torch.zeros(16, 1, dtype=torch.int32), torch.zeros(16, 512).bfloat16())
    with emulated() as session:
        for tensor in tensors:
            session.register(tensor)
        memory, ids, out = (tensor.data_ptr() for tensor in tensors)
        emulate(combine_launcher(c), memory, ids, 16, out, 0)
    expected = mx.dequantize(wire[:, :512], wire[:, 512:528], mx.E4M3).astype(ml_dtypes.bfloat16)
    assert np.array_equal(tensors[2].float().numpy(), expected.astype(np.float32), equal_nan=True)
    assert (expected[0, :32] != 0).any(), "what E = 0 scales is not zero"


@pytest.mark.parametrize("order", ["expert", "ready"])
def test_an_expert_named_in_every_slot(order: str) -> None:
    """One expert a rank and four slots: all routes of all ranks arrive at one expert, more than there are
    tokens, and lie where they have room."""
    shape, counts = MegaMoEShape(4, 128, 128, 4), (64, 40, 0, 1)
    config = replace(CONFIG, tile_order=order).scaled(shape, 4)
    with emulated() as session:
        ranks = small_ranks(session, shape, 4, config, capacity=64)
        rng = np.random.default_rng(SEED)
        ids = tuple(np.full((tokens, 4), 2, np.int32) for tokens in counts)
        weights = tuple(rng.uniform(0.1, 1.0, part.shape).astype(np.float32) for part in ids)
        call = make_call(ranks.layout, Routing("one expert in every slot", ids, weights), SEED)
        ranks.run(call)
        for got, expected in zip(call.results(), ranks.expected(call), strict=True):
            assert relative_l2(got, expected) <= 1e-3
        assert ranks.buffer(2, "num_tiles")[1] == -(-sum(counts) * 4 // 16)
        sources = ranks.buffer(2, "row_source")[: sum(counts) * 4]
        assert len(set(sources.tolist())) == sum(counts) * 4, "each route has a row of its own"


def all_on_one_rank(routing: Routing) -> Routing:
    return Routing(routing.name, (np.concatenate(routing.expert_ids),), (np.concatenate(routing.weights),))


def bits(call: Call) -> np.ndarray:
    tokens = call.routing.tokens_per_rank
    return np.concatenate([out[:n].numpy() for out, n in zip(call.out, tokens, strict=True)])


@pytest.mark.parametrize("kind", ["mixed_skew", "ragged"])
def test_ranks_together_are_one_rank(kind: str) -> None:
    """The same tokens and experts on four ranks and on one: bit for bit the same, whichever tile a row was
    in. A rank that computed another's experts, or dropped its own, would show."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 4, CONFIG)
        call = routed_call(ranks, kind, 6, SEED)
        ranks.run(call)
        alone = small_ranks(session, SHAPE, 1, replace(CONFIG, tile_m=32, tile_order="ready"), capacity=32)
        together = make_call(alone.layout, all_on_one_rank(call.routing), SEED)
        together.inputs[0] = np.concatenate(call.inputs)
        tokens = sum(call.routing.tokens_per_rank)
        x = together.inputs[0].astype(ml_dtypes.bfloat16).view(np.int16)
        together.x[0][:tokens] = torch.from_numpy(x)
        alone.run(together)
    assert np.array_equal(bits(call), bits(together))
    assert np.abs(call.results()[-1]).sum() > 0


def test_phases_in_launches_of_their_own() -> None:
    """The same stages cut into separate launches, as the serial baseline runs them: bit for bit the same."""
    with emulated() as session:
        ranks = small_ranks(session, SHAPE, 2, CONFIG, wire="fp8_blockwise_1x32")
        call, again = (routed_call(ranks, "uniform", 5, SEED) for _ in range(2))
        ranks.run(call)
        cuts1 = [replace(ranks.stage1, phases=phases) for phases in (STAGE1_PHASES[:3], STAGE1_PHASES[3:])]
        cuts2 = [replace(ranks.stage2, phases=(phase,)) for phase in STAGE2_PHASES]

        def host(rank: object) -> None:
            index = rank.index  # type: ignore[attr-defined]
            ranks.quantize(again, index)
            for cut in cuts1:
                ranks.run_stage1(again, index, cut)
            for cut in cuts2:
                ranks.run_stage2(again, index, cut)

        ranks.world.run(host)
    assert np.array_equal(bits(call), bits(again))
