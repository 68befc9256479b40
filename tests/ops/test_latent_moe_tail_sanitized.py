# SPDX-License-Identifier: Apache-2.0
"""The tail's kernel under every sanitizer and schedule: nothing is found, the bits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from kernellib.emulator import emulated
from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, MODEL_DIM, TailConfig
from kernellib.ops.latent_moe_tail.reference import TailInputs, make_inputs

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 50))]
WORKGROUPS = 3


@cache
def inputs() -> TailInputs:
    return make_inputs(4)


def some_rows(listing: str, **options: object) -> torch.Tensor:
    """The rows of the first workgroups; the others keep their NaN."""
    out = torch.full((1, MODEL_DIM), float("nan"), dtype=torch.bfloat16)
    arguments = [*inputs(), out, 1e-6]
    threads = DEFAULT_CONFIG.threads_per_workgroup
    with emulated(**options) as session:
        session.run_assembly(listing, DEFAULT_CONFIG.kernel_name, WORKGROUPS, threads, arguments)
    return out.view(torch.int16)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule_and_sanitizer(tail_listing: Callable[[TailConfig], str], seed: int) -> None:
    listing = tail_listing(DEFAULT_CONFIG)
    plain = some_rows(listing)
    assert torch.equal(some_rows(listing, sanitize="all"), plain)
    for sanitize in ("default", "all"):
        found = some_rows(listing, sanitize=sanitize, mode="relaxed", schedule_seed=seed)
        assert torch.equal(found, plain), f"schedule_seed={seed}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["simple", "relaxed"])
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_operator(mode: str, seed: int) -> None:
    results = []
    for options in ({}, {"mode": mode, "schedule_seed": seed, "sanitize": "all"}):
        out = torch.full((1, MODEL_DIM), float("nan"), dtype=torch.bfloat16)
        with emulated(**options):
            latent_moe_tail(*inputs(), eps=1e-6, out=out, target="emulator")
        results.append(out.view(torch.int16))
    assert torch.equal(*results), f"schedule_seed={seed}"
