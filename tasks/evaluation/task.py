"""Prefect tasks for evaluation."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.tasks.evaluation.examination import ExaminationRequest, ExaminationResult, examine


@task(name="examine", task_run_name="examine {name}", retries=1, cache_policy=NO_CACHE, persist_result=False)
def examine_task(name: str, model: Path, request: ExaminationRequest) -> ExaminationResult:
    """Examines the model in a folder. name: of the model, for the name of the task's run."""
    return examine(model, request)
