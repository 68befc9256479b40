# SPDX-License-Identifier: Apache-2.0
"""Notebook 02: which configuration for which bucket.

Every candidate runs by itself and is checked before anything else is asked of it; one that is wrong, crashes
or hangs is recorded with its reason and takes no further part. On GPUs the rest are ranked by measured time.
On the emulator nothing can be timed: they are ranked by counted work, matrix operations first (padding is
work), then memory bytes, then instructions. That order is a stated rule, not a prediction of time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from IPython.display import Image

from kernellib.ops.mega_moe.config import MegaMoEConfig, MegaMoEConfigError

from ..artifact import Claim, Source
from ..display import BLUE, GREY, HtmlTable, figure_style, new_figure, picture
from .correctness import Checked, check
from .measure import Timing, measure
from .runs import Request, run
from .setup import Setup

Status = Literal["correct", "wrong", "crashed"]
TABLE_FILE = "mega_moe.tuned.json"
TABLE_FORMAT = "kernellib.mega_moe.table/1"


class TableError(ValueError):
    """A table of configurations that cannot be read."""


@dataclass(frozen=True)
class Candidate:
    """One configuration at one bucket, and what became of it.

    Attributes:
        bucket, config: which.
        status: "correct", "wrong" (it ran and failed the check) or "crashed" (it raised, or hung).
        detail: the check's number, or the exception.
        checked: the run, when there was one.
        timing: against the generic configuration, on GPUs.
    """

    bucket: int
    config: MegaMoEConfig
    status: Status
    detail: str
    checked: Checked | None = None
    timing: Timing | None = None

    @property
    def key(self) -> tuple[float, ...]:
        """What it is ranked by, the smaller the better."""
        if self.timing is not None:
            return (float(np.median(self.timing.samples_s["tested"])),)
        counts = None if self.checked is None else self.checked.run.counts
        if counts is None:
            return (float("inf"),)
        return (counts.matrix_flops, counts.memory_bytes, counts.instructions)


def choose_candidates(setup: Setup, profile: str, bucket: int) -> list[MegaMoEConfig]:
    """The generic and the tuned table's entry, then one knob changed at a time; each once.

    The quick profile changes dispatch CUs, tile, order and persistence once, the full one tries all values.
    """
    base = replace(setup.tuned(bucket), persist_cu=0, persist_strided=False, b2stage=False)
    cus = setup.num_cu
    changes: list[dict[str, Any]] = [
        {"num_dispatch_cu": max(1, cus * 96 // 256)},
        {"num_dispatch_cu": max(1, cus * 160 // 256)},
        {"tile_order": "expert" if base.tile_order == "ready" else "ready"},
        {"persist_cu": cus, "persist_strided": True},
    ]
    if profile == "full":
        changes += [{"tile_m": rows} for rows in (16, 32, 64, 128)]
        changes += [{"gemm1_tile_n": n, "gemm2_tile_n": n} for n in (128, 256, 512)]
        changes += [{"b2stage": True}, {"persist_cu": cus}, {"b2stage": True, "persist_cu": cus}]
        changes += [{"num_dispatch_cu": max(1, cus * n // 256)} for n in (16, 32, 64, 128)]
    found = [setup.generic(bucket), setup.tuned(bucket)]
    for change in changes:
        config = replace(base, **change)
        try:
            config.check_shape(setup.shape)
        except MegaMoEConfigError:
            continue
        found.append(config)
    return list(dict.fromkeys(found))


def try_candidate(setup: Setup, bucket: int, config: MegaMoEConfig) -> Candidate:
    """Runs and checks one configuration; never raises for its faults."""
    request = Request(f"{bucket} {config.name}", config, setup.tokens(bucket), seed=setup.seed + bucket)
    try:
        [found] = run(setup, [request], count=True)
        checked = check(setup, found)
    except Exception as error:  # a deadlock, a compiler's refusal, a fault: this candidate's, not the tuner's
        text = str(error).strip().splitlines()
        return Candidate(
            bucket, config, "crashed", f"{type(error).__name__}: {text[0] if text else ''}"[:200]
        )
    if found.failure is not None:
        return Candidate(bucket, config, "crashed", found.failure[:200])
    detail = f"relL2 {checked.quantized:.2e}, {checked.num_unwritten} elements unwritten"
    return Candidate(bucket, config, "correct" if checked.right else "wrong", detail, checked)


def try_candidates(
    setup: Setup, profile: str, *, trials: int, attempt: Callable[..., Candidate] = try_candidate
) -> list[Candidate]:
    """Every candidate of every bucket: checked, then on GPUs timed against the generic configuration."""
    found = []
    for bucket in setup.buckets:
        for config in choose_candidates(setup, profile, bucket):
            candidate = attempt(setup, bucket, config)
            if candidate.status == "correct" and candidate.checked is not None:
                tested = candidate.checked.run.request
                generic = replace(tested, config=setup.generic(bucket))
                candidate = replace(candidate, timing=measure(setup, generic, tested, trials=trials))
            found.append(candidate)
    return found


def rank(candidates: Sequence[Candidate], bucket: int) -> list[Candidate]:
    """The bucket's correct candidates, best first."""
    correct = [c for c in candidates if c.bucket == bucket and c.status == "correct"]
    return sorted(correct, key=lambda candidate: candidate.key)


def ranking_source(setup: Setup) -> Source:
    return "counted" if setup.is_emulated else "measured"


# ----------------------------------------------------------------------------------------- the table


def save_table(folder: str | Path, setup: Setup, candidates: Sequence[Candidate]) -> Path:
    """Writes the best configuration of each bucket, with where it comes from."""
    path = Path(folder) / TABLE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    best = {bucket: rank(candidates, bucket) for bucket in setup.buckets}
    content = {
        "format": TABLE_FORMAT,
        "source": ranking_source(setup),
        "setup": setup.title,
        "entries": {str(bucket): found[0].config.to_dict() for bucket, found in best.items() if found},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def load_table(path: str | Path) -> dict[int, MegaMoEConfig]:
    """Configurations by bucket; pass one as ``MegaMoE(config=...)``.

    Raises:
        TableError: no such file, another format, or an entry that is no configuration.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != TABLE_FORMAT:
            raise TableError(f"table got format {content['format']!r}, wanted {TABLE_FORMAT!r}")
        return {int(bucket): MegaMoEConfig(**entry) for bucket, entry in content["entries"].items()}
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise TableError(f"table {path} cannot be read: {error}; write it with notebook 02") from error


# ----------------------------------------------------------------------------------------- views


def status_table(candidates: Sequence[Candidate]) -> HtmlTable:
    """Each candidate's verdict at the gate, in the order tried."""
    rows = [[c.bucket, c.config.name, c.status, c.detail] for c in candidates]
    return HtmlTable(["bucket", "configuration", "gate", "why"], rows, "Checked before ranked", "checked")


def ranking_table(setup: Setup, candidates: Sequence[Candidate]) -> HtmlTable:
    """The ranking of each bucket: measured times, or counted work and resources."""
    rows: list[list[Any]] = []
    for bucket in setup.buckets:
        for place, candidate in enumerate(rank(candidates, bucket), start=1):
            row: list[Any] = [bucket, place, candidate.config.name]
            counts = None if candidate.checked is None else candidate.checked.run.counts
            if candidate.timing is not None:
                row += [candidate.key[0] * 1e3, candidate.timing.ratio.median, candidate.timing.verdict]
            elif counts is not None:
                row += [counts.matrix_flops, counts.idle_slots, counts.memory_bytes, counts.instructions]
                row += [counts.vgprs, counts.lds_bytes, counts.scratch_bytes]
            rows.append(row)
    work = ["matrix operations", "idle tile slots", "memory (bytes)", "wave instructions"]
    resources = ["vector registers", "LDS (bytes)", "scratch (bytes)"]
    extra = [*work, *resources] if setup.is_emulated else ["time (ms)", "generic / this", "verdict"]
    columns = ["bucket", "rank", "configuration", *extra]
    return HtmlTable(columns, rows, "The ranking, best first", ranking_source(setup))


def ranking_figure(setup: Setup, candidates: Sequence[Candidate]) -> Image:
    """The candidates of each bucket relative to its best."""
    labels, values, colours = [], [], []
    for bucket in setup.buckets:
        ranked = rank(candidates, bucket)
        for candidate in ranked:
            labels.append(f"{bucket}: {candidate.config.name}")
            values.append(_scalar(candidate) / _scalar(ranked[0]))
            colours.append(BLUE if candidate is ranked[0] else GREY)
    with figure_style():
        chart, (axis,) = new_figure(10.0, max(2.5, 0.3 * len(labels) + 1.2))
        axis.barh(range(len(labels)), values, color=colours)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis()
        what = "memory bytes (counted)" if setup.is_emulated else "time (measured)"
        axis.set_xlabel(f"{what}, relative to the bucket's best")
        return picture(chart, "Candidates of each bucket relative to its best")


def _scalar(candidate: Candidate) -> float:
    return candidate.key[0] if candidate.timing is not None else candidate.key[min(1, len(candidate.key) - 1)]


# ----------------------------------------------------------------------------------------- claims


def tuning_claims(setup: Setup, candidates: Sequence[Candidate], path: Path) -> list[Claim]:
    """The claims of notebook 02."""
    best = {bucket: rank(candidates, bucket) for bucket in setup.buckets}
    missing = [bucket for bucket, found in best.items() if not found]
    rejected = [f"{c.bucket} {c.config.name}: {c.status}" for c in candidates if c.status != "correct"]
    written = load_table(path)
    spilling = [
        bucket
        for bucket, found in best.items()
        if found and found[0].checked and (counts := found[0].checked.run.counts) and counts.scratch_bytes
    ]
    return [
        Claim.check(
            "every bucket has a correct configuration",
            not missing,
            f"none at {missing}"
            if missing
            else f"{len(candidates) - len(rejected)} of {len(candidates)} candidates correct",
            "checked",
        ),
        Claim.check(
            "every candidate of the tables' is correct",
            not [
                c
                for c in candidates
                if c.status != "correct" and c.config in (setup.tuned(c.bucket), setup.generic(c.bucket))
            ],
            "; ".join(rejected) or "no candidate was rejected",
            "checked",
        ),
        Claim.check(
            "the written table holds each bucket's best",
            written == {bucket: found[0].config for bucket, found in best.items() if found},
            f"{len(written)} entries in {path.name}, source {ranking_source(setup)}",
            "checked",
        ),
        Claim.check("no winner spills", not spilling, f"spilling at {spilling or 'none'}", "counted"),
    ]


def tuning_data(setup: Setup, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """What notebook 02 keeps beside its claims."""
    return {
        "setup": setup.title,
        "source": ranking_source(setup),
        "candidates": [
            {
                "bucket": c.bucket,
                "config": c.config.to_dict(),
                "status": c.status,
                "detail": c.detail,
                "counts": vars(c.checked.run.counts) if c.checked and c.checked.run.counts else None,
                "samples_s": None if c.timing is None else c.timing.samples_s,
            }
            for c in candidates
        ],
    }
