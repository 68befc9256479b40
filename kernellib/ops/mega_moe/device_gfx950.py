# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Device building blocks of the MegaMoE kernels: addresses, e8m0/e4m3 quantisation, scoped flags.

Everything here is traced into the kernel that calls it; nothing is a function on the device.
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl as mlir_rocdl

from kernellib.numerics import mx

T = fx.T
LANES = 64
ORDER = fx.AtomicOrdering
SYSTEM = fx.SyncScope.System
AGENT = fx.rocdl.SyncScope.Agent
F32_MANTISSA_BITS = 23
F32_INF_BITS = 0x7F80_0000
MAGNITUDE_MASK = 0x7FFF_FFFF
NAN_CODES = 0x7F7F_7F7F  # four e4m3 NaNs
# DPP controls: lane ^ 1, lane ^ 2, mirror of 8, mirror of 16.
DPP_XOR_CONTROLS = (0xB1, 0x4E, 0x141, 0x140)


def pointer(address: Any, element: Any, align: int | None = None) -> Any:
    """A global-memory pointer from a 64-bit address."""
    align = align or max(1, element.width // 8)
    return fx.inttoptr(fx.PointerType.get(element.ir_type, fx.AddressSpace.Global, align), address)


def wave_uniform(value: Any) -> Any:
    """An Int32 that is the same in all lanes, moved to a scalar register."""
    return fx.Int32(fx.rocdl.readfirstlane(T.i32, value))


def lane_id() -> Any:
    return fx.thread_idx.x % LANES


def wave_id() -> Any:
    return wave_uniform(fx.thread_idx.x // LANES)


def larger(a: Any, b: Any) -> Any:
    return (a > b).select(a, b)


def smaller(a: Any, b: Any) -> Any:
    return (a < b).select(a, b)


# ------------------------------------------------------------------------------------ quantisation


def max_across(value: Any, num_lanes: int) -> Any:
    """The largest Int32 of each aligned group of 2, 4, 8 or 16 lanes, in all of its lanes."""
    for control in DPP_XOR_CONTROLS[: num_lanes.bit_length() - 1]:
        other = mlir_rocdl.update_dpp(T.i32, value.ir_value(), value.ir_value(), control, 0xF, 0xF, True)
        value = larger(value, fx.Int32(other))
    return value


def magnitude_bits(value: Any) -> Any:
    """|value|'s fp32 bits: ordered as integers, with NaN above Inf above every finite number."""
    return value.bitcast(fx.Int32) & MAGNITUDE_MASK


def e4m3_scale(amax_bits: Any) -> Any:
    """The e8m0 byte (Int32) for a block's largest magnitude, by the rule of ``kernellib.numerics.mx``."""
    exponent = ((amax_bits + mx.E4M3.scale_addend) >> F32_MANTISSA_BITS) - mx.E4M3.max_exponent
    exponent = larger(exponent, fx.Int32(0))
    return (amax_bits < F32_INF_BITS).select(exponent, fx.Int32(mx.E8M0_NAN))


def inverse_scale(scale: Any) -> Any:
    """2^(127 - E) as fp32: what block elements are multiplied by. Exact; not meaningful for E = 255."""
    return ((fx.Int32(254) - scale) << F32_MANTISSA_BITS).bitcast(fx.Float32)


def scale_value(scale: Any) -> Any:
    """2^(E - 127) as fp32, 2^-127 (a subnormal) for E = 0 and NaN for 255."""
    normal = scale << F32_MANTISSA_BITS
    bits = (scale == 0).select(fx.Int32(1 << (F32_MANTISSA_BITS - 1)), normal)
    return (scale == mx.E8M0_NAN).select(fx.Int32(0x7FC0_0000), bits).bitcast(fx.Float32)


def pack_e4m3(values: list[Any], scale: Any) -> Any:
    """Four fp32 of one block -> four e4m3 codes in an Int32, the first in the low byte."""
    inverse = inverse_scale(scale)
    a, b, c, d = (value * inverse for value in values)
    low = fx.rocdl.cvt_pk_fp8_f32(T.i32, a, b, fx.Int32(0), False)
    packed = fx.Int32(fx.rocdl.cvt_pk_fp8_f32(T.i32, c, d, low, True))
    return (scale == mx.E8M0_NAN).select(fx.Int32(NAN_CODES), packed)


def unpack_e4m3(packed: Any) -> list[Any]:
    """Four e4m3 codes of an Int32 -> four Float32, scale not applied."""
    low = fx.Vector(fx.rocdl.cvt_pk_f32_fp8(T.vec(2, T.f32), packed, False))
    high = fx.Vector(fx.rocdl.cvt_pk_f32_fp8(T.vec(2, T.f32), packed, True))
    return [low[0], low[1], high[0], high[1]]


# -------------------------------------------------------------------------------------------- flags


def load_relaxed(address: Any, scope: Any = SYSTEM) -> Any:
    """One Int32 that others may be writing, past the caches that ``scope`` reaches over."""
    return fx.generic_load(pointer(address, fx.Int32), memory_order=ORDER.Monotonic, syncscope=scope)


def store_relaxed(address: Any, value: Any, scope: Any = SYSTEM) -> None:
    fx.generic_store(pointer(address, fx.Int32), value, memory_order=ORDER.Monotonic, syncscope=scope)


def add_relaxed(address: Any, value: Any, scope: Any = SYSTEM) -> Any:
    """Adds to an Int32; returns what was there. Call it in one lane: lanes add up."""
    return fx.atomic_add(pointer(address, fx.Int32), value, ordering=ORDER.Monotonic, syncscope=scope)


def release(scope: Any = SYSTEM) -> None:
    """This wave's earlier stores are done, at ``scope``, before anything it stores later. Each wave of a
    workgroup needs its own before the barrier after which one lane raises a flag: a barrier does not
    wait for stores to global memory."""
    fx.memory_fence(ordering=ORDER.Release, syncscope=scope)


def acquire(scope: Any = SYSTEM) -> None:
    """What was released before the flag this wave has seen is visible to its later loads. Each wave that
    reads the data needs its own: it drops stale lines of the caches in between."""
    fx.memory_fence(ordering=ORDER.Acquire, syncscope=scope)


@flyc.jit
def wait_until_equal(address, value, scope):
    """Spins in the calling lanes until the Int32 at ``address`` is ``value``. Acquires nothing."""
    seen = load_relaxed(address, scope)
    while seen != value:
        fx.rocdl.s_sleep(1)
        seen = load_relaxed(address, scope)
