# SPDX-License-Identifier: Apache-2.0
"""kernellib: kernels, wrappers and the instruments to develop them. Public names only.

Names are loaded at first use, so that ``import kernellib`` (and each command line) starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernellib.ops.contract import ContractError, SupportReport, Violation
    from kernellib.ops.latent_moe_tail.api import latent_moe_tail, supports_latent_moe_tail
    from kernellib.ops.latent_moe_tail.config import TailConfig
    from kernellib.ops.mega_moe.api import MegaMoE
    from kernellib.ops.mega_moe.config import KIMI_K3, MegaMoEConfig, MegaMoEShape
    from kernellib.ops.mega_moe.contract import supports_mega_moe

_HOMES = {
    "KIMI_K3": "kernellib.ops.mega_moe.config",
    "ContractError": "kernellib.ops.contract",
    "MegaMoE": "kernellib.ops.mega_moe.api",
    "MegaMoEConfig": "kernellib.ops.mega_moe.config",
    "MegaMoEShape": "kernellib.ops.mega_moe.config",
    "SupportReport": "kernellib.ops.contract",
    "TailConfig": "kernellib.ops.latent_moe_tail.config",
    "Violation": "kernellib.ops.contract",
    "latent_moe_tail": "kernellib.ops.latent_moe_tail.api",
    "supports_latent_moe_tail": "kernellib.ops.latent_moe_tail.api",
    "supports_mega_moe": "kernellib.ops.mega_moe.contract",
}

__all__ = [
    "KIMI_K3",
    "ContractError",
    "MegaMoE",
    "MegaMoEConfig",
    "MegaMoEShape",
    "SupportReport",
    "TailConfig",
    "Violation",
    "latent_moe_tail",
    "supports_latent_moe_tail",
    "supports_mega_moe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
