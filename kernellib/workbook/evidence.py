# SPDX-License-Identifier: Apache-2.0
"""One command on a machine with a GPU: run everything that counts as evidence, pack it into one small folder.

    python -m kernellib.workbook.evidence run --target cuda       # then commit results/<device>/<date>
    python -m kernellib.workbook.evidence pack results/x/y first=out/run0 second=out/run1

``run`` executes notebook 03 in full for each seed, each in a process of its own, measures the operator after
a producer's kernel, executes notebook 01 and the tests that need a GPU; whatever fails, the rest goes on.
``pack`` takes finished runs: records are copied byte for byte, pages lose JupyterLab's style sheet (half of
their size) and their pictures become palettes.

Exit status of ``run``: 0 every step passed and every record is valid, 1 otherwise.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kernellib.bench.comparison import compare_records
from kernellib.bench.readme import RECORD_SUFFIX
from kernellib.bench.record import Record
from kernellib.targets import TargetUnavailableError, resolve

from .errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = "latent_moe_tail"
PRODUCER = "after_producer"
GPU_TARGETS = ("auto", "cuda", "mi355x")
# The theme that nbconvert embeds; what a page needs without it.
LARGE_STYLE_CHARS = 10_000
PAGE_STYLE = """<style>
body { font: 15px/1.55 system-ui, sans-serif; color: #1f2328; }
pre { overflow-x: auto; font-size: 13px; background: #f6f8fa; padding: 8px; border-radius: 6px; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 3px 9px; border: 1px solid #d0d7de; }
img { max-width: 100%; } svg.jp-icon, .jp-Collapser, .anchor-link { display: none; }
</style>"""
_STYLE = re.compile(r"<style\b.*?</style>", re.DOTALL)
_INDEX_LINK = re.compile(r'<a href="[^"]*index\.html">[^<]*</a> · ')
_GPU_MARK = re.compile(r"^@pytest\.mark\.gpu$", re.MULTILINE)
_PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class NotebookRun:
    """A finished run of one notebook: what its files are to be called, and the run's ``out`` folder."""

    label: str
    folder: Path

    def files(self, suffix: str) -> list[Path]:
        """The run's files with this suffix; at most one of each kind in a run of one notebook."""
        return sorted(self.folder.rglob(f"*{suffix}"))


def small_picture(png: bytes) -> bytes:
    """The picture with a palette of 256 colours, or as it was where that is no smaller."""
    from PIL import Image  # noqa: PLC0415  (matplotlib's, an optional package)

    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
    return min(png, buffer.getvalue(), key=len)


def small_page(page: str, hide: Sequence[str]) -> str:
    """A notebook's page without its large style sheets, with small pictures and without machine paths.

    Args:
        page: HTML that the runner wrote.
        hide: prefixes of paths, taken out wherever they stand.
    """
    page = _STYLE.sub(lambda found: "" if len(found[0]) > LARGE_STYLE_CHARS else found[0], page)
    page = _INDEX_LINK.sub("", page)  # the index is not packed
    page = page.replace("</head>", f"{PAGE_STYLE}</head>", 1)
    page = _PICTURE.sub(
        lambda found: (
            "data:image/png;base64,"
            + base64.b64encode(small_picture(base64.b64decode(found[1]))).decode("ascii")
        ),
        page,
    )
    for prefix in hide:
        page = page.replace(prefix.rstrip("/") + "/", "")
    return page


def _record_lines(path: Path, record: Record) -> list[str]:
    data = record.data
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    revision = " ".join((data["git"]["revision"] or "unknown").split())
    lines = [
        *(f"## {path.name}", "", "```sh", data["command"], "```", ""),
        f"Made {data['created']} at revision {revision}; method revision {data['method_revision']};",
        f"{versions}; driver {data['state_before']['driver']}.",
        "",
    ]
    if record.trusted:
        return [*lines, "Valid: its A/A control contains 1.", ""]
    return [*lines, "**Not valid**:", "", *(f"- {reason}" for reason in record.faults), ""]


def pack(
    runs: Sequence[NotebookRun], into: Path, *, hide: Sequence[str] = (), notes: Sequence[str] = ()
) -> Path:
    """Copies records and shrunk pages of finished runs into one folder, with a README on how they came.

    Args:
        runs: with distinct labels.
        into: the folder, made when missing.
        hide: see ``small_page``.
        notes: further lines for the README.

    Returns:
        the README.

    Raises:
        UsageError: labels repeat, a run left neither record nor page, or those of several notebooks.
        RecordError: a record that does not follow its schema.
    """
    if len({run.label for run in runs}) < len(runs):
        raise UsageError(f"labels got {[run.label for run in runs]}, wanted distinct ones")
    into.mkdir(parents=True, exist_ok=True)
    lines = [f"# {into.parent.name}, {into.name}", "", *notes, *([""] if notes else [])]
    for run in runs:
        records = run.files(RECORD_SUFFIX)
        pages = [page for page in run.files(".html") if page.stem != "index"]
        if not records and not pages:
            raise UsageError(f"run {run.label!r} left no record and no page in its folder; look at its log")
        if len(records) > 1 or len(pages) > 1:
            found = ", ".join(path.name for path in (*records, *pages))
            raise UsageError(f"run {run.label!r} got {found}, wanted those of one notebook")
        for page in pages:
            text = small_page(page.read_text(encoding="utf-8"), hide)
            (into / f"{run.label}.html").write_text(text, encoding="utf-8")
        for source in records:
            target = into / f"{run.label}{RECORD_SUFFIX}"
            shutil.copyfile(source, target)
            lines += _record_lines(target, Record.load(target))
    path = into / "README.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _run_step(name: str, command: Sequence[str], console: Console) -> int:
    """Runs one command in the checkout, its output passed through; returns its exit status."""
    shown = " ".join(["python", *command])
    console.rule(f"{name}: {shown}", style="dim")
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


def _notebook_command(notebook: str, target: str, profile: str, seed: int, out: Path) -> list[str]:
    words = ["-m", "kernellib.workbook", "run", f"{OPERATOR}/{notebook}", "--target", target]
    return [*words, "--profile", profile, "--seed", str(seed), "--out", str(out)]


def _producer_command(target: str, out: Path) -> list[str]:
    words = ["-m", "kernellib.bench", "run", OPERATOR, "--target", target, "--after-producer"]
    return [*words, "--out", str(out / f"{PRODUCER}{RECORD_SUFFIX}")]


def _gpu_tests() -> list[str]:
    """The test files with tests that need a GPU; others may need packages that a GPU machine lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in files if _GPU_MARK.search(path.read_text(encoding="utf-8"))]
    return [path.relative_to(ROOT).as_posix() for path in marked]


def _device_folder(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def _new_folder(parent: Path) -> Path:
    """Today's folder, with a number where an earlier run has taken it: evidence is never overwritten."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    names = (today, *(f"{today}.{number}" for number in range(2, 100)))
    return next(parent / name for name in names if not (parent / name).exists())


def _verdict(records: Sequence[Path], console: Console) -> bool:
    """Prints whether the records are valid and compare; True when all is well."""
    if not records:
        console.print("no record was made", highlight=False)
        return False
    loaded = [Record.load(path) for path in records]
    for path, record in zip(records, loaded, strict=True):
        console.print(f"{path.name}: {'valid' if record.trusted else 'NOT VALID'}", highlight=False)
        for reason in record.faults:
            console.print(f"  {reason}", markup=False, highlight=False)
    firsts: dict[str, tuple[Path, Record]] = {}
    outcomes = []
    for path, record in zip(records, loaded, strict=True):
        first_path, first = firsts.setdefault(record.data["operator"], (path, record))
        if record is not first:
            outcomes.append(compare_records(first, record))
            text = ("no regression", "REGRESSION", "does not compare")[outcomes[-1].exit_code]
            console.print(f"{path.name} against {first_path.name}: {text}", highlight=False)
    return all(record.trusted for record in loaded) and not any(outcome.exit_code for outcome in outcomes)


@app.command("run")
def run_command(
    target: Annotated[str, typer.Option(help=f"One of: {', '.join(GPU_TARGETS)}.")] = "auto",
    seeds: Annotated[str, typer.Option(help="Of notebook 03, with commas: one record each.")] = "0,1",
    out: Annotated[Path, typer.Option(help="Where results/<device>/<date> goes.", file_okay=False)] = Path(
        "results"
    ),
    work: Annotated[Path, typer.Option(help="For the runs' own files.", file_okay=False)] = Path(
        "out/evidence"
    ),
    tests: Annotated[bool, typer.Option(help="Run the tests that need a GPU as well.")] = True,
) -> None:
    """Run notebooks and GPU tests, pack records and pages."""
    console = Console()
    try:
        info = resolve(target)
        if info.times != "measured":
            raise UsageError(f"target {info.name} has no clock; wanted a GPU: {', '.join(GPU_TARGETS)}")
        plan = [(f"03_performance_ab.seed{int(seed)}", "03_performance_ab", "full", int(seed))
                for seed in seeds.split(",")]  # fmt: skip
        if len({label for label, *_ in plan}) < len(plan):
            raise UsageError(f"seeds got {seeds}, wanted distinct ones: each makes one record")
    except (UsageError, TargetUnavailableError, ValueError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    plan.append(("01_correctness", "01_correctness", "quick", 0))
    work = work.resolve()
    statuses = {}
    commands = {
        label: _notebook_command(notebook, info.name, profile, seed, work / label)
        for label, notebook, profile, seed in plan
    }
    commands[PRODUCER] = _producer_command(info.name, work / PRODUCER)
    for label, command in commands.items():
        shutil.rmtree(work / label, ignore_errors=True)
        statuses[label] = _run_step(label, command, console)
    if tests:
        command = ["-m", "pytest", "-q", "-m", "gpu", *_gpu_tests()]
        statuses["GPU tests"] = _run_step("GPU tests", command, console)
    folder = _new_folder(out.resolve() / _device_folder(info.device_name))
    notes = [f"Made by `python -m kernellib.workbook.evidence run --target {info.name} --seeds {seeds}`.", ""]
    notes += [f"- {label}: {'passed' if status == 0 else 'FAILED'}" for label, status in statuses.items()]
    runs = [NotebookRun(label, work / label) for label in commands]
    # What left nothing has failed, and the notes say so.
    runs = [run for run in runs if run.files(".html") or run.files(RECORD_SUFFIX)]
    pack(runs, folder, hide=[str(work), str(ROOT)], notes=notes)
    good = _verdict(sorted(folder.glob(f"*{RECORD_SUFFIX}")), console)
    console.print(f"packed: {folder}; then python -m kernellib.bench readme", highlight=False, soft_wrap=True)
    if not good or any(statuses.values()):
        raise typer.Exit(1)


@app.command("pack")
def pack_command(
    into: Annotated[Path, typer.Argument(help="The folder to fill.", file_okay=False)],
    runs: Annotated[list[str], typer.Argument(help="LABEL=FOLDER, a finished run's --out.")],
    hide: Annotated[list[str] | None, typer.Option(help="Path prefix to take out of pages.")] = None,
) -> None:
    """Pack runs that were made elsewhere."""
    pairs = [entry.partition("=") for entry in runs]
    pack([NotebookRun(label, Path(folder)) for label, _, folder in pairs], into, hide=hide or ())


if __name__ == "__main__":
    app(prog_name="python -m kernellib.workbook.evidence")
