# SPDX-License-Identifier: Apache-2.0
"""Waves of one workgroup that hand data to each other by flags of workgroup scope, without a barrier.

No `from __future__ import annotations`: fx.struct wants types, not their names.
"""

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx

from tests.emulator.kernels.common import ORDER, gp, wave_id

WORKGROUP = fx.rocdl.SyncScope.Workgroup


@functools.cache
def through_memory():
    """Wave 0 doubles 64 floats of its workgroup, wave 1 takes them with neighbours swapped.

    x, between, out: float32 [blocks * 64]; flags: int32 [blocks], zero.
    """

    @flyc.kernel(name="user_hand_over")
    def kernel(x: fx.Int64, between: fx.Int64, flags: fx.Int64, out: fx.Int64):
        lane, block = fx.thread_idx.x % 64, fx.block_idx.x
        flag = gp(flags, fx.Int32) + block
        if wave_id() == 0:
            gp(between, fx.Float32)[block * 64 + lane] = gp(x, fx.Float32)[block * 64 + lane] * 2.0
            fx.generic_store(flag, fx.Int32(1), memory_order=ORDER.Release, syncscope=WORKGROUP)
        if wave_id() == 1:
            seen = fx.generic_load(flag, memory_order=ORDER.Acquire, syncscope=WORKGROUP)
            while seen == 0:
                seen = fx.generic_load(flag, memory_order=ORDER.Acquire, syncscope=WORKGROUP)
            gp(out, fx.Float32)[block * 64 + lane] = gp(between, fx.Float32)[block * 64 + (lane ^ 1)]

    @flyc.jit
    def run(x: fx.Int64, between: fx.Int64, flags: fx.Int64, out: fx.Int64, blocks: fx.Int32):
        kernel(x, between, flags, out).launch(grid=(blocks,), block=(128,))

    return run


@fx.struct
class Ring:
    """Two stages of 64 floats, and how often each has been filled and emptied."""

    data: fx.Array[fx.Float32, 128, 16]
    full: fx.Array[fx.Int32, 2, 8]
    empty: fx.Array[fx.Int32, 2, 8]


@flyc.jit
def await_count(counter, wanted):
    """Spin until an LDS counter has reached `wanted`."""
    seen = fx.generic_load(counter, memory_order=ORDER.Acquire, syncscope=WORKGROUP)
    while seen < wanted:
        seen = fx.generic_load(counter, memory_order=ORDER.Acquire, syncscope=WORKGROUP)


@functools.cache
def through_lds(overrun: bool = False):
    """A producer wave and a consumer wave with a ring of two stages in LDS: out = 2 x + 1, swapped.

    x: float32 [steps * 64]; out: float32 [2, steps * 64], a row for each of two workgroups.
    `overrun`: the fault of a producer that does not wait until a stage is empty.
    """

    @flyc.kernel(name=f"user_lds_ring_{int(overrun)}")
    def kernel(x: fx.Int64, out: fx.Int64, steps: fx.Int32):
        t = fx.thread_idx.x
        lane = t % 64
        ring = fx.SharedAllocator().allocate(Ring).peek()
        if t < 2:
            ring.full[t] = fx.Int32(0)
            ring.empty[t] = fx.Int32(0)
        fx.barrier()
        if wave_id() == 0:
            for i in range(0, steps, 1, unroll=1):
                stage, turn = fx.Int32(i) & 1, fx.Int32(i) // 2
                if fx.const_expr(not overrun):
                    await_count(ring.empty.ptr + stage, turn)
                ring.data[stage * 64 + lane] = gp(x, fx.Float32)[fx.Int32(i) * 64 + lane] * 2.0
                fx.generic_store(
                    ring.full.ptr + stage, turn + 1, memory_order=ORDER.Release, syncscope=WORKGROUP
                )
        if wave_id() == 1:
            for i in range(0, steps, 1, unroll=1):
                stage, turn = fx.Int32(i) & 1, fx.Int32(i) // 2
                await_count(ring.full.ptr + stage, turn + 1)
                place = (fx.block_idx.x * steps + fx.Int32(i)) * 64 + lane
                gp(out, fx.Float32)[place] = ring.data[stage * 64 + (lane ^ 1)] + 1.0
                fx.generic_store(
                    ring.empty.ptr + stage, turn + 1, memory_order=ORDER.Release, syncscope=WORKGROUP
                )

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, steps: fx.Int32):
        kernel(x, out, steps).launch(grid=(2,), block=(128,))

    return run
