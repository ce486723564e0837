"""The end of a night: its report in Prefect, in MLflow and at a webhook, and what the next night needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_markdown_artifact

from ringmaster.flows.nights.choosing import Chosen
from ringmaster.flows.nights.night import Night
from ringmaster.flows.result import BatchResult
from ringmaster.flows.views import current_view
from ringmaster.flows.waiting import for_prefect
from ringmaster.model_lineage import LedgerError, MetricPoint
from ringmaster.tasks.planning.terms import HOUR_S
from ringmaster.tasks.promotion.stage import version_of
from ringmaster.tasks.retraining import webhook
from ringmaster.tasks.retraining.choosing import unit_of
from ringmaster.tasks.retraining.dates import num_missed
from ringmaster.tasks.retraining.frozen import drop_others
from ringmaster.tasks.retraining.nights import DONE, FAILED, INTERRUPTED
from ringmaster.tasks.retraining.report import FAILED as MODEL_FAILED
from ringmaster.tasks.retraining.report import LEFT, NightReport, Verdict, cost_of_batch

KEEP_NIGHTS = 14  # whose copies of files are kept


def close(
    night: Night,
    verdicts: Sequence[Verdict],
    *,
    chosen: Chosen,
    result: BatchResult | None,
) -> dict[str, Any]:
    """Writes the report, and keeps the night's answer. A report that cannot be delivered is told, and fails nothing."""
    report = _report(night, verdicts, chosen, result)
    page = report.markdown()
    said = f"{night.record.night}: {report.headline()}"
    for_prefect(lambda: create_markdown_artifact(key="retraining", markdown=page, description=said))
    status = _status(verdicts, result)
    answer = {
        "name": night.production.name,
        "night": night.record.night,
        "status": status,
        "models": [verdict.to_json() for verdict in verdicts],
        "num_trials": report.num_trials,
        "cost": report.cost,
        "unit": report.unit,
        "missed": report.missed,
        "batch": None if result is None else result.to_json(),
        "report": report.markdown(with_picture=False),
    }
    if status == INTERRUPTED:
        night.save(status=INTERRUPTED)
        return {**answer, "faults": []}
    faults = [*_recorded(night, report, status), *_posted(night, report, answer)]
    for fault in faults:
        current_view.get().notice(fault)
    waited, before = night.left_by_earlier("waited"), night.left_by_earlier("champions")
    now = {name: s.champion for name, s in night.standings().items()}
    champions = {
        model.name: version_of(champion)
        for model in night.production.models
        if (champion := now[model.registered_name]) is not None
    }
    answer = {**answer, "faults": faults}
    night.save(
        status=status,
        answer=answer,
        # A model that was deleted stays known, so that it is not brought back unasked.
        champions={**before, **champions},
        waited={
            **{name: number for name, number in waited.items() if name not in {v.model for v in verdicts}},
            **{v.model: waited.get(v.model, 0) + 1 for v in verdicts if v.outcome == LEFT},
        },
    )
    _tidy(night)
    return answer


def _report(night: Night, verdicts: Sequence[Verdict], chosen: Chosen, result: BatchResult | None) -> NightReport:
    production = night.production
    price = production.price_per_device_hour
    batch = None if result is None else result.to_json()
    num_devices = len(night.bench.cluster.devices)
    measured = chosen.profiling_s * num_devices * price / HOUR_S if chosen.num_trials else 0.0
    return NightReport(
        name=production.name,
        night=night.record.night,
        verdicts=tuple(verdicts),
        began_s=night.record.began_s,
        deadline_s=night.deadline_s,
        missed=num_missed(night.date, None if night.last is None else night.last.night[:10]),
        batch=batch,
        plan=chosen.plan,
        svg=chosen.svg,
        cost=measured + (0.0 if batch is None else cost_of_batch(batch, price_per_device_hour=price)),
        unit=unit_of(price),
        budget=production.budget,
        num_trials=chosen.num_trials + (0 if result is None else result.num_trials),
        profiling_s=chosen.profiling_s,
        was_cut_short=result is None and "training" in night.content,
        left={name: why for name, why in chosen.left.items() if chosen.trains(name)},
    )


def _status(verdicts: Sequence[Verdict], result: BatchResult | None) -> str:
    if result is not None and result.status == INTERRUPTED:
        return INTERRUPTED
    return FAILED if any(verdict.outcome == MODEL_FAILED for verdict in verdicts) else DONE


def _recorded(night: Night, report: NightReport, status: str) -> list[str]:
    """The report as a run of its own in MLflow; what kept it from there."""
    ledger, name = night.ledger, f"{report.name} {report.night}"
    try:
        run_id = ledger.start_batch(name, params={"night": report.night}, key=f"night {name}")
        ledger.set_tags(run_id, {"ringmaster.type": "night"})
        ledger.write_text(run_id, "report.md", report.markdown(with_picture=False))
        ledger.write_json(run_id, "report.json", report.to_json())
        if report.svg:
            ledger.write_svg(run_id, "plan.svg", report.svg)
        ledger.write_table(run_id, "models.json", [verdict.to_json() for verdict in report.verdicts])
        ledger.log_metrics(run_id, [MetricPoint(name, float(value)) for name, value in report.figures().items()])
        ledger.set_note(run_id, report.markdown(with_picture=False))
        ledger.finish_run(run_id, "FINISHED" if status == DONE else "FAILED")
    except LedgerError as error:
        return [f"the report is not in MLflow: {error}"]
    return []


def _posted(night: Night, report: NightReport, answer: Mapping[str, Any]) -> list[str]:
    """Has the webhook told, where there is one; why it was not."""
    if night.production.webhook is None:
        return []
    try:
        url = webhook.address_of(night.production.webhook)
    except ValueError as error:
        return [str(error)]
    key = f"{report.name} {report.night}"
    text = f"Retraining of {report.name}, {report.night}: {report.headline()}"
    content = {"text": text, "status": answer["status"], **report.to_json(), "report": answer["report"]}
    fault = webhook.post(url, content, key=key, waits_s=webhook.WAITS_S)
    return [f"the report was not posted: {fault}"] if fault else []


def _tidy(night: Night) -> None:
    """Drops copies of files that no night of late has read."""
    late = night.nights.every(night.production.name)[-KEEP_NIGHTS:]
    kept = [path for record in late for seen in record.content.get("looked", {}).values() for path in seen["copies"]]
    drop_others(night.folder / "data", keep=kept)
