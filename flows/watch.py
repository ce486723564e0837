"""Looks on while a batch runs here, or a pool: what was planned, what happens and what comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.output import output_console, print_json
from ringmaster.flows.watch_view import Room, picture
from ringmaster.tasks.execution.chronicle import Chronicle
from ringmaster.tasks.execution.historian import Historian
from ringmaster.tasks.pool.database import Database, file_url
from ringmaster.tasks.pool.submissions import Submissions

LOOK_EVERY_S = 0.5
DRAW_EVERY_S = 2.0  # where nothing has happened: now goes on
PRINT_EVERY_S = 30.0  # likewise, into a file


@dataclass
class Watched:
    """What is looked at. batch: of a pool, the one batch that is shown; None for all of it."""

    historian: Historian
    is_pool: bool
    batch: str | None = None

    def read(self) -> Chronicle:
        """It now."""
        return self.historian.read(self.batch)

    def is_over(self, chronicle: Chronicle) -> bool:
        """Whether nothing more will come: a pool as such waits for further batches."""
        return chronicle.is_over and not (self.is_pool and self.batch is None)


@contextmanager
def opened(batch: str | None) -> Iterator[Watched]:
    """What `batch` names: a batch of the pool by its id or name, or one that ran here by its name; the newest where
    several are called so. None for the whole pool where there is one, else for the newest batch here.

    Raises InputError where there is none.
    """
    address = settings.pool()
    if address is not None:
        database = Database(address.database)
        try:
            known = [] if batch is None else [s.id for s, _ in Submissions(database).all() if batch in (s.id, s.name)]
            if batch is None or known:
                historian = Historian(database, name="the pool", is_pool=True)
                yield Watched(historian, is_pool=True, batch=known[-1] if known else None)
                return
        finally:
            database.close()
    folder = newest_run(settings.home() / "batches", batch)
    database = Database(file_url(folder / "journal.db"))
    try:
        yield Watched(Historian(database, name=folder.parent.name), is_pool=False)
    finally:
        database.close()


def newest_run(root: Path, batch: str | None) -> Path:
    """The folder of the newest run of a batch, or of all. Raises InputError where there is none."""
    runs = [file.parent for file in root.glob("*/*/journal.db") if batch in (None, file.parent.parent.name)]
    if not runs:
        names = sorted({file.parent.parent.name for file in root.glob("*/*/journal.db")})
        said = f"no batch {batch!r}" if batch else "no batch"
        raise InputError([f"there is {said} under {root}; there are {', '.join(names) or 'none'}"])
    return max(runs, key=lambda run: run.name)  # runs are named by the moment when they began


def watch_once(watched: Watched, *, as_json: bool) -> None:
    """Prints what is known now."""
    chronicle = watched.read()
    if as_json:
        print_json(chronicle.to_json())
    else:
        _print(output_console(), chronicle)


def watch_on(watched: Watched, *, as_json: bool) -> None:
    """Shows what happens, until the batch has ended: on the whole screen of a terminal, else picture after picture."""
    console = output_console()
    if as_json:
        for chronicle in changes(watched, every_s=PRINT_EVERY_S):
            print_json(chronicle.to_json())
    elif not console.is_terminal:
        for chronicle in changes(watched, every_s=PRINT_EVERY_S):
            _print(console, chronicle)
    else:
        last = None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for last in changes(watched, every_s=DRAW_EVERY_S):
                live.update(_picture(console, last, Room.of_screen(last, console.height)), refresh=True)
        if last is not None:
            _print(console, last)


def changes(watched: Watched, *, every_s: float, wait: Callable[[float], object] | None = None) -> Iterator[Chronicle]:
    """The chronicle whenever something has happened, and `every_s` at least, up to its end.

    wait: for how many seconds, before one looks again.
    """
    wait = wait or threading.Event().wait
    seen: object = None
    told_s = -every_s
    while True:
        signature = watched.historian.signature()
        if signature != seen or time.monotonic() - told_s >= every_s:
            seen, told_s = signature, time.monotonic()
            chronicle = watched.read()
            yield chronicle
            if watched.is_over(chronicle):
                return
        wait(LOOK_EVERY_S)


def _print(console: Console, chronicle: Chronicle) -> None:
    console.print(_picture(console, chronicle, Room()))


def _picture(console: Console, chronicle: Chronicle, room: Room) -> RenderableType:
    has_shades = console.color_system in ("256", "truecolor")
    return picture(chronicle, width=console.width, room=room, has_shades=has_shades)
