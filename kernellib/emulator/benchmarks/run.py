# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark and writes its record (`benchmark.schema.json`)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from kernellib.emulator.benchmarks.cases import CASES, FLOPS, Case, WrongResultError
from kernellib.emulator.counters import matrix_flops
from kernellib.emulator.report import LaunchReport

SCHEMA_NAME = "kernellib.emulator.benchmark/1"
Json = dict[str, Any]
MIN_CPU_S = 1.0


def run_case(case: Case, seed: int, repeats: int) -> Json:
    """Check one case, then run it `repeats` times or for a CPU second, whichever is more; its record entry.

    The first call, which compiles and binds the kernel, is recorded apart.  Rates are of CPU seconds of this
    process (all its threads) and of the quickest run: the work is the same every time, and whatever else the
    machine does can only add to it.

    Raises:
        WrongResultError: the output is wrong; there is no rate then.
    """
    import flydsl.compiler as flyc  # noqa: PLC0415  (takes seconds to load)

    from kernellib.emulator.session import emulated  # noqa: PLC0415

    torch.set_num_threads(1)  # the check's threads would go on spinning, and count
    prepared = case.prepare(seed)
    samples: list[tuple[float, float]] = []
    error = float("inf")
    with emulated() as session:
        for tensor in prepared.tensors:
            session.register(tensor)
        begin = time.process_time()
        call = flyc.compile(prepared.launcher, *prepared.arguments)
        first_call_s = time.process_time() - begin
        while len(samples) < repeats or sum(sample[0] for sample in samples) < MIN_CPU_S:
            prepared.poison()
            cpu, wall = time.process_time(), time.perf_counter()
            call(*prepared.arguments)
            samples.append((time.process_time() - cpu, time.perf_counter() - wall))
        error = prepared.error()
        if not error <= 1.0:
            raise WrongResultError(f"{case.name} with seed {seed}: error {error:.3g} of what is allowed")
        report = session.launches[-1]
    return _entry(case, seed, report, first_call_s, samples, error)


def _entry(
    case: Case,
    seed: int,
    report: LaunchReport,
    first_call_s: float,
    samples: Sequence[tuple[float, float]],
    error: float,
) -> Json:
    flops = sum(matrix_flops(report.instruction_counts).values())
    work = flops if case.unit == FLOPS else report.lane_instructions
    cpu, wall = ([sample[i] for sample in samples] for i in range(2))
    rate = work / min(cpu)
    return {
        "name": case.name, "what": case.what, "kernel": report.kernel_name, "seed": seed,
        "num_waves": report.num_waves, "lane_instructions": report.lane_instructions, "matrix_flops": flops,
        "error": error, "first_call_cpu_s": first_call_s, "cpu_s": cpu, "wall_s": wall, "unit": case.unit,
        "rate": rate, "median_rate": work / statistics.median(cpu), "target": case.target,
        "reached": rate >= case.target,
    }  # fmt: skip


def run_benchmark(names: Sequence[str], seed: int = 0, repeats: int = 5) -> Json:
    """Run the named cases (all when empty); the record, checked against its schema.

    Raises:
        KeyError: a name that is none of the cases.
        WrongResultError: a kernel computed something wrong.
    """
    chosen = [CASES[name] for name in names] or list(CASES.values())
    record = {
        "schema": SCHEMA_NAME, "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m kernellib.emulator", *sys.argv[1:]]), "machine": _machine(),
        "versions": {name: _version(name) for name in ("kernellib", "numpy", "torch", "flydsl")},
        "revision": _revision(), "cases": [run_case(case, seed, repeats) for case in chosen],
    }  # fmt: skip
    validate(record)
    return record


@lru_cache(maxsize=1)
def _validator() -> Any:
    from jsonschema import Draft202012Validator  # noqa: PLC0415  (its import takes seconds)

    schema = json.loads(Path(__file__).with_name("benchmark.schema.json").read_text(encoding="utf-8"))
    return Draft202012Validator(schema)


def validate(record: Json) -> None:
    """Raises ValueError naming the first field that does not follow the schema."""
    error = next(iter(_validator().iter_errors(record)), None)
    if error is not None:
        path = "/".join(map(str, error.absolute_path)) or "top level"
        raise ValueError(f"benchmark record does not follow {SCHEMA_NAME} at {path}: {error.message[:200]}")


def save(record: Json, path: Path) -> None:
    """Write the record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def table(record: Json) -> Table:
    """The rates as a rich table."""
    speed = record["machine"]["calibration"] / 1e9
    shown = Table("kernel", "waves", "M lane instr.", "M FLOP", "CPU ms", "M/s", "of", "wanted", "reached")
    shown.caption = f"per CPU second; this computer adds {speed:.2f} G float32 a CPU second in numpy just now"
    for case in record["cases"]:
        short = "FLOP" if case["unit"] == FLOPS else "lane instr."
        shown.add_row(
            case["name"], f"{case['num_waves']:,}", f"{case['lane_instructions'] / 1e6:,.1f}",
            f"{case['matrix_flops'] / 1e6:,.1f}", f"{1e3 * min(case['cpu_s']):,.1f}",
            f"{case['rate'] / 1e6:,.0f}", short, f"{case['target'] / 1e6:,.0f}",
            "[green]yes[/]" if case["reached"] else "[red]no[/]",
        )  # fmt: skip
    return shown


def _machine() -> Json:
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "calibration": _calibrate(),
        "processor": model or platform.machine(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


def _calibrate() -> float:
    """float32 additions per CPU second in arrays of 64 KiB: how fast this computer is just now.

    Other work on the machine slows the benchmark and this alike, by the caches and cores that they share.
    """
    a = np.ones(16_384, np.float32)
    out = np.empty_like(a)
    quickest = float("inf")
    for _ in range(20):
        begin = time.process_time()
        for _ in range(200):
            np.add(a, a, out=out)
        quickest = min(quickest, time.process_time() - begin)
    return 200 * a.size / quickest


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The checkout's revision, None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
