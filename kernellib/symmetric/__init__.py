# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: regions of the same size on every rank, each with the addresses of its peers'.

``SymmetricHeap`` is the host code that operators use; a provider supplies memory and meeting points:
``mori_provider`` on MI355X, ``emulated_provider`` for the ranks of an emulated world.
"""

from .heap import (
    HeapClosedError,
    HeapProtocolError,
    Provider,
    ProviderUnavailableError,
    SymmetricHeap,
    SymmetricHeapError,
    SymmetricMemoryError,
    SymmetricRegion,
)

__all__ = [
    "HeapClosedError",
    "HeapProtocolError",
    "Provider",
    "ProviderUnavailableError",
    "SymmetricHeap",
    "SymmetricHeapError",
    "SymmetricMemoryError",
    "SymmetricRegion",
]
