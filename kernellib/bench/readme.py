# SPDX-License-Identifier: Apache-2.0
"""The README's measured figures, written from the records under ``results``, as they are.

A record that is not valid, or that contradicts its own samples, is labelled so, with its reasons, and nothing
is typed by hand. A test fails when README and records differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ReadmeError
from .record import Record

BEGIN = "<!-- measured: begin; written by `python -m kernellib.bench readme`, edit nothing here -->"
END = "<!-- measured: end -->"
RECORD_SUFFIX = ".record.json"


def find_records(root: Path) -> list[tuple[Path, Record]]:
    """All timed records under ``root/results`` with their paths relative to ``root``; newest folder first.

    Raises:
        RecordError: one that does not follow the schema.
    """
    paths = sorted((root / "results").rglob(f"*{RECORD_SUFFIX}"))
    paths.sort(key=lambda path: path.parent.name, reverse=True)  # named by date; stable within a folder
    loaded = [(path.relative_to(root), Record.load(path)) for path in paths]
    return [(path, record) for path, record in loaded if record.timed]


def _interval(entry: Mapping[str, Any], digits: int) -> str:
    low, high = f"{entry['low']:.{digits}f}", f"{entry['high']:.{digits}f}"
    return f"{entry['ratio']:.{digits}f} ({low} to {high})"


def _time(arm: Mapping[str, Any]) -> str:
    return f"{arm['times']['p50'] * 1e6:.2f}" if arm["times"] else arm["status"]


def _cells(path: Path, record: Record, candidate: Mapping[str, Any]) -> dict[str, str]:
    """One row of the table by column."""
    data = record.data
    rates, control = candidate["rates"], data["control"]
    cells = {
        "record": f"[{path.name.removesuffix(RECORD_SUFFIX)}]({path.as_posix()})",
        "valid": "yes" if record.trusted else "**NO**",
        f"{record.baseline['name']} (us)": _time(record.baseline),
        f"{candidate['name']} (us)": _time(candidate),
    }
    for entry in data["comparisons"]:
        if entry["tested"] == candidate["name"]:
            cells[f"{entry['reference']} / {entry['tested']}"] = _interval(entry, 3)
    cells["of copy bandwidth"] = f"{rates['share_of_copy']:.1%}" if rates else "-"
    cells["A/A control"] = _interval(control, 4) if control else "none"
    cells["method"] = f"revision {data['method_revision']}"
    return cells


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return lines + [f"| {' | '.join(row.get(column, '-') for column in columns)} |" for row in rows]


def _group(records: Sequence[tuple[Path, Record]]) -> list[str]:
    """The text of one operator's records in one folder."""
    folder, data = records[0][0].parent, records[0][1].data
    rows = [_cells(path, record, arm) for path, record in records for arm in record.candidates]
    invalid = [(path, record) for path, record in records if not record.trusted]
    title = f"**{data['operator']}** on {data['device']['name']}, target `{data['target']}`"
    lines = [f"{title}, [{folder.as_posix()}]({folder.as_posix()}):", "", *_table(rows), ""]
    if len(invalid) == len(records):
        lines += ["**None of these records is valid: they show what was run, and no claim rests on them.**"]
    elif invalid:
        lines += ["**No claim rests on the records that are not valid.**"]
    lines += [""] if invalid else []  # before a list
    for path, record in invalid:
        lines += [f"- {path.name.removesuffix(RECORD_SUFFIX)}: {reason}" for reason in record.faults]
    return [*lines, ""] if invalid else lines


def _confidences(groups: Iterable[Sequence[tuple[Path, Record]]]) -> str:
    entries = [entry for group in groups for _, record in group for entry in record.data["comparisons"]]
    return " and ".join(f"{each:.0%}" for each in sorted({entry["confidence"] for entry in entries})) or "95%"


def measured_block(root: Path) -> str:
    """The text between (and with) the markers, for the records under ``root/results``."""
    lines = [BEGIN, "", "## Measured", ""]
    groups: dict[tuple[Path, str], list[tuple[Path, Record]]] = {}
    for path, record in find_records(root):
        groups.setdefault((path.parent, record.data["operator"]), []).append((path, record))
    level = _confidences(groups.values())
    if not groups:
        lines += ["No record is committed yet.", ""]
    else:
        lines += [
            f"p50 times of one call; paired ratios with their {level} intervals, above 1 where the tested",
            "launch is faster. The A/A control must contain 1, or the record is not valid. Calls follow",
            "one another directly, so that a launch may overlap with the last call's end; in records",
            "named `after_producer` a kernel that writes the activations runs before each call, as in",
            "serving, and is timed with it.",
            "",
        ]
    for records in groups.values():
        lines += _group(records)
    return "\n".join([*lines, END])


def with_block(text: str, block: str) -> str:
    """``text`` with its measured block replaced.

    Raises:
        ReadmeError: not exactly one pair of markers, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ReadmeError(
            f"the README got {text.count(BEGIN)} begin and {text.count(END)} end markers, wanted one each, "
            f"in order; put these two lines where the figures belong:\n{BEGIN}\n{END}"
        )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + block + after


def update(root: Path, *, check: bool = False) -> bool:
    """Writes the block into ``root/README.md``.

    Args:
        root: of the checkout, with README.md and results.
        check: write nothing.

    Returns:
        whether the README was up to date.
    """
    path = root / "README.md"
    text = path.read_text(encoding="utf-8")
    wanted = with_block(text, measured_block(root))
    if text != wanted and not check:
        path.write_text(wanted, encoding="utf-8")
    return text == wanted
