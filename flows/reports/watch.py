"""Watches a local batch or a pool: its plan, its events and its forecast; and the table of all jobs of `status`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.codec import from_json, to_json
from ringmaster.errors import DatabaseFileError, InputError
from ringmaster.features import listed
from ringmaster.files import folders_in, storage_fault
from ringmaster.flows import settings
from ringmaster.flows.dated_runs import runs_below
from ringmaster.flows.output import error_console, fitting_columns, output_console, print_json, styled
from ringmaster.flows.pool.batch_requests import open_database
from ringmaster.model_lineage.sqlite_files import is_disk_full
from ringmaster.tasks.execution.execution_events import PredictedEnd
from ringmaster.tasks.execution.job_progress import JobFigures
from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.planning.gantt import COLOURS, GanttCells, axis, margin_of
from ringmaster.tasks.pool.submissions import BatchStatus, Submissions, pending
from ringmaster.tasks.storage import journal
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.timeline.drawing import (
    FAULT_MARK,
    FIGURES,
    KEY,
    DeviceRow,
    job_table,
    letters_of,
    num_rows,
    rows,
)
from ringmaster.tasks.timeline.queries import Archive
from ringmaster.tasks.timeline.reader import INTERRUPTED, TimelineReader
from ringmaster.tasks.timeline.run_timeline import (
    NOW_RUNNING,
    TO_COME,
    JobLine,
    RunTimeline,
    TimelineSpan,
    end_text,
    headline,
)
from ringmaster.text import printable

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
    margin = margin_of(run_timeline.rows, "planned")
    columns = max(20, width - margin - 3)
    names = letters_of(run_timeline)
    colour = {job: COLOURS[i % len(COLOURS)] for i, job in enumerate(names)} if has_shades else {}
    now_s = None if run_timeline.is_over else run_timeline.now_s
    result, left_out = rows(run_timeline, columns, most=most)
    if not (run_timeline.first or run_timeline.real):
        yield Text("nothing is planned yet: jobs are measured first", style=FAINT)
        return
    for row in result:
        yield _device_row(row, margin, colour)
    yield styled(f"{'':>{margin}} {axis(run_timeline.width_s, columns, now_s=now_s)}", FAINT, no_wrap=True)
    yield styled(f"{'':>{margin}} {KEY}", FAINT, no_wrap=True)
    if left_out:
        yield styled(f"{'':>{margin}} and {left_out} more devices", FAINT)


def _device_row(row: DeviceRow, margin: int, colour: dict[str, str]) -> Text:
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
    if is_first_plan or not isinstance(piece.of, TimelineSpan):
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
        text = "; ".join(f"device {number} {reason}" for number, reason in node.health) or "well"
        table.add_row(node.name, str(node.num_devices), node.status, text, style=RED if node.health else None)
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

    None means the whole pool if there is one, else for the newest local batch. Raises InputError if there is no
    such batch, or if it may be one of a pool that has ended.
    """
    fault, folder = settings.pool_fault(), settings.home() / "batches"
    if fault is not None and not any(run.parent.name == batch for run in runs_below(folder, "*/*")):
        raise InputError([fault])
    if fault is None and (address := settings.checked_pool()) is not None:
        with open_database(address) as database:  # gives up where the database is away; what follows waits for it
            ids = [key for key, name, _ in Submissions(database).names() if batch in (key, name)] if batch else [None]
        if ids:
            with closing(Database(address.database, is_reader=True)) as database:
                yield WatchTarget(TimelineReader(database, name="the pool", is_pool=True), is_pool=True, batch=ids[-1])
            return
    folder = newest_run(folder, batch)
    with closing(Database(file_url(folder / "journal.db"), is_reader=True)) as database:
        yield WatchTarget(TimelineReader(database, name=folder.parent.name), is_pool=False)


def newest_run(root: Path, batch: str | None) -> Path:
    """Returns the folder of the newest run of a batch, or of all batches. Raises InputError if there is none."""
    every = runs_below(root, "*/*")
    runs = [run for run in every if batch in (None, run.parent.name)]
    if not runs:
        names = sorted({run.parent.name for run in every})
        text = f"no batch {batch!r}" if batch else "no batch"
        raise InputError([f"there is {text} under {root}; there are {', '.join(names) or 'none'}"])
    return runs[-1]


def watch_on(watched: WatchTarget, *, as_json: bool) -> None:
    """Shows the timeline until the batch has ended: full screen on a terminal, else one picture after another."""
    console, last = output_console(), None
    if as_json or not console.is_terminal:
        for run_timeline in changes(watched, every_s=PRINT_EVERY_S):
            print_timeline(run_timeline, as_json=as_json)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for last in changes(watched, every_s=DRAW_EVERY_S):
            live.update(_picture(console, last, LineBudget.of_screen(last, console.height)), refresh=True)
    if last is not None:
        print_timeline(last, as_json=False)


def changes(
    watched: WatchTarget, *, every_s: float, wait: Callable[[float], object] | None = None
) -> Iterator[RunTimeline]:
    """Yields the run timeline after each event, and at least every `every_s` seconds, until it is over.

    wait: sleeps for a number of seconds before the next check.
    """
    wait = wait or threading.Event().wait
    seen: object = None
    shown_s = -every_s
    while True:
        signature = watched.timeline_reader.archive.signature()
        if signature != seen or time.monotonic() - shown_s >= every_s:
            seen, shown_s = signature, time.monotonic()
            run_timeline = watched.read()
            yield run_timeline
            if watched.is_over(run_timeline):
                return
        wait(LOOK_EVERY_S)


def print_timeline(run_timeline: RunTimeline, *, as_json: bool) -> None:
    """Prints a timeline as a picture or as JSON."""
    console = output_console()
    print_json(run_timeline.to_json()) if as_json else console.print(_picture(console, run_timeline, LineBudget()))


def _picture(console: Console, run_timeline: RunTimeline, room: LineBudget) -> RenderableType:
    has_shades = console.color_system in ("256", "truecolor")
    return picture(run_timeline, width=console.width, room=room, has_shades=has_shades)


T = TypeVar("T")

TIMEOUT_S = 2.0  # with a database that is full or locked
MAX_NAMED = 4  # devices whose numbers are shown
MAX_IN_CELL = 500  # characters of a message; --json has all of it
STATUS_COLUMNS = ("batch", "run", "job", "status", "step", *FIGURES, "ends in", "message", "trained with")


@dataclass(frozen=True, kw_only=True)
class StatusRun:
    """A run of a batch, on this machine or on a pool. rows: of its jobs. fault: why there are no rows; else empty."""

    batch: str
    folder: Path
    rows: list[dict[str, Any]]
    fault: str = ""


def runs_of(batch: str | None, *, has_figures: bool = True) -> list[StatusRun]:
    """Returns the runs to look at: those of one batch, or of all. Raises InputError where there is no such batch.

    has_figures: whether the rows of jobs that run have their speeds and ends, for which much more is read.
    """
    every = [*_runs_here(has_figures=has_figures), *_runs_on_pool(has_figures=has_figures)]
    if has_figures:
        every += [run for runs in listed("commands", "STATUS_RUNS") for run in runs()]
    runs = [run for run in every if batch in (None, run.batch) or any(row["run"] == batch for row in run.rows)]
    if batch is not None and not runs and (settings.home() / "batches" / batch).is_dir():
        error_console().print(f"no job of {batch} has been in a plan: its last run waits for that, or ended before")
    elif batch is not None and not runs:
        there = ", ".join(dict.fromkeys(run.batch for run in every)) or "none"
        raise InputError([f"there is no batch {batch!r} under {settings.home()}; there are {there}"])
    return runs


def _waiting(records: list[journal.JobRecord], folder: Path) -> list[journal.JobRecord]:
    """Returns records with the cause for which running jobs wait: the disk of their run is full.

    The run itself cannot write that down there.
    """
    if not _is_running(records) or not is_disk_full(folder):
        return records
    message = f"waits: the disk of {folder} is full. To fix: free space there"
    return [replace(each, message=each.message or message) if _is_running([each]) else each for each in records]


def faults_of(runs: Iterable[StatusRun]) -> list[str]:
    """Returns why runs have no rows, each reason once."""
    return list(dict.fromkeys(run.fault for run in runs if run.fault))


def _runs_here(*, has_figures: bool) -> Iterator[StatusRun]:
    """The newest run of each batch that ran on this machine alone."""
    for parent in sorted(folders_in(settings.home() / "batches")):
        batch = parent.name
        try:
            if not (runs := runs_below(parent)):
                continue
            folder, file = runs[-1], runs[-1] / "journal.db"
            records = journal.jobs_of_file(file)
            options = _options(journal.segments_of_file(file)) if has_figures else {}
            lines = _lines_here(file, batch) if has_figures and _is_running(records) else {}
            rows = _rows(_waiting(records, folder), batch, folder.name, options=options, lines=lines)
            yield StatusRun(batch=batch, folder=folder, rows=rows)
        except DatabaseFileError as error:  # the other batches are shown
            yield StatusRun(batch=batch, folder=parent, rows=[], fault=str(error))
        except OSError as error:
            fault = storage_fault(error) or f"{error}. To fix: restore the file"
            yield StatusRun(batch=batch, folder=parent, rows=[], fault=fault)


def _lines_here(file: Path, batch: str) -> dict[str, JobLine]:
    """Returns what is known of the jobs of a batch that runs on this machine alone; nothing if that cannot be read."""
    try:
        with closing(Database(file_url(file), timeout_s=TIMEOUT_S, is_reader=True)) as database:
            return _lines(TimelineReader(database, name=batch))
    except (DatabaseFileError, SQLAlchemyError):
        return {}


def _runs_on_pool(*, has_figures: bool) -> Iterator[StatusRun]:
    """The runs that are stored on the pool that this machine belongs to, and the newest one of each batch."""
    address, has_ended = settings.recorded_pool(), settings.pool_fault() is not None
    if address is None:
        return
    with open_database(address) as database:
        submissions = Submissions(database)
        every = submissions.names()
        newest = {name: key for key, name, _ in every}
        shown = {key: name for key, name, status in every if status == BatchStatus.SUBMITTED or newest[name] == key}
        folders = submissions.folders()
        records: dict[str, list[journal.JobRecord]] = {key: [] for key in shown}
        for qualified, record in journal.Journal(database, batch=None).jobs(batches=list(shown)).items():
            key, _, job = qualified.partition("/")
            records[key].append(replace(record, name=job))
        options = _options(Archive(database, is_pool=True).segments(list(shown), since_s=0.0) if has_figures else [])
        is_running = has_figures and not has_ended and any(map(_is_running, records.values()))
        lines = _lines(TimelineReader(database, name="the pool", is_pool=True)) if is_running else {}
        for key, name in shown.items():
            own = (_of_batch(options, key), _of_batch(lines, key))
            rows = _rows(records[key], name, key, options=own[0], lines=own[1])
            yield StatusRun(
                batch=name, folder=Path(folders[key]), rows=[*map(_interrupted, rows)] if has_ended else rows
            )
        for handed in pending(database):  # no job of it is in a plan yet
            rows = [
                _row(handed.name, handed.run, job, status=handed.status, step=0, message=handed.message)
                for job in handed.jobs
            ]
            yield StatusRun(batch=handed.name, folder=settings.home() / "batches" / handed.name, rows=rows)


def _interrupted(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a job of a pool that has ended: nothing of it runs any more, whatever was written last."""
    return row | {"status": INTERRUPTED} if row["status"] == journal.JobStatus.RUNNING else row


def _rows(
    records: Iterable[journal.JobRecord],
    batch: str,
    run: str,
    *,
    options: Mapping[str, str],
    lines: Mapping[str, JobLine],
) -> list[dict[str, Any]]:
    """Returns a row for each job.

    options: technique and devices of its newest segment. lines: what is known of it while the batch runs.
    """
    result = []
    for record in records:
        line = lines.get(record.name)
        row = _row(
            *(batch, run, record.name),
            status=record.status,
            step=record.step if line is None else max(record.step, line.step),
            message=record.message,
            lead=record.lead_job,
            option=options.get(record.name, ""),
        )
        if line is not None:
            row |= {"num_steps": line.num_steps, "figures": to_json(line.figures), "ends_in": to_json(line.predicted)}
        result.append(row)
    return result


def _row(
    batch: str, run: str, job: str, *, status: str, step: int, message: str, lead: str | None = None, option: str = ""
) -> dict[str, Any]:
    """Returns a row. lead: the lead job of its group. option: the technique and devices of its newest segment."""
    row = {"batch": batch, "run": run, "job": job, "status": status, "step": step, "message": message}
    return {**row, "leader": lead, "option": option, "num_steps": None, "figures": {}, "ends_in": None}


def _options(segments: Sequence[journal.SegmentRecord]) -> dict[str, str]:
    """Returns technique and devices of the newest segment of each job: "ddp on vm:cpu:0,1"."""
    result: dict[str, str] = {}
    for segment in segments:
        devices: dict[str, list[str]] = {}
        for name in segment.spec.devices:
            place, _, number = name.rpartition(":")
            devices.setdefault(place, []).append(number)
        where = " ".join(f"{place}:{','.join(numbers)}" for place, numbers in devices.items())
        many = f"{len(segment.spec.devices)} devices"
        option = f"{segment.spec.technique} on {where if len(segment.spec.devices) <= MAX_NAMED else many}"
        result |= dict.fromkeys((segment.job, *segment.members), option)
    return result


def _is_running(records: Iterable[journal.JobRecord]) -> bool:
    return any(record.status == journal.JobStatus.RUNNING for record in records)


def _lines(reader: TimelineReader) -> dict[str, JobLine]:
    """Returns what is known of the jobs of a batch or a pool that runs, by name. Their ends count from now."""
    run_timeline = reader.read()
    return {line.name: line for line in run_timeline.later(run_timeline.now_s).jobs}


def _of_batch(values: Mapping[str, T], batch: str) -> dict[str, T]:
    """Returns the values of the jobs of one batch of a pool, by the names within it."""
    return {name.removeprefix(f"{batch}/"): value for name, value in values.items() if name.startswith(f"{batch}/")}


def status_table(rows: Iterable[Mapping[str, Any]]) -> Text:
    """Returns the table that `status` prints, as lines: a table of rich takes a millisecond a row. rows: of jobs.

    Columns of figures, and of predicted ends, that no job has are left out.
    """
    every = [_cells(row) for row in rows]
    may_lack = (*FIGURES, "ends in")
    columns = [name for name in STATUS_COLUMNS if name not in may_lack or any(row[name] for row in every)]
    cells = [[printable(row[name], limit=MAX_IN_CELL) for name in columns] for row in every]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    text = Text(no_wrap=True)
    for row_cells in (columns, *cells):
        line = " ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row_cells, widths, strict=True))
        text.append(f" {line.rstrip()}\n", "bold" if row_cells is columns else None)
    return text


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of a row of `status`, by column."""
    figures = from_json(JobFigures, row.get("figures", {}))
    lead = None if row["leader"] is None else f"with {row['leader']}"
    plain = {name: "" if row[name] is None else str(row[name]) for name in ("batch", "run", "job", "status")}
    return {
        **plain,
        "step": f"{row['step']}/{row['num_steps']}" if row.get("num_steps") else str(row["step"]),
        **dict(zip(FIGURES, figures.cells, strict=True)),
        "ends in": "" if row.get("ends_in") is None else end_text(from_json(PredictedEnd, row["ends_in"])),
        "message": row["message"] or figures.phase,
        "trained with": " ".join(filter(None, (row.get("option"), lead))),
    }
