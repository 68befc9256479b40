# SPDX-License-Identifier: Apache-2.0
"""Two records held against each other: did the candidate get worse?

For each candidate two numbers are looked at, and either is enough for a regression:

- its p50 time per call: what a user waits for. It also moves with clocks and temperature.
- its ratio to the baseline of the same run: what remains when the device's mood is divided out. It also moves
  when the baseline does, for example with another torch.

Taking both, a real slowdown cannot hide behind a cooler device (the ratio shows it) nor behind a baseline
that slowed as well (the time shows it). Where only one of them moved, the text says what to look at. A
candidate that fails its gate in the new record is a regression too. Counted records compare
launches and requested bytes instead.

Records do not compare when they were made on another device, number of ranks, target, shape, rotation,
timer or revision of the method, when either is invalid, or when a number of the old one is missing from the
new one: then the question has no answer, and that is not a pass. Nor is it one when a record's figures
contradict its own samples (``consistency``); what got worse is reported all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MethodError
from .record import Record

Path = tuple[str, ...]
# What must be equal, and how to name it.
SAME: tuple[tuple[str, Path], ...] = (
    ("operator", ("operator",)),
    ("target", ("target",)),
    ("kind", ("kind",)),
    ("method revision", ("method_revision",)),
    ("device", ("device", "name")),
    ("compute units", ("device", "num_compute_units")),
    ("last-level cache", ("device", "llc_bytes")),
    ("number of ranks", ("device", "num_ranks")),
    ("shapes", ("shapes",)),
    ("rotation", ("method", "rotation")),
    ("bytes per slot", ("method", "slot_bytes")),
    ("work of a call", ("work",)),
    ("timer", ("method", "timer")),
    ("confidence", ("method", "confidence")),
)
# What may differ, and is worth a note.
NOTED: tuple[tuple[str, Path], ...] = (
    ("driver", ("state_before", "driver")),
    ("power limit (W)", ("state_before", "power_limit_w")),
    ("highest clock (MHz)", ("state_before", "max_sm_clock_mhz")),
    ("torch", ("versions", "torch")),
    ("triton", ("versions", "triton")),
    ("flydsl", ("versions", "flydsl")),
    ("revision", ("git", "revision")),
)


@dataclass(frozen=True)
class Change:
    """One number in both records. ``slowdown`` is how many times worse the new one is (1 is equal)."""

    arm: str
    quantity: str
    source: str
    old: float
    new: float
    slowdown: float
    regressed: bool


@dataclass(frozen=True)
class Outcome:
    """What comparing two records gave.

    Attributes:
        incomparable: why they do not compare; then nothing else is filled in.
        changes: the candidates' numbers.
        failures: candidates that were right in the old record and are not in the new one.
        notes: what else differs.
        contradictions: figures of either record that its own samples refute.
    """

    incomparable: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()

    @property
    def regressed(self) -> bool:
        """Whether anything got worse by more than the tolerance."""
        return bool(self.failures) or any(change.regressed for change in self.changes)

    @property
    def exit_code(self) -> int:
        """0 no regression, 1 regression, 2 the records do not compare, or contradict themselves."""
        if self.incomparable or (self.contradictions and not self.regressed):
            return 2
        return int(self.regressed)


def _get(record: Record, path: Path) -> Any:
    value: Any = record.data
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _why_incomparable(old: Record, new: Record) -> tuple[str, ...]:
    reasons = [
        f"the {which} record is invalid: {'; '.join(record.invalid_reasons)}"
        for which, record in (("old", old), ("new", new))
        if not record.valid
    ]
    reasons += [
        f"{name} differs: {_get(old, path)!r} and {_get(new, path)!r}"
        for name, path in SAME
        if _get(old, path) != _get(new, path)
    ]
    if old.baseline["name"] != new.baseline["name"]:
        reasons.append(f"baseline differs: {old.baseline['name']!r} and {new.baseline['name']!r}")
    usable = [arm["name"] for arm in old.candidates if arm["status"] == "passed"]
    if not usable:
        reasons.append("the old record has no candidate that was right, so there is nothing to hold on to")
    names = {arm["name"] for arm in new.candidates}
    reasons += [f"candidate {name!r} is missing from the new record" for name in usable if name not in names]
    return tuple(reasons)


def _change(arm: str, quantity: str, source: str, old: float, new: float, tolerance: float,
            lower_is_better: bool = True) -> Change:  # fmt: skip
    slowdown = new / old if lower_is_better else old / new
    return Change(arm, quantity, source, old, new, slowdown, slowdown > 1.0 + tolerance)


def _missing(old: Record, new: Record, arm: str) -> list[str]:
    """Numbers of a candidate that only the old record has: what they became is not known."""
    baseline = old.baseline["name"]
    pairs = [(key, old.arm(arm)[key], new.arm(arm)[key]) for key in ("times", "launches", "traffic")]
    ratios = (old.comparison(baseline, arm), new.comparison(baseline, arm))
    pairs.append((f"ratio over {baseline}", *ratios))
    return [f"the new record lacks a number of {arm!r}: {name}" for name, before, after in pairs
            if before and not after]  # fmt: skip


def _timed_changes(old: Record, new: Record, arm: str, tolerance: float) -> list[Change]:
    changes = []
    before, after = old.arm(arm)["times"], new.arm(arm)["times"]
    if before and after:
        changes.append(_change(arm, "p50 (s/call)", "measured", before["p50"], after["p50"], tolerance))
    baseline = old.baseline["name"]
    first, second = old.comparison(baseline, arm), new.comparison(baseline, arm)
    if first and second:
        quantity = f"ratio over {baseline}"
        changes.append(
            _change(
                arm, quantity, "measured", first["ratio"], second["ratio"], tolerance, lower_is_better=False
            )
        )
    return changes


def _counted_changes(old: Record, new: Record, arm: str, tolerance: float) -> list[Change]:
    changes = []
    for group, key, quantity in (
        ("launches", "value", "launches"),
        ("traffic", "read_bytes", "bytes read"),
        ("traffic", "written_bytes", "bytes written"),
    ):
        before, after = old.arm(arm)[group], new.arm(arm)[group]
        if before and after and before["source"] == after["source"] and before[key]:
            changes.append(_change(arm, quantity, before["source"], before[key], after[key], tolerance))
    return changes


def _notes(old: Record, new: Record, changes: list[Change], tolerance: float) -> tuple[str, ...]:
    notes = [
        f"{name}: {_get(old, path)} and {_get(new, path)}"
        for name, path in NOTED
        if _get(old, path) != _get(new, path)
    ]
    before, after = old.baseline["times"], new.baseline["times"]
    if before and after and any(change.regressed for change in changes):
        shift = after["p50"] / before["p50"]
        if abs(shift - 1) > tolerance / 2:
            notes.append(
                f"the baseline's own p50 moved {shift:.3f}x: compare clocks, temperature and versions before "
                "blaming the candidate"
            )
    return tuple(notes)


def compare_records(old: Record, new: Record, tolerance: float = 0.05) -> Outcome:
    """Judges the candidates of ``new`` against those of ``old``.

    Args:
        old, new: validated records.
        tolerance: by how much a number may get worse, as a share (0.05 is 5 %).

    Raises:
        MethodError: the tolerance is not a share between 0 and 1.
    """
    if not 0.0 <= tolerance < 1.0:
        raise MethodError(
            f"tolerance got {tolerance}, wanted a share of at least 0 and below 1, such as 0.05"
        )
    reasons = _why_incomparable(old, new)
    if reasons:
        return Outcome(incomparable=reasons)
    contradictions = tuple(
        f"the {which} record contradicts itself: {each}"
        for which, record in (("old", old), ("new", new))
        for each in record.contradictions
    )
    changes: list[Change] = []
    failures = []
    for candidate in old.candidates:
        name = candidate["name"]
        if candidate["status"] != "passed":
            continue
        now = new.arm(name)
        if now["status"] != "passed":
            failures.append(f"{name} was right and is not any more, {now['status']}: {now['reason']}")
            continue
        missing = _missing(old, new, name)
        if missing:
            return Outcome(incomparable=tuple(missing))
        find = _timed_changes if old.timed else _counted_changes
        found = find(old, new, name, tolerance)
        if not found:
            return Outcome(incomparable=(f"the records share no number of {name!r} to compare",))
        changes += found
    notes = _notes(old, new, changes, tolerance)
    return Outcome((), tuple(changes), tuple(failures), notes, contradictions)
