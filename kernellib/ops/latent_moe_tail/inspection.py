# SPDX-License-Identifier: Apache-2.0
"""What ``python -m kernellib.inspect latent_moe_tail`` shows: the kernels a call launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import DEFAULT_CONFIG, TailConfig, config_space, load_tuned


def config_names() -> list[str]:
    """Names that ``kernels`` takes, the default first."""
    return list(dict.fromkeys((DEFAULT_CONFIG.name, *(config.name for config in config_space()))))


def kernels(config_name: str | None = None) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Kernel name -> (FlyDSL launcher, arguments to compile it with), in launch order.

    Args:
        config_name: as ``TailConfig.name`` spells it; None for the configuration an MI355X would run.

    Raises:
        TailConfigError: the name spells no valid configuration.
    """
    import flydsl.expr as fx  # noqa: PLC0415  (the compiler takes seconds to load)

    from .kernel_gfx950 import build  # noqa: PLC0415

    config = load_tuned("mi355x") if config_name is None else TailConfig.from_name(config_name)
    no_addresses = (0,) * 5
    return {config.kernel_name: (build(config), (*no_addresses, 1e-6, fx.Stream(None)))}
