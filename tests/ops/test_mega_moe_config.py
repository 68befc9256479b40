# SPDX-License-Identifier: Apache-2.0
"""Shape, configuration, buckets and tables: every choice without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest

from kernellib.ops.mega_moe.config import (
    BUCKETS,
    KIMI_K3,
    KIMI_K3_TABLE,
    MegaMoEConfig,
    MegaMoEConfigError,
    MegaMoEShape,
    generic_config,
    kernel_name,
    nearest_bucket,
    select_config,
    token_class,
)

SMALL = MegaMoEShape(16, 256, 128, 4)


def test_kimi_k3_is_the_published_shape() -> None:
    assert (KIMI_K3.num_experts, KIMI_K3.model_dim, KIMI_K3.inter_dim, KIMI_K3.top_k) == (896, 3584, 3072, 16)
    assert (KIMI_K3.situ_beta, KIMI_K3.situ_linear_beta) == (4.0, 25.0)  # fault 5: explicit betas
    assert KIMI_K3.experts_per_rank(8) == 112


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 0),
        ("num_experts", True),
        ("model_dim", 640),
        ("model_dim", 64),
        ("inter_dim", 3000),
        ("top_k", 17),
        ("top_k", -1),
        ("situ_beta", float("nan")),
        ("situ_beta", 4),
        ("situ_beta", 1e39),  # infinite in fp32
        ("situ_linear_beta", 1e-40),  # its reciprocal is
        ("situ_linear_beta", 0.0),
    ],
)
def test_a_wrong_shape_names_its_field(field: str, value: object) -> None:
    with pytest.raises(MegaMoEConfigError, match=field):
        replace(SMALL, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_m", 24),
        ("gemm1_tile_n", 96),
        ("gemm2_tile_n", 2048),
        ("num_dispatch_cu", 257),
        ("tile_order", "random"),
        ("num_queue_shards", 65),
        ("b2stage", 1),
        ("persist_cu", -1),
        ("persist_cu", 512),
        ("num_cu", 512),
    ],
)
def test_a_wrong_configuration_names_its_field(field: str, value: object) -> None:
    with pytest.raises(MegaMoEConfigError, match=field):
        replace(MegaMoEConfig(), **{field: value})


def test_strided_needs_persistence() -> None:
    with pytest.raises(MegaMoEConfigError, match="persist_strided"):
        MegaMoEConfig(persist_strided=True)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(MegaMoEConfigError, match="num_ranks got 3"):
        KIMI_K3.experts_per_rank(3)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_fault_27_every_bucket_and_both_its_edges(bucket: int) -> None:
    assert nearest_bucket(bucket) == bucket
    position = BUCKETS.index(bucket)
    if position:
        lower = BUCKETS[position - 1]
        middle = (lower + bucket) / 2
        first = int(-(-middle // 1))  # at equal distance the larger wins
        assert nearest_bucket(first) == bucket
        assert nearest_bucket(first - 1) == lower


def test_ends_of_the_bucket_rule() -> None:
    assert nearest_bucket(0) == 1
    assert nearest_bucket(10**9) == 32768
    for bad in (-1, 1.0, True, None):
        with pytest.raises(MegaMoEConfigError, match="num_tokens"):
            nearest_bucket(bad)  # type: ignore[arg-type]


def test_kimi_k3_table_is_what_was_reported() -> None:
    assert set(KIMI_K3_TABLE) == set(BUCKETS)
    for bucket, config in KIMI_K3_TABLE.items():
        config.check_shape(KIMI_K3)
        assert config.num_dispatch_cu in (96, 160)
        assert config.gemm1_tile_n == config.gemm2_tile_n == 256
        assert config.b2stage == (bucket >= 256)
        if 256 <= bucket <= 2048:
            assert config.tile_m == 64
        assert (config.persist_cu > 0) == (bucket >= 1024)
        assert config.persist_strided == (bucket >= 4096)


@pytest.mark.parametrize("shape", [KIMI_K3, SMALL], ids=lambda s: s.name)
def test_generic_table(shape: MegaMoEShape) -> None:
    tiles = []
    for bucket in BUCKETS:
        config = generic_config(shape, 8, bucket)
        config.check_shape(shape)
        assert config.num_dispatch_cu == 32
        assert not config.b2stage
        assert config.persist_cu == 0
        tiles.append(config.tile_m)
    assert tiles == sorted(tiles)
    assert tiles[0] == 16


def test_fault_14_ragged_ranks_select_alike() -> None:
    tokens = [0, 1, 3, 500, 4096, 0, 17, 2]
    agreed = token_class(tokens)
    chosen = {select_config(KIMI_K3, 8, agreed) for _ in tokens}
    assert len(chosen) == 1
    local = {select_config(KIMI_K3, 8, count) for count in tokens}
    assert len(local) > 1  # what would have gone wrong


def test_fault_13_no_tokens_anywhere_still_selects() -> None:
    assert select_config(KIMI_K3, 8, token_class([0] * 8)) == KIMI_K3_TABLE[1]
    with pytest.raises(MegaMoEConfigError, match="tokens_per_rank"):
        token_class([])


def test_selection_falls_back_to_generic() -> None:
    assert select_config(SMALL, 8, 64) == generic_config(SMALL, 8, 64)
    assert select_config(KIMI_K3, 16, 64) == generic_config(KIMI_K3, 16, 64)
    assert select_config(KIMI_K3, 8, 64, "generic") == generic_config(KIMI_K3, 8, 64)
    with pytest.raises(MegaMoEConfigError, match="table"):
        select_config(KIMI_K3, 8, 64, "best")  # type: ignore[arg-type]


def test_scaled_configurations_fit_and_keep_their_kind() -> None:
    for config in KIMI_K3_TABLE.values():
        small = config.scaled(SMALL, 8)
        small.check_shape(SMALL)
        assert small.num_cu == 8
        assert 1 <= small.num_dispatch_cu <= 8
        assert (small.tile_m, small.tile_order, small.b2stage) == (
            config.tile_m,
            config.tile_order,
            config.b2stage,
        )
        assert bool(small.persist_cu) == bool(config.persist_cu)


def test_check_shape_refuses_tiles_that_do_not_divide() -> None:
    with pytest.raises(MegaMoEConfigError, match="gemm2_tile_n"):
        MegaMoEConfig(gemm2_tile_n=1024).check_shape(KIMI_K3)


OTHER_VALUES = {
    "tile_m": 64,
    "gemm1_tile_n": 128,
    "gemm2_tile_n": 128,
    "num_dispatch_cu": 16,
    "tile_order": "ready",
    "num_queue_shards": 4,
    "b2stage": True,
    "persist_cu": 128,
    "persist_strided": True,
    "num_cu": 128,
}


def test_fault_4_names_differ_when_anything_differs() -> None:
    base = MegaMoEConfig(persist_cu=64)
    assert set(OTHER_VALUES) == {field.name for field in fields(MegaMoEConfig)}
    variants = [base, *(replace(base, **{name: value}) for name, value in OTHER_VALUES.items())]
    names = [
        kernel_name("stage1", config, activation=activation, wire=wire, bounds_check=check)
        for config in variants
        for activation, wire, check in itertools.product(("situv2", "silu"), ("bf16", "fp8"), (False, True))
    ]
    assert len(set(names)) == len(variants) * 8
    assert all(name.isidentifier() for name in names)


def test_kernel_names_carry_betas() -> None:
    a, b = (kernel_name("stage1", MegaMoEConfig(), beta=beta) for beta in (4.0, 5.0))
    assert a != b
