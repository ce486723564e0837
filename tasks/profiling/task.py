"""The Prefect task of the profiling stage."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from ringmaster.errors import UntrainableJobs
from ringmaster.tasks.profiling.stage import profile_jobs


def _may_go_well_again(_: Any, __: Any, state: State[Any]) -> bool:
    """Returns whether a retry can help: jobs that cannot take a step stay unfit."""
    return not isinstance(state.result(raise_on_failure=False), UntrainableJobs)


# Measurements from before a failure are stored, so that a retry makes only the other trials.
profile_task = task(
    name="profile",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_condition_fn=_may_go_well_again,
    cache_policy=NO_CACHE,
    persist_result=False,
)(profile_jobs)
