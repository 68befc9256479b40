# SPDX-License-Identifier: Apache-2.0
"""Small FlyDSL launchers that the emulator tests run.  Device code: traced, not type-checked."""

from __future__ import annotations

import functools

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm as ml
from flydsl._mlir.dialects import rocdl as mr

T = fx.T
ORDER = fx.AtomicOrdering
SYSTEM = fx.SyncScope.System
NO_STREAM = fx.Stream(None)


def gp(addr, ty, align=None):
    """Global pointer from a raw 64-bit address."""
    space = fx.AddressSpace.Global
    return fx.inttoptr(fx.PointerType.get(ty.ir_type, space, align or max(1, ty.width // 8)), addr)


@functools.cache
def axpy():
    """y[i] = x[i] * s through dynamic LDS; x a tensor, y an address."""

    @flyc.kernel(name="test_axpy")
    def kernel(x: fx.Tensor, addr: fx.Int64, n: fx.Int32, s: fx.Float32):
        lds = fx.SharedAllocator(static=False).allocate(fx.Array[fx.Float32, 256, 16]).peek()
        i = fx.block_idx.x * 256 + fx.thread_idx.x
        if i < n:
            lds[fx.thread_idx.x] = x[i]
            gp(addr, fx.Float32)[i] = lds[fx.thread_idx.x] * s

    @flyc.jit
    def run(x: fx.Tensor, addr: fx.Int64, n: fx.Int32, s: fx.Float32, stream: fx.Stream = NO_STREAM):
        kernel(x, addr, n, s).launch(grid=((n + 255) // 256,), block=(256,), stream=stream)

    return run


@functools.cache
def block_sum(with_barrier=True):
    """out[b] = sum of the block's 256 floats, through static LDS and a barrier."""

    @flyc.kernel(name=f"test_block_sum_{int(with_barrier)}")
    def kernel(x: fx.Int64, out: fx.Int64):
        t = fx.thread_idx.x
        sm = fx.SharedAllocator().allocate(fx.Array[fx.Float32, 4, 16]).peek()
        v = gp(x, fx.Float32)[fx.block_idx.x * 256 + t]
        for o in fx.range_constexpr(6):
            v = v + fx.shuffle_xor(v, 1 << o, 64)
        if t % 64 == 0:
            sm[t // 64] = v
        if fx.const_expr(with_barrier):
            fx.barrier()
        if t == 0:
            gp(out, fx.Float32)[fx.block_idx.x] = (sm[0] + sm[1]) + (sm[2] + sm[3])

    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, blocks: fx.Int32):
        kernel(x, out).launch(grid=(blocks,), block=(256,))

    return run


@functools.cache
def two_kernels():
    """Doubles x, then adds 1: two launches in one launcher."""

    @flyc.kernel(name="test_double")
    def double(x: fx.Tensor):
        i = fx.block_idx.x * 64 + fx.thread_idx.x
        x[i] = x[i] * 2.0

    @flyc.kernel(name="test_increment")
    def increment(x: fx.Tensor):
        i = fx.block_idx.x * 64 + fx.thread_idx.x
        x[i] = x[i] + 1.0

    @flyc.jit
    def run(x: fx.Tensor, blocks: fx.Int32):
        double(x).launch(grid=(blocks,), block=(64,))
        increment(x).launch(grid=(blocks,), block=(64,))

    return run


@functools.cache
def relay():
    """A chain over the grid: workgroup g serves link n - 1 - g, waits for its flag and raises the next.

    The first workgroups wait for the last ones: it finishes only when workgroups really interleave.
    """

    @flyc.kernel(name="test_relay")
    def kernel(flags: fx.Int64, out: fx.Int64, n: fx.Int32):
        t = fx.thread_idx.x
        b = n - 1 - fx.block_idx.x
        f = gp(flags, fx.Uint32)
        if t == 0:
            v = fx.generic_load(f + b, memory_order=ORDER.Monotonic, syncscope=SYSTEM)
            while v == fx.Uint32(0):
                fx.rocdl.s_sleep(1)
                v = fx.generic_load(f + b, memory_order=ORDER.Monotonic, syncscope=SYSTEM)
            fx.memory_fence(ordering=ORDER.Acquire)
            gp(out, fx.Int32)[b] = b
            fx.memory_fence(ordering=ORDER.Release)
            fx.generic_store(f + (b + 1), fx.Uint32(1), memory_order=ORDER.Monotonic, syncscope=SYSTEM)

    @flyc.jit
    def run(flags: fx.Int64, out: fx.Int64, n: fx.Int32):
        kernel(flags, out, n).launch(grid=(n,), block=(128,))

    return run


@functools.cache
def histogram():
    """Counts byte values with atomics that return nothing, and hands out tickets with ones that do."""

    @flyc.kernel(name="test_histogram")
    def kernel(data: fx.Int64, bins: fx.Int64, ticket: fx.Int64, seen: fx.Int64):
        i = fx.block_idx.x * 256 + fx.thread_idx.x
        value = fx.Int32(fx.generic_load(gp(data, fx.Uint8) + i, dtype=fx.Uint8))
        fx.atomic_add(gp(bins, fx.Int32) + value, fx.Int32(1))
        mine = fx.atomic_add(gp(ticket, fx.Int32) + (i & 3), fx.Int32(1))
        gp(seen, fx.Int32)[i] = mine

    @flyc.jit
    def run(data: fx.Int64, bins: fx.Int64, ticket: fx.Int64, seen: fx.Int64, blocks: fx.Int32):
        kernel(data, bins, ticket, seen).launch(grid=(blocks,), block=(256,))

    return run


@functools.cache
def grid_reader():
    """x[t] = number of blocks, read from the hidden arguments."""

    @flyc.kernel(name="test_grid_reader")
    def kernel(x: fx.Tensor):
        p = ml.call_intrinsic(ir.Type.parse("!llvm.ptr<4>"), "llvm.amdgcn.implicitarg.ptr", [], [], [])
        x[fx.block_idx.x * 64 + fx.thread_idx.x] = fx.Float32(fx.Int32(ml.LoadOp(T.i32, p).result))

    @flyc.jit
    def run(x: fx.Tensor, blocks: fx.Int32):
        kernel(x).launch(grid=(blocks,), block=(64,))

    return run


@functools.cache
def bad_tanh():
    """LLVM has no library call for tanh here: an error on file descriptor 2, no exception from FlyDSL."""

    @flyc.kernel(name="test_tanh")
    def kernel(x: fx.Tensor):
        x[fx.thread_idx.x] = fx.Float32(mr.tanh(T.f32, x[fx.thread_idx.x].ir_value()))

    @flyc.jit
    def run(x: fx.Tensor):
        kernel(x).launch(grid=(1,), block=(64,))

    return run


@functools.cache
def diverge():
    """Lane-, wave- and workgroup-dependent loop counts: sums of the first t % 7 integers, and more."""

    @flyc.kernel(name="test_diverge")
    def kernel(out: fx.Int64):
        t = fx.thread_idx.x
        wave = fx.Int32(fx.rocdl.readfirstlane(T.i32, t // 64))
        n = t % 7
        acc = fx.Int32(0)
        for i in range(0, n, 1, unroll=1):
            acc = acc + i
        if wave == 1:
            for _ in range(0, fx.block_idx.x + 3, 1, unroll=1):
                acc = acc + 100
        gp(out, fx.Int32)[fx.block_idx.x * 256 + t] = acc

    @flyc.jit
    def run(out: fx.Int64, blocks: fx.Int32):
        kernel(out).launch(grid=(blocks,), block=(256,))

    return run


@functools.cache
def buffer_copy():
    """Copies n floats through buffer descriptors of n * 4 bytes; the grid covers more than n."""

    @flyc.kernel(name="test_buffer_copy")
    def kernel(x: fx.Tensor, y: fx.Tensor, n: fx.Int32):
        i = fx.block_idx.x * 256 + fx.thread_idx.x
        source = fx.rocdl.make_buffer_tensor(x, num_records_bytes=fx.Int64(n) * 4)
        target = fx.rocdl.make_buffer_tensor(y, num_records_bytes=fx.Int64(n) * 4)
        target[i] = source[i] + 1.0

    @flyc.jit
    def run(x: fx.Tensor, y: fx.Tensor, n: fx.Int32, blocks: fx.Int32):
        kernel(x, y, n).launch(grid=(blocks,), block=(256,))

    return run


@functools.cache
def ring():
    """Sends 128 floats to a peer's inbox, raises its flag, waits for the own flag, copies the own inbox."""

    @flyc.kernel(name="test_ring")
    def kernel(
        data: fx.Int64, peer: fx.Int64, peer_flag: fx.Int64, inbox: fx.Int64, flag: fx.Int64, out: fx.Int64
    ):
        t = fx.thread_idx.x
        gp(peer, fx.Float32)[t] = gp(data, fx.Float32)[t]
        fx.memory_fence(ordering=ORDER.Release)
        fx.barrier()
        if t == 0:
            fx.generic_store(
                gp(peer_flag, fx.Uint32), fx.Uint32(1), memory_order=ORDER.Monotonic, syncscope=SYSTEM
            )
            v = fx.generic_load(gp(flag, fx.Uint32), memory_order=ORDER.Monotonic, syncscope=SYSTEM)
            while v == fx.Uint32(0):
                fx.rocdl.s_sleep(1)
                v = fx.generic_load(gp(flag, fx.Uint32), memory_order=ORDER.Monotonic, syncscope=SYSTEM)
        fx.barrier()
        fx.memory_fence(ordering=ORDER.Acquire)
        gp(out, fx.Float32)[t] = fx.generic_load(gp(inbox, fx.Float32) + t, volatile=True)

    @flyc.jit
    def run(
        data: fx.Int64, peer: fx.Int64, peer_flag: fx.Int64, inbox: fx.Int64, flag: fx.Int64, out: fx.Int64
    ):  # fmt: skip
        kernel(data, peer, peer_flag, inbox, flag, out).launch(grid=(1,), block=(128,))

    return run


@functools.cache
def count_at_peers():
    """Lane i adds lane + 1 to the counter at peers[i % n]; out[lane] is what was there."""

    @flyc.kernel(name="test_count_at_peers")
    def kernel(peers: fx.Int64, out: fx.Int64, n: fx.Int32):
        lane = fx.thread_idx.x
        counter = gp(gp(peers, fx.Int64)[lane % n], fx.Int32)
        before = fx.atomic_add(counter, lane + 1, ordering=ORDER.Monotonic, syncscope=SYSTEM)
        gp(out, fx.Int32)[lane] = before

    @flyc.jit
    def run(peers: fx.Int64, out: fx.Int64, n: fx.Int32):
        kernel(peers, out, n).launch(grid=(1,), block=(64,))

    return run
