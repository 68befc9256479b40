# SPDX-License-Identifier: Apache-2.0
"""``SymmetricHeap``: what an operator asks of symmetric memory, whatever provides it.

Every method that says *collective* is called by all ranks, in the same order. What one rank could get wrong
is exchanged before anything is done, so that all ranks raise the same error or none does: a rank that raised
alone would leave the others waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

ALIGNMENT = 256  # bytes, of a region's start


class SymmetricHeapError(RuntimeError):
    """Symmetric memory cannot do what was asked: says what was got, what was wanted, and the remedy."""


class ProviderUnavailableError(SymmetricHeapError):
    """The provider cannot start here."""


class SymmetricMemoryError(SymmetricHeapError):
    """A region cannot be allocated, on one rank or on any: the same error on all."""


class HeapProtocolError(SymmetricHeapError):
    """Ranks do not do the same thing at the same time: the same error on all."""


class HeapClosedError(SymmetricHeapError):
    """The heap, or the region, has been given back."""


class Provider(Protocol):
    """Memory and meeting points of one rank.

    Attributes:
        name: "mori" or "emulated".
        target: where kernels run, a name of ``kernellib.targets``.
        rank, num_ranks: this rank, and how many there are.
        device: where this rank's tensors live.
        num_cu: compute units that kernels may occupy at the same time.
    """

    name: str
    target: str
    rank: int
    num_ranks: int
    device: torch.device
    num_cu: int

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Collective: uint8 [num_bytes] on this rank. Raises SymmetricMemoryError when there is no room."""

    def peer_addresses(self, memory: torch.Tensor) -> list[int]:
        """Collective: where this rank's kernels find every rank's part of ``memory``; 0 when they cannot."""

    def free(self, memory: torch.Tensor) -> None:
        """Collective: gives memory of ``allocate`` back."""

    def expose(self, tensor: torch.Tensor) -> None:
        """Tells that this rank's kernels may be given the tensor's address. Not collective."""

    def gather(self, value: object) -> list[Any]:
        """Collective: every rank's value, by rank. Uses the host only, so that it may run while a stream is
        being captured."""

    def barrier(self) -> None:
        """Collective: returns when every rank is here and has finished its earlier launches."""

    def finalize(self) -> None:
        """Collective: ends the provider."""


@dataclass(frozen=True, eq=False)
class SymmetricRegion:
    """One allocation.

    Attributes:
        name: as it was asked for.
        memory: uint8 [num_bytes], this rank's part. Holds anything until it is written.
        peers: int64 [num_ranks] on the device: address of every rank's part, this rank's own included.
    """

    name: str
    memory: torch.Tensor
    peers: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()


class SymmetricHeap:
    """The symmetric memory of one rank.

    Args:
        provider: memory and meeting points; from now on the heap's own.

    Example:
        >>> from kernellib.emulator import emulated
        >>> from kernellib.symmetric.emulated_provider import emulated_heap
        >>> def host(rank):
        ...     with emulated_heap(rank) as heap:
        ...         return heap.allocate("scratch", 1024).num_bytes
        >>> with emulated() as session:
        ...     session.create_world(2).run(host)
        [1024, 1024]
    """

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._regions: list[SymmetricRegion] = []
        self._num_exchanges = 0
        self._closed = False

    @property
    def rank(self) -> int:
        return self._provider.rank

    @property
    def num_ranks(self) -> int:
        return self._provider.num_ranks

    @property
    def device(self) -> torch.device:
        return self._provider.device

    @property
    def target(self) -> str:
        """Where kernels that use this memory run: a name of ``kernellib.targets``."""
        return self._provider.target

    @property
    def num_cu(self) -> int:
        """Compute units that kernels may occupy at the same time."""
        return self._provider.num_cu

    @property
    def provider_name(self) -> str:
        return self._provider.name

    @property
    def num_exchanges(self) -> int:
        """Meetings so far: the same number on every rank, so that it names what was made at one."""
        return self._num_exchanges

    @property
    def closed(self) -> bool:
        return self._closed

    def exchange(self, topic: str, value: object) -> list[Any]:
        """Collective: every rank's value, by rank. Host only, allowed while a stream is being captured.

        Args:
            topic: what the value is about; ranks that are about different things learn it here.
            value: anything that pickles; small.

        Raises:
            HeapProtocolError: on every rank, when topics differ or a rank has left.
            HeapClosedError: after ``close``.
        """
        self._require_open()
        self._num_exchanges += 1
        found = self._provider.gather((topic, self._num_exchanges, value))
        meetings = [(entry[0], entry[1]) for entry in found]
        if len(set(meetings)) != 1:
            what = ", ".join(f"rank {i}: {name!r} (meeting {n})" for i, (name, n) in enumerate(meetings))
            raise HeapProtocolError(
                f"ranks met for different things ({what}), wanted the same calls in the same order on every "
                "rank: construct and call operators alike on all of them"
            )
        return [entry[2] for entry in found]

    def allocate(self, name: str, num_bytes: int) -> SymmetricRegion:
        """Collective: a region of ``num_bytes`` on every rank. Its memory is not initialised.

        Raises:
            SymmetricMemoryError: on every rank, when sizes differ, a rank has no room, or a peer's part
                cannot be addressed.
        """
        sizes = self.exchange(f"allocate {name}", num_bytes)
        if len(set(sizes)) != 1 or type(num_bytes) is not int or num_bytes < 1:
            raise SymmetricMemoryError(
                f"region {name!r}: num_bytes got {sizes} by rank, wanted one positive int on all of them"
            )
        memory, problem = self._try_allocate(num_bytes)
        problems = self.exchange(f"allocated {name}", problem)
        self._raise_for_any(name, problems)
        assert memory is not None
        addresses = self._provider.peer_addresses(memory)
        unreachable = [rank for rank, address in enumerate(addresses) if not address]
        problem = f"cannot address the memory of ranks {unreachable}" if unreachable else None
        self._raise_for_any(name, self.exchange(f"addressed {name}", problem))
        peers = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        self.expose(peers)
        region = SymmetricRegion(name, memory, peers)
        self._regions.append(region)
        return region

    def _try_allocate(self, num_bytes: int) -> tuple[torch.Tensor | None, str | None]:
        try:
            return self._provider.allocate(num_bytes), None
        except SymmetricMemoryError as error:
            return None, str(error)

    @staticmethod
    def _raise_for_any(name: str, problems: list[str | None]) -> None:
        told = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if told:
            raise SymmetricMemoryError(f"region {name!r}: " + "; ".join(told))

    def free(self, region: SymmetricRegion) -> None:
        """Collective: gives a region back. No kernel may be using it on any rank: a barrier comes first.

        Raises:
            HeapClosedError: it is not this heap's, or was given back before.
        """
        self._require_open()
        if region not in self._regions:
            raise HeapClosedError(f"region {region.name!r} is not (or no longer) of this heap")
        self.barrier()
        self._regions.remove(region)
        self._provider.free(region.memory)

    def expose(self, tensor: torch.Tensor) -> None:
        """Tells that this rank's kernels may be given the tensor's address. Not collective."""
        self._provider.expose(tensor)

    def barrier(self) -> None:
        """Collective: returns when every rank is here and has finished its earlier launches."""
        self._require_open()
        self._provider.barrier()

    def close(self) -> None:
        """Collective: frees every region and ends the provider. A second call does nothing."""
        if self._closed:
            return
        for region in list(reversed(self._regions)):
            self.free(region)
        self._closed = True
        self._provider.finalize()

    def _require_open(self) -> None:
        if self._closed:
            raise HeapClosedError("the heap is closed: make a new one")

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # otherwise the others may never come: closing would wait for them
            self.close()
