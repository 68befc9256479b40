# SPDX-License-Identifier: Apache-2.0
"""Matrix kernels as users write them, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from kernellib import emulator
from tests.emulator.kernels import matrix

POISON = float("nan")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def pointers(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def close(got: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, relative: float) -> None:
    """Errors are relative to the sum of the products' magnitudes: that is what fp32 sums promise."""
    assert got.isfinite().all()
    assert float(((got.double() - wanted).abs() / scale).max()) <= relative


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (100, 37, 192)])
def test_gemm_bf16_with_swizzled_lds(m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    c = torch.full((m, n), POISON)
    with emulator.emulated():
        matrix.gemm_bf16()(*pointers(a, b, c), m, n, k)
    close(c, a.double() @ b.double().T, a.double().abs() @ b.double().abs().T, 2**-22)


def test_gemm_fp8_with_row_scales() -> None:
    m, n, k = 64, 128, 256
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    scale_a, scale_b = (torch.rand(rows, generator=generator) + 0.5 for rows in (m, n))
    c = torch.full((m, n), POISON, dtype=torch.bfloat16)
    with emulator.emulated():
        matrix.gemm_fp8()(*pointers(a, b, scale_a, scale_b, c), m, n, k)
    left, right = a.double() * scale_a.double()[:, None], b.double() * scale_b.double()[:, None]
    close(c, left @ right.T, left.abs() @ right.abs().T, 2**-8)


def test_gemm_mxfp4_with_scales_that_all_differ() -> None:
    m, n, k = 64, 64, 1024
    generator = torch.Generator().manual_seed(6)
    decoded, packed, scales = [], [], []
    for rows in (m, n):
        codes = torch.randint(0, 16, (rows, k), generator=generator)
        exponents = torch.randint(117, 138, (rows, k // 32), generator=generator)
        values = E2M1[codes] * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
        decoded.append(values)
        packed.append((codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8))
        # K block 4 i + g of each 512 goes to [g][i]
        blocks = exponents.reshape(rows, k // 512, 4, 4).transpose(2, 3).contiguous()
        scales.append(blocks.to(torch.uint8))
    c = torch.full((m, n), POISON)
    with emulator.emulated() as session:
        matrix.gemm_mxfp4()(*pointers(*packed, *scales, c), m, n, k)
    close(c, decoded[0] @ decoded[1].T, decoded[0].abs() @ decoded[1].abs().T, 2**-22)
    counts = session.launches[0].instruction_counts
    assert counts["v_mfma_scale_f32_16x16x128_f8f6f4"] == m * n * k // (16 * 16 * 128)


@pytest.mark.parametrize("parts", [1, 4])
def test_split_k_gemm_with_a_semaphore(parts: int) -> None:
    m, n, k = 64, 48, 512
    generator = torch.Generator().manual_seed(parts)
    a, b = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    c = torch.full((m, n), POISON, dtype=torch.bfloat16)
    partial = torch.full((m, n), POISON)
    semaphore = torch.zeros(m // 32 * n // 16, dtype=torch.int32)
    with emulator.emulated(quantum=300, waves_per_group=4):
        for _ in range(2):  # the semaphores are back at zero for the second launch
            matrix.gemm_split_k()(*pointers(a, b, c, partial, semaphore), m, n, k, parts)
            assert not semaphore.any()
    close(c, a.double() @ b.double().T, a.double().abs() @ b.double().abs().T, 2**-8)


@pytest.mark.parametrize(("rows", "cols"), [(7, 1024), (3, 2048), (16, 1024)])
def test_direct_to_lds_pipeline(rows: int, cols: int) -> None:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))
    out = torch.full((cols,), POISON)
    with emulator.emulated() as session:
        matrix.column_sum()(*pointers(x, out), rows, cols)
    wanted = torch.zeros(cols)
    for row in x:
        wanted = wanted + row
    assert torch.equal(out, wanted)
    assert session.launches[0].instruction_counts["global_load_lds_dwordx4"] == rows * cols // 256
