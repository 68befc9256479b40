# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one emulator: each has its own memory, pointers to its peers', and launches at the same
time.

    with emulated() as session:
        world = session.create_world(4)
        buffers = world.allocate((1024,), torch.float32)          # one tensor per rank
        world.run(lambda rank: launcher(buffers[rank.index], rank.peer_pointers(buffers), ...))

Each rank's host code runs in a thread of its own.  Kernels start running when every rank's host code is
inside a launch, inside `world.barrier` or at its end; then the launches take turns in rank order, a quantum
each, until one ends and its rank's host code goes on.  So the interleaving depends on the programs alone,
never on the host's thread scheduler.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernellib.emulator.dispatcher import Dispatcher, run_until_one_ends
from kernellib.emulator.errors import DeadlockError, SessionError
from kernellib.emulator.launch import Device

if TYPE_CHECKING:
    from kernellib.emulator.session import Session


@dataclass(frozen=True)
class Rank:
    """What a rank's host function gets."""

    index: int
    world: World

    @property
    def num_ranks(self) -> int:
        """Ranks in the world."""
        return self.world.num_ranks

    def peer_pointers(self, buffers: Sequence[Any]) -> Any:
        """int64 tensor [num_ranks] of the addresses of every rank's buffer."""
        import torch  # noqa: PLC0415

        return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)

    def barrier(self) -> None:
        """Wait for every rank's host code."""
        self.world.barrier()


class World:
    """Ranks that launch side by side.  Make one with `Session.create_world`."""

    def __init__(self, session: Session, num_ranks: int) -> None:
        self.session = session
        self.num_ranks = num_ranks
        self._condition = threading.Condition()
        self._index_of: dict[int, int] = {}
        self._running: dict[int, Dispatcher] = {}
        self._at_barrier: set[int] = set()
        self._generation = 0
        self._alive: set[int] = set()
        self._failure: BaseException | None = None
        self._stepping = False
        self.device = session.make_device(num_ranks)

    def allocate(self, shape: Sequence[int], dtype: Any, fill: Any = 0) -> list[Any]:
        """One tensor per rank, registered with the session."""
        import torch  # noqa: PLC0415

        tensors = [torch.full(tuple(shape), fill, dtype=dtype) for _ in range(self.num_ranks)]
        for tensor in tensors:
            self.session.register(tensor)
        return tensors

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """Call `function(rank)` for every rank, all at the same time; returns the results in rank order.

        Raises the first error of any rank (the others are stopped at their next launch or barrier).
        """
        if self.session.world is not None:
            raise SessionError("World.run is active already in this session")
        results: list[Any] = [None] * self.num_ranks
        self._failure, self._alive = None, set(range(self.num_ranks))

        def work(index: int) -> None:
            self._index_of[threading.get_ident()] = index
            try:
                results[index] = function(Rank(index, self))
            except BaseException as error:
                with self._condition:
                    self._failure = self._failure or error
            finally:
                with self._condition:
                    self._alive.discard(index)
                    self._index_of.pop(threading.get_ident(), None)
                    self._condition.notify_all()

        self.session.world = self
        try:
            threads = [
                threading.Thread(target=work, args=(i,), name=f"rank{i}") for i in range(self.num_ranks)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self.session.world = None
            self._running.clear()
            self._at_barrier.clear()
        self._hosts_met(range(self.num_ranks))
        if self._failure is not None:
            raise self._failure
        return results

    def current_rank(self) -> int:
        """The rank whose thread this is.  Raises SessionError on any other thread."""
        index = self._index_of.get(threading.get_ident())
        if index is None:
            raise SessionError("while World.run is active, only the ranks' own threads may launch")
        return index

    def current_device(self) -> Device | None:
        """What launches of the calling thread's rank run on."""
        rank = self.current_rank()
        return None if self.device is None else dataclasses.replace(self.device, rank=rank)

    def _hosts_met(self, ranks: Iterable[int]) -> None:
        if self.device is not None and self.device.monitor is not None:
            self.device.monitor.host_barrier(sorted(ranks))

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise SessionError(f"another rank failed: {self._failure}") from self._failure

    def barrier(self) -> None:
        """Host barrier over all ranks that have not ended."""
        index = self.current_rank()
        with self._condition:
            generation = self._generation
            self._at_barrier.add(index)
            self._condition.notify_all()
            while self._generation == generation:
                self._check_failure()
                if self._at_barrier >= self._alive:
                    self._hosts_met(self._alive)
                    self._at_barrier.clear()
                    self._generation += 1
                    self._condition.notify_all()
                    return
                if not self._advance():
                    self._condition.wait()

    def execute(self, dispatcher: Dispatcher) -> None:
        """Run one rank's launch, interleaved with those of the others."""
        index = self.current_rank()
        with self._condition:
            self._check_failure()
            self._running[index] = dispatcher
            self._condition.notify_all()
            while not dispatcher.finished:
                self._check_failure()
                if not self._advance():
                    self._condition.wait()
            self._running.pop(index, None)
            self._condition.notify_all()

    def _advance(self) -> bool:
        """Run kernels until one ends, if every rank's host code waits.  Called with the lock held."""
        waiting = set(self._running) | self._at_barrier
        if not waiting >= self._alive or not self._running or any(d.finished for d in self._running.values()):
            return False
        try:
            run_until_one_ends([self._running[i] for i in sorted(self._running)])
        except BaseException as error:
            if isinstance(error, DeadlockError) and self._at_barrier:
                ranks = ", ".join(map(str, sorted(self._at_barrier)))
                error.add_note(f"host code of rank(s) {ranks} waits at World.barrier")
            self._failure = self._failure or error
            self._condition.notify_all()
            raise
        self._condition.notify_all()
        return True


def make_world(session: Session, num_ranks: int) -> World:
    """A World; raises SessionError for a rank count that is not positive."""
    if not isinstance(num_ranks, int) or not 1 <= num_ranks <= 64:
        raise SessionError(f"num_ranks={num_ranks!r}: wants 1 to 64")
    return World(session, num_ranks)
