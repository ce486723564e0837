"""Watches a local batch or a pool: its plan, its events and its forecast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.output import output_console, print_json
from ringmaster.flows.reports.watch_view import Room, picture
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.run_timeline import RunTimeline

LOOK_EVERY_S = 0.5
DRAW_EVERY_S = 2.0  # without an event, as the present moves on
PRINT_EVERY_S = 30.0  # likewise, into a file


@dataclass
class Watched:
    """A local batch, a pool, or one batch of a pool that is watched.

    timeline_reader: reads its timeline.
    is_pool: whether the reader reads a pool's database.
    batch: id of the one batch of a pool that is shown; None for the whole pool.
    """

    timeline_reader: TimelineReader
    is_pool: bool
    batch: str | None = None

    def read(self) -> RunTimeline:
        """Returns the current timeline."""
        return self.timeline_reader.read(self.batch)

    def is_over(self, run_timeline: RunTimeline) -> bool:
        """Returns whether nothing more will happen: a pool as a whole always waits for further batches."""
        return run_timeline.is_over and not (self.is_pool and self.batch is None)


@contextmanager
def opened(batch: str | None) -> Iterator[Watched]:
    """Yields the batch that `batch` names: one of the pool by id or name, or a local one by name, the newest if several
    match.

    None stands for the whole pool if there is one, else for the newest local batch. Raises InputError if there is no
    such batch.
    """
    address = settings.pool()
    if address is not None:
        with closing(Database(address.database)) as database:
            known = (
                [] if batch is None else [key for key, name, _ in Submissions(database).names() if batch in (key, name)]
            )
            if batch is None or known:
                timeline_reader = TimelineReader(database, name="the pool", is_pool=True)
                yield Watched(timeline_reader, is_pool=True, batch=known[-1] if known else None)
                return
    folder = newest_run(settings.home() / "batches", batch)
    with closing(Database(file_url(folder / "journal.db"))) as database:
        yield Watched(TimelineReader(database, name=folder.parent.name), is_pool=False)


def newest_run(root: Path, batch: str | None) -> Path:
    """Returns the folder of the newest run of a batch, or of all batches. Raises InputError if there is none."""
    runs = [file.parent for file in root.glob("*/*/journal.db") if batch in (None, file.parent.parent.name)]
    if not runs:
        names = sorted({file.parent.parent.name for file in root.glob("*/*/journal.db")})
        said = f"no batch {batch!r}" if batch else "no batch"
        raise InputError([f"there is {said} under {root}; there are {', '.join(names) or 'none'}"])
    return max(runs, key=lambda run: run.name)  # runs are named by their start time


def watch_once(watched: Watched, *, as_json: bool) -> None:
    """Prints the current timeline."""
    run_timeline = watched.read()
    if as_json:
        print_json(run_timeline.to_json())
    else:
        _print(output_console(), run_timeline)


def watch_on(watched: Watched, *, as_json: bool) -> None:
    """Shows the timeline until the batch has ended: full screen on a terminal, else one picture after another."""
    console = output_console()
    if as_json:
        for run_timeline in changes(watched, every_s=PRINT_EVERY_S):
            print_json(run_timeline.to_json())
    elif not console.is_terminal:
        for run_timeline in changes(watched, every_s=PRINT_EVERY_S):
            _print(console, run_timeline)
    else:
        last = None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for last in changes(watched, every_s=DRAW_EVERY_S):
                live.update(_picture(console, last, Room.of_screen(last, console.height)), refresh=True)
        if last is not None:
            _print(console, last)


def changes(
    watched: Watched, *, every_s: float, wait: Callable[[float], object] | None = None
) -> Iterator[RunTimeline]:
    """Yields the run timeline after each event, and at least every `every_s` seconds, until it is over.

    wait: sleeps for a number of seconds before the next check.
    """
    wait = wait or threading.Event().wait
    seen: object = None
    told_s = -every_s
    while True:
        signature = watched.timeline_reader.signature()
        if signature != seen or time.monotonic() - told_s >= every_s:
            seen, told_s = signature, time.monotonic()
            run_timeline = watched.read()
            yield run_timeline
            if watched.is_over(run_timeline):
                return
        wait(LOOK_EVERY_S)


def _print(console: Console, run_timeline: RunTimeline) -> None:
    console.print(_picture(console, run_timeline, Room()))


def _picture(console: Console, run_timeline: RunTimeline, room: Room) -> RenderableType:
    has_shades = console.color_system in ("256", "truecolor")
    return picture(run_timeline, width=console.width, room=room, has_shades=has_shades)
