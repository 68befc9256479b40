# SPDX-License-Identifier: Apache-2.0
"""Faults that kernels of this kind have had in the field, row by row: what went wrong, and what catches it.

Rows that are tested elsewhere name file and test; ``test_the_map_names_tests_that_exist`` holds this list to
the sources. docs/mega_moe.md says of rows that apply in part which part does not.

1. gate and up rows interleaved, kernel expects them separated
    test_row_01_the_other_gate_up_layout_is_refused
2. a kernel for few rows misreads the other kernel's weights
    test_row_02_token_counts_across_the_thresholds
3. SiTU asked for, SiLU computed
    test_row_03_each_activation_is_right_and_the_other_wrong
4. two variants share a name
    test_mega_moe_config.py::test_fault_4_names_differ_when_anything_differs
5. reference and kernel with different betas; FP4 as bytes
    test_row_05_betas_are_explicit_and_fp4_is_decoded
6. the cache's key does not change with the signature
    test_row_06_two_signatures_never_share_a_compiled_kernel
7. an edited helper is not recompiled
    test_row_07_an_edited_helper_changes_the_result
8. a kernel for one shape reused for another
    test_row_08_two_shapes_in_one_process
9. a module freed while in use
    test_row_09_calls_survive_garbage_collection_and_sessions
10. eight processes compile at once
    test_row_10_eight_cold_processes_agree
11. a small capacity corrupts memory
    test_row_11_capacities
12. capacity no power of two, or not the same
    test_row_12_capacities_that_cannot_be_are_refused_alike
13. a rank with zero tokens
    test_row_13_and_14_ragged_ranks_finish
14. ranks pick different configurations
    test_row_13_and_14_ragged_ranks_finish
15. skewed routing livelocks, empty experts are read
    test_row_15_skewed_and_empty_routings
16. a barrier races with the next call
    test_row_16_calls_back_to_back_with_delayed_ranks
17. expert ids of -1 or out of range
    test_row_17_ids_drop_the_route_or_are_refused
18. padding is NaN, or clamped into real rows
    test_row_18_poison_in_unused_memory_changes_nothing
19. amax tiny, zero, Inf or NaN
    test_row_19_extreme_tokens_stay_by_themselves
20. rows past the last full tile never written
    test_row_20_rows_past_the_last_full_tile
21. offsets wrap at 4 GiB
    test_mega_moe_gemm.py::test_an_expert_beyond_four_gibibytes
22. a direct-to-LDS load crosses a barrier
    test_row_22_no_load_goes_directly_to_lds
23. a strided input read as contiguous
    test_row_23_strides_are_exact
24. FP8 variants and wire dtypes confused
    test_row_24_only_the_ocp_format_is_taken
25. graph replay with stale inputs
    test_row_25_values_changed_in_place_are_seen
26. a tuner accepts a wrong candidate, or dies with one
    test_mega_moe_notebook_logic.py::test_a_wrong_or_crashing_candidate_is_recorded_and_skipped
27. one token bucket alone is wrong
    test_mega_moe_stages.py::test_every_buckets_configuration
28. a rank computes others' experts
    test_row_28_the_ranks_sum_is_the_single_ranks_result
29. call two overwrites call one's output
    test_row_29_call_one_is_intact_after_call_two
30. tile metadata read before readiness was acquired
    test_row_30_a_readiness_that_is_not_acquired_shows
"""

from __future__ import annotations

import ast
import gc
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kernellib
from kernellib.emulator import EmulatorError, compile_to_assembly, emulated
from kernellib.numerics import mx
from kernellib.ops.contract import ContractError
from kernellib.ops.mega_moe import inspection, launching, stage1_gfx950
from kernellib.ops.mega_moe.config import MegaMoEConfig, MegaMoEShape
from kernellib.ops.mega_moe.layout import GATE_UP_INTERLEAVED
from kernellib.ops.mega_moe.reference import make_inputs, oracle_quantized, relative_l2
from kernellib.ops.mega_moe.routing import Routing
from kernellib.ops.mega_moe.weights import pack_experts, random_experts
from kernellib.symmetric import SymmetricHeap
from kernellib.symmetric.emulated_provider import emulated_heap
from tests.ops.mega_moe_layers import (
    SMALL,
    WEIGHT_SEED,
    Case,
    assert_same_error,
    experts_of,
    make_case,
    make_layer,
    on_ranks,
    packed_for,
    results_of,
    run_case,
)

TESTS = Path(__file__).parents[1]
RANKS, CAPACITY, SEED, TIGHT = 2, 4, 17, 1e-3


def expected(shape: MegaMoEShape, case: Case, activation: Any = "situv2", wire: Any = "bf16") -> Any:
    oracle = oracle_quantized(shape, case.inputs, case.routing, experts_of(shape), activation, wire)
    return np.concatenate(oracle)


def assert_right(got: list[Any], shape: MegaMoEShape, case: Case, what: str = "") -> None:
    error = relative_l2(np.concatenate(got), expected(shape, case))
    assert error < TIGHT, f"{what} relL2 {error}, seed {SEED}"


def test_the_map_names_tests_that_exist() -> None:
    rows = re.findall(r"^(\d+)\. .*\n    (\S*test_\S+)$", __doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 31))
    missing = []
    for _, place in rows:
        file, _, name = place.rpartition("::")
        paths = [Path(__file__)] if not file else list(TESTS.rglob(file))
        sources = [ast.parse(path.read_text()) for path in paths]
        names = {n.name for source in sources for n in ast.walk(source) if isinstance(n, ast.FunctionDef)}
        if name not in names:
            missing.append(place)
    assert missing == []


def test_row_01_the_other_gate_up_layout_is_refused() -> None:
    def host(heap: SymmetricHeap) -> Any:
        weights = replace(packed_for(SMALL, RANKS, heap.rank), gate_up=GATE_UP_INTERLEAVED)
        return make_layer(SMALL, heap, CAPACITY, weights=weights)

    assert_same_error(on_ranks(RANKS, host)[0], ContractError, "gate_up", "separate_gate_up")


@pytest.mark.slow
def test_row_02_token_counts_across_the_thresholds() -> None:
    """Both M tiles of the generic table and the counts around their threshold, on one set of weights."""

    def host(heap: SymmetricHeap) -> list[tuple[int, Any]]:
        moe = make_layer(SMALL, heap, 64, config="generic")
        found = []
        for tokens in (1, 5, 47, 48, 64):
            case = make_case(SMALL, "uniform", RANKS, tokens, SEED)
            out = moe(*case.tensors(heap.rank)).float().numpy()
            found.append((moe.config_for(tokens).tile_m, out))
        return found

    results = results_of(on_ranks(RANKS, host)[0])
    assert [tile for tile, _ in results[0]] == [16, 16, 16, 32, 32]
    for index, tokens in enumerate((1, 5, 47, 48, 64)):
        case = make_case(SMALL, "uniform", RANKS, tokens, SEED)
        assert_right([rank[index][1] for rank in results], SMALL, case, f"{tokens} tokens:")


@pytest.mark.parametrize("activation", ["situv2", "silu"])
def test_row_03_each_activation_is_right_and_the_other_wrong(activation: str) -> None:
    case = make_case(SMALL, "uniform", RANKS, CAPACITY, SEED)
    got = np.concatenate(run_case(SMALL, case, CAPACITY, activation=activation))
    for reference in ("situv2", "silu"):
        error = relative_l2(got, expected(SMALL, case, reference))
        assert (error < TIGHT) == (reference == activation), (reference, error)
    assert relative_l2(expected(SMALL, case, "situv2"), expected(SMALL, case, "silu")) > 10 * TIGHT


@pytest.mark.slow
def test_row_05_betas_are_explicit_and_fp4_is_decoded() -> None:
    assert (kernellib.KIMI_K3.situ_beta, kernellib.KIMI_K3.situ_linear_beta) == (4.0, 25.0)
    other = replace(SMALL, situ_beta=1.5, situ_linear_beta=2.0)
    case = make_case(SMALL, "uniform", RANKS, CAPACITY, SEED)
    got = np.concatenate(run_case(other, case, CAPACITY))
    assert relative_l2(got, expected(other, case)) < TIGHT
    assert relative_l2(got, expected(SMALL, case)) > 10 * TIGHT
    zeros = np.zeros(16, np.uint8), np.full(16, 0x88, np.uint8)  # +0 and -0
    scale = np.array([127], np.uint8)
    plus, minus = (mx.dequantize_packed(codes[None], scale[None]) for codes in zeros)
    assert (zeros[0] != zeros[1]).all()
    assert np.array_equal(plus, minus)


def test_row_06_two_signatures_never_share_a_compiled_kernel() -> None:
    """Compiled kernels are kept by launcher, not by a name; FlyDSL's own key is the traced program, whose
    text has the signature."""
    made: list[int] = []

    def build(stage: tuple[str, int]) -> Any:
        def launcher(*arguments: Any) -> int:
            return stage[1]

        launcher.__name__ = "same_name"
        launchers.setdefault(stage, launcher)
        return launchers[stage]

    def compile_(launcher: Any, arguments: tuple[Any, ...]) -> Any:
        made.append(len(arguments))
        return lambda given: made.append(100 * len(given))

    launchers: dict[Any, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "_compile", compile_)
        for arguments in ((1,), (1, 2), (1,)):
            launching.launch("emulator", build, ("k", len(arguments)), arguments, torch.device("cpu"))
    assert made == [2, 200, 3, 300, 200], "one argument more is the stream"


EDIT_SCRIPT = """
import numpy as np, sys
from pathlib import Path
import kernellib
assert Path(kernellib.__file__).parent == Path(sys.argv[1]), kernellib.__file__
from kernellib.ops.mega_moe import gemm1_gfx950, launching
from kernellib.ops.mega_moe.reference import oracle_quantized, relative_l2
from tests.ops.mega_moe_layers import *
case = make_case(SMALL, "uniform", 1, 4, 3)
def host(heap):
    moe = make_layer(SMALL, heap, 4)
    before = moe(*case.tensors(0)).float().numpy()
    path = Path(gemm1_gfx950.__file__)
    text = path.read_text()
    old = "    beta, linear_beta = shape.situ_beta, shape.situ_linear_beta\\n"
    assert old in text
    path.write_text(text.replace(old, old + "    return gate * sigmoid(gate) * up\\n"))
    stale = moe(*case.tensors(0)).float().numpy()
    launching.reload_kernels()
    return before, stale, moe(*case.tensors(0)).float().numpy()
[(before, stale, after)] = results_of(on_ranks(1, host)[0])
def oracle(activation):
    return oracle_quantized(SMALL, case.inputs, case.routing, experts_of(SMALL), activation)[0]
situ, silu = oracle("situv2"), oracle("silu")
print([relative_l2(*pair) < 1e-3 for pair in ((before, situ), (stale, situ), (after, silu))])
"""


@pytest.mark.slow
def test_row_07_an_edited_helper_changes_the_result(tmp_path: Path) -> None:
    """In a copy of the package: a helper of GEMM1 is edited between two calls of one layer."""
    package = Path(kernellib.__file__).parent
    shutil.copytree(package, tmp_path / "kernellib", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{TESTS.parent}"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", EDIT_SCRIPT, str(tmp_path / "kernellib")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert result.stdout.strip() == "[True, True, True]", result.stderr[-3000:]


@pytest.mark.slow
def test_row_08_two_shapes_in_one_process() -> None:
    wide = MegaMoEShape(4, 256, 128, 2)
    for shape in (SMALL, wide, SMALL):
        case = make_case(shape, "uniform", RANKS, 3, SEED)
        assert_right(run_case(shape, case, CAPACITY), shape, case, shape.name)


def test_row_09_calls_survive_garbage_collection_and_sessions() -> None:
    """On the emulator FlyDSL's disk cache is off; compiled kernels outlive the layer and the session."""
    case = make_case(SMALL, "uniform", RANKS, 3, SEED)
    for _ in range(2):
        assert_right(run_case(SMALL, case, CAPACITY), SMALL, case)
        gc.collect()


COLD_SCRIPT = """
from tests.ops.mega_moe_layers import *
case = make_case(SMALL, "uniform", 1, 2, 3)
[out] = run_case(SMALL, case, 2)
import hashlib; print(hashlib.sha256(out.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_row_10_eight_cold_processes_agree(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS.parent),
        "FLYDSL_RUNTIME_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", COLD_SCRIPT]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=280) for process in processes]
    assert len({out.strip() for out, _ in outputs}) == 1, [err[-500:] for _, err in outputs]
    assert len(outputs[0][0].strip()) == 64


@pytest.mark.parametrize(
    "capacity", [16, *(pytest.param(c, marks=pytest.mark.slow) for c in (32, 64, 128, 256, 512))]
)
def test_row_11_capacities(capacity: int) -> None:
    """The region ends where it ends: any store past it is an out-of-bounds finding of the emulator."""
    case = make_case(SMALL, "hot_expert", RANKS, 5, SEED)
    assert_right(run_case(SMALL, case, capacity, wire="bf16"), SMALL, case, f"capacity {capacity}:")


@pytest.mark.parametrize(("capacities", "text"), [((12, 12), "round up to 16"), ((16, 32), "agreement")])
def test_row_12_capacities_that_cannot_be_are_refused_alike(capacities: tuple[int, int], text: str) -> None:
    results, launches = on_ranks(RANKS, lambda heap: make_layer(SMALL, heap, capacities[heap.rank]))
    assert_same_error(results, ContractError, "max_tokens_per_rank", text)
    assert launches == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("counts", [(0, 1, 4, 2), (4, 0, 0, 0), (0, 0, 0, 1)])
def test_row_13_and_14_ragged_ranks_finish(counts: tuple[int, ...]) -> None:
    case = make_case(SMALL, "uniform", 4, counts, SEED)
    got = run_case(SMALL, case, CAPACITY)
    assert [len(out) for out in got] == list(counts)
    assert_right(got, SMALL, case, str(counts))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["hot_rank", "hot_expert", "one_expert", "empty_experts", "mixed_skew"])
def test_row_15_skewed_and_empty_routings(kind: str) -> None:
    case = make_case(SMALL, kind, 4, CAPACITY, SEED)
    assert_right(run_case(SMALL, case, CAPACITY), SMALL, case, kind)


@pytest.mark.timeout(200)
def test_row_16_calls_back_to_back_with_delayed_ranks() -> None:
    """Five calls; before each, every rank does a different number of launches of its own."""
    cases = [make_case(SMALL, "uniform", RANKS, (i % 4 + 1, 4 - i % 3), SEED + i) for i in range(5)]
    delays = np.random.default_rng(SEED).integers(0, 4, (RANKS, len(cases)))

    def host(heap: SymmetricHeap) -> list[Any]:
        moe, found = make_layer(SMALL, heap, CAPACITY), []
        for call, case in enumerate(cases):
            x, weights, ids = case.tensors(heap.rank)
            for _ in range(delays[heap.rank, call]):
                moe.quantize(x)
            found.append(moe(x, weights, ids, token_class=CAPACITY))  # no meeting of the hosts in between
        return [out.float().numpy() for out in found]

    results = results_of(on_ranks(RANKS, host, quantum=1500)[0])
    for index, case in enumerate(cases):
        assert_right([rank[index] for rank in results], SMALL, case, f"call {index}, delays {delays}:")


def test_row_17_ids_drop_the_route_or_are_refused() -> None:
    case = make_case(SMALL, "padded", RANKS, CAPACITY, SEED)
    assert any((ids == -1).any() for ids in case.routing.expert_ids)
    assert_right(run_case(SMALL, case, CAPACITY), SMALL, case)
    for wrong in (-2, 8, 2**31 - 1):
        ids = tuple(np.where(part == -1, wrong, part).astype(np.int32) for part in case.routing.expert_ids)
        bad = Case(case.inputs, Routing("wrong", ids, case.routing.weights))
        with pytest.raises(ContractError, match="experts_id"):
            run_case(SMALL, bad, CAPACITY)


def test_row_18_poison_in_unused_memory_changes_nothing() -> None:
    """Symmetric memory full of NaN, of large numbers, of zeros: the same bits come out."""
    case = make_case(SMALL, "padded", RANKS, (3, 4), SEED)
    found = []
    for poison in (0xFF, 0x7E, 0x00):

        def host(rank: Any, poison: int = poison) -> Any:
            moe = make_layer(SMALL, emulated_heap(rank, 2, poison), CAPACITY)
            return moe(*case.tensors(rank.index)).float().numpy()

        with emulated() as session:
            found.append(np.concatenate(session.create_world(RANKS).run(host)))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert_right([found[0]], SMALL, case)


def test_row_19_extreme_tokens_stay_by_themselves() -> None:
    clean = make_case(SMALL, "uniform", 1, CAPACITY, SEED)
    inputs = [clean.inputs[0].copy()]
    inputs[0][0], inputs[0][1] = 0.0, inputs[0][1] * np.float32(2.0**-130)
    inputs[0][2, 5] = np.inf
    case = Case(inputs, clean.routing)
    [got] = run_case(SMALL, case, CAPACITY)
    [wanted] = oracle_quantized(SMALL, inputs, case.routing, experts_of(SMALL))
    assert np.array_equal(got[0], np.zeros(128)), "a zero token gives zeros, not NaN"
    assert np.isfinite(got[1]).all()
    assert np.isnan(got[2]).all() == np.isnan(wanted[2]).all()
    assert not np.isfinite(got[2]).any()
    assert relative_l2(got[3], wanted[3]) < TIGHT


def test_row_20_rows_past_the_last_full_tile() -> None:
    """One expert gets a full tile of 16 rows and one more; outputs are NaN before the call."""
    case = make_case(SMALL, "one_expert", 1, 17, SEED)
    config = MegaMoEConfig(tile_m=16).scaled(SMALL, 2)
    got = run_case(SMALL, case, 32, config=config)
    assert np.isfinite(got[0]).all()
    assert_right(got, SMALL, case)


def test_row_22_no_load_goes_directly_to_lds() -> None:
    """The kernels stage through registers: there is no direct-to-LDS load that a barrier could overtake.
    Should one come, this fails, and the emulator's race check of direct loads must be pointed at it."""
    for launcher, arguments in inspection.kernels("generic-1-bf16").values():
        listing = compile_to_assembly(launcher, *arguments)
        assert "v_mfma_scale" in listing or "v_cvt_pk_fp8" in listing
        assert not re.search(r"global_load_lds|buffer_load\S* .*\blds\b", listing)


def test_row_23_strides_are_exact() -> None:
    case = make_case(SMALL, "uniform", 1, 3, SEED)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        x, weights, ids = case.tensors(0)
        wide = torch.zeros(3, 256, dtype=torch.bfloat16)
        wide[:, :128] = x
        for strided in (wide[:, :128], x.T.contiguous().T):
            with pytest.raises(ContractError, match="strides"):
                moe(strided, weights, ids)
        return moe(wide[:, :128].contiguous(), weights, ids).float().numpy()

    assert_right(results_of(on_ranks(1, host)[0]), SMALL, case)


def test_row_24_only_the_ocp_format_is_taken() -> None:
    case = make_case(SMALL, "uniform", 1, 3, SEED)

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        x, weights, ids = case.tensors(0)
        quantized = moe.quantize(x)
        for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8):
            with pytest.raises(ContractError, match="dtype"):
                moe.forward_prequantized(replace(quantized, codes=quantized.codes.view(dtype)), weights, ids)
        with pytest.raises(ContractError, match="dtype"):
            moe.forward_prequantized(replace(quantized, scales=quantized.scales.float()), weights, ids)
        values = quantized.codes.view(torch.float8_e4m3fn).float().numpy()
        return values, moe.layout.input_scales.to_logical(quantized.scales.numpy())

    [(values, scales)] = results_of(on_ranks(1, host)[0])
    wanted = mx.quantize(case.inputs[0], mx.E4M3)
    assert np.array_equal(scales, wanted.scales)
    scaled = values.reshape(3, -1, 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
    assert np.array_equal(scaled.reshape(3, -1), wanted.dequantize())


def test_row_25_values_changed_in_place_are_seen() -> None:
    """The same tensors, other values: what a graph's replay does on a GPU (notebook 01 captures one)."""
    cases = [make_case(SMALL, "uniform", RANKS, 3, SEED + i) for i in range(2)]

    def host(heap: SymmetricHeap) -> list[Any]:
        moe = make_layer(SMALL, heap, CAPACITY)
        buffers = [tensor.clone() for tensor in cases[0].tensors(heap.rank)]
        out, found = torch.full_like(buffers[0], float("nan")), []
        for case in cases:
            for buffer, value in zip(buffers, case.tensors(heap.rank), strict=True):
                buffer.copy_(value)
            moe(buffers[0], buffers[1], buffers[2], out)
            found.append(out.float().numpy().copy())
        return found

    results = results_of(on_ranks(RANKS, host)[0])
    for index, case in enumerate(cases):
        assert_right([rank[index] for rank in results], SMALL, case, f"values {index}:")


def test_row_28_the_ranks_sum_is_the_single_ranks_result() -> None:
    case = make_case(SMALL, "uniform", 4, 2, SEED)
    together = Case(
        [np.concatenate(case.inputs)],
        Routing(
            "together",
            (np.concatenate(case.routing.expert_ids),),
            (np.concatenate(case.routing.weights),),
        ),
    )
    apart = np.concatenate(run_case(SMALL, case, 8))
    [alone] = run_case(SMALL, together, 8)
    assert np.array_equal(apart, alone), "bit for bit: a token's rows are summed in the order of its slots"


def test_row_29_call_one_is_intact_after_call_two() -> None:
    cases = [make_case(SMALL, "uniform", RANKS, 3, SEED + i) for i in range(2)]

    def host(heap: SymmetricHeap) -> Any:
        moe = make_layer(SMALL, heap, CAPACITY)
        one = moe(*cases[0].tensors(heap.rank))
        kept = one.clone()
        two = moe(*cases[1].tensors(heap.rank))
        region = range(moe.region_range()[0], sum(moe.region_range()))
        return torch.equal(one, kept), one.data_ptr() in region or two.data_ptr() in region

    assert results_of(on_ranks(RANKS, host)[0]) == [(True, False)] * RANKS


def errors_in_relaxed_mode(case: Case, config: MegaMoEConfig, seeds: range) -> list[float]:
    """relL2 of a call for each schedule of the relaxed memory model; infinite where the emulator objects."""
    wanted, found = expected(SMALL, case), []
    for seed in seeds:

        def host(heap: SymmetricHeap) -> Any:
            out = make_layer(SMALL, heap, CAPACITY, config=config)(*case.tensors(heap.rank))
            return out.float().numpy()

        try:
            results = results_of(on_ranks(RANKS, host, mode="relaxed", schedule_seed=seed)[0])
            error = relative_l2(np.concatenate(results), wanted)
        except EmulatorError:
            error = float("inf")
        found.append(error if np.isfinite(error) else float("inf"))
    return found


@pytest.mark.slow
def test_row_30_a_readiness_that_is_not_acquired_shows() -> None:
    """The fault itself, in ready order; test_mega_moe_mutations.py removes every wait and fence in turn."""
    config = replace(MegaMoEConfig(tile_m=16).scaled(SMALL, 2), tile_order="ready")
    case, seeds = make_case(SMALL, "uniform", RANKS, CAPACITY, SEED), range(6)
    assert max(errors_in_relaxed_mode(case, config, seeds)) < TIGHT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage1_gfx950, "acquire", lambda scope: None)
        stage1_gfx950.build.cache_clear()
        without = errors_in_relaxed_mode(case, config, seeds)
    stage1_gfx950.build.cache_clear()
    assert max(without) > TIGHT, f"no schedule of {seeds} shows the missing acquire"


def test_the_rows_experts_are_the_oracles() -> None:
    """The helpers' packed weights are the oracle's experts: otherwise every row above would be vacuous."""
    assert np.array_equal(experts_of(SMALL)(3).w1, random_experts(SMALL, WEIGHT_SEED)(3).w1)
    packed = packed_for(SMALL, 2, 1)
    again = pack_experts(SMALL, map(random_experts(SMALL, WEIGHT_SEED), range(4, 8)))
    assert torch.equal(packed.w1, again.w1)
    assert make_inputs(SMALL, [2], 1)[0].shape == (2, 128)
