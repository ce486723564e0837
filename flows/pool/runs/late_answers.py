"""Default answers for suspended flow runs that nobody has answered in time: they wait for approval only so long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectException

from ringmaster.flows.batch.batch_input import ANSWER_WITHIN_S
from ringmaster.flows.pool.runs.open_client import OpenClient
from ringmaster.flows.promotion.approval import silence_to_start

logger = logging.getLogger(__name__)

DEPLOYMENT = "train-batch"
LOOK_EVERY_S = 30.0


class LateAnswers:
    """Answers suspended runs whose time for an answer is over. clock: returns the time of day."""

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock

    def keep_looking(self, until: threading.Event) -> None:
        """Checks the suspended runs periodically until `until` is set; skips checks while Prefect is away."""
        prefect = OpenClient()
        while not until.wait(LOOK_EVERY_S):
            with suppress(httpx.HTTPError, PrefectException, ValueError), prefect.use() as client:
                self.answer(client)
        prefect.close()

    def answer(self, client: SyncPrefectClient) -> list[str]:
        """Answers runs that have waited too long, as their own parameters specify; returns their names."""
        waiting = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Suspended"])),
            ),
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[DEPLOYMENT])),
        )
        late = [run for run in waiting if self._is_late(run)]
        for run in late:
            trains = run.parameters.get("without_answer") == "train"
            logger.warning("nobody has answered %s: it %s", run.name, "trains" if trains else "is not trained")
            client.resume_flow_run(run.id, run_input=silence_to_start(_within_s(run), trains))
        return [run.name for run in late]

    def _is_late(self, run: FlowRun) -> bool:
        return run.state is not None and self._clock() - run.state.timestamp > timedelta(seconds=_within_s(run))


def _within_s(run: FlowRun) -> float:
    """Returns the run's parameter, or its default: a run has only those parameters that it was given."""
    return float(run.parameters.get("answer_within_s", ANSWER_WITHIN_S))
