"""Private names of numba."""

from typing import Any


def set_source_stamp(compiled: Any, stamp: str) -> None:
    """Makes the cache of a compiled function invalid when `stamp` changes.

    numba checks the modification of the function's own file alone. Without it kernels continue with the old code of
    those that they call. Nothing is set where NUMBA_DISABLE_JIT leaves a function as it is, which has no cache then.
    """
    if hasattr(compiled, "py_func"):
        compiled._cache._cache_file._source_stamp = stamp
