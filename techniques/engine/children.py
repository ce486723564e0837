"""Measures in processes of their own, which leave nothing behind in this one: no pinning, no threads, no device."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_children(works: list[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each gives, run side by side. Raises RuntimeError where one gives nothing; it has said why on stderr."""
    pipes = []
    for work in works:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer(work, writer)
        os.close(writer)
        pipes.append((pid, reader))
    answers = []
    for pid, pipe in pipes:
        with os.fdopen(pipe) as file:
            answers.append(file.read())
        os.waitpid(pid, 0)
    if not all(answers):
        raise RuntimeError("the devices could not be measured; the survey's log says why")
    return [json.loads(answer) for answer in answers]


def _answer(work: Callable[[], dict[str, Any]], writer: int) -> None:
    status = 1
    try:
        with os.fdopen(writer, "w") as pipe:
            json.dump(work(), pipe)
        status = 0
    except Exception:  # noqa: BLE001 - whatever it is belongs into the log, and not into the parent's frames
        traceback.print_exc()
    finally:
        os._exit(status)
