# SPDX-License-Identifier: Apache-2.0
"""Instructions that move data between lanes or between register files. Semantics: CDNA4 ISA 12.8, 12.11."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernellib.emulator.instructions.registry import define_vector, vector

Array = np.ndarray[Any, Any]

define_vector("v_accvgpr_read_b32", "b32 -> b32", np.positive)
define_vector("v_accvgpr_write_b32", "b32 -> b32", np.positive)
define_vector("v_accvgpr_mov_b32", "b32 -> b32", np.positive)


@vector("v_swap_b32", "old0, old1 -> b32, b32")
def v_swap_b32(a: Array, b: Array) -> tuple[Array, Array]:
    """Exchange two registers."""
    return b.copy(), a.copy()


@vector("v_permlane16_swap_b32", "old0, old1 -> b32, b32", cross_lane=True)
def v_permlane16_swap_b32(a: Array, b: Array) -> tuple[Array, Array]:
    """Odd rows of 16 lanes of a trade places with the even rows of b."""
    new_a, new_b = a.copy(), b.copy()
    for row in (0, 32):
        new_a[..., row + 16 : row + 32] = b[..., row : row + 16]
        new_b[..., row : row + 16] = a[..., row + 16 : row + 32]
    return new_a, new_b


@vector("v_readfirstlane_b32", "b32 -> s.b32", cross_lane=True, ignores_exec=True)
def v_readfirstlane_b32(value: Array, *, exec_mask: Array) -> Array:
    """The value of the lowest active lane; of lane 0 when none is active."""
    lane = np.argmax(np.broadcast_to(exec_mask, value.shape), axis=-1)
    return np.take_along_axis(value, lane[..., None], axis=-1)


@vector("v_readlane_b32", "b32, s.u32 -> s.b32", cross_lane=True, ignores_exec=True)
def v_readlane_b32(value: Array, lane: Array) -> Array:
    """The value of lane S1[5:0], active or not."""
    index = np.broadcast_to(lane & np.uint32(63), (*value.shape[:-1], 1)).astype(np.int64)
    return np.take_along_axis(value, index, axis=-1)


@vector("v_writelane_b32", "s.b32, s.u32, old -> b32", cross_lane=True, ignores_exec=True)
def v_writelane_b32(value: Array, lane: Array, old: Array) -> Array:
    """D with lane S1[5:0], active or not, replaced by S0."""
    return np.where(np.arange(64, dtype=np.uint32) == (lane & np.uint32(63)), value, old)
