"""Has flow runs go on whose process died: the runs that hand batches over to a pool, follow and record them.

Their jobs are the pool's and go on by themselves; but until somebody follows them again, nothing more is recorded. The
same run is put on its queue again, finds what it had handed over, and doubles nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectException
from prefect.states import AwaitingRetry
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.flows.pool.batch_runs import MOST_RUNS
from ringmaster.tasks.pool.submissions import Submissions

logger = logging.getLogger(__name__)

DEPLOYMENTS = ("train-batch", "sweep", "retrain-daily", "submit-jobs")
LOOK_EVERY_S = 10.0
RECENT = timedelta(hours=1)
BEGUN_WITHIN = timedelta(minutes=5)  # of a run that a worker has claimed


class CrashedRuns:
    """Looks for crashed runs, and has them run again. `clock` tells the time of day."""

    def __init__(self, submissions: Submissions, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._submissions, self._clock = submissions, clock

    def keep_looking(self, until: threading.Event) -> None:
        """Looks again and again until it is told to end; while Prefect is away there is nothing to see."""
        passing = (httpx.HTTPError, PrefectException, SQLAlchemyError, ValueError)  # or what answers is not Prefect
        while not until.wait(LOOK_EVERY_S):
            with suppress(*passing), get_client(sync_client=True) as client:
                self.revive(client)

    def revive(self, client: SyncPrefectClient) -> list[str]:
        """Has runs go on that crashed within the hour, not too often, or whose batch stands, and such as a worker has
        claimed and never begun; returns their names.
        """
        wanted = [*self._crashed(client), *self._not_begun(client)]
        for run in wanted:
            logger.warning("flow run %s had crashed, and goes on (its run %d)", run.name, run.run_count + 1)
            client.set_flow_run_state(run.id, AwaitingRetry(message="its process had died"), force=True)
        return [run.name for run in wanted]

    def _crashed(self, client: SyncPrefectClient) -> list[FlowRun]:
        crashed = _in_state(client, StateType.CRASHED)
        if not crashed:
            return []
        standing = {batch.flow_run for batch in self._submissions.standing()}
        return [run for run in crashed if str(run.id) in standing or (run.run_count < MOST_RUNS and self._is_new(run))]

    def _not_begun(self, client: SyncPrefectClient) -> list[FlowRun]:
        """Runs whose process died before it could say so, while Prefect was away for its worker, too."""
        claimed = _in_state(client, StateType.PENDING)
        return [run for run in claimed if run.state is not None and self._clock() - run.state.timestamp > BEGUN_WITHIN]

    def _is_new(self, run: FlowRun) -> bool:
        return run.end_time is not None and self._clock() - run.end_time < RECENT


def _in_state(client: SyncPrefectClient, state: StateType) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state]))),
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(DEPLOYMENTS))),
    )
