# SPDX-License-Identifier: Apache-2.0
"""Keep freed memory inside the process, so that numpy's temporaries do not cost page faults.

glibc gives arrays above a threshold (128 kB at first) back to the kernel when they are freed; the next
temporary of that size then faults every page in again, which costs several times the arithmetic on it (a
matrix instruction of 64 waves measured 4 to 10 times slower). Two malloc parameters turn that off for the
process.
"""

from __future__ import annotations

import ctypes
import functools

# Parameter numbers of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30


@functools.cache
def keep_freed_memory() -> bool:
    """Raise glibc's trim and mmap thresholds to 1 GiB; does it once per process.

    Returns:
        Whether the C library has `mallopt` and accepted both values (False on musl, macOS, Windows: the
        emulator is then right but slower).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all(mallopt(option, _KEEP_BYTES) == 1 for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))
