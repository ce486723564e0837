"""Folders of runs in the order in which they were made, which their names show: the time in UTC, and a number."""

import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ringmaster.files import folders_in

STAMP = "%Y%m%d-%H%M%S"
RUN = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")


def folder_date(run: Path) -> tuple[str, int]:
    """Returns the place of a run among others, of its folder's name: `20260101-000000-10` comes after `...-2`."""
    match = RUN.fullmatch(run.name)
    return (match[1], int(match[2] or 1)) if match else ("", 0)


def in_order(runs: Iterable[Path]) -> list[Path]:
    """Returns the folders of runs, the oldest first."""
    return sorted(runs, key=folder_date)


def runs_below(folder: Path, pattern: str = "*") -> list[Path]:
    """Returns the folders below one that have the journal of a run on this machine alone, the oldest first.

    Raises OSError where one of them cannot be read.
    """
    folders = [folder]
    for _ in pattern.split("/"):
        folders = [each for above in folders for each in folders_in(above)]
    return in_order(each for each in folders if (each / "journal.db").exists())


def stamped_folder(parent: Path) -> Path:
    """Makes a folder in `parent`, which is the newest of those there and in the sibling folders of `parent`.

    It is so also after the clock was set back, and where folders of earlier releases had the local time.
    """
    parent.mkdir(parents=True, exist_ok=True)
    stamp, first = datetime.now(UTC).strftime(STAMP), 1
    newest, number = max(map(folder_date, parent.parent.glob("*/*")), default=("", 0))
    if newest >= stamp:
        stamp, first = newest, number + 1
    for number in itertools.count(first):
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        with suppress(FileExistsError):  # another run started at the same moment
            folder.mkdir()
            break
    return folder
