# SPDX-License-Identifier: Apache-2.0
"""Notebooks 03 and 04: two arms, bucket by bucket.

03 compares the tuned table with the generic one, 04 the fused layer with the serial baseline. On GPUs both
arms are timed; on the emulator they are compared by what they do, as counted, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from IPython.display import Image

from kernellib.ops.mega_moe.layout import SymmetricLayout

from ..artifact import Claim
from ..display import BLUE, GREY, ORANGE, HtmlTable, Note, figure_style, new_figure, picture
from .correctness import TIGHT, Checked, check
from .counts import Counts
from .measure import Timing, measure
from .runs import Request, routing_of, run
from .setup import Setup

Kind = Literal["tuned_vs_generic", "fused_vs_serial"]
ARM_NAMES: dict[Kind, tuple[str, str]] = {
    "tuned_vs_generic": ("generic", "tuned"),
    "fused_vs_serial": ("serial", "fused"),
}


@dataclass(frozen=True)
class Compared:
    """Both arms at one bucket.

    Attributes:
        bucket: the token class.
        baseline, tested: checked runs, with counters on the emulator.
        timing: on GPUs, when both arms are right.
    """

    bucket: int
    baseline: Checked
    tested: Checked
    timing: Timing | None

    @property
    def right(self) -> bool:
        return self.baseline.right and self.tested.right

    @property
    def counts(self) -> tuple[Counts, Counts] | None:
        baseline, tested = self.baseline.run.counts, self.tested.run.counts
        return None if baseline is None or tested is None else (baseline, tested)

    @property
    def bit_equal(self) -> bool:
        pairs = zip(self.baseline.run.outputs, self.tested.run.outputs, strict=True)
        return self.right and all(np.array_equal(a, b) for a, b in pairs)


def arms(setup: Setup, kind: Kind, bucket: int) -> tuple[Request, Request]:
    """(baseline, tested) of a bucket: the same tokens and routes."""
    tested = Request(
        f"{bucket} {ARM_NAMES[kind][1]}", setup.tuned(bucket), setup.tokens(bucket), seed=setup.seed + bucket
    )
    baseline = replace(tested, name=f"{bucket} {ARM_NAMES[kind][0]}")
    if kind == "tuned_vs_generic":
        return replace(baseline, config=setup.generic(bucket)), tested
    return replace(baseline, arm="serial"), tested


def compare(setup: Setup, kind: Kind, *, trials: int) -> list[Compared]:
    """Both arms at every bucket: checked, counted, and on GPUs timed when right."""
    pairs = [arms(setup, kind, bucket) for bucket in setup.buckets]
    runs = [check(setup, found) for found in run(setup, [arm for pair in pairs for arm in pair], count=True)]
    compared = []
    for index, (bucket, pair) in enumerate(zip(setup.buckets, pairs, strict=True)):
        baseline, tested = runs[2 * index : 2 * index + 2]
        right = baseline.right and tested.right
        timing = measure(setup, *pair, trials=trials) if right else None
        compared.append(Compared(bucket, baseline, tested, timing))
    return compared


# ------------------------------------------------------------------------------- what must be sent


def payload_bytes(setup: Setup, request: Request) -> int:
    """Bytes that the routes themselves put on the wire: each row to another rank with its scales, weight and
    source code, and the weighted row on its way back."""
    layout = SymmetricLayout(setup.shape, setup.num_ranks, setup.capacity, request.wire)
    row = setup.shape.model_dim + layout.input_scales.row_bytes + 4 + 4
    return remote_routes(setup, request) * (row + layout.wire_row_bytes)


def coordination_bytes(setup: Setup, request: Request) -> int:
    """Bytes of counts, first rows and flags between every two ranks, and a count for each row sent."""
    ranks, experts = setup.num_ranks, setup.shape.experts_per_rank(setup.num_ranks)
    pair = 2 * 4 * experts + 3 * 4  # histogram and first rows; their flags and that of the rows sent back
    return ranks * (ranks - 1) * pair + 4 * remote_routes(setup, request)


def remote_routes(setup: Setup, request: Request) -> int:
    """Routes to an expert on another rank."""
    experts = setup.shape.experts_per_rank(setup.num_ranks)
    return sum(
        int(((ids >= 0) & (ids // experts != rank)).sum())
        for rank, ids in enumerate(routing_of(setup, request).expert_ids)
    )


def unexplained_bytes(setup: Setup, found: Checked) -> int | None:
    """Counted bytes on the wire beyond payload and coordination. In ready order the tiles' queue adds 8 a
    tile; nothing else may be left."""
    request, counts = found.run.request, found.run.counts
    if counts is None:
        return None
    return counts.wire_bytes - payload_bytes(setup, request) - coordination_bytes(setup, request)


# ------------------------------------------------------------------------------------------- views


def opening_note(setup: Setup) -> Note:
    """What the reader may expect, first of all."""
    if setup.is_emulated:
        return Note(
            "No GPU: nothing is timed. Launches, bytes, matrix operations and idle tile slots are counted by "
            f"the emulator on {setup.title}; a bucket's configuration is scaled to {setup.num_cu} compute "
            f"units and runs with at most {setup.token_limit} tokens a rank.",
            "warning",
        )
    return Note(f"Measured on {setup.title}: graphs, paired trials, the slowest rank of each.")


def count_table(compared: Sequence[Compared], kind: Kind) -> HtmlTable:
    """Counted quantities of both arms."""
    rows: list[list[Any]] = []
    for entry in compared:
        if entry.counts is None:
            continue
        for name, found, counts in zip(
            ARM_NAMES[kind], (entry.baseline, entry.tested), entry.counts, strict=True
        ):
            rows.append(
                [
                    entry.bucket,
                    name,
                    found.run.request.config.name,
                    counts.launches,
                    counts.wire_bytes,
                    counts.memory_bytes,
                    counts.matrix_flops,
                    counts.instructions,
                    counts.num_tiles,
                    counts.idle_slots,
                ]
            )
    columns = [
        "bucket",
        "arm",
        "configuration",
        "launches a rank",
        "on the wire (bytes)",
        "memory (bytes)",
        "matrix operations",
        "wave instructions",
        "M tiles",
        "idle tile slots",
    ]
    return HtmlTable(columns, rows, "One call of all ranks", "counted")


def time_table(compared: Sequence[Compared], kind: Kind) -> HtmlTable:
    """Measured times and ratios."""
    rows: list[list[Any]] = []
    for entry in compared:
        timing = entry.timing
        if timing is None:
            continue
        medians = [float(np.median(timing.samples_s[arm])) * 1e3 for arm in ("baseline", "tested")]
        interval = f"{timing.ratio.median:.4f} [{timing.ratio.low:.4f}, {timing.ratio.high:.4f}]"
        control = f"[{timing.control.low:.4f}, {timing.control.high:.4f}]"
        rows.append([entry.bucket, *medians, interval, control, timing.verdict])
    baseline, tested = ARM_NAMES[kind]
    columns = ["tokens a rank", f"{baseline} (ms)", f"{tested} (ms)", "ratio, 95 %", "A/A control", "verdict"]
    return HtmlTable(columns, rows, f"{baseline} / {tested}, slowest rank", "measured")


def tables(compared: Sequence[Compared], kind: Kind) -> list[Any]:
    """What was measured, or what was counted; never both in one table."""
    found: list[Any] = []
    if any(entry.timing is not None for entry in compared):
        found.append(time_table(compared, kind))
    if any(entry.counts is not None for entry in compared):
        found.append(count_table(compared, kind))
    return found or [Note("Nothing was measured or counted: no arm passed its check.", "warning")]


def figure(compared: Sequence[Compared], kind: Kind) -> Image:
    """Tested relative to baseline: the measured ratio, or ratios of counted quantities."""
    baseline, tested = ARM_NAMES[kind]
    with figure_style():
        chart, (axis,) = new_figure(8.5, 3.6)
        timed = [entry for entry in compared if entry.timing is not None]
        positions = range(len(timed or compared))
        if timed:
            ratios = [entry.timing.ratio for entry in timed if entry.timing]
            errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
            axis.errorbar(positions, [r.median for r in ratios], yerr=errors, fmt="o", capsize=4, color=BLUE)
            axis.set_ylabel(f"time {baseline} / {tested} (measured)")
        else:
            quantities = (
                ("memory_bytes", "memory bytes", BLUE),
                ("matrix_flops", "matrix operations", ORANGE),
                ("instructions", "wave instructions", GREY),
            )
            for offset, (name, label, colour) in enumerate(quantities):
                values = [
                    getattr(entry.counts[1], name) / getattr(entry.counts[0], name) if entry.counts else 0.0
                    for entry in compared
                ]
                axis.bar(
                    [p + 0.25 * (offset - 1) for p in positions], values, 0.23, label=label, color=colour
                )
            axis.set_ylabel(f"{tested} / {baseline} (counted)")
            axis.set_ylim(0.0, 1.35 * axis.get_ylim()[1])
            axis.legend(loc="upper left", ncols=len(quantities))
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(list(positions), [str(entry.bucket) for entry in timed or compared])
        axis.set_xlabel("bucket (tokens a rank)")
        return picture(chart, f"{tested} against {baseline} by bucket")


# ------------------------------------------------------------------------------------------ claims


def compare_claims(setup: Setup, compared: Sequence[Compared], kind: Kind) -> list[Claim]:
    """The claims of notebooks 03 and 04: what was checked, counted and measured on this target."""
    wrong = [
        f"{found.run.request.name}: {found.run.failure or f'{found.quantized:.2e}'}"
        for entry in compared
        for found in (entry.baseline, entry.tested)
        if not found.right
    ]
    worst = max(found.quantized for entry in compared for found in (entry.baseline, entry.tested))
    claims = [
        Claim.check(
            "both arms are right at every bucket before anything is compared",
            not wrong,
            "; ".join(wrong) or f"largest relL2 {worst:.2e}, wanted at most {TIGHT:g}",
            "checked",
        )
    ]
    counted = [entry for entry in compared if entry.counts is not None]
    if counted:
        claims += _counted_claims(setup, counted)
        claims += _fusion_claims(counted) if kind == "fused_vs_serial" else [_differ_claim(counted)]
    timed = [entry for entry in compared if entry.timing is not None]
    if timed:
        claims += _measured_claims(timed, kind)
    return claims


def _counted_claims(setup: Setup, counted: Sequence[Compared]) -> list[Claim]:
    both = [found for entry in counted for found in (entry.baseline, entry.tested)]
    left = {}
    for found in both:
        rest, request = unexplained_bytes(setup, found), found.run.request
        limit = 8 * found.run.counts.num_tiles if found.run.counts else 0
        if rest is None or rest < 0 or rest > (limit if request.config.tile_order == "ready" else 0):
            left[request.name] = rest
    scratch = max(found.run.counts.scratch_bytes for found in both if found.run.counts)
    wire = sum(found.run.counts.wire_bytes for found in both if found.run.counts)
    return [
        Claim.check(
            "on the wire are the routes' rows and the ranks' coordination, nothing else",
            not left,
            f"unexplained bytes: {left}" if left else f"all {wire:,} bytes explained",
            "counted",
        ),
        Claim.check(
            "nothing spills", scratch == 0, f"{scratch} bytes of scratch a lane, wanted 0", "counted"
        ),
    ]


def _differ_claim(counted: Sequence[Compared]) -> Claim:
    same = [e.bucket for e in counted if e.baseline.run.request.config == e.tested.run.request.config]
    return Claim.check(
        "the tables differ on this device",
        len(same) < len(counted),
        f"at {len(counted) - len(same)} of {len(counted)} buckets; alike at {same or 'none'}",
        "checked",
    )


def _fusion_claims(counted: Sequence[Compared]) -> list[Claim]:
    launches = [(e.counts[0].launches, e.counts[1].launches) for e in counted if e.counts]
    flops = [(e.counts[0].matrix_flops, e.counts[1].matrix_flops) for e in counted if e.counts]
    return [
        Claim.check(
            "the fused layer launches fewer kernels",
            all(fused < serial for serial, fused in launches),
            f"{launches[0][1]} instead of {launches[0][0]} a rank",
            "counted",
        ),
        Claim.check(
            "both arms do the same matrix operations",
            all(fused == serial for serial, fused in flops),
            f"{', '.join(f'{fused:,}' for _, fused in flops)} by bucket",
            "counted",
        ),
        Claim.check(
            "both arms give the same bits",
            all(entry.bit_equal for entry in counted),
            f"{len(counted)} buckets compared",
            "checked",
        ),
    ]


def _measured_claims(timed: Sequence[Compared], kind: Kind) -> list[Claim]:
    tested = ARM_NAMES[kind][1]
    invalid = [entry.bucket for entry in timed if entry.timing and not entry.timing.valid]
    slower = [entry.bucket for entry in timed if entry.timing and entry.timing.verdict == "slower"]
    return [
        Claim.check(
            "the A/A control's interval contains 1 at every bucket",
            not invalid,
            f"invalid at {invalid}" if invalid else f"{len(timed)} buckets",
            "measured",
        ),
        Claim.check(
            f"the {tested} arm is slower at no bucket",
            not slower,
            f"slower at {slower}" if slower else f"{len(timed)} buckets",
            "measured",
        ),
    ]


def compare_data(setup: Setup, compared: Sequence[Compared]) -> dict[str, Any]:
    """What notebooks 03 and 04 keep beside their claims."""
    return {
        "setup": setup.title,
        "timed": any(entry.timing is not None for entry in compared),
        "buckets": {
            str(entry.bucket): {
                "configs": [f.run.request.config.to_dict() for f in (entry.baseline, entry.tested)],
                "errors": [str(f.quantized) for f in (entry.baseline, entry.tested)],
                "counts": None if entry.counts is None else [vars(counts) for counts in entry.counts],
                "samples_s": None if entry.timing is None else entry.timing.samples_s,
            }
            for entry in compared
        },
    }
