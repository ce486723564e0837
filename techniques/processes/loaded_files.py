"""The files of the modules that a process has loaded, and whether any of them has changed since.

A process that forks others for a long time would otherwise run code that an upgrade or an editor has replaced.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringmaster.feature_hooks import left_out
from ringmaster.techniques.processes.channel import Channel

CHANGED = "changed"
TARGET = f"{__name__}:report_changed"
_loaded: dict[str, tuple[int, int, int]] = {}


def note_loaded() -> None:
    """Remembers the files of the modules that are loaded now, with what every change of a file changes."""
    _loaded.update((file, state) for file in _files() if (state := _state(file)) is not None)


def changed_files() -> list[str]:
    """Returns the files that have changed, or are gone, since `note_loaded`."""
    return [file for file, state in _loaded.items() if _state(file) != state]


def report_changed(channel: Channel, _: Any) -> int:
    """Sends a file that has changed, or a feature with a fault, which may be mended by now, if there is any.

    The target of a child of a fork server.
    """
    channel.send({CHANGED: [*changed_files(), *(each.name for each in left_out)][:1]})
    return 0


def _files() -> list[str]:
    return [file for module in list(sys.modules.values()) if isinstance(file := getattr(module, "__file__", None), str)]


def _state(file: str) -> tuple[int, int, int] | None:
    with suppress(OSError):
        status = Path(file).stat()
        return status.st_ino, status.st_size, status.st_ctime_ns
    return None
