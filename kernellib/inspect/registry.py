# SPDX-License-Identifier: Apache-2.0
"""Operators that can be inspected: every folder of kernellib.ops with a module ``inspection``.

That module has two functions, so that a new operator needs nothing but its own folder:

    config_names() -> list[str]
    kernels(config_name: str | None) -> dict[str, tuple[launcher, arguments]]

``kernels`` maps each kernel that a call launches, in launch order, to a FlyDSL launcher and the arguments to
compile it with; None stands for the configuration that an MI355X would run.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, Protocol, cast

import kernellib.ops

Kernels = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


class UnknownOperatorError(ValueError):
    """No operator of that name can be inspected."""


class Inspection(Protocol):
    """The module ``inspection`` of an operator."""

    def config_names(self) -> list[str]: ...

    def kernels(self, config_name: str | None = None) -> Kernels: ...


def operator_names() -> list[str]:
    """Names of the operators that can be inspected, sorted."""
    folders = (module.name for module in pkgutil.iter_modules(kernellib.ops.__path__) if module.ispkg)
    return sorted(
        name
        for name in folders
        if importlib.util.find_spec(f"{kernellib.ops.__name__}.{name}.inspection") is not None
    )


def inspection_of(operator: str) -> Inspection:
    """The inspection module of ``operator``.

    Raises:
        UnknownOperatorError: there is none; the text lists those there are.
    """
    names = operator_names()
    if operator not in names:
        raise UnknownOperatorError(f"operator got {operator!r}, wanted one of: {', '.join(names)}")
    return cast(Inspection, importlib.import_module(f"{kernellib.ops.__name__}.{operator}.inspection"))
