# SPDX-License-Identifier: Apache-2.0
"""Kernels whose workgroups, waves or ranks depend on each other, against torch."""

from __future__ import annotations

import pytest
import torch

from kernellib import emulator
from tests.emulator.kernels import coordination

POISON = float("nan")
POISON_INT = -0x5A5A5A5B


@pytest.mark.parametrize("n", [256, 1000, 5000])
def test_chained_prefix_scan(n: int) -> None:
    x = torch.randint(-1000, 1000, (n,), generator=torch.Generator().manual_seed(n)).int()
    blocks = -(-n // 256)
    out = torch.full((n,), POISON_INT, dtype=torch.int32)
    totals, ready = (torch.zeros(blocks + 1, dtype=torch.int32) for _ in range(2))
    ready[0] = 1
    with emulator.emulated(quantum=500, waves_per_group=8):
        coordination.prefix_scan()(x.data_ptr(), out.data_ptr(), totals.data_ptr(), ready.data_ptr(), n)
    assert torch.equal(out, x.cumsum(0).int())
    assert int(totals[-1]) == int(x.sum())


@pytest.mark.parametrize(("n", "high"), [(5000, 256), (3001, 3)])
def test_histogram_with_lds_and_global_atomics(n: int, high: int) -> None:
    data = torch.randint(0, high, (n,), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    bins = torch.zeros(256, dtype=torch.int32)
    with emulator.emulated() as session:
        coordination.histogram()(data.data_ptr(), bins.data_ptr(), n, 3)
    assert torch.equal(bins, torch.bincount(data, minlength=256).int())
    assert session.launches[0].bytes_by_space["lds"]["atomic"] == 4 * n


@pytest.mark.parametrize("seed", [0, 11])
def test_what_runs_while_a_deadlock_is_looked_for_is_counted(seed: int) -> None:
    """With seed 11 the scheduler wonders whether a group still gets anywhere, and runs it to find out."""
    n = 3001
    data = torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    bins = torch.zeros(256, dtype=torch.int32)
    with emulator.emulated(mode="relaxed", schedule_seed=seed) as session:
        coordination.histogram()(data.data_ptr(), bins.data_ptr(), n, 3)
    assert torch.equal(bins, torch.bincount(data, minlength=256).int())
    assert session.launches[0].bytes_by_space["lds"]["atomic"] == 4 * n
    assert session.launches[0].bytes_by_space["global"]["load"] == n


@pytest.mark.parametrize(("jobs", "blocks"), [(37, 5), (3, 8)])
def test_persistent_work_queue(jobs: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(jobs)
    lengths = torch.randint(0, 500, (jobs,), generator=generator).int()
    starts = (lengths.cumsum(0) - lengths).int()
    out = torch.full((int(lengths.sum()),), POISON)
    owner = torch.full((jobs,), POISON_INT, dtype=torch.int32)
    head = torch.zeros(1, dtype=torch.int32)
    arguments = [tensor.data_ptr() for tensor in (starts, lengths, out, owner, head)]
    with emulator.emulated(quantum=300):
        coordination.work_queue()(*arguments, jobs, blocks)
    for job, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        wanted = job + 0.5 * torch.arange(length)
        assert torch.equal(out[start : start + length], wanted), job
    assert int(head) == jobs + blocks
    assert int(owner.min()) >= 0
    assert int(owner.max()) < blocks


@pytest.mark.parametrize("count", [128, 1024])
def test_bitonic_sort_in_lds(count: int) -> None:
    x = torch.randint(0, 1 << 32, (3 * count,), generator=torch.Generator().manual_seed(count))
    keys = x.to(torch.uint32)
    with emulator.emulated():
        coordination.bitonic_sort(count)(keys.data_ptr(), 3)
    assert torch.equal(keys.long().reshape(3, count), x.reshape(3, count).sort(1).values)


def test_compaction_by_ballot() -> None:
    n = 3000
    x = torch.randn(n, generator=torch.Generator().manual_seed(8))
    out, cursor = torch.full((n,), POISON), torch.zeros(1, dtype=torch.int32)
    with emulator.emulated():
        coordination.compact()(x.data_ptr(), out.data_ptr(), cursor.data_ptr(), n)
    kept = x[x > 0]
    assert int(cursor) == len(kept)
    assert torch.equal(out[: len(kept)].sort().values, kept.sort().values)
    assert out[len(kept) :].isnan().all()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_reduce_with_flags(num_ranks: int) -> None:
    n, launches = 4096, 3
    generator = torch.Generator().manual_seed(num_ranks)
    run = coordination.all_reduce(num_ranks)
    with emulator.emulated(quantum=400) as session:
        world = session.create_world(num_ranks)
        data = world.allocate((n,), torch.bfloat16)
        # two inboxes in turn: a rank that is ahead must not overwrite what a peer still reads
        inboxes = [world.allocate((num_ranks * n,), torch.bfloat16, POISON) for _ in range(2)]
        flags = world.allocate((num_ranks * n // 2048,), torch.int32)
        out = [world.allocate((n,), torch.bfloat16, POISON) for _ in range(launches)]
        fresh = [[torch.randn(n, generator=generator).bfloat16() for _ in range(num_ranks)] for _ in out]

        def host(rank: emulator.Rank) -> None:
            boxes = [rank.peer_pointers(parity) for parity in inboxes]
            bells = rank.peer_pointers(flags)
            for epoch in range(1, launches + 1):
                data[rank.index].copy_(fresh[epoch - 1][rank.index])
                run(
                    data[rank.index].data_ptr(), boxes[epoch % 2].data_ptr(), bells.data_ptr(),
                    out[epoch - 1][rank.index].data_ptr(), rank.index, n, epoch,
                )  # fmt: skip

        world.run(host)
    for epoch in range(launches):
        wanted = torch.zeros(n)
        for part in fresh[epoch]:
            wanted = wanted + part.float()
        for rank in range(num_ranks):
            assert torch.equal(out[epoch][rank], wanted.bfloat16()), (epoch, rank)
