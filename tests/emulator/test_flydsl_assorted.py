# SPDX-License-Identifier: Apache-2.0
"""Causal attention, an int8 GEMM, a DPP scan, an indexed register array, a grid barrier, against torch."""

from __future__ import annotations

import pytest
import torch

from kernellib import emulator
from tests.emulator.kernels import assorted

POISON = float("nan")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("heads", "seq", "dim"), [pytest.param(2, 128, 64, marks=pytest.mark.slow), (1, 64, 32)]
)
def test_causal_attention_with_online_softmax(heads: int, seq: int, dim: int) -> None:
    q, k, v = (torch.randn(heads, seq, dim, generator=seeded(n)).half() for n in range(3))
    out, scale = torch.full_like(q, POISON), dim**-0.5
    with emulator.emulated():
        assorted.causal_attention(dim)(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), seq, heads, scale
        )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    # weights and result rounded to half: 2^-11 relative each, on values below 4
    torch.testing.assert_close(out.double(), wanted, rtol=2**-9, atol=2**-9)


def test_gemm_int8_requantised() -> None:
    m, n, k = 32, 48, 192
    a, b = (torch.randint(-128, 128, (rows, k), generator=seeded(rows)).to(torch.int8) for rows in (m, n))
    scale_a, scale_b = (0.02 * torch.rand(rows, generator=seeded(rows + 1)) for rows in (m, n))
    c = torch.full((m, n), 99, dtype=torch.int8)
    pointers = [tensor.data_ptr() for tensor in (a, b, scale_a, scale_b, c)]
    with emulator.emulated():
        assorted.gemm_int8()(*pointers, m, n, k)
    sums = (a.int() @ b.int().T).float()
    assert torch.equal(c, (sums * scale_a[:, None] * scale_b).clamp(-128, 127).round().to(torch.int8))


def test_segmented_scan_by_dpp() -> None:
    n = 256
    x = torch.randint(-50, 50, (n,), generator=seeded(4)).float()
    heads = (torch.rand(n, generator=seeded(5)) < 0.1).int()
    out = torch.full((n,), POISON)
    with emulator.emulated():
        assorted.segmented_scan()(x.data_ptr(), heads.data_ptr(), out.data_ptr(), n // 64)
    wanted, running = [], 0.0
    for i, value in enumerate(x.tolist()):
        running = value if i % 64 == 0 or heads[i] else running + value
        wanted.append(running)
    assert out.tolist() == wanted


def test_array_of_registers_indexed_by_values() -> None:
    n = 128
    x = torch.randint(-(2**63), 2**63 - 1, (n,), generator=seeded(2))
    out = torch.full((n, 16), -1, dtype=torch.int32)
    with emulator.emulated() as session:
        assorted.count_nibbles()(x.data_ptr(), out.data_ptr(), n // 64)
    nibbles = torch.stack([x >> (4 * i) & 15 for i in range(16)], 1)
    assert torch.equal(out, torch.stack([(nibbles == value).sum(1) for value in range(16)], 1).int())
    assert session.launches[0].instruction_counts["s_set_gpr_idx_on"] > 0


@pytest.mark.parametrize("steps", [1, 4])
def test_heat_steps_with_a_grid_barrier(steps: int) -> None:
    blocks = 4
    a = torch.randn(blocks * 128, generator=seeded(10))
    b, count = torch.full_like(a, POISON), torch.zeros(1, dtype=torch.int32)
    wanted = a.clone()
    for _ in range(steps):
        wanted = wanted.roll(1) * 0.25 + wanted * 0.5 + wanted.roll(-1) * 0.25
    with emulator.emulated(quantum=200):
        assorted.heat_steps()(a.data_ptr(), b.data_ptr(), count.data_ptr(), len(a), steps, blocks)
    assert torch.equal(b if steps % 2 else a, wanted)
    assert int(count) == steps * blocks
