"""The ends of the newest log files of a home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ringmaster.flows.diagnosis.bundle import Part

PATTERNS = ("pool/*.log", "nodes/*/*.log", "batches/*/*/*.log", "batches/*/*/gangs/*/*.log")
MOST_FILES = 40
MOST_BYTES = 100_000  # of each file


def logs(home: Path) -> Iterator[Part]:
    """Yields the ends of the log files of services, nodes and ranks; of the newest ones, where there are many."""
    files = [file for pattern in PATTERNS for file in home.glob(pattern) if not file.is_symlink()]
    found = [file for file in files if file.is_file() and file.stat().st_size]
    for file in sorted(found, key=lambda file: file.stat().st_mtime)[-MOST_FILES:]:
        yield Part(name=f"logs/{file.relative_to(home)}", text=_tail(file))


def _tail(file: Path) -> str:
    """Returns the last lines of a file. The first one is left out if it is not whole, as it may begin in a secret."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - MOST_BYTES))
        text = opened.read(MOST_BYTES).decode(errors="replace")
    return text if size <= MOST_BYTES else text.partition("\n")[2]
