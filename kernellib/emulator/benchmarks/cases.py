# SPDX-License-Identifier: Apache-2.0
"""The benchmark's kernels, with inputs and an independent check of what they computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

POISON = float("nan")
EPS = 1e-6
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class WrongResultError(RuntimeError):
    """A benchmark kernel computed something else than its reference: its rate means nothing."""


@dataclass(frozen=True)
class Prepared:
    """A case ready to run.

    Attributes:
        launcher, arguments: FlyDSL launcher and what it is called with.
        tensors: what the arguments point at (kept alive, and registered with the session).
        error: largest error of the output relative to what is allowed; at most 1 is right.
        poison: overwrite the output.
    """

    launcher: Callable[..., Any]
    arguments: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    error: Callable[[], float]
    poison: Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One benchmark: `target` is the least rate wanted of it, in `unit` per second."""

    name: str
    what: str
    unit: str
    target: float
    prepare: Callable[[int], Prepared]


def _addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _relative(got: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor) -> float:
    """Largest |got - wanted| / allowed; infinite where got is not finite."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float(((got.double() - wanted).abs() / allowed).max())


def _prepared(
    launcher: Any,
    arguments: tuple[Any, ...],
    tensors: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    wanted: torch.Tensor,
    allowed: torch.Tensor,
) -> Prepared:
    return Prepared(
        launcher, arguments, tensors, lambda: _relative(out, wanted, allowed), lambda: _poison(out)
    )


def _poison(out: torch.Tensor) -> None:
    out.fill_(POISON)


def prepare_tail(seed: int) -> Prepared:
    """The latent MoE tail at full size, in its default configuration."""
    import flydsl.expr as fx  # noqa: PLC0415  (the compiler takes seconds to load)

    from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG  # noqa: PLC0415
    from kernellib.ops.latent_moe_tail.kernel_gfx950 import build  # noqa: PLC0415
    from kernellib.ops.latent_moe_tail.reference import make_inputs, oracle_f64  # noqa: PLC0415

    inputs = make_inputs(seed)
    out = torch.full((1, inputs.shared.shape[-1]), POISON, dtype=torch.bfloat16)
    p, wanted = (torch.as_tensor(value).double().reshape(1, -1) for value in oracle_f64(*inputs, EPS))
    # one unit in the last place of bf16 at the larger of the projection and the result
    allowed = torch.maximum(p.abs(), wanted.abs()) * 2.0**-7
    arguments = (*_addresses(*inputs, out), EPS, fx.Stream(None))
    return _prepared(build(DEFAULT_CONFIG), arguments, (*inputs, out), out, wanted, allowed)


def prepare_gemm_bf16(seed: int, size: int = 256) -> Prepared:
    """bf16 [size, size] times bf16 [size, size] transposed."""
    from kernellib.emulator.benchmarks.gemm_bf16_gfx950 import build  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, size, generator=generator).bfloat16() for _ in range(2))
    out = torch.full((size, size), POISON)
    wanted, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    arguments = (*_addresses(a, b, out), size, size, size)
    return _prepared(build(), arguments, (a, b, out), out, wanted, magnitude * 2.0**-21)


def _mx_operand(generator: torch.Generator, size: int, fp4: bool) -> tuple[torch.Tensor, ...]:
    """(raw bytes, E8M0 bytes [size, size / 32], float64 values [size, size]), at random."""
    exponents = torch.randint(120, 135, (size, size // 32), generator=generator)
    scale = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    if fp4:
        codes = torch.randint(0, 16, (size, size), generator=generator)
        table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)
        return (
            (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
            exponents.to(torch.uint8),
            table[codes] * scale,
        )
    raw = torch.randn(size, size, generator=generator).to(torch.float8_e4m3fn)
    return raw, exponents.to(torch.uint8), raw.double() * scale


def prepare_gemm_a8w4(seed: int, size: int = 256) -> Prepared:
    """e4m3 [size, size] times e2m1 [size, size] transposed, each with E8M0 scales per 32 of K."""
    from kernellib.emulator.benchmarks.gemm_a8w4_gfx950 import build  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    a, scale_a, left = _mx_operand(generator, size, fp4=False)
    b, scale_b, right = _mx_operand(generator, size, fp4=True)
    out = torch.full((size, size), POISON)
    arguments = (*_addresses(a, scale_a, b, scale_b, out), size, size, size)
    tensors = (a, scale_a, b, scale_b, out)
    allowed = left.abs() @ right.abs().T * 2.0**-21
    return _prepared(build(), arguments, tensors, out, left @ right.T, allowed)


def prepare_rmsnorm(seed: int, rows: int = 4096, cols: int = 8192) -> Prepared:
    """RMSNorm of bf16 [rows, cols]."""
    from kernellib.emulator.benchmarks.rmsnorm_gfx950 import build  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator).bfloat16()
    weight = torch.randn(cols, generator=generator).bfloat16()
    out = torch.full((rows, cols), POISON, dtype=torch.bfloat16)
    values = x.float()
    wanted = values * torch.rsqrt(values.square().mean(1, keepdim=True) + EPS) * weight.float()
    arguments = (*_addresses(x, weight, out), rows, EPS)
    # one rounding to bf16 is at most 2^-8 of the value, fp32 steps before it
    allowed = wanted.abs() * 2.0**-8 * 1.01 + 1e-6
    return _prepared(build(cols), arguments, (x, weight, out), out, wanted, allowed)


LANES, FLOPS = "lane instructions", "matrix FLOP"
CASES = {
    case.name: case
    for case in (
        Case("tail", "latent MoE tail, full size", LANES, 200e6, prepare_tail),
        Case("gemm_bf16", "bf16 GEMM, 256 x 256 x 256", FLOPS, 2e9, prepare_gemm_bf16),
        Case("gemm_a8w4", "scaled fp8 x fp4 GEMM, 256 x 256 x 256", FLOPS, 2e9, prepare_gemm_a8w4),
        Case("rmsnorm", "bf16 RMSNorm, 4096 x 8192", LANES, 200e6, prepare_rmsnorm),
    )
}
