# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx950 kernel at full size, on the emulator: results, counters, and what it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kernellib import TailConfig, latent_moe_tail
from kernellib.emulator import Session, emulated
from kernellib.numerics import ErrorReport, compare
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, LATENT_DIM, MODEL_DIM, WEIGHT_BYTES
from kernellib.ops.latent_moe_tail.reference import (
    InputKind,
    TailInputs,
    against_oracle,
    make_inputs,
    oracle_f64,
    production_chain,
)

EPS = 1e-6
SEEDS = (0, 1, 2, 3, 4, 5)
OTHER_CONFIGS = (
    TailConfig(7, 4, 4, "bypass", "load"),  # two folds, the second of three rows
    TailConfig(2, 7, 1, "normal", "preload"),
    TailConfig(1, 14, 1, "stream", "load"),
    TailConfig(14, 2, 3, "stream", "preload"),
)


@pytest.fixture
def session() -> Iterator[Session]:
    with emulated() as active:
        yield active


@pytest.fixture(scope="module")
def common() -> TailInputs:
    """Inputs for tests that ask about something else; not to be changed."""
    return make_inputs(10)


@pytest.fixture(scope="module")
def common_result(common: TailInputs) -> torch.Tensor:
    result = run(common)
    assert_within_claims(error_report(common, result))
    return result


def poison() -> torch.Tensor:
    """No output of a correct kernel keeps this pattern: it is the largest negative finite number."""
    return torch.full((1, 7168), -3.3895313892515355e38, dtype=torch.bfloat16)


def run(inputs: TailInputs, config: TailConfig | None = None, eps: float = EPS) -> torch.Tensor:
    out = poison()
    assert latent_moe_tail(*inputs, eps=eps, out=out, target="emulator", config=config) is out
    return out


def error_report(inputs: TailInputs, out: torch.Tensor, eps: float = EPS) -> ErrorReport:
    p, y = oracle_f64(*inputs, eps)
    report = against_oracle(out, p, y, inputs.shared)
    print(report)
    return report


def assert_within_claims(report: ErrorReport) -> None:
    assert report.nonfinite_match
    assert report.judged_ulp_error <= 1.0
    assert report.bit_equal_fraction >= 0.995
    assert report.relative_rmse <= 5e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_inputs(session: Session, seed: int) -> None:
    print(f"seed {seed}")
    inputs = make_inputs(seed)
    assert_within_claims(error_report(inputs, run(inputs)))


@pytest.mark.parametrize("kind", ["large", "tiny", "subnormal", "zeros"])
def test_ranges_of_values(session: Session, kind: InputKind) -> None:
    inputs = make_inputs(7, kind)
    out = run(inputs)
    assert_within_claims(error_report(inputs, out))
    if kind != "subnormal":  # which some CPUs' bf16 dot products take as zero: the oracle alone is the judge
        assert_within_claims(compare(out, production_chain(*inputs, EPS)))


@pytest.mark.parametrize("kind", ["one_nan", "one_inf"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_nan_and_infinity_propagate_as_in_the_production_chain(
    session: Session, kind: InputKind, seed: int
) -> None:
    inputs = make_inputs(seed, kind)
    report = compare(run(inputs), production_chain(*inputs, EPS))
    assert report.nonfinite_match
    assert report.num_nonfinite == (7168 if seed < 2 else 1)
    assert report.bit_equal_fraction >= 0.995


def test_sum_of_squares_past_fp32_gives_shared(session: Session) -> None:
    """The chain's fp32 sum is infinite, its inverse root zero: what remains is shared."""
    inputs = make_inputs(8)
    inputs.routed.mul_(2.0**70)
    out = run(inputs)
    assert torch.equal(production_chain(*inputs, EPS), inputs.shared)
    assert torch.equal(out, inputs.shared)


def zero_inputs(seed: int) -> TailInputs:
    """Inputs whose every result is a zero of exact sign +0; row r is of kind r % 6, shared is -0 in odd kinds
    and in every other six rows of the even ones.

    Kinds: weights +0; weights -0; every product -0; every product +0; two products that cancel; a p that
    shared cancels.
    """
    inputs = make_inputs(seed)
    inputs.routed[0, 1], inputs.norm_weight[1] = inputs.routed[0, 0], inputs.norm_weight[0]
    signs = torch.where(torch.signbit(inputs.routed[0] * inputs.norm_weight), -1.0, 1.0)
    rows = torch.zeros(6, LATENT_DIM)
    rows[1] = -rows[1]
    rows[2], rows[3] = torch.copysign(rows[2], -signs), torch.copysign(rows[3], signs)
    rows[4, 0], rows[4, 1] = 1.0, -1.0
    rows[5, 0] = 1.0
    index = torch.arange(MODEL_DIM)
    inputs.up_weight.copy_(rows[index % 6])
    inputs.shared.zero_()
    inputs.shared[0, (index % 6 % 2 == 1) | (index // 6 % 2 == 1)] = -0.0
    p, _ = oracle_f64(*inputs, EPS)
    cancelled = index % 6 == 5
    assert (p[cancelled.numpy()] != 0).all()
    inputs.shared[0, cancelled] = -torch.from_numpy(p)[cancelled].bfloat16()
    return inputs


@pytest.mark.parametrize("config", [DEFAULT_CONFIG, OTHER_CONFIGS[0]], ids=lambda config: config.name)
@pytest.mark.parametrize("seed", [20, 21])
def test_a_zero_has_the_sign_that_ieee_754_gives_it(session: Session, seed: int, config: TailConfig) -> None:
    """Rounding to nearest, +0 + -0 and x - x are +0 [IEEE 754-2019, 6.3]; sums start at +0, so p is +0."""
    inputs = zero_inputs(seed)
    p, y = oracle_f64(*inputs, EPS)
    zero_p = np.arange(MODEL_DIM) % 6 != 5
    assert not p[zero_p].any()
    assert not np.signbit(p[zero_p]).any()
    bits = run(inputs, config).view(torch.int16)
    for expected in (torch.from_numpy(y).bfloat16(), production_chain(*inputs, EPS)):
        assert torch.equal(bits, expected.view(torch.int16).reshape(1, -1))
    assert not bits.any()  # all of them are +0


@pytest.mark.parametrize("eps", [1e-12, 0.5, 1e30])
def test_eps(session: Session, eps: float) -> None:
    inputs = make_inputs(9)
    assert_within_claims(error_report(inputs, run(inputs, eps=eps), eps))


@pytest.mark.parametrize("config", OTHER_CONFIGS, ids=lambda config: config.name)
def test_other_configurations_compute_the_same(
    session: Session, config: TailConfig, common: TailInputs, common_result: torch.Tensor
) -> None:
    out = run(common, config)
    assert session.launches[-1].kernel_name == config.kernel_name
    assert session.launches[-1].grid == (config.num_workgroups, 1, 1)
    assert session.launches[-1].block == (config.threads_per_workgroup, 1, 1)
    # Chunks are added in one order whatever the division of rows, so even the bits agree.
    assert torch.equal(out, common_result)


def test_inputs_are_not_written_and_out_is_reused(session: Session, common: TailInputs) -> None:
    first, second = common, make_inputs(11)
    copies = [tensor.clone() for tensor in first]
    out = poison()
    latent_moe_tail(*first, out=out, target="emulator")
    expected = out.clone()
    latent_moe_tail(*second, out=out, target="emulator")  # the compiled launch must see the new addresses
    assert_within_claims(error_report(second, out))
    latent_moe_tail(*first, out=out, target="emulator")
    assert torch.equal(out, expected)
    for tensor, copy in zip(first, copies, strict=True):
        assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16))


def test_values_changed_in_place_are_seen(
    session: Session, common: TailInputs, common_result: torch.Tensor
) -> None:
    inputs = common._replace(routed=common.routed.clone(), shared=common.shared.clone())
    assert torch.equal(run(inputs), common_result)
    inputs.routed.neg_()
    inputs.shared.neg_()
    assert torch.equal(run(inputs), common_result.neg())


def test_a_new_tensor_is_returned_without_out(
    session: Session, common: TailInputs, common_result: torch.Tensor
) -> None:
    first = latent_moe_tail(*common, target="emulator")
    second = latent_moe_tail(*common, target="emulator")
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, common_result)
    assert torch.equal(second, common_result)
    assert len(session.launches) == 2


def test_counters(common: TailInputs) -> None:
    inputs, out = common, poison()
    with emulated(track=[*inputs, out]) as session:
        latent_moe_tail(*inputs, out=out, target="emulator")
    [launch] = session.launches
    weight = launch.bytes_of(inputs.up_weight)
    assert weight["load"] == WEIGHT_BYTES == 51_380_224
    assert (weight["load_min"], weight["load_max"], weight["store"]) == (1, 1, 0)
    result = launch.bytes_of(out)
    assert (result["store"], result["store_min"], result["store_max"]) == (7168 * 2, 1, 1)
    assert result["load"] == 0
    for tensor in inputs:
        assert launch.bytes_of(tensor)["store"] == 0
    wide = {key: count for key, count in launch.requests.items() if key[0].startswith("buffer_load_dwordx4")}
    assert set(wide) == {("buffer_load_dwordx4", 16)}
    norm_bytes = sum(launch.bytes_of(tensor)["load"] for tensor in inputs[:2])
    # Every wide load is a weight's or a norm input's, so all weight bytes came 16 at a time.
    assert sum(wide.values()) * 16 == WEIGHT_BYTES + norm_bytes
    assert norm_bytes == 256 * 7 * 2 * 7168
    assert launch.resources.scratch_bytes == 0
    assert launch.lds_bytes == 0
    assert not any(launch.bytes_by_space["scratch"].values())
    assert not any(launch.bytes_by_space["lds"].values())


@pytest.mark.parametrize("bias", [-1, 1])
def test_unpublished_bits_of_rcp_and_sqrt_do_not_matter(
    bias: int, common: TailInputs, common_result: torch.Tensor
) -> None:
    with emulated(transcendental_ulp_bias=bias) as session:
        out = run(common)
    counts = session.launches[-1].instruction_counts
    assert any(name.startswith("v_rcp_f32") for name in counts)  # there is something to bias
    assert any(name.startswith("v_sqrt_f32") for name in counts)
    assert torch.equal(out, common_result)


def test_the_op_compiles_and_runs_there(common: TailInputs, common_result: torch.Tensor) -> None:
    compiled = torch.compile(
        lambda *tensors: latent_moe_tail(*tensors, target="emulator"), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(*common), common_result)


def buffer_bounds(listing: str) -> list[tuple[str, int | None, bool]]:
    """(mnemonic, num_records, stride cleared) of each buffer access, by following the scalar moves.

    Word 2 of a resource is num_records; in bytes where the stride, bits 29:16 of word 1, is 0
    [CDNA4 ISA, "Buffer resource descriptor"]. A register that anything but a move wrote counts as unknown.
    """
    values: dict[int, int | None] = {}
    masked: set[int] = set()  # registers whose upper half an s_and_b32 cleared
    found = []
    for line in listing.splitlines():
        mnemonic, _, rest = line.strip().partition(" ")
        operands = [text.strip() for text in rest.split(",")]
        if mnemonic.startswith("buffer_"):
            resource = next(text for text in operands if re.fullmatch(r"s\[\d+:\d+\]", text))
            first = int(resource[2:].partition(":")[0])
            found.append((mnemonic, values.get(first + 2), first + 1 in masked))
        target = re.fullmatch(r"s(?:(\d+)|\[(\d+):(\d+)\])", operands[0])
        if target is None or not mnemonic.startswith("s_") or mnemonic.startswith(("s_cmp", "s_bitcmp")):
            continue
        first, last = int(target[1] or target[2]), int(target[1] or target[3])
        source = re.fullmatch(r"s(?:(\d+)|\[(\d+):\d+\])", operands[1]) if len(operands) > 1 else None
        for register in range(first, last + 1):
            value = None
            if mnemonic in ("s_mov_b32", "s_mov_b64") and source is not None:
                value = values.get(int(source[1] or source[2]) + register - first)
            elif mnemonic in ("s_mov_b32", "s_movk_i32") and re.fullmatch(r"-?(0x)?[0-9a-f]+", operands[1]):
                value = int(operands[1], 0) & 0xFFFF_FFFF
            values[register] = value
            masked.discard(register)
        if mnemonic == "s_and_b32" and operands[2] == "0xffff":
            masked.add(first)
    return found


@pytest.mark.parametrize("config", [DEFAULT_CONFIG, *OTHER_CONFIGS], ids=lambda config: config.name)
def test_every_buffer_ends_with_its_tensor(
    tail_listing: Callable[[TailConfig], str], config: TailConfig, common: TailInputs
) -> None:
    routed, gamma, up, shared = (tensor.numel() * tensor.element_size() for tensor in common)
    folds = -(-config.rows_per_wave // 4)
    bounds = buffer_bounds(tail_listing(config))
    assert all(stride_cleared for _, _, stride_cleared in bounds)
    expected = [
        *[("buffer_load_dwordx4", routed)] * 7,
        *[("buffer_load_dwordx4", gamma)] * 7,
        *[("buffer_load_ushort", shared)] * folds,
        *[("buffer_load_dwordx4", up)] * 7 * config.rows_per_wave,
    ]
    accesses = [(mnemonic, num_records) for mnemonic, num_records, _ in bounds]
    assert [access for access in accesses if access[0].startswith("buffer_load")] == expected
    stores = [access for access in accesses if not access[0].startswith("buffer_load")]
    assert stores == [("buffer_store_short", shared)] * folds  # as long as shared


def test_a_workgroup_past_the_end_touches_nothing(
    session: Session, tail_listing: Callable[[TailConfig], str], common: TailInputs
) -> None:
    """Its rows lie past every tensor's end: a wider bound would have it read and write whatever is there."""
    config, out = DEFAULT_CONFIG, poison()
    grid, block = config.num_workgroups + 1, config.threads_per_workgroup
    session.run_assembly(tail_listing(config), config.kernel_name, grid, block, [*common, out, EPS])
    assert session.launches[-1].grid == (grid, 1, 1)
    assert_within_claims(error_report(common, out))
