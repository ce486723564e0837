"""What makes a function a kernel: numba compiles it when it is first called, and keeps that beside the code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.event import Event, Listener, register

from ringmaster.tasks.planning.clock import clock


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, whose arguments numba infers the types of; other kernels may be called in it.

    What is kept is void once any file with kernels beside the function's own has changed: numba would look at that one
    file alone, and go on with the old code of the kernels that are called.
    """
    compiled = njit(cache=True, nogil=True)(function)
    # Private, and wanting where NUMBA_DISABLE_JIT is set: where it is not there, numba's own rule stays.
    kept = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if kept is not None:
        kept._source_stamp = _digest_of_kernels(Path(function.__code__.co_filename).parent)
    return compiled  # type: ignore[no-any-return]


@cache
def _digest_of_kernels(folder: Path) -> str:
    sources = [source for file in sorted(folder.glob("*.py")) if b"@kernel" in (source := file.read_bytes())]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


class _StopsTheClock(Listener):  # type: ignore[misc]
    """Hears of what is compiled, by one thread at a time, and the kernels called in a kernel within that one."""

    def on_start(self, event: Event) -> None:
        clock.stop()

    def on_end(self, event: Event) -> None:
        clock.go_on()


register("numba:compile", _StopsTheClock())
