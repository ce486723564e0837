"""Prefect tasks for evaluation."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.tasks.evaluation.examination import ExaminationResult, examine


@task(name="examine", task_run_name="examine {name}", retries=1, cache_policy=NO_CACHE, persist_result=False)
def examine_task(name: str, **asked: Any) -> ExaminationResult:
    """Examines a model; `asked` are the arguments of `examination.examine`."""
    model = asked.pop("model")
    return examine(model, **asked)
