# SPDX-License-Identifier: Apache-2.0
"""Every wait, barrier, release and acquire of dispatch, GEMM scheduling and combine is needed: each is
removed in turn, and relaxed mode shows it, by a wrong result, a deadlock or a finding of a sanitizer.

A site is named by the stage, the chain of device functions that leads to it, its kind and its number among
those of one name. None of them is harmless: those that were have been removed from the kernels (a barrier
before GEMM1's wait for the plan, which ends in one; one behind a drawn tile number, which is not overwritten
before the tile's own barriers; one before a workgroup leaves stage 2, see ``_leave``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from mega_moe_mutants import BASE, Kernels, Setting, chunked_gemm, run

from kernellib.ops.mega_moe.config import MegaMoEShape

SETTINGS = {
    # tiles in the order in which they become ready; GEMM2 draws tiles
    "ready": Setting(replace(BASE, tile_order="ready", persist_cu=3), "fp8_blockwise_1x32"),
    # tiles in the planner's order; GEMM2 takes every second item, combine has the same workgroups
    "expert": Setting(replace(BASE, persist_cu=2, persist_strided=True), "bf16"),
    # Codes of a sent tile lie where the same wave stores the next one's rows, but its scales do not: here the
    # scales of rows from 32 on, which the second wave sends, lie where the first wave stores.
    "strided": Setting(
        replace(BASE, tile_m=64, persist_cu=1, persist_strided=True),
        "fp8_blockwise_1x32",
        MegaMoEShape(4, 128, 256, 2),
        (0, 2, 3),
    ),
    # a workgroup for each item of GEMM2, others that only combine
    "one_each": Setting(BASE, "bf16"),
}
SEEDS = range(4)

FLAG = ("wait 1", "barrier 1", "acquire 1")  # a wait for a flag by one lane, the others' part, the acquire


def sites(place: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"{place}: {kind}" for kind in kinds)


AWAIT_TILE = sites("stage1 run_gemm1/_compute_tile/_await_tile", *FLAG)
COMBINE = sites("stage2 _run_combine/wait_for_all_ranks", *FLAG)
SITES: dict[str, tuple[str, ...]] = {
    "ready": (
        *sites("stage1 publish_histogram", "barrier 1", "barrier 2", "release 1", "barrier 3"),
        *sites("stage1 plan/wait_for_all_ranks", *FLAG),
        *sites("stage1 plan/_lay_out_experts", "barrier 1", "barrier 2"),
        *sites("stage1 plan", "release 1", "barrier 1"),
        *sites("stage1 dispatch/wait_for_all_ranks", *FLAG),
        *sites("stage1 dispatch", "release 1"),
        *sites("stage1 dispatch/_count_row", "acquire 1", "release 1"),
        *sites("stage1 run_gemm1", "wait 1", "barrier 1", "acquire 1", "barrier 2", "barrier 3"),
        *AWAIT_TILE,
        *sites("stage1 run_gemm1/_compute_tile/gemm1_tile/multiply_tile", "barrier 1", "barrier 2"),
        *sites("stage1 run_gemm1/_compute_tile/gemm1_tile", "barrier 1"),
        *sites("stage2 run_gemm2/_draw", "barrier 1"),
        *sites("stage2 run_gemm2/_compute_tile/gemm2_tile/multiply_tile", "barrier 1", "barrier 2"),
        *sites("stage2 run_gemm2/_compute_tile/gemm2_tile", "barrier 1"),
        *sites("stage2 run_gemm2/_finish_tiles", "release 1", "barrier 1", "acquire 1", "release 2"),
        *COMBINE,
    ),
    "expert": AWAIT_TILE,
    "strided": sites("stage2 run_gemm2", "barrier 1"),
    "one_each": COMBINE,
}
# The fault of the field: a tile's metadata read before its readiness was acquired.
FAST = {("ready", AWAIT_TILE[0]), ("ready", AWAIT_TILE[2])}
CASES = [
    pytest.param(setting, site, marks=[] if (setting, site) in FAST else [pytest.mark.slow])
    for setting, names in SITES.items()
    for site in names
]


@cache
def whole(setting: str) -> Kernels:
    """Nothing removed; has run once."""
    kernels = Kernels(SETTINGS[setting], None)
    assert run(kernels, 0, "all") is None, f"{setting}: the whole kernels, schedule_seed=0"
    return kernels


@pytest.mark.slow
def test_the_list_is_complete() -> None:
    """Every site of every setting is in the list of that setting or, where other settings share it, of one
    that runs the same code."""
    met = {setting: set().union(*whole(setting).sites.values()) for setting in SETTINGS}
    assert set().union(*met.values()) == set().union(*SITES.values())
    for setting, names in SITES.items():
        assert set(names) <= met[setting]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_whole_kernels_pass(setting: str, seed: int) -> None:
    assert run(whole(setting), seed) is None
    assert run(whole(setting), seed, "all") is None


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("setting", "site"), CASES)
def test_a_removal_is_caught(setting: str, site: str) -> None:
    """First by what goes wrong by itself, then by the race sanitizers, for a few schedules each."""
    kernels = Kernels(SETTINGS[setting], site)
    for sanitize in ("default", "all"):
        for seed in SEEDS:
            found = run(kernels, seed, sanitize)
            if found is not None:
                print(f"{setting}, {site}: {found} (sanitize={sanitize}, schedule_seed={seed})")
                return
    pytest.fail(f"{site} can be removed from {setting} unnoticed: schedule seeds {list(SEEDS)}")


MULTIPLY = ("multiply_tile: barrier 1", "multiply_tile: barrier 2")


@pytest.mark.parametrize("removed", [None, *MULTIPLY])
def test_barriers_of_a_product_of_several_chunks(removed: str | None) -> None:
    """The double-buffered loop over K, which the stages above do not enter."""
    found = [chunked_gemm(removed, seed) for seed in range(1 if removed is None else 3)]
    assert any(found) == (removed is not None), f"{removed}: {found}"
