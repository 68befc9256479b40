# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of notebook 02."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.display import Image
from matplotlib.patches import Patch

from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, NUM_COMPUTE_UNITS, WEIGHT_BYTES
from kernellib.targets import TargetInfo

from ..artifact import Source
from ..display import BLUE, GREEN, GREY, ORANGE, RED, HtmlTable, figure_style, new_figure, picture
from .model import MachineModel
from .tuning import Candidate, ranking_source

MAX_BARS = 20
BOUND_COLOURS = {"stream": BLUE, "latency": ORANGE, "issue": GREY}


def status_table(candidates: Sequence[Candidate]) -> HtmlTable:
    """Each candidate's verdict at the gate, in the order tried."""
    rows = [[candidate.name, candidate.status, candidate.detail] for candidate in candidates]
    return HtmlTable(
        ["configuration", "gate", "why"], rows, "Every candidate, checked before it is ranked", "checked"
    )


def resource_table(ranking: Sequence[Candidate]) -> HtmlTable:
    """What the compiler allotted and the waves issued, best candidate first."""
    rows = []
    for candidate in ranking[:MAX_BARS]:
        counts = candidate.counts
        if counts is None:
            continue
        rows.append(
            [
                candidate.name,
                counts.num_workgroups,
                counts.vgprs,
                counts.waves_per_simd,
                counts.scratch_bytes,
                candidate.bytes_in_flight,
                counts.num_instructions / counts.num_waves,
                counts.num_instructions / (WEIGHT_BYTES / 1024),
            ]
        )
    return HtmlTable(
        [
            "configuration",
            "workgroups",
            "vector registers",
            "waves a SIMD",
            "scratch (bytes)",
            "in flight a compute unit (bytes)",
            "instructions a wave",
            "instructions a KiB of weight",
        ],
        rows,
        "Compiled resources of the candidates, best first",
        "counted",
    )


def time_table(ranking: Sequence[Candidate], source: Source) -> HtmlTable:
    """The ranking: each candidate's time, and for a modelled one the bound that decides."""
    rows = []
    for position, candidate in enumerate(ranking[:MAX_BARS], start=1):
        modelled = candidate.modelled
        row = [position, candidate.name, candidate.time_us]
        if source == "modelled" and modelled is not None:
            row += [
                modelled.stream_s * 1e6,
                modelled.latency_bound_s * 1e6,
                modelled.issue_s * 1e6,
                modelled.bound,
            ]
        elif candidate.measured_us is not None:
            row += [candidate.measured_us[0], candidate.measured_us[2]]
        rows.append(row)
    extra = (
        ["stream (us)", "latency (us)", "issue (us)", "bound by"]
        if source == "modelled"
        else ["p10 (us)", "p90 (us)"]
    )
    return HtmlTable(["rank", "configuration", "time (us)", *extra], rows, "The ranking", source)


def ranking_figure(
    ranking: Sequence[Candidate], target: TargetInfo, machine: MachineModel | None = None
) -> Image:
    """Left: time of the best candidates. Right: bytes in flight against registers, all of them."""
    machine = machine or MachineModel()
    source = ranking_source(target)
    best = ranking[:MAX_BARS]
    with figure_style():
        figure, (left, right) = new_figure(10.5, max(3.4, 0.32 * len(best) + 1.4), 2)
        for position, candidate in enumerate(best):
            colour = BOUND_COLOURS[candidate.modelled.bound] if candidate.modelled else BLUE
            left.barh(position, candidate.time_us or 0.0, color=colour, height=0.7)
            if candidate.measured_us is not None:
                low, middle, high = candidate.measured_us
                left.errorbar(
                    middle, position, xerr=[[middle - low], [high - middle]], color="black", capsize=3
                )
        left.set_yticks(range(len(best)), [candidate.name for candidate in best], fontsize=9)
        left.invert_yaxis()
        left.set_xlabel("time of one launch (microseconds)")
        left.set_title(f"Best candidates ({source})")
        if source == "modelled":
            handles = [Patch(color=colour, label=f"{bound} bound") for bound, colour in BOUND_COLOURS.items()]
            left.legend(handles=handles, loc="center right")
        chosen = [candidate for candidate in ranking if candidate.counts is not None]
        right.scatter(
            [candidate.counts.vgprs for candidate in chosen if candidate.counts],
            [(candidate.bytes_in_flight or 0) / 1024 for candidate in chosen],
            s=50, color=GREY, alpha=0.7, label="candidate",
        )  # fmt: skip
        for candidate, colour, marker, label in (
            *((c, GREEN, "o", "winner") for c in chosen[:1]),
            *((c, ORANGE, "s", "default") for c in chosen if c.config == DEFAULT_CONFIG),
        ):
            registers = candidate.counts.vgprs if candidate.counts else 0
            in_flight = (candidate.bytes_in_flight or 0) / 1024
            right.scatter(registers, in_flight, s=110, facecolors="none", edgecolors=colour, marker=marker,
                          linewidths=2.2, label=label)  # fmt: skip
        wanted = machine.bandwidth_bytes_per_s * machine.latency_s / NUM_COMPUTE_UNITS / 1024
        right.axhline(wanted, color=RED, linestyle="--", linewidth=1, label="Little's law (modelled)")
        right.set_xlabel("vector registers a lane")
        right.set_ylabel("in flight a compute unit (KiB)")
        right.set_title("What registers buy (counted)" if chosen else "Nothing counted on this target")
        if chosen:
            right.legend(loc="upper left")
        return picture(figure, "Ranking of configurations, and weight bytes in flight against registers")
