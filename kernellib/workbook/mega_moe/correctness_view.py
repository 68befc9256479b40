# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of notebook 01."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from IPython.display import Image
from matplotlib.colors import LogNorm

from kernellib.ops.mega_moe.routing import KINDS

from ..display import HtmlTable, figure_style, new_figure, picture
from ..widgets import Choice, Control, Slider
from .correctness import BLOCK, Bounds, Checked, Repeated, check
from .runs import Request, oracles, run, sample_rows
from .setup import Setup

FLOOR = 1e-6  # errors below it share a colour; exact agreement is the rule


def check_table(found: Sequence[Checked], caption: str) -> HtmlTable:
    """Errors of each run."""
    rows = [
        [
            entry.run.request.name,
            entry.run.request.config.name,
            sum(len(out) for out in entry.run.outputs),
            entry.run.request.wire,
            entry.fp32,
            entry.quantized,
            "pass" if entry.right else entry.run.failure or "fail",
        ]
        for entry in found
    ]
    columns = ["run", "configuration", "tokens", "wire", "relL2, fp32", "relL2, quantised", "verdict"]
    return HtmlTable(columns, rows, caption, "checked")


def repeat_table(repeated: Repeated) -> HtmlTable:
    """What repeated calls showed."""
    rows: list[list[Any]] = [
        ["first output untouched by the second call", "yes" if repeated.first_kept else "no"],
        ["first call repeated: same bits", "yes" if repeated.again_equal else "no"],
        ["relL2 of the first call", f"{repeated.errors[0]:.2e}"],
        ["relL2 of the second call", f"{repeated.errors[1]:.2e}"],
        [
            "relL2 of a graph replayed with new values",
            "no GPU, no graph" if repeated.replayed is None else f"{repeated.replayed:.2e}",
        ],
    ]
    return HtmlTable(["what", "result"], rows, "One layer, called again and again", "checked")


def bounds_table(bounds: Bounds) -> HtmlTable:
    """What each rank was told."""
    rows = [[f"rank {rank}", text or "nothing"] for rank, text in enumerate(bounds.texts)]
    return HtmlTable(["where", "error"], rows, "An expert id out of range on the last rank", "checked")


def error_map(outputs: Sequence[npt.NDArray[np.float32]], expected: Sequence[npt.NDArray[np.float32]]) -> Any:
    """Relative error of each token (rows, all ranks) and block of 32 columns: float64 [tokens, blocks]."""
    got = np.concatenate(list(outputs)).astype(np.float64)
    wanted = np.concatenate(list(expected)).astype(np.float64)
    shape = (len(got), -1, BLOCK)
    error = np.linalg.norm((got - wanted).reshape(shape), axis=-1)
    scale = np.linalg.norm(wanted.reshape(shape), axis=-1)
    return np.where(scale > 0, error / np.where(scale > 0, scale, 1.0), np.where(error > 0, np.inf, 0.0))


def error_figure(setup: Setup, found: Checked) -> Image:
    """Where the errors are: tokens of all ranks by blocks of columns, against both oracles."""
    run_ = found.run
    outputs = [rows[sample_rows(len(rows))] for rows in run_.outputs]
    with figure_style():
        figure, axes = new_figure(10.5, 4.2, 2)
        titles = ("against fp32 (loose)", "against the oracle that rounds too (tight)")
        for axis, title, expected in zip(axes, titles, oracles(setup, run_.request), strict=True):
            errors = error_map(outputs, expected)
            image = axis.imshow(
                np.clip(errors, FLOOR, 1.0),
                norm=LogNorm(FLOOR, 1.0),
                aspect="auto",
                interpolation="nearest",
                cmap="viridis",
            )
            edge = 0
            for out in outputs[:-1]:
                edge += len(out)
                axis.axhline(edge - 0.5, color="white", linewidth=0.8)
            axis.grid(False)
            axis.set_title(title)
            axis.set_xlabel(f"block of {BLOCK} columns")
            axis.set_ylabel("token (white lines: ranks)")
            figure.colorbar(image, ax=axis, label="relative error")
        return picture(figure, f"Relative errors of {run_.request.name} by token and column block")


CONTROLS: Mapping[str, Control] = {
    "kind": Choice("routing", KINDS, "mixed_skew"),
    "seed": Slider("seed", 0, 100, 1, 0),
}


def case_view(setup: Setup, kind: str, seed: int) -> list[Any]:
    """One routing of one seed: its table and its error map, for the notebook's panel."""
    config, tokens = setup.tuned(setup.buckets[0]), setup.tokens(4)
    [found] = run(setup, [Request(kind, config, tokens, kind=kind, seed=seed)])
    checked = check(setup, found)
    return [check_table([checked], f"{kind}, seed {seed}"), error_figure(setup, checked)]


def artifact_data(
    setup: Setup, groups: Mapping[str, Sequence[Checked]], repeated: Repeated, bounds: Bounds
) -> dict[str, Any]:
    """What notebook 01 keeps beside its claims."""
    return {
        "setup": setup.title,
        "runs": {
            group: [
                {
                    "name": entry.run.request.name,
                    "config": entry.run.request.config.to_dict(),
                    "kernel": entry.run.request.config.name,
                    "tokens_by_rank": [len(out) for out in entry.run.outputs],
                    "fp32": str(entry.fp32),
                    "quantized": str(entry.quantized),
                    "failure": entry.run.failure,
                }
                for entry in found
            ]
            for group, found in groups.items()
        },
        "repeated": {"errors": [str(error) for error in repeated.errors], "replayed": str(repeated.replayed)},
        "bounds": list(bounds.texts),
    }
