# SPDX-License-Identifier: Apache-2.0
"""Kernels that Triton's AMD backend compiled for gfx950, run from their listing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernellib.emulator import LaunchArgumentError, run_assembly

triton = pytest.importorskip("triton")

from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

POISON = float("nan")


@triton.jit
def softmax_kernel(source, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < cols
    values = tl.load(source + row * cols + index, mask=inside, other=float("-inf"))
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * cols + index, weights / tl.sum(weights, 0), mask=inside)


@triton.jit
def matmul_kernel(a, b, c, N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, TILE):
        inner = start + tl.arange(0, TILE)
        left = tl.load(a + rows[:, None] * K + inner[None, :])
        right = tl.load(b + inner[:, None] * N + cols[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + rows[:, None] * N + cols[None, :], acc)


def compile_gfx950(kernel: Any, signature: dict[str, str], constants: dict[str, int], num_warps: int) -> Any:
    names = list(kernel.arg_names)
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options={"num_warps": num_warps})


@pytest.mark.parametrize(("rows", "cols", "num_warps"), [(5, 1000, 4), (3, 77, 1), (2, 2048, 8)])
def test_softmax(rows: int, cols: int, num_warps: int) -> None:
    block = triton.next_power_of_2(cols)
    signature = {"source": "*fp32", "out": "*fp32", "cols": "i32", "BLOCK": "constexpr"}
    code = compile_gfx950(softmax_kernel, signature, {"BLOCK": block}, num_warps)
    x = 10 * torch.randn(rows, cols, generator=torch.Generator().manual_seed(cols))
    out = torch.full_like(x, POISON)
    # Triton's last two arguments are scratch buffers, which this kernel does not use
    report = run_assembly(
        code.asm["amdgcn"], code.metadata.name, rows, 64 * num_warps, [x, out, cols, 0, 0],
        dynamic_lds_bytes=code.metadata.shared,
    )  # fmt: skip
    torch.testing.assert_close(out, x.double().softmax(1).float(), rtol=1e-5, atol=1e-9)
    assert report.bytes_by_space["global"]["load"] == 4 * rows * cols
    assert report.num_waves == rows * num_warps


def test_matrix_product() -> None:
    m, n, k, tile = 64, 96, 128, 32
    signature = {"a": "*bf16", "b": "*bf16", "c": "*fp32", **dict.fromkeys(("N", "K", "TILE"), "constexpr")}
    code = compile_gfx950(matmul_kernel, signature, {"N": n, "K": k, "TILE": tile}, 4)
    generator = torch.Generator().manual_seed(9)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((m, k), (k, n)))
    c = torch.full((m, n), POISON)
    report = run_assembly(
        code.asm["amdgcn"], code.metadata.name, (m // tile, n // tile), 256, [a, b, c, 0, 0],
        dynamic_lds_bytes=code.metadata.shared,
    )  # fmt: skip
    wanted, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert float(((c.double() - wanted).abs() / scale).max()) < 2**-22
    assert any(name.startswith("v_mfma_f32") for name in report.instruction_counts)


def test_wrong_argument_count_is_named() -> None:
    signature = {"source": "*fp32", "out": "*fp32", "cols": "i32", "BLOCK": "constexpr"}
    code = compile_gfx950(softmax_kernel, signature, {"BLOCK": 64}, 1)
    with pytest.raises(LaunchArgumentError, match="wants 5 arguments, got 3"):
        run_assembly(code.asm["amdgcn"], code.metadata.name, 1, 64, [torch.zeros(64), torch.zeros(64), 64])
