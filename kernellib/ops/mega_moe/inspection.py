# SPDX-License-Identifier: Apache-2.0
"""What ``python -m kernellib.inspect mega_moe`` shows: the kernels of a call at Kimi-K3's real shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import BUCKETS, KIMI_K3, WIRES, MegaMoEConfigError, Wire, select_config
from .contract import TABLES
from .layout import SymmetricLayout

NUM_RANKS = 8
DEFAULT_NAME = "tuned-8192-fp8_blockwise_1x32"


def config_names() -> list[str]:
    """Names that ``kernels`` takes, the default first: table, bucket and wire format."""
    names = [f"{table}-{bucket}-{wire}" for table in TABLES for bucket in BUCKETS for wire in WIRES]
    return list(dict.fromkeys((DEFAULT_NAME, *names)))


def kernels(config_name: str | None = None) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Kernel name -> (FlyDSL launcher, arguments to compile it with), in launch order.

    Args:
        config_name: one of ``config_names()``; None for the default.

    Raises:
        MegaMoEConfigError: a name that is not among them.
    """
    name = DEFAULT_NAME if config_name is None else config_name
    if name not in config_names():
        raise MegaMoEConfigError(
            f"config_name got {name!r}, wanted table-bucket-wire such as {DEFAULT_NAME}; "
            f"buckets: {', '.join(map(str, BUCKETS))}"
        )
    import flydsl.expr as fx  # noqa: PLC0415  (the compiler takes seconds to load)

    from . import quantize_gfx950, stage1_gfx950, stage2_gfx950  # noqa: PLC0415

    table, bucket, wire = name.split("-", 2)
    stage1, stage2 = stages(table, int(bucket), wire)
    stream = fx.Stream(None)
    return {
        quantize_gfx950.kernel_name(KIMI_K3.model_dim): (
            quantize_gfx950.build(KIMI_K3.model_dim),
            (0, 0, 0, 1, stream),
        ),
        stage1.kernel_name: (stage1_gfx950.build(stage1), (0, 0, 1, 0, 0, 0, 0, 0, 0, stream)),
        stage2.kernel_name: (stage2_gfx950.build(stage2), (0, 0, 1, 1, 0, 0, 0, 0, stream)),
    }


def stages(table: Any, bucket: int, wire: Wire | str) -> tuple[Any, Any]:
    """(Stage1, Stage2) of a table's entry at Kimi-K3's shape on eight ranks."""
    from .stage1_gfx950 import Stage1  # noqa: PLC0415
    from .stage2_gfx950 import Stage2  # noqa: PLC0415

    config = select_config(KIMI_K3, NUM_RANKS, bucket, table)
    layout = SymmetricLayout(KIMI_K3, NUM_RANKS, bucket, wire)  # type: ignore[arg-type]
    return Stage1(layout, config, "situv2"), Stage2(layout, config)
