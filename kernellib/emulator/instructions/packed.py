# SPDX-License-Identifier: Apache-2.0
"""VOP3P: packed math on two 16-bit or two 32-bit elements, and the mixed-precision fma. CDNA4 ISA 6.7, 12.10.

A function of a packed instruction is written for one element; the binder has applied op_sel, op_sel_hi and
neg.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import bf16, dot, float32, select
from kernellib.emulator.arith.formats import flush_denormals
from kernellib.emulator.instructions.registry import define_vector, vector
from kernellib.emulator.instructions.vop_convert import merge_bits
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]


# ------------------------------------------------------------------------------------------------------
# integers
def _clamping(function: Callable[..., Array], num_sources: int) -> Callable[..., Array]:
    """An integer operation whose clamp bit saturates to the element type."""

    def run(sources: tuple[Array, ...], clamp: bool) -> Array:
        if not clamp:
            return function(*sources)
        info = np.iinfo(sources[0].dtype)
        exact = function(*(s.astype(np.int64) for s in sources))
        return np.clip(exact, info.min, info.max).astype(sources[0].dtype)

    def two(a: Array, b: Array, *, clamp: bool) -> Array:
        return run((a, b), clamp)

    def three(a: Array, b: Array, c: Array, *, clamp: bool) -> Array:
        return run((a, b, c), clamp)

    return two if num_sources == 2 else three


for _t in ("u16", "i16"):
    _two, _three = f"pk_{_t}, pk_{_t} -> pk_{_t}", f"pk_{_t}, pk_{_t}, pk_{_t} -> pk_{_t}"
    define_vector(f"v_pk_add_{_t}", _two, _clamping(lambda a, b: a + b, 2))
    define_vector(f"v_pk_sub_{_t}", _two, _clamping(lambda a, b: a - b, 2))
    define_vector(f"v_pk_mad_{_t}", _three, _clamping(lambda a, b, c: a * b + c, 3))
    define_vector(f"v_pk_min_{_t}", _two, np.minimum)
    define_vector(f"v_pk_max_{_t}", _two, np.maximum)
define_vector("v_pk_mul_lo_u16", "pk_u16, pk_u16 -> pk_u16", np.multiply)
define_vector("v_pk_lshlrev_b16", "pk_u16, pk_u16 -> pk_u16", lambda s, a: a << (s & np.uint16(15)))
define_vector("v_pk_lshrrev_b16", "pk_u16, pk_u16 -> pk_u16", lambda s, a: a >> (s & np.uint16(15)))
define_vector(
    "v_pk_ashrrev_i16", "pk_u16, pk_i16 -> pk_i16", lambda s, a: a >> (s & np.uint16(15)).astype(np.int16)
)

# -----------------------------------------------------------------------------------------------------------
# f16
define_vector("v_pk_add_f16", "pk_f16, pk_f16 -> pk_f16", float32.add16)
define_vector("v_pk_mul_f16", "pk_f16, pk_f16 -> pk_f16", float32.mul16)
define_vector("v_pk_fma_f16", "pk_f16, pk_f16, pk_f16 -> pk_f16", float32.fma16)
define_vector("v_pk_fmac_f16", "pk_f16, pk_f16, old -> pk_f16", float32.fma16)
define_vector("v_pk_minimum3_f16", "pk_f16, pk_f16, pk_f16 -> pk_f16", select.minimum3)
define_vector("v_pk_maximum3_f16", "pk_f16, pk_f16, pk_f16 -> pk_f16", select.maximum3)


@vector("v_pk_min_f16", "pk_f16, pk_f16 -> pk_f16")
def v_pk_min_f16(a: Array, b: Array, *, mode: FloatMode) -> Array:
    """v_min_f16 on each element."""
    return select.minimum_number(a, b, mode.ieee)


@vector("v_pk_max_f16", "pk_f16, pk_f16 -> pk_f16")
def v_pk_max_f16(a: Array, b: Array, *, mode: FloatMode) -> Array:
    """v_max_f16 on each element."""
    return select.maximum_number(a, b, mode.ieee)


# -----------------------------------------------------------------------------------------------------------
# f32
define_vector("v_pk_add_f32", "pk_f32, pk_f32 -> pk_f32", np.add)
define_vector("v_pk_mul_f32", "pk_f32, pk_f32 -> pk_f32", np.multiply)
define_vector("v_pk_fma_f32", "pk_f32, pk_f32, pk_f32 -> pk_f32", float32.fma32)


@vector("v_pk_mov_b32", "pk_b32, pk_b32 -> pk_b32")
def v_pk_mov_b32(a: Array, b: Array) -> Array:
    """Low result: the dword of S0 that op_sel[0] picks; high result: the dword of S1 that op_sel[1] picks."""
    # An operand whose op_sel and op_sel_hi pick the same register comes without the leading axis of two.
    low, high = (v[0] if v.ndim == 3 else v for v in (a, b))
    return np.stack(np.broadcast_arrays(low, high))


# ---------------------------------------------------------------------------------------------------------
# mixed
define_vector("v_fma_mix_f32", "mix, mix, mix -> f32", float32.fma_mix)


def _mix16(shift: int) -> Callable[..., Array]:
    def function(a: Array, b: Array, c: Array, old: Array, *, clamp: bool, mode: FloatMode) -> Array:
        value = float32.fma_mix16(a, b, c)
        if clamp:
            value = float32.clamp01(value, mode.dx10_clamp)
        if not mode.denorm64_16 & 2:
            value = flush_denormals(value)
        return merge_bits(old, value.view(np.uint16), shift, 16)

    return function


define_vector("v_fma_mixlo_f16", "mix, mix, mix, old -> b32", _mix16(0))
define_vector("v_fma_mixhi_f16", "mix, mix, mix, old -> b32", _mix16(16))


# ------------------------------------------------------------------------------------------------ dot
# products
@vector("v_dot2_f32_bf16", "pk_bf16, pk_bf16, f32 -> f32")
def v_dot2_f32_bf16(a: Array, b: Array, c: Array) -> Array:
    """S0[0] S1[0] + S0[1] S1[1] + S2 on bf16 pairs."""
    return dot.dot2_f32(bf16.to_f32(a), bf16.to_f32(b), c)


@vector("v_dot2_f32_f16", "pk_f16, pk_f16, f32 -> f32")
def v_dot2_f32_f16(a: Array, b: Array, c: Array) -> Array:
    """S2 + S0[0] S1[0] + S0[1] S1[1] on f16 pairs; f16 denormals flush (CDNA4 ISA 6.4)."""
    return dot.dot2c_f32(flush_denormals(a).astype(np.float32), flush_denormals(b).astype(np.float32), c)
