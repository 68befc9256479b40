# SPDX-License-Identifier: Apache-2.0
"""Moves, selects and bit operations: the simplest definitions, and a model for the other modules."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernellib.emulator.instructions.registry import define_vector, scalar, vector

Array = np.ndarray[Any, Any]

define_vector("v_mov_b32", "b32 -> b32", np.positive)
define_vector("v_mov_b64", "b64 -> b64", np.positive)
define_vector("v_and_b32", "b32, b32 -> b32", np.bitwise_and)
define_vector("v_or_b32", "b32, b32 -> b32", np.bitwise_or)
define_vector("v_xor_b32", "b32, b32 -> b32", np.bitwise_xor)


@vector("v_lshlrev_b32", "u32, b32 -> b32")
def v_lshlrev_b32(shift: Array, value: Array, out: Array | None = None) -> Array:
    """D = S1 << S0[4:0]."""
    result: Array = np.left_shift(value, shift & np.uint32(31), out=out)
    return result


@vector("v_cndmask_b32", "b32, b32, mask -> b32")
def v_cndmask_b32(when_clear: Array, when_set: Array, mask: Array) -> Array:
    """D = mask[lane] ? S1 : S0."""
    return np.where(mask, when_set, when_clear)


@vector("v_add_co_u32", "u32, u32 -> u32, mask")
def v_add_co_u32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S0 + S1, carry out per lane."""
    total = a + b
    return total, total < b


@vector("v_permlane32_swap_b32", "old0, old1 -> b32, b32", cross_lane=True)
def v_permlane32_swap_b32(a: Array, b: Array) -> tuple[Array, Array]:
    """The upper 32 lanes of a trade places with the lower 32 lanes of b."""
    new_a, new_b = a.copy(), b.copy()
    new_a[..., 32:] = b[..., :32]
    new_b[..., :32] = a[..., 32:]
    return new_a, new_b


@scalar("s_add_u32", "u32, u32 -> u32, scc")
def s_add_u32(a: Array, b: Array) -> tuple[Array, Array]:
    """D = S0 + S1, SCC = carry out."""
    total = a + b
    return total, total < b


@scalar("s_and_saveexec_b64", "b64, exec -> b64, exec, scc")
def s_and_saveexec_b64(mask: Array, exec_bits: Array) -> tuple[Array, Array, Array]:
    """D = EXEC, EXEC = S0 & EXEC, SCC = EXEC != 0."""
    new = mask & exec_bits
    return exec_bits.copy(), new, new != 0
