"""Evaluation and promotion of a candidate as Prefect tasks."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.errors import PromotionRefused
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.evaluation.examination import ExaminationRequest, ExaminationResult, examine
from ringmaster.tasks.retraining.policy import PromotionDecision
from ringmaster.tasks.retraining.promotion import MoveLog, apply


@task(name="examine", task_run_name="examine {name}", retries=1, cache_policy=NO_CACHE, persist_result=False)
def examine_task(name: str, model: Path, request: ExaminationRequest) -> ExaminationResult:
    """Examines the model in a folder. name: of the model, for the name of the task's run."""
    return examine(model, request)


def _may_be_tried_again(task: Any, run: Any, state: Any) -> bool:
    """Whether a retry may help. It cannot if another promotion was faster."""
    return not isinstance(state.result(raise_on_failure=False), PromotionRefused)


# Moving aliases again changes nothing, so the task may be retried after any failure.
@task(
    name="promote",
    task_run_name="promote {candidate.registered_name}",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_condition_fn=_may_be_tried_again,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def promote_task(
    candidate: ModelRecord, decision: PromotionDecision, *, ledger: Ledger, log: MoveLog, champion: int | None, who: str
) -> None:
    """Moves the aliases of a registered model by a decision, and records the decision.

    A candidate that does not become champion raises an alarm.
    """
    apply(ledger, candidate, decision, log=log, champion=champion, who=who, sound=sound)
