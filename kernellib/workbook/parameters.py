# SPDX-License-Identifier: Apache-2.0
"""Notebook parameters: what a notebook declares, and values from the command line made to fit."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ParameterTypeError, UnknownParameterError

# Passed by the runner to every notebook that declares them, and silently left out of the others.
COMMON_PARAMETERS = ("target", "profile", "seed", "artifact_dir")


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of one notebook: its name, the default in its ``parameters`` cell, its comment."""

    name: str
    default: Any
    help: str = ""

    @property
    def type_name(self) -> str:
        """What a user is told to pass: the default's type, or "any" where the default is None."""
        return "any" if self.default is None else type(self.default).__name__


def parse_literal(text: str) -> Any:
    """Reads ``text`` as a Python literal, else as JSON, else as the text itself.

    Example:
        >>> parse_literal("[1, 2]"), parse_literal("true"), parse_literal("emulator")
        ([1, 2], True, 'emulator')
    """
    for parse in (ast.literal_eval, json.loads):
        try:
            return parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return text


def _fits(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple):
            return False
        return not default or all(_fits(item, default[0]) for item in value)
    if isinstance(value, bool):  # to Python a bool is an int, to a user it is not
        return isinstance(default, bool)
    return isinstance(value, int | float if isinstance(default, float) else type(default))


def convert(spec: ParameterSpec, text: str) -> Any:
    """The value of ``-p NAME TEXT`` for one notebook's parameter.

    A text parameter takes ``text`` as it stands (quotes are allowed, not needed); a list parameter
    wants every element to fit the default's first.

    Raises:
        ParameterTypeError: the value's type differs from the default's.
    """
    value = parse_literal(text)
    if isinstance(spec.default, str) and not isinstance(value, str):
        value = text
    if not _fits(value, spec.default):
        raise ParameterTypeError(
            f"parameter {spec.name}: got {text!r} ({type(value).__name__}), wanted {spec.type_name} "
            f"like its default {spec.default!r}"
        )
    if isinstance(spec.default, float):
        return float(value)
    return list(value) if isinstance(spec.default, list) else value


def check_known(names: Iterable[str], notebooks: Iterable[Mapping[str, ParameterSpec]]) -> None:
    """Demands that each name is declared by at least one of the notebooks.

    Raises:
        UnknownParameterError: listing the names that are known.
    """
    known = sorted({name for specs in notebooks for name in specs})
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownParameterError(
            f"unknown parameter {', '.join(map(repr, unknown))}; the chosen notebooks declare: "
            f"{', '.join(known) or 'none'}"
        )


def select(
    specs: Mapping[str, ParameterSpec], common: Mapping[str, Any], overrides: Mapping[str, str]
) -> dict[str, Any]:
    """The values to inject into one notebook: those of ``common`` and ``overrides`` that it declares.

    Args:
        specs: the notebook's parameters.
        common: values the runner offers every notebook (``COMMON_PARAMETERS``); None means "not given".
        overrides: ``-p`` values as text; they win over ``common``.

    Raises:
        ParameterTypeError: an override does not fit.
    """
    values = {name: value for name, value in common.items() if name in specs and value is not None}
    values.update({name: convert(specs[name], text) for name, text in overrides.items() if name in specs})
    return values
