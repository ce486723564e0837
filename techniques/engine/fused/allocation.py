"""Memory of a CPU that is freed and asked for again at every step."""

from __future__ import annotations

import ctypes
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_THRESHOLD_BYTES = 32 * 2**20  # that glibc takes for pieces that are mapped one by one


@cache
def keep_freed_memory() -> None:
    """Makes this process keep what it frees, where its C library is glibc.

    Activations of many adapters are so large that they would be given back to the system piece by piece, and each page
    be zeroed again in the next step: six thousand of them, a twentieth of a step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
