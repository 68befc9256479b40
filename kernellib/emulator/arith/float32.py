# SPDX-License-Identifier: Apache-2.0
"""Fused multiply-add with one rounding, clamp and output modifiers.

numpy has no fma. In float64 a product of two float32 values is exact, so `a*b + c` in float64 has one
rounding (to 53 bits) and the cast to float32 a second. The second one spoils the first only where the float64
sum lies exactly half way between two float32 values and was itself inexact; those lanes, 2**-29 of random
ones, are found by their low 29 bits and moved one float64 ulp towards the exact sum. Results below the normal
range round at another bit; they raise the processor's underflow flag, which costs nothing to watch.
"""

from __future__ import annotations

import contextlib
import threading
from fractions import Fraction

import numpy as np

from kernellib.emulator.arith.formats import Array, bits_of, flush_denormals, format_of, quiet
from kernellib.emulator.recycled import Recycled

_TIE_MASK = np.uint64(0x1FFFFFFF)
_TIE_BITS = np.uint64(0x10000000)
_SMALLEST_NORMAL = 2.0**-126
_PROBE_LANES = 64


class _Scratch(threading.local):
    """Work arrays, per thread and per size: allocating 64 kB eight times per call would cost more than
    adding."""

    def __init__(self) -> None:
        self.by_size = Recycled(_work_arrays, limit=32)


def _work_arrays(size: int) -> tuple[Array, Array, Array, Array]:
    doubles = np.empty(size, np.float64), np.empty(size, np.float64)
    return *doubles, np.empty(size, np.bool_), np.empty(size, np.float32)


_scratch = _Scratch()


def fma32(a: Array, b: Array, c: Array, out: Array | None = None) -> Array:
    """a * b + c, rounded once to nearest even: v_fma_f32, v_fmac_f32, v_pk_fma_f32.

    Args:
        a, b, c: float32 arrays that broadcast to one shape.
        out: float32 array for the result, of that shape or one it broadcasts to; may be one of the operands.
    Returns:
        `out`, or a new array. Denormals are kept, a NaN operand gives its payload with the quiet bit set.
    Source: CDNA4 ISA, V_FMA_F32. Which of several NaN operands wins is not published; assumed the first of
    a, b, c.

    >>> x = np.float32([1 + 2**-12])
    >>> float(fma32(x, x, np.float32([-1 - 2**-11]))[0]) == 2**-24
    True
    """
    shape = a.shape if a.shape == b.shape == c.shape else np.broadcast_shapes(a.shape, b.shape, c.shape)
    if out is not None and shape != out.shape:  # every operand is uniform: scalar registers and constants
        a, shape = np.broadcast_to(a, out.shape), out.shape
    target = np.empty(shape, np.float32) if out is None else out
    size = target.size
    if size == 0:
        return target
    flat_x, flat_y, flat_tie, flat_single = _scratch.by_size[size]
    single = flat_single.reshape(shape)
    # Underflow and overflow are rare; watching the processor's flags for them is free, scanning is not.
    with np.errstate(under="raise", over="raise", invalid="ignore", divide="ignore"):
        if size > _PROBE_LANES and _products_fit(a, b, flat_single):
            try:
                # A product of two 12-bit significands fits 24 bits, so only c's addition rounds.
                np.multiply(a, b, out=single)
            except FloatingPointError:
                pass
            else:
                with contextlib.suppress(FloatingPointError):  # overflow to infinity: the result is complete
                    np.add(single, c, out=target)
                return target
        x, y, tie = flat_x.reshape(shape), flat_y.reshape(shape), flat_tie.reshape(shape)
        np.copyto(x, a)
        np.copyto(y, b)
        np.multiply(x, y, out=x)
        np.copyto(y, c)
        np.add(x, y, out=x)
        words = y.view(np.uint64)
        np.bitwise_and(x.view(np.uint64), _TIE_MASK, out=words)
        np.equal(words, _TIE_BITS, out=tie)
        if np.count_nonzero(tie):
            _nudge(x, tie, a, b, c)
        try:
            np.copyto(single, x, casting="same_kind")
        except FloatingPointError:
            _recast(single, x, a, b, c)
        np.copyto(target, single)
    return target


def _recast(single: Array, x: Array, a: Array, b: Array, c: Array) -> None:
    """The cast to float32 where some results overflow or are denormal."""
    with np.errstate(all="ignore"):
        _nudge(x, _denormal_ties(x), a, b, c)
        np.copyto(single, x, casting="same_kind")


def _products_fit(a: Array, b: Array, work: Array) -> bool:
    """True when every significand of a and b has at most 12 bits, as bf16 values widened to f32 have.

    A look at the first lanes of `a` settles most other cases before the whole arrays are read.
    """
    if a.shape != b.shape or not (a.flags.c_contiguous and b.flags.c_contiguous):
        return False
    words = a.reshape(-1).view(np.uint32)
    if int(np.bitwise_or.reduce(words[:_PROBE_LANES])) & 0xFFF:
        return False
    both = work.view(np.uint32)
    np.bitwise_or(words, b.reshape(-1).view(np.uint32), out=both)
    return not int(np.bitwise_or.reduce(both)) & 0xFFF


def _denormal_ties(x: Array) -> Array:
    """Lanes whose float64 value lies half way between two float32 denormals."""
    magnitude = np.abs(x)
    scaled = np.where(magnitude < _SMALLEST_NORMAL, magnitude, 0.0) * 2.0**149
    return np.asarray((scaled - np.floor(scaled)) == 0.5)


def _nudge(x: Array, where: Array, a: Array, b: Array, c: Array) -> None:
    """Move the inexact ones of the marked sums one float64 ulp towards a*b + c (in place)."""
    lanes = np.nonzero(where)
    a, b, c = (np.broadcast_to(v, x.shape)[lanes].astype(np.float64) for v in (a, b, c))
    product, total = a * b, x[lanes]
    # Knuth's two-sum: the exact error of total = product + c.
    part = total - product
    error = (product - (total - part)) + (c - part)
    step = np.where((error > 0) == (total > 0), 1, -1)
    step[error == 0] = 0
    x[lanes] = (total.view(np.int64) + step).view(np.float64)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64, rounded once to nearest even: v_fma_f64, v_fmac_f64.

    Uses error-free transformations and a round-to-odd intermediate sum (Boldo and Melquiond, "Emulation of a
    FMA and correctly rounded sums"); lanes whose exponents leave the range in which those are exact are
    computed with rational arithmetic. Source: CDNA4 ISA, V_FMA_F64.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    with np.errstate(all="ignore"):
        result = np.asarray(_fma64_safe(a, b, c))
        plain = np.where(np.isfinite(a) & np.isfinite(b), quiet(c), a * b + c)
    low, high = 2.0**-400, 2.0**400
    safe = np.ones(result.shape, np.bool_)
    for operand in (a, b, c):
        magnitude = np.abs(operand)
        safe &= (magnitude > low) & (magnitude < high)
    special = ~(np.isfinite(a) & np.isfinite(b) & np.isfinite(c))
    result = np.where(special, plain, result)
    for lane in np.argwhere(~safe & ~special):
        idx = tuple(lane)
        result[idx] = _fma64_exact(float(a[idx]), float(b[idx]), float(c[idx]))
    return result


def _fma64_safe(a: Array, b: Array, c: Array) -> Array:
    hi, lo = _two_product(a, b)
    sum_lo, err_lo = _two_sum(c, lo)
    sum_hi, err_hi = _two_sum(hi, sum_lo)
    odd, rest = _two_sum(err_lo, err_hi)
    words = np.ascontiguousarray(odd).view(np.int64)
    even = (words & 1) == 0
    step = np.where((rest > 0) == (odd > 0), 1, -1)
    words = np.where(even & (rest != 0), words + step, words)
    return np.asarray(sum_hi + words.view(np.float64))


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    def split(v: Array) -> tuple[Array, Array]:
        big = v * 134217729.0  # 2**27 + 1, Veltkamp's constant
        high = big - (big - v)
        return high, v - high

    product = a * b
    (a_hi, a_lo), (b_hi, b_lo) = split(a), split(b)
    return product, ((a_hi * b_hi - product) + a_hi * b_lo + a_lo * b_hi) + a_lo * b_lo


def _fma64_exact(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of a zero sum follows IEEE's rule, which the machine applies
    try:
        return float(exact)  # int / int in Python rounds to nearest even, denormals included
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c for float16 operands, rounded once: v_fma_f16, v_pk_fma_f16.

    In float64 the sum is inexact only when its parts are so far apart that it cannot lie on a float16 tie, so
    one cast is correctly rounded. Source: CDNA4 ISA, V_FMA_F16.
    """
    with np.errstate(all="ignore"):
        return np.asarray(
            (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)
        )


def add16(a: Array, b: Array) -> Array:
    """a + b for float16: v_add_f16, v_pk_add_f16 (float32 holds enough bits for one rounding to be right)."""
    with np.errstate(all="ignore"):
        return np.asarray((a.astype(np.float32) + b.astype(np.float32)).astype(np.float16))


def mul16(a: Array, b: Array) -> Array:
    """a * b for float16: v_mul_f16, v_pk_mul_f16 (the float32 product is exact)."""
    with np.errstate(all="ignore"):
        return np.asarray((a.astype(np.float32) * b.astype(np.float32)).astype(np.float16))


def fma_mix(a: Array, b: Array, c: Array) -> Array:
    """v_fma_mix_f32's sum: operands already widened to float32 by op_sel_hi, one rounding to float32.

    Source: CDNA4 ISA 6.7, "performed as an FMA" (named V_MAD_MIX there, v_fma_mix by the assembler).
    """
    return fma32(a, b, c)


def fma_mix16(a: Array, b: Array, c: Array) -> Array:
    """v_fma_mixlo_f16 / v_fma_mixhi_f16: the float32 fma, then its conversion to float16.

    The pseudo code converts a float32 result (CDNA4 ISA, V_MAD_MIXLO_F16), hence two roundings.
    """
    with np.errstate(all="ignore"):
        return fma32(a, b, c).astype(np.float16)


def mul_legacy32(a: Array, b: Array) -> Array:
    """v_mul_legacy_f32: a zero operand gives +0 whatever the other is (CDNA4 ISA, V_MUL_LEGACY_F32)."""
    with np.errstate(all="ignore"):
        return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def clamp01(x: Array, dx10_clamp: bool = True) -> Array:
    """The clamp bit on a float result: to [0, 1].

    Source: CDNA4 ISA 6.5. DX10_CLAMP turns a NaN into 0, otherwise it passes (LLVM's SIModeRegisterDefaults).
    That -0 becomes +0 is measured on another AMD generation only; assumed here.
    """
    one, zero = x.dtype.type(1), x.dtype.type(0)
    clamped = np.where(x > zero, np.where(x < one, x, one), zero)
    keep_nan = np.isnan(x)
    return np.where(keep_nan, zero if dx10_clamp else x, clamped)


def output_modifier(x: Array, factor: float) -> Array:
    """omod: the result times 0.5, 2 or 4; denormals flush and -0 becomes +0.

    Source: CDNA4 ISA 6.2.2. The caller must leave omod out when output denormals or IEEE mode are on: the ISA
    says it is ignored then.
    """
    with np.errstate(all="ignore"):
        scaled = flush_denormals(np.asarray(flush_denormals(x) * x.dtype.type(factor)))
    return np.where(scaled == 0, x.dtype.type(0), scaled)


def negate(x: Array) -> Array:
    """The neg source modifier: flips the sign bit, also of NaN (CDNA4 ISA 6.2.1)."""
    fmt = format_of(x)
    return np.asarray((bits_of(x) ^ fmt.scalar(fmt.sign_mask)).view(fmt.dtype))


def absolute(x: Array) -> Array:
    """The abs source modifier: clears the sign bit, also of NaN (CDNA4 ISA 6.2.1)."""
    fmt = format_of(x)
    return np.asarray((bits_of(x) & fmt.scalar(fmt.sign_mask - 1)).view(fmt.dtype))
