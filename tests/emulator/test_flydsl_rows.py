# SPDX-License-Identifier: Apache-2.0
"""Kernels as users write them, against torch: transpose, softmax, layer norm, top-k."""

from __future__ import annotations

import pytest
import torch

from kernellib import emulator
from tests.emulator.kernels import rows

POISON = float("nan")


@pytest.mark.parametrize("shape", [(32, 32), (70, 45), (1, 100), (129, 64)], ids=str)
def test_transpose_through_padded_lds(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    out = torch.full(shape[::-1], POISON)
    with emulator.emulated():
        rows.transpose()(x.data_ptr(), out.data_ptr(), *shape)
    assert torch.equal(out, x.T)


@pytest.mark.parametrize(("num_rows", "cols"), [(3, 1000), (2, 257), (4, 64), (1, 5000)])
def test_softmax(num_rows: int, cols: int) -> None:
    x = 20 * torch.randn(num_rows, cols, generator=torch.Generator().manual_seed(2))
    x[0, cols // 2] = float("-inf")
    out = torch.full_like(x, POISON)
    with emulator.emulated():
        rows.softmax()(x, out, num_rows, cols)
    torch.testing.assert_close(out, x.double().softmax(1).float(), rtol=2e-5, atol=1e-9)
    assert out[0, cols // 2] == 0


@pytest.mark.parametrize(("num_rows", "cols"), [(9, 512), (4, 2048)])
def test_layer_norm(num_rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = (3 + 2 * torch.randn(num_rows, cols, generator=generator)).bfloat16()
    gamma, beta = (torch.randn(cols, generator=generator).bfloat16() for _ in range(2))
    out = torch.full_like(x, POISON)
    with emulator.emulated():
        rows.layer_norm(cols)(x, gamma, beta, out, num_rows, 1e-5)
    wanted = torch.nn.functional.layer_norm(x.double(), (cols,), gamma.double(), beta.double(), 1e-5)
    # one rounding to bf16 (2^-9 relative), and fp32 sums before it
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("cols", "k", "ties"), [(256, 8, False), (128, 16, True), (64, 4, True)])
def test_top_k_with_ties(cols: int, k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, cols, generator=generator)
    if ties:
        x = torch.randint(-3, 4, (6, cols), generator=generator).float()
    values, indices = torch.full((6, k), POISON), torch.full((6, k), -1, dtype=torch.int32)
    with emulator.emulated():
        rows.top_k(cols, k)(x.data_ptr(), values.data_ptr(), indices.data_ptr(), 6)
    order = torch.sort(x, dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :k])
    assert torch.equal(indices, order.indices[:, :k].int())
