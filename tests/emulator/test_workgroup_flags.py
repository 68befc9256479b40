# SPDX-License-Identifier: Apache-2.0
"""Flags of workgroup scope: right in every schedule, no false alarm; without the scope bit: a race."""

from __future__ import annotations

import pytest
import torch

from kernellib import emulator
from kernellib.emulator.flydsl_backend import compile_to_assembly
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


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_waves_hand_over_through_lds(mode: str, seed: int) -> None:
    """The last flag may still be on its way when the wave that stored it has ended."""
    steps = 7
    x = torch.randn(steps * 64, generator=torch.Generator().manual_seed(2))
    out = torch.full_like(x, float("nan"))
    with emulator.emulated(mode=mode, schedule_seed=seed):
        handover.through_lds()(x.data_ptr(), out.data_ptr(), steps)
    assert torch.equal(out, 2 * x.reshape(-1, 2).flip(1).reshape(-1) + 1)


def test_lds_stores_that_nobody_waits_for_arrive() -> None:
    """Seed 13 once put the last flag off for ever, and called that a deadlock."""
    for seed in range(12, 16):
        test_waves_hand_over_through_lds("relaxed", seed)
