# SPDX-License-Identifier: Apache-2.0
"""Keeps one arm's cache hints out of another arm's times.

On NVIDIA GPUs a load with the priority ``evict_last`` marks its line in L2 to be evicted after all others
[PTX ISA, "Cache Eviction Priority Hints"], and the mark outlives the kernel and any stream of ordinary
lines. Arms that share their inputs would therefore inherit what another arm had kept: on an H200 the
unfused chain, which gives no hints, took 26.6 us alone and 24.0 us after the fused kernel had run, for as
long as it was asked, and 26.6 us again after the reset (docs/performance.md). Replays of its own do not
undo that, so the marks are reset before each sample; the lead-in replays then bring back whatever the arm
itself keeps.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from .errors import BenchError

NOTHING_TO_RESET = "none: no hint of this device outlives the kernel"
RESET_CALL = "cuCtxResetPersistingL2Cache"


def nothing() -> None:
    """For devices without marks that stay."""


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def priority_reset(
    kind: str, load_driver: Callable[[], ctypes.CDLL] = _driver
) -> tuple[str, Callable[[], None]]:
    """What returns every line of the last-level cache to the normal priority: (its name, the function).

    Args:
        kind: "cuda" or "hip". AMD's hints (``sc0``, ``sc1``, ``nt``) choose the policy of one access; no
            documented mark outlives it, and ordinary residency is what lead-ins replace.
        load_driver: finds the driver's library.

    Raises:
        BenchError: the driver's library or the call is missing; from the function: the call failed.
    """
    if kind != "cuda":
        return NOTHING_TO_RESET, nothing
    try:
        call = getattr(load_driver(), RESET_CALL)  # CUDA Driver API, since 11.0
    except (OSError, AttributeError) as error:
        raise BenchError(
            f"{RESET_CALL} got no driver that has it ({error}), wanted CUDA 11 or newer: without it "
            "one arm's cache hints change another arm's times"
        ) from error
    call.restype = ctypes.c_int

    def reset() -> None:
        code = call()
        if code != 0:
            raise BenchError(f"{RESET_CALL} got error {code} from the driver, wanted 0 (CUDA_SUCCESS)")

    return RESET_CALL, reset
