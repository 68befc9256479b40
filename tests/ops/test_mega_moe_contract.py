# SPDX-License-Identifier: Apache-2.0
"""MegaMoE's contract: exact, every clause listed, and nothing raised whatever it is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernellib
from kernellib.ops.contract import ContractError, Violation
from kernellib.ops.mega_moe import contract
from kernellib.ops.mega_moe.config import KIMI_K3, WIRES, MegaMoEConfig, MegaMoEShape
from kernellib.ops.mega_moe.contract import (
    BOUNDS_CHECK_VARIABLE,
    LayerRequest,
    agreed_fields,
    bounds_check_enabled,
    check_token_class,
    disagreements,
    inspected,
    merge,
    raise_alike,
    supports_mega_moe,
)
from kernellib.ops.mega_moe.layout import GATE_UP_INTERLEAVED
from kernellib.ops.mega_moe.weights import PackedWeights, pack_experts, random_experts

SHAPE = MegaMoEShape(8, 128, 128, 2)
RANKS, CAPACITY = 4, 16
CONFIG = MegaMoEConfig(tile_m=16).scaled(SHAPE, 2)


@functools.cache
def packed() -> PackedWeights:
    return pack_experts(SHAPE, map(random_experts(SHAPE, 0), (0, 1)))


def a_call(tokens: int = 3) -> dict[str, Any]:
    """Arguments of ``supports_mega_moe`` that satisfy every clause."""
    return {
        "shape": SHAPE,
        "num_ranks": RANKS,
        "max_tokens_per_rank": CAPACITY,
        "config": CONFIG,
        "weights": packed(),
        "x": torch.zeros(tokens, 128, dtype=torch.bfloat16),
        "route_weights": torch.zeros(tokens, 2),
        "expert_ids": torch.zeros(tokens, 2, dtype=torch.int32),
        "out": torch.zeros(tokens, 128, dtype=torch.bfloat16),
        "target": "emulator",
    }


def broken(**changed: Any) -> list[tuple[str, str]]:
    """(clause, argument) of each violation of an otherwise valid call."""
    report = supports_mega_moe(**{**a_call(), **changed})
    assert bool(report) == (not report.violations)
    return [(violation.clause, violation.argument) for violation in report.violations]


def test_the_public_names_are_exported() -> None:
    assert kernellib.supports_mega_moe is supports_mega_moe
    assert MegaMoEShape(896, 3584, 3072, 16, 4.0, 25.0) == kernellib.KIMI_K3
    assert kernellib.MegaMoE.__name__ == "MegaMoE"
    assert set(kernellib.__all__) == set(kernellib._HOMES)


def test_a_valid_call_is_supported() -> None:
    assert broken() == []
    assert supports_mega_moe(KIMI_K3, 8, 8192, target="emulator")


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(0, 20))
def test_any_token_count_up_to_the_capacity_is_supported_none_among_them(tokens: int) -> None:
    found = [(v.clause, v.argument) for v in supports_mega_moe(**a_call(tokens)).violations]
    assert found == ([] if tokens <= CAPACITY else [("capacity", "x")])


@settings(max_examples=200, deadline=None)
@given(capacity=st.integers(-4, 1 << 25) | st.integers(0, 26).map(lambda bits: 1 << bits))
def test_capacities_are_powers_of_two_within_24_bits_of_source_index(capacity: int) -> None:
    wanted = capacity > 0 and capacity.bit_count() == 1 and RANKS * capacity <= 1 << 24
    assert bool(supports_mega_moe(SHAPE, RANKS, capacity, target="emulator")) == wanted


def test_a_capacity_that_breaks_both_clauses_is_told_both() -> None:
    report = supports_mega_moe(SHAPE, RANKS, (1 << 24) + 1, target="emulator")
    assert [violation.clause for violation in report.violations] == ["capacity", "capacity"]
    assert "round up to 33554432" in str(report)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-3, 9), min_size=6, max_size=6))
def test_ids_are_minus_one_or_an_experts(ids: list[int]) -> None:
    tensor = torch.tensor(ids, dtype=torch.int32).reshape(3, 2)
    wanted = [] if all(-1 <= i < 8 for i in ids) else [("experts_id", "expert_ids")]
    assert broken(expert_ids=tensor) == wanted
    assert broken(expert_ids=tensor, bounds_check=True) == [], "then the device reports them"


def test_the_offending_id_is_named() -> None:
    ids = torch.tensor([[0, -1], [8, 1], [2, -2]], dtype=torch.int32)
    [violation] = supports_mega_moe(**{**a_call(), "expert_ids": ids}).violations
    assert violation.got == "8 at token 1, slot 0; 2 such"
    assert violation.wanted == "-1 or 0 .. 7"


WIDE = MegaMoEShape(8, 1024, 128, 2)
# The rows of a GEMM2 tile on their way out: 128 * 1024 bf16 are 256 KiB, as e4m3 with scales 132 KiB.
LARGE_TILES = MegaMoEConfig(tile_m=128, gemm1_tile_n=256, gemm2_tile_n=1024, num_dispatch_cu=1, num_cu=2)


def no_call() -> dict[str, None]:
    return dict.fromkeys(("x", "route_weights", "expert_ids", "out"))


MUTATIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], list[tuple[str, str]]]] = {
    "x fp32": (lambda a: {"x": a["x"].float()}, [("dtype", "x")]),
    "x strided": (lambda a: {"x": torch.zeros(3, 256).bfloat16()[:, ::2]}, [("strides", "x")]),
    "x transposed": (lambda a: {"x": torch.zeros(128, 3).bfloat16().T}, [("strides", "x")]),
    "x unaligned": (lambda a: {"x": torch.zeros(385).bfloat16()[1:].view(3, 128)}, [("alignment", "x")]),
    "x too wide": (lambda a: {"x": torch.zeros(3, 256).bfloat16()}, [("shape", "x")]),
    "x on meta": (
        lambda a: {"x": a["x"].to("meta")},
        [
            ("device", "x"),
            ("storage", "x"),
            ("same_device", "route_weights"),
            ("same_device", "expert_ids"),
            ("same_device", "out"),
        ],
    ),
    "x wants a gradient": (lambda a: {"x": a["x"].requires_grad_()}, [("requires_grad", "x")]),
    "x a list": (lambda a: {"x": [[0.0]]}, None),
    "weights bf16": (
        lambda a: {"route_weights": a["route_weights"].bfloat16()},
        [("dtype", "route_weights")],
    ),
    "weights for fewer tokens": (
        lambda a: {"route_weights": torch.zeros(2, 2)},
        [("shape", "route_weights")],
    ),
    "ids int64": (lambda a: {"expert_ids": a["expert_ids"].long()}, [("dtype", "expert_ids")]),
    "ids for another top_k": (
        lambda a: {"expert_ids": torch.zeros(3, 4, dtype=torch.int32)},
        [("shape", "expert_ids")],
    ),
    "out fp32": (lambda a: {"out": a["out"].float()}, [("dtype", "out")]),
    "out is x": (lambda a: {"x": a["x"], "out": a["x"]}, [("alias", "out")]),
    "shape a tuple": (lambda a: {"shape": (8, 128, 128, 2)}, [("type", "shape")]),
    "three ranks": (lambda a: {"num_ranks": 3}, [("experts", "shape")]),
    "no ranks": (lambda a: {"num_ranks": 0}, [("type", "num_ranks")]),
    "ranks a bool": (lambda a: {"num_ranks": True}, [("type", "num_ranks")]),
    "capacity a float": (
        lambda a: {"max_tokens_per_rank": 16.0},
        [("capacity", "max_tokens_per_rank")],
    ),
    "unknown table": (lambda a: {"config": "fastest"}, [("config", "config")]),
    "tiles that do not divide": (
        lambda a: {"config": replace(CONFIG, gemm2_tile_n=192)},
        [("config", "config")],
    ),
    "unknown activation": (lambda a: {"activation": "gelu"}, [("choice", "activation")]),
    "unknown wire": (lambda a: {"wire": "fp8"}, [("choice", "wire")]),
    "A4W4, which is to come": (lambda a: {"input_format": "e2m1"}, [("choice", "input_format")]),
    "output fp32": (lambda a: {"output_dtype": torch.float32}, [("choice", "output_dtype")]),
    "bounds_check 1": (lambda a: {"bounds_check": 1}, [("type", "bounds_check")]),
    "weights interleaved": (
        lambda a: {"weights": replace(packed(), gate_up=GATE_UP_INTERLEAVED)},
        [("weights", "weights")],
    ),
    "weights of another packing": (
        lambda a: {"weights": replace(packed(), packing="b32x64")},
        [("weights", "weights")],
    ),
    "weights of a tensor": (lambda a: {"weights": packed().w1}, [("type", "weights")]),
    "weights of other ranks": (lambda a: {"num_ranks": 2}, [("weights", "weights")]),
    "weights a list": (
        lambda a: {"weights": replace(packed(), w1=[0])},
        [("weights", "weights"), ("type", "weights.w1")],
    ),
    "weights sparse": (
        lambda a: {"weights": replace(packed(), w1=packed().w1.to_sparse())},
        [("weights", "weights"), ("type", "weights.w1")],
    ),
    "weights of no shape": (lambda a: {"weights": replace(packed(), shape=None)}, [("weights", "weights")]),
    "weights not flat": (
        lambda a: {"weights": replace(packed(), w2=packed().w2.reshape(2, -1))},
        [("weights", "weights")],
    ),
    "rows that leave too little LDS": (
        lambda a: {"shape": WIDE, "weights": None, **no_call(), "config": LARGE_TILES},
        [("config", "config")],
    ),
    "the same with the narrower wire": (
        lambda a: {"shape": WIDE, "weights": None, **no_call(), "config": LARGE_TILES, "wire": WIRES[0]},
        [],
    ),
    "more experts than the planner counts": (
        lambda a: {
            "shape": replace(SHAPE, num_experts=40960),
            "weights": None,
            **no_call(),
            "config": "tuned",
        },
        [("config", "config")],
    ),
    "as many as it counts": (
        lambda a: {
            "shape": replace(SHAPE, num_experts=40956),
            "weights": None,
            **no_call(),
            "config": "tuned",
        },
        [],
    ),
    "weights unaligned": (
        lambda a: {"weights": replace(packed(), w2=torch.cat([packed().w2[:1], packed().w2])[1:])},
        [("alignment", "weights.w2")],
    ),
    "on an NVIDIA GPU": (lambda a: {"target": "reference"}, [("target", "target")]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_clause_is_reported_where_it_is_broken(name: str) -> None:
    change, wanted = MUTATIONS[name]
    found = broken(**change(a_call()))
    if wanted is None:
        assert ("type", "x") in found
    else:
        assert found == wanted


def test_several_clauses_are_all_reported() -> None:
    found = broken(activation="gelu", wire="fp8", max_tokens_per_rank=12, bounds_check="yes")
    assert {argument for _, argument in found} == {
        "activation",
        "wire",
        "max_tokens_per_rank",
        "bounds_check",
    }


class Unprintable:
    """Raises when it is printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_an_object_that_cannot_be_printed_is_refused() -> None:
    for name in ("num_ranks", "max_tokens_per_rank", "config", "activation", "wire", "bounds_check"):
        report = supports_mega_moe(**{**a_call(), name: Unprintable()})
        assert [violation.argument for violation in report.violations] == [name], name
        assert "Unprintable" in str(report), name
    request = LayerRequest(Unprintable(), RANKS, CAPACITY)
    assert agreed_fields(request)["shape"] == "a Unprintable without a repr"


def test_a_check_that_raises_is_a_violation() -> None:
    def check() -> list[Violation]:
        raise AttributeError("nothing there")

    [violation] = inspected(check, "weights")
    assert (violation.clause, violation.argument) == ("type", "weights")
    assert "nothing there" in violation.got


def test_a_first_argument_without_rows_does_not_make_the_others_wrong() -> None:
    for wrong in (None, [0.0], torch.zeros(3).bfloat16()):
        assert {argument for _, argument in broken(x=wrong, out=None)} == {"x"}


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.sampled_from([object(), torch.Tensor, torch.zeros(2, 2), torch.empty(0), torch.zeros(1).to_sparse()]),
)


@settings(max_examples=150, deadline=None)
@given(values=st.dictionaries(st.sampled_from(sorted(a_call())), ANYTHING, min_size=1))
def test_garbage_is_refused_and_never_raises(values: dict[str, Any]) -> None:
    report = supports_mega_moe(**{**a_call(), **values})
    optional = {"weights", "out"}
    harmless = {
        name
        for name, value in values.items()
        if (value is None and name in optional)
        or (name == "max_tokens_per_rank" and type(value) is int and value > 3 and value.bit_count() == 1)
        or (name == "num_ranks" and type(value) is int and value in (1, 2, 4, 8))
    }
    assert isinstance(str(report), str)
    if set(values) - harmless:
        assert not report, values


@settings(max_examples=60, deadline=None)
@given(value=st.integers(-2, 20), tokens=st.integers(0, 16))
def test_a_named_token_class_covers_this_rank_and_fits_the_capacity(value: int, tokens: int) -> None:
    found = [violation.clause for violation in check_token_class(value, tokens, CAPACITY)]
    assert found == ([] if tokens <= value <= CAPACITY and value >= 0 else ["token_class"])
    assert check_token_class(float(value), tokens, CAPACITY)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_switches_the_bounds_check_on(
    value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BOUNDS_CHECK_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(BOUNDS_CHECK_VARIABLE, value)
    assert bounds_check_enabled(False) is on
    assert bounds_check_enabled(True) is True
    assert broken() == []


def test_an_environment_variable_of_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOUNDS_CHECK_VARIABLE, "yes")
    assert broken() == [("choice", BOUNDS_CHECK_VARIABLE)]


VIOLATIONS = st.builds(
    Violation,
    clause=st.sampled_from(["dtype", "capacity"]),
    argument=st.sampled_from(["x", "out"]),
    got=st.sampled_from(["1", "2"]),
    wanted=st.just("3"),
    remedy=st.just("4"),
)


@settings(max_examples=100, deadline=None)
@given(by_rank=st.lists(st.lists(VIOLATIONS, max_size=3, unique=True), min_size=1, max_size=4))
def test_the_merged_verdict_holds_every_ranks_violations_and_says_whose(
    by_rank: list[list[Violation]],
) -> None:
    merged = merge(by_rank)
    assert len(merged) == len({violation for violations in by_rank for violation in violations})
    for violation in merged:
        name, _, where = violation.argument.partition(" (")
        plain = replace(violation, argument=name)
        holders = [str(rank) for rank, violations in enumerate(by_rank) if plain in violations]
        told = where.rstrip(")").removeprefix("ranks ").removeprefix("rank ")
        assert told == ("" if len(holders) == len(by_rank) else ", ".join(holders))


def test_ranks_that_differ_are_told_which_field_and_who() -> None:
    requests = [LayerRequest(SHAPE, 3, capacity) for capacity in (8, 16, 8)]
    [violation] = disagreements([agreed_fields(request) for request in requests])
    assert violation.argument == "max_tokens_per_rank"
    assert violation.got == "8 on ranks 0, 2; 16 on rank 1"


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("shape", replace(SHAPE, top_k=3)),
        ("max_tokens_per_rank", 32),
        ("config", "generic"),
        ("config", CONFIG),
        ("activation", "silu"),
        ("wire", "bf16"),
        ("bounds_check", True),
    ],
)
def test_every_setting_is_part_of_what_is_agreed(field: str, other: object) -> None:
    request = LayerRequest(SHAPE, RANKS, CAPACITY)
    both = [agreed_fields(request), agreed_fields(replace(request, **{field: other}))]  # type: ignore[arg-type]
    assert [violation.argument for violation in disagreements(both)] == [field]
    assert disagreements([both[0]] * 2) == ()


def test_the_environment_is_part_of_what_is_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = LayerRequest(SHAPE, RANKS, CAPACITY)
    monkeypatch.delenv(BOUNDS_CHECK_VARIABLE, raising=False)
    without = agreed_fields(request)
    monkeypatch.setenv(BOUNDS_CHECK_VARIABLE, "1")
    assert [v.argument for v in disagreements([without, agreed_fields(request)])] == ["bounds_check"]


def test_raising_says_everything_or_nothing() -> None:
    raise_alike([])
    with pytest.raises(ContractError, match="2 clauses broken") as caught:
        raise_alike(contract.check_layer(LayerRequest(SHAPE, RANKS, 3, activation="gelu")))
    assert {violation.argument for violation in caught.value.report.violations} == {
        "max_tokens_per_rank",
        "activation",
    }
