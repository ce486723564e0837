"""A chronicle for a person at a terminal: a Gantt chart by device, the jobs, the nodes, and what was decided last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ringmaster.tasks.execution.chronicle import NOW_RUNNING, TO_COME, Chronicle, Span, headline
from ringmaster.tasks.execution.chronicle_text import (
    FAULT_MARK,
    KEY,
    Row,
    axis,
    job_texts,
    letters,
    margin_of,
    num_rows,
    rows,
)
from ringmaster.tasks.planning.drawing import COLOURS, seconds_text
from ringmaster.tasks.planning.gantt_text import Piece

HEADINGS = 11  # lines that are neither a device nor a job, a node or a note
INK, FAINT, DARK, RED = "#22303c", "#6b7680", "#3a444c", "#c1121f"
STATUS_STYLES = {"running": "bold", "failed": RED, "done": "green", "paused": "yellow", "cancelled": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many lines each part may have."""

    devices: int = 64
    jobs: int = 40
    nodes: int = 40
    notes: int = 12

    @classmethod
    def of_screen(cls, chronicle: Chronicle, height: int) -> Room:
        """What fits into a screen: the devices have what the jobs leave, which have a third."""
        left = height - HEADINGS - (3 if chronicle.nodes else 0)
        notes = min(len(chronicle.notes), max(2, left // 6))
        nodes = min(len(chronicle.nodes), max(2, left // 6))
        left -= notes + nodes
        needed = num_rows(chronicle)
        devices = max(2, min(needed, left - min(len(chronicle.jobs), max(3, left // 3))))
        return cls(devices=devices, nodes=nodes, notes=notes, jobs=max(1, left - devices))


def picture(chronicle: Chronicle, *, width: int, room: Room, has_shades: bool = True) -> RenderableType:
    """All that a person is shown, `width` columns wide. has_shades: of colours, more than the sixteen old ones."""
    parts: list[RenderableType] = [
        Text().append(chronicle.name, "bold").append(f"  {' · '.join(headline(chronicle))}"),
        Text(),
        *_gantt(chronicle, width, room.devices, has_shades=has_shades),
        Text(),
        _jobs(chronicle, room.jobs),
    ]
    if chronicle.nodes:
        parts += [Text(), _nodes(chronicle, room.nodes)]
    if chronicle.notes:
        parts += [Text(), *_notes(chronicle, room.notes)]
    return Group(*parts)


def _gantt(chronicle: Chronicle, width: int, most: int, *, has_shades: bool) -> Iterator[RenderableType]:
    margin = margin_of(chronicle)
    columns = max(20, width - margin - 3)
    names = letters(chronicle)
    colour = {job: COLOURS[i % len(COLOURS)] for i, job in enumerate(names)} if has_shades else {}
    found, left_out = rows(chronicle, columns, most=most)
    if not (chronicle.first or chronicle.real):
        yield Text("nothing is planned yet: jobs are measured first", style=FAINT)
        return
    for row in found:
        yield _row(row, margin, colour)
    yield Text(f"{'':>{margin}} {axis(chronicle, columns)}", style=FAINT, no_wrap=True)
    yield Text(f"{'':>{margin}} {KEY}", style=FAINT, no_wrap=True)
    if left_out:
        yield Text(f"{'':>{margin}} and {left_out} more devices", style=FAINT)


def _row(row: Row, margin: int, colour: dict[str, str]) -> Text:
    line = Text(no_wrap=True).append(f"{row.name[-margin:]:>{margin}} ", FAINT)
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
    """Ink and ground of a piece's cells."""
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


def _jobs(chronicle: Chronicle, most: int) -> Table:
    table = Table(
        *("", Column("job", no_wrap=True), "status", Column("step", justify="right"), "technique"),
        *(Column("ends after", justify="right"), "message"),
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for text in job_texts(chronicle, most):
        table.add_row(*(Text(cell) for cell in text), style=STATUS_STYLES.get(text[2]))
    left_out = len(chronicle.jobs) - most
    if left_out > 0:
        table.add_row("", Text(f"and {left_out} more"), style=FAINT)
    return table


def _nodes(chronicle: Chronicle, most: int) -> Table:
    table = Table("node", "devices", "status", "health", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for node in sorted(chronicle.nodes, key=lambda node: (not node.health, node.name))[:most]:
        said = "; ".join(f"device {number} {reason}" for number, reason in node.health) or "well"
        style = RED if node.health else None
        table.add_row(node.name, str(node.num_devices), node.status, Text(said), style=style)
    if len(chronicle.nodes) > most:
        table.add_row(Text(f"and {len(chronicle.nodes) - most} more"), style=FAINT)
    return table


def _notes(chronicle: Chronicle, most: int) -> Iterator[Text]:
    yield Text("last decisions", style="bold")
    for note in chronicle.notes[-most:]:
        yield Text(f"{seconds_text(max(0.0, note.at_s)):>9}  {note.text}", no_wrap=True, overflow="ellipsis")
