"""Settings of the C allocator for CPU memory that is freed and allocated again at every step."""

from __future__ import annotations

import ctypes
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_THRESHOLD_BYTES = 32 * 2**20  # the largest M_MMAP_THRESHOLD that glibc accepts


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for this process; does nothing with other C libraries.

    Activations of many adapters are so large that glibc would return each of them to the system, and each page would be
    zeroed again in the next step: six thousand pages, a twentieth of a step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
