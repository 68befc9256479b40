# SPDX-License-Identifier: Apache-2.0
"""Notebook 01: the fused tail against the production chain and a float64 oracle.

Every case runs the operator at its full size into a poisoned buffer with guards around it, and asks:
is each element written, near the oracle, not-a-number exactly where the chain has it so; are the
inputs and the guards untouched?

Thresholds (per output, with one unit in the last place taken at the larger of |p| and |y|, since p's
last bit shows where the add cancels): at most 1 ulp from the oracle, or equal to bf16(p' + shared) for p' one
of the two bf16 values next to the oracle's p (``reference.against_oracle`` says why); at least 99.5 % of
outputs equal to the oracle bit by bit; relative RMSE at most 5e-4. The last two hold over normal values: a
subnormal has so few significant bits that one ulp is already a large relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernellib.numerics.bf16 import bf16_ulp, bits_from_bf16, to_float64
from kernellib.numerics.errors import ErrorReport, bit_equal, compare
from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.config import MODEL_DIM, TailConfig
from kernellib.ops.latent_moe_tail.reference import (
    INPUT_KINDS,
    InputKind,
    TailInputs,
    against_oracle,
    make_inputs,
    oracle_f64,
    production_chain,
)
from kernellib.targets import TargetInfo

from ..artifact import Claim

MAX_ULP = 1.0
ULP_CLAIM = "every output within one ulp of the oracle, or bf16(p' + shared) for a bf16 neighbour p' of its p"
MIN_BIT_EQUAL = 0.995
MAX_RELATIVE_RMSE = 5e-4
# Kinds whose every value is finite and normal, where a relative error means something.
NORMAL_RANGE_KINDS: tuple[InputKind, ...] = ("normal", "large", "tiny")
NONFINITE_KINDS: tuple[InputKind, ...] = ("one_nan", "one_inf")

# A NaN that no arithmetic produces: an element that still holds it was never written.
POISON_BITS = 0x7FA5
GUARD_ELEMENTS = 64  # before and after the output; 128 bytes, so that the output stays aligned


@dataclass(frozen=True)
class Case:
    """One set of inputs: ``make_inputs(seed, kind)``."""

    kind: InputKind
    seed: int


@dataclass(frozen=True)
class CaseResult:
    """What one case showed.

    Attributes:
        case: its inputs.
        oracle: the fused result against the oracle.
        chain: the fused result against the production chain, both rounding where they round.
        chain_oracle: the production chain against the oracle, as a yardstick.
        num_unwritten: output elements that still hold the poison.
        guards_intact: whether nothing outside the output was written.
        inputs_unchanged: whether every input has the bits it had.
        ulp_errors: signed error of each finite output against the oracle, in ulp as above.
        chain_ulp_errors: the same for the production chain.
    """

    case: Case
    oracle: ErrorReport
    chain: ErrorReport
    chain_oracle: ErrorReport
    num_unwritten: int
    guards_intact: bool
    inputs_unchanged: bool
    ulp_errors: npt.NDArray[np.float64] = field(repr=False)
    chain_ulp_errors: npt.NDArray[np.float64] = field(repr=False)


@dataclass(frozen=True)
class ReuseResult:
    """What reusing an output buffer and a compiled launch showed.

    Attributes:
        same_buffer: whether the returned tensor is the ``out`` passed in.
        repeat_equal: whether a second launch on the same inputs gave the same bits.
        changed: whether new input values changed the result at all.
        after_change: the launch after the change against the oracle of the new values.
        replay: a captured graph, replayed after the change, against that oracle; None without a GPU.
    """

    same_buffer: bool
    repeat_equal: bool
    changed: bool
    after_change: ErrorReport
    replay: ErrorReport | None


def choose_cases(profile: str, seed: int, num_seeds: int) -> list[Case]:
    """The cases of a profile: ``num_seeds`` seeds of normal values, then every other kind.

    "quick" takes one seed of each other finite kind, "full" four. The kinds with one NaN or infinity
    always take four: they place it in a different argument for each of four consecutive seeds.
    """
    cases = [Case("normal", seed + i) for i in range(num_seeds)]
    for kind in INPUT_KINDS:
        if kind != "normal":
            repeats = 4 if profile == "full" or kind in NONFINITE_KINDS else 1
            cases += [Case(kind, seed + i) for i in range(repeats)]
    return cases


def poisoned_output(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 [1, 7168] output inside a buffer of poison; returns (buffer, output view)."""
    buffer = torch.full((MODEL_DIM + 2 * GUARD_ELEMENTS,), POISON_BITS, dtype=torch.int16, device=device)
    buffer = buffer.view(torch.bfloat16)
    return buffer, buffer[GUARD_ELEMENTS:-GUARD_ELEMENTS].view(1, MODEL_DIM)


def _on_cpu(inputs: TailInputs) -> TailInputs:
    return TailInputs(*(tensor.cpu() for tensor in inputs))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16)))


def signed_ulp_errors(
    actual: npt.NDArray[np.float64], p: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """(actual - y) / ulp(max(|p|, |y|)) where all three are finite."""
    finite = np.isfinite(actual) & np.isfinite(p) & np.isfinite(y)
    unit = bf16_ulp(np.fmax(np.abs(p[finite]), np.abs(y[finite])))
    return np.asarray((actual[finite] - y[finite]) / unit, dtype=np.float64)


def run_case(case: Case, target: TargetInfo, config: TailConfig | None = None) -> CaseResult:
    """Runs one case on a target.

    Args:
        case: which inputs.
        target: where, from ``kernellib.targets.resolve``.
        config: of the kernel; None for the target's tuned one.
    """
    inputs = make_inputs(case.seed, case.kind, target.torch_device)
    before = TailInputs(*(tensor.clone() for tensor in inputs))
    buffer, out = poisoned_output(target.torch_device)
    latent_moe_tail(*inputs, out=out, target=target.name, config=config)
    bits = bits_from_bf16(buffer)
    guards = np.concatenate([bits[:GUARD_ELEMENTS], bits[-GUARD_ELEMENTS:]])
    fused = out.reshape(-1).cpu()
    chain = production_chain(*inputs).reshape(-1).cpu()
    p, y = oracle_f64(*_on_cpu(inputs))
    return CaseResult(
        case=case,
        oracle=against_oracle(fused, p, y, before.shared),
        chain=compare(fused, chain, magnitudes=(p,)),
        chain_oracle=against_oracle(chain, p, y, before.shared),
        num_unwritten=int(np.count_nonzero(bits[GUARD_ELEMENTS:-GUARD_ELEMENTS] == POISON_BITS)),
        guards_intact=bool(np.all(guards == POISON_BITS)),
        inputs_unchanged=all(map(_same_bits, inputs, before)),
        ulp_errors=signed_ulp_errors(to_float64(fused), p, y),
        chain_ulp_errors=signed_ulp_errors(to_float64(chain), p, y),
    )


def run_cases(
    cases: Sequence[Case], target: TargetInfo, config: TailConfig | None = None
) -> list[CaseResult]:
    """``run_case`` for each, in order, naming each as it is done."""
    results = []
    for case in cases:
        results.append(run_case(case, target, config))
        print(f"{case.kind} {case.seed}", end=";  ", flush=True)
    return results


def _change_in_place(inputs: TailInputs, seed: int) -> None:
    """New values at the same addresses, in every argument."""
    fresh = make_inputs(seed, "normal", inputs.routed.device)
    for tensor, values in zip(inputs, fresh, strict=True):
        tensor.copy_(values)


def check_reuse(seed: int, target: TargetInfo, config: TailConfig | None = None) -> ReuseResult:
    """Launches into one buffer three times, the last time with new values at the same addresses.

    On a GPU a graph is captured before the change and replayed after it as well: a replay that
    baked a value in, instead of an address, shows here.
    """
    inputs = make_inputs(seed, "normal", target.torch_device)
    _, out = poisoned_output(target.torch_device)
    returned = latent_moe_tail(*inputs, out=out, target=target.name, config=config)
    first = out.clone()
    latent_moe_tail(*inputs, out=out, target=target.name, config=config)
    repeat_equal = bool(np.all(bit_equal(out, first)))
    graph = None
    if target.times == "measured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            latent_moe_tail(*inputs, out=out, target=target.name, config=config)
    _change_in_place(inputs, seed + 1)
    p, y = oracle_f64(*_on_cpu(inputs))
    out.view(torch.int16).fill_(POISON_BITS)
    latent_moe_tail(*inputs, out=out, target=target.name, config=config)
    second = out.reshape(-1).cpu()
    replay = None
    if graph is not None:
        out.view(torch.int16).fill_(POISON_BITS)
        graph.replay()
        replay = against_oracle(out.cpu(), p, y, inputs.shared)
    return ReuseResult(
        same_buffer=returned.data_ptr() == out.data_ptr(),
        repeat_equal=repeat_equal,
        changed=not bool(np.all(bit_equal(second, first.reshape(-1).cpu()))),
        after_change=against_oracle(second, p, y, inputs.shared),
        replay=replay,
    )


def _numeric_claims(results: Sequence[CaseResult]) -> list[Claim]:
    finite = [result for result in results if result.case.kind not in NONFINITE_KINDS]
    normal = [result for result in finite if result.case.kind in NORMAL_RANGE_KINDS]
    seeds = sorted({result.case.seed for result in normal if result.case.kind == "normal"})
    worst_ulp = max(result.oracle.judged_ulp_error for result in finite)
    num_neighbours = sum(result.oracle.num_alternatives for result in finite)
    least_equal = min(result.oracle.bit_equal_fraction for result in normal)
    worst_rmse = max(result.oracle.relative_rmse for result in normal)
    where = f"over {len(finite)} cases"
    return [
        Claim.check(
            "at least five seeds of normal values",
            len(seeds) >= 5,
            f"{len(seeds)} seeds ({', '.join(map(str, seeds))}), wanted 5",
            "checked",
        ),
        Claim.check(
            ULP_CLAIM,
            worst_ulp <= MAX_ULP,
            f"at most {worst_ulp:.3g} ulp {where}, wanted at most {MAX_ULP:g}; outputs of the second kind: "
            f"{num_neighbours}",
            "checked",
        ),
        Claim.check(
            "outputs equal to the oracle bit by bit",
            least_equal >= MIN_BIT_EQUAL,
            f"at least {least_equal:.4%} in each of {len(normal)} cases, wanted {MIN_BIT_EQUAL:.1%}",
            "checked",
        ),
        Claim.check(
            "relative RMSE against the oracle",
            worst_rmse <= MAX_RELATIVE_RMSE,
            f"at most {worst_rmse:.2e} in {len(normal)} cases, wanted {MAX_RELATIVE_RMSE:g}",
            "checked",
        ),
    ]


def _integrity_claims(results: Sequence[CaseResult]) -> list[Claim]:
    nonfinite = [result for result in results if result.case.kind in NONFINITE_KINDS]
    matching = sum(result.chain.nonfinite_match for result in results)
    unwritten = sum(result.num_unwritten for result in results)
    guards = sum(result.guards_intact for result in results)
    unchanged = sum(result.inputs_unchanged for result in results)
    total = len(results)
    return [
        Claim.check(
            "NaN and infinities exactly where the production chain has them",
            matching == total and any(result.chain.num_nonfinite for result in nonfinite),
            f"{matching} of {total} cases agree, "
            f"{sum(result.chain.num_nonfinite for result in nonfinite)} such outputs among them",
            "checked",
        ),
        Claim.check(
            "every output element is written",
            unwritten == 0,
            f"{unwritten} of {total * MODEL_DIM:,} elements kept the poison",
            "checked",
        ),
        Claim.check(
            "nothing is written outside the output",
            guards == total,
            f"{guards} of {total} cases left the {GUARD_ELEMENTS} elements on either side alone",
            "checked",
        ),
        Claim.check(
            "inputs are unchanged",
            unchanged == total,
            f"{unchanged} of {total} cases left all four inputs with the same bits",
            "checked",
        ),
    ]


def _reuse_claims(reuse: ReuseResult) -> list[Claim]:
    good = reuse.same_buffer and reuse.repeat_equal and reuse.changed
    claims = [
        Claim.check(
            "one output buffer and one compiled launch can be reused",
            good and reuse.after_change.judged_ulp_error <= MAX_ULP,
            f"returned the buffer passed in: {reuse.same_buffer}; same inputs, same bits: "
            f"{reuse.repeat_equal}; "
            f"new values: {reuse.after_change.judged_ulp_error:.3g} ulp from their oracle",
            "checked",
        )
    ]
    if reuse.replay is not None:
        claims.append(
            Claim.check(
                "a captured graph replays with new values",
                reuse.replay.judged_ulp_error <= MAX_ULP,
                f"{reuse.replay.judged_ulp_error:.3g} ulp from the new values' oracle, wanted {MAX_ULP:g}",
                "checked",
            )
        )
    return claims


def correctness_claims(results: Sequence[CaseResult], reuse: ReuseResult) -> list[Claim]:
    """The claims of notebook 01 on values, memory and reuse; thresholds in this module's docstring."""
    return [*_numeric_claims(results), *_integrity_claims(results), *_reuse_claims(reuse)]
