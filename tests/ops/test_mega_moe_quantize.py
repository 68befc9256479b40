# SPDX-License-Identifier: Apache-2.0
"""The quantiser kernel, byte for byte the rules of kernellib.numerics.mx."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kernellib.emulator import emulated
from kernellib.numerics import mx
from kernellib.ops.mega_moe import quantize_gfx950 as kernel
from kernellib.ops.mega_moe.layout import ScaleOrder

POISON = 0xA5
GUARD = 512  # bytes behind each output that must stay as they were


def run(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bf16 [tokens, dim] through the kernel -> (codes, scale bytes as stored)."""
    tokens, dim = x.shape
    row_bytes = ScaleOrder(dim).row_bytes
    source = torch.from_numpy(np.ascontiguousarray(x).view(np.int16).copy())
    codes = torch.full((tokens * dim + GUARD,), POISON, dtype=torch.uint8)
    scales = torch.full((tokens * row_bytes + GUARD,), POISON, dtype=torch.uint8)
    with emulated() as session:
        for tensor in (source, codes, scales):
            session.register(tensor)
        kernel.build(dim)(source.data_ptr(), codes.data_ptr(), scales.data_ptr(), tokens, None)
    assert (codes[tokens * dim :] == POISON).all(), "wrote past the codes"
    assert (scales[tokens * row_bytes :] == POISON).all(), "wrote past the scales"
    return (
        codes[: tokens * dim].numpy().reshape(tokens, dim),
        scales[: tokens * row_bytes].numpy().reshape(tokens, row_bytes),
    )


def check(x: np.ndarray) -> None:
    """Codes, scales and the zeros that pad the scales."""
    codes, scales = run(x)
    expected = mx.quantize(x.astype(np.float32), mx.E4M3)
    wanted_scales = ScaleOrder(x.shape[1]).to_device(expected.scales)
    wrong = np.argwhere(scales != wanted_scales)
    assert not len(wrong), f"scale bytes differ at (row, byte) {wrong[:5].tolist()}"
    wrong = np.argwhere(codes != expected.codes)
    assert not len(wrong), f"codes differ at (row, element) {wrong[:5].tolist()}"


def from_bits(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint16).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dim", [128, 384, 512, 1024, 3584])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_random_rows_with_every_magnitude(dim: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    exponents = rng.uniform(-130, 120, (tokens, dim // mx.BLOCK, 1))
    values = rng.standard_normal((tokens, dim // mx.BLOCK, mx.BLOCK)) * np.exp2(exponents)
    check(values.reshape(tokens, dim).astype(np.float32).astype(ml_dtypes.bfloat16))


def test_every_bf16_value_as_the_largest_of_a_block() -> None:
    """All 65,536 bit patterns: each once in a block of smaller neighbours, at a lane that moves; NaN, Inf,
    subnormals and both zeros among them."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    blocks = np.zeros((len(patterns), mx.BLOCK), np.uint16)
    smaller = np.where(patterns & 0x7FFF, (patterns & 0x7FFF) - 1, 0)
    blocks[:] = (smaller // 2)[:, None] + (np.arange(mx.BLOCK, dtype=np.uint16) & 1) * 0x8000
    blocks[np.arange(len(patterns)), np.arange(len(patterns)) % mx.BLOCK] = patterns
    check(from_bits(blocks.reshape(-1, 4096)))


SPECIAL_BLOCKS = {
    "zero": [0x0000] * 32,
    "negative_zero": [0x8000] * 32,
    "smallest_subnormal": [0x0001, 0x8001] + [0] * 30,
    "largest_subnormal": [0x007F] * 32,
    "smallest_normal": [0x0080] * 32,
    "largest": [0x7F7F, 0xFF7F] + [0x3F80] * 30,
    "one_inf": [0x3F80] * 13 + [0x7F80] + [0x3F80] * 18,
    "one_negative_inf": [0x3F80] * 31 + [0xFF80],
    "one_nan": [0xFFC1] + [0x3F80] * 31,
    "nan_and_inf": [0x7FC0, 0x7F80] + [0] * 30,
    "amax_448": [0x43E0] + [0x3F80] * 31,
    "amax_above_448": [0x43E1] + [0x3F80] * 31,
    "ties": list(range(0x4380, 0x43A0)),
}


@pytest.mark.parametrize("position", [0, 1, 3, 4, 15])
def test_special_blocks_leave_their_neighbours_alone(position: int) -> None:
    """Each special block at one place of a chunk among ordinary blocks."""
    rng = np.random.default_rng(position)
    rows = rng.standard_normal((len(SPECIAL_BLOCKS), 512)).astype(ml_dtypes.bfloat16).view(np.uint16)
    for row, block in zip(rows, SPECIAL_BLOCKS.values(), strict=True):
        row[position * 32 : position * 32 + 32] = block
    check(from_bits(rows))


def test_the_name_says_formats_and_dimension() -> None:
    assert kernel.kernel_name(3584) == "mega_moe_quantize_bf16_e4m3_1x32_h3584"
    assert kernel.kernel_name(512) != kernel.kernel_name(1024)
