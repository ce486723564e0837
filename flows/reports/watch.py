"""Watches a local batch or a pool: its plan, its events and its forecast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.output import fitting_columns, output_console, print_json, styled
from ringmaster.tasks.planning.gantt import COLOURS, GanttCells, seconds_text
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.timeline.drawing import (
    FAULT_MARK,
    FIGURES,
    KEY,
    DeviceRow,
    axis,
    job_table,
    letters,
    margin_of,
    num_rows,
    rows,
)
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.run_timeline import NOW_RUNNING, TO_COME, RunTimeline, TimelineSpan, headline

NUMBERS = ("step", *FIGURES, "ends after")  # columns of numbers
LEAST = {"job": 8, "message": 12}  # columns of text that may be cut, and the cells that they get
LEFT_OUT_FIRST = ("tokens/s", "samples/s", "memory", "technique", "loss", "message", "status", "step")
HEADINGS = 11  # lines other than devices, jobs, nodes and notes
INK, FAINT, DARK, RED = "#22303c", "#6b7680", "#3a444c", "#c1121f"
STATUS_STYLES = {"running": "bold", "failed": RED, "done": "green", "paused": "yellow", "cancelled": "yellow"}


@dataclass(frozen=True, kw_only=True)
class LineBudget:
    """The maximal number of lines of each part."""

    devices: int = 64
    jobs: int = 40
    nodes: int = 40
    notes: int = 12

    @classmethod
    def of_screen(cls, run_timeline: RunTimeline, height: int) -> LineBudget:
        """Returns the sizes that fit a screen: the jobs get at least a third, the devices what the jobs leave."""
        left = height - HEADINGS - (3 if run_timeline.nodes else 0)
        notes = min(len(run_timeline.notes), max(2, left // 6))
        nodes = min(len(run_timeline.nodes), max(2, left // 6))
        left -= notes + nodes
        needed = num_rows(run_timeline)
        devices = max(2, min(needed, left - min(len(run_timeline.jobs), max(3, left // 3))))
        return cls(devices=devices, nodes=nodes, notes=notes, jobs=max(1, left - devices))


def picture(run_timeline: RunTimeline, *, width: int, room: LineBudget, has_shades: bool = True) -> RenderableType:
    """Returns the whole view, `width` columns wide. has_shades: whether the terminal has more than sixteen colours."""
    parts: list[RenderableType] = [
        Text.assemble(styled(run_timeline.name, "bold"), styled(f"  {' · '.join(headline(run_timeline))}")),
        Text(),
        *_gantt(run_timeline, width, room.devices, has_shades=has_shades),
        Text(),
        _jobs(run_timeline, room.jobs, width=width),
    ]
    if run_timeline.nodes:
        parts += [Text(), _nodes(run_timeline, room.nodes)]
    if run_timeline.notes:
        parts += [Text(), *_notes(run_timeline, room.notes)]
    return Group(*parts)


def _gantt(run_timeline: RunTimeline, width: int, most: int, *, has_shades: bool) -> Iterator[RenderableType]:
    margin = margin_of(run_timeline)
    columns = max(20, width - margin - 3)
    names = letters(run_timeline)
    colour = {job: COLOURS[i % len(COLOURS)] for i, job in enumerate(names)} if has_shades else {}
    found, left_out = rows(run_timeline, columns, most=most)
    if not (run_timeline.first or run_timeline.real):
        yield Text("nothing is planned yet: jobs are measured first", style=FAINT)
        return
    for row in found:
        yield _row(row, margin, colour)
    yield styled(f"{'':>{margin}} {axis(run_timeline, columns)}", FAINT, no_wrap=True)
    yield styled(f"{'':>{margin}} {KEY}", FAINT, no_wrap=True)
    if left_out:
        yield styled(f"{'':>{margin}} and {left_out} more devices", FAINT)


def _row(row: DeviceRow, margin: int, colour: dict[str, str]) -> Text:
    line = Text(no_wrap=True).append(styled(f"{row.name[-margin:]:>{margin}} ", FAINT))
    for piece in row.pieces:
        ink, ground = _style(piece, colour, is_first_plan=row.is_first_plan)
        named, rest = piece.text[: piece.num_named], piece.text[piece.num_named :]
        line.append(named, f"{ink}{ground}")
        is_marked = rest.endswith(FAULT_MARK)
        line.append(rest.removesuffix(FAULT_MARK), f"{FAINT if ink == INK else ink}{ground}")
        if is_marked:
            line.append(FAULT_MARK, f"bold {RED}{ground}")
    return line


def _style(piece: GanttCells, colour: dict[str, str], *, is_first_plan: bool) -> tuple[str, str]:
    """Returns the foreground and background of a piece's cells."""
    if not isinstance(piece.of, TimelineSpan):
        return FAINT, ""
    if is_first_plan:
        return FAINT, ""
    is_running = piece.of.status == NOW_RUNNING
    if not colour:
        return "dim" if piece.of.status == TO_COME else "bold" if is_running else "default", ""
    own = colour.get(piece.of.job, COLOURS[-1])
    if piece.of.status == TO_COME:
        return own, f" on {DARK}"
    return f"bold {INK}" if is_running else INK, f" on {own}"


def _jobs(run_timeline: RunTimeline, most: int, *, width: int) -> Table:
    columns, rows = job_table(run_timeline, most)
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    without = LEFT_OUT_FIRST if any(row["message"] for row in cells) else ("message", *LEFT_OUT_FIRST)
    shown = fitting_columns(cells, width=width, least=LEAST, left_out_first=without) if cells else columns
    # A job has one line: more of them than the screen has room for would displace what is below.
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in shown:
        justify: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        table.add_column(
            name, justify=justify, no_wrap=name not in LEAST, min_width=LEAST["job"] if name == "job" else None
        )
    for row in cells:
        texts = (styled(row[name], no_wrap=True, overflow="ellipsis") for name in shown)
        table.add_row(*texts, style=STATUS_STYLES.get(row["status"]))
    left_out = len(run_timeline.jobs) - most
    if left_out > 0:
        table.add_row("", styled(f"and {left_out} more", no_wrap=True), style=FAINT)
    return table


def _nodes(run_timeline: RunTimeline, most: int) -> Table:
    table = Table("node", "devices", "status", "health", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for node in sorted(run_timeline.nodes, key=lambda node: (not node.health, node.name))[:most]:
        said = "; ".join(f"device {number} {reason}" for number, reason in node.health) or "well"
        style = RED if node.health else None
        table.add_row(node.name, str(node.num_devices), node.status, said, style=style)
    if len(run_timeline.nodes) > most:
        table.add_row(f"and {len(run_timeline.nodes) - most} more", style=FAINT)
    return table


def _notes(run_timeline: RunTimeline, most: int) -> Iterator[Text]:
    yield Text("last decisions", style="bold")
    for note in run_timeline.notes[-most:]:
        yield styled(f"{seconds_text(max(0.0, note.at_s)):>9}  {note.text}", no_wrap=True, overflow="ellipsis")


LOOK_EVERY_S = 0.5
DRAW_EVERY_S = 2.0  # without an event, as the present moves on
PRINT_EVERY_S = 30.0  # likewise, into a file


@dataclass
class WatchTarget:
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
def opened(batch: str | None) -> Iterator[WatchTarget]:
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
                yield WatchTarget(timeline_reader, is_pool=True, batch=known[-1] if known else None)
                return
    folder = newest_run(settings.home() / "batches", batch)
    with closing(Database(file_url(folder / "journal.db"))) as database:
        yield WatchTarget(TimelineReader(database, name=folder.parent.name), is_pool=False)


def newest_run(root: Path, batch: str | None) -> Path:
    """Returns the folder of the newest run of a batch, or of all batches. Raises InputError if there is none."""
    runs = [file.parent for file in root.glob("*/*/journal.db") if batch in (None, file.parent.parent.name)]
    if not runs:
        names = sorted({file.parent.parent.name for file in root.glob("*/*/journal.db")})
        said = f"no batch {batch!r}" if batch else "no batch"
        raise InputError([f"there is {said} under {root}; there are {', '.join(names) or 'none'}"])
    return max(runs, key=lambda run: run.name)  # runs are named by their start time


def watch_once(watched: WatchTarget, *, as_json: bool) -> None:
    """Prints the current timeline."""
    run_timeline = watched.read()
    if as_json:
        print_json(run_timeline.to_json())
    else:
        _print(output_console(), run_timeline)


def watch_on(watched: WatchTarget, *, as_json: bool) -> None:
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
                live.update(_picture(console, last, LineBudget.of_screen(last, console.height)), refresh=True)
        if last is not None:
            _print(console, last)


def changes(
    watched: WatchTarget, *, every_s: float, wait: Callable[[float], object] | None = None
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
    console.print(_picture(console, run_timeline, LineBudget()))


def _picture(console: Console, run_timeline: RunTimeline, room: LineBudget) -> RenderableType:
    has_shades = console.color_system in ("256", "truecolor")
    return picture(run_timeline, width=console.width, room=room, has_shades=has_shades)
