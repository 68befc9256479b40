# SPDX-License-Identifier: Apache-2.0
"""Tensors at addresses where freed tensors lay, at other offsets: each must be found, none displaced."""

from __future__ import annotations

import random

import torch

from kernellib.emulator.memory import MemoryMap


def test_tensors_are_found_where_freed_ones_lay() -> None:
    seed = 20260101
    print(f"seed {seed}")
    choose = random.Random(seed)
    memory = MemoryMap()
    alive: list[torch.Tensor] = []
    for _ in range(14):
        tensor = torch.zeros(choose.choice([3000, 3584, 5000, 7168]), dtype=torch.bfloat16)
        alive.append(tensor)
        for each in alive:
            address, size = each.data_ptr(), each.numel() * 2
            allocation = memory.find(address, address + size)
            assert allocation is not None
            # What a kernel does: its view outlives the tensor, and must not be taken for live memory.
            allocation.view(16, 0)
        if len(alive) > 4:
            alive.pop(choose.randrange(4))
