# SPDX-License-Identifier: Apache-2.0
"""Device helpers that the kernels of this folder share.  Traced, not type-checked."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir

T = fx.T
ORDER = fx.AtomicOrdering
AGENT = fx.rocdl.SyncScope.Agent
SYSTEM = fx.SyncScope.System
LOG2E = 1.4426950408889634


def gp(addr, ty, align=None):
    """Global pointer from a raw 64-bit address."""
    space = fx.AddressSpace.Global
    return fx.inttoptr(fx.PointerType.get(ty.ir_type, space, align or max(1, ty.width // 8)), addr)


def exp2(x):
    """2^x by the chip's instruction."""
    return fx.Float32(fx.rocdl.exp2(T.f32, x.ir_value()))


def shared(ty, count, align=16):
    """A static LDS array of its own: for kernels that need one only."""
    return fx.SharedAllocator().allocate(fx.Array[ty, count, align]).peek()


def wave_id():
    """The wave's index within its workgroup, in a scalar register."""
    return fx.Int32(fx.rocdl.readfirstlane(T.i32, fx.thread_idx.x // 64))


def wave_reduce(value, op):
    """Every lane gets the reduction over its wave."""
    for step in range(6):
        value = op(value, fx.shuffle_xor(value, 1 << step, 64))
    return value


def ballot(condition):
    """Lane mask of a condition, as Int64."""
    return fx.Int64(fx.rocdl.ballot(T.i64, condition))


def parse_type(text):
    """An MLIR type from its text."""
    return ir.Type.parse(text)


@flyc.jit
def signal(flag, value, scope):
    """The whole workgroup: publish what it stored, then set `flag` to `value`."""
    fx.memory_fence(ordering=ORDER.Release, syncscope=scope)
    fx.barrier()
    if fx.thread_idx.x == 0:
        fx.generic_store(gp(flag, fx.Int32), value, memory_order=ORDER.Monotonic, syncscope=scope)


@flyc.jit
def wait_for(flag, value, scope):
    """The whole workgroup: go on when `flag` holds at least `value`; later loads see what was published."""
    if fx.thread_idx.x == 0:
        seen = fx.generic_load(gp(flag, fx.Int32), memory_order=ORDER.Monotonic, syncscope=scope)
        while seen < value:
            fx.rocdl.s_sleep(1)
            seen = fx.generic_load(gp(flag, fx.Int32), memory_order=ORDER.Monotonic, syncscope=scope)
    fx.barrier()
    fx.memory_fence(ordering=ORDER.Acquire, syncscope=scope)
