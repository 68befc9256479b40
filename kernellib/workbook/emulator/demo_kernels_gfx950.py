# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""Small kernels with one fault each, and their repaired twins: ``build(broken)`` gives either.

One workgroup of 128 lanes (two waves) unless said otherwise; ``x`` and ``out`` are addresses.
"""

import functools
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm as mlir_llvm
from flydsl.expr.rocdl import cdna4

T = fx.T
ORDER = fx.AtomicOrdering
AGENT = fx.rocdl.SyncScope.Agent


def gp(addr, ty, align=None):
    """Global pointer from a raw 64-bit address."""
    space = fx.AddressSpace.Global
    return fx.inttoptr(fx.PointerType.get(ty.ir_type, space, align or max(1, ty.width // 8)), addr)


def shared(ty, count):
    """A static LDS array."""
    return fx.SharedAllocator().allocate(fx.Array[ty, count, 16]).peek()


def _name(topic: str, broken: bool) -> str:
    return f"demo_{topic}_{'broken' if broken else 'repaired'}"


def _launcher(kernel: Any, blocks: int = 1, block: int = 128) -> Any:
    @flyc.jit
    def run(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        kernel(x, out, n).launch(grid=blocks, block=block)

    return run


@functools.cache
def past_the_end(broken: bool) -> Any:
    """Copies n floats; the broken guard lets one lane too many through."""

    @flyc.kernel(name=_name("past_the_end", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        if t < n + int(broken):
            gp(out, fx.Float32)[t] = gp(x, fx.Float32)[t]

    return _launcher(kernel)


@functools.cache
def no_wait(broken: bool) -> Any:
    """Sums two floats that a direct-to-LDS load brings; broken: read before the load was waited for."""

    @flyc.kernel(name=_name("no_wait", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        tile = shared(fx.Float32, 128)
        wave = fx.Int32(fx.rocdl.readfirstlane(T.i32, t >> 6))
        copy = fx.make_copy_atom(cdna4.GlobalLoadAsyncLDS32b(), fx.Float32)
        source = fx.make_view(gp(x, fx.Float32, 4) + t, fx.make_layout(1, 1))
        fx.copy(copy, source, fx.make_view(tile.ptr + wave * 64, fx.make_layout(1, 1)))
        fx.rocdl.asyncmark()
        if fx.const_expr(not broken):
            fx.rocdl.wait_asyncmark(0)
        fx.barrier()
        gp(out, fx.Float32)[t] = tile[t] + tile[t ^ 1]

    return _launcher(kernel)


@functools.cache
def crooked_atomic(broken: bool) -> Any:
    """Adds to a 64-bit counter; broken: at an address that is no multiple of 8."""

    @flyc.kernel(name=_name("crooked_atomic", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        place = gp(out + fx.Int64(4 if broken else 8) + fx.Int64(fx.thread_idx.x) * 8, fx.Int64, 8)
        fx.atomic_add(place, fx.Int64(1), syncscope=AGENT)

    return _launcher(kernel, block=64)


@functools.cache
def matrix_result(_: bool) -> Any:
    """Stores a matrix product as soon as it may: the compiler puts s_nop between."""

    @flyc.kernel(name="demo_matrix_result")
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        a = fx.generic_load(gp(x, fx.BFloat16, 16) + t * 8, count=8)
        c = fx.Vector(fx.rocdl.mfma_f32_16x16x32_bf16(T.vec(4, T.f32), [a, a, fx.full(4, 0.0, fx.Float32)]))
        fx.generic_store(gp(out, fx.Float32, 16) + t * 4, c + 1.0)

    return _launcher(kernel, block=64)


@functools.cache
def parted_barrier(broken: bool) -> Any:
    """Both waves meet at a barrier; broken: some lanes are switched off there."""

    @flyc.kernel(name=_name("parted_barrier", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        tile = shared(fx.Float32, 128)
        tile[t] = gp(x, fx.Float32)[t]
        if fx.const_expr(broken):  # noqa: SIM102 (decided while tracing)
            if t % 64 < 40:
                fx.barrier()
        if fx.const_expr(not broken):
            fx.barrier()
        gp(out, fx.Float32)[t] = tile[t ^ 64]

    return _launcher(kernel)


@functools.cache
def stale_register(broken: bool) -> Any:
    """Inline assembly that gives a register; broken: it never writes it."""
    text = "; nothing" if broken else "v_mov_b32 $0, 1.0"

    @flyc.kernel(name=_name("stale_register", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        value = fx.Float32(mlir_llvm.inline_asm(T.f32, [], text, "=v", has_side_effects=True))
        gp(out, fx.Float32)[t] = value + gp(x, fx.Float32)[t]

    return _launcher(kernel)


@functools.cache
def half_filled_lds(broken: bool) -> Any:
    """Reads 128 floats of LDS; broken: only 100 of them were written."""

    @flyc.kernel(name=_name("half_filled_lds", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        tile = shared(fx.Float32, 128)
        if t < (100 if broken else 128):
            tile[t] = gp(x, fx.Float32)[t]
        fx.barrier()
        gp(out, fx.Float32)[t] = tile[t ^ 64]

    return _launcher(kernel)


@functools.cache
def adds_to_garbage(broken: bool) -> Any:
    """Adds to an output that torch.empty made; repaired: sets it."""

    @flyc.kernel(name=_name("adds_to_garbage", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        value = gp(x, fx.Float32)[t]
        if fx.const_expr(broken):
            value = value + gp(out, fx.Float32)[t]
        gp(out, fx.Float32)[t] = value

    return _launcher(kernel)


@functools.cache
def no_barrier(broken: bool) -> Any:
    """Exchanges two waves' halves through LDS; broken: without the barrier."""

    @flyc.kernel(name=_name("no_barrier", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        tile = shared(fx.Float32, 128)
        tile[t] = gp(x, fx.Float32)[t]
        if fx.const_expr(not broken):
            fx.barrier()
        gp(out, fx.Float32)[t] = tile[t ^ 64]

    return _launcher(kernel)


@functools.cache
def no_release(broken: bool) -> Any:
    """Workgroup 0 writes a row and raises a flag, workgroup 1 waits and copies it; broken: no fences.

    ``out``: 64 floats to copy to, 64 of the row, then the flag.
    """

    @flyc.kernel(name=_name("no_release", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        t = fx.thread_idx.x
        row, flag = gp(out + fx.Int64(256), fx.Float32), gp(out + fx.Int64(512), fx.Int32)
        if fx.block_idx.x == 0:
            row[t] = gp(x, fx.Float32)[t]
            if fx.const_expr(not broken):
                fx.memory_fence(ordering=ORDER.Release, syncscope=AGENT)
            fx.generic_store(flag, fx.Int32(1), memory_order=ORDER.Monotonic, syncscope=AGENT)
        if fx.block_idx.x == 1:
            seen = fx.generic_load(flag, memory_order=ORDER.Monotonic, syncscope=AGENT)
            while seen == 0:
                fx.rocdl.s_sleep(1)
                seen = fx.generic_load(flag, memory_order=ORDER.Monotonic, syncscope=AGENT)
            if fx.const_expr(not broken):
                fx.memory_fence(ordering=ORDER.Acquire, syncscope=AGENT)
            gp(out, fx.Float32)[t] = row[t]

    return _launcher(kernel, blocks=2, block=64)


@functools.cache
def nobody_signals(broken: bool) -> Any:
    """Waits for a flag; broken: nobody raises it."""

    @flyc.kernel(name=_name("nobody_signals", broken))
    def kernel(x: fx.Int64, out: fx.Int64, n: fx.Int32) -> None:
        flag = gp(out, fx.Int32)
        if fx.block_idx.x == 0:
            seen = fx.generic_load(flag, memory_order=ORDER.Monotonic, syncscope=AGENT)
            while seen == 0:
                fx.rocdl.s_sleep(1)
                seen = fx.generic_load(flag, memory_order=ORDER.Monotonic, syncscope=AGENT)
        if fx.const_expr(not broken):  # noqa: SIM102 (decided while tracing)
            if fx.block_idx.x == 1:
                fx.generic_store(flag, fx.Int32(1), memory_order=ORDER.Monotonic, syncscope=AGENT)

    return _launcher(kernel, blocks=2, block=64)
