# SPDX-License-Identifier: Apache-2.0
"""Every wait and every reduction step of the tail's kernel matters: each is removed, one at a time.

A copy of the listing with one instruction less runs on one workgroup. The emulator must raise, or the result
must differ from the oracle by more than the claims of the operator allow. Two kinds of inputs are tried:
random ones, and for each exchange between lanes one whose outputs are elements of ``n`` an fp32 unit away
from a tie, so that the smallest change of the statistics shows: the low halves of the float64 sum move
nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from kernellib.emulator import EmulatorError, run_assembly
from kernellib.emulator.errors import MissingNopError, MissingWaitError
from kernellib.numerics import round_to_bf16
from kernellib.numerics.bf16 import to_float64
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, LATENT_DIM, MODEL_DIM, TailConfig
from kernellib.ops.latent_moe_tail.reference import TailInputs, against_oracle, make_inputs, oracle_f64

EPS = 0.25  # large enough to matter beside a mean square of one
ROWS = DEFAULT_CONFIG.rows_per_workgroup
SEED = 5

# The lane that lane 0 is first joined with by each exchange: lane ^ 1, lane ^ 2, mirror of 8, mirror of 16,
# the other row of 16, the other half of the wave.
EXCHANGE_PARTNERS = (1, 2, 7, 15, 16, 32)
PARTS, SLOW_PARTS = 2, 8  # of a list of removals, to share them among processes
WAIT = re.compile(r"s_waitcnt\b|s_barrier\b")
# What crosses lanes, and what folds registers or halves together once the multiply-adds are done.
REDUCTION = re.compile(r"v_add_f32_dpp|v_mov_b32_dpp|v_permlane\d+_swap|v_pk_add_f32|v_add_f32_e32|v_add_f64")
ACCUMULATION = re.compile(r"v_pk_fma_f32|v_pk_mul_f32|v_add_f64")


def code_lines(listing: str) -> list[tuple[int, str]]:
    """(line index, instruction) of the kernel's code."""
    lines = []
    for index, line in enumerate(listing.splitlines()):
        if line.startswith("\t") and not line.startswith("\t."):
            lines.append((index, line.strip()))
        if "s_endpgm" in line:
            return lines
    raise AssertionError("the listing has no s_endpgm")


def without(listing: str, index: int) -> str:
    lines = listing.splitlines()
    return "\n".join([*lines[:index], *lines[index + 1 :]])


@dataclass(frozen=True)
class Case:
    """Inputs with the oracle's rounded projection and result."""

    inputs: TailInputs
    eps: float
    p: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, inputs: TailInputs, eps: float) -> Case:
        """With the oracle for the rows of one workgroup."""
        rows = (inputs.up_weight[:ROWS], inputs.shared[:, :ROWS])
        return cls(inputs, eps, *oracle_f64(inputs.routed, inputs.norm_weight, *rows, eps))


@cache
def random_case() -> Case:
    return Case.of(make_inputs(SEED), EPS)


def scale_of(x: np.ndarray, eps: float) -> np.float32:
    """The inverse root mean square as the kernel rounds it."""
    total = np.float32(np.sum(np.square(x.astype(np.float32)).astype(np.float64)))
    return np.float32(1) / np.sqrt(total / np.float32(LATENT_DIM) + np.float32(eps))


def neighbours(scale: np.float32) -> tuple[np.float32, np.float32]:
    return np.nextafter(scale, np.float32(np.inf)), np.nextafter(scale, np.float32(0))


def elements_of_lane(lane: int) -> list[int]:
    """The 56 elements of a row that a lane holds."""
    return [512 * chunk + 8 * lane + i for chunk in range(7) for i in range(8)]


@cache
def tie_case(partner: int) -> Case:
    """Only lane 0 and ``partner`` hold anything, and outputs change when the scale moves by one fp32 unit.

    With two lanes the sum of squares comes about in the one exchange that joins them, so that losing the
    low half of a float64 there, one part in 2^21, moves the scale. Each output is an element of n: in even
    rows one that changes when the scale grows, in odd rows when it shrinks. Such elements are one in 2^16
    products of two bf16 significands, so eps is varied until the scale has one for either direction.
    """
    generator = torch.Generator().manual_seed(SEED)
    columns = np.array(elements_of_lane(0) + elements_of_lane(partner))
    routed = torch.zeros(1, LATENT_DIM, dtype=torch.bfloat16)
    routed[0, columns] = torch.randn(len(columns), generator=generator).bfloat16()
    x = to_float64(routed).reshape(-1)
    candidates = (1 + np.arange(128) / 128).astype(np.float32)
    for step in range(4096):
        eps = (EPS + step / 4096) / 64
        scale = scale_of(x, eps)
        products = [
            round_to_bf16(x[columns, None].astype(np.float32) * factor * candidates)
            for factor in (scale, *neighbours(scale))
        ]
        sensitive = [np.argwhere(products[0] != moved) for moved in products[1:]]
        if all(len(found) for found in sensitive) and sensitive[0][0, 0] != sensitive[1][0, 0]:
            break
    gamma, up = torch.ones(LATENT_DIM), torch.zeros(MODEL_DIM, LATENT_DIM, dtype=torch.bfloat16)
    for parity, found in enumerate(sensitive):
        column = int(columns[found[0, 0]])
        gamma[column] = float(candidates[found[0, 1]])
        up[parity:ROWS:2, column] = 1.0
    shared = torch.zeros(1, MODEL_DIM, dtype=torch.bfloat16)
    return Case.of(TailInputs(routed, gamma.bfloat16(), up, shared), eps)


def is_right(listing: str, case: Case) -> bool:
    """Runs one workgroup; whether its rows are within the operator's claims and no other row is written."""
    out = torch.full((1, MODEL_DIM), float("nan"), dtype=torch.bfloat16)
    threads = DEFAULT_CONFIG.threads_per_workgroup
    run_assembly(listing, DEFAULT_CONFIG.kernel_name, 1, threads, [*case.inputs, out, case.eps])
    report = against_oracle(out[0, :ROWS], case.p, case.y, case.inputs.shared[:, :ROWS])
    untouched = bool(torch.isnan(out[0, ROWS:]).all())
    return untouched and report.judged_ulp_error <= 1.0 and report.bit_equal_fraction >= 0.995


def survives(listing: str) -> bool:
    try:
        return is_right(listing, random_case()) and all(
            is_right(listing, tie_case(partner)) for partner in EXCHANGE_PARTNERS
        )
    except EmulatorError:
        return False


@pytest.fixture(scope="module")
def listing(tail_listing: Callable[[TailConfig], str]) -> str:
    print(f"seed {SEED}")
    return tail_listing(DEFAULT_CONFIG)


def test_the_whole_kernel_is_right(listing: str) -> None:
    assert is_right(listing, random_case())
    for partner in EXCHANGE_PARTNERS:
        assert is_right(listing, tie_case(partner))


@pytest.mark.parametrize("partner", EXCHANGE_PARTNERS)
def test_a_tie_case_sees_one_unit_of_the_scale(partner: int) -> None:
    """The case is what it claims: with the scale one fp32 unit off, half of the rows are wrong."""
    case = tie_case(partner)
    x, gamma = to_float64(case.inputs.routed).reshape(-1), to_float64(case.inputs.norm_weight)
    columns = to_float64(case.inputs.up_weight[:ROWS]).argmax(axis=1)
    for parity, scale in enumerate(neighbours(scale_of(x, case.eps))):
        moved = round_to_bf16(x.astype(np.float32) * scale * gamma.astype(np.float32))[columns]
        assert (moved != case.y)[parity::2].all()


@pytest.mark.parametrize("part", range(PARTS))
def test_every_wait_matters(listing: str, part: int) -> None:
    waits = [(index, code) for index, code in code_lines(listing) if WAIT.match(code)]
    assert len(waits) >= 7 * 4  # at least one for each load of a row of weights
    survivors = []
    for index, code in waits[part::PARTS]:
        try:
            is_right(without(listing, index), random_case())
        except MissingWaitError:
            continue
        survivors.append((index, code))
    assert survivors == []


def test_every_wait_state_matters(listing: str) -> None:
    """All s_nop that a rule of the hardware asks for.

    Between two packed multiply-adds, or two loads, the compiler's scheduler fills a cycle of latency where it
    finds nothing else to do; the hardware waits there by itself.
    """
    code = code_lines(listing)
    essential, survivors = 0, []
    for before, nop, after in zip(code, code[1:], code[2:], strict=False):
        is_filler = before[1].split()[0] == after[1].split()[0] in ("v_pk_fma_f32", "buffer_load_dwordx4")
        if not nop[1].startswith("s_nop") or is_filler:
            continue
        essential += 1
        try:
            is_right(without(listing, nop[0]), random_case())
        except MissingNopError:
            continue
        survivors.append(nop)
    assert essential >= 4 + 2 + 2 + 3  # before DPP moves and swaps of the norm's sum, and of the rows'
    assert survivors == []


@pytest.mark.parametrize("part", range(PARTS))
def test_every_reduction_step_matters(listing: str, part: int) -> None:
    code = code_lines(listing)
    # The float64 additions before the first lane exchange accumulate; those are test_every_accumulation's.
    first_exchange = next(index for index, text in code if text.startswith("v_mov_b32_dpp"))
    steps = [
        (index, text)
        for index, text in code
        if REDUCTION.match(text) and not (text.startswith("v_add_f64") and index < first_exchange)
    ]
    # float64 sum: 4 DPP and 2 swap steps on two halves, 6 additions; rows: at least 3 swaps, 4 DPP additions.
    assert len(steps) >= 12 + 6 + 3 + 4
    assert [text for index, text in steps[part::PARTS] if survives(without(listing, index))] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_every_accumulation_matters(listing: str, part: int) -> None:
    steps = [(index, text) for index, text in code_lines(listing) if ACCUMULATION.match(text)]
    assert len(steps) >= 28 * 4 + 28 + 56  # four rows, squares, their sum
    assert [text for index, text in steps[part::SLOW_PARTS] if survives(without(listing, index))] == []
