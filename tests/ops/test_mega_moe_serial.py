# SPDX-License-Identifier: Apache-2.0
"""The serial baselines: in steps, with the layer's result; mori's calls fit the wheel's signatures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernellib import emulator
from kernellib.numerics import mx
from kernellib.ops.contract import ContractError
from kernellib.ops.mega_moe import serial
from kernellib.ops.mega_moe.config import ACTIVATIONS, WIRES, MegaMoEConfig, MegaMoEShape
from kernellib.ops.mega_moe.layout import LayoutError
from kernellib.ops.mega_moe.reference import oracle_quantized, relative_l2
from kernellib.ops.mega_moe.routing import KINDS
from kernellib.ops.mega_moe.serial import SerialKernels, SerialMori, serial_baseline
from kernellib.ops.mega_moe.serial_torch import TorchSerial, dequantize_matrix, round_e4m3_blocks
from kernellib.ops.mega_moe.weights import matrix_layouts, unpack_expert
from kernellib.symmetric import SymmetricHeap
from kernellib.symmetric.emulated_provider import EmulatedProvider
from tests.ops.mega_moe_layers import (
    SMALL,
    Case,
    experts_of,
    make_case,
    make_layer,
    on_ranks,
    packed_for,
    results_of,
)
from tests.symmetric.fake_mori import FakeMori

RANKS, CAPACITY, SEED = 2, 4, 11
TOLERANCE = 1e-3
WIDE = MegaMoEShape(8, 256, 640 - 128, 3)


# ------------------------------------------------------------------------------- this project's kernels


@pytest.mark.parametrize(
    "config",
    [
        MegaMoEConfig(tile_m=16, num_dispatch_cu=128),
        pytest.param(
            MegaMoEConfig(tile_m=32, tile_order="ready", b2stage=True, persist_cu=256), marks=pytest.mark.slow
        ),
        pytest.param(MegaMoEConfig(tile_m=16, persist_cu=256, persist_strided=True), marks=pytest.mark.slow),
    ],
    ids=lambda config: config.name,
)
def test_the_phases_by_themselves_are_the_fused_stages_bit_for_bit(config: MegaMoEConfig) -> None:
    case = make_case(SMALL, "padded", RANKS, (3, 4), SEED)

    def host(heap: SymmetricHeap) -> tuple[bool, bool]:
        moe = make_layer(SMALL, heap, CAPACITY, config=config.scaled(SMALL, 2), wire="fp8_blockwise_1x32")
        baseline = serial_baseline(moe)
        assert type(baseline) is SerialKernels
        arguments = case.tensors(heap.rank)
        fused = moe(*arguments)
        stepwise = baseline(*arguments, torch.full_like(arguments[0], float("nan")))
        return torch.equal(fused, stepwise), torch.equal(fused, moe(*arguments))

    results, launches = on_ranks(RANKS, host)
    assert results_of(results) == [(True, True)] * RANKS
    names = [launch.kernel_name for launch in launches]
    parts = ["parts_histogram_plan_dispatch", "parts_gemm1", "parts_gemm2", "parts_combine"]
    assert [sum(name.endswith(part) for name in names) for part in parts] == [RANKS] * 4
    assert sum(name.endswith("parts_fused") for name in names) == 2 * 2 * RANKS
    assert len(SerialKernels.launches) == 1 + len(parts)


def test_a_serial_call_has_the_layers_contract() -> None:
    def host(heap: SymmetricHeap) -> str:
        x, weights, ids = make_case(SMALL, "uniform", RANKS, 2, SEED).tensors(heap.rank)
        baseline = SerialKernels(make_layer(SMALL, heap, CAPACITY))
        with pytest.raises(ContractError) as caught:
            baseline(x.float() if heap.rank else x, weights, ids)
        return str(caught.value)

    first, second = results_of(on_ranks(RANKS, host)[0])
    assert first == second
    assert "x (rank 1)" in first


# -------------------------------------------------------------------------------------- plain torch


def torch_serial(case: Case, shape: MegaMoEShape, ranks: int, **options: Any) -> list[Any]:
    tensors = [case.tensors(rank) for rank in range(ranks)]
    weights = [packed_for(shape, ranks, rank) for rank in range(ranks)]
    x, route_weights, ids = (list(column) for column in zip(*tensors, strict=True))
    return TorchSerial(shape, weights, **options)(x, route_weights, ids)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_agrees_with_the_quantisation_aware_oracle(kind: str, activation: Any, wire: Any) -> None:
    case = make_case(WIDE, kind, 4, 5, SEED)
    expected = oracle_quantized(WIDE, case.inputs, case.routing, experts_of(WIDE), activation, wire)
    for got, wanted in zip(
        torch_serial(case, WIDE, 4, activation=activation, wire=wire), expected, strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert relative_l2(got.float().numpy(), wanted) < TOLERANCE


def test_plain_torch_tells_the_activations_apart() -> None:
    case = make_case(WIDE, "uniform", 4, 5, SEED)
    situv2, silu = (
        np.concatenate([part.float().numpy() for part in torch_serial(case, WIDE, 4, activation=activation)])
        for activation in ACTIVATIONS
    )
    assert relative_l2(situv2, silu) > 0.01


def test_torch_rounds_blocks_as_the_numpy_rule_does() -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.standard_normal((64, 128), np.float32) * np.exp2(rng.integers(-150, 127, (64, 1))).astype("f4")
    rows[0, :32], rows[1, 3], rows[2, 5], rows[3, 7] = 0.0, np.inf, np.nan, 3e38
    rows[4, :32] = 448.0 * np.float32(2.0) ** -20
    rows[5, :32] = np.nextafter(np.float32(448.0), np.float32(1e9))
    expected = mx.quantize(rows, mx.E4M3).dequantize()
    got = round_e4m3_blocks(torch.from_numpy(rows)).numpy()
    np.testing.assert_array_equal(got, expected)


def test_torch_unpacks_weights_exactly() -> None:
    weights = packed_for(WIDE, 4, 1)
    for index in range(2):
        wanted = unpack_expert(weights, index).dequantized()
        for layout, parts, matrix in zip(
            matrix_layouts(WIDE),
            ((weights.w1, weights.w1_scales), (weights.w2, weights.w2_scales)),
            wanted,
            strict=True,
        ):
            elements, scales = (
                tensor[index * size :][:size]
                for tensor, size in zip(parts, (layout.element_bytes, layout.scale_bytes), strict=True)
            )
            np.testing.assert_array_equal(dequantize_matrix(layout, elements, scales).numpy(), matrix)


def test_torch_refuses_weights_of_another_layout() -> None:
    weights = [replace(packed_for(SMALL, RANKS, rank), packing="other") for rank in range(RANKS)]
    with pytest.raises(LayoutError, match="packing got other"):
        TorchSerial(SMALL, weights)


# --------------------------------------------------------------------------------------------- mori


class MoriNamedProvider(EmulatedProvider):
    name = "mori"


class FakeExpertParallel:
    """What mori's dispatch and combine do, on emulated ranks: a token goes once to each rank with one of its
    experts; rows that come back are summed. Buffers are one rank's own, overwritten by every call; what lies
    behind the rows that arrived is poison that looks like routes."""

    def __init__(self, heaps: dict[int, SymmetricHeap]) -> None:
        self.heaps = heaps

    def behaviour(self) -> dict[str, Any]:
        return {"__init__": self.init, "dispatch": self.dispatch, "combine": self.combine}

    @staticmethod
    def init(op: Any, config: Any) -> None:
        rows = config.world_size * config.max_num_inp_token_per_rank
        top_k = config.num_experts_per_token
        op.config, op.rows = config, rows
        op.buffers = {
            "codes": torch.full((rows, config.hidden_dim), 0x7F, dtype=torch.uint8),
            "weights": torch.full((rows, top_k), float("nan")),
            "scales": torch.full((rows, config.scale_dim), 0xFF, dtype=torch.uint8),
            "ids": torch.full((rows, top_k), config.rank * config.num_experts_per_rank, dtype=torch.int32),
        }
        op.out = torch.full(
            (config.max_num_inp_token_per_rank, config.hidden_dim), float("nan"), dtype=torch.bfloat16
        )

    def dispatch(
        self, op: Any, input: Any, weights: Any, scales: Any, indices: Any, *options: Any
    ) -> tuple[Any, ...]:
        config = op.config
        assert input.dtype == torch.float8_e4m3fn
        assert scales.shape == (len(input), config.scale_dim)
        assert scales.element_size() == config.scale_type_size
        assert len(input) <= config.max_num_inp_token_per_rank
        everyone = self.heaps[config.rank].exchange(
            "mori dispatch", (input.view(torch.uint8), weights, scales, indices)
        )
        experts, op.origins = config.num_experts_per_rank, []
        for source, (_, _, _, ids) in enumerate(everyone):
            local = (ids // experts == config.rank) & (ids >= 0)
            op.origins += [(source, int(token)) for token in local.any(dim=1).nonzero()]
        op.origins.reverse()  # no order is promised
        for row, (source, token) in enumerate(op.origins):
            for buffer, part in zip(op.buffers.values(), everyone[source], strict=True):
                buffer[row] = part[token]
        buffers = op.buffers
        total = torch.tensor([len(op.origins)], dtype=torch.int32)
        return (
            buffers["codes"].view(torch.float8_e4m3fn),
            buffers["weights"],
            buffers["scales"],
            buffers["ids"],
            total,
        )

    def combine(self, op: Any, input: Any, weights: Any, indices: Any, *options: Any) -> tuple[Any, Any]:
        assert weights is None
        assert input.dtype == torch.bfloat16
        total = torch.zeros(op.out.shape)
        everyone = self.heaps[op.config.rank].exchange("mori combine", (op.origins, input))
        for origins, rows in everyone:
            for row, (source, token) in enumerate(origins):
                if source == op.config.rank:
                    total[token] += rows[row].float()
        op.out[: len(indices)] = total[: len(indices)].bfloat16()
        return op.out, None


def run_with_mori(
    shape: MegaMoEShape, cases: list[Case], wire: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[Any]], FakeMori]:
    heaps: dict[int, SymmetricHeap] = {}
    fake = FakeMori({}, {"EpDispatchCombineOp": FakeExpertParallel(heaps).behaviour()}).install(monkeypatch)

    def host(rank: emulator.Rank) -> list[Any]:
        heap = heaps[rank.index] = SymmetricHeap(MoriNamedProvider(rank, 2))
        baseline = serial_baseline(make_layer(shape, heap, CAPACITY, wire=wire))
        assert type(baseline) is SerialMori
        outs = [baseline(*case.tensors(rank.index)) for case in cases]
        return [out.float().numpy() for out in outs]

    with emulator.emulated() as session:
        return session.create_world(RANKS).run(host), fake


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("uniform", (4, 3)), ("padded", (4, 4)), ("hot_rank", (0, 4)), ("one_expert", (2, 1))],
)
def test_moris_dispatch_and_combine_around_the_experts(
    kind: str, tokens: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls: what the first returned is not a view of mori's buffers, which the second overwrites."""
    cases = [make_case(SMALL, kind, RANKS, tokens, SEED), make_case(SMALL, "uniform", RANKS, (1, 4), SEED)]
    results, fake = run_with_mori(SMALL, cases, "bf16", monkeypatch)
    for number, case in enumerate(cases):
        expected = oracle_quantized(SMALL, case.inputs, case.routing, experts_of(SMALL))
        got = np.concatenate([outs[number] for outs in results])
        # the oracle rounds each route's row to bf16 once more than a rank's sum is rounded
        assert relative_l2(got, np.concatenate(expected)) < 4e-3
        assert np.isfinite(got).all()
    assert fake.names().count("EpDispatchCombineOp.dispatch") == RANKS * len(cases)


@pytest.mark.parametrize(("wire", "quant_type"), [("bf16", "none"), ("fp8_blockwise_1x32", "fp8_blockwise")])
def test_moris_operator_is_configured_as_the_layer_is(
    wire: str, quant_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [make_case(SMALL, "uniform", RANKS, 1, SEED)]
    _, fake = run_with_mori(SMALL, cases, wire, monkeypatch)
    configs = [arguments for name, arguments in fake.calls if name == "EpDispatchCombineConfig.__init__"]
    assert sorted(config["rank"] for config in configs) == list(range(RANKS))
    for config in configs:
        assert {name: config[name] for name in config if name not in ("rank", "data_type")} == {
            "world_size": RANKS,
            "hidden_dim": 128,
            "scale_dim": 16,
            "scale_type_size": 1,
            "max_token_type_size": 2,
            "max_num_inp_token_per_rank": CAPACITY,
            "num_experts_per_rank": 4,
            "num_experts_per_token": 2,
            "quant_type": quant_type,
        }


def test_local_routes_keep_this_ranks_experts_and_mask_rows_that_hold_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeMori({}, {"EpDispatchCombineOp": {"__init__": lambda op, config: None}}).install(monkeypatch)

    def host(rank: emulator.Rank) -> Any:
        moe = make_layer(SMALL, SymmetricHeap(MoriNamedProvider(rank, 2)), CAPACITY)
        ids = torch.tensor([[0, 4], [5, -1], [7, 6], [4, 4]], dtype=torch.int32)
        weights = torch.tensor([[0.1, 0.2], [0.3, float("nan")], [0.5, 0.6], [0.7, 0.8]])
        nothing = torch.zeros(4, 0)
        received = serial._Received(nothing, nothing, weights, ids, torch.tensor([3]))
        local, kept = SerialMori(moe)._local_routes(received)
        return local.tolist(), kept.tolist()

    with emulator.emulated() as session:
        first, second = session.create_world(2).run(host)
    assert first[0] == [[0, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert second[0] == [[0, -1], [1, -1], [3, 2], [-1, -1]]
    assert first[1][0][0] == pytest.approx(0.1)
    assert second[1][0][0] == pytest.approx(0.2)
    assert second[1][2] == pytest.approx([0.5, 0.6])
