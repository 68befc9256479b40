# SPDX-License-Identifier: Apache-2.0
"""The latent MoE tail for gfx950 (MI355X), in FlyDSL: one launch, no LDS, no barrier.

    n = bf16(routed * rsqrt(mean(routed^2) + eps) * norm_weight)     [3584], fp32 statistics
    p = bf16(n @ up_weight.T)                                        [7168], fp32 accumulation
    y = bf16(p + shared)                                             [7168]

Division of work. A workgroup is ``waves_per_workgroup`` independent waves of 64 lanes; wave ``w`` of
workgroup ``b`` owns ``rows_per_wave`` consecutive weight rows. A row is seven loads of 16 bytes for
each lane: lane ``l`` holds the elements 512*c + 8*l .. 512*c + 8*l + 7 of chunk ``c``, of ``routed``,
``norm_weight`` and every row alike, so that the dot product needs no exchange until its end. Each
wave computes the norm for itself from 14 KiB that stay in the caches: cheaper than a barrier, which
would hold back the weight stream of the whole workgroup.

Order of requests. Norm inputs first, then the shared elements, then ``rows_in_flight`` rows. Loads
return in order, so the wave waits for the norm inputs, computes ``n`` while the rows fly, and takes row
``r`` with rows ``r+1 ..`` still outstanding. Scheduling barriers keep the compiler to this order. With
preloaded arguments the first request leaves within a dozen instructions of the wave's start. All memory
goes through bounded buffer resources: row offsets are scalar, no lane computes a 64-bit address, and the
one store masks lanes by an offset past the end, without a branch.

Bytes in flight against Little's law. 8 TB/s over 256 compute units is 31.25 bytes per nanosecond each.
The default configuration (4 rows a wave, 7 waves, all 4 rows in flight) has all 200,704 weight bytes of
a compute unit outstanding at once, enough for 8 TB/s at any latency up to 6.4 microseconds. The latency
of MI355X under load is not published; assuming one microsecond (an assumption, meant to lie above an
idle miss to HBM so as to include queueing), 31,250 bytes would do, and every configuration whose
``weight_bytes_in_flight`` times the resident workgroups exceeds that covers it. At 208 registers two
waves fit on a SIMD, eight on a compute unit: a second workgroup of seven does not, so that the 256
workgroups cannot pile up on fewer than 256 units.

Arithmetic. The squares (exact in fp32) are summed in float64 and rounded to fp32 once: ``n`` then has the
same bits whatever the order of summation, in every wave and configuration. From there on every
step rounds to fp32 as PyTorch's rms_norm does on a CPU: sum / 3584, + eps, 1 / sqrt, (routed * r) *
norm_weight, and one rounding to bf16. Division and root are correctly rounded by refinement steps, so no
result depends on the unpublished low bits of the chip's v_rcp_f32 or v_sqrt_f32. The multiply-adds are
fp32 with subnormals kept. v_dot2_f32_bf16 would save the unpacking, but how it rounds between its two
products and whether it keeps subnormals is not published, so it is not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm as mlir_llvm
from flydsl._mlir.dialects import rocdl as mlir_rocdl

from .config import (
    ELEMENT_BYTES,
    LATENT_DIM,
    LOAD_BYTES,
    LOADS_PER_ROW,
    RESULT_BYTES,
    ROW_BYTES,
    WAVE_LANES,
    WAVE_LOAD_BYTES,
    WEIGHT_BYTES,
    WEIGHT_CACHE_BITS,
    TailConfig,
)
from .reference import TailInputs

T = fx.T
ELEMENTS_PER_LOAD = LOAD_BYTES // ELEMENT_BYTES
MAX_LOAD_OFFSET = 4096  # a buffer load's immediate offset has 12 bits
LANES_PER_ROW_OF_LANES = 16  # DPP works within rows of 16 lanes
ROWS_PER_FOLD = WAVE_LANES // LANES_PER_ROW_OF_LANES
# DPP controls that add up 16 lanes: lane ^ 1, lane ^ 2, mirror of 8, mirror of 16.
DPP_SUM_CONTROLS = (0xB1, 0x4E, 0x141, 0x140)
# Past the end of every buffer: the hardware drops a store to it, so lanes are masked without a branch.
MASKED_OFFSET = 0x7FFF_FF00
_SWAPS = {32: mlir_rocdl.permlane32_swap, 16: mlir_rocdl.permlane16_swap}


def _global_pointer(address: fx.Int64, element: Any, align: int) -> Any:
    """A global-memory pointer from a 64-bit address."""
    return fx.inttoptr(fx.PointerType.get(element.ir_type, fx.AddressSpace.Global, align), address)


def _buffer(address: fx.Int64, num_bytes: int) -> Any:
    """A bounded buffer resource: reads past ``num_bytes`` return zero instead of another's data."""
    pointer = _global_pointer(address, fx.BFloat16, LOAD_BYTES)
    return fx.rocdl.get_buffer_rsrc(fx.rocdl.make_buffer_ptr(pointer, num_records_bytes=fx.Int64(num_bytes)))


def _request_row(resource: Any, lane_offset: Any, row_offset: Any, cache_bits: int) -> list[Any]:
    """Requests one row of 7168 bytes, 16 bytes a lane and load; returns seven pending Int32x4.

    ``lane_offset`` (vector) and ``row_offset`` (scalar) are bytes. What exceeds the instruction's
    immediate offset goes to the scalar side, so that no lane computes an address.
    """
    loads = []
    for chunk in range(LOADS_PER_ROW):
        immediate = chunk * WAVE_LOAD_BYTES % MAX_LOAD_OFFSET
        scalar = chunk * WAVE_LOAD_BYTES - immediate
        loads.append(
            fx.Vector(
                fx.rocdl.raw_ptr_buffer_load(
                    T.vec(4, T.i32), resource, lane_offset + immediate, row_offset + scalar, cache_bits
                )
            )
        )
    return loads


def _store(resource: Any, lane_offset: Any, scalar_offset: Any, value: Any) -> None:
    """Rounds each lane's fp32 ``value`` to bf16 and stores it; past the buffer's end nothing is stored."""
    bits = value.to(fx.BFloat16).bitcast(fx.Int16)
    mlir_rocdl.raw_ptr_buffer_store(
        bits.ir_value(),
        resource,
        lane_offset.ir_value(),
        scalar_offset.ir_value(),
        aux=ir.IntegerAttr.get(T.i32, 0),
    )


def _to_pairs(packed: Any) -> list[Any]:
    """Eight bf16 in an Int32x4 -> four Float32x2, exact: element 2j, 2j+1 in pair j."""
    values = packed.bitcast(fx.BFloat16).to(fx.Float32)
    return [values.shuffle(values, [2 * j, 2 * j + 1]) for j in range(ELEMENTS_PER_LOAD // 2)]


def _round_to_bf16(pair: Any) -> Any:
    """Float32x2 -> the same, each value rounded to bf16 (nearest, ties to even)."""
    return pair.to(fx.BFloat16).to(fx.Float32)


def _sum_lanes_of_16(value: Any) -> Any:
    """Every lane gets the sum over its row of 16 lanes."""
    for control in DPP_SUM_CONTROLS:
        value = value + _move_in_row(value.bitcast(fx.Int32), control).bitcast(fx.Float32)
    return value


def _move_in_row(bits: Any, control: int) -> Any:
    """An Int32 from another lane of the same row of 16, chosen by a DPP control."""
    return fx.Int32(mlir_rocdl.update_dpp(T.i32, bits.ir_value(), bits.ir_value(), control, 0xF, 0xF, True))


def _swap(a: Any, b: Any, lanes: int) -> list[Any]:
    """Trades a's odd groups of ``lanes`` lanes for b's even ones; Int32 in and out."""
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    swapped = _SWAPS[lanes](pair, a.ir_value(), b.ir_value(), False, False)
    return [fx.Int32(mlir_llvm.extractvalue(T.i32, swapped, [i])) for i in range(2)]


def _swap_add(a: Any, b: Any, lanes: int) -> Any:
    """Folds two values across halves: a in the even groups of ``lanes`` lanes, b in the odd ones.

    The swap gives [a even, b even] and [a odd, b odd]; their sum holds a's fold in even groups and
    b's in odd ones. With a = b every lane gets the sum of both halves.
    """
    halves = _swap(a.bitcast(fx.Int32), b.bitcast(fx.Int32), lanes)
    return halves[0].bitcast(fx.Float32) + halves[1].bitcast(fx.Float32)


def _sum_rows(partials: Sequence[Any]) -> Any:
    """Up to four lane-wise partial sums -> the full sum of partial q in lanes 16q .. 16q+15."""
    a, b, c, d = (partials[q % len(partials)] for q in range(ROWS_PER_FOLD))
    if len(partials) == 3:
        d = b  # any value does: its lanes are not stored
    return _sum_lanes_of_16(_swap_add(_swap_add(a, c, 32), _swap_add(b, d, 32), 16))


def _halves(value: Any) -> list[Any]:
    """A Float64 as its low and high Int32."""
    bits = value.bitcast(fx.Int64)
    return [bits.to(fx.Int32), (bits >> 32).to(fx.Int32)]


def _from_halves(low: Any, high: Any) -> Any:
    return ((high.to(fx.Int64) << 32) | low.bitcast(fx.Uint32).to(fx.Int64)).bitcast(fx.Float64)


def _sum_wave_f64(value: Any) -> Any:
    """Every lane gets the float64 sum over the wave."""
    for control in DPP_SUM_CONTROLS:
        value = value + _from_halves(*(_move_in_row(half, control) for half in _halves(value)))
    for lanes in (16, 32):
        low, high = (_swap(half, half, lanes) for half in _halves(value))
        value = _from_halves(low[0], high[0]) + _from_halves(low[1], high[1])
    return value


def _inverse_rms(pairs: Sequence[Any], eps: Any) -> Any:
    """1 / sqrt(mean of squares + eps) over the whole wave, the same in every lane.

    A bf16 squared is exact in fp32. The squares are summed in float64 and rounded to fp32 once, so that
    the sum does not depend on its order; from there on every step is rounded to fp32.
    """
    sums = [fx.Float64(0.0), fx.Float64(0.0)]
    for pair in pairs:
        squares = pair * pair
        sums = [sums[i] + squares[i].to(fx.Float64) for i in range(2)]
    total = _sum_wave_f64(sums[0] + sums[1]).to(fx.Float32)
    return fx.rsqrt(total / fx.Float32(float(LATENT_DIM)) + eps)


def _normalise(routed_row: Sequence[Any], gamma_row: Sequence[Any], eps: Any) -> list[list[Any]]:
    """The lane's 56 elements of ``n``, rounded to bf16 and back: seven chunks of four pairs."""
    routed = [_to_pairs(chunk) for chunk in routed_row]
    inverse = _inverse_rms([pair for chunk in routed for pair in chunk], eps)
    return [
        [_round_to_bf16(x * inverse * g) for x, g in zip(chunk, _to_pairs(gamma), strict=True)]
        for chunk, gamma in zip(routed, gamma_row, strict=True)
    ]


def _dot(weight_row: Sequence[Any], n: Sequence[Sequence[Any]]) -> Any:
    """The lane's part of one row's dot product, in two chains of 28 multiply-adds."""
    accumulator = fx.full(2, 0.0, fx.Float32)
    for chunk, n_chunk in zip(weight_row, n, strict=True):
        for weight_pair, n_pair in zip(_to_pairs(chunk), n_chunk, strict=True):
            accumulator = fx.fma(weight_pair, n_pair, accumulator)
    return accumulator[0] + accumulator[1]


@cache
def build(config: TailConfig) -> Callable[..., Any]:
    """The FlyDSL launcher of ``config``: ``launcher(routed, gamma, up, shared, out, eps, stream)``.

    All tensors are passed as 64-bit addresses: the contract has fixed shapes and strides already, and
    this leaves no shape for the kernel to read. Traced and compiled at its first call, not here.
    """
    rows, waves, in_flight = config.rows_per_wave, config.waves_per_workgroup, config.rows_in_flight
    cache_bits = WEIGHT_CACHE_BITS[config.weight_cache]

    @flyc.kernel(name=config.kernel_name, known_block_size=[config.threads_per_workgroup, 1, 1])
    def tail_kernel(
        routed: fx.Int64, gamma: fx.Int64, up: fx.Int64, shared: fx.Int64, out: fx.Int64, eps: fx.Float32
    ) -> None:
        lane = fx.thread_idx.x % WAVE_LANES
        wave = fx.Int32(fx.rocdl.readfirstlane(T.i32, fx.thread_idx.x // WAVE_LANES))
        first_row = (fx.block_idx.x * waves + wave) * rows
        lane_offset = lane * LOAD_BYTES
        quarter = lane // LANES_PER_ROW_OF_LANES  # which of four folded rows this lane will hold

        routed_row = _request_row(_buffer(routed, ROW_BYTES), lane_offset, fx.Int32(0), 0)
        fx.rocdl.sched_barrier(0)
        gamma_row = _request_row(_buffer(gamma, ROW_BYTES), lane_offset, fx.Int32(0), 0)
        fx.rocdl.sched_barrier(0)
        # Requested now, used last: otherwise the end of the kernel would wait for memory once more.
        shared_buffer, first_offset = _buffer(shared, RESULT_BYTES), first_row * ELEMENT_BYTES
        shared_values = []
        for fold in fx.range_constexpr(0, rows, ROWS_PER_FOLD):
            offset = quarter * ELEMENT_BYTES + fold * ELEMENT_BYTES
            shared_values.append(fx.rocdl.raw_ptr_buffer_load(T.i16, shared_buffer, offset, first_offset, 0))
        fx.rocdl.sched_barrier(0)

        weight = _buffer(up, WEIGHT_BYTES)
        requested = []
        for row in fx.range_constexpr(in_flight):
            requested.append(_request_row(weight, lane_offset, (first_row + row) * ROW_BYTES, cache_bits))
            fx.rocdl.sched_barrier(0)

        n = _normalise(routed_row, gamma_row, eps)
        fx.rocdl.sched_barrier(0)

        out_buffer = _buffer(out, RESULT_BYTES)
        partials = []
        for row in fx.range_constexpr(rows):
            partials.append(_dot(requested[row], n))
            fx.rocdl.sched_barrier(0)
            if fx.const_expr(row + in_flight < rows):
                ahead = first_row + row + in_flight
                requested.append(_request_row(weight, lane_offset, ahead * ROW_BYTES, cache_bits))
                fx.rocdl.sched_barrier(0)
            if fx.const_expr(len(partials) == ROWS_PER_FOLD or row == rows - 1):
                fold = row // ROWS_PER_FOLD
                p = _sum_rows(partials).to(fx.BFloat16).to(fx.Float32)
                shared_value = fx.Int16(shared_values[fold]).bitcast(fx.BFloat16).to(fx.Float32)
                offset = quarter * ELEMENT_BYTES + fold * ROWS_PER_FOLD * ELEMENT_BYTES
                is_writer = (lane % LANES_PER_ROW_OF_LANES == 0) & (quarter < len(partials))
                _store(
                    out_buffer,
                    is_writer.select(offset, fx.Int32(MASKED_OFFSET)),
                    first_offset,
                    p + shared_value,
                )
                partials = []
                fx.rocdl.sched_barrier(0)

    @flyc.jit
    def latent_moe_tail_launcher(
        routed: fx.Int64,
        gamma: fx.Int64,
        up: fx.Int64,
        shared: fx.Int64,
        out: fx.Int64,
        eps: fx.Float32,
        stream: fx.Stream,
    ) -> None:
        tail_kernel(routed, gamma, up, shared, out, eps).launch(
            grid=config.num_workgroups, block=config.threads_per_workgroup, stream=stream
        )

    if config.arguments == "preload":
        latent_moe_tail_launcher.compile_hints = {"llvm_options": {"amdgpu-kernarg-preload-count": 16}}
    return latent_moe_tail_launcher


class TailLaunchError(RuntimeError):
    """The kernel could not be launched; nothing was written."""


_compiled: dict[tuple[TailConfig, str], Callable[..., Any]] = {}
_compile_lock = threading.Lock()


def launch(config: TailConfig, inputs: TailInputs, eps: float, out: torch.Tensor, target: str) -> None:
    """Runs the kernel on tensors that satisfy the operator's contract, and writes ``out``.

    The first call for a configuration and target traces and compiles; later ones only pack arguments.
    On a GPU the launch goes to the current stream of the tensors' device and returns at once; capture it
    in a graph to drop the host's cost.

    Args:
        config: which kernel; two configurations never share a compiled one.
        eps: added to the mean of squares, rounded to fp32.
        target: "mi355x", or "emulator" inside an emulated scope. Compiled kernels are not shared between
            them: the emulator's hold assembly text, the GPU's machine code.

    Raises:
        TailLaunchError: the environment asks FlyDSL to compile without running.
    """
    if out.device.type != "cuda":
        _call(config, target, _arguments(inputs, eps, out, None))
        return
    with torch.cuda.device(out.device):
        handle = torch.cuda.current_stream().cuda_stream
        _call(config, target, _arguments(inputs, eps, out, handle))


def _arguments(inputs: TailInputs, eps: float, out: torch.Tensor, stream: int | None) -> tuple[Any, ...]:
    addresses = (tensor.data_ptr() for tensor in (*inputs, out))
    return (*addresses, float(eps), fx.Stream(stream))


def _call(config: TailConfig, target: str, arguments: tuple[Any, ...]) -> None:
    compiled = _compiled.get((config, target))
    if compiled is not None:
        compiled(*arguments)
        return
    with _compile_lock:
        compiled = flyc.compile(build(config), *arguments)  # compiles, and launches once
        if compiled is None:
            raise TailLaunchError("COMPILE_ONLY is set, wanted a launch: unset it to run the kernel")
        _compiled[config, target] = compiled
