"""The flow runs that serve lent nodes, in the work pool of an engine such as Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

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
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelling, Scheduled

from ringmaster.flows.pool.runs.open_client import OpenClient
from ringmaster.tasks.execution.engine import NodeRun

FLOW = DEPLOYMENT = "serve-node"
RUNS_AT_ONCE = 200  # what Prefect's server returns at most
LIVE = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


class PrefectNodeRuns:
    """Reads, starts and cancels the runs of the deployment `serve-node`, in one thread; implements `NodeRuns`."""

    def __init__(self) -> None:
        self._client = OpenClient()

    def live(self) -> Sequence[NodeRun]:
        """Returns the runs that have not ended, oldest first."""
        state = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(LIVE))))
        with self._prefect() as client:
            found: list[FlowRun] = []
            while True:
                page = client.read_flow_runs(
                    flow_run_filter=state,
                    deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[DEPLOYMENT])),
                    limit=RUNS_AT_ONCE,
                    offset=len(found),
                )
                found += page
                if len(page) < RUNS_AT_ONCE:
                    break
        runs = {run.id: run for run in found}  # one that was created between two pages may be in both
        return [_as_node_run(run) for run in sorted(runs.values(), key=_begin)]

    def start(self) -> str:
        """Starts one more run, and returns its id; the work pool's worker starts a machine for it."""
        with self._prefect() as client:
            deployment = client.read_deployment_by_name(f"{FLOW}/{DEPLOYMENT}")
            return str(client.create_flow_run_from_deployment(deployment.id, state=Scheduled()).id)

    def cancel(self, id: str) -> None:
        """Cancels a run: the work pool's worker ends its machine in order."""
        with self._prefect() as client:
            client.set_flow_run_state(UUID(id), Cancelling(message="the pool needs fewer nodes"))

    def why_ended(self, id: str) -> str:
        """Returns the state of a run that has ended, with its message; empty for a run that is not there any more."""
        with self._prefect() as client:
            try:
                state = client.read_flow_run(UUID(id)).state
            except ObjectNotFound:
                return ""
        return "" if state is None or not state.is_final() else f"{state.name}: {state.message or 'without a message'}"

    @contextmanager
    def _prefect(self) -> Iterator[SyncPrefectClient]:
        try:
            with self._client.use() as client:
                yield client
        except (httpx.HTTPError, PrefectException) as error:
            raise ConnectionError(f"Prefect does not answer: {type(error).__name__}: {error}") from error


def _begin(run: FlowRun) -> float:
    return run.created.timestamp() if run.created is not None else 0.0


def _as_node_run(run: FlowRun) -> NodeRun:
    return NodeRun(
        id=str(run.id),
        infrastructure=run.infrastructure_pid or "",
        is_begun=run.start_time is not None,
        is_ending=run.state is not None and run.state.type == StateType.CANCELLING,
    )
