# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory for the ranks of an emulated world: tensors of this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from .heap import HeapProtocolError, SymmetricHeap

if TYPE_CHECKING:
    from kernellib.emulator import Rank, World

POISON = 0xFF  # NaN in e4m3, e8m0 and bf16: memory that nobody wrote shows in a result
DEFAULT_NUM_CU = 4  # an emulated chip is small: every compute unit costs host time


@dataclass
class _Board:
    """What the ranks of one world leave for each other."""

    values: dict[int, Any] = field(default_factory=dict)


_boards: WeakKeyDictionary[World, _Board] = WeakKeyDictionary()
_boards_lock = threading.Lock()


def _board(world: World) -> _Board:
    with _boards_lock:
        return _boards.setdefault(world, _Board())


class EmulatedProvider:
    """Provider for one rank of an emulated world; made inside the function that ``World.run`` runs.

    Args:
        rank: as the world gives it.
        num_cu: compute units the chip is to have; configurations are scaled down to it.
        poison: byte that fresh memory is filled with.
    """

    name = "emulated"
    target = "emulator"
    device = torch.device("cpu")

    def __init__(self, rank: Rank, num_cu: int = DEFAULT_NUM_CU, poison: int = POISON) -> None:
        self.rank = rank.index
        self.num_ranks = rank.num_ranks
        self.num_cu = num_cu
        self._poison = poison
        self._world = rank.world
        self._board = _board(rank.world)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes,), self._poison, dtype=torch.uint8)
        self._world.session.register(memory)
        return memory

    def peer_addresses(self, memory: torch.Tensor) -> list[int]:
        return [int(address) for address in self.gather(memory.data_ptr())]

    def free(self, memory: torch.Tensor) -> None:
        """The tensor's owner lets go of it; a kernel that still uses it is told so by the emulator."""

    def expose(self, tensor: torch.Tensor) -> None:
        self._world.session.register(tensor)  # otherwise the emulator searches the heap for its owner

    def gather(self, value: object) -> list[Any]:
        self._board.values[self.rank] = value
        self._world.barrier()
        missing = [rank for rank in range(self.num_ranks) if rank not in self._board.values]
        found = [self._board.values.get(rank) for rank in range(self.num_ranks)]
        self._world.barrier()  # all have read: the next meeting may write
        self._board.values.pop(self.rank, None)
        self._world.barrier()  # all have removed theirs: who is missing next time is really missing
        if missing:
            raise HeapProtocolError(
                f"ranks {missing} have left, wanted all {self.num_ranks}: every rank must make the same calls"
            )
        return found

    def barrier(self) -> None:
        self._world.barrier()  # emulated launches are finished when they return

    def finalize(self) -> None:
        """Nothing outlives the tensors."""


def emulated_heap(rank: Rank, num_cu: int = DEFAULT_NUM_CU, poison: int = POISON) -> SymmetricHeap:
    """A heap for one rank of an emulated world; see ``EmulatedProvider``."""
    return SymmetricHeap(EmulatedProvider(rank, num_cu, poison))
