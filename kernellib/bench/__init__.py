# SPDX-License-Identifier: Apache-2.0
"""Paired A/B measurement: gates, rotation, graph replay, statistics, records.

    python -m kernellib.bench run latent_moe_tail --out record.json
    python -m kernellib.bench show record.json
    python -m kernellib.bench compare old.json new.json
    python -m kernellib.bench readme                      # README's figures from the records under results

From Python: ``compare_tail`` measures the latent MoE tail; ``run_paired`` with ``timed_record`` measures any
``Workload`` and its ``Arm`` list; ``compare_records`` judges two records. Names are imported when first
used, so that importing this package loads neither torch nor a compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assemble import timed_record
    from .cases.latent_moe_tail import compare_tail
    from .comparison import compare_records
    from .device import Device, GpuDevice
    from .method import METHOD_REVISION, Method, run_paired
    from .record import Record
    from .workload import Arm, Workload

_HOMES = {
    "Arm": "workload",
    "Device": "device",
    "GpuDevice": "device",
    "METHOD_REVISION": "method",
    "Method": "method",
    "Record": "record",
    "Workload": "workload",
    "compare_records": "comparison",
    "compare_tail": "cases.latent_moe_tail",
    "run_paired": "method",
    "timed_record": "assemble",
}

__all__ = [
    "METHOD_REVISION",
    "Arm",
    "Device",
    "GpuDevice",
    "Method",
    "Record",
    "Workload",
    "compare_records",
    "compare_tail",
    "run_paired",
    "timed_record",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
