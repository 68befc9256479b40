# SPDX-License-Identifier: Apache-2.0
"""Notebook 03 without a GPU: launches, bytes and a modelled bound. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from IPython.display import Image
from matplotlib.patches import Patch

from kernellib.ops.latent_moe_tail.config import TailConfig, load_tuned
from kernellib.targets import TargetInfo

from ..artifact import Claim
from ..display import BLUE, GREY, ORANGE, HtmlTable, Note, figure_style, new_figure, picture
from ..widgets import Slider
from .counters import LaunchCounts
from .model import (
    FUSED_CHAIN,
    UNFUSED_CHAIN,
    KernelTraffic,
    MachineModel,
    ModelledTime,
    can_time,
    chain_bound_s,
    modelled_time,
)

CONTROLS = {
    "bandwidth_tb_per_s": Slider("bandwidth (TB/s)", 3.0, 8.0, 0.1, 8.0),
    "latency_us": Slider("memory latency (us)", 0.3, 2.0, 0.1, 1.0),
}


def plural(num_launches: int) -> str:
    """One launch, several launches."""
    return "1 launch" if num_launches == 1 else f"{num_launches} launches"


def opening_note(target: TargetInfo) -> Note:
    """The first thing notebook 03 says: whether anything in it is timed."""
    if can_time(target):
        return Note(f"Timed with device events on {target.device_name}, target {target.name}.")
    return Note(
        f"Nothing was timed: target {target.name} ({target.device_name}) has no GPU's clock to read. "
        "What follows are counters and a labelled model.",
        "warning",
    )


def traffic_rows(chain: Sequence[KernelTraffic], arm: str) -> list[list[Any]]:
    """One row per kernel of an arm, with the least bytes it must move."""
    return [[arm, kernel.name, kernel.read_bytes, kernel.written_bytes] for kernel in chain]


def launch_table() -> HtmlTable:
    """Kernels of both arms and the bytes that each must read and write at the least."""
    return HtmlTable(
        ["arm", "kernel", "reads at least (bytes)", "writes (bytes)"],
        traffic_rows(UNFUSED_CHAIN, "unfused") + traffic_rows(FUSED_CHAIN, "fused"),
        "Kernels and the bytes each has to move, from the shapes",
        "modelled",
    )


def bound_table(machine: MachineModel | None = None) -> HtmlTable:
    """Lower bounds of both arms under the model."""
    machine = machine or MachineModel()
    rows = []
    for arm, chain in (("unfused", UNFUSED_CHAIN), ("fused", FUSED_CHAIN)):
        total = sum(kernel.total_bytes for kernel in chain)
        stream_us = total / machine.bandwidth_bytes_per_s * 1e6
        rows.append([arm, len(chain), total, stream_us, chain_bound_s(chain, machine) * 1e6])
    ratio = chain_bound_s(UNFUSED_CHAIN, machine) / chain_bound_s(FUSED_CHAIN, machine)
    caption = (
        f"Lower bounds at {machine.bandwidth_bytes_per_s / 1e12:.1f} TB/s and "
        f"{machine.latency_s * 1e6:.1f} us of memory latency a kernel: ratio {ratio:.2f}"
    )
    columns = ["arm", "launches", "bytes", "streaming alone (us)", "with one latency a kernel (us)"]
    return HtmlTable(columns, rows, caption, "modelled")


def bound_figure(machine: MachineModel | None = None) -> Image:
    """Left: both bounds over bandwidth. Right: what the bound is made of, kernel by kernel."""
    machine = machine or MachineModel()
    bandwidths = np.linspace(3.0, 8.0, 101)
    with figure_style():
        figure, (left, right) = new_figure(10.5, 3.8, 2)
        curves: tuple[tuple[str, tuple[KernelTraffic, ...], str], ...] = (
            ("unfused", UNFUSED_CHAIN, ORANGE),
            ("fused", FUSED_CHAIN, BLUE),
        )
        for label, chain, colour in curves:
            machines = [replace(machine, bandwidth_bytes_per_s=b * 1e12) for b in bandwidths]
            times = [chain_bound_s(chain, each) * 1e6 for each in machines]
            left.plot(bandwidths, times, color=colour, linewidth=2.2, label=f"{label}, {plural(len(chain))}")
        left.axvline(machine.bandwidth_bytes_per_s / 1e12, color=GREY, linestyle=":", linewidth=1)
        left.set_ylim(bottom=0)
        left.set_xlabel("bandwidth that memory delivers (TB/s)")
        left.set_ylabel("lower bound (microseconds)")
        left.set_title("Bound of the whole tail (modelled)")
        left.legend(loc="upper right")
        for position, (_, chain, _) in enumerate(curves):
            start = 0.0
            for kernel in chain:
                stream = kernel.total_bytes / machine.bandwidth_bytes_per_s * 1e6
                latency = machine.latency_s * 1e6
                right.barh(position, latency, left=start, color=GREY, height=0.5)
                right.barh(position, stream, left=start + latency, color=BLUE, height=0.5)
                start += latency + stream
        right.set_yticks([0, 1], ["unfused", "fused"])
        right.set_ylim(1.9, -0.6)
        right.set_xlabel("time (microseconds)")
        right.set_title("Where the bound goes (modelled)")
        legend = {"waiting for the first byte": GREY, "streaming": BLUE}
        handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
        right.legend(handles=handles, loc="lower right", ncols=2)
        return picture(
            figure, "Modelled lower bounds of the fused and the unfused tail over memory bandwidth"
        )


def bound_view(bandwidth_tb_per_s: float, latency_us: float) -> list[Any]:
    """Table and figure for other assumptions, for the control panel."""
    machine = MachineModel(bandwidth_bytes_per_s=bandwidth_tb_per_s * 1e12, latency_s=latency_us * 1e-6)
    return [bound_table(machine), bound_figure(machine)]


def launch_model(
    counts: LaunchCounts, config: TailConfig | None = None, machine: MachineModel | None = None
) -> ModelledTime:
    """The model's answer for the launch that was counted; ``config`` None is the emulator's tuned one."""
    config = config or load_tuned("emulator")
    return modelled_time(config, counts.waves_per_simd, counts.instructions["vector"], machine)


def bound_claims(modelled: ModelledTime) -> list[Claim]:
    """That nothing but the stream of weights bounds the launch under the model."""
    slowest_other = max(modelled.latency_bound_s, modelled.issue_s)
    return [
        Claim.check(
            "the launch is bound by streaming the weight",
            modelled.bound == "stream",
            f"stream {modelled.stream_s * 1e6:.2f} us, next bound {slowest_other * 1e6:.2f} us, "
            f"with the first latency {modelled.total_s * 1e6:.2f} us",
            "modelled",
        )
    ]


def bound_data(counts: LaunchCounts | None, modelled: ModelledTime | None) -> dict[str, Any]:
    """What notebook 03 keeps in its artifact when nothing was timed."""
    return {
        "machine_model": asdict(MachineModel()),
        "unfused_bound_us": chain_bound_s(UNFUSED_CHAIN) * 1e6,
        "fused_bound_us": chain_bound_s(FUSED_CHAIN) * 1e6,
        "launch_model": None if modelled is None else asdict(modelled),
        "counters": None if counts is None else asdict(counts),
    }
