# SPDX-License-Identifier: Apache-2.0
"""A tensor where a freed one lay, at another offset, must be found, and not be displaced by remains."""

from __future__ import annotations

import torch

from kernellib.emulator.memory import MemoryMap


def test_a_tensor_is_found_where_a_freed_one_lay() -> None:
    memory = MemoryMap()
    block = bytearray(64 * 1024)
    first = torch.frombuffer(block, dtype=torch.uint8, count=8192, offset=4096)
    allocation = memory.find(first.data_ptr(), first.data_ptr() + 8192)
    assert allocation is not None
    view = allocation.view(16, 0)  # what a kernel's load makes; it outlives the tensor
    del first, allocation
    second = torch.frombuffer(block, dtype=torch.uint8, count=8192, offset=8192)
    address = second.data_ptr()
    assert memory.find(address, address + 8192) is not None
    third = torch.frombuffer(block, dtype=torch.uint8, count=2048, offset=20480)
    assert memory.find(third.data_ptr(), third.data_ptr() + 2048) is not None, "a scan for the third"
    assert memory.find(address, address + 8192) is not None, "left the second where it is"
    assert view.nbytes == 8192


def test_odd_tensors_in_the_heap_are_passed_over() -> None:
    """A scan meets whatever the program holds; nested tensors have no sizes to ask for."""
    odd = [
        torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)]),
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(4).requires_grad_(),
    ]
    memory = MemoryMap()
    memory.scan_tensors()
    wanted = torch.arange(1024)
    found = memory.find(wanted.data_ptr(), wanted.data_ptr() + wanted.nbytes)
    assert found is not None
    assert len(odd) == 4
