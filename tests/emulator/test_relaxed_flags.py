# SPDX-License-Identifier: Apache-2.0
"""A flag protocol across workgroups and across ranks: whole it works, with a part less it fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernellib import emulator
from tests.emulator.flag_protocol import PARTS, consumer, one_kernel, producer

EXPECTED = np.arange(64, dtype=np.uint32) + 1000


def across_workgroups(seed: int, without: str | None = None, scope: str = "agent") -> np.ndarray:
    """What the consumer workgroup read."""
    payload, flag, result = np.zeros(64, np.uint32), np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    with emulator.emulated(mode="relaxed", schedule_seed=seed) as session:
        session.run_assembly(one_kernel(scope, without), None, 2, 64, [payload, flag, result])
    return result


def across_ranks(seed: int, without: str | None = None, scope: str = "system") -> np.ndarray:
    """What rank 1 read of what rank 0 put into rank 1's memory."""
    with emulator.emulated(mode="relaxed", schedule_seed=seed) as session:
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


RUNS = {"workgroups": across_workgroups, "ranks": across_ranks}


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(s, marks=pytest.mark.slow) for s in range(10, 100))]
)
@pytest.mark.parametrize("where", RUNS)
def test_the_intact_protocol_delivers(where: str, seed: int) -> None:
    for number in range(5 * seed, 5 * seed + 5):  # 50 seeds in the fast profile, 500 in the full one
        assert np.array_equal(RUNS[where](number), EXPECTED), f"schedule_seed={number}"


def fails(where: str, seed: int, without: str, scope: str | None = None) -> bool:
    """Whether that seed shows the fault: a finding, or a wrong result."""
    try:
        found = RUNS[where](seed, without, scope) if scope else RUNS[where](seed, without)
    except emulator.Finding:
        return True
    return not np.array_equal(found, EXPECTED)


@pytest.mark.parametrize("without", PARTS)
@pytest.mark.parametrize("where", RUNS)
def test_each_part_matters(where: str, without: str) -> None:
    failing = [seed for seed in range(50) if fails(where, seed, without)]
    assert failing, f"no schedule_seed in 0..49 shows that the {without} is missing"


def test_agent_scope_is_not_enough_between_ranks() -> None:
    assert any(not np.array_equal(across_ranks(seed, None, "agent"), EXPECTED) for seed in range(50))


@pytest.mark.parametrize("where", RUNS)
def test_findings_name_the_seed(where: str) -> None:
    with pytest.raises(emulator.MissingWaitError, match="schedule_seed=7") as caught:
        RUNS[where](7, "payload wait")
    assert caught.value.schedule_seed == 7


def test_the_same_seed_gives_the_same_run() -> None:
    for seed in range(10):
        first = [RUNS[where](seed, "release") for where in RUNS for _ in range(2)]
        assert np.array_equal(first[0], first[1])
        assert np.array_equal(first[2], first[3])


@pytest.mark.parametrize("seed", range(5))
def test_system_scope_serves_workgroups_too(seed: int) -> None:
    assert np.array_equal(across_workgroups(seed, None, "system"), EXPECTED)
