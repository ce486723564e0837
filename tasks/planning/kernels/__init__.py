"""Compiled inner loops (kernels) of the searches, and the decorator that compiles them.

numba compiles a kernel at its first call and caches the result next to the source file.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.event import Event, Listener, register

from ringmaster.compat.numba import set_source_stamp
from ringmaster.tasks.planning.work import clock

PLANNER = Path(__file__).parents[1]


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with numba, which infers the types of its arguments; the function may call other kernels.

    The cache becomes invalid when any of the planner's files with kernels changes. numba itself checks only the
    function's own file, and would continue with the old code of the kernels that it calls.
    """
    compiled = njit(cache=True, nogil=True)(function)
    file = Path(function.__code__.co_filename)
    set_source_stamp(compiled, _digest_of_kernels(PLANNER if file.is_relative_to(PLANNER) else file.parent))
    return compiled  # type: ignore[no-any-return]


@cache
def _digest_of_kernels(folder: Path) -> str:
    sources = [source for file in sorted(folder.rglob("*.py")) if b"@kernel" in (source := file.read_bytes())]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


class _CompilationListener(Listener):  # type: ignore[misc]
    """Stops the clock of search budgets during compilation.

    One thread compiles at a time, and the kernels that a kernel calls are compiled during its own compilation.
    """

    def on_start(self, event: Event) -> None:
        clock.stop()

    def on_end(self, event: Event) -> None:
        clock.go_on()


register("numba:compile", _CompilationListener())
