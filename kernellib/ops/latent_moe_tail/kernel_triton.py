# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF005  (device code: Triton's compiler knows no starred expressions)
# mypy: disallow-incomplete-defs=False, disable-error-code="assignment,var-annotated,no-untyped-def"
"""The latent MoE tail in Triton: one launch, on any GPU that Triton compiles for.

    n = bf16(routed * rsqrt(mean(routed^2) + eps) * norm_weight)     [3584], fp32 statistics
    p = bf16(n @ up_weight.T)                                        [7168], fp32 accumulation
    y = bf16(p + shared)                                             [7168]

Two kernels with the same rounding points: ``portable_tail`` here, in the Triton language, for ROCm GPUs
and NVIDIA GPUs before Hopper; and kernel_sm90.py, in Gluon (Triton's language with explicit layouts
and copies), for Hopper and newer with as much shared memory. ``launch_triton`` chooses.

Division of work. A program is ``num_warps`` warps, each of which owns one row of a tile: a row of 3584
elements is a whole number of warp-wide loads of 16 bytes a lane (14 of a 32-lane warp, 7 of a 64-lane
one), so the dot product needs no exchange between warps. Tile ``i`` belongs to program ``i % programs``,
so that the whole grid walks the weight in address order. Every warp computes the norm for itself, once:
14 KiB that stay in the caches are cheaper than barriers that hold back the weight stream.

The inverse root is refined to correct rounding with fused multiply-adds: Triton's own ``div_rn`` and
``sqrt_rn`` expand to a subroutine on NVIDIA, around which ptxas spills the loaded weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .config import ELEMENT_BYTES, LATENT_DIM, LOAD_BYTES, MODEL_DIM

ELEMENTS_PER_LOAD = LOAD_BYTES // ELEMENT_BYTES
SUPPORTED_WARP_LANES = (32, 64)
GFX950_UNITS = 256
_ARGUMENTS = {
    "routed": "*bf16",
    "norm_weight": "*bf16",
    "up_weight": "*bf16",
    "shared": "*bf16",
    "out": "*bf16",
}


class TritonConfigError(ValueError):
    """A Triton kernel configuration that cannot run; says which field, what it got, what was wanted."""


@dataclass(frozen=True)
class PortableConfig:
    """How ``portable_tail`` divides the work. Validated and hashable.

    Attributes:
        num_warps: warps in a program, a power of two; each owns one row of the program's tiles.
        programs_per_unit: programs for each multiprocessor or compute unit.
        num_stages: depth of the weight's software pipeline: 1 loads to registers where the data is used,
            n > 1 keeps n - 1 tiles on their way through shared memory.

    Raises:
        TritonConfigError: a value of the wrong type or range.
    """

    num_warps: int = 2
    programs_per_unit: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for field, most in (("num_warps", 16), ("programs_per_unit", 32), ("num_stages", 8)):
            value = getattr(self, field)
            if type(value) is not int or not 1 <= value <= most:
                raise TritonConfigError(f"{field} got {value!r}, wanted an int from 1 to {most}")
        if self.num_warps & (self.num_warps - 1):
            raise TritonConfigError(f"num_warps got {self.num_warps}, wanted a power of two")

    @property
    def name(self) -> str:
        return f"portable_w{self.num_warps}_p{self.programs_per_unit}_s{self.num_stages}"


# NVIDIA before Hopper, or with less shared memory: as measured best of the portable kernels on an H200
# (docs/performance.md).
CUDA_CONFIG = PortableConfig()
# ROCm: 256 compute units x 7 programs x 2 warps x 2 rows = 7168 rows exactly, 100 KB in flight on each unit.
# Not measured on an AMD GPU.
ROCM_CONFIG = PortableConfig(num_warps=2, programs_per_unit=7, num_stages=1)


@triton.jit
def _inverse_rms(total, eps, dim: tl.constexpr):
    """1 / sqrt(total / dim + eps), each of the three steps rounded once; 0 where total overflowed."""
    reciprocal: tl.constexpr = 1.0 / dim
    mean = total * reciprocal
    mean = tl.fma(tl.fma(-mean, dim * 1.0, total), reciprocal, mean)
    v = mean + eps
    inverse = tl.rsqrt(v)
    root = v * inverse
    root = tl.fma(tl.fma(-root, root, v), 0.5 * inverse, root)
    inverse = tl.fma(tl.fma(-root, inverse, 1.0), inverse, inverse)
    return tl.where(total == float("inf"), 0.0, inverse)


@triton.jit
def _load_vector(pointer, rows: tl.constexpr, chunk: tl.constexpr, dim: tl.constexpr):
    """A [dim] vector as chunks of [rows, chunk]: each warp reads all of it, in the weight's layout."""
    offsets = tl.arange(0, chunk)[None, :] + tl.zeros([rows, 1], tl.int32)
    values = ()
    for i in tl.static_range(dim // chunk):
        values = values + (tl.load(pointer + i * chunk + offsets, eviction_policy="evict_last"),)
    return values


@triton.jit
def _normalise(x, gamma, eps, dim: tl.constexpr, chunks: tl.constexpr):
    """bf16(x * inverse rms * gamma) by chunks, each product rounded to fp32.

    The last and largest sums of the squares are float64: rounded to fp32 at each step they would miss the
    correctly rounded total about every time, and with it now and then the rounding of an element of n.
    """
    squares = x[0].to(tl.float32) * x[0].to(tl.float32)
    for i in tl.static_range(1, chunks):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    total = tl.sum(squares.to(tl.float64), axis=1).to(tl.float32)
    inverse = _inverse_rms(total, eps, dim)[:, None]
    n = ()
    for i in tl.static_range(chunks):
        n = n + ((x[i].to(tl.float32) * inverse * gamma[i].to(tl.float32)).to(tl.bfloat16),)
    return n


@triton.jit
def _dot_rows(pointer, rows, valid, n, chunk: tl.constexpr, dim: tl.constexpr, exact: tl.constexpr):
    """fp32 [rows]: n times the weight's ``rows``; each row lies in one warp."""
    columns = tl.arange(0, chunk)
    total = tl.zeros([rows.shape[0], chunk], tl.float32)
    for i in tl.static_range(dim // chunk):
        source = pointer + rows[:, None] * dim + (i * chunk + columns)[None, :]
        if exact:
            weight = tl.load(source, eviction_policy="evict_first")
        else:
            weight = tl.load(source, mask=valid[:, None], other=0.0, eviction_policy="evict_first")
        total += weight.to(tl.float32) * n[i].to(tl.float32)
    return tl.sum(total, axis=1)


@triton.jit
def portable_tail(
    routed,
    norm_weight,
    up_weight,
    shared,
    out,
    eps,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    TOTAL_ROWS: tl.constexpr,
):
    """The whole tail. ROWS is the number of warps, CHUNK the elements of a warp-wide 16-byte load."""
    STEP: tl.constexpr = PROGRAMS * ROWS
    EXACT: tl.constexpr = TOTAL_ROWS % STEP == 0
    first = tl.program_id(0) * ROWS
    lane_rows = tl.arange(0, ROWS)
    x = _load_vector(routed, ROWS, CHUNK, DIM)
    gamma = _load_vector(norm_weight, ROWS, CHUNK, DIM)
    n = _normalise(x, gamma, eps, DIM, DIM // CHUNK)
    # `shared` is requested a tile ahead, so that the end of a tile does not wait for memory.
    rows = first + lane_rows
    ahead = tl.load(shared + rows, mask=rows < TOTAL_ROWS, other=0.0)
    for base in tl.range(first, TOTAL_ROWS, STEP, num_stages=STAGES):
        rows = base + lane_rows
        valid = rows < TOTAL_ROWS
        p = _dot_rows(up_weight, rows, valid, n, CHUNK, DIM, EXACT).to(tl.bfloat16)
        y = (p.to(tl.float32) + ahead.to(tl.float32)).to(tl.bfloat16)
        tl.store(out + rows, y, mask=valid)
        ahead = tl.load(shared + rows + STEP, mask=rows + STEP < TOTAL_ROWS, other=0.0)


def _constants(config: PortableConfig, num_units: int, warp_lanes: int) -> dict[str, int]:
    return {
        "PROGRAMS": num_units * config.programs_per_unit,
        "ROWS": config.num_warps,
        "CHUNK": warp_lanes * ELEMENTS_PER_LOAD,
        "STAGES": config.num_stages,
        "DIM": LATENT_DIM,
        "TOTAL_ROWS": MODEL_DIM,
    }


@cache
def _device(index: int) -> tuple[int, int, int, bool]:
    """(multiprocessors, lanes of a warp, shared memory bytes of a multiprocessor, Hopper or newer)."""
    properties = torch.cuda.get_device_properties(index)
    hopper = torch.version.hip is None and properties.major >= 9
    shared_bytes = int(getattr(properties, "shared_memory_per_multiprocessor", 0))
    return int(properties.multi_processor_count), int(properties.warp_size), shared_bytes, hopper


def default_config(index: int = 0) -> Any:
    """The configuration ``launch_triton`` uses on GPU ``index``: a HopperConfig or a PortableConfig."""
    _, _, shared_bytes, hopper = _device(index)
    if hopper:
        from .kernel_sm90 import DEFAULT_CONFIG  # noqa: PLC0415  (Gluon is loaded where it is used)

        # Newer GPUs may have less: 100 KiB where compute capability is 12.0, in which it does not fit.
        if DEFAULT_CONFIG.fits(shared_bytes):
            return DEFAULT_CONFIG
    return ROCM_CONFIG if torch.version.hip is not None else CUDA_CONFIG


def launch_triton(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    config: Any = None,
) -> None:
    """Launches the tail on the current stream and writes ``out``; the arguments satisfy the contract.

    The first call for a configuration compiles; capture later ones in a graph to drop the host's cost.

    Args:
        routed: bf16 [1, 3584]; norm_weight: bf16 [3584]; up_weight: bf16 [7168, 3584];
            shared, out: bf16 [1, 7168]; contiguous, 16-byte aligned, on one GPU.
        eps: added to the mean of squares, rounded to fp32.
        config: a ``PortableConfig`` or, on Hopper and newer, a ``kernel_sm90.HopperConfig``; None takes
            ``default_config``.

    Raises:
        TritonConfigError: the GPU cannot run this configuration.
    """
    index = out.device.index
    num_units, warp_lanes, shared_bytes, hopper = _device(index)
    config = default_config(index) if config is None else config
    with torch.cuda.device(out.device):
        if isinstance(config, PortableConfig):
            if warp_lanes not in SUPPORTED_WARP_LANES:
                wanted = " or ".join(map(str, SUPPORTED_WARP_LANES))
                raise TritonConfigError(f"the GPU's warp has {warp_lanes} lanes, wanted {wanted}")
            constants = _constants(config, num_units, warp_lanes)
            portable_tail[(constants["PROGRAMS"],)](
                routed, norm_weight, up_weight, shared, out, eps, **constants, num_warps=config.num_warps
            )
            return
        if not hopper:
            raise TritonConfigError(
                f"config got {config!r}, wanted a PortableConfig: the GPU is not a Hopper"
            )
        from . import kernel_sm90  # noqa: PLC0415

        kernel_sm90.launch(
            config, (routed, norm_weight, up_weight, shared, out), eps, num_units, shared_bytes
        )


@dataclass(frozen=True)
class Gfx950Listing:
    """``portable_tail`` as Triton's AMD backend compiles it for gfx950.

    Attributes:
        assembly: the listing, with descriptor and metadata.
        kernel: the kernel's symbol.
        num_programs: workgroups to launch.
        threads: threads of a workgroup.
        lds_bytes: dynamic LDS of a workgroup (0 where the listing's static amount says it all).
    """

    assembly: str
    kernel: str
    num_programs: int
    threads: int
    lds_bytes: int


def compile_gfx950(config: PortableConfig = ROCM_CONFIG) -> Gfx950Listing:
    """Compiles ``portable_tail`` for an MI355X to assembly text. Needs Triton, but no GPU and no ROCm.

    Arguments of the compiled kernel, in order: routed, norm_weight, up_weight, shared, out (addresses),
    eps (fp32), then two scratch addresses that it does not use.

    Example:
        >>> compile_gfx950().num_programs
        1792
    """
    constants = _constants(config, GFX950_UNITS, 64)
    names = portable_tail.arg_names
    signature = {**_ARGUMENTS, "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=portable_tail,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in _ARGUMENTS},
    )
    compiled = triton.compile(
        source, target=GPUTarget("hip", "gfx950", 64), options={"num_warps": config.num_warps}
    )
    return Gfx950Listing(
        assembly=compiled.asm["amdgcn"],
        kernel=compiled.metadata.name,
        num_programs=constants["PROGRAMS"],
        threads=64 * config.num_warps,
        lds_bytes=compiled.metadata.shared,
    )
