# SPDX-License-Identifier: Apache-2.0
"""SymmetricHeap on emulated ranks: regions, meetings, and the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernellib import emulator
from kernellib.symmetric import (
    HeapClosedError,
    HeapProtocolError,
    SymmetricHeap,
    SymmetricMemoryError,
)
from kernellib.symmetric.emulated_provider import POISON, EmulatedProvider, emulated_heap
from tests.emulator import flydsl_kernels as kernels


def on_ranks(num_ranks: int, host: Callable[[SymmetricHeap], Any]) -> list[Any]:
    """Runs ``host(heap)`` on every rank; a rank's exception is its result."""

    def guarded(rank: emulator.Rank) -> Any:
        try:
            return host(emulated_heap(rank))
        except Exception as error:
            return error

    with emulator.emulated(quantum=300) as session:
        return session.create_world(num_ranks).run(guarded)


def assert_same_error(results: list[Any], kind: type[Exception], *texts: str) -> None:
    assert [type(result) for result in results] == [kind] * len(results), results
    assert len({str(result) for result in results}) == 1, results
    for text in texts:
        assert text in str(results[0])


def test_a_region_knows_every_ranks_part() -> None:
    def host(heap: SymmetricHeap) -> tuple[int, list[int], set[int]]:
        region = heap.allocate("scratch", 1000)
        result = region.memory.data_ptr(), region.peers.tolist(), set(region.memory.unique().tolist())
        heap.barrier()
        return result

    results = on_ranks(3, host)
    own = [address for address, _, _ in results]
    assert len(set(own)) == 3
    assert all(peers == own for _, peers, _ in results)
    assert all(values == {POISON} for _, _, values in results), "fresh memory is poisoned"


def test_kernels_store_through_a_regions_peer_addresses() -> None:
    def host(heap: SymmetricHeap) -> torch.Tensor:
        inbox, flags = heap.allocate("inbox", 512), heap.allocate("flags", 4)
        flags.memory.zero_()
        data = torch.arange(128, dtype=torch.float32) + 1000 * heap.rank
        out = torch.full((128,), float("nan"))
        right = (heap.rank + 1) % heap.num_ranks
        heap.barrier()
        peers = inbox.peers.tolist(), flags.peers.tolist()
        arguments = data.data_ptr(), peers[0][right], peers[1][right], peers[0][heap.rank]
        kernels.ring()(*arguments, peers[1][heap.rank], out.data_ptr())
        heap.close()
        return out

    results = on_ranks(3, host)
    for rank, out in enumerate(results):
        assert torch.equal(out, torch.arange(128, dtype=torch.float32) + 1000 * ((rank - 1) % 3))


def test_exchange_returns_every_ranks_value_again_and_again() -> None:
    def host(heap: SymmetricHeap) -> list[list[int]]:
        return [heap.exchange("tokens", heap.rank * 10 + turn) for turn in range(5)]

    assert on_ranks(4, host) == [[[rank * 10 + turn for rank in range(4)] for turn in range(5)]] * 4


def test_ranks_that_meet_for_different_things_all_learn_it() -> None:
    results = on_ranks(3, lambda heap: heap.exchange("call" if heap.rank else "construct", 1))
    assert_same_error(results, HeapProtocolError, "rank 0: 'construct'", "rank 2: 'call'")


def test_a_rank_that_left_is_named() -> None:
    results = on_ranks(3, lambda heap: None if heap.rank == 1 else heap.exchange("call", 1))
    assert_same_error([results[0], results[2]], HeapProtocolError, "[1]")


@pytest.mark.parametrize("sizes", [(64, 128, 64), (0, 0, 0), (-1, -1, -1), (64.0, 64.0, 64.0)])
def test_sizes_that_differ_or_are_no_sizes_are_refused_alike(sizes: tuple[Any, ...]) -> None:
    results = on_ranks(3, lambda heap: heap.allocate("rows", sizes[heap.rank]))
    assert_same_error(results, SymmetricMemoryError, "rows", str(list(sizes)))


def test_one_rank_without_room_is_every_ranks_error() -> None:
    class Full(EmulatedProvider):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            if self.rank == 2:
                raise SymmetricMemoryError("no room")
            return super().allocate(num_bytes)

    def guarded(rank: emulator.Rank) -> Any:
        try:
            return SymmetricHeap(Full(rank)).allocate("rows", 64)
        except SymmetricMemoryError as error:
            return error

    with emulator.emulated() as session:
        assert_same_error(
            session.create_world(3).run(guarded), SymmetricMemoryError, "rank 2: no room", "'rows'"
        )


def test_a_peer_out_of_reach_is_every_ranks_error() -> None:
    class Far(EmulatedProvider):
        def peer_addresses(self, memory: torch.Tensor) -> list[int]:
            return [0 if (self.rank, peer) == (0, 1) else a for peer, a in enumerate(self.gather(1))]

    def guarded(rank: emulator.Rank) -> Any:
        try:
            return SymmetricHeap(Far(rank)).allocate("rows", 64)
        except SymmetricMemoryError as error:
            return error

    with emulator.emulated() as session:
        results = session.create_world(2).run(guarded)
    assert_same_error(results, SymmetricMemoryError, "rank 0: cannot address the memory of ranks [1]")


def test_a_closed_heap_refuses_everything_but_closing() -> None:
    def host(heap: SymmetricHeap) -> list[str]:
        region = heap.allocate("rows", 64)
        heap.free(region)
        found = []
        for action in (lambda: heap.free(region),):
            with pytest.raises(HeapClosedError) as caught:
                action()
            found.append(str(caught.value))
        heap.close()
        heap.close()
        assert heap.closed
        for action in (lambda: heap.exchange("x", 1), lambda: heap.allocate("x", 1), heap.barrier):
            with pytest.raises(HeapClosedError):
                action()
        return found

    results = on_ranks(2, host)
    assert results[0] == results[1]
    assert "rows" in results[0][0]


def test_the_context_manager_closes_only_without_an_error() -> None:
    def host(heap: SymmetricHeap) -> tuple[bool, bool]:
        with heap:
            heap.allocate("rows", 64)
        return heap.closed, True

    assert on_ranks(2, host) == [(True, True)] * 2

    def fails(heap: SymmetricHeap) -> None:
        if heap.rank == 1:
            with pytest.raises(ZeroDivisionError), heap:
                raise ZeroDivisionError
            assert not heap.closed

    assert on_ranks(2, fails) == [None, None]
