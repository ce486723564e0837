"""Progress of a running batch for a person: a live table of the running jobs on a terminal, plain lines elsewhere."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from ringmaster.flows.output import fitting_columns, print_lines, styled
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.execution import execution_events
from ringmaster.tasks.execution.job_progress import TRAINING, JobProgress, range_text, whole_seconds
from ringmaster.tasks.execution.starter import label_of
from ringmaster.tasks.planning.durations import counted
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.metric import metrics_text, why_undefined
from ringmaster.techniques.processes.gang_events import (
    CheckpointFailed,
    EvaluationReported,
    KernelsRefused,
    PhaseStarted,
)
from ringmaster.text import printable

LINES_EVERY_S = 30.0  # between the lines about each running job in a log
MAX_LINES = 20  # jobs whose progress is logged each time
MAX_NAMED = 4  # devices of a gang whose numbers are shown
WIDE, BAR = 120, 16  # columns from which on a terminal has room for bars, and of a bar
MIN_JOB = 8  # columns of the jobs' names, which are cut before a column is left out
COLUMNS = ("job", "technique", "step", "loss", "samples/s", "tokens/s", "memory", "ends in")
LEFT_OUT_FIRST = ("tokens/s", "samples/s", "memory", "technique", "loss")  # on a narrow terminal


@dataclass(kw_only=True)
class RunningJob:
    """A job whose gang runs.

    option: its technique and devices. num_steps: all of its steps; None if unknown.
    """

    job: str
    option: str
    num_steps: int | None
    progress: JobProgress

    def activity(self, now_s: float, *, ends_in: str = "") -> str:
        """Returns in how long it ends, or what its gang does other than to train: "saving, 3 s".

        ends_in: the likely time; empty for the seconds of its steps at their present speed.
        """
        progress = self.progress
        if progress.phase != TRAINING:
            return f"{progress.phase}, {whole_seconds(now_s - progress.phase_s)}"
        if (left_s := progress.left_s(self.num_steps)) is None:
            return f"first step, {whole_seconds(now_s - progress.phase_s)}"
        return ends_in or whole_seconds(left_s)

    def cells(self, now_s: float, *, ends_in: str = "") -> dict[str, str]:
        """Returns its state as the cells of a table, by column."""
        step = f"{self.progress.step}/{self.num_steps}" if self.num_steps else str(self.progress.step)
        figures, activity = self.progress.figures().cells, self.activity(now_s, ends_in=ends_in)
        return dict(zip(COLUMNS, (self.job, self.option, step, *figures, activity), strict=True))

    def line(self, now_s: float, *, ends_in: str = "") -> str:
        """Returns its state as one line of a log."""
        step = f"step {self.progress.step}" + (f" of {self.num_steps}" if self.num_steps else "")
        is_training = self.progress.phase == TRAINING and self.progress.step_s is not None
        activity = ("ends in " if is_training else "") + self.activity(now_s, ends_in=ends_in)
        texts = (step, self.progress.figures().in_words(), activity)
        return f"{self.job}: {', '.join(filter(None, texts))}"


class BatchProgress:
    """The present activity of a batch and its running jobs, by its notices and an executor's events.

    clock: monotonic seconds.
    rows: the running jobs, by the number of the segment and the name.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.now_s = clock
        self._prediction: execution_events.Prediction | None = None
        self._since_s = 0.0  # the begin from which the prediction counts
        self.rows: dict[tuple[int, str], RunningJob] = {}
        self._activity, self._activity_s = "starting", clock()
        self._planned_s: float | None = None  # when training began
        self._num_done = self._num_jobs = 0

    def begin(self, activity: str) -> None:
        """Notes what is done now, until the next event."""
        self._activity, self._activity_s = activity, self.now_s()

    def handle_event(self, event: execution_events.ExecutionEvent) -> None:
        """Takes in an event of an executor."""
        now_s = self.now_s()
        if not isinstance(event, (execution_events.GangReport, execution_events.PredictionUpdate)):
            self._activity, self._activity_s = "", now_s
        match event:
            case execution_events.PredictionUpdate():
                self._prediction = event.prediction
                self._since_s = now_s - event.age_s - event.prediction.made_s
            case execution_events.PlanUpdate():
                planned = sum(1 + len(job.members) for job in event.problem.jobs)
                self._num_jobs = max(self._num_jobs, self._num_done + planned)
                self._planned_s = now_s if self._planned_s is None else self._planned_s
            case execution_events.SegmentStarted():
                self._start(event, now_s)
            case execution_events.GangReport():
                for row in self._rows_of(event):
                    row.progress.handle_event(event.event, now_s=now_s)
            case execution_events.SegmentEnded():
                self.rows = {key: row for key, row in self.rows.items() if key[0] != event.number}
            case execution_events.JobEnded():
                self._num_done += 1
                self.rows = {key: row for key, row in self.rows.items() if key[1] != event.job}
            case execution_events.DeviceWait():
                self._activity = _waiting(event)

    def _start(self, event: execution_events.SegmentStarted, now_s: float) -> None:
        jobs = (event.segment.job, *event.members)
        totals = event.num_steps or (None,) * len(jobs)
        option = f"{event.technique} on {_numbers(event.segment.devices)}"
        for job, total in zip(jobs, totals, strict=True):
            progress = JobProgress(step=event.first_step, phase_s=now_s, predicted_bytes=event.predicted_bytes)
            if job != event.segment.job:
                progress.step = 0  # it says where it begins
            self.rows[event.number, job] = RunningJob(job=job, option=option, num_steps=total, progress=progress)

    def _rows_of(self, event: execution_events.GangReport) -> list[RunningJob]:
        """Returns the jobs that an event is about. A phase of a gang is one of all its jobs."""
        if isinstance(event.event, PhaseStarted):
            return [row for (number, _), row in self.rows.items() if number == event.number]
        row = self.rows.get((event.number, event.job))
        return [] if row is None else [row]

    def headline(self) -> str:
        """Returns how many jobs have ended, the time since training began, and the other work in progress."""
        now_s, texts = self.now_s(), []
        if self._num_jobs:  # a job may fail before there is a plan
            texts.append(f"{self._num_done} of {counted(self._num_jobs, 'job')} ended")
        if self._planned_s is not None:
            texts.append(whole_seconds(now_s - self._planned_s))
        if self._activity:
            texts.append(f"{self._activity}, {whole_seconds(now_s - self._activity_s)}")
        ends_in = self._ends_in(self._prediction.end) if self._prediction and self.rows else ""
        if ends_in:
            texts.append(f"ends in {ends_in}")
        return " · ".join(texts)

    def ends_in(self, job: str) -> str:
        """Returns in how long a job likely ends: "3 to 5 min"; empty where that is not predicted."""
        return self._ends_in(self._prediction.jobs.get(job)) if self._prediction else ""

    def _ends_in(self, end: execution_events.PredictedEnd | None) -> str:
        """Returns the range of the seconds that are left; empty where nothing is predicted, or the time is over."""
        if self._prediction is None or end is None:
            return ""
        elapsed_s = self.now_s() - self._since_s
        return "" if end.high_s <= elapsed_s else range_text(end.low_s - elapsed_s, end.high_s - elapsed_s)

    def lines(self) -> list[str]:
        """Returns a line for each running job, or for the present activity where none runs."""
        now_s, rows = self.now_s(), list(self.rows.values())
        if not rows:
            return [f"still {self._activity}, {whole_seconds(now_s - self._activity_s)}"] if self._activity else []
        more = [f"and {len(rows) - MAX_LINES} more jobs"] if len(rows) > MAX_LINES else []
        return [row.line(now_s, ends_in=self.ends_in(row.job)) for row in rows[:MAX_LINES]] + more


class View:
    """A view that shows nothing. Subclasses show notices (lines of progress) and an executor's events."""

    PURPOSE = "the view of the progress"

    def notice(self, text: str) -> None:
        """Shows a line about the current activity."""

    def detail(self, text: str) -> None:
        """Shows a line of detail, with --verbose only."""

    def say(self, text: str) -> None:
        """Shows a line that must be seen, from any thread."""

    def listen(self, event: execution_events.ExecutionEvent) -> None:
        """Shows an executor's event; it is a listener of the executor."""


class ConsoleView(View):
    """Prints what matters on a console while something else runs: a thread, or a live table.

    clock: monotonic seconds.
    """

    def __init__(
        self, console: Console, *, is_verbose: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._is_verbose, self._clock = console, is_verbose, clock
        self._batch = BatchProgress(clock=clock)
        self._plan: execution_events.PlanUpdate | None = None
        self._live_display: AbstractContextManager[object] = self._open()

    def _open(self) -> AbstractContextManager[object]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._live_display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live_display.__exit__(*error)

    def detail(self, text: str) -> None:
        """Prints the line with --verbose."""
        if self._is_verbose:
            self._console.print(text, style="dim", soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints the line."""
        self._console.print(text, style="bold", soft_wrap=True)

    def listen(self, event: execution_events.ExecutionEvent) -> None:
        """Notes the event, and prints a line about it if it matters."""
        self._batch.handle_event(event)
        text, style = describe(event)
        if isinstance(event, execution_events.PlanUpdate):
            before, self._plan = self._plan, event
            if before is not None and event.continues(before):
                return
        if text and self._is_printed(event):
            self._console.print(text, style=style, soft_wrap=True)

    def _is_printed(self, event: execution_events.ExecutionEvent) -> bool:
        return True


class LinesView(ConsoleView):
    """Shows each event as a line, for logs, and a line for each running job every `LINES_EVERY_S` seconds."""

    def _open(self) -> AbstractContextManager[object]:
        self._printed_s = self._clock()  # when there was a line for each running job
        return background_thread(self._tick_on, name="progress lines")

    def _tick_on(self, over: threading.Event) -> None:
        while not over.wait(LINES_EVERY_S / 10):
            self.tick()

    def tick(self) -> None:
        """Prints a line for each running job, or one about the present activity, where that is due."""
        if self._clock() - self._printed_s < LINES_EVERY_S:
            return
        self._printed_s = self._clock()
        print_lines(self._console, self._batch.lines(), style="dim")

    def notice(self, text: str) -> None:
        """Prints the line."""
        self._batch.begin(text)
        if not self._batch.rows:
            self._printed_s = self._clock()
        self._console.print(text, style="dim", soft_wrap=True)


class LiveView(ConsoleView):
    """A table of the running jobs, with step, loss, speed, memory and the time left, above the present activity.

    Lines about the ends of segments and jobs, and about evaluations, are printed above it.
    """

    def _open(self) -> AbstractContextManager[object]:
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True)
        return self._live

    def notice(self, text: str) -> None:
        """Shows the present activity below the jobs."""
        self._batch.begin(text)

    def _is_printed(self, event: execution_events.ExecutionEvent) -> bool:
        return not isinstance(event, execution_events.SegmentStarted) or event.first_step > 0

    def _picture(self) -> RenderableType:
        self._spinner.update(text=styled(self._batch.headline() or " "))  # it ignores an empty text
        if not (rows := list(self._batch.rows.values())):
            return self._spinner
        most = max(1, self._console.height - 4)  # in addition to the heading, the spinner and a line of the shell
        parts: list[RenderableType] = [self._jobs(rows[:most])]
        if len(rows) > most:
            parts.append(styled(f"and {len(rows) - most} more jobs", "dim"))
        return Group(*parts, self._spinner)

    def _jobs(self, rows: Sequence[RunningJob]) -> Table:
        now_s = self._batch.now_s()
        every = [row.cells(now_s, ends_in=self._batch.ends_in(row.job)) for row in rows]
        width, has_bars = self._console.width, self._console.width >= WIDE
        left_out_first = () if has_bars else LEFT_OUT_FIRST
        shown = fitting_columns(every, width=width, least={"job": MIN_JOB}, left_out_first=left_out_first)
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
        for name in shown:
            # The name of the job is the only column that gives room to the others.
            least, style = MIN_JOB if name == "job" else None, {"job": "bold", "technique": "cyan"}.get(name)
            is_text = name in ("job", "technique", "ends in")
            justify: Literal["left", "right"] = "left" if is_text else "right"
            table.add_column(name, style=style, min_width=least, justify=justify, no_wrap=name != "job")
            if name == "technique" and has_bars:
                table.add_column("", width=BAR)
        for row, cells in zip(rows, every, strict=True):
            texts: list[RenderableType] = [styled(cells[name], no_wrap=True, overflow="ellipsis") for name in shown]
            if has_bars:
                bar = ProgressBar(total=row.num_steps or 1, completed=row.progress.step, width=BAR)
                texts.insert(shown.index("technique") + 1, bar)
            table.add_row(*texts)
        return table


def view_on(console: Console, *, is_verbose: bool = False) -> ConsoleView:
    """Returns a view of the progress of work: a live table if the console is a terminal, lines elsewhere."""
    return (LiveView if console.is_terminal else LinesView)(console, is_verbose=is_verbose)


def describe(event: execution_events.ExecutionEvent) -> tuple[str, str]:
    """Returns an event as a line for a person, empty if it is not worth one, and the line's style on a terminal."""
    text, style = _described(event)
    return printable(text), style


def _described(event: execution_events.ExecutionEvent) -> tuple[str, str]:
    match event:
        case execution_events.PlanUpdate(problem=problem, plan=plan, why=why):
            jobs = {name for s in plan.segments for name in (s.job, *problem.job(s.job).members)}
            text = f"planned ({why}): {plan.makespan_s:.1f} s for {counted(len(jobs), 'job')}"
            # The gap holds for the runtimes that were planned with, however good they are.
            gap = "" if plan.gap is None else f", at most {plan.gap:.1%} above the best plan with these runtimes"
            return f"{text}{gap}", ""
        case execution_events.SegmentStarted(segment=segment, first_step=first, members=members):
            again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
            who = f"{label_of(segment.job, members)} start" if members else f"{segment.job} starts"
            is_part = first > 0 or segment.last_step < max(event.num_steps, default=0)
            why = f": {segment.reason}" if segment.reason and is_part else ""
            return f"{who} at step {first} on {_devices(segment.devices)}{again}{why}", ""
        case execution_events.GangReport(
            job=job, event=EvaluationReported(step=step, metrics=metrics, num_rows=num_rows, part=part, note=note)
        ):
            text = ", ".join(filter(None, [_metrics(metrics, num_rows), note]))
            return f"{job} at step {step}: {text}" if part is None or note else "", ""
        case execution_events.GangReport(event=CheckpointFailed(message=message) | KernelsRefused(message=message)):
            return f"warning: {message}", "yellow"
        case execution_events.SegmentEnded(segment=segment, outcome=outcome, decision=decision) if outcome.message:
            return f"{segment.job}: {printable(outcome.message)}; {decision}", "yellow"
        case execution_events.JobEnded(job=job, record=record):
            status, message = record.status, record.message
            if status == JobStatus.CANCELLED:
                return f"{job} is cancelled: {message}", "yellow"
            if status == JobStatus.STOPPED:
                return f"{job} is {message}", ""
            if status != JobStatus.DONE:
                return f"{job} has failed: {message}", "red"
            causes = why_undefined(record.metrics)
            figures = _metrics(record.metrics, record.num_rows)
            text = "; ".join([f"{job} is done: {figures}", *filter(None, [message]), *causes])
            return text, "yellow" if causes else "green"
        case execution_events.DeviceWait():
            return _waiting(event), ""
    return "", ""


def _waiting(event: execution_events.DeviceWait) -> str:
    return f"waiting for devices held by {', '.join(event.holders)}"


def _devices(devices: tuple[tuple[str, int], ...]) -> str:
    return "device " + ",".join(str(number) for _, number in devices)


def _numbers(devices: tuple[tuple[str, int], ...]) -> str:
    """Returns the numbers of a gang's devices for a narrow column: "0,1"; of many devices their number."""
    if len(devices) > MAX_NAMED:
        return f"{len(devices)} devices"
    return ",".join(str(number) for _, number in devices)


def _metrics(metrics: Mapping[str, Any], num_rows: int | None) -> str:
    return metrics_text(metrics, num_rows=num_rows) or "no metric was computed"
