# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF005  (device code: Triton's compiler knows no starred expressions)
# mypy: disallow-incomplete-defs=False, disable-error-code="assignment,var-annotated,no-untyped-def"
"""The latent MoE tail for NVIDIA Hopper and newer, in Gluon: copies, layouts and their order made explicit.

Division of work. A program is two warps that share one row at a time: 7 chunks of 512 elements, 16 bytes
a lane. ``programs_per_unit`` programs lie on each multiprocessor for the whole launch; row ``i`` belongs to
program ``i % programs``. Each program keeps ``num_buffers`` rows on their way through shared memory by
asynchronous copies, and refills a buffer as soon as it was read.

Order of requests. The norm's inputs, then the copies of the first rows: memory works through the weight while
the norm is computed. Registers that hold the norm's inputs go through shared memory and back, behind the
copies; the compiler would otherwise move arithmetic on them before the copies, and wait there.

Launches overlap (programmatic dependent launch, PTX ISA ``griddepcontrol``): the next kernel's programs
may start when this kernel's exit, and what they do before ``griddepcontrol.wait`` hides the launch. They
wait before the first access to memory, so nothing is read that a kernel before may still write; a next kernel
that was not launched so waits for the whole grid as usual. Before the wait they only ask for the first rows
in L2: a prefetch is a hint that returns no value (PTX ISA, ``prefetch``), and L2 is where every write of
the GPU lands, so a row that is written in between is read as written.

How much in flight. ``programs_per_unit * num_buffers`` rows on each multiprocessor; more than about 18 (17 MB
on an H200) is slower, and so is a prefetch of more than one row a program (docs/performance.md).

Shared memory is padded until exactly ``programs_per_unit`` programs fit a multiprocessor, so that the next
launch's programs cannot crowd onto the multiprocessors that have room first. The sweeps showed no difference
(docs/performance.md); it is kept so that the division does not depend on who leaves first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .config import LATENT_DIM, MODEL_DIM, ROW_BYTES
from .kernel_triton import TritonConfigError

NUM_WARPS = 2
CHUNK = 512  # elements of a row that the two warps hold in one 16-byte load a lane
PAD_BYTES = 512  # granule of the padding
# The driver keeps 1 KiB of each program's shared memory (CUDA C++ Programming Guide, compute capability
# 9.0), and the sum across the two warps takes a few bytes.
RESERVED_BYTES = 1024 + 256


@dataclass(frozen=True)
class HopperConfig:
    """How ``hopper_tail`` divides the work. Validated and hashable.

    Attributes:
        programs_per_unit: programs resident on each multiprocessor.
        num_buffers: rows that a program keeps on their way.
        prefetch_rows: rows that a program asks for in L2 before it may read memory.
        overlap: whether the next launch may start while this one drains.
        pad: whether shared memory is padded to hold exactly ``programs_per_unit`` programs.

    Raises:
        TritonConfigError: a value of the wrong type or range.
    """

    programs_per_unit: int = 6
    num_buffers: int = 3
    prefetch_rows: int = 1
    overlap: bool = True
    pad: bool = True

    def __post_init__(self) -> None:
        ranges = (("programs_per_unit", 1, 16), ("num_buffers", 1, 8), ("prefetch_rows", 0, 8))
        for field, least, most in ranges:
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= most:
                raise TritonConfigError(f"{field} got {value!r}, wanted an int from {least} to {most}")
        for field in ("overlap", "pad"):
            if type(getattr(self, field)) is not bool:
                raise TritonConfigError(f"{field} got {getattr(self, field)!r}, wanted a bool")

    @property
    def name(self) -> str:
        flags = f"{'_overlap' if self.overlap else ''}{'_pad' if self.pad else ''}"
        return f"hopper_p{self.programs_per_unit}_b{self.num_buffers}_f{self.prefetch_rows}{flags}"

    def _room(self, shared_bytes: int) -> int:
        """Bytes that a program's share leaves beside its buffers; below zero where they do not fit."""
        return shared_bytes // self.programs_per_unit - RESERVED_BYTES - (self.num_buffers + 1) * ROW_BYTES

    def fits(self, shared_bytes: int) -> bool:
        """Whether a multiprocessor with ``shared_bytes`` of shared memory holds the programs."""
        return self._room(shared_bytes) >= 0

    def num_pads(self, shared_bytes: int) -> int:
        """Granules of padding for a multiprocessor with ``shared_bytes`` of shared memory.

        Raises:
            TritonConfigError: the programs do not fit.
        """
        if not self.fits(shared_bytes):
            share = shared_bytes // self.programs_per_unit
            raise TritonConfigError(
                f"programs_per_unit got {self.programs_per_unit}, wanted fewer: {self.num_buffers} buffers "
                f"do not fit {share} bytes, a program's share of {shared_bytes}"
            )
        return self._room(shared_bytes) // PAD_BYTES if self.pad else 0


DEFAULT_CONFIG = HopperConfig()


@gluon.jit
def _inverse_rms(total, eps, dim: gl.constexpr):
    """1 / sqrt(total / dim + eps), each of the three steps rounded once; 0 where total overflowed."""
    reciprocal: gl.constexpr = 1.0 / dim
    mean = total * reciprocal
    mean = gl.fma(gl.fma(-mean, dim * 1.0, total), reciprocal, mean)
    v = mean + eps
    inverse = gl.rsqrt(v)
    root = v * inverse
    root = gl.fma(gl.fma(-root, root, v), 0.5 * inverse, root)
    inverse = gl.fma(gl.fma(-root, inverse, 1.0), inverse, inverse)
    return gl.where(total == float("inf"), 0.0, inverse)


@gluon.jit
def _normalise(x, gamma, eps, dim: gl.constexpr, chunks: gl.constexpr):
    """bf16(x * inverse rms * gamma) by chunks, each product rounded to fp32.

    The last and largest sums of the squares are float64: rounded to fp32 at each step they would miss the
    correctly rounded total about every time, and with it now and then the rounding of an element of n.
    """
    squares = x[0].to(gl.float32) * x[0].to(gl.float32)
    for i in gl.static_range(1, chunks):
        squares += x[i].to(gl.float32) * x[i].to(gl.float32)
    total = gl.sum(squares.to(gl.float64), axis=1).to(gl.float32)
    inverse = _inverse_rms(total, eps, dim)[:, None]
    n = ()
    for i in gl.static_range(chunks):
        n = n + ((x[i].to(gl.float32) * inverse * gamma[i].to(gl.float32)).to(gl.bfloat16),)
    return n


@gluon.jit
def _prefetch_row(weight, row, total_rows: gl.constexpr, dim: gl.constexpr):
    """Asks for a row in L2: 56 lines of 128 bytes, one for each of 64 threads (the last ask twice)."""
    line_layout: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    lines = gl.minimum(gl.arange(0, 64, layout=line_layout), dim // 64 - 1)
    address = (weight + gl.minimum(row, total_rows - 1) * dim + lines * 64).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _request_row(buffers, slot, weight, row, columns, total_rows: gl.constexpr, dim: gl.constexpr):
    """Starts the copy of a row into buffer ``slot``; past the last row nothing is read."""
    valid = ((row < total_rows) & (columns >= 0))[None, :]
    for i in gl.static_range(len(buffers)):
        source = weight + row * dim + (columns + i * columns.shape[0])[None, :]
        async_copy.async_copy_global_to_shared(buffers[i].index(slot), source, mask=valid)
    async_copy.commit_group()


@gluon.jit
def _grid_control(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION + "; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hopper_tail(  # noqa: PLR0912  (compile-time loops and switches)
    routed,
    norm_weight,
    up_weight,
    shared,
    out,
    eps,
    PROGRAMS: gl.constexpr,
    BUFFERS: gl.constexpr,
    PREFETCH: gl.constexpr,
    OVERLAP: gl.constexpr,
    PADS: gl.constexpr,
    CHUNK: gl.constexpr,
    PAD_BYTES: gl.constexpr,
    DIM: gl.constexpr,
    TOTAL_ROWS: gl.constexpr,
):
    """The whole tail; two warps that hold CHUNK = 512 elements of a row side by side."""
    CHUNKS: gl.constexpr = DIM // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 2], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # One allocation for each chunk: the compiler then sees that copies of different chunks do not collide.
    buffers = ()
    stage = ()
    for _ in gl.static_range(CHUNKS):
        buffers = buffers + (gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, 1, CHUNK], flat),)
        stage = stage + (gl.allocate_shared_memory(gl.bfloat16, [1, CHUNK], flat),)
    if PADS > 0:
        padding = gl.allocate_shared_memory(gl.int8, [PADS, PAD_BYTES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first = gl.program_id(0)
    columns = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    rows = first + gl.arange(0, 1, layout=gl.SliceLayout(1, layout))
    if OVERLAP:
        _grid_control("griddepcontrol.launch_dependents")
    for i in gl.static_range(PREFETCH):
        _prefetch_row(up_weight, first + i * PROGRAMS, TOTAL_ROWS, DIM)
    if OVERLAP:
        _grid_control("griddepcontrol.wait")

    x = ()
    gamma = ()
    for i in gl.static_range(CHUNKS):
        x = x + (gl.load(routed + i * CHUNK + columns, eviction_policy="evict_last")[None, :],)
    for i in gl.static_range(CHUNKS):
        gamma = gamma + (gl.load(norm_weight + i * CHUNK + columns, eviction_policy="evict_last")[None, :],)
    # `shared` is requested a row ahead, so that the end of a row does not wait for memory.
    ahead = gl.load(shared + rows, mask=rows < TOTAL_ROWS, other=0.0)
    for i in gl.static_range(BUFFERS):
        _request_row(buffers, i, up_weight, first + i * PROGRAMS, columns, TOTAL_ROWS, DIM)
    staged = ()
    for i in gl.static_range(CHUNKS):
        stage[i].store(x[i])
    for i in gl.static_range(CHUNKS):
        staged = staged + (stage[i].load(layout),)
    n = _normalise(staged, gamma, eps, DIM, CHUNKS)

    slot = 0
    for row in range(first, TOTAL_ROWS, PROGRAMS):
        async_copy.wait_group(BUFFERS - 1)
        total = gl.zeros([1, CHUNK], gl.float32, layout=layout)
        for i in gl.static_range(CHUNKS):
            weight = buffers[i].index(slot).load(layout)
            total += weight.to(gl.float32) * n[i].to(gl.float32)
        _request_row(buffers, slot, up_weight, row + BUFFERS * PROGRAMS, columns, TOTAL_ROWS, DIM)
        p = gl.sum(total, axis=1).to(gl.bfloat16)
        gl.store(
            out + rows, (p.to(gl.float32) + ahead.to(gl.float32)).to(gl.bfloat16), mask=rows < TOTAL_ROWS
        )
        rows += PROGRAMS
        ahead = gl.load(shared + rows, mask=rows < TOTAL_ROWS, other=0.0)
        slot = gl.where(slot + 1 == BUFFERS, 0, slot + 1)
    if PADS > 0:
        padding._keep_alive()


def constants(config: HopperConfig, num_units: int, shared_bytes: int) -> dict[str, Any]:
    """The kernel's compile-time arguments on a GPU of ``num_units`` multiprocessors."""
    return {
        "PROGRAMS": num_units * config.programs_per_unit,
        "BUFFERS": config.num_buffers,
        "PREFETCH": config.prefetch_rows,
        "OVERLAP": config.overlap,
        "PADS": config.num_pads(shared_bytes),
        "CHUNK": CHUNK,
        "PAD_BYTES": PAD_BYTES,
        "DIM": LATENT_DIM,
        "TOTAL_ROWS": MODEL_DIM,
    }


def launch(
    config: HopperConfig, tensors: Sequence[torch.Tensor], eps: float, num_units: int, shared_bytes: int
) -> None:
    """Launches on the current stream. ``tensors``: routed, norm_weight, up_weight, shared, out.

    Raises:
        TritonConfigError: the configuration's programs do not fit a multiprocessor.
    """
    values = constants(config, num_units, shared_bytes)
    hopper_tail[(values["PROGRAMS"],)](
        *tensors, eps, **values, num_warps=NUM_WARPS, launch_pdl=config.overlap
    )
