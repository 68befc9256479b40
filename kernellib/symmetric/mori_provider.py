# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory from AMD's mori (package amd-mori 1.2.4), over a torch process group, on one node.

Facts about mori, from the published wheel's sources (tests/symmetric/mori_signatures.json holds the
signatures; a test checks this file's calls against them):

* ``mori.shmem.shmem_torch_process_group_init(name)`` looks the group up by name, loads its device module and
  broadcasts an id from global rank 0; status 0 is success.
* ``shmem_malloc_align`` returns an address, 0 for failure; the heap is uncached by default, which kernels
  that signal each other while they run rely on; its size is MORI_SHMEM_HEAP_SIZE, 2 GB unless set.
* ``shmem_ptr_p2p`` returns a peer's address, 0 where there is no direct access (another node).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from .heap import ALIGNMENT, ProviderUnavailableError, SymmetricHeap, SymmetricMemoryError


class MoriProvider:
    """Provider for one process of a torch process group, one GPU each.

    Args:
        group: the expert-parallel group; None for the default group. Its first rank must be global rank 0,
            from which mori broadcasts.
        device: where the memory lies; None for the current GPU.

    Raises:
        ProviderUnavailableError: torch.distributed is not initialised, mori is missing, or its start fails.
    """

    name = "mori"
    target = "mi355x"

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        if not dist.is_initialized():
            raise ProviderUnavailableError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        members = dist.get_process_group_ranks(group)
        if members[0] != 0:
            raise ProviderUnavailableError(
                f"group got ranks {members}, wanted global rank 0 first: mori broadcasts its id from there"
            )
        try:
            from mori import shmem  # noqa: PLC0415  (only where there is a GPU)
        except (ImportError, OSError) as error:
            raise ProviderUnavailableError(
                f"mori cannot be imported ({error}): pip install amd-mori==1.2.4, on Python 3.10 or 3.12"
            ) from error
        self._shmem = shmem
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        status = shmem.shmem_torch_process_group_init(group_name=group.group_name)
        if status != 0:
            raise ProviderUnavailableError(
                f"shmem_torch_process_group_init returned {status}, wanted 0; is another mori context open?"
            )
        self.rank, self.num_ranks = shmem.shmem_mype(), shmem.shmem_npes()
        if (self.rank, self.num_ranks) != (dist.get_rank(group), len(members)):
            raise ProviderUnavailableError(
                f"mori says rank {self.rank} of {self.num_ranks}, the group says {dist.get_rank(group)} of "
                f"{len(members)}; finalize the earlier mori context first"
            )
        # Host values travel over gloo: NCCL (RCCL) would use the GPU, which a stream capture forbids.
        self._host_group = dist.new_group(
            members, backend="gloo", use_local_synchronization=True, sort_ranks=False
        )
        self.num_cu = _num_cu(self.device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._synchronize()
        address = self._shmem.shmem_malloc_align(alignment=ALIGNMENT, size=num_bytes)
        self._synchronize()
        if not address:
            raise SymmetricMemoryError(
                f"mori has no {num_bytes} bytes left in its heap: set MORI_SHMEM_HEAP_SIZE (2GB by default) "
                "before the process group's start"
            )
        return tensor_at(address, num_bytes, self.device)

    def peer_addresses(self, memory: torch.Tensor) -> list[int]:
        address = memory.data_ptr()
        return [
            address
            if peer == self.rank
            else int(self._shmem.shmem_ptr_p2p(dest_ptr=address, my_pe=self.rank, dest_pe=peer))
            for peer in range(self.num_ranks)
        ]

    def free(self, memory: torch.Tensor) -> None:
        self._synchronize()
        self._shmem.shmem_free(ptr=memory.data_ptr())

    def expose(self, tensor: torch.Tensor) -> None:
        """A GPU's kernels reach all of its memory."""

    def gather(self, value: object) -> list[Any]:
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value, group=self._host_group)
        return found

    def barrier(self) -> None:
        self._synchronize()
        self._shmem.shmem_barrier_all()

    def finalize(self) -> None:
        self._synchronize()
        status = self._shmem.shmem_finalize()
        dist.destroy_process_group(self._host_group)
        if status:
            raise ProviderUnavailableError(f"shmem_finalize returned {status}, wanted 0")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _num_cu(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class _DeviceBytes:
    """Device memory by address, as torch.as_tensor takes it (the CUDA array interface, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] over memory that somebody else owns."""
    if device.type == "cuda":
        return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def mori_heap(group: dist.ProcessGroup | None = None) -> SymmetricHeap:
    """A heap for this process on its current GPU; see ``MoriProvider``."""
    return SymmetricHeap(MoriProvider(group))
