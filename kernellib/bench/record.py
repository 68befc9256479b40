# SPDX-License-Identifier: Apache-2.0
"""Records: everything about one comparison, as JSON with a schema (``record.schema.json``).

Every group of numbers says where it comes from: "measured" (device events), "counted" (the emulator's
counters, a profiler) or "modelled" (from shapes). Values compared with an oracle say "checked". An arm
that failed has no times. A record whose A/A control failed is marked invalid, and is worth nothing
but its reasons.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .consistency import contradictions
from .errors import RecordError

SCHEMA_NAME = "kernellib.bench.record/1"
_LEAF_LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]", re.DOTALL)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def record_schema() -> dict[str, Any]:
    """The JSON schema of a record."""
    schema: dict[str, Any] = json.loads(
        Path(__file__).with_name("record.schema.json").read_text(encoding="utf-8")
    )
    return schema


@lru_cache(maxsize=1)
def _validator() -> Any:
    from jsonschema import Draft202012Validator  # noqa: PLC0415  (its import takes seconds)

    return Draft202012Validator(record_schema())


def validate(data: Any, where: str = "record") -> dict[str, Any]:
    """Checks a record's JSON value against the schema and its own references.

    Raises:
        RecordError: naming ``where`` and the offending field.
    """
    error = next(iter(sorted(_validator().iter_errors(data), key=lambda e: list(map(str, e.path)))), None)
    if error is not None:
        path = "/".join(str(part) for part in error.absolute_path) or "top level"
        raise RecordError(f"{where} does not follow {SCHEMA_NAME} at {path}: {error.message[:200]}")
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where} is no JSON: {error}; every number must be finite") from error
    baselines = [arm["name"] for arm in data["arms"] if arm["role"] == "baseline"]
    if len(baselines) != 1:
        raise RecordError(f"{where}: baselines are {baselines}, wanted exactly one arm of this role")
    names = [arm["name"] for arm in data["arms"]]
    if len(set(names)) < len(names):
        raise RecordError(f"{where}: arm names repeat: {names}")
    for comparison in data["comparisons"]:
        if not {comparison["reference"], comparison["tested"]} <= set(names):
            raise RecordError(
                f"{where}: a comparison names an arm that is not there: {comparison['tested']!r}"
            )
    control = [] if data["control"] is None else [data["control"]]
    if any(entry["reference"] != baselines[0] for entry in control):
        raise RecordError(f"{where}: the control is of {control[0]['reference']!r}, wanted {baselines[0]!r}")
    for comparison in [*data["comparisons"], *control]:
        count = len(comparison["orders"])
        lists = [comparison["reference_s"], comparison["tested_s"], comparison.get("captures")]
        if any(each is not None and len(each) != count for each in lists):
            raise RecordError(f"{where}: {comparison['tested']} has unequal numbers of paired samples")
    checked: dict[str, Any] = data
    return checked


@dataclass(frozen=True)
class Record:
    """A validated record. ``data`` is its JSON value; the properties are short ways into it.

    Example:
        >>> Record.load("tail.json").comparison("eager", "fused")["ratio"]  # doctest: +SKIP
        1.83
    """

    data: Mapping[str, Any]

    @classmethod
    def of(cls, data: Any, where: str = "record") -> Record:
        """The record with this JSON value.

        Raises:
            RecordError: it does not follow the schema.
        """
        return cls(validate(data, where))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Reads and validates a record.

        Raises:
            RecordError: missing, no JSON, or not following the schema.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        except (OSError, ValueError) as error:
            raise RecordError(f"record {path.name} cannot be read: {error}") from error
        return cls.of(data, f"record {path.name}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the record, whole or not at all; lists of numbers stay on one line."""
        path = Path(path)
        text = json.dumps(self.data, indent=1, allow_nan=False)
        text = _LEAF_LIST.sub(lambda match: "[" + " ".join(match.group(1).split()) + "]", text)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
        return path

    @property
    def timed(self) -> bool:
        """Whether a device timed anything."""
        return bool(self.data["kind"] == "timed")

    @property
    def valid(self) -> bool:
        """Whether the control held and the baseline was right."""
        return bool(self.data["valid"])

    @property
    def invalid_reasons(self) -> list[str]:
        """Why the record is not valid."""
        return list(self.data["invalid_reasons"])

    @cached_property
    def contradictions(self) -> tuple[str, ...]:
        """Figures that the record's own samples refute (``consistency``); nothing may be claimed then."""
        return contradictions(self.data)

    @property
    def trusted(self) -> bool:
        """Whether the record is valid and no figure contradicts its samples."""
        return self.valid and not self.contradictions

    @property
    def faults(self) -> list[str]:
        """Why the record is not to be trusted: its own reasons, and contradictions."""
        return [*self.invalid_reasons, *(f"contradicts itself: {each}" for each in self.contradictions)]

    @property
    def arms(self) -> list[Mapping[str, Any]]:
        """All arms, in the order they were given."""
        return list(self.data["arms"])

    def arm(self, name: str) -> Mapping[str, Any]:
        """One arm.

        Raises:
            KeyError: there is none of that name.
        """
        for arm in self.data["arms"]:
            if arm["name"] == name:
                found: Mapping[str, Any] = arm
                return found
        raise KeyError(f"no arm {name!r} in {[arm['name'] for arm in self.data['arms']]}")

    @property
    def baseline(self) -> Mapping[str, Any]:
        """The arm of role "baseline"."""
        return next(arm for arm in self.arms if arm["role"] == "baseline")

    @property
    def candidates(self) -> list[Mapping[str, Any]]:
        """The arms being judged."""
        return [arm for arm in self.arms if arm["role"] == "candidate"]

    def comparison(self, reference: str, tested: str) -> Mapping[str, Any] | None:
        """The comparison of two arms; None when it was not made, or one of them failed."""
        for comparison in self.data["comparisons"]:
            if (comparison["reference"], comparison["tested"]) == (reference, tested):
                found: Mapping[str, Any] = comparison
                return found
        return None

    def ceiling(self, name: str) -> Mapping[str, Any] | None:
        """A measured ceiling, "copy" or "matmul"; None in a counted record."""
        return next((ceiling for ceiling in self.data["ceilings"] if ceiling["name"] == name), None)


def now() -> str:
    """The time of a record, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
