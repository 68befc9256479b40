# SPDX-License-Identifier: Apache-2.0
"""Whether a record's figures follow from its own samples: computed again, from nothing but the record.

A record holds every sample, so everything else in it that was measured can be derived: percentiles, rates,
ratios, intervals, verdicts, validity. Where a figure says something else the record was edited, or made by
a faulty program, and nothing may be claimed from it. Intervals are checked by probability: a percentile
bootstrap draws at random, and another version of its library may draw other numbers.

Revision 1 of the method drew trials instead of captures, and left the control's second side out of the
baseline's times; its records are held to its own rules. Of a revision that is not known here only what all
revisions share is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .schedule import turn_of
from .stats import F64, Interval, capture_ratios, percentiles, slowest_rank

RELATIVE = 1e-5  # records keep seven digits
KNOWN_REVISIONS = (1, 2, 3)
NUM_RESAMPLES = 4999
# Four standard deviations of the share of 4,999 draws below the 2.5 % point.
SHARE_TOLERANCE = 0.01


def _equal(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= RELATIVE * abs(wanted)


def _sides(data: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Every comparison, and whether it is the control."""
    for entry in data["comparisons"]:
        yield entry, False
    if data["control"] is not None:
        yield data["control"], True


def _captures(entry: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(reference, tested) of each trial. Revision 1 had one capture of each arm, and wrote none down."""
    written = entry.get("captures") or [(0, 0)] * len(entry["orders"])
    return [(reference, tested) for reference, tested in written]


def _samples(data: Mapping[str, Any], arm: str) -> dict[int, list[float]]:
    """Seconds a call of one arm, by capture, the slowest rank's."""
    found: dict[int, list[float]] = {}
    for entry, control in _sides(data):
        tested = entry["reference"] if control and data["method_revision"] > 1 else entry["tested"]
        for place, (name, times) in enumerate(
            ((entry["reference"], entry["reference_s"]), (tested, entry["tested_s"]))
        ):
            if name == arm:
                for captures, ranks in zip(_captures(entry), times, strict=True):
                    seconds = slowest_rank(ranks) / data["method"]["rotation"]
                    found.setdefault(captures[place], []).append(seconds)
    return found


def _arm_faults(data: Mapping[str, Any], arm: Mapping[str, Any]) -> Iterator[str]:
    name, times, rates = arm["name"], arm["times"], arm["rates"]
    if arm["status"] == "passed":
        for when in ("errors_before", "errors_after"):
            if arm[when] is not None and not arm[when]["passed"]:
                yield f"{name} has passed, but {when} says that it has not"
    if times is None:
        return
    by_capture = _samples(data, name) if data["method_revision"] in KNOWN_REVISIONS else {}
    seconds = [sample for capture in by_capture.values() for sample in capture]
    if data["method_revision"] in KNOWN_REVISIONS:
        if len(seconds) != times["num_samples"]:
            yield f"{name} says {times['num_samples']} samples and has {len(seconds)}"
        if seconds:
            for key, wanted in zip(("p10", "p50", "p90"), percentiles(seconds), strict=True):
                if not _equal(times[key], wanted):
                    yield f"{name}'s {key} is {times[key]:.7g} s, its samples give {wanted:.7g}"
            medians = [percentiles(by_capture[index])[1] for index in sorted(by_capture)]
            written = times.get("p50_by_capture", medians)
            if len(written) != len(medians) or not all(map(_equal, written, medians)):
                yield f"{name}'s p50_by_capture is not what its samples give"
    if rates is not None:
        yield from _rate_faults(data, name, times["p50"], rates)


def _rate_faults(data: Mapping[str, Any], name: str, p50: float, rates: Mapping[str, float]) -> Iterator[str]:
    ceilings = {ceiling["name"]: ceiling["median"] for ceiling in data["ceilings"]}
    for rate, work, share, ceiling in (
        ("bytes_per_s", "bytes_per_call", "share_of_copy", "copy"),
        ("flops_per_s", "flops_per_call", "share_of_matmul", "matmul"),
    ):
        wanted = data["work"][work] / p50
        if not _equal(rates[rate], wanted):
            yield f"{name}'s {rate} is {rates[rate]:.7g}, its p50 gives {wanted:.7g}"
        if ceiling not in ceilings:
            yield f"{name} has {share}, and no ceiling {ceiling!r} was measured"
        elif not _equal(rates[share], wanted / ceilings[ceiling]):
            yield f"{name}'s {share} is {rates[share]:.7g}, wanted {wanted / ceilings[ceiling]:.7g}"


def _share(draws: F64, bound: float, slack: float, *, below: bool) -> tuple[float, float]:
    """The share of draws beyond ``bound`` by more than ``slack``, and that of draws beyond or near it."""
    if below:
        return float(np.mean(draws < bound - slack)), float(np.mean(draws <= bound + slack))
    return float(np.mean(draws > bound + slack)), float(np.mean(draws >= bound - slack))


def _interval_faults(
    entry: Mapping[str, Any], title: str, values: Sequence[float], blur: float, seed: int
) -> Iterator[str]:
    """Whether ``low`` and ``high`` are the bootstrap's: as many draws lie beyond them as should."""
    if blur >= 1.0:
        return  # the timer cannot tell the arms apart, and the interval says so
    random = np.random.default_rng(seed)
    draws = np.median(random.choice(np.asarray(values), (NUM_RESAMPLES, len(values))), axis=1)
    wanted = (1.0 - entry["confidence"]) / 2
    bounds = (("low", entry["low"] / (1.0 - blur), True), ("high", entry["high"] / (1.0 + blur), False))
    for key, bound, below in bounds:
        # A fifth of what the timer's resolution moves it: nothing that anybody could claim hangs on less.
        slack = max(RELATIVE, blur / 5) * abs(bound)
        beyond, reached = _share(draws, bound, slack, below=below)
        if beyond > wanted + SHARE_TOLERANCE or reached < wanted - SHARE_TOLERANCE:
            yield f"{title}: {key} is {entry[key]:.7g}, which is not the bound that its samples give"


def _comparison_faults(data: Mapping[str, Any], entry: Mapping[str, Any], control: bool) -> Iterator[str]:
    title, revision = f"{entry['reference']} / {entry['tested']}", data["method_revision"]
    interval = Interval(entry["ratio"], entry["low"], entry["high"], entry["confidence"])
    if not interval.low <= interval.median <= interval.high:
        yield f"{title}: its ratio {interval.median:.7g} lies outside its interval"
    if entry["verdict"] != interval.verdict:
        yield f"{title}: its verdict is {entry['verdict']!r}, its interval says {interval.verdict!r}"
    failed = [
        arm["name"]
        for arm in data["arms"]
        if arm["name"] in (entry["reference"], entry["tested"]) and arm["status"] != "passed"
    ]
    if failed:
        yield f"{title}: compares {' and '.join(failed)}, which failed"
    num_ranks = data["device"]["num_ranks"]
    if any(len(ranks) != num_ranks for key in ("reference_s", "tested_s") for ranks in entry[key]):
        yield f"{title}: has samples of another number of ranks than {num_ranks}"
    if revision not in KNOWN_REVISIONS:
        return
    turns = [turn_of(trial, control=control) for trial in range(len(entry["orders"]))]
    if entry["orders"] != [turn.order for turn in turns]:
        yield f"{title}: its orders are not AB and BA in turn"
    if revision > 1 and _captures(entry) != [(turn.reference, turn.tested) for turn in turns]:
        yield f"{title}: its captures are not those of the schedule"
    if len(turns) != data["method"]["num_trials"]:
        yield f"{title}: has {len(turns)} trials, the method says {data['method']['num_trials']}"
    reference, tested = (
        np.asarray([slowest_rank(ranks) for ranks in entry[key]]) for key in ("reference_s", "tested_s")
    )
    ratios = (reference / tested).tolist()
    values = ratios if revision == 1 else capture_ratios(ratios, _captures(entry))
    if len(values) < 2:
        yield f"{title}: has too few samples for its ratio"
        return
    if not _equal(entry["ratio"], float(np.median(values))):
        yield f"{title}: its ratio is {entry['ratio']:.7g}, its samples give {float(np.median(values)):.7g}"
    blur = data["method"]["timer_resolution_s"] / min(float(np.median(reference)), float(np.median(tested)))
    yield from _interval_faults(entry, title, values, blur, data["seed"])


def _validity_faults(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["valid"]:
        return
    baseline = next(arm for arm in data["arms"] if arm["role"] == "baseline")
    if baseline["status"] != "passed":
        yield f"the record says that it is valid, but its baseline {baseline['name']} failed"
    if data["kind"] != "timed":
        return
    if data["control"] is None:
        yield "the record says that it is valid, but has no A/A control"
    elif data["control"]["verdict"] != "no difference":
        yield "the record says that it is valid, but its A/A control does not contain 1"


def _method_faults(data: Mapping[str, Any]) -> Iterator[str]:
    method, llc_bytes = data["method"], data["device"]["llc_bytes"]
    if method["rotation_bytes"] != method["rotation"] * method["slot_bytes"]:
        yield "rotation_bytes is not rotation times slot_bytes"
    if llc_bytes:
        coverage = (method["rotation"] - 1) * method["slot_bytes"] / llc_bytes
        if method["cache_coverage"] is None or not _equal(method["cache_coverage"], coverage):
            yield f"cache_coverage is {method['cache_coverage']}, the slots give {coverage:.7g}"
        if coverage < 1.0:
            yield "the last-level cache could hold the slots"
    for ceiling in data["ceilings"]:
        if not _equal(ceiling["median"], float(np.median(ceiling["samples"]))):
            yield f"the ceiling {ceiling['name']} is not the median of its samples"


def contradictions(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Every figure of a record that its own samples refute; empty for an honest one.

    Args:
        data: a record that follows the schema, timed or counted.
    """
    found = [fault for arm in data["arms"] for fault in _arm_faults(data, arm)]
    if data["kind"] == "timed":
        found += [fault for entry, control in _sides(data)
                  for fault in _comparison_faults(data, entry, control)]  # fmt: skip
        found += _method_faults(data)
    return tuple([*found, *_validity_faults(data)])
