# SPDX-License-Identifier: Apache-2.0
"""The instruction table.  Importing this package imports its modules, which fill `registry.REGISTRY`."""

from __future__ import annotations

import importlib
import pkgutil

from kernellib.emulator.instructions.registry import REGISTRY, lookup, split_mnemonic

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "lookup", "split_mnemonic"]
