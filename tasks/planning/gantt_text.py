"""Gantt charts of plans as text for a terminal: a row per device, and a line per job with its segments."""

from collections.abc import Sequence
from dataclasses import dataclass

from ringmaster.tasks.planning.gantt import job_label, seconds_text
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.text import printable

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IDLE = "·"


@dataclass(frozen=True)
class Bar:
    """An interval of one device's time.

    fill: the character of its cells.
    letter: the character of the first cell, followed by `said` where there is space.
    said: the name.
    of: the object that the bar stands for.
    """

    start_s: float
    end_s: float
    fill: str
    letter: str
    said: str
    of: object


@dataclass(frozen=True)
class Piece:
    """Adjacent cells of a row, of one bar or idle (`of` is None); the first `num_named` cells show a name."""

    text: str
    of: object
    num_named: int = 0


def letters(problem: Problem) -> dict[str, str]:
    """A letter for each job; beyond 52 jobs they repeat."""
    return {job.id: LETTERS[i % len(LETTERS)] for i, job in enumerate(problem.jobs)}


def rows(plan: Plan, problem: Problem, columns: int) -> list[tuple[str, list[Piece]]]:
    """Returns for each device its name, and pieces that fill `columns` cells together.

    The first row of a gang shows the job's name. A bar shorter than a cell may be covered by its neighbour.
    """
    letter, end_s = letters(problem), plan.makespan_s or 1.0
    by_device: dict[tuple[str, int], list[Segment]] = {}
    named: dict[int, tuple[str, int]] = {}
    for segment in sorted(plan.segments, key=lambda s: s.start_s):
        for node, ids in segment.devices:
            for device in ids:
                named.setdefault(id(segment), (node, device))
                by_device.setdefault((node, device), []).append(segment)
    found = []
    for node_ in problem.nodes:
        for device in range(node_.num_devices):
            bars = []
            for segment in by_device.get((node_.id, device), []):
                name = job_label(segment, problem) if named[id(segment)] == (node_.id, device) else ""
                fill = letter[segment.job]
                bars.append(Bar(segment.start_s, segment.end_s, fill, fill, name, segment))
            found.append((f"{node_.id}:{device}", pieces(bars, columns, end_s=end_s)))
    return found


def pieces(bars: Sequence[Bar], columns: int, *, end_s: float) -> list[Piece]:
    """Returns pieces that fill `columns` cells together.

    A bar shorter than a cell may be covered by its neighbour.

    bars: in the order of their starts, from 0 to `end_s`.
    """
    found: list[Piece] = []
    at = 0
    for bar in bars:
        first = max(at, min(columns - 1, round(bar.start_s / end_s * columns)))
        last = min(columns, max(first + 1, round(bar.end_s / end_s * columns)))
        if first > at:
            found.append(Piece(IDLE * (first - at), None))
        if last > first:
            said = _said(bar, last - first)
            found.append(Piece(said + bar.fill * (last - first - len(said)), bar.of, len(said)))
        at = max(at, last)
    return [*found, Piece(IDLE * (columns - at), None)]


def render_text(plan: Plan, problem: Problem, width: int = 100) -> str:
    """Draws the plan in `width` columns: a line per device, a letter per job, and below a line per job."""
    margin, columns = margin_and_columns(problem, width)
    lines = [
        f"{printable(name, limit=margin):>{margin}} |{''.join(piece.text for piece in pieces)}|"
        for name, pieces in rows(plan, problem, columns)
    ]
    return "\n".join([*lines, axis(plan, margin, columns), *job_lines(plan, problem, width)])


def margin_and_columns(problem: Problem, width: int) -> tuple[int, int]:
    """Returns the number of columns for the devices' names, and for the time."""
    margin = min(24, max(len(f"{node.id}:{node.num_devices - 1}") for node in problem.nodes))
    return margin, max(20, width - margin - 3)


def axis(plan: Plan, margin: int, columns: int) -> str:
    """The line below the rows: five times, each at its column."""
    end_s = plan.makespan_s or 1.0
    line = list(" " * (columns + 1))
    for quarter in range(5):
        said = "0" if quarter == 0 else seconds_text(end_s * quarter / 4, like=end_s)
        at = min(round(columns * quarter / 4), columns + 1 - len(said))
        line[at : at + len(said)] = said
    return f"{'':>{margin}} {''.join(line)}"


def job_lines(plan: Plan, problem: Problem, width: int) -> list[str]:
    """A line per job: its letter, its name, and its segments."""
    letter, ran = letters(problem), dict[str, list[str]]()
    for segment in sorted(plan.segments, key=lambda s: s.start_s):
        option = problem.job(segment.job).options[segment.option]
        when = f"{seconds_text(segment.start_s)}..{seconds_text(segment.end_s)}"
        does = f"{option.technique} x{option.num_devices} {when}"
        ran.setdefault(segment.job, []).append(does)
        for name in option.jobs:
            ran.setdefault(name, []).append(f"with {segment.job}, {does}")
    lines = (f"{letter[job.id]}  {job.id}: {', then '.join(ran.get(job.id, []))}" for job in problem.jobs)
    return [printable(line, limit=max(width, 40)) for line in lines]


def _said(bar: Bar, length: int) -> str:
    """The text at the beginning of a bar: its letter and name where at least four characters of it fit."""
    if bar.said and length >= 7:
        return f"{bar.letter} {printable(bar.said, limit=length - 3)} "
    return bar.letter if bar.letter != bar.fill else ""
