"""The Prefect task of the profiling stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling.lending import Lend
from ringmaster.tasks.profiling.stage import Failed, Notice, Profiled, ProfileStore, UnfitJobs, profile_jobs, untold
from ringmaster.tasks.profiling.trials import TrialEnvironment
from ringmaster.techniques import Job


def _may_go_well_again(_: Any, __: Any, state: State[Any]) -> bool:
    """Returns whether a retry can help: jobs that cannot take a step stay unfit."""
    return not isinstance(state.result(raise_on_failure=False), UnfitJobs)


# Measurements from before a failure are stored, so that a retry makes only the other trials.
@task(
    name="profile",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_condition_fn=_may_go_well_again,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def profile_task(
    jobs: Sequence[Job],
    *,
    environment: TrialEnvironment,
    cluster: Cluster,
    known: ProfileStore,
    notice: Notice,
    lend: Lend | None = None,
    num_nodes: int = 1,
    failed: Failed = untold,
    all_or_none: bool = False,
    share: float | None = None,
) -> Profiled:
    """Runs the preflight of the jobs and measures what is not known about them."""
    return profile_jobs(
        jobs,
        environment=environment,
        cluster=cluster,
        known=known,
        notice=notice,
        lend=lend,
        num_nodes=num_nodes,
        failed=failed,
        all_or_none=all_or_none,
        share=share,
    )
