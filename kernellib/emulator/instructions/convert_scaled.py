# SPDX-License-Identifier: Apache-2.0
"""The v_cvt_scalef32 family: conversions between f32/f16/bf16 and fp8/bf8/fp6/bf6/fp4 with a block scale.

The scale is the exponent field of a float32 operand: packing divides by 2**(E - 127), unpacking multiplies.
Semantics: CDNA4 ISA 7.3 and 12.11. Overflow to fp8/bf8 follows MODE.FP16_OVFL, to fp6/fp4 it saturates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import bf16, e8m0, fp6
from kernellib.emulator.arith.formats import bits_of
from kernellib.emulator.arith.smallfloat import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    SmallFormat,
    decode_scaled,
    encode_scaled,
    encode_stochastic_bits,
    next_random,
)
from kernellib.emulator.instructions.registry import define_vector
from kernellib.emulator.instructions.vop_convert import destination_bits, merge_bits, source_bits
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]
_FP8 = {"fp8": E4M3, "bf8": E5M2}
_FP6 = {"fp6": E2M3, "bf6": E3M2}
_SOURCE_BITS = {"f32": (23, 8), "f16": (10, 5), "bf16": (7, 8)}


def _scale(scale: Array) -> Array:
    return e8m0.exponent_of_f32(bits_of(scale))


def _narrow(value: Array, to: str) -> Array:
    """float64 values of few significant bits as f32, or as f16/bf16 bits in uint32."""
    with np.errstate(all="ignore"):
        if to == "f32":
            return value.astype(np.float32)
        bits = value.astype(np.float16).view(np.uint16) if to == "f16" else bf16.from_f64(value)
    return bits.astype(np.uint32)


def _halves(words: Array) -> tuple[Array, Array]:
    """Raw 16-bit halves of uint32 words, as uint16."""
    return (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def _widen(raw: Array, source: str) -> Array:
    """float32 values of raw f16 or bf16 bits; float32 arrays pass."""
    if source == "f32":
        return raw
    return raw.view(np.float16).astype(np.float32) if source == "f16" else bf16.to_f32(raw)


def _byte(words: Array, position: int) -> Array:
    return ((words >> np.uint32(8 * position)) & np.uint32(0xFF)).astype(np.uint8)


# ------------------------------------------------------------------------------------------------------
# unpacking
def _unpack_pair(fmt: SmallFormat, to: str) -> Callable[..., Array]:
    """Two elements: of fp8/bf8 the word OPSEL[0], of fp4 the byte OPSEL[1:0]."""

    def function(words: Array, scale: Array, *, op_sel: tuple[int, ...]) -> Array:
        select = source_bits(op_sel)
        if fmt.bits == 4:
            both = _byte(words, select)
            codes = (both & np.uint8(15), both >> np.uint8(4))
        else:
            codes = (_byte(words, 2 * (select & 1)), _byte(words, 2 * (select & 1) + 1))
        low, high = (_narrow(decode_scaled(c, fmt, _scale(scale)), to) for c in codes)
        return np.stack([low, high]) if to == "f32" else low | (high << np.uint32(16))

    return function


def _unpack_one_f32(fmt: SmallFormat) -> Callable[..., Array]:
    def function(words: Array, scale: Array, *, op_sel: tuple[int, ...]) -> Array:
        return _narrow(decode_scaled(_byte(words, source_bits(op_sel)), fmt, _scale(scale)), "f32")

    return function


def _unpack_one_f16(fmt: SmallFormat) -> Callable[..., Array]:
    """The byte OPSEL[1:0] to the half OPSEL[3] of D, whose other half is preserved."""

    def function(words: Array, scale: Array, old: Array, *, op_sel: tuple[int, ...]) -> Array:
        value = _narrow(decode_scaled(_byte(words, source_bits(op_sel)), fmt, _scale(scale)), "f16")
        return merge_bits(old, value, 8 * (destination_bits((0, 0, *op_sel[2:])) & 2), 16)

    return function


def _unpack_32(fmt: SmallFormat, to: str) -> Callable[[Array, Array], Array]:
    def function(registers: Array, scale: Array) -> Array:
        values = _narrow(decode_scaled(fp6.unpack(registers), fmt, _scale(scale)), to)
        return values if to == "f32" else values[0::2] | (values[1::2] << np.uint32(16))

    return function


# --------------------------------------------------------------------------------------------------------
# packing
def _merge_pair(old: Array, codes: tuple[Array, Array], fmt: SmallFormat, op_sel: tuple[int, ...]) -> Array:
    """fp4: byte OPSEL[3:2] of D; fp8/bf8: word OPSEL[3]. Other bits are preserved."""
    low, high = (c.astype(np.uint32) for c in codes)
    where = destination_bits(op_sel)
    if fmt.bits == 4:
        return merge_bits(old, low | (high << np.uint32(4)), 8 * where, 8)
    return merge_bits(old, low | (high << np.uint32(8)), 8 * (where & 2), 16)


def _pack_f32(fmt: SmallFormat) -> Callable[..., Array]:
    def function(
        a: Array, b: Array, scale: Array, old: Array, *, op_sel: tuple[int, ...], mode: FloatMode
    ) -> Array:
        low, high = (encode_scaled(v, fmt, _scale(scale), mode.fp16_overflow) for v in (a, b))
        return _merge_pair(old, (low, high), fmt, op_sel)

    return function


def _pack_16(fmt: SmallFormat, source: str) -> Callable[..., Array]:
    def function(
        words: Array, scale: Array, old: Array, *, op_sel: tuple[int, ...], mode: FloatMode
    ) -> Array:
        low, high = (
            encode_scaled(_widen(v, source), fmt, _scale(scale), mode.fp16_overflow) for v in _halves(words)
        )
        return _merge_pair(old, (low, high), fmt, op_sel)

    return function


def _stochastic(
    raw: Array, random: Array, fmt: SmallFormat, scale: Array, source: str, saturate: bool
) -> Array:
    mantissa_bits, exponent_bits = _SOURCE_BITS[source]
    bits = bits_of(raw) if source == "f32" else raw
    return encode_stochastic_bits(
        bits, random, fmt, source_mantissa_bits=mantissa_bits, source_exponent_bits=exponent_bits,
        scale_exponent=_scale(scale), saturate=saturate,
    )  # fmt: skip


def _pack_one_stochastic(fmt: SmallFormat, source: str) -> Callable[..., Array]:
    """One element into the byte OPSEL[3:2] of D. A 16-bit source is the low half."""

    def function(
        a: Array, random: Array, scale: Array, old: Array, *, op_sel: tuple[int, ...], mode: FloatMode
    ) -> Array:
        raw = a if source == "f32" else a.view(np.uint16)
        code = _stochastic(raw, random, fmt, scale, source, mode.fp16_overflow)
        return merge_bits(old, code, 8 * destination_bits(op_sel), 8)

    return function


def _pack_pair_stochastic(source: str) -> Callable[..., Array]:
    """Two elements to fp4; the second draws the next random number."""

    def function(a: Array, random: Array, scale: Array, old: Array, *, op_sel: tuple[int, ...]) -> Array:
        low, high = (a[0], a[1]) if source == "f32" else _halves(a)
        codes = (
            _stochastic(low, random, E2M1, scale, source, True),
            _stochastic(high, next_random(random), E2M1, scale, source, True),
        )
        return _merge_pair(old, codes, E2M1, op_sel)

    return function


def _elements(registers: Array, source: str) -> Array:
    """[32, ...] elements: 32 float32 registers, or the 16-bit halves of 16 registers in order."""
    if source == "f32":
        return registers
    low, high = _halves(registers)
    return np.stack([low, high], axis=1).reshape(2 * registers.shape[0], *registers.shape[1:])


def _pack_32(fmt: SmallFormat, source: str) -> Callable[[Array, Array], Array]:
    return lambda registers, scale: fp6.pack(
        encode_scaled(_widen(_elements(registers, source), source), fmt, _scale(scale))
    )


def _pack_2x16(fmt: SmallFormat) -> Callable[[Array, Array, Array], Array]:
    """Elements of S0 and S1 alternate in the result."""

    def function(a: Array, b: Array, scale: Array) -> Array:
        elements = np.stack([a, b], axis=1).reshape(32, *a.shape[1:])
        return fp6.pack(encode_scaled(elements, fmt, _scale(scale)))

    return function


def _pack_32_stochastic(fmt: SmallFormat, source: str) -> Callable[[Array, Array, Array], Array]:
    """A new random number per element."""

    def function(registers: Array, random: Array, scale: Array) -> Array:
        codes = []
        for element in _elements(registers, source):
            codes.append(_stochastic(element, random, fmt, scale, source, True))
            random = next_random(random)
        return fp6.pack(np.stack(np.broadcast_arrays(*codes)))

    return function


_P = "v_cvt_scalef32_"
for _name, _fmt in _FP8.items():
    define_vector(f"{_P}pk_{_name}_f32", "f32, f32, f32, old -> b32", _pack_f32(_fmt))
    define_vector(f"{_P}sr_{_name}_f32", "f32, u32, f32, old -> b32", _pack_one_stochastic(_fmt, "f32"))
    define_vector(f"{_P}pk_f32_{_name}", "b32, f32 -> f32x2", _unpack_pair(_fmt, "f32"))
    define_vector(f"{_P}f32_{_name}", "b32, f32 -> f32", _unpack_one_f32(_fmt))
    define_vector(f"{_P}f16_{_name}", "b32, f32, old -> b32", _unpack_one_f16(_fmt))
    for _source in ("f16", "bf16"):
        define_vector(f"{_P}pk_{_name}_{_source}", "b32, f32, old -> b32", _pack_16(_fmt, _source))
        define_vector(f"{_P}pk_{_source}_{_name}", "b32, f32 -> b32", _unpack_pair(_fmt, _source))
        define_vector(
            f"{_P}sr_{_name}_{_source}",
            f"{_source}, u32, f32, old -> b32",
            _pack_one_stochastic(_fmt, _source),
        )
define_vector(f"{_P}pk_fp4_f32", "f32, f32, f32, old -> b32", _pack_f32(E2M1))
define_vector(f"{_P}sr_pk_fp4_f32", "f32x2, u32, f32, old -> b32", _pack_pair_stochastic("f32"))
define_vector(f"{_P}pk_f32_fp4", "b32, f32 -> f32x2", _unpack_pair(E2M1, "f32"))
for _source in ("f16", "bf16"):
    define_vector(f"{_P}pk_fp4_{_source}", "b32, f32, old -> b32", _pack_16(E2M1, _source))
    define_vector(f"{_P}sr_pk_fp4_{_source}", "b32, u32, f32, old -> b32", _pack_pair_stochastic(_source))
    define_vector(f"{_P}pk_{_source}_fp4", "b32, f32 -> b32", _unpack_pair(E2M1, _source))
for _name, _fmt in _FP6.items():
    define_vector(f"{_P}2xpk16_{_name}_f32", "f32x16, f32x16, f32 -> b32x6", _pack_2x16(_fmt))
    define_vector(f"{_P}sr_pk32_{_name}_f32", "f32x32, u32, f32 -> b32x6", _pack_32_stochastic(_fmt, "f32"))
    define_vector(f"{_P}pk32_f32_{_name}", "b32x6, f32 -> f32x32", _unpack_32(_fmt, "f32"))
    for _source in ("f16", "bf16"):
        define_vector(f"{_P}pk32_{_name}_{_source}", "b32x16, f32 -> b32x6", _pack_32(_fmt, _source))
        define_vector(
            f"{_P}sr_pk32_{_name}_{_source}", "b32x16, u32, f32 -> b32x6", _pack_32_stochastic(_fmt, _source)
        )
        define_vector(f"{_P}pk32_{_source}_{_name}", "b32x6, f32 -> b32x16", _unpack_32(_fmt, _source))
