# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Combine for gfx950: sums the rows that came back for each token, fp32 in slot order, rounded to bf16 once.

A wave takes 512 elements of one token at a time, 8 a lane. Slots whose expert id is out of range were never
sent: their memory is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import SCALE_BLOCK
from .device_gfx950 import LANES, lane_id, pointer, scale_value, unpack_e4m3, wave_id, wave_uniform
from .layout import SymmetricLayout

ELEMENTS_PER_LANE = 8
CHUNK = LANES * ELEMENTS_PER_LANE


@dataclass(frozen=True)
class Combine:
    """The compile-time facts of combine.

    Attributes:
        layout: the symmetric buffers; gives shape and wire format.
        num_waves: waves of a workgroup.
    """

    layout: SymmetricLayout
    num_waves: int

    @property
    def chunks_per_token(self) -> int:
        return -(-self.layout.shape.model_dim // CHUNK)


def _load_row(layout: SymmetricLayout, row: Any, element: Any) -> list[Any]:
    """The lane's eight elements of a wire row, fp32, from ``element`` on."""
    if layout.wire == "bf16":
        loaded = fx.generic_load(pointer(row, fx.BFloat16, 16) + element, count=ELEMENTS_PER_LANE)
        values = loaded.to(fx.Float32)
        return [values[i] for i in range(ELEMENTS_PER_LANE)]
    codes = fx.generic_load(pointer(row, fx.Int32, 8) + element // 4, count=2)
    scale_byte = pointer(row + layout.shape.model_dim, fx.Uint8) + element // SCALE_BLOCK
    scale = scale_value(fx.Int32(fx.generic_load(scale_byte, dtype=fx.Uint8)))
    return [value * scale for i in range(2) for value in unpack_e4m3(codes[i])]


@flyc.jit
def _sum_slots(c, wire, expert_ids, token, element):
    """The lane's eight sums of one token."""
    top_k, num_experts = c.layout.shape.top_k, c.layout.shape.num_experts
    sums = [fx.Float32(0.0) for _ in range(ELEMENTS_PER_LANE)]
    for slot in fx.range_constexpr(top_k):
        route = token * top_k + slot
        expert = wave_uniform(fx.generic_load(pointer(expert_ids, fx.Int32) + route))
        row = wire + fx.Int64(route) * c.layout.wire_row_bytes
        if fx.Uint32(expert) < fx.Uint32(num_experts):
            values = _load_row(c.layout, row, element)
            sums = [a + b for a, b in zip(sums, values, strict=True)]
    return sums


@flyc.jit
def combine(c, wire, expert_ids, num_tokens, out, first_workgroup, num_workgroups):
    """Workgroups first_workgroup .. + num_workgroups - 1 write ``out``, bf16 [num_tokens, model_dim].

    Args:
        c: Combine.
        wire: address of this rank's wire buffer; every rank's rows have arrived and been acquired.
        expert_ids: address of int32 [num_tokens, top_k].
    """
    dim = c.layout.shape.model_dim
    lane = lane_id()
    first = (fx.block_idx.x - first_workgroup) * c.num_waves + wave_id()
    for unit in range(first, num_tokens * c.chunks_per_token, num_workgroups * c.num_waves):
        token, chunk = unit // c.chunks_per_token, unit % c.chunks_per_token
        start = chunk * CHUNK + lane * ELEMENTS_PER_LANE
        inside = start < dim
        element = inside.select(start, fx.Int32(0))
        sums = _sum_slots(c, wire, expert_ids, token, element)
        target = pointer(out + fx.Int64(token) * (2 * dim), fx.BFloat16, 16) + element
        rounded = fx.Vector.from_elements(sums, fx.Float32).to(fx.BFloat16)
        if inside:
            fx.generic_store(target, rounded)
