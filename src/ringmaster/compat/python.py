"""Undocumented names of Python's standard library."""

import threading
from collections.abc import Callable


def call_before_threads_end(function: Callable[[], object]) -> None:
    """Calls a function as the interpreter ends, before it waits for threads; the last one registered is called first.

    The functions of the public `atexit` are called after that wait, which has no limit. Without it a process that waits
    for a server's answer as it ends is not ended in time.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]
