# SPDX-License-Identifier: Apache-2.0
"""Races and uninitialised bytes in LDS, divergent barriers: each fault is found, its repaired twin silent."""

from __future__ import annotations

import numpy as np
import pytest

from kernellib import emulator
from tests.emulator.listings import listing

MODES = ("simple", "relaxed")
FAST_SEEDS, SLOW_SEEDS = range(5), range(5, 50)
SEEDS = [*FAST_SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)]

# Each wave writes its thread's dword, then reads the one of the neighbouring wave's thread.
EXCHANGE = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_xor_b32_e32 v2, 0x100, v1
    ds_write_b32 v1, v0
    {wait}
    {barrier}
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
    {second}
    {third}
    global_store_dword v1, v3, s[4:5]
"""
WHOLE = {"wait": "s_waitcnt lgkmcnt(0)", "barrier": "s_barrier", "second": "s_nop 0", "third": "s_nop 0"}
OVERWRITE = {"second": "s_barrier", "third": "ds_write_b32 v1, v2"}


def run(
    text: str, mode: str, seed: int, sanitize: str | tuple[str, ...] = "all", block: int = 128
) -> np.ndarray:
    out = np.zeros(block, np.uint32)
    with emulator.emulated(mode=mode, schedule_seed=seed, sanitize=sanitize) as session:
        session.run_assembly(text, None, 1, block, [out])
    return out


def exchange(**changes: str) -> str:
    return listing(EXCHANGE.format(**WHOLE | changes), 1, lds_bytes=512)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "fault",
    [
        {"barrier": "s_nop 0"},
        {"wait": "s_nop 0"},  # the write may be later than the barrier
        OVERWRITE | {"second": "s_nop 0"},  # the neighbour may not have read yet
    ],
    ids=["no barrier", "no wait before the barrier", "overwritten without a barrier"],
)
def test_lds_race(mode: str, seed: int, fault: dict[str, str]) -> None:
    with pytest.raises(emulator.LdsRaceError, match="no barrier between") as caught:
        run(exchange(**fault), mode, seed, ("lds_races",))
    location = caught.value.location
    assert location.instruction is not None
    assert location.instruction.startswith("ds_")
    assert location.line_no is not None
    assert location.workgroup == (0, 0, 0)
    assert location.wave in (0, 1)
    assert location.lane is not None
    assert location.address is not None
    assert caught.value.schedule_seed == (seed if mode == "relaxed" else None)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, OVERWRITE], ids=["exchange", "overwritten after a barrier"])
def test_lds_exchange_is_silent(mode: str, seed: int, changes: dict[str, str]) -> None:
    assert np.array_equal(run(exchange(**changes), mode, seed), np.arange(128) ^ 64)


def test_lds_atomics_of_several_waves_are_no_race() -> None:
    text = listing(
        """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32_e32 v2, 0
        v_mov_b32_e32 v3, 1
        v_lshlrev_b32_e32 v1, 2, v0
        v_cmp_eq_u32_e32 vcc, 0, v0
        s_and_saveexec_b64 s[6:7], vcc
        ds_write_b32 v2, v2
        s_mov_b64 exec, s[6:7]
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_add_u32 v2, v3
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v4, v2
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v4, s[4:5]
        """,
        1,
        lds_bytes=64,
    )
    for mode in MODES:
        assert (run(text, mode, 3) == 128).all()
    unguarded = text.replace("s_barrier\n\tds_read_b32", "ds_read_b32")
    for mode in MODES:
        with pytest.raises(emulator.LdsRaceError):
            run(unguarded, mode, 3)


# ----------------------------------------------------------------------------------- uninitialised
PARTLY = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_cmp_gt_u32_e32 vcc, {count}, v0
    s_and_saveexec_b64 s[6:7], vcc
    ds_write_b32 v1, v0
    s_mov_b64 exec, s[6:7]
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v3, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[4:5]
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_uninitialised_lds(mode: str, seed: int) -> None:
    broken = listing(PARTLY.format(count="0x50"), 1, lds_bytes=512)  # 80 of 128 dwords are written
    with pytest.raises(emulator.UninitialisedLdsError, match="byte 320 has not been written") as caught:
        run(broken, mode, seed, ("uninitialised_lds",))
    location = caught.value.location
    assert (location.wave, location.lane, location.address) == (1, 16, 320)
    whole = listing(PARTLY.format(count="0x80"), 1, lds_bytes=512)
    assert np.array_equal(run(whole, mode, seed), np.arange(128))


def test_bytes_of_a_direct_load_count_as_written() -> None:
    text = listing(
        """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        s_mov_b32 m0, 0
        s_waitcnt lgkmcnt(0)
        global_load_lds_dword v1, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b32 v3, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v3, s[6:7]
        """,
        2,
        lds_bytes=256,
    )
    data, out = np.arange(64, dtype=np.uint32) + 7, np.zeros(64, np.uint32)
    for mode in MODES:
        with emulator.emulated(mode=mode, sanitize="all") as session:
            session.run_assembly(text, None, 1, 64, [data, out])
        assert np.array_equal(out, data)


# ------------------------------------------------------------------------------------------------ barriers
TWO_BARRIERS = """
    v_readfirstlane_b32 s4, v0
    s_cmp_eq_u32 s4, 0
    s_cbranch_scc0 .Lother
    s_barrier
    s_branch .Lend
.Lother:
    {other}
.Lend:
    {after}
    s_nop 0
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_barrier_divergence(mode: str, seed: int) -> None:
    broken = listing(TWO_BARRIERS.format(other="s_barrier", after="s_nop 0"), 1)
    with pytest.raises(
        emulator.BarrierDivergenceError, match="waits at the barrier in listing line"
    ) as caught:
        run(broken, mode, seed, ("barrier_divergence",))
    assert caught.value.location.instruction == "s_barrier"
    # without the sanitizer the hardware's rule holds: the waves meet, wherever they stand
    run(broken, mode, seed, "default")
    together = TWO_BARRIERS.replace("    s_barrier\n    s_branch", "    s_branch")
    run(listing(together.format(other="s_nop 0", after="s_barrier"), 1), mode, seed)


@pytest.mark.parametrize("mode", MODES)
def test_lanes_off_at_a_barrier(mode: str) -> None:
    body = """
        v_cmp_gt_u32_e32 vcc, 8, v0
        s_and_saveexec_b64 s[6:7], vcc
        {inside}
        s_mov_b64 exec, s[6:7]
        {after}
        s_nop 0
        """
    with pytest.raises(emulator.BarrierDivergenceError, match="lanes of a wave are switched off") as caught:
        run(listing(body.format(inside="s_barrier", after="s_nop 0"), 1), mode, 0)
    assert caught.value.location.lane is not None
    run(listing(body.format(inside="s_nop 0", after="s_barrier"), 1), mode, 0)
    # a last wave that starts with fewer lanes is no divergence
    run(listing(body.format(inside="s_nop 0", after="s_barrier"), 1), mode, 0, block=100)


@pytest.mark.parametrize("mode", MODES)
def test_a_removed_barrier_is_noticed_without_sanitizers(mode: str) -> None:
    """Waves do not run in lockstep in relaxed mode: some schedule reads before the neighbour has written."""
    wrong = [
        seed for seed in range(50)
        if not np.array_equal(run(exchange(barrier="s_nop 0"), mode, seed, "default"), np.arange(128) ^ 64)
    ]  # fmt: skip
    assert bool(wrong) == (mode == "relaxed")
