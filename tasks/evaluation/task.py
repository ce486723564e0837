"""Prefect tasks for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.examination import Examined, examine
from ringmaster.tasks.evaluation.stage import Evaluated, Evaluation, evaluate_models
from ringmaster.tasks.profiling.trials import TrialEnvironment


@task(name="evaluate", retries=1, cache_policy=NO_CACHE, persist_result=False)
def evaluate_task(evaluations: Sequence[Evaluation], *, environment: TrialEnvironment, device: Device) -> Evaluated:
    """Evaluates models on the held-out data of their jobs."""
    return evaluate_models(evaluations, environment=environment, device=device)


@task(name="examine", task_run_name="examine {name}", retries=1, cache_policy=NO_CACHE, persist_result=False)
def examine_task(name: str, **asked: Any) -> Examined:
    """Examines a model; `asked` are the arguments of `examination.examine`."""
    model = asked.pop("model")
    return examine(model, **asked)
