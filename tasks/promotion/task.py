"""Promotion as a Prefect task."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from model_lineage import Ledger, ModelRecord
from tasks.promotion.policy import Decision
from tasks.promotion.stage import apply


# Moving aliases again changes nothing, so that it can be retried whatever failed.
@task(
    name="promote",
    task_run_name="promote {candidate.registered_name}",
    retries=2,
    retry_delay_seconds=[1, 5],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def promote_task(candidate: ModelRecord, decision: Decision, *, ledger: Ledger) -> None:
    """Moves the aliases of a registered model by a decision."""
    apply(ledger, candidate, decision)
