# SPDX-License-Identifier: Apache-2.0
"""MegaMoE's public face on emulated ranks: handshake, agreement, order of calls, outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernellib.ops.contract import ContractError
from kernellib.ops.mega_moe import inspection
from kernellib.ops.mega_moe.api import ExpertIdError, MegaMoE, QuantizedTokens
from kernellib.ops.mega_moe.config import BUCKETS, KIMI_K3, MegaMoEConfig, MegaMoEConfigError, select_config
from kernellib.ops.mega_moe.contract import BOUNDS_CHECK_VARIABLE
from kernellib.ops.mega_moe.layout import GATE_UP_INTERLEAVED
from kernellib.ops.mega_moe.reference import oracle_quantized, relative_l2
from kernellib.symmetric import HeapProtocolError, SymmetricHeap
from kernellib.symmetric.emulated_provider import emulated_heap
from tests.ops.mega_moe_layers import (
    SMALL,
    assert_same_error,
    experts_of,
    make_case,
    make_layer,
    on_ranks,
    packed_for,
    results_of,
    run_case,
)

RANKS, CAPACITY = 2, 4
CONFIG = MegaMoEConfig(tile_m=16).scaled(SMALL, 2)


# ---------------------------------------------------------------------------------------- handshake


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("capacity", (4, 8)),
        ("capacity", (4, 12)),
        ("config", ("tuned", "generic")),
        ("config", (CONFIG, replace(CONFIG, tile_order="ready"))),
        ("activation", ("situv2", "silu")),
        ("wire", ("bf16", "fp8_blockwise_1x32")),
        ("bounds_check", (False, True)),
    ],
)
def test_a_setting_that_differs_is_refused_alike_on_every_rank(field: str, values: tuple[Any, Any]) -> None:
    def host(heap: SymmetricHeap) -> MegaMoE:
        options: dict[str, Any] = {"capacity": CAPACITY, field: values[heap.rank == 1]}
        return make_layer(SMALL, heap, weights=packed_for(SMALL, RANKS, 0), **options)

    results, launches = on_ranks(3, host)  # 8 experts do not divide by 3: refused besides
    assert_same_error(results, ContractError, "on ranks 0, 2", "on rank 1", "experts")
    results, launches = on_ranks(RANKS, host)
    argument = "max_tokens_per_rank" if field == "capacity" else field
    assert_same_error(results, ContractError, "agreement", argument)
    assert launches == []


def test_shapes_that_differ_are_refused_alike() -> None:
    shapes = (SMALL, replace(SMALL, situ_beta=3.0))
    results, _ = on_ranks(RANKS, lambda heap: make_layer(shapes[heap.rank], heap, CAPACITY))
    assert_same_error(results, ContractError, "situ_beta=3.0", "agreement")


def test_one_ranks_own_fault_is_every_ranks_error() -> None:
    def host(heap: SymmetricHeap) -> MegaMoE:
        weights = packed_for(SMALL, RANKS, heap.rank)
        wrong = replace(weights, gate_up=GATE_UP_INTERLEAVED) if heap.rank == 1 else weights
        return make_layer(SMALL, heap, CAPACITY, weights=wrong)

    results, _ = on_ranks(RANKS, host)
    assert_same_error(results, ContractError, "weights (rank 1)", "separate_gate_up")


def test_a_rank_that_is_not_the_heaps_is_refused_alike() -> None:
    results, _ = on_ranks(RANKS, lambda heap: make_layer(SMALL, heap, CAPACITY, rank=0))
    assert_same_error(results, ContractError, "rank (rank 1)", "pass heap.rank")


def test_a_closed_heap_and_something_else_are_refused() -> None:
    def host(heap: SymmetricHeap) -> MegaMoE:
        heap.close()
        return make_layer(SMALL, heap, CAPACITY)

    results, _ = on_ranks(RANKS, host)
    assert_same_error(results, ContractError, "closed")
    with pytest.raises(ContractError, match="SymmetricHeap"):
        MegaMoE(SMALL, 0, None, packed_for(SMALL, 2, 0), CAPACITY)  # type: ignore[arg-type]


def test_a_configuration_for_a_larger_device_is_refused() -> None:
    results, _ = on_ranks(RANKS, lambda heap: make_layer(SMALL, heap, 4, config=MegaMoEConfig()))
    assert_same_error(results, ContractError, "at most the device's 2", "must all be resident")


def test_wire_auto_follows_the_capacity() -> None:
    def host(heap: SymmetricHeap) -> list[str]:
        return [make_layer(SMALL, heap, capacity).wire for capacity in (4, 128, 256)]

    assert on_ranks(RANKS, host)[0] == [["bf16", "bf16", "fp8_blockwise_1x32"]] * RANKS


def test_tables_are_scaled_to_the_device_and_a_given_configuration_is_not() -> None:
    def host(heap: SymmetricHeap) -> tuple[MegaMoEConfig, MegaMoEConfig]:
        tuned, given = make_layer(SMALL, heap, 4), make_layer(SMALL, heap, 4, config=CONFIG)
        return tuned.config_for(4), given.config_for(4)

    for tuned, given in results_of(on_ranks(RANKS, host)[0]):
        assert tuned == select_config(SMALL, RANKS, 4).scaled(SMALL, 2)
        assert given is CONFIG
    assert select_config(KIMI_K3, 8, 4096).scaled(KIMI_K3, 256) == select_config(KIMI_K3, 8, 4096)


# ------------------------------------------------------------------------------------------- a call


def breaking(name: str, heap: SymmetricHeap) -> dict[str, Any]:
    """Arguments of a call on two tokens that break a clause on rank 1 only."""
    x, weights, ids = make_case(SMALL, "uniform", RANKS, 2, 0).tensors(heap.rank)
    good: dict[str, Any] = {"x": x, "route_weights": weights, "expert_ids": ids}
    if heap.rank != 1:
        return good
    changed = {
        "dtype": {"x": x.float()},
        "capacity": dict(
            zip(good, make_case(SMALL, "uniform", RANKS, CAPACITY + 1, 0).tensors(1), strict=True)
        ),
        "alias": {"out": x},
        "experts_id": {"expert_ids": torch.full_like(ids, 8)},
        "type": {"x": None},
        "strides": {"expert_ids": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
    }[name]
    return {**good, **changed}


@pytest.mark.parametrize("name", ["dtype", "capacity", "alias", "experts_id", "type", "strides"])
def test_a_call_that_one_rank_breaks_is_refused_alike_and_launches_nothing(name: str) -> None:
    def host(heap: SymmetricHeap) -> Any:
        return make_layer(SMALL, heap, CAPACITY)(**breaking(name, heap))

    results, launches = on_ranks(RANKS, host)
    assert_same_error(results, ContractError, name, "(rank 1)")
    assert launches == []


def test_after_a_refusal_the_layer_still_works() -> None:
    case = make_case(SMALL, "uniform", RANKS, 2, 0)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        with pytest.raises(ContractError):
            moe(**breaking("dtype", heap))
        return moe(*case.tensors(heap.rank)).float().numpy()

    results = results_of(on_ranks(RANKS, host)[0])
    expected = oracle_quantized(SMALL, case.inputs, case.routing, experts_of(SMALL))
    assert relative_l2(np.concatenate(results), np.concatenate(expected)) < 1e-3


def test_ranks_that_call_different_things_learn_it() -> None:
    def host(heap: SymmetricHeap) -> Any:
        moe, other = (make_layer(SMALL, heap, CAPACITY) for _ in range(2))
        arguments = make_case(SMALL, "uniform", RANKS, 2, 0).tensors(heap.rank)
        return (moe if heap.rank else other)(*arguments)

    results, launches = on_ranks(RANKS, host)
    assert_same_error(results, HeapProtocolError, "mega_moe")
    assert launches == []


@pytest.mark.parametrize("counts", [(0, 3), (4, 0), (0, 0), (1, 4)])
def test_ragged_ranks_select_by_the_largest_token_count(counts: tuple[int, int]) -> None:
    case = make_case(SMALL, "uniform", RANKS, counts, 5)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        asked: list[int] = []
        select = moe.config_for
        moe.config_for = lambda tokens: asked.append(tokens) or select(tokens)  # type: ignore[method-assign]
        out = moe(*case.tensors(heap.rank))
        return asked, out.float().numpy()

    results = results_of(on_ranks(RANKS, host)[0])
    assert [asked for asked, _ in results] == [[max(counts)]] * RANKS
    expected = oracle_quantized(SMALL, case.inputs, case.routing, experts_of(SMALL))
    for (_, out), wanted in zip(results, expected, strict=True):
        assert out.shape == wanted.shape
        assert relative_l2(out, wanted) < 1e-3


def test_a_named_token_class_replaces_the_meeting() -> None:
    case = make_case(SMALL, "uniform", RANKS, (1, 3), 5)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        before = heap.num_exchanges
        out = moe(*case.tensors(heap.rank), token_class=3)
        met = heap.num_exchanges - before
        with pytest.raises(ContractError, match="token_class"):
            moe(*case.tensors(heap.rank), token_class=CAPACITY + 1)
        if heap.rank == 1:
            with pytest.raises(ContractError, match="2 with 3 tokens here"):
                moe(*case.tensors(heap.rank), token_class=2)
        return met, out.float().numpy()

    results = results_of(on_ranks(RANKS, host)[0])
    assert [met for met, _ in results] == [0, 0]
    expected = oracle_quantized(SMALL, case.inputs, case.routing, experts_of(SMALL))
    assert relative_l2(np.concatenate([o for _, o in results]), np.concatenate(expected)) < 1e-3


def test_the_stages_by_themselves_are_the_call_bit_for_bit() -> None:
    case = make_case(SMALL, "padded", RANKS, 3, 2)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY, wire="fp8_blockwise_1x32")
        x, weights, ids = case.tensors(heap.rank)
        whole = moe(x, weights, ids)
        quantized = moe.quantize(x)
        prequantized = moe.forward_prequantized(quantized, weights, ids)
        staged = moe.stage2(moe.stage1(quantized, weights, ids), torch.full_like(x, float("nan")))
        return torch.equal(whole, prequantized), torch.equal(whole, staged), quantized.codes.shape

    assert on_ranks(RANKS, host)[0] == [(True, True, (3, 128))] * RANKS


def test_stages_out_of_order_are_refused_alike() -> None:
    x, weights, ids = make_case(SMALL, "uniform", RANKS, 2, 0).tensors(0)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        quantized = moe.quantize(x)
        found = []
        with pytest.raises(ContractError) as caught:
            moe.stage2(None)  # type: ignore[arg-type]
        found.append(str(caught.value))
        first = moe.stage1(quantized, weights, ids)
        for action in (
            lambda: moe.stage1(quantized, weights, ids),
            lambda: moe(x, weights, ids),
            lambda: moe.forward_prequantized(quantized, weights, ids),
            lambda: moe.stage2(first, x.float()),
        ):
            with pytest.raises(ContractError) as caught:
                action()
            found.append(str(caught.value))
        moe.stage2(first)
        with pytest.raises(ContractError, match="used once"):
            moe.stage2(first)
        return found

    results = results_of(on_ranks(RANKS, host)[0])
    assert results[0] == results[1]
    assert ["order" in text for text in results[0]] == [True, True, True, True, False]
    assert "dtype" in results[0][4]


def test_out_of_stage_2_shares_no_byte_with_what_stage_1_was_given() -> None:
    case = make_case(SMALL, "uniform", RANKS, 2, 0)

    def host(heap: SymmetricHeap) -> list[str]:
        moe = make_layer(SMALL, heap, CAPACITY)
        x, weights, ids = case.tensors(heap.rank)
        memory = torch.zeros(2, 128, dtype=torch.bfloat16)
        own_ids = memory.view(torch.int32).flatten()[:4].view(2, 2).copy_(ids)
        own_weights = memory.view(torch.float32).flatten()[4:8].view(2, 2).copy_(weights)
        result = moe.stage1(moe.quantize(x), own_weights, own_ids)
        with pytest.raises(ContractError) as caught:
            moe.stage2(result, memory)
        assert torch.equal(own_ids, ids), "nothing was written"
        moe.stage2(result)
        return [f"{v.clause} {v.got}" for v in caught.value.report.violations]

    wanted = ["alias 16 bytes shared with route_weights", "alias 16 bytes shared with expert_ids"]
    assert on_ranks(RANKS, host)[0] == [wanted] * RANKS


@pytest.mark.parametrize("what", ["layer", "heap"])
def test_nothing_runs_on_memory_that_was_given_back(what: str) -> None:
    x, weights, ids = make_case(SMALL, "uniform", RANKS, 2, 0).tensors(0)

    def host(heap: SymmetricHeap) -> list[str]:
        moe = make_layer(SMALL, heap, CAPACITY, bounds_check=True)
        quantized = moe.quantize(x)
        result = moe.stage1(quantized, weights, ids)
        (moe if what == "layer" else heap).close()
        found = []
        for action in (
            lambda: moe(x, weights, ids),
            lambda: moe(x, weights, ids, token_class=2),  # the ranks would not have met
            lambda: moe.quantize(x),
            lambda: moe.stage1(quantized, weights, ids),
            lambda: moe.stage2(result),
            lambda: moe.forward_prequantized(quantized, weights, ids, token_class=2),
            moe.raise_reported_ids,
            moe.tile_rows,
        ):
            with pytest.raises(ContractError) as caught:
                action()
            found += [f"{v.clause} {v.argument} {v.got}" for v in caught.value.report.violations]
        moe.close()
        return found

    results, launches = on_ranks(RANKS, host)
    assert results == [[f"order {what} closed"] * 8] * RANKS
    assert len(launches) == 2 * RANKS, "one quantisation and one stage 1 each"


def test_weights_that_cannot_be_looked_at_are_every_ranks_error() -> None:
    def host(heap: SymmetricHeap) -> MegaMoE:
        weights = packed_for(SMALL, RANKS, heap.rank)
        broken = replace(weights, w1=None, w2=torch.zeros(3).to_sparse())  # type: ignore[arg-type]
        return make_layer(SMALL, heap, CAPACITY, weights=broken if heap.rank else weights)

    assert_same_error(on_ranks(RANKS, host)[0], ContractError, "weights.w1 (rank 1)", "weights.w2 (rank 1)")


def test_prequantized_tokens_of_the_wrong_kind_are_refused() -> None:
    def host(heap: SymmetricHeap) -> list[str]:
        moe = make_layer(SMALL, heap, CAPACITY)
        x, weights, ids = make_case(SMALL, "uniform", RANKS, 2, 0).tensors(heap.rank)
        good = moe.quantize(x)
        found = []
        for wrong in (
            QuantizedTokens(good.codes.view(torch.int8), good.scales),
            QuantizedTokens(good.codes.view(torch.float8_e4m3fnuz), good.scales),
            QuantizedTokens(good.codes, good.scales[:, :8]),
            x,
            None,
            QuantizedTokens(None, good.scales),  # type: ignore[arg-type]
            QuantizedTokens(torch.zeros(8, 128, dtype=torch.uint8), torch.zeros(8, 16, dtype=torch.uint8)),
        ):
            with pytest.raises(ContractError) as caught:
                moe.forward_prequantized(wrong, weights, ids)  # type: ignore[arg-type]
            found += [f"{v.clause} {v.argument}" for v in caught.value.report.violations]
        return found

    [first, second] = results_of(on_ranks(RANKS, host)[0])
    assert first == second
    assert first[:3] == ["dtype codes", "dtype codes", "shape scales"]
    assert {"dtype codes", "type codes"} <= set(first)
    assert first[-4:] == ["type codes", "shape route_weights", "shape expert_ids", "capacity codes"]


# ----------------------------------------------------------------------------------- the bounds check


def test_ids_out_of_range_are_reported_from_the_device_on_every_rank() -> None:
    case = make_case(SMALL, "uniform", RANKS, 3, 2)
    clean = run_case(SMALL, case, CAPACITY)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY, bounds_check=True)
        x, weights, ids = case.tensors(heap.rank)
        wrong = ids.clone()
        if heap.rank == 1:
            wrong[2, 1], wrong[2, 0] = 8, -5
        out = torch.full_like(x, float("nan"))
        try:
            moe(x, weights, wrong, out)
        except ExpertIdError as error:
            again = moe(x, weights, ids)  # the report is over, the next call is clean
            return str(error), out.float().numpy(), again.float().numpy()
        return "nothing reported"

    results = results_of(on_ranks(RANKS, host)[0])
    assert results[0][0] == results[1][0]
    assert "rank 1: 2 ids" in results[0][0]
    assert "at token 2" in results[0][0]
    assert np.array_equal(results[1][1][2], np.zeros(128)), "both of its routes were dropped"
    assert np.array_equal(results[1][1][:2], clean[1][:2])
    assert np.array_equal(results[0][2], clean[0])
    assert np.array_equal(results[1][2], clean[1])


def test_the_environment_compiles_the_check_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOUNDS_CHECK_VARIABLE, "1")
    x, weights, ids = make_case(SMALL, "uniform", RANKS, 2, 2).tensors(0)

    def host(heap: SymmetricHeap) -> Any:
        return make_layer(SMALL, heap, CAPACITY)(x, weights, torch.full_like(ids, 9))

    results, launches = on_ranks(RANKS, host)
    assert_same_error(results, ExpertIdError, "rank 0: 4 ids", "rank 1: 4 ids")
    names = {launch.kernel_name for launch in launches if "stage1" in launch.kernel_name}
    assert all("check_1" in name for name in names)
    assert names


# ------------------------------------------------------------------------------ one rank, one process


def test_a_single_rank_computes_the_whole_layer() -> None:
    case = make_case(SMALL, "uniform", 1, 3, 9)
    expected = oracle_quantized(SMALL, case.inputs, case.routing, experts_of(SMALL))
    assert relative_l2(run_case(SMALL, case, CAPACITY)[0], expected[0]) < 1e-3


def test_heaps_of_a_world_can_be_made_again() -> None:
    def host(heap: SymmetricHeap) -> list[int]:
        return [heap.allocate("a", 64).num_bytes, heap.num_exchanges]

    for _ in range(2):
        assert results_of(on_ranks(RANKS, host)[0]) == [[64, 3]] * RANKS
    assert emulated_heap.__module__ == "kernellib.symmetric.emulated_provider"


# --------------------------------------------------------------------------------------- inspection


def test_every_table_entry_can_be_inspected_under_its_name() -> None:
    names = inspection.config_names()
    assert names[0] == inspection.DEFAULT_NAME
    assert len(names) == len(set(names)) == 2 * len(BUCKETS) * 2
    kernels = [
        stage.kernel_name
        for name in names
        for stage in inspection.stages(*(int(p) if p.isdigit() else p for p in name.split("-", 2)))
    ]
    # tuned and generic may agree on a bucket, but a bucket or wire never shares a kernel with another
    assert len(set(kernels)) >= 2 * len(BUCKETS) * 2
    with pytest.raises(MegaMoEConfigError, match="tuned-3-bf16"):
        inspection.kernels("tuned-3-bf16")
