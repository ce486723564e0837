"""Progress of a running batch for a person: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

from ringmaster.flows.output import styled
from ringmaster.flows.process.interrupts import said_by
from ringmaster.tasks.execution.events import (
    ExecutionEvent,
    GangSaid,
    JobEnded,
    Planned,
    SegmentEnded,
    SegmentStarted,
    Waiting,
)
from ringmaster.tasks.execution.orders import called
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.metrics.registry import why_undefined
from ringmaster.techniques.runtime.processes.events import CheckpointFailed, Steps
from ringmaster.text import printable


class View:
    """A view that shows nothing. Subclasses show notices (lines of progress) and an executor's events."""

    PURPOSE = "the view of the progress"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def notice(self, text: str) -> None:
        """Shows a line about the current activity."""

    def detail(self, text: str) -> None:
        """Shows a line of detail, with --verbose only."""

    def say(self, text: str) -> None:
        """Shows a line that must be seen, from any thread."""

    def listen(self, event: ExecutionEvent) -> None:
        """Shows an executor's event; it is a listener of the executor."""


# The view is no parameter of the flows, as Prefect's UI shows the parameters of a flow in a form.
current_view: ContextVar[View] = ContextVar("current_view", default=View())  # noqa: B039 - a View holds no state


class LinesView(View):
    """Shows each event as a line, for logs."""

    def __init__(self, console: Console, *, is_verbose: bool = False) -> None:
        self._console, self._is_verbose = console, is_verbose

    def notice(self, text: str) -> None:
        """Prints the line."""
        self._console.print(text, style="dim")

    def detail(self, text: str) -> None:
        """Prints the line with --verbose."""
        if self._is_verbose:
            self._console.print(text, style="dim", soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints the line."""
        self._console.print(text, style="bold", soft_wrap=True)

    def listen(self, event: ExecutionEvent) -> None:
        """Prints a line about the event if it matters."""
        if (said := describe(event)) is not None:
            self._console.print(said.text, style=said.style)


class _TaskText(ProgressColumn):
    """A column of text. rich's own reads markup."""

    def __init__(self, show: Callable[[Task], str], *, style: str = "") -> None:
        super().__init__()
        self._show, self._style = show, style

    def render(self, task: Task) -> Text:
        """Returns the text about a bar."""
        return styled(self._show(task), self._style)


class LiveView(View):
    """A bar for each running segment, with its devices, step, loss and the time left."""

    def __init__(self, console: Console, *, is_verbose: bool = False) -> None:
        self._console, self._is_verbose = console, is_verbose
        self._status = Spinner("dots", text="starting")
        self._bars = Progress(
            _TaskText(lambda task: task.description, style="bold"),
            _TaskText(lambda task: task.fields["option"], style="cyan"),
            _TaskText(lambda task: task.fields["devices"], style="dim"),
            BarColumn(bar_width=30),
            _TaskText(lambda task: f"step {task.completed:.0f}/{task.total or 0:.0f}"),
            _TaskText(lambda task: f"loss {task.fields['loss']}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._live = Live(Group(self._bars, self._status), console=console, refresh_per_second=5, transient=True)
        self._bar_of: dict[int, TaskID] = {}
        self._leads: dict[int, str] = {}  # by segment number, the job whose steps its bar shows
        self._num_done = self._num_jobs = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def notice(self, text: str) -> None:
        """Shows the current activity below the bars."""
        self._status.update(text=styled(text))

    def detail(self, text: str) -> None:
        """Prints the line above the bars, with --verbose."""
        if self._is_verbose:
            self._live.console.print(text, style="dim", soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints the line above the bars."""
        self._live.console.print(text, style="bold", soft_wrap=True)

    def listen(self, event: ExecutionEvent) -> None:
        """Moves the bars; prints ends of segments and jobs above them."""
        match event:
            case Planned():
                planned = sum(1 + len(job.members) for job in event.problem.jobs)
                self._num_jobs = max(self._num_jobs, self._num_done + planned)
            case SegmentStarted():
                self._start(event)
            case GangSaid():
                self._move(event)
            case SegmentEnded():
                self._bars.remove_task(self._bar_of.pop(event.number))
            case JobEnded():
                self._num_done += 1
        if self._num_jobs:  # a job may fail before there is a plan
            self._status.update(text=styled(f"{self._num_done} of {self._num_jobs} jobs have ended"))
        if not isinstance(event, (SegmentStarted, GangSaid)) and (said := describe(event)) is not None:
            self._live.console.print(said.text, style=said.style)

    def _start(self, event: SegmentStarted) -> None:
        segment = event.segment
        self._leads[event.number] = segment.job
        self._bar_of[event.number] = self._bars.add_task(
            called(segment.job, event.members),
            total=segment.last_step,
            completed=event.first_step,
            option=f"{event.technique} x{event.num_devices}",
            devices=_devices(segment.devices),
            loss="-",
        )

    def _move(self, event: GangSaid) -> None:
        said = event.event
        if isinstance(said, Steps) and event.number in self._bar_of and self._leads[event.number] == event.job:
            self._bars.update(self._bar_of[event.number], completed=said.step, loss=f"{said.losses[-1]:.3f}")


@contextmanager
def shown(console: Console, *, is_verbose: bool = False) -> Iterator[None]:
    """Shows the progress of the enclosed work: live bars if the console is a terminal, lines elsewhere."""
    make = LiveView if console.is_terminal else LinesView
    with make(console, is_verbose=is_verbose) as view, said_by(view.say):
        token = current_view.set(view)
        try:
            yield
        finally:
            current_view.reset(token)


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """An event as one line of printable text for a person, and the style of that line on a terminal."""

    text: str
    style: str = ""


def describe(event: ExecutionEvent) -> EventLine | None:
    """Returns an event as a line for a person; None if it is not worth one."""
    text, style = _described(event)
    return EventLine(text=printable(text), style=style) if text else None


def _described(event: ExecutionEvent) -> tuple[str, str]:
    match event:
        case Planned(problem=problem, plan=plan, why=why):
            bound = "" if plan.gap is None else f", at most {plan.gap:.1%} above the best possible"
            jobs = {name for s in plan.segments for name in (s.job, *problem.job(s.job).members)}
            return f"planned ({why}): {plan.makespan_s:.1f} s for {len(jobs)} jobs{bound}", ""
        case SegmentStarted(segment=segment, first_step=first, attempt=attempt, members=members):
            again = f" (attempt {attempt})" if attempt > 1 else ""
            who = f"{called(segment.job, members)} start" if members else f"{segment.job} starts"
            return f"{who} at step {first} on {_devices(segment.devices)}{again}", ""
        case GangSaid(event=CheckpointFailed(message=message)):
            return f"warning: {message}", "yellow"
        case SegmentEnded(segment=segment, outcome=outcome, decision=decision) if outcome.message:
            return f"{segment.job}: {printable(outcome.message)}; {decision}", "yellow"
        case JobEnded(job=job, status=status, details=details, message=message):
            if status == JobStatus.CANCELLED:
                return f"{job} is cancelled: {message}", "yellow"
            if status == JobStatus.STOPPED:
                return f"{job} is {message}", ""
            if status != JobStatus.DONE:
                return f"{job} has failed: {message}", "red"
            causes = why_undefined(details["metrics"])
            text = "; ".join([f"{job} is done: {_metrics(details['metrics'])}", *causes])
            return text, "yellow" if causes else "green"
        case Waiting(holders=holders):
            return f"waiting for devices held by {', '.join(holders)}", ""
    return "", ""


def _devices(devices: tuple[tuple[str, int], ...]) -> str:
    return "device " + ",".join(str(number) for _, number in devices)


def _metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
