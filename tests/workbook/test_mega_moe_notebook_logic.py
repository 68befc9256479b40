# SPDX-License-Identifier: Apache-2.0
"""The logic of MegaMoE's notebooks: claims pass on right runs and fail on planted faults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernellib.ops.mega_moe.config import KIMI_K3, MegaMoEConfig
from kernellib.symmetric import SymmetricHeap
from kernellib.workbook.mega_moe import compare, correctness, correctness_view, measure, runs, tuning
from kernellib.workbook.mega_moe.correctness import Bounds, Checked, Repeated
from kernellib.workbook.mega_moe.counts import Counts
from kernellib.workbook.mega_moe.runs import Request, Run
from kernellib.workbook.mega_moe.setup import (
    QUICK_BUCKETS,
    SMALL_SHAPE,
    Setup,
    SetupError,
    make_setup,
    pack_rank,
)

SEED = 20261202
FINE_REPEATED = Repeated(True, True, (0.0, 0.0), None)
FINE_BOUNDS = Bounds(("told", "told"), True)
QUANTISATION = "against fp32 the error is that of quantisation"


@functools.cache
def setup() -> Setup:
    return replace(make_setup("emulator", "quick", [], 2, [], SEED), num_cu=2)


def a_request(**changes: Any) -> Request:
    return replace(Request("a run", setup().tuned(1), 4, seed=SEED), **changes)


def right_run(request: Request, counts: Counts | None = None) -> Run:
    """What a right kernel gives: the quantisation-aware oracle."""
    return Run(request, [out.copy() for out in runs.oracles(setup(), request)[1]], counts)


def verdicts(claims: list[Any]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims}


def failing(claims: list[Any]) -> set[str]:
    return {claim.name for claim in claims if claim.verdict == "fail"}


# ------------------------------------------------------------------------------------------- setup


def test_parameters_become_a_setup() -> None:
    quick = make_setup("cuda", "quick", [], 8, [], 3)
    assert (quick.target, quick.shape, quick.buckets, quick.num_ranks) == (
        "emulator",
        SMALL_SHAPE,
        QUICK_BUCKETS,
        8,
    )
    full = make_setup("emulator", "full", [], 8, [], 3)
    assert (full.shape, full.buckets) == (KIMI_K3, (1,))
    given = make_setup("emulator", "quick", [8, 256, 128, 2], 4, [64], 3)
    assert (given.shape.num_experts, given.shape.model_dim, given.buckets) == (8, 256, (64,))
    assert given.tokens(64) == given.capacity == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("emulator", "fast", [], 8, [], 0), "profile got 'fast'"),
        (("emulator", "quick", [8, 128], 8, [], 0), "shape got"),
        (("emulator", "quick", [], 8, [1, 3], 0), r"buckets got \[3\]"),
    ],
)
def test_parameters_that_make_no_setup_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        make_setup(*arguments)


def test_experts_without_rows_may_stay_away() -> None:
    whole, part = (pack_rank(setup(), 1, torch.device("cpu"), used) for used in (None, frozenset({9, 12})))
    size = len(whole.w1) // 8
    for index in range(8):
        same = bool((whole.w1[index * size :][:size] == part.w1[index * size :][:size]).all())
        assert same == (8 + index in {9, 12})


# ----------------------------------------------------------------------------- notebook 01: correctness


def good(request: Request) -> Checked:
    return correctness.check(setup(), right_run(request))


def claims_of(
    buckets: list[Checked],
    repeated: Repeated = FINE_REPEATED,
    bounds: Bounds = FINE_BOUNDS,
    apart: float = 0.1,
) -> set[str]:
    fine = [good(a_request())]
    return failing(correctness.correctness_claims(buckets, fine, fine, apart, repeated, bounds))


def one_unwritten(out: Any) -> None:
    out[1, 7] = np.nan


def swap_blocks(out: Any) -> None:
    out[:, :32], out[:, 32:64] = out[:, 32:64].copy(), out[:, :32].copy()


def slightly_wrong(out: Any) -> None:
    out *= 1.01


def test_a_right_run_passes_every_claim() -> None:
    assert claims_of([good(a_request())]) == set()


@pytest.mark.parametrize(
    ("fault", "also"),
    [
        (
            one_unwritten,
            {"every output element is written", QUANTISATION},
        ),
        (swap_blocks, {QUANTISATION}),
        (slightly_wrong, set()),  # the loose bound does not see it: the tight one must
    ],
)
def test_a_planted_fault_fails_its_claims(fault: Callable[[Any], None], also: set[str]) -> None:
    found = right_run(a_request())
    fault(found.outputs[1])
    checked = correctness.check(setup(), found)
    assert not checked.right
    name = "every bucket's configuration agrees with the quantisation-aware oracle"
    assert claims_of([checked]) == {name, *also}


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"repeated": Repeated(False, True, (0.0, 0.0), None)}, "calls follow their own inputs"),
        ({"repeated": Repeated(True, False, (0.0, 0.0), None)}, "calls follow their own inputs"),
        ({"repeated": Repeated(True, True, (0.0, 0.5), None)}, "calls follow their own inputs"),
        ({"repeated": Repeated(True, True, (0.0, 0.0), 0.5)}, "calls follow their own inputs"),
        ({"bounds": Bounds(("told", ""), True)}, "an expert id out of range is reported"),
        ({"bounds": Bounds(("told", "told so"), True)}, "an expert id out of range is reported"),
        ({"bounds": Bounds(("told", "told"), False)}, "an expert id out of range is reported"),
        ({"apart": 0.001}, "SiTUv2 is not SiLU"),
    ],
)
def test_each_other_claim_fails_on_what_it_forbids(changes: dict[str, Any], claim: str) -> None:
    [name] = claims_of([good(a_request())], **changes)
    assert name.startswith(claim)


def test_a_run_that_failed_is_shown_with_its_reason() -> None:
    checked = correctness.check(setup(), Run(a_request(), [], None, "ContractError: no"))
    assert not checked.right
    assert "ContractError: no" in repr(correctness_view.check_table([checked], "runs"))


def test_the_error_map_shows_the_block_that_is_wrong() -> None:
    found = right_run(a_request())
    found.outputs[1][2, 40] += 1.0
    expected = runs.oracles(setup(), found.request)[1]
    errors = correctness_view.error_map(found.outputs, expected)
    assert np.argwhere(errors > 0).tolist() == [[4 + 2, 1]]
    image = correctness_view.error_figure(setup(), correctness.check(setup(), found))
    assert image.data[:4] == b"\x89PNG"


def test_oracles_are_computed_for_few_tokens_of_many() -> None:
    assert runs.sample_rows(3).tolist() == [0, 1, 2]
    assert runs.sample_rows(0).tolist() == []
    assert runs.sample_rows(100).tolist() == [0, 33, 66, 99]
    request = a_request(tokens=20)
    assert [len(out) for out in runs.oracles(setup(), request)[0]] == [4, 4]


# ------------------------------------------------------------------------ runs on emulated ranks, counted


@functools.cache
def both_arms() -> list[Checked]:
    pair = compare.arms(setup(), "fused_vs_serial", 1)
    return [correctness.check(setup(), found) for found in runs.run(setup(), pair, count=True)]


def compared(**changes: Any) -> compare.Compared:
    """Serial and fused at bucket 1, run and counted; ``changes`` to the fused arm's counters."""
    serial, fused = both_arms()
    assert fused.run.counts is not None
    altered = replace(fused, run=replace(fused.run, counts=replace(fused.run.counts, **changes)))
    return compare.Compared(1, serial, altered, None)


def test_counted_runs_explain_every_byte_on_the_wire() -> None:
    entry = compared()
    assert failing(compare.compare_claims(setup(), [entry], "fused_vs_serial")) == set()
    assert len(compare.compare_claims(setup(), [entry], "fused_vs_serial")) == 6
    assert compare.unexplained_bytes(setup(), entry.tested) == 0
    counts = entry.tested.run.counts
    assert counts is not None
    assert counts.rows == 2 * 4  # two ranks, one token each, top-4
    assert counts.tile_slots == 16 * counts.num_tiles
    assert counts.launches == 3
    assert "idle tile slots" in repr(compare.tables([entry], "fused_vs_serial")[0])
    assert compare.figure([entry], "fused_vs_serial").data[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"wire_bytes": 10**6}, "on the wire are the routes' rows"),
        ({"wire_bytes": 10}, "on the wire are the routes' rows"),
        ({"scratch_bytes": 4}, "nothing spills"),
        ({"launches": 5}, "the fused layer launches fewer kernels"),
        ({"matrix_flops": 1}, "both arms do the same matrix operations"),
    ],
)
def test_counted_claims_fail_on_what_they_forbid(changes: dict[str, int], claim: str) -> None:
    [name] = failing(compare.compare_claims(setup(), [compared(**changes)], "fused_vs_serial"))
    assert name.startswith(claim)


def test_a_comparison_of_one_configuration_with_itself_is_told() -> None:
    entry = compared()
    assert "the tables differ on this device" in failing(
        compare.compare_claims(setup(), [entry], "tuned_vs_generic")
    )
    other = a_request(config=setup().tuned(8192))
    tested = replace(entry.tested, run=replace(entry.tested.run, request=other))
    claims = compare.compare_claims(setup(), [replace(entry, tested=tested)], "tuned_vs_generic")
    assert verdicts(claims)["the tables differ on this device"] == "pass"


def test_a_wrong_arm_fails_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = right_run(a_request())
    wrong.outputs[0][0, 0] += 1.0
    monkeypatch.setattr(compare, "run", lambda *_, **__: [right_run(a_request()), wrong])
    monkeypatch.setattr(compare, "measure", lambda *_, **__: pytest.fail("a wrong arm was timed"))
    found = compare.compare(replace(setup(), buckets=(1,)), "tuned_vs_generic", trials=5)
    assert "both arms are right at every bucket before anything is compared" in failing(
        compare.compare_claims(setup(), found, "tuned_vs_generic")
    )


def test_without_a_gpu_nothing_is_timed() -> None:
    assert measure.measure(setup(), a_request(), a_request(), trials=5) is None
    assert "nothing is timed" in repr(compare.opening_note(setup()))


# ------------------------------------------------------------------------------------- measuring


def samples(baseline: float, tested: float, control: float, noise: int = 0) -> dict[str, list[float]]:
    rng = np.random.default_rng(SEED + noise)
    return {
        arm: (value * rng.uniform(0.99, 1.01, 21)).tolist()
        for arm, value in zip(measure.ARMS, (baseline, tested, control), strict=True)
    }


def test_a_trials_time_is_the_slowest_ranks() -> None:
    timing = measure.summarise([samples(1e-3, 5e-4, 1e-3), samples(2e-3, 1e-3, 2e-3, 1)])
    assert all(1.9e-3 < value < 2.1e-3 for value in timing.samples_s["baseline"])
    assert timing.ratio.low > 1.9
    assert (timing.valid, timing.verdict) == (True, "faster")


@pytest.mark.parametrize(
    ("times", "claim"),
    [
        ((1e-3, 1.2e-3, 1e-3), "the tuned arm is slower at no bucket"),
        ((1e-3, 8e-4, 1.2e-3), "the A/A control's interval contains 1 at every bucket"),
    ],
)
def test_measured_claims_fail_on_what_they_forbid(times: tuple[float, float, float], claim: str) -> None:
    timing = measure.summarise([samples(*times)])
    fine = good(a_request())
    entry = compare.Compared(1, fine, fine, timing)
    claims = compare.compare_claims(setup(), [entry], "tuned_vs_generic")
    assert failing(claims) == {claim}
    [table] = compare.tables([entry], "tuned_vs_generic")
    assert table.source == "measured"


def order_timer(call: Callable[[], Any], heap: SymmetricHeap) -> Callable[[], float]:
    """A clock of tests: runs the call, says that it took a millisecond, and remembers the order."""
    index = len(_order.setdefault(heap.rank, [[]])) - 1
    _order[heap.rank].append([])

    def sample() -> float:
        call()
        _order[heap.rank][0].append(index)
        return 1e-3

    return sample


_order: dict[int, list[list[int]]] = {}


def test_trials_alternate_between_the_arms_on_every_rank() -> None:
    _order.clear()
    request = a_request(tokens=1)
    timing = measure.measure(setup(), request, replace(request, arm="serial"), trials=4, timer=order_timer)
    assert timing is not None
    assert timing.valid
    assert {rank: order[0] for rank, order in _order.items()} == dict.fromkeys(
        range(2), [0, 1, 2, 2, 1, 0] * 2
    )


# ------------------------------------------------------------------------------ notebook 02: tuning


def counted(flops: int, memory: int = 1) -> Counts:
    return Counts(3, (), 1, memory, flops, 1, 1, 16, 1, 1, 1, 0)


def fake_attempt(where: Setup, bucket: int, config: MegaMoEConfig) -> tuning.Candidate:
    """Candidates of ready order crash, strided ones are wrong, the others right."""
    if config.tile_order == "ready":
        return tuning.Candidate(bucket, config, "crashed", "DeadlockError: no wave can make progress")
    request = a_request(config=config)
    checked = correctness.check(setup(), right_run(request, counted(100 + config.tile_m)))
    if config.persist_strided:
        return tuning.Candidate(bucket, config, "wrong", "relL2 0.5", replace(checked, quantized=0.5))
    return tuning.Candidate(bucket, config, "correct", "", checked)


def test_a_wrong_or_crashing_candidate_is_recorded_and_skipped(tmp_path: Path) -> None:
    where = replace(setup(), buckets=(1, 128))
    found = tuning.try_candidates(where, "full", trials=5, attempt=fake_attempt)
    statuses = {candidate.status for candidate in found}
    assert statuses == {"correct", "wrong", "crashed"}
    for bucket in where.buckets:
        ranked = tuning.rank(found, bucket)
        assert all(candidate.status == "correct" for candidate in ranked)
        assert [candidate.key for candidate in ranked] == sorted(candidate.key for candidate in ranked)
        assert ranked[0].config.tile_m == 16, "padding is work"
    path = tuning.save_table(tmp_path, where, found)
    assert failing(tuning.tuning_claims(where, found, path)) == set()
    assert tuning.load_table(path)[128] == tuning.rank(found, 128)[0].config
    text = repr(tuning.status_table(found))
    assert "DeadlockError" in text
    assert tuning.ranking_figure(where, found).data[:4] == b"\x89PNG"


def test_a_candidate_that_raises_does_not_stop_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> None:
        raise RuntimeError("no wave can make progress\nsecond line")

    monkeypatch.setattr(tuning, "run", hang)
    found = tuning.try_candidate(setup(), 1, setup().tuned(1))
    assert (found.status, found.detail) == ("crashed", "RuntimeError: no wave can make progress")


def test_a_candidate_with_sparse_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def sparse(_: Setup, requests: list[Request], **__: Any) -> list[Run]:
        found = right_run(requests[0])
        found.outputs[1][-1, -1] = np.nan
        return [found]

    monkeypatch.setattr(tuning, "run", sparse)
    found = tuning.try_candidate(setup(), 1, setup().tuned(1))
    assert found.status == "wrong"
    assert "1 elements unwritten" in found.detail


def test_a_table_without_a_winner_or_with_another_fails_its_claim(tmp_path: Path) -> None:
    where = replace(setup(), buckets=(1,))
    found = tuning.try_candidates(where, "quick", trials=5, attempt=fake_attempt)
    path = tuning.save_table(tmp_path, where, found)
    crashed = [replace(candidate, status="crashed") for candidate in found]
    assert "every bucket has a correct configuration" in failing(tuning.tuning_claims(where, crashed, path))
    path.write_text(path.read_text().replace('"tile_m": 16', '"tile_m": 32'))
    assert "the written table holds each bucket's best" in failing(tuning.tuning_claims(where, found, path))
    for content in ("{}", "[]", '{"format": "other", "entries": {}}', "no json"):
        path.write_text(content)
        with pytest.raises(tuning.TableError):
            tuning.load_table(path)


def test_quick_candidates_change_one_knob_at_a_time() -> None:
    whole = make_setup("emulator", "quick", [], 8, [], 0)
    quick, full = (tuning.choose_candidates(whole, profile, 1) for profile in ("quick", "full"))
    assert set(quick) < set(full)
    assert whole.generic(1) in quick
    assert whole.tuned(1) in quick
    assert len({config.name for config in full}) == len(full)
