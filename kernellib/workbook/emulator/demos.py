# SPDX-License-Identifier: Apache-2.0
"""Each sanitizer on a small broken kernel, and silent on the repaired twin.

A new demonstration is a new entry of ``DEMOS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, Literal

import torch

from kernellib import emulator

from ..artifact import Claim
from ..display import HtmlTable
from . import demo_kernels_gfx950 as kernels

Mode = Literal["simple", "relaxed"]
Run = Callable[[emulator.Session, bool], None]
NUM_LANES = 128
FLAG_ELEMENTS = 64 + 64 + 1


@dataclass(frozen=True)
class Demo:
    """One fault.

    Attributes:
        sanitizer: which of ``emulated(sanitize=...)`` finds it; "" for what is always looked for.
        fault: what is wrong with the broken kernel.
        finding: the error that it raises.
        run: ``run(session, broken)`` launches the broken kernel or its twin.
    """

    name: str
    sanitizer: str
    fault: str
    finding: type[emulator.Finding]
    run: Run


@dataclass(frozen=True)
class DemoResult:
    """What the broken kernel and its twin did in one mode; ``caught`` is None where nothing was found."""

    demo: Demo
    mode: Mode
    schedule_seed: int
    caught: emulator.Finding | None
    repaired_error: str

    @property
    def as_wanted(self) -> bool:
        """The fault was found under its name, and the twin ran in silence.

        (What lies past the end may be memory that was freed a while ago: a finding that says so is one too.)
        """
        return isinstance(self.caught, self.demo.finding) and not self.repaired_error

    @property
    def summary(self) -> str:
        """Both outcomes in a line."""
        twin = self.repaired_error or "silent"
        return f"{self.demo.name}, seed {self.schedule_seed}: {type(self.caught).__name__}, twin {twin}"


def _floats(count: int = NUM_LANES) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def _simple(build: Callable[[bool], Any], num_out: int = NUM_LANES, count: int = NUM_LANES) -> Run:
    """Runs a launcher on fresh floats and an output that both are as long as they have to be."""

    def run(session: emulator.Session, broken: bool) -> None:
        x, out = _floats(), torch.zeros(num_out)
        for tensor in (x, out):
            session.register(tensor)
        build(broken)(x.data_ptr(), out.data_ptr(), count)

    return run


def _use_after_free(session: emulator.Session, broken: bool) -> None:
    x, out = _floats(), torch.zeros(1 << 20)
    session.register(x)
    session.register(out)
    address = out.data_ptr()
    if broken:
        del out
    kernels.past_the_end(False)(x.data_ptr(), address, NUM_LANES)


def _missing_nops(session: emulator.Session, broken: bool) -> None:
    """FlyDSL never forgets an s_nop, so the broken listing is the compiler's without them."""
    listing = _matrix_listing()
    if broken:
        listing = re.sub(r"^\s*s_nop .*$", "", listing, flags=re.MULTILINE)
    x, out = torch.ones(64 * 8, dtype=torch.bfloat16), torch.zeros(64 * 4)
    session.run_assembly(listing, None, 1, 64, [x, out, 0])


@cache
def _matrix_listing() -> str:
    return str(emulator.compile_to_assembly(kernels.matrix_result(False), 0, 0, 0))


def _poisoned(session: emulator.Session, broken: bool) -> None:
    x, out = _floats(), session.empty((NUM_LANES,), torch.float32)
    session.register(x)
    kernels.adds_to_garbage(broken)(x.data_ptr(), out.data_ptr(), NUM_LANES)


DEMOS: tuple[Demo, ...] = (
    Demo(
        "past the end", "out_of_bounds", "a guard with <= lets one lane too many through",
        emulator.OutOfBoundsError, _simple(kernels.past_the_end, num_out=100, count=100),
    ),
    Demo(
        "freed memory", "out_of_bounds", "the output tensor is gone when the kernel runs",
        emulator.UseAfterFreeError, _use_after_free,
    ),
    Demo(
        "crooked atomic", "misaligned", "a 64-bit atomic at an address that is no multiple of 8",
        emulator.MisalignedAccessError, _simple(kernels.crooked_atomic, num_out=2 * 66),
    ),
    Demo(
        "no wait", "missing_waits", "LDS is read before the load that fills it was waited for",
        emulator.MissingWaitError, _simple(kernels.no_wait),
    ),
    Demo(
        "no wait states", "missing_nops", "a matrix result is read too soon, with no s_nop between",
        emulator.MissingNopError, _missing_nops,
    ),
    Demo(
        "parted barrier", "barrier_divergence", "lanes are switched off at a barrier",
        emulator.BarrierDivergenceError, _simple(kernels.parted_barrier),
    ),
    Demo(
        "stale register", "uninitialised_registers", "inline assembly does not write its result",
        emulator.UninitialisedRegisterError, _simple(kernels.stale_register),
    ),
    Demo(
        "half-filled LDS", "uninitialised_lds", "128 floats are read, 100 were written",
        emulator.UninitialisedLdsError, _simple(kernels.half_filled_lds),
    ),
    Demo(
        "adds to garbage", "poisoned_memory", "the output of torch.empty is added to",
        emulator.PoisonedMemoryError, _poisoned,
    ),
    Demo(
        "no barrier", "lds_races", "two waves exchange through LDS without a barrier",
        emulator.LdsRaceError, _simple(kernels.no_barrier),
    ),
    Demo(
        "no fences", "global_races", "a flag without release and acquire",
        emulator.GlobalRaceError, _simple(kernels.no_release, num_out=FLAG_ELEMENTS),
    ),
    Demo(
        "nobody signals", "", "a workgroup waits for a flag that nobody raises",
        emulator.DeadlockError, _simple(kernels.nobody_signals),
    ),
)  # fmt: skip


def run_demo(demo: Demo, mode: Mode = "simple", schedule_seed: int = 0) -> DemoResult:
    """Run the broken kernel under the sanitizer that is to find it, and its twin under every one.

    (Under every one, another rule may be seen broken first: without its barrier a wave in relaxed mode can
    read what the other has not written yet.)
    """
    named = (demo.sanitizer,) if demo.sanitizer else "default"

    def attempt(broken: bool) -> emulator.Finding | None:
        try:
            with emulator.emulated(
                sanitize=named if broken else "all",
                mode=mode,
                schedule_seed=schedule_seed,
                quantum=500,
                instruction_limit=20_000,
            ) as session:
                demo.run(session, broken)
        except emulator.Finding as finding:
            return finding
        return None

    repaired = attempt(False)
    return DemoResult(demo, mode, schedule_seed, attempt(True), "" if repaired is None else str(repaired))


def run_demos(profile: str, seed: int) -> list[DemoResult]:
    """Every demonstration in simple mode, and in relaxed mode with one seed (full: five)."""
    relaxed: list[tuple[Mode, int]] = [("relaxed", seed + i) for i in range(5 if profile == "full" else 1)]
    return [run_demo(demo, mode, number) for demo in DEMOS for mode, number in [("simple", 0), *relaxed]]


def where_of(finding: emulator.Finding) -> str:
    """Source line, workgroup, wave and lane of a finding, as far as they are known."""
    location = finding.location
    source = PurePath(location.source).name if location.source else ""
    parts = [source, f"workgroup {location.workgroup}" if location.workgroup else ""]
    known = {"wave": location.wave, "lane": location.lane}
    parts += [f"{name} {value}" for name, value in known.items() if value is not None]
    return ", ".join(part for part in parts if part)


def demo_table(results: Sequence[DemoResult]) -> HtmlTable:
    """What was found where, for the runs in simple mode."""
    rows = []
    for result in results:
        if result.mode == "simple":
            found = result.caught
            rows.append([
                result.demo.sanitizer or "always", result.demo.fault,
                type(found).__name__ if found else "nothing", where_of(found) if found else "",
                "silent" if not result.repaired_error else result.repaired_error[:60],
            ])  # fmt: skip
    columns = ["sanitizer", "fault", "finding", "where", "repaired twin"]
    return HtmlTable(columns, rows, "Each sanitizer on a broken kernel and on its repaired twin", "checked")


def finding_text(results: Sequence[DemoResult], name: str) -> str:
    """The full text of one demonstration's finding."""
    found = next(r.caught for r in results if r.demo.name == name and r.mode == "simple")
    return str(found) if found else f"{name}: nothing was found"


def demo_claims(results: Sequence[DemoResult]) -> list[Claim]:
    """One claim per mode, and that every sanitizer is demonstrated."""
    from kernellib.emulator.sanitizers.names import SANITIZERS  # noqa: PLC0415

    claims = []
    for mode in ("simple", "relaxed"):
        mine = [result for result in results if result.mode == mode]
        wrong = [f"; {result.summary}" for result in mine if not result.as_wanted]
        detail = f"{len(mine) - len(wrong)} of {len(mine)} runs as wanted" + "".join(wrong)
        name = f"each broken kernel is found, each twin silent ({mode} mode)"
        claims.append(Claim.check(name, bool(mine) and not wrong, detail, "checked"))
    missing = sorted(set(SANITIZERS) - {result.demo.sanitizer for result in results})
    detail = f"{len(SANITIZERS) - len(missing)} of {len(SANITIZERS)}"
    detail += f", not {', '.join(missing)}" if missing else ""
    return [*claims, Claim.check("every sanitizer is demonstrated", not missing, detail, "checked")]
