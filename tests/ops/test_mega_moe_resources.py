# SPDX-License-Identifier: Apache-2.0
"""Both stages at Kimi-K3's real shape, compiled for gfx950 with every entry of the tables."""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
import pytest

from kernellib.emulator import compile_to_assembly
from kernellib.emulator.assembly import parse
from kernellib.emulator.resources import KernelResources, kernel_resources
from kernellib.ops.mega_moe import stage1_gfx950, stage2_gfx950
from kernellib.ops.mega_moe.config import (
    BUCKETS,
    KIMI_K3,
    KIMI_K3_TABLE,
    LDS_BYTES,
    WAVES_PER_SIMD,
    WIRES,
    MegaMoEConfig,
    MegaMoEShape,
    Wire,
    generic_config,
)
from kernellib.ops.mega_moe.layout import LdsLayout, SymmetricLayout

RANKS = 8
STAGE1_ARGUMENTS, STAGE2_ARGUMENTS = 9, 8


def table_entries() -> dict[MegaMoEConfig, list[str]]:
    """Configuration -> the entries that hold it."""
    found: dict[MegaMoEConfig, list[str]] = {}
    for bucket in BUCKETS:
        found.setdefault(KIMI_K3_TABLE[bucket], []).append(f"tuned {bucket}")
        found.setdefault(generic_config(KIMI_K3, RANKS, bucket), []).append(f"generic {bucket}")
    return found


ENTRIES = table_entries()


def compiled(stage: str, config: MegaMoEConfig) -> KernelResources:
    """The resources of a stage; the capacity that real layers have, the wire with the longer epilogue."""
    layout = SymmetricLayout(KIMI_K3, RANKS, 8192, "fp8_blockwise_1x32")
    module, number = (
        (stage1_gfx950, STAGE1_ARGUMENTS) if stage == "stage1" else (stage2_gfx950, STAGE2_ARGUMENTS)
    )
    kernel = (
        stage1_gfx950.Stage1(layout, config, "situv2")
        if stage == "stage1"
        else stage2_gfx950.Stage2(layout, config)
    )
    arguments = [1] * number  # addresses and counts: nothing runs
    text = compile_to_assembly(module.build(kernel), *arguments, fx.Stream(None))
    return kernel_resources(parse(text), kernel.kernel_name)


def entries() -> list[object]:
    """All slow but the decode entry: a kernel takes seconds to compile."""
    first = KIMI_K3_TABLE[1]
    return [
        pytest.param(config, id=config.name, marks=[] if config == first else [pytest.mark.slow])
        for config in ENTRIES
    ]


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
@pytest.mark.parametrize("config", entries())
def test_resources_of_a_table_entry(config: MegaMoEConfig, stage: str) -> None:
    found = compiled(stage, config)
    print(
        f"{stage} {config.name} ({', '.join(ENTRIES[config])}): {found.vgprs} VGPRs, {found.agprs} AGPRs, "
        f"{found.sgprs} SGPRs, {found.lds_bytes} bytes of LDS, {found.occupancy_waves_per_simd} waves a SIMD"
    )
    assert found.vgpr_spills == found.sgpr_spills == found.scratch_bytes == 0
    lds = LdsLayout(KIMI_K3, config, "fp8_blockwise_1x32", RANKS)
    assert found.lds_bytes == (lds.stage1_bytes if stage == "stage1" else lds.stage2_bytes) <= LDS_BYTES
    assert found.occupancy_waves_per_simd == WAVES_PER_SIMD[config.tile_m]


@pytest.mark.parametrize("wire", WIRES)
def test_lds_is_what_the_contract_counts_with(wire: Wire) -> None:
    """Where the planner's counts, or the rows on their way out, need more than the products do."""
    shape = MegaMoEShape(4096, 128, 256, 2)
    config = MegaMoEConfig(tile_m=16, gemm1_tile_n=512, gemm2_tile_n=128, num_dispatch_cu=1, num_cu=2)
    layout, lds = SymmetricLayout(shape, 2, 4, wire), LdsLayout(shape, config, wire, 2)
    assert lds.stage1_bytes > lds.gemm1_bytes + 16
    for name, stage, number in (
        ("stage1", stage1_gfx950.Stage1(layout, config, "silu"), STAGE1_ARGUMENTS),
        ("stage2", stage2_gfx950.Stage2(layout, config), STAGE2_ARGUMENTS),
    ):
        build: Any = stage1_gfx950.build if name == "stage1" else stage2_gfx950.build
        text = compile_to_assembly(build(stage), *[1] * number, fx.Stream(None))
        assert kernel_resources(parse(text), stage.kernel_name).lds_bytes == getattr(lds, f"{name}_bytes")


def test_every_bucket_of_both_tables_is_among_them() -> None:
    named = {name for names in ENTRIES.values() for name in names}
    assert named == {f"{table} {bucket}" for table in ("tuned", "generic") for bucket in BUCKETS}
