# SPDX-License-Identifier: Apache-2.0
"""Ranks whose launches run at the same time: peer stores, flags, deadlock, errors."""

from __future__ import annotations

import pytest
import torch

from kernellib import emulator
from tests.emulator import flydsl_kernels as kernels


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_ring_exchange_with_flags(num_ranks: int) -> None:
    # rank r writes into its right neighbour's inbox, raises the flag there, and waits for its own flag
    with emulator.emulated(quantum=300) as session:
        world = session.create_world(num_ranks)
        inbox = world.allocate((128,), torch.float32, float("nan"))
        flags = world.allocate((1,), torch.int32)
        out = world.allocate((128,), torch.float32, float("nan"))
        data = world.allocate((128,), torch.float32)
        for rank in range(num_ranks):
            data[rank] += torch.arange(128) + 1000 * rank

        def host(rank: emulator.Rank) -> int:
            right = (rank.index + 1) % rank.num_ranks
            arguments = (data[rank.index], inbox[right], flags[right], inbox[rank.index], flags[rank.index])
            kernels.ring()(*[t.data_ptr() for t in arguments], out[rank.index].data_ptr())
            return rank.index

        assert world.run(host) == list(range(num_ranks))
    for rank in range(num_ranks):
        assert torch.equal(out[rank], data[(rank - 1) % num_ranks])
    assert len(session.launches) == num_ranks


def test_host_barrier_orders_launches() -> None:
    with emulator.emulated() as session:
        world = session.create_world(3)
        x = world.allocate((64,), torch.float32, 1.0)

        def host(rank: emulator.Rank) -> float:
            for _ in range(rank.index):  # unequal numbers of launches before the barrier
                kernels.two_kernels()(x[rank.index], 1)
            rank.barrier()
            return sum(float(t[0]) for t in x)

        assert world.run(host) == [1.0 + 3.0 + 7.0] * 3


def test_a_rank_that_nobody_signals_is_a_deadlock() -> None:
    with emulator.emulated(quantum=300) as session:
        world = session.create_world(2)
        buffers = world.allocate((128,), torch.float32)
        flags = world.allocate((1,), torch.int32)

        def host(rank: emulator.Rank) -> None:
            if rank.index == 0:
                pointers = [t.data_ptr() for t in (buffers[0], buffers[1], flags[1], buffers[0], flags[0])]
                kernels.ring()(*pointers, buffers[0].data_ptr())

        with pytest.raises(emulator.DeadlockError, match="no wave can make progress"):
            world.run(host)


def test_an_error_in_one_rank_stops_the_others() -> None:
    with emulator.emulated() as session:
        world = session.create_world(2)

        def host(rank: emulator.Rank) -> None:
            if rank.index == 1:
                raise ZeroDivisionError
            rank.barrier()

        with pytest.raises((ZeroDivisionError, emulator.SessionError)):
            world.run(host)
        assert world.run(lambda rank: rank.index) == [0, 1]
        with pytest.raises(emulator.SessionError):
            session.create_world(0)


def test_one_atomic_instruction_reaches_counters_of_several_ranks() -> None:
    num_ranks = 3
    with emulator.emulated() as session:
        counters = session.create_world(num_ranks).allocate((1,), torch.int32, 5)
        peers = torch.tensor([counter.data_ptr() for counter in counters])
        out = torch.full((64,), -1, dtype=torch.int32)
        session.register(peers)
        session.register(out)
        kernels.count_at_peers()(peers.data_ptr(), out.data_ptr(), num_ranks)
    for rank, counter in enumerate(counters):
        added = torch.arange(rank, 64, num_ranks, dtype=torch.int32) + 1
        assert counter.item() == 5 + int(added.sum())
        before = 5 + torch.cat([torch.zeros(1, dtype=torch.int32), torch.cumsum(added, 0)[:-1]])
        assert out[rank::num_ranks].tolist() == before.tolist()
