# SPDX-License-Identifier: Apache-2.0
"""Listings of the operators' kernels, compiled once in a test process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from kernellib.emulator import compile_to_assembly
from kernellib.ops.latent_moe_tail.config import TailConfig
from kernellib.ops.latent_moe_tail.inspection import kernels


@cache
def _listing(config: TailConfig) -> str:
    [(launcher, arguments)] = kernels(config.name).values()
    return compile_to_assembly(launcher, *arguments)


@pytest.fixture(scope="session")
def tail_listing() -> Callable[[TailConfig], str]:
    """config -> the gfx950 listing of the tail's kernel."""
    return _listing
