# SPDX-License-Identifier: Apache-2.0
"""Reciprocal, square root, exponential, logarithm and sine: the quarter-rate instructions.

The chip's results are within 1 ulp (f64: 2**29 ulp) and their exact bits are not published. Here each is
computed in float64 and rounded once, which is the correctly rounded value except where the float64 value lies
within its own error of a tie. `ulp_bias` moves every finite nonzero f32/f16 result by so many ulps, to find
out whether a kernel leans on more accuracy than the chip promises.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernellib.emulator.arith.formats import (
    Array,
    bits_of,
    flush_denormals,
    format_of,
    quiet,
    with_default_nan,
)


def _finish(result: Array, x: Array, ulp_bias: int) -> Array:
    result = with_default_nan(np.where(np.isnan(x), quiet(x), result), x)
    if ulp_bias:
        fmt = format_of(result)
        moved = (bits_of(result).view(fmt.int_dtype) + fmt.int_dtype.type(ulp_bias)).view(fmt.dtype)
        result = np.where(np.isfinite(result) & (result != 0) & np.isfinite(moved), moved, result)
    return result


def _unary(function: Callable[[Array], Array], x: Array, ulp_bias: int) -> Array:
    """Evaluate in float64; f32 flushes denormals on both sides, f16 and f64 do not."""
    with np.errstate(all="ignore"):
        if x.dtype == np.float32:
            result = flush_denormals(
                np.asarray(function(flush_denormals(x).astype(np.float64)).astype(np.float32))
            )
        else:
            result = np.asarray(function(x.astype(np.float64)).astype(x.dtype))
    return _finish(result, x, ulp_bias)


def reciprocal(x: Array, ulp_bias: int = 0) -> Array:
    """v_rcp_f16/f32/f64, v_rcp_iflag_f32: 1 / x.

    f32: 1 ulp, denormals are flushed, so |x| > 2**126 gives 0 and a denormal x gives infinity.
    Source: CDNA4 ISA, V_RCP_F32, V_RCP_F16, V_RCP_F64.

    >>> reciprocal(np.float32([-2.0, -0.0]))
    array([-0.5, -inf], dtype=float32)
    """
    return _unary(lambda v: 1.0 / v, x, ulp_bias)


def reciprocal_sqrt(x: Array, ulp_bias: int = 0) -> Array:
    """v_rsq_f16/f32/f64: 1 / sqrt(x); -inf for -0, NaN below (CDNA4 ISA, V_RSQ_F32: denormals are
    flushed)."""
    return _unary(lambda v: 1.0 / np.sqrt(v), x, ulp_bias)


def square_root(x: Array, ulp_bias: int = 0) -> Array:
    """v_sqrt_f16/f32/f64: sqrt(x); -0 for -0, NaN below (CDNA4 ISA, V_SQRT_F32: denormals are flushed)."""
    return _unary(np.sqrt, x, ulp_bias)


def exp2(x: Array, ulp_bias: int = 0) -> Array:
    """v_exp_f16/f32: 2**x (CDNA4 ISA, V_EXP_F32: denormals are flushed, so x < -126 gives 0)."""
    return _unary(np.exp2, x, ulp_bias)


def log2(x: Array, ulp_bias: int = 0) -> Array:
    """v_log_f16/f32: log2(x); -inf for zeros and (f32) denormals, NaN below (CDNA4 ISA, V_LOG_F32)."""
    return _unary(np.log2, x, ulp_bias)


def sine_turns(x: Array, ulp_bias: int = 0) -> Array:
    """v_sin_f16/f32: sin(2 pi x), the argument in turns; NaN for infinities.

    Source: CDNA4 ISA, V_SIN_F32 (full range, denormals supported). The reduction of x to [-0.5, 0.5] is
    exact; an integral x gives zero: +0, except -0 for x = -0.
    """
    return _trigonometric(np.sin, x, ulp_bias)


def cosine_turns(x: Array, ulp_bias: int = 0) -> Array:
    """v_cos_f16/f32: cos(2 pi x), the argument in turns; NaN for infinities (CDNA4 ISA, V_COS_F32)."""
    return _trigonometric(np.cos, x, ulp_bias)


def _trigonometric(function: Callable[[Array], Array], x: Array, ulp_bias: int) -> Array:
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        turns = wide - np.rint(wide)  # exact: both are multiples of x's last place
        turns = np.where(turns == 0, np.where(wide == 0, wide, 0.0), turns)
        quarter = np.abs(turns) == 0.25  # pi is not representable, but these results are
        value = function(2 * np.pi * turns)
        exact = np.sign(turns) if function is np.sin else np.zeros_like(turns)
        value = np.where(quarter, exact, value)
        value = np.where((np.abs(turns) == 0.5) & (function is np.sin), 0.0, value)
    return _finish(value.astype(x.dtype), x, ulp_bias)
