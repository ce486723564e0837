"""Restarts flow runs whose process died: the runs that submit batches to a pool, follow and record them.

The pool's jobs go on without the run, but nothing more is recorded until a process follows them again. The same run is
scheduled again, finds the jobs that it had submitted, and repeats nothing.
"""

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
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectException
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.flows.batch.flow_runs import OF_COMMAND, runs_fact
from ringmaster.flows.pool.runs.batch_runs import MOST_RUNS, run_again
from ringmaster.flows.pool.runs.open_client import OpenClient
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal

logger = logging.getLogger(__name__)

DEPLOYMENTS = ("train-batch", "sweep", "retrain-daily", "submit-jobs")
LOOK_EVERY_S = 10.0
RECENT = timedelta(hours=1)
BEGUN_WITHIN = timedelta(minutes=5)  # time for a claimed run to begin


class CrashedRuns:
    """Finds crashed runs, and schedules them again.

    database: the pool's database, which has the batches that each run has submitted.
    clock: returns the time of day.
    """

    def __init__(self, database: Database, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._database, self._clock = database, clock

    def keep_looking(self, until: threading.Event) -> None:
        """Checks for crashed runs periodically until `until` is set; skips checks while Prefect is away."""
        # ValueError: what answers is not Prefect.
        passing = (httpx.HTTPError, PrefectException, SQLAlchemyError, ValueError)
        prefect = OpenClient()
        while not until.wait(LOOK_EVERY_S):
            with suppress(*passing), prefect.use() as client:
                self.revive(client)
        prefect.close()

    def revive(self, client: SyncPrefectClient) -> list[str]:
        """Schedules crashed runs again; returns their names.

        These are crashed runs whose batch is active, or that crashed within the last hour fewer than MOST_RUNS times,
        and runs that a worker has claimed and not begun within BEGUN_WITHIN.
        """
        wanted = [*self._crashed(client), *self._not_begun(client)]
        for run in wanted:
            logger.warning("flow run %s had crashed, and goes on (its run %d)", run.name, run.run_count + 1)
            client.set_flow_run_state(run.id, run_again(run, message="its process had died"), force=True)
        return [run.name for run in wanted]

    def _crashed(self, client: SyncPrefectClient) -> list[FlowRun]:
        crashed = _in_state(client, StateType.CRASHED)
        if not crashed:
            return []
        active = {*Submissions(self._database).active()}
        return [
            run
            for run in crashed
            if not active.isdisjoint(self._submitted_by(run)) or (run.run_count < MOST_RUNS and self._is_new(run))
        ]

    def _submitted_by(self, run: FlowRun) -> set[str]:
        """Returns the ids of the batches that a run, or a flow that it called, has submitted."""
        known = Journal(self._database, batch="").get(runs_fact(str(run.id)), {})
        return {id for id, _ in known.values()}

    def _not_begun(self, client: SyncPrefectClient) -> list[FlowRun]:
        """Returns runs whose process died before it reported a state, while its worker could not reach Prefect."""
        claimed = _in_state(client, StateType.PENDING)
        return [run for run in claimed if run.state is not None and self._clock() - run.state.timestamp > BEGUN_WITHIN]

    def _is_new(self, run: FlowRun) -> bool:
        return run.end_time is not None and self._clock() - run.end_time < RECENT


def _in_state(client: SyncPrefectClient, state: StateType) -> list[FlowRun]:
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state]))),
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(DEPLOYMENTS))),
    )
    return [run for run in found if OF_COMMAND not in run.tags]  # what a person interrupts is not begun again
