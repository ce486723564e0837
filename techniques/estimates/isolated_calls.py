"""Calls in child processes, which leave no CPU pinning, threads or device contexts behind in the calling process."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ringmaster.codec import from_json, to_json

T = TypeVar("T")


def kept(cls: type[T], file: Path) -> T | None:
    """Returns the value in a file; None where there is none, or one that cannot be read: it is measured again."""
    try:
        return from_json(cls, json.loads(file.read_text()))
    except (OSError, ValueError):  # a power failure may leave an empty file
        return None


def keep(value: Any, file: Path) -> None:
    """Writes a value into a file. A reader sees the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(to_json(value)))
    aside.replace(file)


PATIENCE_S = 180.0


def in_children(
    works: Sequence[Callable[[], dict[str, Any]]], *, patience_s: float = PATIENCE_S
) -> list[dict[str, Any]]:
    """Runs each function in a child process, side by side, and returns their results.

    Raises RuntimeError where a child fails, which writes the reason to stderr, or exceeds the time limit, when it is
    killed.
    """
    pipes = []
    for work in works:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer(work, writer)
        os.close(writer)
        pipes.append((pid, reader))
    answers, until_s = [], time.monotonic() + patience_s
    for pid, pipe in pipes:
        if not select.select([pipe], [], [], max(until_s - time.monotonic(), 0.0))[0]:
            print(f"a measurement took longer than {patience_s:g} s", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(pipe) as file:
            answers.append(file.read())
        os.waitpid(pid, 0)
    if not all(answers):
        raise RuntimeError("the devices could not be measured; the preflight's log, survey.log, says why")
    return [json.loads(answer) for answer in answers]


def _answer(work: Callable[[], dict[str, Any]], writer: int) -> None:
    status = 1
    try:
        with os.fdopen(writer, "w") as pipe:
            json.dump(work(), pipe)
        status = 0
    except Exception:  # noqa: BLE001 - every exception goes to the log, and none into the parent's frames
        traceback.print_exc()
    finally:
        os._exit(status)
