# SPDX-License-Identifier: Apache-2.0
"""Flags of workgroup scope: right in every schedule, no false alarm; without the scope bit: a race."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from kernellib import emulator
from kernellib.emulator import parse
from kernellib.emulator.flydsl_backend import compile_to_assembly
from kernellib.emulator.sanitizers.polls import polling_loads
from tests.emulator.kernels import handover

BLOCKS = 2
SCHEDULES = [
    ("simple", 0),
    *(("relaxed", seed) for seed in range(5)),
    *(pytest.param("relaxed", seed, marks=pytest.mark.slow) for seed in range(5, 50)),
]


def hand_over(text: str, mode: str, seed: int) -> bool:
    """Run the kernel under the race sanitizer; whether its result is right."""
    x = torch.randn(BLOCKS * 64, generator=torch.Generator().manual_seed(1))
    between, out = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    flags = torch.zeros(BLOCKS, dtype=torch.int32)
    pointers = [tensor.data_ptr() for tensor in (x, between, flags, out)]
    with emulator.emulated(mode=mode, schedule_seed=seed, sanitize="all") as session:
        session.run_assembly(text, None, BLOCKS, 128, pointers)
    return torch.equal(out, 2 * x.reshape(-1, 2).flip(1).reshape(-1))


def listing() -> str:
    return compile_to_assembly(handover.through_memory(), 0, 0, 0, 0, BLOCKS)


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_waves_hand_over_through_memory(mode: str, seed: int) -> None:
    assert hand_over(listing(), mode, seed)


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
@pytest.mark.parametrize("access", ["global_store_dword", "global_load_dword"])
def test_a_flag_without_its_scope_bit_is_a_race(access: str, mode: str) -> None:
    lines = listing().splitlines()
    flags = [n for n, line in enumerate(lines) if access in line and line.rstrip().endswith(" sc0")]
    assert flags
    for n in flags:
        lines[n] = lines[n].replace(" sc0", "")
    with pytest.raises(emulator.GlobalRaceError, match="no scope"):
        hand_over("\n".join(lines), mode, 0)


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
def test_workgroup_scope_orders_nothing_between_workgroups(mode: str) -> None:
    """The flags of all workgroups are one: each consumer may have been let go by the other's producer."""
    text = listing().replace("s_lshl_b64 s[0:1], s[2:3], 2", "s_mov_b64 s[0:1], 0")
    assert text != listing()
    with pytest.raises(emulator.GlobalRaceError, match="workgroup scope"):
        hand_over(text, mode, 0)


def lds_ring(text: str, mode: str, seed: int, sanitize: str) -> bool:
    """Run a ring of the kernel's listing; whether its result is right."""
    steps = 7
    x = torch.randn(steps * 64, generator=torch.Generator().manual_seed(2))
    out = torch.full((2, steps * 64), float("nan"))
    with emulator.emulated(mode=mode, schedule_seed=seed, sanitize=sanitize) as session:
        session.run_assembly(text, None, 2, 128, [x.data_ptr(), out.data_ptr(), steps])
    wanted = 2 * x.reshape(-1, 2).flip(1).reshape(-1) + 1
    return all(torch.equal(row, wanted) for row in out)


@functools.cache
def ring_listing(overrun: bool = False) -> str:
    return compile_to_assembly(handover.through_lds(overrun), 0, 0, 1)


@pytest.mark.parametrize("sanitize", ["default", "all"])
@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_waves_hand_over_through_lds(mode: str, seed: int, sanitize: str) -> None:
    assert lds_ring(ring_listing(), mode, seed, sanitize)


def test_lds_stores_that_nobody_waits_for_arrive() -> None:
    """Seed 13 once put the last flag off for ever, as the wave that stored it had ended: a false deadlock."""
    for seed in range(12, 16):
        assert lds_ring(ring_listing(), "relaxed", seed, "default")


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_a_flag_in_lds_before_its_data_is_a_race(mode: str, seed: int) -> None:
    store = r"(\tds_write_b32 [^\n]*\n)"
    text, count = re.subn(
        rf"{store}(?:\t\.loc[^\n]*\n)*\ts_waitcnt lgkmcnt\(0\)\n{store}", r"\2\1", ring_listing()
    )
    assert count == 1
    with pytest.raises(emulator.LdsRaceError, match="no barrier between"):
        lds_ring(text, mode, seed, "lds_races")


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_a_ring_that_is_overrun_shows(mode: str, seed: int) -> None:
    """A race, or a wrong result where the consumer saw a later turn's flag, which does order the two."""
    try:
        shows = not lds_ring(ring_listing(True), mode, seed, "all")
    except emulator.LdsRaceError:
        shows = True
    assert shows


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        ("ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_cmp_eq_u32_e32 vcc, 0, v1\ns_cbranch_vccnz .L", 1),
        ("s_sleep 1\nds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_cmp_eq_u32_e32 vcc, 0, v1\n"
         "s_or_b64 s[4:5], vcc, s[4:5]\ns_andn2_b64 exec, exec, s[4:5]\ns_cbranch_execnz .L", 1),
        # a sum over the LDS, a loop that stores, one that waits for global memory
        ("ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_add_u32_e32 v2, v1, v2\ns_cmp_eq_u32 s2, 0\n"
         "s_cbranch_scc0 .L", 0),
        ("ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nds_write_b32 v0, v1 offset:4\ns_cmp_eq_u32 s2, 0\n"
         "s_cbranch_scc0 .L", 0),
        ("global_load_dword v1, v[2:3], off\ns_waitcnt vmcnt(0)\nv_cmp_eq_u32_e32 vcc, 0, v1\n"
         "s_cbranch_vccnz .L", 0),
    ],
)  # fmt: skip
def test_which_loops_poll(loop: str, count: int) -> None:
    program = parse(f"kernel:\nds_read_b32 v9, v0\ns_nop 0\n.L:\n{loop}\ns_endpgm\n")
    assert len(polling_loads(program)) == count


def test_the_first_look_before_a_loop_polls_too() -> None:
    look = "ds_read_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_cmp_eq_u32_e32 vcc, 0, v1\n"
    program = parse(
        f"kernel:\nds_read_b32 v9, v0\n{look}s_cbranch_vccz .Lon\n"
        f".L:\n{look}s_cbranch_vccnz .L\n.Lon:\ns_endpgm\n"
    )
    assert polling_loads(program) == {1, 5}
