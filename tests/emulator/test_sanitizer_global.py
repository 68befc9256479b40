# SPDX-License-Identifier: Apache-2.0
"""Races in global memory, poisoned memory, registers, addresses: each fault is found, its repair silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernellib import emulator
from tests.emulator.flag_protocol import consumer, one_kernel, producer
from tests.emulator.listings import listing

MODES = ("simple", "relaxed")
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 50))]
EXPECTED = np.arange(64, dtype=np.uint32) + 1000
everywhere = pytest.mark.parametrize("mode", MODES)
every_seed = pytest.mark.parametrize("seed", SEEDS)


def run(
    text: str, mode: str, seed: int, grid: int, block: int, args: list[Any], sanitize: Any = "all"
) -> None:
    with emulator.emulated(mode=mode, schedule_seed=seed, sanitize=sanitize) as session:
        session.run_assembly(text, None, grid, block, args)


def protocol(
    mode: str, seed: int, without: str | None, scope: str = "agent", sanitize: Any = "all"
) -> np.ndarray:
    payload, flag, result = np.zeros(64, np.uint32), np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    run(one_kernel(scope, without), mode, seed, 2, 64, [payload, flag, result], sanitize)
    return result


def protocol_of_ranks(mode: str, seed: int, without: str | None, scope: str = "system") -> np.ndarray:
    with emulator.emulated(mode=mode, schedule_seed=seed, sanitize="all") as session:
        world = session.create_world(2)
        payload, flag, result = (world.allocate((n,), torch.int32) for n in (64, 1, 64))

        def host(rank: emulator.Rank) -> None:
            if rank.index == 0:
                session.run_assembly(producer(scope, without), None, 1, 64, [payload[1], flag[1]])
            else:
                arguments = [payload[1], flag[1], result[1]]
                session.run_assembly(consumer(scope, without), None, 1, 64, arguments)

        world.run(host)
    return result[1].numpy().view(np.uint32)


RUNS: dict[str, Callable[..., np.ndarray]] = {"workgroups": protocol, "ranks": protocol_of_ranks}


# ------------------------------------------------------------------------------------------------ races
@everywhere
@every_seed
@pytest.mark.parametrize("where", RUNS)
@pytest.mark.parametrize("without", ["release", "release wait", "acquire"])
def test_every_missing_part_of_a_flag_protocol_is_a_race(
    where: str, without: str, mode: str, seed: int
) -> None:
    with pytest.raises(emulator.GlobalRaceError, match="nothing orders the two") as caught:
        RUNS[where](mode, seed, without)
    text, location = str(caught.value), caught.value.location
    assert "workgroup (0, 0, 0), wave 0" in text
    assert "global_store_dword v1, v2, s[4:5]" in text
    assert location.instruction == "global_load_dword v5, v1, s[4:5]"
    assert None not in (location.lane, location.address, location.line_no, location.wave, location.workgroup)
    assert ("schedule_seed" in text) == (mode == "relaxed")


@everywhere
@every_seed
@pytest.mark.parametrize("where", RUNS)
def test_the_intact_protocol_is_no_race(where: str, mode: str, seed: int) -> None:
    assert np.array_equal(RUNS[where](mode, seed, None), EXPECTED)


@everywhere
def test_scopes_count(mode: str) -> None:
    # agent scope orders workgroups of one rank, not ranks: the flag itself is a race then
    assert np.array_equal(protocol(mode, 1, None, "system"), EXPECTED)
    with pytest.raises(emulator.GlobalRaceError, match="agent scope"):
        protocol_of_ranks(mode, 1, None, "agent")


TWO_WRITERS = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v2, s2
    {place}
    s_waitcnt lgkmcnt(0)
    {store}
"""


@everywhere
@every_seed
def test_two_workgroups_write_the_same_bytes(mode: str, seed: int) -> None:
    data = np.zeros(128, np.uint32)
    broken = TWO_WRITERS.format(place="s_nop 0", store="global_store_dword v1, v2, s[4:5]")
    with pytest.raises(emulator.GlobalRaceError, match="wrote with"):
        run(listing(broken, 1), mode, seed, 2, 64, [data], ("global_races",))
    apart = TWO_WRITERS.format(
        place="s_lshl_b32 s3, s2, 8\nv_add_u32_e32 v1, s3, v1", store="global_store_dword v1, v2, s[4:5]"
    )
    run(listing(apart, 1), mode, seed, 2, 64, [data])
    assert np.array_equal(data, np.arange(128) // 64)
    data[:] = 0
    added = TWO_WRITERS.format(place="v_mov_b32_e32 v2, 3", store="global_atomic_add v1, v2, s[4:5]")
    run(listing(added, 1), mode, seed, 2, 64, [data])
    assert np.array_equal(data, np.repeat([6, 0], 64))


@everywhere
def test_bytes_side_by_side_are_no_race(mode: str) -> None:
    """Two workgroups write alternate bytes: no granule is coarser than the accesses."""
    body = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 1, v0
        v_add_u32_e32 v1, s2, v1
        s_waitcnt lgkmcnt(0)
        global_store_byte v1, v0, s[4:5]
        """
    data = np.zeros(128, np.uint8)
    run(listing(body, 1), mode, 0, 2, 64, [data])
    assert np.array_equal(data, np.arange(128) // 2)


@everywhere
def test_waves_of_a_workgroup_are_ordered_by_barriers(mode: str) -> None:
    body = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        v_xor_b32_e32 v2, 0x100, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[4:5]
        {barrier}
        global_load_dword v3, v2, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dword v1, v3, s[4:5] offset:512
        """
    data = np.zeros(256, np.uint32)
    run(listing(body.format(barrier="s_barrier"), 1), mode, 0, 1, 128, [data])
    assert np.array_equal(data[128:], np.arange(128) ^ 64)
    with pytest.raises(emulator.GlobalRaceError):
        run(listing(body.format(barrier="s_nop 0"), 1), mode, 0, 1, 128, [data])


@everywhere
def test_one_wave_may_release_for_its_workgroup_only_what_was_waited_for(mode: str) -> None:
    """Every wave stores; wave 0 releases after a barrier.  The others must have waited for their stores."""
    body = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        v_mov_b32_e32 v9, 0
        v_mov_b32_e32 v3, 1
        v_readfirstlane_b32 s8, v0
        s_waitcnt lgkmcnt(0)
        s_cmp_eq_u32 s2, 0
        s_cbranch_scc0 .Lconsumer
        global_store_dword v1, v0, s[4:5]
        {wait}
        s_barrier
        s_cmp_eq_u32 s8, 0
        s_cbranch_scc0 .Lend
        buffer_wbl2 sc1
        s_waitcnt vmcnt(0)
        global_store_dword v9, v3, s[6:7] sc1
        s_branch .Lend
    .Lconsumer:
        global_load_dword v4, v9, s[6:7] sc1
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s10, v4
        s_cmp_eq_u32 s10, 0
        s_cbranch_scc1 .Lconsumer
        buffer_inv sc1
        global_load_dword v5, v1, s[4:5]
        s_waitcnt vmcnt(0)
    .Lend:
        s_nop 0
        """
    payload, flag = np.zeros(128, np.uint32), np.zeros(1, np.uint32)
    run(listing(body.format(wait="s_waitcnt vmcnt(0)"), 2), mode, 0, 2, 128, [payload, flag])
    flag[:] = 0
    with pytest.raises(emulator.GlobalRaceError, match="wave 1 wrote"):
        run(listing(body.format(wait="s_nop 0"), 2), mode, 0, 2, 128, [payload, flag])


@everywhere
@every_seed
@pytest.mark.parametrize("acquire", ["buffer_inv sc1", "s_nop 0"])
def test_the_last_to_arrive_at_a_counter_has_acquired_from_all(acquire: str, mode: str, seed: int) -> None:
    """Four workgroups count themselves in, maybe in one step; the last one reads what all have stored."""
    body = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        s_lshl_b32 s8, s2, 8
        v_lshl_add_u32 v1, v0, 2, s8
        v_lshlrev_b32_e32 v2, 2, v0
        v_mov_b32_e32 v9, 0
        v_mov_b32_e32 v3, 1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[4:5]
        buffer_wbl2 sc1
        s_waitcnt vmcnt(0)
        v_cmp_eq_u32_e32 vcc, 0, v0
        s_and_saveexec_b64 s[10:11], vcc
        global_atomic_add v4, v9, v3, s[6:7] sc0
        s_waitcnt vmcnt(0)
        s_mov_b64 exec, s[10:11]
        v_readfirstlane_b32 s9, v4
        s_cmp_eq_u32 s9, 3
        s_cbranch_scc0 .Lend
        {acquire}
        global_load_dword v5, v2, s[4:5]
        global_load_dword v6, v2, s[4:5] offset:256
        global_load_dword v7, v2, s[4:5] offset:512
        global_load_dword v8, v2, s[4:5] offset:768
        s_waitcnt vmcnt(0)
    .Lend:
        s_nop 0
        """
    text = listing(body.format(acquire=acquire), 2)
    arguments = [np.zeros(256, np.uint32), np.zeros(1, np.uint32)]
    if acquire == "s_nop 0":
        with pytest.raises(emulator.GlobalRaceError):
            run(text, mode, seed, 4, 64, arguments)
    else:
        run(text, mode, seed, 4, 64, arguments)
        assert arguments[1][0] == 4


@everywhere
def test_launches_in_order_are_no_race(mode: str) -> None:
    data = np.full(128, 7, np.uint32)
    text = listing(TWO_WRITERS.format(place="s_nop 0", store="global_store_dword v1, v2, s[4:5]"), 1)
    with emulator.emulated(mode=mode, sanitize="all") as session:
        for _ in range(3):
            data[:64] = 7
            session.run_assembly(text, None, 1, 64, [data])
            assert np.array_equal(data, np.repeat(np.array([0, 7], np.uint32), 64))
    assert len(session.launches) == 3


@everywhere
def test_ranks_that_meet_at_a_host_barrier_are_ordered(mode: str) -> None:
    text = listing(TWO_WRITERS.format(place="s_nop 0", store="global_store_dword v1, v2, s[4:5]"), 1)

    def race(meet: bool) -> None:
        with emulator.emulated(mode=mode, sanitize="all") as session:
            world = session.create_world(2)
            data = world.allocate((64,), torch.int32)

            def host(rank: emulator.Rank) -> None:
                if rank.index == 1 and meet:
                    rank.barrier()
                session.run_assembly(text, None, 1, 64, [data[0]])
                if rank.index == 0 and meet:
                    rank.barrier()

            world.run(host)

    race(True)
    with pytest.raises(emulator.GlobalRaceError, match="rank"):
        race(False)


# ------------------------------------------------------------------------------------------------ poison
COPY = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    {before}
    s_waitcnt lgkmcnt(0)
    {store}
    global_load_dword v3, v1, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v3, s[6:7]
"""


@everywhere
@every_seed
def test_poisoned_memory(mode: str, seed: int) -> None:
    broken = listing(COPY.format(before="s_nop 0", store="s_nop 0"), 2)
    written = listing(COPY.format(before="s_nop 0", store="global_store_dword v1, v0, s[4:5]"), 2)
    out = torch.zeros(64, dtype=torch.int32)
    with emulator.emulated(mode=mode, schedule_seed=seed, sanitize="all") as session:
        source = session.empty((64,), torch.int32)
        with pytest.raises(emulator.PoisonedMemoryError, match="has not been written: byte 0") as caught:
            session.run_assembly(broken, None, 1, 64, [source, out])
        assert caught.value.location.address == source.data_ptr()
        assert caught.value.location.lane == 0
        session.run_assembly(written, None, 1, 64, [source, out])
        assert torch.equal(out, torch.arange(64, dtype=torch.int32))
        session.run_assembly(broken, None, 1, 64, [source, out])  # a kernel has written it meanwhile
        session.poison(source[32:])
        with pytest.raises(emulator.PoisonedMemoryError, match="byte 128") as caught:
            session.run_assembly(broken, None, 1, 64, [source, out])
        assert caught.value.location.lane == 32
        source.zero_()
        session.unpoison(source)
        session.run_assembly(broken, None, 1, 64, [source, out])
        assert not out.any()


# ------------------------------------------------------------------------------------------------ registers
@everywhere
@every_seed
@pytest.mark.parametrize(
    ("text", "register"),
    [
        ("s_add_u32 s9, s20, s2", "s20"),
        ("global_load_dword v2, v7, s[4:5]", "v7"),
        ("global_store_dword v1, v[6:7], s[4:5]".replace("dword ", "dwordx2 "), "v6"),
        ("s_and_saveexec_b64 s[10:11], vcc", "vcc_lo"),
        ("v_readfirstlane_b32 s9, v8", "v8"),
    ],
)
def test_uninitialised_registers(text: str, register: str, mode: str, seed: int) -> None:
    body = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 3, v0
        {set}
        s_waitcnt lgkmcnt(0)
        s_nop 4
        {text}
        """
    data = np.zeros(256, np.uint32)
    broken = listing(body.format(set="s_nop 0", text=text), 1)
    with pytest.raises(emulator.UninitialisedRegisterError, match=f"reads {register},") as caught:
        run(broken, mode, seed, 1, 64, [data], ("uninitialised_registers",))
    assert caught.value.location.instruction == text
    assert caught.value.location.wave == 0
    values = (
        "v_mov_b32_e32 v6, 0\nv_mov_b32_e32 v7, 0\nv_mov_b32_e32 v8, 0\ns_mov_b32 s20, 0\ns_mov_b64 vcc, 0"
    )
    run(listing(body.format(set=values, text=text), 1), mode, seed, 1, 64, [data])


COMPUTED = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 3, v0
    v_mov_b32_e32 v4, 0
    v_mov_b32_e32 v5, 0
    v_mov_b32_e32 v6, 0
    s_waitcnt lgkmcnt(0)
    {text}
    s_nop 4
    {use}
    """
PAIR, LOW, HIGH = (
    f"global_store_dword{x} v1, {v}, s[4:5]" for x, v in (("x2", "v[2:3]"), ("", "v2"), ("", "v3"))
)


@pytest.mark.parametrize(
    ("text", "use", "register"),
    [
        ("v_add_u32_e32 v2, v7, v0", LOW, "v7"),
        ("v_add_u32_e32 v2, v7, v0", "s_nop 0", None),
        ("v_add_u32_e32 v2, v7, v0\nv_mov_b32_e32 v3, v2\nv_mov_b32_e32 v2, 0", LOW, None),
        ("v_add_u32_e32 v2, v7, v0\nv_mov_b32_e32 v3, v2\nv_mov_b32_e32 v2, 0", HIGH, "v7"),
        ("v_cmp_eq_u32_e32 vcc, v7, v0", "s_cbranch_vccnz .Lon\n.Lon:", "v7"),
        ("v_cmp_eq_u32_e32 vcc, v7, v0\nv_cndmask_b32_e32 v2, v4, v5, vcc", LOW, "v7"),
        ("v_add_u32_e32 v2, v7, v0", "v_readfirstlane_b32 s9, v2", "v7"),
        ("v_fmac_f32_e32 v2, v4, v5", LOW, "v2"),
        # what the low result of a 64-bit sum or shift does not depend on
        ("v_mad_u64_u32 v[2:3], s[8:9], v4, v5, v[6:7]", LOW, None),
        ("v_mad_u64_u32 v[2:3], s[8:9], v4, v5, v[6:7]", HIGH, "v7"),
        ("v_mad_u64_u32 v[2:3], s[8:9], v4, v5, v[6:7]", "s_mov_b32 s10, s8", "v7"),
        ("v_mad_u64_u32 v[2:3], s[8:9], v4, v7, v[4:5]", LOW, "v7"),
        ("v_lshlrev_b64 v[2:3], 2, v[6:7]", LOW, None),
        ("v_lshlrev_b64 v[2:3], 2, v[6:7]", PAIR, "v7"),
        ("v_lshl_add_u64 v[2:3], v[6:7], 2, v[4:5]", LOW, None),
        ("v_lshl_add_u64 v[2:3], v[4:5], 2, v[6:7]", HIGH, "v7"),
        ("v_lshrrev_b64 v[2:3], 2, v[6:7]", LOW, "v7"),
        ("v_cvt_pk_bf16_f32 v2, v4, v7", "global_store_short v1, v2, s[4:5]", None),
        ("v_cvt_pk_bf16_f32 v2, v7, v4", "global_store_short v1, v2, s[4:5]", "v7"),
        # of register pairs only what op_sel picks is read, each result by its own
        ("v_pk_mul_f32 v[2:3], v[4:5], v[6:7] op_sel_hi:[1,0]", PAIR, None),
        ("v_pk_mul_f32 v[2:3], v[4:5], v[6:7]", PAIR, "v7"),
        ("v_pk_mul_f32 v[2:3], v[4:5], v[6:7]", LOW, None),
        ("v_pk_add_f32 v[2:3], v[4:5], v[6:7] op_sel:[0,1] op_sel_hi:[1,0]", LOW, "v7"),
        ("v_pk_add_f32 v[2:3], v[4:5], v[6:7] op_sel:[0,1] op_sel_hi:[1,0]", HIGH, None),
        ("v_pk_mov_b32 v[2:3], v[6:7], v[4:5] op_sel:[0,1]", PAIR, None),
        ("v_pk_mov_b32 v[2:3], v[6:7], v[4:5] op_sel:[1,0]", LOW, "v7"),
        ("v_pk_mov_b32 v[2:3], v[6:7], v[4:5] op_sel:[1,0]", HIGH, None),
    ],
)
def test_uninitialised_registers_show_where_they_are_used(text: str, use: str, register: str | None) -> None:
    """v7, v2, v3 and vcc have not been written; the finding is at the instruction that read first."""
    body = COMPUTED.format(text=text, use=use)
    data = np.zeros(256, np.uint32)
    arguments = (listing(body, 1), "simple", 0, 1, 64, [data], ("uninitialised_registers",))
    if register is None:
        run(*arguments)
        return
    with pytest.raises(emulator.UninitialisedRegisterError, match=f"reads {register},") as caught:
        run(*arguments)
    assert caught.value.location.instruction == text.splitlines()[0]
    assert use.splitlines()[0].split()[0] in str(caught.value)


# ----------------------------------------------------------------------------------- addresses, waits
@everywhere
@every_seed
def test_out_of_bounds_and_freed_memory(mode: str, seed: int) -> None:
    text = listing(COPY.format(before="s_nop 0", store="s_nop 0"), 2)
    out = np.zeros(64, np.uint32)
    short = np.zeros(48, np.uint32)
    with pytest.raises(emulator.OutOfBoundsError) as caught:
        run(text, mode, seed, 1, 64, [short, out], "default")
    assert caught.value.location.lane == 48
    with emulator.emulated(mode=mode, schedule_seed=seed) as session:
        buffer = np.zeros(64, np.uint32)
        allocation = session.register_range(buffer.ctypes.data, buffer.nbytes, "scratch buffer")
        address = buffer.ctypes.data
        session.run_assembly(text, None, 1, 64, [address, out])
        session.memory.unregister(allocation)
        with pytest.raises(emulator.UseAfterFreeError, match="scratch buffer"):
            session.run_assembly(text, None, 1, 64, [address, out])


@everywhere
@every_seed
def test_misaligned_addresses(mode: str, seed: int) -> None:
    body = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 3, v0
        {shift}
        s_waitcnt lgkmcnt(0)
        {access}
        """
    data = np.zeros(256, np.uint32)
    for shift, access, text in (
        ("v_add_u32_e32 v1, 4, v1", "global_atomic_add_x2 v1, v[0:1], s[4:5]", "not a multiple of 8"),
        ("v_add_u32_e32 v1, 2, v1", "ds_write_b32 v1, v0", "not a multiple of 4"),
        ("s_mov_b32 s8, 2", "s_load_dword s9, s[4:5], s8", "not a multiple of 4"),
    ):
        broken = listing(body.format(shift=shift, access=access), 1, 1024)
        with pytest.raises(emulator.MisalignedAccessError, match=text):
            run(broken, mode, seed, 1, 64, [data], ("misaligned", "global_races"))
        aligned = shift.replace("4, v1", "8, v1").replace("2, v1", "4, v1").replace("s8, 2", "s8, 4")
        run(listing(body.format(shift=aligned, access=access), 1, 1024), mode, seed, 1, 64, [data])


@everywhere
@every_seed
def test_missing_waits(mode: str, seed: int) -> None:
    data, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    whole = listing(COPY.format(before="s_nop 0", store="s_nop 0"), 2)
    broken = whole.replace("s_waitcnt vmcnt(0)", "s_nop 0")
    with pytest.raises(emulator.MissingWaitError, match="no s_waitcnt on vmcnt covers it"):
        run(broken, mode, seed, 1, 64, [data, out], "default")
    run(whole, mode, seed, 1, 64, [data, out])
    assert np.array_equal(out, data)


def test_names() -> None:
    for bad in ("everything", ("global_races", "nonsense")):
        with pytest.raises(emulator.SessionError, match="is not among"), emulator.emulated(sanitize=bad):
            pass
    for good in ("global_races", ["lds_races", "poisoned_memory"], (), "none", "default", "all"):
        with emulator.emulated(sanitize=good) as session:
            assert {"out_of_bounds", "missing_waits"} <= session.tuning.sanitizers
