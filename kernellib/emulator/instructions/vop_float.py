# SPDX-License-Identifier: Apache-2.0
"""Vector floating point (VOP1, VOP2, VOP3). Semantics: CDNA4 ISA 12.7, 12.8, 12.11.

Denormal flushing, source and output modifiers and the clamp are the binder's; functions here keep denormals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import bf16, division, dot, float32, rounding, select, transcendental
from kernellib.emulator.instructions.registry import define_vector, vector
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]


def _reversed(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(b, a)


# ---------------------------------------------------------------------------------------------------- add,
# multiply
define_vector("v_add_f32", "f32, f32 -> f32", np.add)
define_vector("v_sub_f32", "f32, f32 -> f32", np.subtract)
define_vector("v_subrev_f32", "f32, f32 -> f32", _reversed(np.subtract))
define_vector("v_mul_f32", "f32, f32 -> f32", np.multiply)
define_vector("v_mul_legacy_f32", "f32, f32 -> f32", float32.mul_legacy32)
define_vector("v_add_f64", "f64, f64 -> f64", np.add)
define_vector("v_mul_f64", "f64, f64 -> f64", np.multiply)
define_vector("v_add_f16", "f16, f16 -> f16", float32.add16)
define_vector("v_sub_f16", "f16, f16 -> f16", lambda a, b: float32.add16(a, float32.negate(b)))
define_vector("v_subrev_f16", "f16, f16 -> f16", lambda a, b: float32.add16(b, float32.negate(a)))
define_vector("v_mul_f16", "f16, f16 -> f16", float32.mul16)

# ---------------------------------------------------------------------------------------------- fused
# multiply-add
define_vector("v_fma_f32", "f32, f32, f32 -> f32", float32.fma32)
define_vector("v_fmac_f32", "f32, f32, old -> f32", float32.fma32)
define_vector("v_fma_f64", "f64, f64, f64 -> f64", float32.fma64)
define_vector("v_fmac_f64", "f64, f64, old -> f64", float32.fma64)
# 16-bit instructions new with gfx9 keep the other half of their result's register (LLVM, GCNSubtarget::
# zeroesHigh16BitsOfDest); the older and "legacy" ones clear it.
define_vector("v_fma_f16", "f16, f16, f16 -> f16", float32.fma16, high16="preserve")
define_vector("v_fma_legacy_f16", "f16, f16, f16 -> f16", float32.fma16)
# The literal K stands between (fmamk) or after (fmaak) the other sources.
define_vector("v_fmamk_f32", "f32, f32, f32 -> f32", float32.fma32)
define_vector("v_fmaak_f32", "f32, f32, f32 -> f32", float32.fma32)


def _mad16(a: Array, b: Array, c: Array) -> Array:
    """Multiply and add with a rounding after each (v_mad_f16 and v_mac_f16 are not fused)."""
    return float32.add16(float32.mul16(a, b), c)


define_vector("v_mad_f16", "f16, f16, f16 -> f16", _mad16, high16="preserve")
for _name in ("v_mad_legacy_f16", "v_madmk_f16", "v_madak_f16"):
    define_vector(_name, "f16, f16, f16 -> f16", _mad16)
define_vector("v_mac_f16", "f16, f16, old -> f16", _mad16)


# ------------------------------------------------------------------------------------------------ minimum,
# maximum
def _with_ieee(function: Callable[..., Array]) -> Callable[..., Array]:
    """Give the function MODE.IEEE, which decides what a signaling NaN does."""

    def wrapped(*operands: Array, mode: FloatMode) -> Array:
        return function(*operands, ieee=mode.ieee)

    def wrapped2(a: Array, b: Array, *, mode: FloatMode) -> Array:
        return wrapped(a, b, mode=mode)

    def wrapped3(a: Array, b: Array, c: Array, *, mode: FloatMode) -> Array:
        return wrapped(a, b, c, mode=mode)

    return wrapped2 if function in (select.minimum_number, select.maximum_number) else wrapped3


for _type in ("f16", "f32", "f64"):
    define_vector(f"v_min_{_type}", f"{_type}, {_type} -> {_type}", _with_ieee(select.minimum_number))
    define_vector(f"v_max_{_type}", f"{_type}, {_type} -> {_type}", _with_ieee(select.maximum_number))
for _type in ("f16", "f32"):
    _three = f"{_type}, {_type}, {_type} -> {_type}"
    define_vector(f"v_min3_{_type}", _three, _with_ieee(select.minimum3_number))
    define_vector(f"v_max3_{_type}", _three, _with_ieee(select.maximum3_number))
    define_vector(f"v_med3_{_type}", _three, _with_ieee(select.median3))
define_vector("v_minimum3_f32", "f32, f32, f32 -> f32", select.minimum3)
define_vector("v_maximum3_f32", "f32, f32, f32 -> f32", select.maximum3)

# ------------------------------------------------------------------------------------------- rounding,
# splitting
for _type in ("f16", "f32", "f64"):
    for _name, _function in (
        ("trunc", rounding.trunc), ("ceil", rounding.ceil), ("floor", rounding.floor),
        ("rndne", rounding.round_even), ("fract", rounding.fract), ("frexp_mant", rounding.frexp_mantissa),
    ):  # fmt: skip
        define_vector(f"v_{_name}_{_type}", f"{_type} -> {_type}", _function)
define_vector("v_frexp_exp_i32_f32", "f32 -> i32", rounding.frexp_exponent)
define_vector("v_frexp_exp_i32_f64", "f64 -> i32", rounding.frexp_exponent)
define_vector("v_frexp_exp_i16_f16", "f16 -> i16", lambda a: rounding.frexp_exponent(a).astype(np.int16))
define_vector("v_ldexp_f32", "f32, i32 -> f32", rounding.ldexp)
define_vector("v_ldexp_f64", "f64, i32 -> f64", rounding.ldexp)
define_vector("v_ldexp_f16", "f16, i16 -> f16", rounding.ldexp)


# -------------------------------------------------------------------------------------------------
# transcendental
def _biased(function: Callable[..., Array]) -> Callable[..., Array]:
    def wrapped(a: Array, *, ulp_bias: int) -> Array:
        return function(a, ulp_bias)

    return wrapped


for _name, _function, _types in (
    ("rcp", transcendental.reciprocal, ("f16", "f32", "f64")),
    ("rcp_iflag", transcendental.reciprocal, ("f32",)),
    ("rsq", transcendental.reciprocal_sqrt, ("f16", "f32", "f64")),
    ("sqrt", transcendental.square_root, ("f16", "f32", "f64")),
    ("exp", transcendental.exp2, ("f16", "f32")),
    ("log", transcendental.log2, ("f16", "f32")),
    ("sin", transcendental.sine_turns, ("f16", "f32")),
    ("cos", transcendental.cosine_turns, ("f16", "f32")),
):
    for _type in _types:
        define_vector(f"v_{_name}_{_type}", f"{_type} -> {_type}", _biased(_function), transcendental=True)

# -------------------------------------------------------------------------------------------------------
# division
for _type in ("f32", "f64"):
    define_vector(f"v_div_scale_{_type}", f"{_type}, {_type}, {_type} -> {_type}, mask", division.div_scale)
    define_vector(f"v_div_fmas_{_type}", f"{_type}, {_type}, {_type}, vcc -> {_type}", division.div_fmas)
    define_vector(f"v_div_fixup_{_type}", f"{_type}, {_type}, {_type} -> {_type}", division.div_fixup)
define_vector("v_div_fixup_f16", "f16, f16, f16 -> f16", division.div_fixup, high16="preserve")
define_vector("v_div_fixup_legacy_f16", "f16, f16, f16 -> f16", division.div_fixup)


# --------------------------------------------------------------------------------------------------- dot
# products
def _halves_bf16(x: Array) -> Array:
    return np.stack([(x << np.uint32(16)).view(np.float32), (x & np.uint32(0xFFFF0000)).view(np.float32)])


def _halves_f16(x: Array) -> Array:
    """Both halves widened; f16 denormals flush, as V_DOT2 flushes its inputs (CDNA4 ISA 6.4)."""
    halves = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)]).astype(np.uint16)
    tiny = (halves & np.uint16(0x7C00)) == 0
    flushed: Array = np.where(tiny, halves & np.uint16(0x8000), halves).view(np.float16).astype(np.float32)
    return flushed


@vector("v_dot2c_f32_bf16", "b32, b32, old -> f32")
def v_dot2c_f32_bf16(a: Array, b: Array, old: Array) -> Array:
    """D += S0[0] S1[0]; D += S0[1] S1[1] on bf16 pairs."""
    return dot.dot2c_f32(_halves_bf16(a), _halves_bf16(b), old)


@vector("v_dot2c_f32_f16", "b32, b32, old -> f32")
def v_dot2c_f32_f16(a: Array, b: Array, old: Array) -> Array:
    """D += S0[0] S1[0]; D += S0[1] S1[1] on f16 pairs."""
    return dot.dot2c_f32(_halves_f16(a), _halves_f16(b), old)


@vector("v_cvt_f32_bf16", "bf16 -> f32")
def v_cvt_f32_bf16(a: Array) -> Array:
    """The bf16 in the low half, widened."""
    return bf16.to_f32(a)
