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
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from kernellib.emulator.benchmarks.cases import CASES, FLOPS, Case, Prepared, WrongResultError
from kernellib.emulator.counters import matrix_flops
from kernellib.emulator.report import LaunchReport

SCHEMA_NAME = "kernellib.emulator.benchmark/2"
Json = dict[str, Any]
MIN_CPU_S = 1.0
MAX_SANITIZED = 3  # calls with all sanitizers; their quickest is compared


def run_case(case: Case, seed: int, repeats: int) -> Json:
    """Check one case, then run it `repeats` times or for a CPU second, whichever is more; its record entry.

    The first call, which compiles and binds the kernel, is recorded apart.  Rates are of CPU seconds of this
    process (all its threads) and of the quickest run: the work is the same every time, and whatever else the
    machine does can only add to it.  What `sanitize="all"` costs is measured right after, as a ratio.

    Raises:
        WrongResultError: the output is wrong; there is no rate then.
    """
    torch.set_num_threads(1)  # the check's threads would go on spinning, and count
    prepared = case.prepare(seed)
    plain = _run(case, seed, prepared, repeats, "default", MIN_CPU_S)
    sanitized = _run(case, seed, prepared, min(repeats, MAX_SANITIZED), "all", 0.0)
    return _entry(case, seed, plain, sanitized)


@dataclass(frozen=True)
class _Runs:
    """Calls of one case under one set of sanitizers; `cpu` and `wall` in seconds, of a call each."""

    report: LaunchReport
    first_call_s: float
    cpu: list[float]
    wall: list[float]
    error: float


def _run(case: Case, seed: int, prepared: Prepared, repeats: int, sanitize: str, min_cpu_s: float) -> _Runs:
    import flydsl.compiler as flyc  # noqa: PLC0415  (takes seconds to load)

    from kernellib.emulator.session import emulated  # noqa: PLC0415

    cpu: list[float] = []
    wall: list[float] = []
    with emulated(sanitize=sanitize) as session:
        for tensor in prepared.tensors:
            session.register(tensor)
        begin = time.process_time()
        call = flyc.compile(prepared.launcher, *prepared.arguments)
        first_call_s = time.process_time() - begin
        while len(cpu) < repeats or sum(cpu) < min_cpu_s:
            prepared.poison()
            began = time.process_time(), time.perf_counter()
            call(*prepared.arguments)
            cpu.append(time.process_time() - began[0])
            wall.append(time.perf_counter() - began[1])
        error = prepared.error()
        if not error <= 1.0:
            raise WrongResultError(
                f"{case.name} with seed {seed}, sanitize={sanitize!r}: error {error:.3g} of what is allowed"
            )
        return _Runs(session.launches[-1], first_call_s, cpu, wall, error)


def _entry(case: Case, seed: int, plain: _Runs, sanitized: _Runs) -> Json:
    report = plain.report
    flops = sum(matrix_flops(report.instruction_counts).values())
    work = flops if case.unit == FLOPS else report.lane_instructions
    rate = work / min(plain.cpu)
    return {
        "name": case.name, "what": case.what, "kernel": report.kernel_name, "seed": seed,
        "num_waves": report.num_waves, "lane_instructions": report.lane_instructions, "matrix_flops": flops,
        "error": plain.error, "first_call_cpu_s": plain.first_call_s, "cpu_s": plain.cpu,
        "wall_s": plain.wall, "unit": case.unit, "rate": rate,
        "median_rate": work / statistics.median(plain.cpu),
        "target": case.target, "reached": rate >= case.target, "sanitized_cpu_s": sanitized.cpu,
        "sanitize_ratio": min(sanitized.cpu) / min(plain.cpu),
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
    shown = Table("kernel", "M lanes", "M FLOP", "CPU ms", "M/s", "of", "wanted", "reached", "all")
    shown.caption = f"per CPU second; this computer adds {speed:.2f} G float32 a CPU second in numpy just now"
    shown.caption += "\nlanes: lane instructions; all: CPU time with all sanitizers over the default's"
    for case in record["cases"]:
        short = "FLOP" if case["unit"] == FLOPS else "lanes"
        shown.add_row(
            case["name"], f"{case['lane_instructions'] / 1e6:,.1f}",
            f"{case['matrix_flops'] / 1e6:,.1f}", f"{1e3 * min(case['cpu_s']):,.1f}",
            f"{case['rate'] / 1e6:,.0f}", short, f"{case['target'] / 1e6:,.0f}",
            "[green]yes[/]" if case["reached"] else "[red]no[/]", f"{case['sanitize_ratio']:.1f}",
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
    found = []
    for words in (("ls-files", "."), ("rev-parse", "HEAD")):
        command = ["git", "-C", str(Path(__file__).parent), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.strip())
    tracked, revision = found
    return revision if tracked else None  # a copy inside another working tree has none
