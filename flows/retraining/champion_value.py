"""What retraining runs measure of a champion, by which they decide whether retraining it pays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ringmaster.codec import from_json
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.model_lineage.records import PROMOTED
from ringmaster.tasks.evaluation.examination import ExaminationRequest, examine
from ringmaster.tasks.evaluation.suite import Suite
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.tasks.retraining.report import cost_of_batch
from ringmaster.tasks.retraining.runs import RunRecord
from ringmaster.tasks.retraining.value import Measurement, RunObservation, ValueDecision, ValueTerms, decide
from ringmaster.tasks.retraining.value_drawing import draw_value
from ringmaster.techniques.metric import metric_named

PICTURE = "retraining/value.svg"
"""The artifact of the run that made a champion."""


@dataclass(frozen=True, kw_only=True)
class MeasuredChampion:
    """The metric of a champion on the data of a run. stderr: its standard error, by the rows."""

    version: int
    metric: str
    value: float
    stderr: float


@dataclass(frozen=True, kw_only=True)
class ChampionValue:
    """What is known of the value of retraining a model, at a run.

    observations: of all runs since measuring began, in their order.
    terms: the prices; None if the price of a training is not known.
    """

    observations: tuple[RunObservation, ...]
    terms: ValueTerms | None

    @property
    def decision(self) -> ValueDecision | None:
        """Whether retraining pays; None if that cannot be decided yet."""
        return None if self.terms is None else decide(self.observations, self.terms)


def measure_champion(
    run: RetrainingRun, model: ProductionModel, folder: Path, *, version: int, data: Mapping[str, Any]
) -> MeasuredChampion:
    """Returns the metric of a champion on the rows on which versions are compared.

    folder: of the champion's files.
    data: the JSON form of the prepared data.
    Raises ValueError if it cannot be measured.
    """
    policy = run.production.policy
    metric = (policy and policy.metric) or model.metric
    with run.device() as device:
        result = examine(
            folder,
            ExaminationRequest(
                job=model.compare_on or model.job,
                data=data,
                suite=Suite(name="metrics"),
                metrics=[metric],
                is_whole=model.compares_on_all,
                environment=run.node_context.environment,
                device=device,
                folder=run.production.folder,
            ),
        )
    if not result.measured:
        raise ValueError(f"the champion cannot be measured: {'; '.join(result.faults) or 'there are no rows'}")
    line = result.measured[0]
    stderr = (line.high - line.low) / 2 / NormalDist().inv_cdf((1 + line.level) / 2)
    return MeasuredChampion(version=version, metric=metric, value=line.value, stderr=stderr)


def value_before(run: RetrainingRun, model: ProductionModel) -> ChampionValue:
    """Returns the value of retraining a model by what earlier runs have measured and paid."""
    earlier = [record for record in run.runs.every(run.production.name) if record.run_date < run.record.run_date]
    return _value(run, model, earlier)


def value_until(run: RetrainingRun, model: ProductionModel) -> ChampionValue:
    """Returns the value of retraining a model by what runs up to this one have measured and paid."""
    known = [record for record in run.runs.every(run.production.name) if record.run_date <= run.record.run_date]
    return _value(run, model, known)


def _value(run: RetrainingRun, model: ProductionModel, records: Sequence[RunRecord]) -> ChampionValue:
    observations: list[RunObservation] = []
    metric, price, champion = "", None, None
    night = run.production.entry.night
    rule = model.rules.value
    for record in records:
        looked = record.content.get("looked", {}).get(model.name, {})
        verdict = record.content.get("verdicts", {}).get(model.name, {})
        measured = None if looked.get("measured") is None else from_json(MeasuredChampion, looked["measured"])
        if measured is not None and (champion, metric) not in ((None, ""), (measured.version, measured.metric)):
            # Its champion was chosen by a person, or another metric counts now: what was measured before is of another
            # model or unit.
            observations.clear()
        if measured is not None:
            champion, metric = measured.version, measured.metric
        seen = _observation(record.run_date[:10], measured, verdict, window_days=looked.get("window_days"))
        if seen.champion is not None or seen.candidate is not None:
            observations.append(seen)
        if verdict.get("outcome") == PROMOTED:
            champion, metric = verdict["candidate_version"], verdict["metric"]
        rows = [row for row in (record.content.get("result") or {}).get("jobs", ()) if row["name"] == model.name]
        if rows:
            price = cost_of_batch({"jobs": rows}, price_per_device_hour=night.price_per_device_hour)
    if rule is None or not (price := rule.price or price):
        return ChampionValue(observations=tuple(observations), terms=None)
    terms = ValueTerms(
        price=price, worth=rule.worth, horizon_days=rule.horizon_days, windows=tuple(sorted(rule.windows))
    )
    return ChampionValue(observations=tuple(observations), terms=terms)


def window_of(run: RetrainingRun, model: ProductionModel) -> int | None:
    """Returns the days of dated files that a run reads: those of the file, or the ones chosen by earlier runs."""
    rule = model.rules.value
    if rule is None or not rule.windows:
        return model.window_days
    decision = value_before(run, model).decision
    return max(rule.windows) if decision is None else decision.window_days


def with_measured(before: ChampionValue, measured: MeasuredChampion, *, run_date: str) -> ChampionValue:
    """Returns the value after the measurement of this run."""
    now = _observation(run_date, measured, {}, window_days=None)
    return ChampionValue(observations=(*before.observations, now), terms=before.terms)


def record_pictures(run: RetrainingRun) -> None:
    """Draws the decisions of each model that is retrained when it pays, on the runs of its champion in MLflow."""
    for model in run.production.models:
        if model.rules.value is None:
            continue
        champion = run.standings()[model.registered_name].champion
        value = value_until(run, model)
        was_measured = any(each.champion is not None for each in value.observations)
        if champion is None or champion.run_id is None or value.terms is None or not was_measured:
            continue
        title = f"{model.registered_name}: when retraining pays"
        metric = (run.production.policy and run.production.policy.metric) or model.metric
        if metric_named(metric).higher_is_better:
            metric = f"-{metric}"
        run.ledger.write_svg(champion.run_id, PICTURE, draw_value(title, metric, value.observations, value.terms))


def _observation(
    run_date: str,
    measured: MeasuredChampion | None,
    verdict: Mapping[str, Any],
    *,
    window_days: int | None,
) -> RunObservation:
    """Returns what a run has measured. verdict: the JSON form of its result of the model."""
    day, candidate = date.fromisoformat(run_date).toordinal(), verdict.get("candidate_value")
    metric = verdict.get("metric", "") if measured is None else measured.metric
    sign = -1 if metric and metric_named(metric).higher_is_better else 1
    stderr = 0.0 if measured is None else measured.stderr
    return RunObservation(
        champion=None if measured is None else Measurement(day=day, value=sign * measured.value, stderr=stderr),
        candidate=None if candidate is None else Measurement(day=day, value=sign * candidate, stderr=stderr),
        is_promoted=verdict.get("outcome") == PROMOTED,
        window_days=window_days,
    )
