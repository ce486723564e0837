"""The Prefect task of the profiling stage."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.errors import retry_may_help
from ringmaster.tasks.profiling.stage import profile_jobs

RETRIES: dict[str, Any] = {"retries": 2, "retry_delay_seconds": [1, 5], "retry_condition_fn": retry_may_help}
"""Of tasks that profile: measurements from before a failure are stored, so that a retry makes only the other trials."""

profile_task = task(name="profile", **RETRIES, cache_policy=NO_CACHE, persist_result=False)(profile_jobs)
