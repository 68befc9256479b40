# SPDX-License-Identifier: Apache-2.0
"""A heap of one rank: ordinary device memory, nobody to meet. For work that one device does by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .heap import SymmetricHeap


class LocalProvider:
    """Provider of a group of one.

    Args:
        device: where memory lies.
        target: where kernels run, a name of ``kernellib.targets``.
        num_cu: compute units that kernels may occupy at the same time.
        expose: called with each tensor that kernels are given the address of.
    """

    name = "local"
    rank = 0
    num_ranks = 1

    def __init__(
        self, device: torch.device, target: str, num_cu: int, expose: Callable[[torch.Tensor], None]
    ) -> None:
        self.device = device
        self.target = target
        self.num_cu = num_cu
        self.expose = expose

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.expose(memory)
        return memory

    def peer_addresses(self, memory: torch.Tensor) -> list[int]:
        return [memory.data_ptr()]

    def free(self, memory: torch.Tensor) -> None:
        """The tensor's owner lets go of it."""

    def gather(self, value: object) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finalize(self) -> None:
        """Nothing outlives the tensors."""


def local_heap(like: SymmetricHeap) -> SymmetricHeap:
    """A heap of one rank on the device of another heap."""
    return SymmetricHeap(LocalProvider(like.device, like.target, like.num_cu, like.expose))
