# SPDX-License-Identifier: Apache-2.0
"""A record whose figures do not follow from its own samples is noticed, whichever figure it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import BASE_S, FakeDevice, fake_record
from rich.console import Console
from typer.testing import CliRunner

from kernellib.bench.cli import app
from kernellib.bench.comparison import compare_records
from kernellib.bench.consistency import contradictions
from kernellib.bench.errors import RecordError
from kernellib.bench.readme import find_records, measured_block
from kernellib.bench.record import Record
from kernellib.bench.view import print_record

ROOT = Path(__file__).parents[2]
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def record() -> Record:
    return fake_record(device=FakeDevice(num_ranks=2))


def changed(record: Record, change: Change) -> Record:
    data = copy.deepcopy(dict(record.data))
    change(data)
    return Record.of(data)


@pytest.mark.parametrize("placement", [0.0, 0.02])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_honest_record_contradicts_nothing(seed: int, placement: float) -> None:
    made = fake_record(seed=seed, device=FakeDevice(seed, placement=placement))
    assert made.contradictions == ()
    assert made.trusted


def test_the_committed_records_contradict_nothing() -> None:
    found = find_records(ROOT)
    assert found
    assert {path.as_posix(): record.contradictions for path, record in found} == {
        path.as_posix(): () for path, _ in found
    }


def scaled_samples(data: Any) -> None:
    samples = data["comparisons"][0]["tested_s"]
    data["comparisons"][0]["tested_s"] = [[1.2 * rank for rank in ranks] for ranks in samples]


def control_off(data: Any) -> None:
    data["control"].update(verdict="faster")


FAULTS: list[tuple[Change, str]] = [
    (lambda d: d["comparisons"][0].update(ratio=d["comparisons"][0]["ratio"] * 1.001), "its ratio is"),
    (lambda d: d["comparisons"][0].update(low=d["comparisons"][0]["low"] * 0.99), "low is"),
    (lambda d: d["comparisons"][0].update(high=d["comparisons"][0]["high"] * 1.01), "high is"),
    (lambda d: d["comparisons"][0].update(low=9.0), "outside its interval"),
    (lambda d: d["comparisons"][0].update(verdict="slower"), "verdict"),
    (lambda d: d["comparisons"][0].update(orders=["AB"] * len(d["comparisons"][0]["orders"])), "orders"),
    (lambda d: d["comparisons"][0]["captures"].reverse(), "captures"),
    (scaled_samples, "fused's p50 is"),
    (lambda d: d["arms"][1]["times"].update(p50=1e-6), "fused's p50 is"),
    (lambda d: d["arms"][1]["times"].update(p10=1e-6), "fused's p10 is"),
    (lambda d: d["arms"][1]["times"].update(num_samples=7), "7 samples"),
    (lambda d: d["arms"][0]["times"]["p50_by_capture"].reverse(), "p50_by_capture"),
    (lambda d: d["arms"][1]["rates"].update(share_of_copy=0.95), "share_of_copy"),
    (lambda d: d["arms"][1]["rates"].update(bytes_per_s=1e9), "bytes_per_s"),
    (lambda d: d["ceilings"][0].update(median=1e8), "ceiling copy"),
    (lambda d: d["ceilings"].pop(0), "no ceiling 'copy'"),
    (lambda d: d["arms"][1]["errors_after"].update(passed=False), "errors_after"),
    (lambda d: d["device"].update(num_ranks=8), "number of ranks"),
    (lambda d: d["device"].update(llc_bytes=10**9), "could hold the slots"),
    (lambda d: d["method"].update(num_trials=5), "the method says 5"),
    (lambda d: d["method"].update(rotation_bytes=5), "rotation_bytes"),
    (lambda d: d.update(control=None), "no A/A control"),
    (control_off, "does not contain 1"),
    (
        lambda d: d["arms"][1].update(status="failed_recheck", reason="wrong", times=None, rates=None),
        "compares fused, which failed",
    ),
]


@pytest.mark.parametrize(("change", "text"), FAULTS, ids=[text for _, text in FAULTS])
def test_a_figure_that_its_samples_refute_is_named_and_never_passes(
    record: Record, change: Change, text: str, tmp_path: Path
) -> None:
    edited = changed(record, change)
    assert any(text in fault for fault in edited.contradictions), edited.contradictions
    assert not edited.trusted
    assert compare_records(record, edited, 0.5).exit_code != 0
    assert compare_records(edited, record, 0.5).exit_code != 0
    edited.save(tmp_path / "results" / "fake" / "2030-01-01" / "x.record.json")
    block = measured_block(tmp_path)
    assert "| **NO** |" in block
    assert "contradicts itself" in block


def test_a_regression_is_reported_although_the_record_contradicts_itself(record: Record) -> None:
    edited = changed(record, lambda d: d["arms"][1]["times"].update(p50=BASE_S))
    outcome = compare_records(record, edited)
    assert outcome.exit_code == 1
    assert outcome.contradictions


def test_another_revision_is_held_only_to_what_all_share(record: Record) -> None:
    def later(data: Any) -> None:
        data["method_revision"] = 99
        data["comparisons"][0]["ratio"] = (data["comparisons"][0]["low"] + data["comparisons"][0]["high"]) / 2

    assert contradictions(changed(record, later).data) == ()
    assert changed(record, lambda d: (later(d), control_off(d))).contradictions


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_refused(record: Record, number: str, tmp_path: Path) -> None:
    text = json.dumps(record.data).replace(json.dumps(record.arm("fused")["times"]["p50"]), number)
    assert number in text
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(RecordError):
        Record.load(path)
    old = record.save(tmp_path / "old.json")
    assert CliRunner().invoke(app, ["compare", str(old), str(path)]).exit_code == 2
    with pytest.raises(RecordError, match="finite"):
        changed(record, lambda d: d["arms"][1]["times"].update(p50=float("nan")))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["arms"][0].update(role="peer"), "baselines are"),
        (lambda d: d["arms"][1].update(role="baseline"), "baselines are"),
        (lambda d: d["control"].update(reference="fused"), "control"),
        (lambda d: d["control"]["tested_s"].pop(), "unequal"),
        (lambda d: d["method"].update(slot_bytes="many"), "slot_bytes"),
        (lambda d: d["state_before"].update(power_w="[/red]"), "power_w"),
        (lambda d: d["work"].update(bytes_per_call=0), "bytes_per_call"),
    ],
)
def test_a_record_that_cannot_be_read_by_its_own_tools_is_refused(
    record: Record, change: Change, text: str
) -> None:
    with pytest.raises(RecordError, match=text):
        changed(record, change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["device"].update(num_compute_units=7), "compute units"),
        (lambda d: d["device"].update(llc_bytes=1), "last-level cache"),
        (lambda d: d["method"].update(timer="events, 1 x 3 calls"), "timer"),
        (lambda d: d["method"].update(confidence=0.5), "confidence"),
        (lambda d: d["work"].update(flops_per_call=1), "work"),
        (lambda d: d.update(comparisons=[]), "ratio over eager"),
        (lambda d: d["arms"][1].update(times=None, rates=None), "times"),
    ],
)
def test_what_makes_numbers_another_thing_makes_records_incomparable(
    record: Record, change: Change, text: str
) -> None:
    outcome = compare_records(record, changed(record, change))
    assert outcome.exit_code == 2
    assert any(text in reason for reason in outcome.incomparable)


def test_a_reason_in_brackets_is_shown_as_it_is(record: Record) -> None:
    def fail(data: Any) -> None:
        data["arms"][1].update(status="failed_build", reason="no [/lib/x] [red]", times=None, rates=None)
        data["comparisons"] = []

    console = Console(width=250, record=True, quiet=False)
    print_record(changed(record, fail), console, "a[/b].json")
    text = console.export_text()
    assert "no [/lib/x] [red]" in text
    assert "a[/b].json" in text


def test_plots_of_one_name_do_not_replace_each_other(record: Record, tmp_path: Path) -> None:
    paths = [record.save(tmp_path / day / "x.record.json") for day in ("one", "two")]
    result = CliRunner().invoke(app, ["show", *map(str, paths), "--out", str(tmp_path / "plots")])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "plots").iterdir())) == 2
