"""Keeps production models up to date, a night at a time: trains those that are due, and promotes what is better."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from ringmaster.flows.examples import located
from ringmaster.flows.faults import RetrainingFailed
from ringmaster.flows.flow_runs import cancel_batches, ended
from ringmaster.flows.nights.choosing import choose_jobs
from ringmaster.flows.nights.closing import close
from ringmaster.flows.nights.judging import interrupted, judge_all
from ringmaster.flows.nights.looking import look
from ringmaster.flows.nights.night import Night, open_night
from ringmaster.flows.nights.training import train
from ringmaster.flows.run_names import named
from ringmaster.flows.views import current_view
from ringmaster.tasks.retraining.nights import INTERRUPTED, NightRecord
from ringmaster.tasks.retraining.production import load_production
from ringmaster.tasks.retraining.report import FAILED


@flow(
    name="retrain-daily",
    flow_run_name=named("retrain {file}"),
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def retrain_daily(
    file: str = "examples/retraining.yaml",
    night: str | None = None,
    force: list[str] = [],  # noqa: B006 - never changed; what the form starts with
    seed: Annotated[int, Field(ge=0)] = 0,
) -> dict[str, Any]:
    """Trains the production models that are due, in one batch that fits in the night, and keeps the better ones.

    Args:
        file: Path of the file that lists the models, their data and how they are trained.
        night: Date of the night, such as 2026-11-20; the one of now, or of the schedule, where it is left out.
        force: Names of models that are trained in any case, also where the night is over already.
        seed: Of the planner; on a pool the executor has its own.
    """
    production = load_production(located(file))
    with open_night(production, night=night, force=force) as opened:
        answer = _known(opened) if isinstance(opened, NightRecord) else _held(opened, seed=seed)
    failed = [f"{model['model']} ({model['why']})" for model in answer["models"] if model["outcome"] == FAILED]
    message = f"{answer['status']}: {', '.join(failed)}"
    return ended(answer, status=answer["status"], message=message, failure=RetrainingFailed)


def _held(night: Night, *, seed: int) -> dict[str, Any]:
    """A whole night, or what is left of one that was cut short."""
    checks = look(night)
    chosen = choose_jobs(night, checks)
    result = train(night, checks, chosen, seed=seed)
    if result is not None and result.status == INTERRUPTED:
        verdicts = interrupted(night, checks, result)
    else:
        verdicts = judge_all(night, checks, chosen, result)
    return close(night, verdicts, chosen=chosen, result=result)


def _known(record: NightRecord) -> dict[str, Any]:
    """The answer of a night in which nothing is left to do: as it was, or that a later one has been begun since."""
    if record.is_over:
        current_view.get().notice(f"the night {record.night} of {record.name} is over: nothing is trained twice")
        return {**record.content["answer"], "was_over": True}
    said = f"the night {record.night} is passed over: {record.content['later']} was begun already"
    current_view.get().notice(said)
    return {
        "name": record.name,
        "night": record.night,
        "status": "done",
        "models": [],
        "num_trials": 0,
        "cost": 0.0,
        "unit": "device-hours",
        "missed": 0,
        "batch": None,
        "report": f"# Retraining of {record.name}, {record.night}\n\n{said[0].upper()}{said[1:]}.\n",
        "faults": [],
    }
