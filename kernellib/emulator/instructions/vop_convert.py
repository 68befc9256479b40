# SPDX-License-Identifier: Apache-2.0
"""Conversions between integers, IEEE floats, bf16 and fp8 without block scales. Semantics: CDNA4 ISA 12.8,
12.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import bf16, convert, fp8
from kernellib.emulator.arith.smallfloat import E4M3, E5M2, SmallFormat, decode, encode_stochastic
from kernellib.emulator.errors import UnsupportedOperandError
from kernellib.emulator.instructions.registry import define_vector, vector
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]
_U16, _U8 = np.uint32(16), np.uint32(8)


def _pack16(low: Array, high: Array) -> Array:
    """Two 16-bit arrays of any type as one uint32."""
    low, high = low.view(np.uint16).astype(np.uint32), high.view(np.uint16).astype(np.uint32)
    result: Array = low | (high << _U16)
    return result


def merge_bits(old: Array, value: Array, shift: int, bits: int) -> Array:
    """`old` with `bits` bits from `shift` on replaced by `value`; the others are preserved."""
    mask = np.uint32(((1 << bits) - 1) << shift)
    result: Array = (old & ~mask) | ((value.astype(np.uint32) << np.uint32(shift)) & mask)
    return result


def destination_bits(op_sel: tuple[int, ...]) -> int:
    """OPSEL[3:2] from the list of the text: its last entry is bit 3, entry 2 of four is bit 2.

    Raises UnsupportedOperandError when a source bit is set, which these conversions do not have.
    """
    if any(op_sel[:2]):
        raise UnsupportedOperandError(
            f"op_sel:{list(op_sel)} selects a source half, which this conversion lacks"
        )
    if not op_sel:
        return 0
    if len(op_sel) == 4:
        return op_sel[2] | op_sel[3] << 1
    return op_sel[-1] << 1 if len(op_sel) == 3 else 0


def source_bits(op_sel: tuple[int, ...]) -> int:
    """OPSEL[1:0] from the list of the text."""
    return (op_sel[0] | (op_sel[1] << 1 if len(op_sel) > 1 else 0)) if op_sel else 0


# -----------------------------------------------------------------------------------------------------
# integers
define_vector("v_cvt_f32_i32", "i32 -> f32", convert.int_to_f32)
define_vector("v_cvt_f32_u32", "u32 -> f32", convert.int_to_f32)
define_vector("v_cvt_f64_i32", "i32 -> f64", lambda a: a.astype(np.float64))
define_vector("v_cvt_f64_u32", "u32 -> f64", lambda a: a.astype(np.float64))
define_vector("v_cvt_f16_i16", "i16 -> f16", convert.int_to_f16)
define_vector("v_cvt_f16_u16", "u16 -> f16", convert.int_to_f16)
for _float in ("f32", "f64"):
    define_vector(f"v_cvt_i32_{_float}", f"{_float} -> i32", lambda a: convert.float_to_int(a, np.int32))
    define_vector(f"v_cvt_u32_{_float}", f"{_float} -> u32", lambda a: convert.float_to_int(a, np.uint32))
define_vector("v_cvt_i16_f16", "f16 -> i16", lambda a: convert.float_to_int(a, np.int16))
define_vector("v_cvt_u16_f16", "f16 -> u16", lambda a: convert.float_to_int(a, np.uint16))
define_vector("v_cvt_rpi_i32_f32", "f32 -> i32", convert.nearest_int32)
define_vector("v_cvt_flr_i32_f32", "f32 -> i32", convert.floor_int32)
define_vector("v_cvt_off_f32_i4", "b32 -> f32", convert.offset_i4_to_f32)
for _byte in range(4):
    define_vector(
        f"v_cvt_f32_ubyte{_byte}", "b32 -> f32", lambda a, byte=_byte: convert.ubyte_to_f32(a, byte)
    )
define_vector("v_cvt_norm_i16_f16", "f16 -> i16", convert.to_snorm16)
define_vector("v_cvt_norm_u16_f16", "f16 -> u16", convert.to_unorm16)
for _float in ("f16", "f32"):
    define_vector(
        f"v_cvt_pknorm_i16_{_float}", f"{_float}, {_float} -> b32",
        lambda a, b: _pack16(convert.to_snorm16(a), convert.to_snorm16(b)),
    )  # fmt: skip
    define_vector(
        f"v_cvt_pknorm_u16_{_float}", f"{_float}, {_float} -> b32",
        lambda a, b: _pack16(convert.to_unorm16(a), convert.to_unorm16(b)),
    )  # fmt: skip


@vector("v_cvt_pk_u16_u32", "u32, u32 -> b32")
def v_cvt_pk_u16_u32(a: Array, b: Array) -> Array:
    """Two uint32 as uint16 (the pseudo code names a conversion; that it saturates is assumed)."""
    return _pack16(*(np.minimum(v, np.uint32(0xFFFF)).astype(np.uint16) for v in (a, b)))


@vector("v_cvt_pk_i16_i32", "i32, i32 -> b32")
def v_cvt_pk_i16_i32(a: Array, b: Array) -> Array:
    """Two int32 as int16, saturating (compilers rely on it for clamps)."""
    return _pack16(*(np.clip(v, -0x8000, 0x7FFF).astype(np.int16) for v in (a, b)))


@vector("v_cvt_pk_u8_f32", "f32, u32, b32 -> b32")
def v_cvt_pk_u8_f32(value: Array, byte: Array, rest: Array) -> Array:
    """Byte S1[1:0] of S2 replaced by S0 as uint8."""
    shift = (byte & np.uint32(3)) * _U8
    result: Array = (rest & ~(np.uint32(0xFF) << shift)) | (convert.to_u8(value) << shift)
    return result


@vector("v_cvt_pkaccum_u8_f32", "f32, u32, old -> b32")
def v_cvt_pkaccum_u8_f32(value: Array, byte: Array, old: Array) -> Array:
    """Byte S1[1:0] of D replaced by S0 as uint8."""
    result: Array = v_cvt_pk_u8_f32(value, byte, old)
    return result


# ----------------------------------------------------------------------------------------------- float widths
define_vector("v_cvt_f32_f16", "f16 -> f32", convert.f16_to_f32)
define_vector("v_cvt_f64_f32", "f32 -> f64", lambda a: a.astype(np.float64))
define_vector("v_cvt_f32_f64", "f64 -> f32", convert.f64_to_f32)


@vector("v_cvt_f16_f32", "f32 -> f16")
def v_cvt_f16_f32(a: Array, *, mode: FloatMode) -> Array:
    """float32 to float16, nearest even."""
    return convert.f32_to_f16(a, mode.fp16_overflow)


@vector("v_cvt_pk_f16_f32", "f32, f32 -> b32")
def v_cvt_pk_f16_f32(a: Array, b: Array, *, mode: FloatMode) -> Array:
    """Two float32 to packed float16, nearest even."""
    return _pack16(convert.f32_to_f16(a, mode.fp16_overflow), convert.f32_to_f16(b, mode.fp16_overflow))


@vector("v_cvt_pkrtz_f16_f32", "f32, f32 -> b32")
def v_cvt_pkrtz_f16_f32(a: Array, b: Array) -> Array:
    """Two float32 to packed float16, toward zero."""
    return _pack16(convert.f32_to_f16_toward_zero(a), convert.f32_to_f16_toward_zero(b))


@vector("v_cvt_pk_bf16_f32", "f32, f32 -> b32")
def v_cvt_pk_bf16_f32(a: Array, b: Array) -> Array:
    """Two float32 to packed bf16, nearest even."""
    return bf16.pack_f32(a, b)


@vector("v_cvt_sr_f16_f32", "f32, u32, old -> b32")
def v_cvt_sr_f16_f32(a: Array, random: Array, old: Array, *, op_sel: tuple[int, ...]) -> Array:
    """Stochastic rounding to float16 in the half that op_sel picks; the other half is preserved."""
    return merge_bits(
        old, convert.f16_stochastic(a, random).view(np.uint16), 8 * destination_bits(op_sel), 16
    )


@vector("v_cvt_sr_bf16_f32", "f32, u32, old -> b32")
def v_cvt_sr_bf16_f32(a: Array, random: Array, old: Array, *, op_sel: tuple[int, ...]) -> Array:
    """Stochastic rounding to bf16 in the half that op_sel picks; the other half is preserved."""
    return merge_bits(old, convert.bf16_stochastic(a, random), 8 * destination_bits(op_sel), 16)


# -----------------------------------------------------------------------------------------------------------
# fp8
def _unpack_one(fmt: SmallFormat) -> Callable[[Array], Array]:
    """The byte that SDWA picks (byte 0 without)."""
    return lambda a: decode((a & np.uint32(0xFF)).astype(np.uint8), fmt)


def _unpack_two(fmt: SmallFormat) -> Callable[..., Array]:
    """Two bytes of the word that SDWA or op_sel picks, to two registers."""

    def function(a: Array, *, op_sel: tuple[int, ...]) -> Array:
        word = a >> _U16 if source_bits(op_sel) & 1 else a
        return np.stack(
            [decode(((word >> s) & np.uint32(0xFF)).astype(np.uint8), fmt) for s in (np.uint32(0), _U8)]
        )

    return function


def _pack_two(encode: Callable[[Array, bool], Array]) -> Callable[..., Array]:
    """Two float32 into the word of D that op_sel picks; the other word is preserved."""

    def function(a: Array, b: Array, old: Array, *, op_sel: tuple[int, ...], mode: FloatMode) -> Array:
        low, high = (encode(v, mode.fp16_overflow).astype(np.uint32) for v in (a, b))
        return merge_bits(old, low | (high << _U8), 8 * destination_bits(op_sel), 16)

    return function


def _stochastic(fmt: SmallFormat) -> Callable[..., Array]:
    """One float32 into the byte of D that op_sel picks; the other bytes are preserved."""

    def function(a: Array, random: Array, old: Array, *, op_sel: tuple[int, ...], mode: FloatMode) -> Array:
        code = encode_stochastic(a, random, fmt, saturate=mode.fp16_overflow)
        return merge_bits(old, code, 8 * destination_bits(op_sel), 8)

    return function


for _name, _fmt, _encode in (("fp8", E4M3, fp8.encode_fp8), ("bf8", E5M2, fp8.encode_bf8)):
    define_vector(f"v_cvt_f32_{_name}", "b32 -> f32", _unpack_one(_fmt))
    define_vector(f"v_cvt_pk_f32_{_name}", "b32 -> f32x2", _unpack_two(_fmt))
    define_vector(f"v_cvt_pk_{_name}_f32", "f32, f32, old -> b32", _pack_two(_encode))
    define_vector(f"v_cvt_sr_{_name}_f32", "f32, u32, old -> b32", _stochastic(_fmt))
