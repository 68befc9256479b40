# SPDX-License-Identifier: Apache-2.0
"""Records: what the schema demands, what a round trip keeps, how two of them compare."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import BASE_S, FakeDevice, fake_record, second_of_ab

from kernellib.bench.comparison import compare_records
from kernellib.bench.errors import MethodError, RecordError
from kernellib.bench.record import Record, record_schema
from kernellib.bench.stats import ratio_interval, slowest_rank


@pytest.fixture(scope="module")
def record() -> Record:
    return fake_record()


def changed(record: Record, change: Callable[[Any], Any]) -> Any:
    data = copy.deepcopy(dict(record.data))
    change(data)
    return data


def test_a_record_survives_the_file_and_keeps_every_sample(record: Record, tmp_path: Path) -> None:
    path = record.save(tmp_path / "folder" / "record.json")
    again = Record.load(path)
    assert again.data == record.data
    assert not list(path.parent.glob("*.partial"))
    comparison = again.comparison("eager", "fused")
    assert comparison is not None
    assert len(comparison["orders"]) == again.data["method"]["num_trials"]


def test_the_interval_can_be_computed_again_from_the_samples(record: Record) -> None:
    comparison = record.comparison("eager", "fused")
    assert comparison is not None
    sides = [[slowest_rank(ranks) for ranks in comparison[key]] for key in ("reference_s", "tested_s")]
    again = ratio_interval(
        *sides,
        comparison["captures"],
        resolution_s=record.data["method"]["timer_resolution_s"],
        seed=record.data["seed"],
    )
    assert (again.median, again.low, again.high) == pytest.approx(
        (comparison["ratio"], comparison["low"], comparison["high"]), rel=1e-5
    )


@pytest.mark.parametrize("field", record_schema()["required"])
def test_every_field_is_demanded(record: Record, field: str) -> None:
    with pytest.raises(RecordError, match=field):
        Record.of(changed(record, lambda data: data.pop(field)))


def _times_on_a_failed_arm(data: Any) -> None:
    data["arms"][1].update(status="failed_gate", reason="wrong")


def _unlabelled_times(data: Any) -> None:
    del data["arms"][0]["times"]["source"]


def _modelled_times(data: Any) -> None:
    data["arms"][0]["times"]["source"] = "modelled"


def _times_where_nothing_was_timed(data: Any) -> None:
    data["kind"] = "counted"


def _invalid_without_reason(data: Any) -> None:
    data["valid"] = False


def _valid_with_a_reason(data: Any) -> None:
    data["invalid_reasons"] = ["control"]


def _unpaired(data: Any) -> None:
    data["comparisons"][0]["tested_s"].pop()


def _trials_without_captures(data: Any) -> None:
    del data["comparisons"][0]["captures"]


def _control_without_captures(data: Any) -> None:
    del data["control"]["captures"]


def _captures_of_other_trials(data: Any) -> None:
    data["comparisons"][0]["captures"].pop()


def _unknown_arm(data: Any) -> None:
    data["comparisons"][0]["tested"] = "ghost"


def _twice(data: Any) -> None:
    data["arms"].append(data["arms"][0])


@pytest.mark.parametrize(
    "fault",
    [_times_on_a_failed_arm, _unlabelled_times, _modelled_times, _times_where_nothing_was_timed,
     _invalid_without_reason, _valid_with_a_reason, _unpaired, _unknown_arm, _twice,
     _trials_without_captures, _control_without_captures, _captures_of_other_trials],
)  # fmt: skip
def test_a_dishonest_record_is_refused(record: Record, fault: Callable[[Any], None]) -> None:
    with pytest.raises(RecordError):
        Record.of(changed(record, fault))


def test_a_missing_or_broken_file_is_a_record_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        Record.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RecordError, match="cannot be read"):
        Record.load(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text(json.dumps({"schema": "another"}))
    with pytest.raises(RecordError, match="does not follow"):
        Record.load(tmp_path / "other.json")


def test_rates_are_held_against_the_runs_own_ceilings(record: Record) -> None:
    arm, copy_ceiling = record.arm("fused"), record.ceiling("copy")
    assert copy_ceiling is not None
    assert copy_ceiling["samples"] == [1e9, 1.1e9, 1e9, 1.1e9]  # before and after the trials
    wanted = record.data["work"]["bytes_per_call"] / arm["times"]["p50"]
    assert arm["rates"]["bytes_per_s"] == pytest.approx(wanted, rel=1e-5)
    assert arm["rates"]["share_of_copy"] == pytest.approx(wanted / copy_ceiling["median"], rel=1e-5)


@pytest.mark.parametrize("placement", [0.0, 0.005])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_runs_of_the_same_revision_compare_well(record: Record, seed: int, placement: float) -> None:
    outcome = compare_records(record, fake_record(seed=seed, device=FakeDevice(seed, placement=placement)))
    assert outcome.exit_code == 0
    assert {change.quantity for change in outcome.changes} == {"p50 (s/call)", "ratio over eager"}


@pytest.mark.parametrize("placement", [0.0, 0.005])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_slowdown_of_seven_percent_is_caught_and_a_gain_is_not(
    record: Record, seed: int, placement: float
) -> None:
    slower, faster = (
        fake_record(seconds, seed, device=FakeDevice(seed, placement=placement))
        for seconds in (BASE_S / 2 * 1.07, BASE_S / 2 / 1.07)
    )
    assert compare_records(record, slower).exit_code == 1
    assert compare_records(record, slower, tolerance=0.1).exit_code == 0
    assert compare_records(record, faster).exit_code == 0


def test_a_slowdown_hides_neither_behind_a_slow_baseline_nor_behind_a_fast_device(record: Record) -> None:
    def scale(factors: dict[str, float], ratio: float) -> Record:
        def change(data: Any) -> None:
            for arm in data["arms"]:
                for key in ("p10", "p50", "p90"):
                    arm["times"][key] *= factors[arm["name"]]
            data["comparisons"][0]["ratio"] *= ratio

        return Record.of(changed(record, change))

    both_slow = compare_records(record, scale({"eager": 1.07, "fused": 1.07}, 1.0))
    assert both_slow.exit_code == 1
    assert [change.regressed for change in both_slow.changes] == [True, False]
    assert any("baseline's own p50" in note for note in both_slow.notes)
    fast_device = compare_records(record, scale({"eager": 0.93, "fused": 1.0}, 0.93))
    assert fast_device.exit_code == 1
    assert [change.regressed for change in fast_device.changes] == [False, True]


def _other_device(data: Any) -> None:
    data["device"]["name"] = "another device"


def _other_shape(data: Any) -> None:
    data["shapes"]["a"]["shape"] = [128]


def _other_method(data: Any) -> None:
    data["method_revision"] += 1


def _other_rotation(data: Any) -> None:
    data["method"]["rotation"] += 1


def _other_ranks(data: Any) -> None:
    data["device"]["num_ranks"] = 8


def _other_target(data: Any) -> None:
    data["target"] = "mi355x"


def _no_candidate(data: Any) -> None:
    data["arms"][1]["name"] = "renamed"
    data["comparisons"] = []


@pytest.mark.parametrize(
    ("difference", "text"),
    [(_other_device, "device"), (_other_shape, "shapes"), (_other_method, "method revision"),
     (_other_rotation, "rotation"), (_other_ranks, "ranks"), (_other_target, "target"),
     (_no_candidate, "missing")],
)  # fmt: skip
def test_records_that_do_not_compare_are_refused(
    record: Record, difference: Callable[[Any], None], text: str
) -> None:
    outcome = compare_records(record, Record.of(changed(record, difference)))
    assert outcome.exit_code == 2
    assert any(text in reason for reason in outcome.incomparable)


def test_an_invalid_record_compares_with_nothing(record: Record) -> None:
    invalid = fake_record(device=FakeDevice(bias=second_of_ab))
    assert compare_records(record, invalid).exit_code == 2
    assert compare_records(invalid, record).exit_code == 2


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_without_sense_is_refused(record: Record, tolerance: float) -> None:
    with pytest.raises(MethodError, match="tolerance"):
        compare_records(record, record, tolerance)
