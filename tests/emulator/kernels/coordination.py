# SPDX-License-Identifier: Apache-2.0
"""Kernels whose workgroups, waves or ranks depend on each other: scan, histogram, queue, sort, all-reduce."""

from __future__ import annotations

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx

from tests.emulator.kernels.common import AGENT, ORDER, SYSTEM, ballot, gp, shared, signal, wait_for, wave_id


@functools.cache
def prefix_scan():
    """Inclusive int32 prefix sum in one launch: a workgroup waits for its predecessor's running total.

    `totals` [blocks + 1] and `ready` [blocks + 1] are zero, but ready[0] = 1.
    """
    threads = 256

    @flyc.kernel(name="user_prefix_scan")
    def kernel(x: fx.Int64, out: fx.Int64, totals: fx.Int64, ready: fx.Int64, n: fx.Int32):
        t, block = fx.thread_idx.x, fx.block_idx.x
        sums = shared(fx.Int32, 4)
        i = block * threads + t
        value = fx.Int32(0)
        if i < n:
            value = gp(x, fx.Int32)[i]
        for step in fx.range_constexpr(6):
            before = fx.shuffle_up(value, 1 << step, 64)
            value = value + (t % 64 >= (1 << step)).select(before, fx.Int32(0))
        if t % 64 == 63:
            sums[t // 64] = value
        fx.barrier()
        wave = wave_id()
        block_total = fx.Int32(0)
        for w in fx.range_constexpr(4):
            part = sums[w]
            value = value + (fx.Int32(w) < wave).select(part, fx.Int32(0))
            block_total = block_total + part
        wait_for(ready + fx.Int64(block) * 4, fx.Int32(1), AGENT)
        base = fx.generic_load(gp(totals, fx.Int32) + block, memory_order=ORDER.Monotonic, syncscope=AGENT)
        if t == 0:
            gp(totals, fx.Int32)[block + 1] = base + block_total
        signal(ready + fx.Int64(block + 1) * 4, fx.Int32(1), AGENT)
        if i < n:
            gp(out, fx.Int32)[i] = value + base

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, totals: fx.Int64, ready: fx.Int64, n: fx.Int32):
        blocks = (n + threads - 1) // threads
        kernel(x, out, totals, ready, n).launch(grid=(blocks,), block=(threads,))

    return run


@functools.cache
def histogram():
    """256 bins of bytes: LDS atomics within a workgroup, then global ones for bins that are not empty."""

    @flyc.kernel(name="user_histogram")
    def kernel(data: fx.Int64, bins: fx.Int64, n: fx.Int32, stride: fx.Int32):
        t = fx.thread_idx.x
        local = shared(fx.Int32, 256)
        local[t] = fx.Int32(0)
        fx.barrier()
        for i in range(fx.block_idx.x * 256 + t, n, stride, unroll=1):
            byte = fx.Int32(fx.generic_load(gp(data, fx.Uint8) + i, dtype=fx.Uint8))
            fx.atomic_add(local.ptr + byte, fx.Int32(1), syncscope=fx.rocdl.SyncScope.Workgroup)
        fx.barrier()
        count = local[t]
        if count > 0:
            fx.atomic_add(gp(bins, fx.Int32) + t, count, syncscope=AGENT)

    @flyc.jit
    def run(data: fx.Int64, bins: fx.Int64, n: fx.Int32, blocks: fx.Int32):
        kernel(data, bins, n, blocks * 256).launch(grid=(blocks,), block=(256,))

    return run


@functools.cache
def work_queue():
    """Persistent workgroups take jobs until none is left: job j fills lengths[j] floats at starts[j].

    `head` is one int32, zero before the launch; `owner[j]` gets the workgroup that did the job.
    """

    @flyc.kernel(name="user_work_queue")
    def kernel(
        starts: fx.Int64, lengths: fx.Int64, out: fx.Int64, owner: fx.Int64, head: fx.Int64, jobs: fx.Int32
    ):
        t = fx.thread_idx.x
        ticket = shared(fx.Int32, 1)
        going = fx.Boolean(True)
        while going:
            if t == 0:
                ticket[0] = fx.atomic_add(gp(head, fx.Int32), fx.Int32(1), syncscope=AGENT)
            fx.barrier()
            job = fx.Int32(fx.rocdl.readfirstlane(fx.T.i32, ticket[0]))
            fx.barrier()
            going = job < jobs
            if going:
                start, length = gp(starts, fx.Int32)[job], gp(lengths, fx.Int32)[job]
                for i in range(t, length, 128, unroll=1):
                    gp(out, fx.Float32)[start + i] = fx.Float32(job) + fx.Float32(fx.Int32(i)) * 0.5
                if t == 0:
                    gp(owner, fx.Int32)[job] = fx.block_idx.x

    @flyc.jit
    def run(
        starts: fx.Int64, lengths: fx.Int64, out: fx.Int64, owner: fx.Int64, head: fx.Int64,
        jobs: fx.Int32, blocks: fx.Int32
    ):  # fmt: skip
        kernel(starts, lengths, out, owner, head, jobs).launch(grid=(blocks,), block=(128,))

    return run


@functools.cache
def bitonic_sort(count: int):
    """Sorts `count` uint32 (a power of two) of each workgroup in LDS, count / 2 threads."""

    @flyc.kernel(name=f"user_bitonic_{count}")
    def kernel(x: fx.Int64):
        t = fx.thread_idx.x
        keys = shared(fx.Uint32, count)
        base = gp(x, fx.Uint32) + fx.block_idx.x * count
        for half in fx.range_constexpr(2):
            keys[t + half * count // 2] = fx.generic_load(base + (t + half * count // 2), dtype=fx.Uint32)
        fx.barrier()
        size = 2
        while size <= count:
            stride = size // 2
            while stride >= 1:
                low = (t // stride) * 2 * stride + t % stride
                rising = (low & size) == 0
                a = fx.generic_load(keys.ptr + low, dtype=fx.Uint32)
                b = fx.generic_load(keys.ptr + low + stride, dtype=fx.Uint32)
                swap = (a > b) == rising
                fx.generic_store(keys.ptr + low, swap.select(b, a))
                fx.generic_store(keys.ptr + low + stride, swap.select(a, b))
                fx.barrier()
                stride = stride // 2
            size = size * 2
        for half in fx.range_constexpr(2):
            place = t + half * count // 2
            fx.generic_store(base + place, fx.generic_load(keys.ptr + place, dtype=fx.Uint32))

    @flyc.jit
    def run(x: fx.Int64, blocks: fx.Int32):
        kernel(x).launch(grid=(blocks,), block=(count // 2,))

    return run


@functools.cache
def compact():
    """Keeps the positive floats, in order within a wave; a wave reserves its place with one atomic."""

    @flyc.kernel(name="user_compact")
    def kernel(x: fx.Int64, out: fx.Int64, cursor: fx.Int64, n: fx.Int32):
        lane = fx.thread_idx.x % 64
        i = fx.block_idx.x * 256 + fx.thread_idx.x
        value = fx.Float32(-1.0)
        if i < n:
            value = gp(x, fx.Float32)[i]
        keep = value > 0.0
        mask = ballot(keep)
        below = mask & ((fx.Int64(1) << lane.to(fx.Int64)) - 1)
        place = fx.Int32(0)
        if lane == 0:
            place = fx.atomic_add(gp(cursor, fx.Int32), fx.ctpop(mask).to(fx.Int32), syncscope=AGENT)
        place = fx.shuffle_idx(place, 0, 64) + fx.ctpop(below).to(fx.Int32)
        if keep:
            gp(out, fx.Float32)[place] = value

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, cursor: fx.Int64, n: fx.Int32):
        kernel(x, out, cursor, n).launch(grid=((n + 255) // 256,), block=(256,))

    return run


@functools.cache
def all_reduce(num_ranks: int):
    """Every rank's out = sum of all ranks' data, in rank order, bf16 [n]; n a multiple of 2048 per workgroup.

    Each workgroup writes its part into every peer's inbox slot `rank`, raises its flag there, waits for the
    flags of all ranks, and adds the slots up.  `inboxes`, `flags`: tables of num_ranks addresses.
    """
    part = 2048

    @flyc.kernel(name=f"user_all_reduce_{num_ranks}")
    def kernel(
        data: fx.Int64, inboxes: fx.Int64, flags: fx.Int64, out: fx.Int64, rank: fx.Int32, n: fx.Int32,
        epoch: fx.Int32
    ):  # fmt: skip
        t, block, blocks = fx.thread_idx.x, fx.block_idx.x, n // part
        place = block * part + t * 8
        mine = fx.generic_load(gp(data, fx.BFloat16, 16) + place, count=8)
        for peer in fx.range_constexpr(num_ranks):
            inbox = gp(inboxes, fx.Int64, 8)[peer]
            fx.generic_store(gp(inbox, fx.BFloat16, 16) + (rank * n + place), mine)
        fx.memory_fence(ordering=ORDER.Release)
        fx.barrier()
        if t < num_ranks:
            flag = gp(flags, fx.Int64, 8)[t] + fx.Int64(rank * blocks + block) * 4
            fx.generic_store(gp(flag, fx.Int32), epoch, memory_order=ORDER.Monotonic, syncscope=SYSTEM)
            own = gp(gp(flags, fx.Int64, 8)[rank], fx.Int32) + (t * blocks + block)
            seen = fx.generic_load(own, memory_order=ORDER.Monotonic, syncscope=SYSTEM)
            while seen < epoch:
                fx.rocdl.s_sleep(1)
                seen = fx.generic_load(own, memory_order=ORDER.Monotonic, syncscope=SYSTEM)
        fx.barrier()
        fx.memory_fence(ordering=ORDER.Acquire)
        own_inbox = gp(gp(inboxes, fx.Int64, 8)[rank], fx.BFloat16, 16)
        total = fx.full(8, 0.0, fx.Float32)
        for peer in fx.range_constexpr(num_ranks):
            total = total + fx.generic_load(own_inbox + (peer * n + place), count=8).to(fx.Float32)
        fx.generic_store(gp(out, fx.BFloat16, 16) + place, total.to(fx.BFloat16))

    @flyc.jit
    def run(
        data: fx.Int64, inboxes: fx.Int64, flags: fx.Int64, out: fx.Int64, rank: fx.Int32, n: fx.Int32,
        epoch: fx.Int32
    ):  # fmt: skip
        kernel(data, inboxes, flags, out, rank, n, epoch).launch(grid=(n // part,), block=(256,))

    return run
