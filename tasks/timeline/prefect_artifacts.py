"""Prefect artifacts that show the progress of a batch and its Gantt chart while it runs."""

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectException

from ringmaster.tasks.background_worker import CoalescingWorker
from ringmaster.tasks.execution.execution_events import (
    ExecutionEvent,
    GangReport,
    JobEnded,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.storage.database import DatabaseClosed
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.timeline.drawing import job_table, render_svg
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.run_timeline import RunTimeline, headline
from ringmaster.techniques.processes.gang_events import Steps
from ringmaster.text import markdown as foreign
from ringmaster.text import markdown_table

DRAW_EVERY_S = 10.0
MAX_JOBS = 100  # rows of the table of jobs


@contextmanager
def tolerant(artifact: str) -> Iterator[None]:
    """Logs why an artifact could not be updated: an outdated one is no reason to end a training.

    The client may be closed once the flow run has ended, hence RuntimeError.
    """
    try:
        yield
    except (httpx.HTTPError, PrefectException, RuntimeError, DatabaseClosed) as error:
        get_run_logger().warning("%s could not be updated: %s", artifact, error)


class ProgressArtifact:
    """A progress bar in Prefect's UI: the share of the batch's steps that are trained.

    totals: the steps of each job as it was written. clock: monotonic seconds.
    """

    PURPOSE = "the progress bar in Prefect"

    def __init__(
        self, journal: Journal, *, totals: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._journal, self._totals, self._clock = journal, totals, clock
        self._steps: dict[str, int] = {}  # by job, as its gang reports them: the journal has those of checkpoints
        self._updated_s = clock()
        self._artifact = cast(
            UUID,
            create_progress_artifact(progress=self._percent(), key="progress", description="Steps trained of all"),
        )
        self._behind = CoalescingWorker(self._update, name="progress artifact")

    def listen(self, event: ExecutionEvent) -> None:
        """Updates the bar every `DRAW_EVERY_S`, and when a segment starts or ends. An executor's listener."""
        if isinstance(event, GangReport) and isinstance(event.event, Steps):
            self._steps[event.job] = event.event.step
        is_due = isinstance(event, (SegmentStarted, SegmentEnded, JobEnded))
        if is_due or self._clock() - self._updated_s >= DRAW_EVERY_S:
            self._updated_s = self._clock()
            self._behind.ask()

    def close(self) -> None:
        """Makes a pending update and stops the background thread."""
        self._behind.close()

    @tolerant("the progress artifact")
    def _update(self) -> None:
        update_progress_artifact(self._artifact, progress=self._percent())

    def _percent(self) -> float:
        records = self._journal.jobs().values()
        # A job that was stopped early counts as one whole job, however many steps it has trained.
        stopped = [record for record in records if record.status == JobStatus.STOPPED]
        reported = self._steps
        steps = sum(
            max(record.step, reported.get(record.name, 0) if record.status == JobStatus.RUNNING else 0)
            for record in records
            if record.status != JobStatus.STOPPED
        )
        total = sum(record.changed_steps or self._totals.get(record.name, 0) for record in records)
        share = steps / max(1, total) + len(stopped) / max(1, len(records))
        return min(100.0 * share, 100.0)


class GanttArtifact:
    """A Gantt chart in Prefect's UI, by device, of the first plan, the past and running segments and the forecast.

    batch: the batch of a pool to show; None for all jobs.
    write: creates the artifact with this text and returns its id, or updates the artifact of that id; by default with
        Prefect's client.
    in_background: wraps the drawing function in a background worker.
    look: is called with each `RunTimeline` that is drawn.
    """

    PURPOSE = "the Gantt chart in Prefect"

    def __init__(
        self,
        timeline_reader: TimelineReader,
        *,
        batch: str | None = None,
        write: Callable[[UUID | None, str], UUID] | None = None,
        in_background: Callable[[Callable[[], None]], CoalescingWorker] = partial(
            CoalescingWorker, name="gantt artifact"
        ),
        clock: Callable[[], float] = time.monotonic,
        on_drawn: Callable[[RunTimeline], object] = lambda _: None,
    ) -> None:
        self._timeline_reader, self._batch, self._clock, self._on_drawn = timeline_reader, batch, clock, on_drawn
        self._write = write or _write
        self._artifact = self._write(None, self._markdown())
        self._drawn_s = clock()
        self._behind = in_background(self._draw)

    def listen(self, event: ExecutionEvent) -> None:
        """Redraws the chart every `DRAW_EVERY_S` seconds, and once all jobs have ended. An executor's listener."""
        is_due = self._clock() - self._drawn_s >= DRAW_EVERY_S
        if is_due or (
            isinstance(event, (JobEnded, SegmentEnded)) and self._timeline_reader.archive.num_left(self._batch) == 0
        ):
            self._drawn_s = self._clock()
            self._behind.ask()

    def close(self) -> None:
        """Draws the final state and stops the background thread."""
        self._behind.ask()
        self._behind.close()

    @tolerant("the Gantt chart")
    def _draw(self) -> None:
        self._write(self._artifact, self._markdown())

    def _markdown(self) -> str:
        run_timeline = self._timeline_reader.read(self._batch)
        self._on_drawn(run_timeline)
        return markdown(run_timeline)


def markdown(run_timeline: RunTimeline) -> str:
    """Returns a run timeline as markdown: its chart, and a table of its jobs.

    Prefect's UI shows pictures only as images within markdown.
    """
    picture = b64encode(render_svg(run_timeline, titles=False).encode()).decode()
    chart = f"![Gantt chart](data:image/svg+xml;base64,{picture})\n\n{foreign(' · '.join(headline(run_timeline)))}"
    columns, rows = job_table(run_timeline, MAX_JOBS)
    lines = [markdown_table([*map(foreign, columns)], [[*map(foreign, row)] for row in rows])]
    if len(run_timeline.jobs) > MAX_JOBS:
        lines.append(f"\nand {len(run_timeline.jobs) - MAX_JOBS} more jobs")
    return "\n".join([chart, "", *lines]) if rows else chart


def write_artifact(artifact: UUID | None, data: str, *, create: Callable[[], object]) -> UUID:
    """Creates an artifact in Prefect, or replaces the data of the artifact of that id; returns its id."""
    if artifact is None:
        return cast(UUID, create())
    get_client(sync_client=True).update_artifact(artifact_id=artifact, artifact=ArtifactUpdate(data=data))
    return artifact


def _write(artifact: UUID | None, text: str) -> UUID:
    description = "By device: the original plan, what happened, what runs, what comes"
    return write_artifact(
        artifact, text, create=partial(create_markdown_artifact, text, key="gantt", description=description)
    )
