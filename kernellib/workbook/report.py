# SPDX-License-Identifier: Apache-2.0
"""HTML of a run: one self-contained page per executed notebook and an index of all claims.

Pages fetch nothing from the network: images are embedded, and the scripts that nbconvert takes from
content delivery networks (require.js, MathJax, Mermaid) are left out. Notebooks therefore write
formulas in plain text.
"""

from __future__ import annotations

import base64
import html
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import cast

from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

from kernellib.bench.state import git_revision

from .discovery import read_notebook
from .runner import NotebookResult

# The lab template with its three remote scripts taken out, a readable column width and our own header.
PAGE_TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}
<style>
main { max-width: 1080px; margin: 0 auto; padding: 0 16px 48px; }
.jp-InputPrompt, .jp-OutputPrompt { display: none !important; }
.jp-RenderedHTMLCommon { font-size: 15px; line-height: 1.55; }
.jp-InputArea-editor { font-size: 13px; }
.jp-OutputArea-output img { max-width: 100%; }
.kl-nav { font: 14px system-ui, sans-serif; padding: 14px 0 6px; color: #57606a; }
.kl-nav a { color: #0b57d0; }
.kl-failure { border: 2px solid #cf222e; border-radius: 8px; padding: 4px 16px 12px; margin: 12px 0;
  font: 14px system-ui, sans-serif; background: #fff5f5; color: #1f2328; }
.kl-failure pre { overflow-x: auto; font-size: 12px; background: #fff; padding: 10px; border-radius: 6px;
  white-space: pre-wrap; }
</style>
{%- endblock -%}
{%- block body_header -%}
{{ super() }}
{{ nb.metadata.get('kernellib_header', '') }}
{%- endblock -%}
"""

INDEX_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; color: #1f2328;
  margin: 0; background: #f6f8fa; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 16px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 0; }
a { color: #0b57d0; text-decoration: none; }
a:hover { text-decoration: underline; }
.muted { color: #57606a; font-size: 13px; }
section { background: #fff; border: 1px solid #d0d7de; border-radius: 10px; padding: 18px 20px;
  margin: 18px 0; }
.head { display: flex; gap: 12px; align-items: baseline; flex-wrap: wrap; }
.badge { border-radius: 999px; padding: 2px 10px; font-size: 12px; font-weight: 600; white-space: nowrap; }
.pass { background: #dafbe1; color: #116329; }
.fail { background: #ffebe9; color: #a40e26; }
.pending { background: #eaeef2; color: #424a53; }
.measured { background: #ddf4ff; color: #0a3069; }
.counted { background: #e6f4ea; color: #0f5132; }
.modelled { background: #fff3cd; color: #664d03; }
.checked { background: #eee8fb; color: #4b2e83; }
table { border-collapse: collapse; width: 100%; margin: 12px 0 4px; font-size: 14px; }
th { text-align: left; font-weight: 600; color: #57606a; font-size: 12px; padding: 6px 10px;
  border-bottom: 1px solid #d0d7de; }
td { padding: 7px 10px; border-bottom: 1px solid #eaeef2; vertical-align: top; }
td.name { font-weight: 500; }
td.detail { color: #424a53; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures { display: flex; gap: 12px; flex-wrap: wrap; margin-top: 12px; }
.figures a { flex: 1 1 300px; max-width: 640px; }
.figures img { width: 100%; border: 1px solid #eaeef2; border-radius: 6px; }
pre { overflow-x: auto; font-size: 12px; background: #fff5f5; border: 1px solid #ffcecb; border-radius: 6px;
  padding: 10px; white-space: pre-wrap; }
"""

MAX_INDEX_FIGURES = 3


def _badge(text: str, kind: str) -> str:
    return f'<span class="badge {html.escape(kind)}">{html.escape(text)}</span>'


def _failure_block(result: NotebookResult) -> str:
    if result.failure is None:
        return ""
    trace = f"<pre>{html.escape(result.failure.traceback)}</pre>" if result.failure.traceback else ""
    return (
        f'<div class="kl-failure"><p><b>Failed: {html.escape(result.failure.kind)}</b></p>'
        f"<pre>{html.escape(result.failure.message)}</pre>{trace}</div>"
    )


def _relative(target: Path, start: Path) -> str:
    return Path(os.path.relpath(target, start)).as_posix()


def _content(result: NotebookResult) -> NotebookNode:
    """The executed notebook, or a page in its place when the run never got that far."""
    if result.executed_path.exists():
        return read_notebook(result.executed_path)
    source = f"# {result.notebook.title}\n\nNo cell of this notebook was run."
    cell = new_markdown_cell(source)  # type: ignore[no-untyped-call]
    return cast(NotebookNode, new_notebook(cells=[cell]))  # type: ignore[no-untyped-call]


def render_notebook(result: NotebookResult, index: Path) -> Path:
    """Writes the self-contained page of one executed notebook, a failure with its traceback on top.

    Args:
        result: the outcome; its ``html_path`` is written.
        index: the index page, linked from the top.

    Returns:
        the path written.
    """
    content = _content(result)
    content.cells = [
        cell for cell in content.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    content.metadata["title"] = result.notebook.title
    content.metadata["kernellib_header"] = (
        f'<div class="kl-nav"><a href="{html.escape(_relative(index, result.html_path.parent))}">'
        f"All notebooks</a> · {html.escape(result.notebook.name)} · {result.duration_s:.1f} s</div>"
        f"{_failure_block(result)}"
    )
    exporter = HTMLExporter(raw_template=PAGE_TEMPLATE, embed_images=True)  # type: ignore[no-untyped-call]
    page, _ = exporter.from_notebook_node(content)
    result.html_path.write_text(page, encoding="utf-8")
    return result.html_path


def _claims_table(claims: Sequence[Mapping[str, str]]) -> str:
    if not claims:
        return '<p class="muted">No claims: the notebook left no artifact.</p>'
    rows = "".join(
        f"<tr><td>{_badge(claim['verdict'], claim['verdict'])}</td>"
        f'<td class="name">{html.escape(claim["name"])}</td>'
        f'<td class="detail">{html.escape(claim["detail"])}</td>'
        f"<td>{_badge(claim['source'], claim['source'])}</td></tr>"
        for claim in claims
    )
    return f"<table><tr><th>verdict</th><th>claim</th><th>detail</th><th>source</th></tr>{rows}</table>"


def _section(result: NotebookResult, root: Path) -> str:
    status = _badge("passed", "pass") if result.passed else _badge("failed", "fail")
    page = html.escape(_relative(result.html_path, root))
    links = [f'<a href="{page}">page</a>']
    artifact = result.html_path.with_suffix(".json")
    for path, label in ((result.executed_path, "notebook"), (artifact, "artifact")):
        if path.exists():
            links.append(f'<a href="{html.escape(_relative(path, root))}">{label}</a>')
    parameters = ", ".join(f"{k}={v!r}" for k, v in result.parameters.items() if k != "artifact_dir")
    failure = ""
    if result.failure is not None:
        text = result.failure.message + (
            "\n\n" + result.failure.traceback if result.failure.traceback else ""
        )
        failure = f"<p><b>{html.escape(result.failure.kind)}</b></p><pre>{html.escape(text)}</pre>"
    figures = "".join(
        f'<a href="{page}"><img alt="{html.escape(figure.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(figure.read_bytes()).decode()}"></a>'
        for figure in result.figures[:MAX_INDEX_FIGURES]
    )
    return (
        f'<section><div class="head">{status}<h2><a href="{page}">'
        f"{html.escape(result.notebook.title)}</a></h2>"
        f'<span class="muted">{result.duration_s:.1f} s · {" · ".join(links)}</span></div>'
        f'<div class="muted">{html.escape(result.notebook.name)}'
        f"{' · ' + html.escape(parameters) if parameters else ''}</div>"
        f"{failure}{_claims_table(result.claims)}"
        f"{f'<div class=figures>{figures}</div>' if figures else ''}</section>"
    )


def _revision() -> str:
    """The revision that made the page, "+changes" after it when files differ; "" where nobody knows."""
    found = git_revision()
    short = (found["revision"] or "")[:10]
    return f"{short}+changes" if found["dirty"] else short


def environment_line() -> str:
    """Date, git revision and the versions a reader needs to repeat the run."""
    versions = []
    for package in ("torch", "flydsl", "triton", "numpy"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    revision = _revision()
    parts = [
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        *([f"revision {revision}"] if revision else []),
        f"Python {platform.python_version()}",
        *versions,
    ]
    return " · ".join(parts)


def _headline(results: Sequence[NotebookResult], pending: Sequence[str], interrupted: bool) -> str:
    """The verdict of the whole run; "all passed" only where every chosen notebook ran and passed."""
    claims = [claim for result in results for claim in result.claims]
    holding = sum(claim["verdict"] == "pass" for claim in claims)
    passed = sum(result.passed for result in results)
    planned = len(results) + len(pending)
    if interrupted:
        badge = _badge("interrupted", "fail")
    elif passed < len(results):
        badge = _badge("failed", "fail")
    elif pending:
        badge = _badge("not finished", "pending")
    else:
        badge = _badge("all passed", "pass")
    ran = f"{len(results)} of {planned} notebooks ran, " if pending else ""
    return f"{badge} {ran}{passed} of {planned} notebooks passed, {holding} of {len(claims)} claims hold"


def _pending_section(names: Sequence[str], interrupted: bool) -> str:
    """The chosen notebooks without a verdict."""
    if not names:
        return ""
    why = (
        "The run was interrupted before these had a verdict."
        if interrupted
        else "These have no verdict: they run now or later, or the run was killed."
    )
    items = "".join(f"<li>{html.escape(name)}</li>" for name in names)
    return (
        f'<section><div class="head">{_badge("not run to the end", "pending")}</div>'
        f'<p class="muted">{why}</p><ul>{items}</ul></section>'
    )


def render_index(
    results: Sequence[NotebookResult],
    path: Path,
    where: str = "",
    *,
    pending: Sequence[str] = (),
    interrupted: bool = False,
) -> Path:
    """Writes the index page: every notebook with its verdicts, sources, duration, links and pictures.

    Args:
        results: outcomes in the order they ran.
        path: the page to write.
        where: what the notebooks ran on, for the headline, for example "emulator on <processor>".
        pending: names of the chosen notebooks that have no outcome (yet); they are listed.
        interrupted: whether the user ended the run.

    Returns:
        ``path``.
    """
    headline = _headline(results, pending, interrupted)
    legend = " ".join(
        f"{_badge(source, source)} {meaning}"
        for source, meaning in (
            ("measured", "timed on a device"),
            ("counted", "instruction and byte counters"),
            ("modelled", "computed from a stated model"),
            ("checked", "values compared"),
        )
    )
    sections = [_section(result, path.parent) for result in results]
    body = "".join([*sections, _pending_section(pending, interrupted)])
    place = f" on {html.escape(where)}" if where else ""
    path.write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kernellib workbook</title><style>{INDEX_STYLE}</style></head>"
        f"<body><main><h1>kernellib workbook{place}</h1>"
        f'<p>{headline}</p><p class="muted">{html.escape(environment_line())}</p>'
        f'<p class="muted">{legend}</p>{body}</main></body></html>\n',
        encoding="utf-8",
    )
    return path
