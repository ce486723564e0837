"""A segment as a Prefect task, and the batch's progress and its Gantt chart as Prefect artifacts."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import cast
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectException

from ringmaster.tasks.execution.behind import Behind
from ringmaster.tasks.execution.chronicle import Chronicle, headline
from ringmaster.tasks.execution.chronicle_svg import render_svg
from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid, JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.historian import Historian
from ringmaster.tasks.execution.journal import STOPPED, Journal
from ringmaster.tasks.execution.local import LocalRunner
from ringmaster.tasks.execution.measured import Measured
from ringmaster.tasks.execution.orders import SegmentCall, Submit
from ringmaster.tasks.pool.database import DatabaseClosed
from ringmaster.techniques.engine.gang import Outcome

DRAW_EVERY_S = 10.0


def submit_with(runner: LocalRunner, *, measured: Measured | None = None) -> Submit:
    """A way to start segments that makes each of them a Prefect task run. measured: what watches their devices.

    The task only takes its label, so that nothing of a running gang is serialised; its outcome is a value, also where
    the gang failed: whether and how to go on is the executor's to decide, so the task has no retries of its own.
    """
    calls: dict[str, SegmentCall] = {}

    @task(name="segment", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
    def segment(label: str, folder: str) -> Outcome:
        call = calls.pop(folder)
        with nullcontext(call.on_event) if measured is None else measured.segment(call) as say:
            return runner.run(call.order, num_ranks=call.num_ranks, on_event=say)

    def submit(call: SegmentCall) -> Future[Outcome]:
        calls[call.order.folder] = call
        # A Prefect future has the two methods of a Future that an executor uses.
        return cast("Future[Outcome]", segment.submit(call.label, call.order.folder))

    return submit


class ProgressArtifact:
    """The batch's progress in Prefect's UI: the share of its steps that are trained, by its journal."""

    def __init__(self, journal: Journal, *, total_steps: int) -> None:
        self._journal, self._total = journal, max(total_steps, 1)
        self._artifact = cast(
            UUID,
            create_progress_artifact(progress=self._percent(), key="progress", description="Steps trained of all"),
        )
        self._behind = Behind(self._update, name="progress artifact")

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener: moves the bar where a segment or a job ends."""
        if isinstance(event, (SegmentStarted, SegmentEnded, JobEnded)):
            self._behind.ask()

    def close(self) -> None:
        """Moves the bar for the last time."""
        self._behind.close()

    def _update(self) -> None:
        try:
            update_progress_artifact(self._artifact, progress=self._percent())
        # A picture that lags is no reason to end a training; the client may be closed once the flow run has ended.
        except (httpx.HTTPError, PrefectException, RuntimeError) as error:
            get_run_logger().warning("the progress artifact could not be updated: %s", error)

    def _percent(self) -> float:
        records = self._journal.jobs().values()
        # What was stopped early has come to its end, after however many steps: they count as the others' do on average.
        stopped = [record for record in records if record.status == STOPPED]
        steps = sum(record.step for record in records if record.status != STOPPED)
        share = steps / self._total + len(stopped) / max(1, len(records))
        return min(100.0 * share, 100.0)


class GanttArtifact:
    """What was planned, what happens and what comes, by device, as a picture in Prefect's UI that follows the batch.

    batch: of a pool, the one that is shown. create, update: of a markdown artifact; Prefect's unless given.
    in_background: how it is drawn without anybody waiting for that. look: is shown each chronicle that is drawn.
    """

    def __init__(
        self,
        historian: Historian,
        *,
        batch: str | None = None,
        create: Callable[[str], UUID] | None = None,
        update: Callable[[UUID, str], None] | None = None,
        in_background: Callable[[Callable[[], None]], Behind] = partial(Behind, name="gantt artifact"),
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[Chronicle], object] = lambda _: None,
    ) -> None:
        self._historian, self._batch, self._clock, self._look = historian, batch, clock, look
        self._update = update or _update_markdown
        self._artifact = (create or _create_markdown)(self._markdown())
        self._drawn_s = clock()
        self._behind = in_background(self._draw)

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener: draws anew now and then, and once all jobs have ended."""
        if isinstance(event, GangSaid):
            self._historian.hear(event.number, event.event)
        is_due = self._clock() - self._drawn_s >= DRAW_EVERY_S
        if is_due or (isinstance(event, (JobEnded, SegmentEnded)) and self._historian.num_left(self._batch) == 0):
            self._drawn_s = self._clock()
            self._behind.ask()

    def close(self) -> None:
        """Draws how it ended."""
        self._behind.ask()
        self._behind.close()

    def _draw(self) -> None:
        try:
            self._update(self._artifact, self._markdown())
        except (httpx.HTTPError, PrefectException, RuntimeError, DatabaseClosed) as error:  # as above
            get_run_logger().warning("the Gantt chart could not be updated: %s", error)

    def _markdown(self) -> str:
        chronicle = self._historian.read(self._batch)
        self._look(chronicle)
        return markdown(chronicle)


def markdown(chronicle: Chronicle) -> str:
    """A chronicle for Prefect's UI, which shows pictures only as images within markdown."""
    picture = b64encode(render_svg(chronicle, titles=False).encode()).decode()
    return f"![Gantt chart](data:image/svg+xml;base64,{picture})\n\n{' · '.join(headline(chronicle))}"


def _create_markdown(text: str) -> UUID:
    description = "By device: what was planned first, what happened, what runs, what comes"
    return cast(UUID, create_markdown_artifact(text, key="gantt", description=description))


def _update_markdown(artifact: UUID, text: str) -> None:
    get_client(sync_client=True).update_artifact(artifact_id=artifact, artifact=ArtifactUpdate(data=text))
