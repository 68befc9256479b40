# SPDX-License-Identifier: Apache-2.0
"""OCP fp8 as gfx950 has it: E4M3 ("fp8": largest 448, no infinity, NaN 0x7f) and E5M2 ("bf8": IEEE-like).

The fnuz variants belong to gfx940. Source: CDNA4 ISA, table 30.
"""

from __future__ import annotations

from kernellib.emulator.arith.formats import Array
from kernellib.emulator.arith.smallfloat import E4M3, E5M2, decode, encode

__all__ = ["E4M3", "E5M2", "decode_bf8", "decode_fp8", "encode_bf8", "encode_fp8"]


def decode_fp8(codes: Array) -> Array:
    """float32 values of E4M3 codes: v_cvt_f32_fp8."""
    return decode(codes, E4M3)


def decode_bf8(codes: Array) -> Array:
    """float32 values of E5M2 codes: v_cvt_f32_bf8."""
    return decode(codes, E5M2)


def encode_fp8(x: Array, saturate: bool = False) -> Array:
    """E4M3 codes to nearest even; overflow to NaN, or to 448 with MODE.FP16_OVFL: v_cvt_pk_fp8_f32."""
    return encode(x, E4M3, saturate)


def encode_bf8(x: Array, saturate: bool = False) -> Array:
    """E5M2 codes to nearest even; overflow to infinity, or to 57344 with MODE.FP16_OVFL: v_cvt_pk_bf8_f32."""
    return encode(x, E5M2, saturate)
