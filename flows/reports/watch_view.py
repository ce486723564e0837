"""A run timeline for a terminal: a Gantt chart by device, the jobs, the nodes, and the last decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ringmaster.flows.output import fitting_columns, styled
from ringmaster.tasks.planning.gantt import COLOURS, seconds_text
from ringmaster.tasks.planning.gantt_text import Piece
from ringmaster.tasks.timeline.run_timeline import NOW_RUNNING, TO_COME, RunTimeline, Span, headline
from ringmaster.tasks.timeline.text import (
    FAULT_MARK,
    FIGURES,
    KEY,
    Row,
    axis,
    job_table,
    letters,
    margin_of,
    num_rows,
    rows,
)

NUMBERS = ("step", *FIGURES, "ends after")  # columns of numbers
LEAST = {"job": 8, "message": 12}  # columns of text that may be cut, and the cells that they get
LEFT_OUT_FIRST = ("tokens/s", "samples/s", "memory", "technique", "loss", "message", "status", "step")
HEADINGS = 11  # lines other than devices, jobs, nodes and notes
INK, FAINT, DARK, RED = "#22303c", "#6b7680", "#3a444c", "#c1121f"
STATUS_STYLES = {"running": "bold", "failed": RED, "done": "green", "paused": "yellow", "cancelled": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Room:
    """The maximal number of lines of each part."""

    devices: int = 64
    jobs: int = 40
    nodes: int = 40
    notes: int = 12

    @classmethod
    def of_screen(cls, run_timeline: RunTimeline, height: int) -> Room:
        """Returns the sizes that fit a screen: the jobs get at least a third, the devices what the jobs leave."""
        left = height - HEADINGS - (3 if run_timeline.nodes else 0)
        notes = min(len(run_timeline.notes), max(2, left // 6))
        nodes = min(len(run_timeline.nodes), max(2, left // 6))
        left -= notes + nodes
        needed = num_rows(run_timeline)
        devices = max(2, min(needed, left - min(len(run_timeline.jobs), max(3, left // 3))))
        return cls(devices=devices, nodes=nodes, notes=notes, jobs=max(1, left - devices))


def picture(run_timeline: RunTimeline, *, width: int, room: Room, has_shades: bool = True) -> RenderableType:
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


def _row(row: Row, margin: int, colour: dict[str, str]) -> Text:
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


def _style(piece: Piece, colour: dict[str, str], *, is_first_plan: bool) -> tuple[str, str]:
    """Returns the foreground and background of a piece's cells."""
    if not isinstance(piece.of, Span):
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
