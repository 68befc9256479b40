# SPDX-License-Identifier: Apache-2.0
"""Notebook 01, second part: every clause of the tail's contract, violated once.

Each violation changes one thing in a valid call. The operator must refuse it with a ``ContractError``
whose report names the clause and the argument, and must leave the output as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernellib.ops.contract import ContractError
from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.reference import TailInputs, make_inputs
from kernellib.targets import TargetInfo

from ..artifact import Claim
from .correctness import POISON_BITS, poisoned_output

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Breach:
    """One way to violate one clause.

    Attributes:
        clause: the contract's name for it.
        argument: the argument that the report must name.
        how: what a caller did, in words.
        change: returns the arguments to replace in a valid call, given that call's arguments.
    """

    clause: str
    argument: str
    how: str
    change: Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class BreachResult:
    """What the operator did: ``refusal`` is its report's row for the clause, None when there was none."""

    breach: Breach
    raised: bool
    refusal: tuple[str, str, str] | None
    out_untouched: bool
    text: str

    @property
    def refused_rightly(self) -> bool:
        """Whether the call was refused, for this clause, with nothing written."""
        return self.raised and self.refusal is not None and self.out_untouched


def _misaligned(arguments: Arguments) -> Arguments:
    shared = arguments["shared"]
    storage = torch.zeros(shared.numel() + 8, dtype=shared.dtype, device=shared.device)
    return {"shared": storage[1 : shared.numel() + 1].view(shared.shape)}


def _strided(arguments: Arguments) -> Arguments:
    weight = arguments["up_weight"]
    return {"up_weight": weight.t().contiguous().t()}


def _without_storage(arguments: Arguments) -> Arguments:
    norm_weight = arguments["norm_weight"].clone()
    norm_weight.untyped_storage().resize_(0)
    return {"norm_weight": norm_weight}


def _from_inference_mode(arguments: Arguments) -> Arguments:
    with torch.inference_mode():
        return {"out": torch.full_like(arguments["shared"], math.nan)}


def _other_device(arguments: Arguments) -> Arguments:
    return {"shared": arguments["shared"].to("meta")}


# A float32 tensor of the right shape, a transposed weight, and so on: mistakes callers really make.
BREACHES: tuple[Breach, ...] = (
    Breach("type", "routed", "a numpy array", lambda a: {"routed": a["routed"].float().cpu().numpy()}),
    Breach("layout", "shared", "a sparse tensor", lambda a: {"shared": a["shared"].to_sparse()}),
    Breach("device", "shared", "a tensor on the meta device", _other_device),
    Breach("same_device", "shared", "tensors on two devices", _other_device),
    Breach("dtype", "routed", "float32 activations", lambda a: {"routed": a["routed"].float()}),
    Breach("shape", "routed", "two rows (batch two)", lambda a: {"routed": a["routed"].repeat(2, 1)}),
    Breach("strides", "up_weight", "a transposed view of the right shape", _strided),
    Breach("view", "shared", "a lazily negated view", lambda a: {"shared": torch._neg_view(a["shared"])}),
    Breach(
        "requires_grad",
        "norm_weight",
        "a trainable parameter",
        lambda a: {"norm_weight": torch.nn.Parameter(a["norm_weight"].clone())},
    ),
    Breach("storage", "norm_weight", "a tensor whose memory was freed", _without_storage),
    Breach("alignment", "shared", "a slice that starts 2 bytes late", _misaligned),
    Breach("alias", "out", "out is the tensor shared", lambda a: {"out": a["shared"]}),
    Breach("inference", "out", "out was made in inference mode, the call is outside", _from_inference_mode),
    Breach("value", "eps", "eps = 0", lambda _: {"eps": 0.0}),
    Breach("value", "eps", "eps = NaN", lambda _: {"eps": float("nan")}),
    Breach("target", "target", "a target that does not exist", lambda _: {"target": "mi999x"}),
    Breach("config", "config", "a dict for a configuration", lambda _: {"config": {"rows_per_wave": 4}}),
)


def try_breach(breach: Breach, inputs: TailInputs, target: TargetInfo) -> BreachResult:
    """Makes the call with one thing wrong and records what came back."""
    _, out = poisoned_output(target.torch_device)
    arguments: Arguments = {**inputs._asdict(), "out": out, "target": target.name}
    arguments.update(breach.change(arguments))
    shared_before = inputs.shared.clone()
    raised, refusal, text = False, None, "no error"
    try:
        latent_moe_tail(**arguments)
    except ContractError as error:
        raised, text = True, str(error)
        for violation in error.report.violations:
            if (violation.clause, violation.argument) == (breach.clause, breach.argument):
                refusal = (violation.got, violation.wanted, violation.remedy)
    untouched = bool((out.view(torch.int16) == POISON_BITS).all()) and torch.equal(
        inputs.shared.view(torch.int16), shared_before.view(torch.int16)
    )
    return BreachResult(breach, raised, refusal, untouched, text)


def try_all_breaches(seed: int, target: TargetInfo) -> list[BreachResult]:
    """Every breach, one after the other, on the same valid inputs."""
    inputs = make_inputs(seed, "normal", target.torch_device)
    return [try_breach(breach, inputs, target) for breach in BREACHES]


def contract_claims(results: Sequence[BreachResult]) -> list[Claim]:
    """That every breach was refused, for its clause, with nothing written."""
    wrong = [result.breach for result in results if not result.refused_rightly]
    names = ", ".join(f"{breach.clause} of {breach.argument}" for breach in wrong)
    clauses = len({result.breach.clause for result in results})
    return [
        Claim.check(
            "every violated clause is refused by name, and nothing is written",
            bool(results) and not wrong,
            f"{len(results) - len(wrong)} of {len(results)} violations of {clauses} clauses refused"
            + (f"; not so: {names}" if wrong else ""),
            "checked",
        )
    ]
