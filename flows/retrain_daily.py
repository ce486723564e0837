"""Retrains production models daily: trains the models that are due, and promotes the better ones."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import Field

from ringmaster.errors import LedgerError, RetrainingFailed
from ringmaster.flows.batch.embedded_prefect import FlowWithServer
from ringmaster.flows.batch.flow_runs import cancel_batches, final_state, for_prefect, run_name_template
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.caller import Caller
from ringmaster.flows.form_fields import HIDDEN, titled
from ringmaster.flows.retraining.compare_models import compare_models, interrupted
from ringmaster.flows.retraining.new_data_rules import new_data_rules
from ringmaster.flows.retraining.retraining_run import RetrainingRun, open_run
from ringmaster.flows.retraining.select_models import SelectedModels, inspect_models, select_models
from ringmaster.flows.retraining.train_models import train_models
from ringmaster.flows.settings import resolve_path
from ringmaster.model_lineage import MetricPoint
from ringmaster.tasks.alarms import retraining_failed
from ringmaster.tasks.alarms.prefect_events import emit_alarm
from ringmaster.tasks.planning.objectives import HOUR_S
from ringmaster.tasks.retraining import report as webhook
from ringmaster.tasks.retraining.production import load_production
from ringmaster.tasks.retraining.promotion import version_of
from ringmaster.tasks.retraining.report import (
    FAILED,
    LEFT,
    ModelResult,
    RetrainingReport,
    cost_of_batch,
    money_of_batch,
)
from ringmaster.tasks.retraining.runs import RetrainingStatus, RunRecord, drop_others
from ringmaster.tasks.retraining.selection import IN_MONEY, day_text, num_missed, unit_of
from ringmaster.text import Notice


@FlowWithServer.of
@flow(
    name="retrain-daily",
    flow_run_name=run_name_template("retrain {file}"),
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def retrain_daily(
    file: Annotated[str, titled("Retraining file")] = "examples/retraining.yaml",
    night: Annotated[str | None, titled("Date")] = None,
    force: Annotated[list[str], titled("Models to train in any case")] = [],  # noqa: B006 - never changed
    seed: Annotated[int, Field(ge=0), HIDDEN] = 0,
    caller: Annotated[Any, HIDDEN] = None,
) -> dict[str, Any]:
    """Trains the production models that are due, in one batch within the time window, and promotes the better ones.

    Args:
        file: The path of the file that lists the models, their data and how they are trained.
        night: The date of the retraining run, such as 2026-11-20. By default, it is the scheduled date, or today.
        force: The names of models that are trained even if they are not due, or if the run of that date is over.
        seed: The seed of the planner. A pool's controller uses its own seed.
        caller: The `Caller` of the flow, in Python.
    """
    production = load_production(resolve_path(file))
    caller = caller or Caller()
    with open_run(production, run_date=night, force=force, caller=caller) as opened:
        answer = _known(opened, caller.view.notice) if isinstance(opened, RunRecord) else _perform(opened, seed=seed)
    failed = [f"{model['model']} ({model['why']})" for model in answer["models"] if model["outcome"] == FAILED]
    message = f"{answer['status']}: {', '.join(failed) or answer['report'].splitlines()[-1]}"
    if answer["status"] == RetrainingStatus.FAILED and not answer.get("was_over"):
        emit_alarm(retraining_failed(answer["name"], run_date=answer["night"], message=message))
    return final_state(answer, status=answer["status"], message=message, failure=RetrainingFailed)


def _perform(run: RetrainingRun, *, seed: int) -> dict[str, Any]:
    """Performs a whole retraining run, or the rest of one that was interrupted."""
    checks = inspect_models(run)
    chosen = select_models(run, checks)
    result = train_models(run, checks, chosen, seed=seed)
    if result is not None and result.status == RetrainingStatus.INTERRUPTED:
        verdicts = interrupted(run, checks, result)
    else:
        verdicts = compare_models(run, checks, chosen, result, seed=seed)
    return report(run, verdicts, chosen=chosen, result=result)


def _known(record: RunRecord, notice: Notice) -> dict[str, Any]:
    """Returns the stored answer of a retraining run that is over, or an empty one of a run that is not performed."""
    if record.is_over:
        notice(
            f"the retraining run {record.run_date} of {record.name} is over: nothing is trained twice. To train "
            "a model again, name it by `--force`"
        )
        return {**record.content["answer"], "was_over": True}
    status = RetrainingStatus.FAILED
    if record.status == RetrainingStatus.LATE:
        text = (
            f"the retraining run {record.run_date} trains nothing: its deadline, "
            f"{day_text(record.content['deadline_s'])} UTC, has passed. To fix: begin the next run now, by "
            f"`--night {record.content['next']}` or the field Date, or move night.deadline in the file"
        )
    elif record.status == RetrainingStatus.AHEAD:
        later = record.content["later"]
        text = (
            f"the retraining run {record.run_date} trains nothing: the run {later} was begun already, and is still to "
            f"come by this machine's clock ({day_text(record.content['now_s'])} UTC). To fix: set the clock or, if it "
            f"was wrong then, forget that run by `--forget {later[:10]}`"
        )
    else:
        status = RetrainingStatus.SKIPPED
        text = f"the retraining run {record.run_date} is skipped: {record.content['later']} was begun already"
    notice(text)
    return {
        "name": record.name,
        "night": record.run_date,
        "status": status,
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


KEEP_RUNS = 14  # runs whose copies of files are stored


def report(
    run: RetrainingRun,
    model_results: Sequence[ModelResult],
    *,
    chosen: SelectedModels,
    result: BatchResult | None,
) -> dict[str, Any]:
    """Writes the report, and stores the run's answer. What could not be recorded or delivered is among its faults."""
    report, notice = _report(run, model_results, chosen, result), run.caller.view.notice
    page = report.markdown()
    text = f"{run.record.run_date}: {report.headline()}"
    for_prefect(lambda: create_markdown_artifact(key="retraining", markdown=page, description=text), notice)
    has_failed = any(model_result.outcome == FAILED for model_result in model_results)
    status = RetrainingStatus.FAILED if has_failed else RetrainingStatus.DONE
    if result is not None and result.status == RetrainingStatus.INTERRUPTED:
        status = RetrainingStatus.INTERRUPTED
    answer = {
        "name": run.production.name,
        "night": run.record.run_date,
        "status": status,
        "models": [model_result.to_json() for model_result in model_results],
        "num_trials": report.num_trials,
        "cost": report.cost,
        "unit": report.unit,
        "missed": report.missed,
        "batch": None if result is None else result.to_json(),
        "report": report.markdown(with_picture=False),
    }
    if status == RetrainingStatus.INTERRUPTED:
        run.save(status=RetrainingStatus.INTERRUPTED)
        return {**answer, "faults": []}
    faults = [f"not recorded: {fault}" for fault in (() if result is None else result.faults)]
    faults += [*_recorded(run, report, status), *_posted(run, report, answer)]
    for fault in faults:
        notice(fault)
    waited, before = run.left_by_earlier("waited"), run.left_by_earlier("champions")
    now = {name: s.champion for name, s in run.standings().items()}
    champions = {
        model.name: version_of(champion)
        for model in run.production.models
        if (champion := now[model.registered_name]) is not None
    }
    answer = {**answer, "faults": faults}
    run.save(
        status=status,
        answer=answer,
        # A deleted model stays in the list, so that it is not trained again without a request.
        champions={**before, **champions},
        waited={
            **{name: number for name, number in waited.items() if name not in {v.model for v in model_results}},
            **{v.model: waited.get(v.model, 0) + 1 for v in model_results if v.outcome == LEFT},
        },
    )
    # Copies of files that no recent run has read are deleted.
    late = run.runs.every(run.production.name)[-KEEP_RUNS:]
    kept = [path for record in late for seen in record.content.get("looked", {}).values() for path in seen["copies"]]
    drop_others(run.folder / "data", keep=kept)
    return answer


def _report(
    run: RetrainingRun, model_results: Sequence[ModelResult], chosen: SelectedModels, result: BatchResult | None
) -> RetrainingReport:
    production = run.production
    price = production.entry.night.price_per_device_hour
    batch = None if result is None else result.to_json()
    num_devices = len(run.node_context.cluster.devices)
    measured = chosen.profiling_s * num_devices * price / HOUR_S if chosen.num_trials else 0.0
    return RetrainingReport(
        name=production.name,
        run_date=run.record.run_date,
        model_results=tuple(model_results),
        began_s=run.record.began_s,
        deadline_s=run.deadline_s,
        missed=num_missed(run.date, None if run.last is None else run.last.run_date[:10]),
        batch=batch,
        plan=chosen.plan,
        svg=chosen.svg,
        gains=tuple(chosen.gains),
        cost=measured
        + run.content.get("children_cost", 0.0)
        + (0.0 if batch is None else cost_of_batch(batch, price_per_device_hour=price)),
        unit=unit_of(price) if batch is None or money_of_batch(batch) is None else IN_MONEY,
        budget=production.entry.night.budget,
        num_trials=chosen.num_trials + (0 if result is None else result.num_trials),
        profiling_s=chosen.profiling_s,
        was_cut_short=result is None and "training" in run.content,
        left={name: why for name, why in chosen.left.items() if chosen.trains(name)},
    )


def _recorded(run: RetrainingRun, report: RetrainingReport, status: str) -> list[str]:
    """Records the report as an MLflow run of its own; returns why that failed."""
    ledger, name = run.ledger, f"{report.name} {report.run_date}"
    try:
        run_id = ledger.start_batch(name, batch=report.name, params={"night": report.run_date}, key=f"night {name}")
        ledger.set_tags(run_id, {"ringmaster.type": "night"})
        ledger.write_text(run_id, "report.md", report.markdown(with_picture=False))
        ledger.write_json(run_id, "report.json", report.to_json())
        if report.svg:
            ledger.write_svg(run_id, "plan.svg", report.svg)
        ledger.write_table(run_id, "models.json", [model_result.to_json() for model_result in report.model_results])
        ledger.log_metrics(run_id, [MetricPoint(name, float(value)) for name, value in report.figures().items()])
        ledger.set_note(run_id, report.markdown(with_picture=False))
        ledger.finish_run(run_id, "FINISHED" if status == RetrainingStatus.DONE else "FAILED")
        for rule in new_data_rules():
            rule.record(run)
    except LedgerError as error:
        return [f"the report is not in MLflow: {error}"]
    return []


def _posted(run: RetrainingRun, report: RetrainingReport, answer: Mapping[str, Any]) -> list[str]:
    """Posts the report to the webhook, if there is one; returns why that failed."""
    if run.production.entry.night.webhook is None:
        return []
    try:
        url = webhook.address_of(run.production.entry.night.webhook)
    except ValueError as error:
        return [str(error)]
    key = f"{report.name} {report.run_date}"
    text = f"Retraining of {report.name}, {report.run_date}: {report.headline()}"
    content = {"text": text, "status": answer["status"], **report.to_json(), "report": answer["report"]}
    fault = webhook.post(url, content, key=key, waits_s=webhook.WAITS_S)
    return [f"the report was not posted: {fault}"] if fault else []
