# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the package mori whose functions have the published wheel's signatures, and nothing else.

A call with a name or an argument that the wheel does not have fails as it would there. Behaviour comes from
the test; every call is recorded.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SIGNATURES = json.loads(Path(__file__).with_name("mori_signatures.json").read_text())
MISSING = object()


def signature(entries: list[dict[str, Any]], method: bool = False) -> inspect.Signature:
    """The signature that a list of recorded parameters describes."""
    kinds = {
        "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "keyword": inspect.Parameter.KEYWORD_ONLY,
    }
    parameters = [
        inspect.Parameter(
            entry["name"],
            kinds[entry["kind"]],
            default=MISSING if entry["default"] else inspect.Parameter.empty,
        )
        for entry in entries
    ]
    first = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] if method else []
    return inspect.Signature([*first, *parameters])


class FakeMori:
    """The modules, and what was called.

    Attributes:
        calls: (name, arguments by parameter name) in order; methods as Class.method.
    """

    def __init__(
        self,
        functions: dict[str, Callable[..., Any]],
        classes: dict[str, dict[str, Callable[..., Any]]] | None = None,
    ) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.modules: dict[str, ModuleType] = {"mori": ModuleType("mori")}
        for name, content in SIGNATURES["modules"].items():
            module = ModuleType(name)
            for function, entries in content["functions"].items():
                setattr(
                    module, function, self._checked(function, signature(entries), functions.get(function))
                )
            for cls, methods in content["classes"].items():
                setattr(module, cls, self._class(cls, methods, (classes or {}).get(cls, {})))
            self.modules[name] = module
            setattr(self.modules["mori"], name.rpartition(".")[2], module)

    def _checked(
        self, name: str, wanted: inspect.Signature, behaviour: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = wanted.bind(*args, **kwargs)
            self.calls.append((name, dict(bound.arguments)))
            if behaviour is None:
                raise NotImplementedError(f"this test gives {name} no behaviour")
            return behaviour(*bound.args, **bound.kwargs)

        return call

    def _class(self, name: str, methods: dict[str, Any], behaviour: dict[str, Callable[..., Any]]) -> type:
        body = {
            method: self._checked(f"{name}.{method}", signature(entries, method=True), behaviour.get(method))
            for method, entries in methods.items()
        }
        if not behaviour and set(methods) == {"__init__"}:  # a dataclass: keeps what it is given
            wanted = signature(methods["__init__"])

            def keep(this: Any, *args: Any, **kwargs: Any) -> None:
                bound = wanted.bind(*args, **kwargs)
                self.calls.append((f"{name}.__init__", dict(bound.arguments)))
                vars(this).update(bound.arguments)

            body["__init__"] = keep
        return type(name, (), body)

    def install(self, monkeypatch: Any) -> FakeMori:
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
