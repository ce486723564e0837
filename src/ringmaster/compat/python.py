"""Undocumented names and known faults of Python's standard library."""

import ast
import atexit
import threading
from collections.abc import Callable

PARSE_ATTEMPTS = 5


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


def parse_source(source: bytes) -> ast.Module:
    """Returns the syntax tree of a file; as `ast.parse`, and another time where another thread parsed meanwhile.

    CPython counts the depth of all trees of an interpreter in one place (its issue 106905), so that of two threads that
    parse at a time, one may get a SystemError. Without it a flow run fails while a library is imported beside it.

    Raises:
        SyntaxError, ValueError: as `ast.parse` does.
    """
    for _ in range(PARSE_ATTEMPTS - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
