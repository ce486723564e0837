"""Undocumented names of Python's standard library."""

import atexit
import threading
from collections.abc import Callable


def call_before_threads_end(function: Callable[[], object]) -> None:
    """Calls a function as the interpreter ends, before it waits for threads; the last one registered is called first.

    The functions of the public `atexit` are called after that wait, which has no limit. Without it a process that waits
    for a server's answer as it ends is not ended in time.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Waits for threads and calls the functions of `atexit`, as an interpreter does that ends.

    A forked process ends by `os._exit`, which does neither. Without it a command that was forked loses the last lines
    of its log in Prefect.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
