# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""The quantiser for gfx950: bf16 rows to e4m3 codes and e8m0 scales of 1x32 blocks.

A wave owns a row and walks it in chunks of 512 elements: a lane holds 8 consecutive ones, four neighbouring
lanes a block. Scales are written in the order the GEMM reads (``ScaleOrder``), padding bytes as zero, so
that no byte of the outputs is left undefined. Rules for zero, tiny, Inf and NaN blocks:
kernellib.numerics.mx.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .device_gfx950 import (
    LANES,
    e4m3_scale,
    lane_id,
    larger,
    magnitude_bits,
    max_across,
    pack_e4m3,
    pointer,
    wave_id,
)
from .layout import ScaleOrder

ELEMENTS_PER_LANE = 8
CHUNK = LANES * ELEMENTS_PER_LANE  # one group of 16 scale bytes
LANES_PER_BLOCK = 4
WAVES = 4


def kernel_name(model_dim: int) -> str:
    return f"mega_moe_quantize_bf16_e4m3_1x32_h{model_dim}"


def quantize_lane(values: list[Any], lanes_per_block: int) -> tuple[list[Any], Any]:
    """A lane's fp32 values, all of one block that spans ``lanes_per_block`` lanes -> (Int32 codes, E)."""
    amax = magnitude_bits(values[0])
    for value in values[1:]:
        amax = larger(amax, magnitude_bits(value))
    scale = e4m3_scale(max_across(amax, lanes_per_block))
    return [pack_e4m3(values[i : i + 4], scale) for i in range(0, len(values), 4)], scale


@cache
def build(model_dim: int) -> Callable[..., Any]:
    """The launcher ``(x, codes, scales, num_tokens, stream)``; tensors as addresses, num_tokens above 0.

    x is bf16 [num_tokens, model_dim], codes uint8 of that shape, scales uint8 [num_tokens, row_bytes] in
    ``ScaleOrder(model_dim)``.
    """
    order = ScaleOrder(model_dim)
    num_chunks = -(-model_dim // CHUNK)

    @flyc.kernel(name=kernel_name(model_dim), known_block_size=[WAVES * LANES, 1, 1])
    def quantize_kernel(x: fx.Int64, codes: fx.Int64, scales: fx.Int64, num_tokens: fx.Int32) -> None:
        lane = lane_id()
        row = fx.block_idx.x * WAVES + wave_id()
        block = lane // LANES_PER_BLOCK  # of the chunk: step block // 4, lane group block % 4
        scale_byte = 4 * (block % 4) + block // 4
        if row < num_tokens:
            for chunk in fx.range_constexpr(num_chunks):
                first = chunk * CHUNK + lane * ELEMENTS_PER_LANE
                inside = first < model_dim
                element = inside.select(first, fx.Int32(0))
                source = pointer(x + fx.Int64(row) * (2 * model_dim), fx.BFloat16, 16)
                loaded = fx.generic_load(source + element, count=ELEMENTS_PER_LANE).to(fx.Float32)
                values = [loaded[i] for i in range(ELEMENTS_PER_LANE)]
                packed, scale = quantize_lane(values, LANES_PER_BLOCK)
                if inside:
                    target = pointer(codes + fx.Int64(row) * model_dim, fx.Int32, 8)
                    fx.generic_store(target + element // 4, fx.Vector.from_elements(packed, fx.Int32))
                if lane % LANES_PER_BLOCK == 0:
                    byte = inside.select(scale, fx.Int32(0)).to(fx.Uint8)
                    target = pointer(scales + fx.Int64(row) * order.row_bytes, fx.Uint8)
                    fx.generic_store(target + chunk * 16 + scale_byte, byte)

    @flyc.jit
    def quantize_launcher(
        x: fx.Int64, codes: fx.Int64, scales: fx.Int64, num_tokens: fx.Int32, stream: fx.Stream
    ) -> None:
        num_workgroups = (num_tokens + (WAVES - 1)) // WAVES
        quantize_kernel(x, codes, scales, num_tokens).launch(
            grid=(num_workgroups, 1, 1), block=WAVES * LANES, stream=stream
        )

    return quantize_launcher
