# SPDX-License-Identifier: Apache-2.0
"""Control panels for notebooks that add to a static result and never replace it.

``show`` always displays the static result first: it is what a headless run, the HTML page and a
reader without widgets see. With a live front end (JupyterLab) a panel follows, which runs the same
function with other values.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython import get_ipython
from IPython.display import display

from . import HEADLESS_VARIABLE
from .display import Note


@dataclass(frozen=True)
class Choice:
    """One of a few values, shown as a drop-down list."""

    label: str
    options: Sequence[Any]
    default: Any


@dataclass(frozen=True)
class Slider:
    """A number within bounds; whole numbers when all of its values are."""

    label: str
    low: float
    high: float
    step: float
    default: float

    @property
    def whole(self) -> bool:
        """Whether it takes integers."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step, self.default))


Control = Choice | Slider


def is_headless() -> bool:
    """Whether nobody can move a widget: the runner says so, ipywidgets is missing, or there is no kernel."""
    if os.environ.get(HEADLESS_VARIABLE) or importlib.util.find_spec("ipywidgets") is None:
        return True
    shell = get_ipython()
    return shell is None or getattr(shell, "kernel", None) is None


def _make_widget(control: Control) -> Any:
    import ipywidgets  # noqa: PLC0415  (optional where nobody can move a widget)

    common: dict[str, Any] = {
        "description": control.label,
        "style": {"description_width": "150px"},
        "layout": ipywidgets.Layout(width="460px"),
    }
    if isinstance(control, Choice):
        return ipywidgets.Dropdown(options=list(control.options), value=control.default, **common)
    kind = ipywidgets.IntSlider if control.whole else ipywidgets.FloatSlider
    return kind(
        value=control.default,
        min=control.low,
        max=control.high,
        step=control.step,
        continuous_update=False,
        **common,
    )


class Panel:
    """Widgets for some controls, a button, and an area where each run's result replaces the last.

    Attributes:
        inputs: the widget of each control, by parameter name.
        button: starts a run.
        output: holds the result, or the traceback when the run fails.
        root: the whole panel, to display.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], controls: Mapping[str, Control]) -> None:
        """Args: ``run(**values)`` returns what to display; ``controls`` are keyed by its parameters."""
        import ipywidgets  # noqa: PLC0415

        self._run = run
        self.inputs = {name: _make_widget(control) for name, control in controls.items()}
        self.button = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.output = ipywidgets.Output()
        self.button.on_click(self._on_click)
        self.root = ipywidgets.VBox([*self.inputs.values(), self.button, self.output])

    def values(self) -> dict[str, Any]:
        """The current value of each control."""
        return {name: widget.value for name, widget in self.inputs.items()}

    def _on_click(self, _button: Any) -> None:
        self.button.disabled = True
        self.button.description = "Running"
        self.output.outputs = ()
        try:
            for shown in self._run(**self.values()):
                self.output.append_display_data(shown)
        except Exception:
            # A callback's exception would end up in a log that nobody reads.
            self.output.append_stderr(traceback.format_exc())
        finally:
            self.button.disabled = False
            self.button.description = "Run"


def show(
    static: Sequence[Any], run: Callable[..., Sequence[Any]], controls: Mapping[str, Control]
) -> Panel | None:
    """Displays ``static``, then a control panel where somebody can use it.

    Args:
        static: what ``run`` returned for the notebook's own parameters (tables, pictures).
        run: called with one keyword argument per control; returns what to display.
        controls: by parameter name.

    Returns:
        the panel, None when headless.
    """
    for item in static:
        display(item)  # type: ignore[no-untyped-call]
    if is_headless():
        note = Note("Opened in JupyterLab, this cell adds a control panel that runs it with other values.")
        display(note)  # type: ignore[no-untyped-call]
        return None
    panel = Panel(run, controls)
    display(panel.root)  # type: ignore[no-untyped-call]
    return panel
