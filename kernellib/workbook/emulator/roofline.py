# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a kernel's time on an MI355X, from its counters. Everything here is modelled.

Each resource alone, perfectly used by the compute units that have a workgroup::

    memory  = bytes touched, each once / bandwidth
    matrix  = sum over types of FLOP / peak of the type
    vector  = (vector issues * 4 + transcendental issues * 16) cycles / SIMDs / clock
    lds     = passes through the banks / compute units / clock

The largest is the bound; nothing overlaps worse than perfectly in it, and no launch, latency, cache or clock
under load is in it. It tells which resource a kernel leans on, not how long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from IPython.display import Image

from ..artifact import Claim
from ..display import BLUE, GREEN, GREY, ORANGE, HtmlTable, figure_style, new_figure, picture
from .kernels import CountedKernel

# AMD Instinct MI355X data sheet: dense peaks in FLOP per second.
PEAKS: Mapping[str, float] = MappingProxyType(
    {"f64": 78.6e12, "f32": 157.3e12, "16 bit": 2.5166e15, "8 bit": 5.0332e15, "6 or 4 bit": 10.0663e15}
)


@dataclass(frozen=True)
class Machine:
    """What the model assumes.

    Attributes:
        bandwidth_bytes_per_s, num_units, clock_hz: memory, compute units, peak engine clock [AMD Instinct
            MI355X data sheet].
        simds_per_unit: 4 [CDNA4 ISA].
        vector_cycles: of a vector instruction, 64 lanes on a SIMD of 16 [AMD, "Introducing AMD CDNA
            Architecture"]; transcendental_cycles: a quarter of that rate [same, as of GCN].
        peaks: matrix FLOP per second by operand width.
    """

    bandwidth_bytes_per_s: float = 8.0e12
    num_units: int = 256
    clock_hz: float = 2.4e9
    simds_per_unit: int = 4
    vector_cycles: float = 4.0
    transcendental_cycles: float = 16.0
    peaks: Mapping[str, float] = field(default_factory=lambda: PEAKS)


@dataclass(frozen=True)
class Bounds:
    """Modelled seconds by resource, and the units that the launch can use."""

    kernel: CountedKernel
    units: int
    seconds: Mapping[str, float]

    @property
    def binding(self) -> str:
        """The resource with the largest bound."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def width_class(matrix_type: str) -> str:
    """Which peak a matrix type runs at; a mixed pair at its wider operand's.

    >>> [width_class(t) for t in ("bf16", "scaled fp8 x fp4", "fp4 x fp4", "f64")]
    ['16 bit', '8 bit', '6 or 4 bit', 'f64']
    """
    names = matrix_type.replace("scaled ", "").replace(" sparse", "").split(" x ")
    widest = max(int(name.lstrip("bfpi")) for name in names)
    return {64: "f64", 32: "f32", 16: "16 bit", 8: "8 bit"}.get(widest, "6 or 4 bit")


def bounds(kernel: CountedKernel, machine: Machine | None = None) -> Bounds:
    """The model's bounds of one counted launch."""
    machine = machine or Machine()
    report = kernel.report
    units = min(machine.num_units, report.occupancy.num_workgroups)
    share = units / machine.num_units
    cycles = (
        report.classes["vector"] * machine.vector_cycles
        + report.classes["transcendental"] * machine.transcendental_cycles
    )
    flops = report.matrix_flops
    passes = sum(totals.passes for (space, _), totals in report.memory.items() if space == "lds")
    return Bounds(kernel, units, {
        "memory": kernel.touched_bytes / machine.bandwidth_bytes_per_s,
        "matrix": sum(n / (machine.peaks[width_class(name)] * share) for name, n in flops.items()),
        "vector": cycles / (units * machine.simds_per_unit) / machine.clock_hz,
        "lds": passes / units / machine.clock_hz,
    })  # fmt: skip


def bounds_table(found: Sequence[Bounds]) -> HtmlTable:
    """Bounds in microseconds by resource."""
    rows = [
        [b.kernel.what, b.units, *(b.seconds[name] * 1e6 for name in b.seconds), b.binding] for b in found
    ]
    names = [f"{name} (us)" for name in found[0].seconds]
    columns = ["kernel", "units in use", *names, "binds"]
    return HtmlTable(columns, rows, "MI355X: lower bounds of the time, by resource", "modelled")


def intensity_table(found: Sequence[Bounds]) -> HtmlTable:
    """Arithmetic intensity and the FLOP rate at the bound."""
    rows: list[list[Any]] = []
    for b in found:
        flops = sum(b.kernel.report.matrix_flops.values())
        if flops:
            rate = flops / max(b.seconds.values()) / 1e12
            rows.append([b.kernel.what, flops, b.kernel.touched_bytes, flops / b.kernel.touched_bytes, rate])
    columns = ["kernel", "matrix FLOP", "bytes touched", "FLOP per byte", "TFLOP/s at the bound"]
    return HtmlTable(columns, rows, "Roofline: no faster than this on an MI355X", "modelled")


def bounds_figure(found: Sequence[Bounds]) -> Image:
    """Bounds by resource, a group of bars per kernel."""
    with figure_style():
        figure, (axes,) = new_figure(9.0, 3.6)
        names = list(found[0].seconds)
        for position, (name, colour) in enumerate(zip(names, (BLUE, ORANGE, GREEN, GREY), strict=True)):
            heights = [b.seconds[name] * 1e6 for b in found]
            places = [i + 0.2 * (position - 1.5) for i in range(len(found))]
            axes.bar(places, heights, 0.18, label=name, color=colour)
        axes.set_yscale("log")
        axes.set_xticks(range(len(found)), [b.kernel.what for b in found])
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylabel("microseconds (log)")
        axes.set_title("Lower bounds by resource, MI355X (modelled)")
        axes.legend()
        return picture(figure, "bar chart of modelled lower bounds by resource for each kernel")


def roofline_claims(found: Sequence[Bounds]) -> list[Claim]:
    """That the model says of the tail what its design says: the weight's bytes bind."""
    tail = found[0]
    return [
        Claim.check(
            "the tail leans on memory", tail.binding == "memory",
            f"memory {tail.seconds['memory'] * 1e6:.2f} us, next "
            f"{max(v for k, v in tail.seconds.items() if k != 'memory') * 1e6:.2f} us", "modelled",
        )
    ]  # fmt: skip
