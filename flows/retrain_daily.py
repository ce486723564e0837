"""Retrains production models daily: trains the models that are due, and promotes the better ones."""

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from ringmaster.errors import RetrainingFailed
from ringmaster.flows.batch.batch_input import HIDDEN, titled
from ringmaster.flows.batch.flow_runs import LocalFlow, cancel_batches, ended, named
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.retraining.compare_models import compare_models, interrupted
from ringmaster.flows.retraining.inspect_models import inspect_models
from ringmaster.flows.retraining.report import report
from ringmaster.flows.retraining.retraining_run import RetrainingRun, open_run
from ringmaster.flows.retraining.select_models import select_models
from ringmaster.flows.retraining.train_models import train_models
from ringmaster.flows.settings import located
from ringmaster.tasks.retraining.production import load_production
from ringmaster.tasks.retraining.report import FAILED
from ringmaster.tasks.retraining.runs import RetrainingStatus, RunRecord
from ringmaster.tasks.retraining.selection import day_text


@LocalFlow.of
@flow(
    name="retrain-daily",
    flow_run_name=named("retrain {file}"),
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def retrain_daily(
    file: Annotated[str, titled("Retraining file")] = "examples/retraining.yaml",
    night: Annotated[str | None, titled("Date")] = None,
    force: Annotated[list[str], titled("Models to train in any case")] = [],  # noqa: B006 - never changed
    seed: Annotated[int, Field(ge=0), HIDDEN] = 0,
) -> dict[str, Any]:
    """Trains the production models that are due, in one batch within the time window, and promotes the better ones.

    Args:
        file: The path of the file that lists the models, their data and how they are trained.
        night: The date of the retraining run, such as 2026-11-20. By default, it is the scheduled date, or today.
        force: The names of models that are trained even if they are not due, or if the run of that date is over.
        seed: The seed of the planner. A pool's controller uses its own seed.
    """
    production = load_production(located(file))
    with open_run(production, run_date=night, force=force) as opened:
        answer = _known(opened) if isinstance(opened, RunRecord) else _perform(opened, seed=seed)
    failed = [f"{model['model']} ({model['why']})" for model in answer["models"] if model["outcome"] == FAILED]
    message = f"{answer['status']}: {', '.join(failed) or answer['report'].splitlines()[-1]}"
    return ended(answer, status=answer["status"], message=message, failure=RetrainingFailed)


def _perform(run: RetrainingRun, *, seed: int) -> dict[str, Any]:
    """Performs a whole retraining run, or the rest of one that was interrupted."""
    checks = inspect_models(run)
    chosen = select_models(run, checks)
    result = train_models(run, checks, chosen, seed=seed)
    if result is not None and result.status == RetrainingStatus.INTERRUPTED:
        verdicts = interrupted(run, checks, result)
    else:
        verdicts = compare_models(run, checks, chosen, result)
    return report(run, verdicts, chosen=chosen, result=result)


def _known(record: RunRecord) -> dict[str, Any]:
    """Returns the stored answer of a retraining run that is over, or an empty one of a run that is not performed."""
    if record.is_over:
        current_view.get().notice(
            f"the retraining run {record.run_date} of {record.name} is over: nothing is trained twice"
        )
        return {**record.content["answer"], "was_over": True}
    if is_late := record.status == RetrainingStatus.LATE:
        text = (
            f"the retraining run {record.run_date} trains nothing: its deadline, "
            f"{day_text(record.content['deadline_s'])} UTC, has passed. To fix: begin the next run now, by "
            f"`--night {record.content['next']}` or the field Date, or move night.deadline in the file"
        )
    else:
        text = f"the retraining run {record.run_date} is skipped: {record.content['later']} was begun already"
    current_view.get().notice(text)
    return {
        "name": record.name,
        "night": record.run_date,
        "status": "failed" if is_late else "done",
        "was_skipped": True,
        "models": [],
        "num_trials": 0,
        "cost": 0.0,
        "unit": "device-hours",
        "missed": 0,
        "batch": None,
        "report": f"# Retraining of {record.name}, {record.run_date}\n\n{text[0].upper()}{text[1:]}.\n",
        "faults": [],
    }
