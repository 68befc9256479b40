# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel beside the FlyDSL kernel: both compiled for gfx950, run on the emulator, and counted.

Triton's AMD backend compiles the very kernel that target "cuda" runs on ROCm GPUs. The two compilers
share nothing above LLVM, so equal results are evidence for both kernels and for the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernellib.numerics import ErrorReport
from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.config import WEIGHT_BYTES
from kernellib.ops.latent_moe_tail.reference import TailInputs, against_oracle, make_inputs, oracle_f64

from ..artifact import Claim
from ..display import HtmlTable
from .correctness import poisoned_output
from .counters import TENSORS, LaunchCounts, TensorTraffic, count_launch, summarise

MIN_BIT_EQUAL = 0.995
MAX_ULP = 1.0


@dataclass(frozen=True)
class TritonComparison:
    """Both kernels on the same inputs.

    Attributes:
        flydsl, triton: the counters of one launch of each.
        num_different: outputs whose bits differ between the two kernels, of 7168.
        against_oracle: the Triton kernel's error.
    """

    flydsl: LaunchCounts
    triton: LaunchCounts
    num_different: int
    against_oracle: ErrorReport


def run_triton_on_emulator(inputs: TailInputs, eps: float = 1e-6) -> tuple[torch.Tensor, LaunchCounts]:
    """Compiles the Triton kernel for gfx950, runs it on the emulator; returns (bf16 [1, 7168], counters).

    Args:
        inputs: CPU tensors that satisfy the operator's contract.

    Raises:
        ImportError: the package triton is not installed.
        EmulatorError: the emulator found a fault in the compiled kernel.
    """
    from kernellib.emulator import run_assembly  # noqa: PLC0415  (only where something is to be counted)
    from kernellib.ops.latent_moe_tail.kernel_triton import compile_gfx950  # noqa: PLC0415  (optional)

    listing = compile_gfx950()
    _, out = poisoned_output("cpu")
    tensors = dict(zip(TENSORS, (*inputs, out), strict=True))
    no_scratch = (0, 0)
    report = run_assembly(
        listing.assembly,
        listing.kernel,
        listing.num_programs,
        listing.threads,
        [*tensors.values(), float(eps), *no_scratch],
        dynamic_lds_bytes=listing.lds_bytes,
        track=list(tensors.values()),
    )
    traffic = []
    for name, tensor in tensors.items():
        seen = report.bytes_of(tensor)
        verb = "store" if name == "out" else "load"
        often = (seen[f"{verb}_min"], seen[f"{verb}_max"])
        traffic.append(TensorTraffic(name, seen["load"], seen["store"], often))
    return out, summarise([report], traffic)


def compare_triton(seed: int = 0) -> TritonComparison:
    """Runs both kernels on ``make_inputs(seed)`` and compares results and counters."""
    inputs = make_inputs(seed)
    result, counts = run_triton_on_emulator(inputs)
    flydsl_result = latent_moe_tail(*inputs, target="emulator")
    p, y = oracle_f64(*inputs)
    return TritonComparison(
        flydsl=count_launch(seed),
        triton=counts,
        num_different=int((result.view(torch.int16) != flydsl_result.view(torch.int16)).sum()),
        against_oracle=against_oracle(result, p, y, inputs.shared),
    )


def comparison_claims(comparison: TritonComparison) -> list[Claim]:
    """That the Triton kernel computes the operator, and asks for each weight byte once."""
    report, weight = comparison.against_oracle, comparison.triton.of("up_weight")
    num_outputs = report.num_elements
    equal = 1 - comparison.num_different / num_outputs
    return [
        Claim.check(
            "the Triton kernel agrees with the FlyDSL kernel",
            equal >= MIN_BIT_EQUAL and report.judged_ulp_error <= MAX_ULP,
            f"{comparison.num_different} of {num_outputs} outputs differ; {report.judged_ulp_error:.3g} ulp "
            f"from the oracle at most, wanted {MAX_ULP:g}",
            "checked",
        ),
        Claim.check(
            "the Triton kernel requests every weight byte exactly once",
            weight.loaded_bytes == WEIGHT_BYTES and weight.requests_per_byte == (1, 1),
            f"{weight.loaded_bytes:,} bytes requested of {WEIGHT_BYTES:,}, each between "
            f"{weight.requests_per_byte[0]} and {weight.requests_per_byte[1]} times",
            "counted",
        ),
    ]


def comparison_table(comparison: TritonComparison) -> HtmlTable:
    """The two kernels' counters side by side."""
    sides = (comparison.flydsl, comparison.triton)

    def row(label: str, values: Sequence[float | int | str]) -> list[float | int | str]:
        return [label, *values]

    classes = list(comparison.flydsl.instructions)
    rows = [
        row("workgroups", [side.num_workgroups for side in sides]),
        row("waves", [side.num_waves for side in sides]),
        row("weight bytes requested", [side.of("up_weight").loaded_bytes for side in sides]),
        row("bytes requested in 16-byte loads", [side.loads_by_width.get(16, 0) for side in sides]),
        row("vector registers a lane", [side.vgprs for side in sides]),
        row("LDS a workgroup (bytes)", [side.lds_bytes for side in sides]),
        row("scratch a lane (bytes)", [side.scratch_bytes for side in sides]),
        row("waves on a SIMD that the registers allow", [side.waves_per_simd for side in sides]),
        *[row(f"{name} instructions", [side.instructions[name] for side in sides]) for name in classes],
        row("weight bytes for each instruction", [WEIGHT_BYTES / side.num_instructions for side in sides]),
    ]
    return HtmlTable(
        ["quantity", comparison.flydsl.kernel_name, comparison.triton.kernel_name],
        rows,
        "The FlyDSL kernel and the Triton kernel, both compiled for gfx950",
        "counted",
    )
