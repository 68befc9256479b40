# SPDX-License-Identifier: Apache-2.0
"""The logic of the tail's notebooks: each claim passes on a right operator and fails on a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernellib.ops.contract import ContractError, SupportReport
from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, TailConfig, load_tuned
from kernellib.targets import TargetInfo
from kernellib.workbook.latent_moe_tail import bound, contract_table, correctness, counters, model, tuning
from kernellib.workbook.latent_moe_tail.correctness import Case, CaseResult
from kernellib.workbook.latent_moe_tail.counters import LaunchCounts, TensorTraffic

REFERENCE = TargetInfo("reference", True, None, "this CPU", "cpu", "none")
EMULATOR = TargetInfo("emulator", True, None, "this CPU", "cpu", "none")
SEED = 20261201

Operator = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def right() -> CaseResult:
    print(f"seed {SEED}")
    return correctness.run_case(Case("normal", SEED), REFERENCE)


def verdicts(claims: list[Any]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims}


def failing(results: list[CaseResult]) -> set[str]:
    reuse = correctness.ReuseResult(True, True, True, results[0].oracle, None)
    claims = correctness.correctness_claims(results, reuse)
    return {claim.name for claim in claims if claim.verdict == "fail"}


def test_the_production_chain_passes_its_own_gate(right: CaseResult) -> None:
    assert tuning.gate_failures(right) == []
    assert right.ulp_errors.shape == (7168,)


def test_cases_cover_every_kind_and_argument() -> None:
    cases = correctness.choose_cases("quick", 3, 5)
    assert [case.seed for case in cases if case.kind == "normal"] == [3, 4, 5, 6, 7]
    assert {case.kind for case in cases} == set(correctness.INPUT_KINDS)
    assert {case.seed % 4 for case in cases if case.kind == "one_nan"} == {0, 1, 2, 3}
    assert len(correctness.choose_cases("full", 3, 5)) > len(cases)


def skip_tail(result: torch.Tensor, **_: Any) -> None:
    result.view(torch.int16)[0, -3:] = correctness.POISON_BITS


def flip_one(result: torch.Tensor, **_: Any) -> None:
    result[0, 17] += 0.5


def one_nan(result: torch.Tensor, **_: Any) -> None:
    result[0, 4000] = float("nan")


def write_past_the_end(result: torch.Tensor, **_: Any) -> None:
    storage = torch.empty(0, dtype=torch.bfloat16).set_(result.untyped_storage())
    storage[-1] = 0.0


def change_an_input(result: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    inputs[3][0, 5] += 1.0


@pytest.mark.parametrize(
    ("fault", "gate", "claim"),
    [
        (skip_tail, "unwritten", "every output element is written"),
        (flip_one, "ulp", correctness.ULP_CLAIM),
        (one_nan, "NaN", "NaN and infinities exactly where the production chain has them"),
        (write_past_the_end, "outside", "nothing is written outside the output"),
        (change_an_input, "changed an input", "inputs are unchanged"),
    ],
)
def test_a_planted_fault_fails_its_claim_and_the_gate(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], gate: str, claim: str
) -> None:
    def faulty(*inputs: torch.Tensor, out: torch.Tensor, target: str, config: Any) -> torch.Tensor:
        result = latent_moe_tail(*inputs, out=out, target=target)
        fault(result, inputs=inputs)
        return result

    monkeypatch.setattr(correctness, "latent_moe_tail", faulty)
    result = correctness.run_case(Case("normal", SEED), REFERENCE)
    assert any(gate in reason for reason in tuning.gate_failures(result))
    assert claim in failing([result])


def test_stale_results_fail_the_reuse_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    good = correctness.check_reuse(SEED, REFERENCE)
    claims = correctness.correctness_claims([correctness.run_case(Case("normal", SEED), REFERENCE)], good)
    name = "one output buffer and one compiled launch can be reused"
    assert verdicts(claims)[name] == "pass"
    remembered: list[torch.Tensor] = []

    def cached(*inputs: torch.Tensor, out: torch.Tensor, target: str, config: Any) -> torch.Tensor:
        if not remembered:
            remembered.append(latent_moe_tail(*inputs, target=target))
        return out.copy_(remembered[0])

    monkeypatch.setattr(correctness, "latent_moe_tail", cached)
    stale = correctness.check_reuse(SEED, REFERENCE)
    assert not stale.changed
    assert stale.after_change.judged_ulp_error > 1


def test_every_breach_is_refused_and_one_let_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    results = contract_table.try_all_breaches(SEED, REFERENCE)
    assert [result.breach.clause for result in results if not result.refused_rightly] == []
    assert contract_table.contract_claims(results)[0].verdict == "pass"

    def lenient(**arguments: Any) -> torch.Tensor:
        if arguments.get("eps") == 0.0:
            return arguments["out"].zero_()
        raise ContractError(SupportReport("latent_moe_tail"))  # refuses, and does not say why

    monkeypatch.setattr(contract_table, "latent_moe_tail", lenient)
    claim = contract_table.contract_claims(contract_table.try_all_breaches(SEED, REFERENCE))[0]
    assert claim.verdict == "fail"
    assert "value of eps" in claim.detail


def counts(**changes: Any) -> LaunchCounts:
    weight = TensorTraffic("up_weight", 51_380_224, 0, (1, 1))
    vectors = [TensorTraffic(name, 12_845_056, 0, (1792, 1792)) for name in ("routed", "norm_weight")]
    base = LaunchCounts(
        num_launches=1,
        kernel_name="latent_moe_tail",
        num_workgroups=256,
        num_waves=1792,
        traffic=(*vectors, weight, TensorTraffic("shared", 229_376, 0, (16, 16))),
        loads_by_width={16: 51_380_224 + 2 * 12_845_056, 2: 229_376},
        vgprs=208,
        agprs=0,
        sgprs=30,
        lds_bytes=0,
        scratch_bytes=0,
        waves_per_simd=2,
        instructions={"vector": 1_471_232, "scalar": 179_200, "memory": 84_224, "other": 0},
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"num_launches": 2}, "one launch"),
        ({"scratch_bytes": 4}, "nothing spills"),
        ({"loads_by_width": {16: 51_380_224, 8: 25_690_112}}, "the weight is read by 16-byte loads only"),
    ],
)
def test_counted_claims_fail_on_what_they_forbid(changes: dict[str, Any], claim: str) -> None:
    assert set(verdicts(counters.traffic_claims(counts())).values()) == {"pass"}
    assert verdicts(counters.traffic_claims(counts(**changes)))[claim] == "fail"


def test_a_weight_byte_read_twice_or_never_fails() -> None:
    for often, loaded in (((0, 1), 51_380_208), ((1, 2), 51_380_240), ((0, 2), 51_380_224)):
        traffic = tuple(
            replace(entry, requests_per_byte=often, loaded_bytes=loaded)
            if entry.name == "up_weight"
            else entry
            for entry in counts().traffic
        )
        claims = verdicts(counters.traffic_claims(counts(traffic=traffic)))
        assert claims["every weight byte is requested exactly once"] == "fail"


def test_instructions_are_classed_by_mnemonic() -> None:
    seen = {"v_fma_f32": 3, "buffer_load_dwordx4": 2, "s_load_dwordx8": 1, "s_waitcnt": 5, "ds_read_b32": 1}
    assert counters.instructions_by_class(seen) == {"vector": 3, "scalar": 5, "memory": 4, "other": 0}


def fake_launches(
    monkeypatch: pytest.MonkeyPatch,
    right: CaseResult,
    vgprs: dict[str, int],
    wrong: set[str],
    crash: set[str],
) -> None:
    def launch(config: TailConfig, _target: TargetInfo, _seed: int) -> tuple[CaseResult, LaunchCounts]:
        if config.name in crash:
            raise RuntimeError(f"no registers left for {config.name}\nsecond line")
        result = replace(right, num_unwritten=1) if config.name in wrong else right
        return result, counts(vgprs=vgprs.get(config.name, 208))

    monkeypatch.setattr(tuning, "_launch_checked", launch)


def test_wrong_and_crashing_candidates_are_recorded_and_skipped(
    monkeypatch: pytest.MonkeyPatch, right: CaseResult, tmp_path: Path
) -> None:
    configs = tuning.choose_candidates("quick", EMULATOR)
    assert DEFAULT_CONFIG in configs
    wrong, crash = configs[1], configs[2]
    fake_launches(monkeypatch, right, {}, {wrong.name}, {crash.name})
    candidates = tuning.try_candidates(configs, EMULATOR, SEED)
    assert [candidate.status for candidate in candidates[:4]] == ["correct", "wrong", "crashed", "correct"]
    assert candidates[2].detail == f"RuntimeError: no registers left for {crash.name}"
    ranking = tuning.rank(candidates)
    assert wrong is not None
    assert crash is not None
    assert {wrong, crash}.isdisjoint(candidate.config for candidate in ranking)
    assert len(ranking) == len(configs) - 2
    path = tuning.save_winner(
        str(tmp_path), ranking, REFERENCE, profile="quick", seed=SEED, tried=len(configs)
    )
    assert path is not None
    assert load_tuned("emulator", path) == ranking[0].config
    claims = verdicts(tuning.tuning_claims(candidates, ranking, path, EMULATOR))
    assert claims["no candidate that runs is wrong, and the default is among the right ones"] == "fail"
    assert claims["the winner is saved and reads back"] == "pass"


def test_ties_go_to_bytes_in_flight_then_registers(
    monkeypatch: pytest.MonkeyPatch, right: CaseResult
) -> None:
    deep, shallow = TailConfig(4, 7, 4), TailConfig(4, 7, 2)
    slow = TailConfig(28, 1, 1)
    fake_launches(monkeypatch, right, {}, set(), set())
    ranking = tuning.rank(tuning.try_candidates([slow, shallow, deep], REFERENCE, SEED))
    assert [candidate.config for candidate in ranking] == [deep, shallow, slow]
    fake_launches(monkeypatch, right, {deep.name: 250}, set(), set())
    normal = replace(deep, weight_cache="normal")
    ranking = tuning.rank(tuning.try_candidates([deep, normal], REFERENCE, SEED))
    assert ranking[0].config == normal, "same time, bytes and instructions, fewer registers"


def test_a_target_without_configurations_has_one_candidate_and_saves_none(
    right: CaseResult, tmp_path: Path
) -> None:
    assert tuning.choose_candidates("full", REFERENCE) == [None]
    candidates = tuning.try_candidates([None], REFERENCE, SEED)
    assert [(candidate.name, candidate.status) for candidate in candidates] == [("built in", "correct")]
    ranking = tuning.rank(candidates)
    path = tuning.save_winner(str(tmp_path), ranking, REFERENCE, profile="quick", seed=SEED, tried=1)
    assert path is None
    claims = tuning.tuning_claims(candidates, ranking, path, REFERENCE)
    assert [claim.verdict for claim in claims] == ["pass"]


def test_no_correct_candidate_means_no_winner(tmp_path: Path) -> None:
    assert tuning.save_winner(str(tmp_path), [], REFERENCE, profile="quick", seed=0, tried=3) is None
    claims = verdicts(tuning.tuning_claims([], [], None, EMULATOR))
    assert set(claims.values()) == {"fail"}


def test_the_model_follows_its_three_bounds() -> None:
    machine = model.MachineModel()
    full = model.modelled_time(DEFAULT_CONFIG, 2, 0, machine)
    assert full.bound == "stream"
    assert full.stream_s == pytest.approx(51_380_224 / 8e12)
    assert full.total_s == pytest.approx(1e-6 + 51_380_224 / 8e12)
    starved = model.modelled_time(TailConfig(28, 1, 1), 3, 0, machine)
    assert starved.bound == "latency"
    assert starved.latency_bound_s == pytest.approx(28e-6), "28 rows, one in flight, a microsecond each"
    busy = model.modelled_time(DEFAULT_CONFIG, 2, 1792 * 100_000, machine)
    assert busy.bound == "issue"
    assert busy.issue_s == pytest.approx(2 * 100_000 * 4 / 2.4e9), "two waves on the fullest SIMD"


def test_the_bound_claim_fails_when_something_else_bounds_the_launch() -> None:
    assert bound.bound_claims(bound.launch_model(counts(), DEFAULT_CONFIG))[0].verdict == "pass"
    busy = counts(instructions={"vector": 10**9, "scalar": 0, "memory": 0, "other": 0})
    assert bound.bound_claims(bound.launch_model(busy, DEFAULT_CONFIG))[0].verdict == "fail"


def test_untimed_runs_say_so_first_and_fused_moves_fewer_bytes() -> None:
    note = bound.opening_note(REFERENCE)
    assert note.text.startswith("Nothing was timed")
    timed = replace(REFERENCE, name="cuda", times="measured", device_name="a GPU")
    assert "Nothing was timed" not in bound.opening_note(timed).text
    rows = bound.bound_table().rows
    assert [row[:2] for row in rows] == [["unfused", 3], ["fused", 1]]
    assert rows[0][2] > rows[1][2]
    assert rows[0][4] - rows[1][4] == pytest.approx(2.0, abs=0.01), "two latencies fewer"


def test_signed_errors_use_the_larger_unit_and_skip_nonfinite() -> None:
    actual, p, y = np.array([1.0, 2.0, np.nan]), np.array([1.0, 128.0, 1.0]), np.array([1.0, 1.0, 1.0])
    np.testing.assert_array_equal(correctness.signed_ulp_errors(actual, p, y), [0.0, 1.0])
