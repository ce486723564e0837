"""What retraining runs measure of a champion, by which they decide whether retraining it pays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.features.retraining_value.batch import ValueKeys
from ringmaster.features.retraining_value.drawing import draw_value
from ringmaster.features.retraining_value.value import (
    MetricMeasurement,
    RunObservation,
    ValueDecision,
    ValueTerms,
    decide,
)
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.model_lineage.ledger.families import final_fault
from ringmaster.model_lineage.records import KEPT, PROMOTED
from ringmaster.tasks.evaluation.examination import ExaminationRequest, examine
from ringmaster.tasks.evaluation.suite import Suite
from ringmaster.tasks.retraining.policy import PLAIN_RULE
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.tasks.retraining.report import cost_of_batch
from ringmaster.tasks.retraining.runs import RunRecord
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.scoring.scored_rows import TrainingData

PICTURE = "retraining/value.svg"
"""The artifact of the run that made a champion."""
MAX_METRIC = 1e100
"""The greatest absolute value of a metric by which is decided: the squares of all measurements are still finite."""


def value_rules(model: ProductionModel) -> ValueKeys | None:
    """Returns what a model's rules say of the value of retraining; None if they do not ask for it."""
    section = getattr(model.rules, ValueKeys.key)
    return None if section is None else from_json(ValueKeys, section.model_dump())


@dataclass(frozen=True, kw_only=True)
class MeasuredChampion:
    """The metric of a champion on the data of a run. stderr: its standard error, by the rows."""

    version: int
    metric: str
    value: float
    stderr: float


def measure_champion(
    run: RetrainingRun, model: ProductionModel, folder: Path, *, version: int, data: Mapping[str, Any]
) -> MeasuredChampion:
    """Returns the metric of a champion on the rows on which versions are compared.

    Those of `compare_on` that a candidate of this run would be trained on are left out, as in the comparison: rows that
    a champion was trained on show nothing of how it does on others.

    folder: of the champion's files.
    data: the JSON form of the prepared data, by job.
    Raises ValueError if it cannot be measured.
    """
    job, trained_on = model.job, None
    if model.compare_on is not None:
        job, trained_on = model.compare_on, TrainingData(spec=model.job.data, prepared=data[model.name])
    if job.name not in data:
        raise ValueError(f"the data of {job.name} cannot be read")
    policy = run.production.policy
    rule = policy or PLAIN_RULE
    metric = rule.metric or model.metric
    with run.device() as device:
        result = examine(
            folder,
            ExaminationRequest(
                job=job,
                data=data[job.name],
                trained_on=trained_on,
                suite=Suite(name="metrics"),
                metrics=[metric],
                max_rows=rule.max_rows if policy is None or model.compares_on_all else policy.num_rows,
                is_whole=model.compares_on_all,
                environment=run.node_context.environment,
                device=device,
                folder=rule.folder,
            ),
        )
    if not result.measured:
        raise ValueError(f"the champion cannot be measured: {'; '.join(result.faults) or 'there are no rows'}")
    line = result.measured[0]
    if not all(abs(value) <= MAX_METRIC for value in (line.value, line.low, line.high)):
        raise ValueError(f"the champion's {metric} is {line.value} on {line.num_rows} rows")
    stderr = (line.high - line.low) / 2 / NormalDist().inv_cdf((1 + line.level) / 2)
    return MeasuredChampion(version=version, metric=metric, value=line.value, stderr=stderr)


@dataclass
class ChampionHistory:
    """What runs have measured of a model since measuring began, and what its last training cost.

    observations: of the runs, in their order, of one metric.
    price: of the last training that ended; None if no run has trained it.
    """

    observations: list[RunObservation] = field(default_factory=list)
    price: float | None = None
    _champion: int | None = None
    _metric: str = ""

    def add(self, model: ProductionModel, record: RunRecord, *, price_per_device_hour: float) -> None:
        """Adds what is stored of a run. Those of earlier releases have measured nothing."""
        looked = record.content.get("looked", {}).get(model.name, {})
        measured = None if looked.get("measured") is None else from_json(MeasuredChampion, looked["measured"])
        if measured is not None:
            if (measured.version, measured.metric) != (self._champion, self._metric):
                # A person has chosen the champion, or another metric counts: what is known is of others.
                self.observations.clear()
            self._champion, self._metric = measured.version, measured.metric
        verdict = record.content.get("verdicts", {}).get(model.name, {})
        is_promoted = verdict.get("outcome") == PROMOTED
        if verdict.get("metric", self._metric) != self._metric:
            # It was decided by another metric than was measured last: the values cannot be compared.
            if is_promoted:
                self.observations.clear()
                measured = None
            else:
                verdict = {}
        if is_promoted:
            self._champion, self._metric = verdict["candidate_version"], verdict["metric"]
        seen = _observation(record.run_date[:10], measured, verdict, window_days=looked.get("window_days"))
        if is_promoted and seen.candidate is None:
            self.observations.clear()  # the run died before it had stored what it measured of its new champion
        elif seen.champion is not None or (seen.candidate is not None and (is_promoted or self.observations)):
            self.observations.append(seen)
        names = {job.name for job in model.trained_jobs}
        result = record.content.get("result") or {"jobs": ()}
        if any(row["status"] == JobStatus.DONE for row in result["jobs"] if row["name"] in names):
            cost = cost_of_batch(result, price_per_device_hour=price_per_device_hour, jobs=names)
            self.price = cost or self.price


@dataclass(frozen=True, kw_only=True)
class ChampionValue:
    """What is known of the value of retraining a model. terms: None if the price of a training is not known."""

    observations: tuple[RunObservation, ...]
    terms: ValueTerms | None

    @property
    def decision(self) -> ValueDecision | None:
        """Whether retraining pays; None if that cannot be decided yet."""
        return None if self.terms is None else decide(self.observations, self.terms)


def value_of(run: RetrainingRun, model: ProductionModel, records: Iterable[RunRecord]) -> ChampionValue:
    """Returns the value of retraining a model by what some runs have measured and paid."""
    history, rule = ChampionHistory(), value_rules(model)
    for record in records:
        history.add(model, record, price_per_device_hour=run.production.entry.night.price_per_device_hour)
    observations = tuple(history.observations)
    if rule is None or not (price := rule.price or history.price):
        return ChampionValue(observations=observations, terms=None)
    windows = tuple(sorted(rule.windows))
    terms = ValueTerms(price=price, worth=rule.worth, horizon_days=rule.horizon_days, windows=windows)
    return ChampionValue(observations=observations, terms=terms)


def earlier_runs(run: RetrainingRun) -> list[RunRecord]:
    """Returns the runs before this one."""
    return [record for record in run.runs.every(run.production.name) if record.run_date < run.record.run_date]


def window_of(run: RetrainingRun, model: ProductionModel) -> int | None:
    """Returns the days of dated files that a run reads: those of the file, or the ones chosen by earlier runs."""
    rule = value_rules(model)
    if rule is None or not rule.windows:
        return model.window_days
    decision = value_of(run, model, earlier_runs(run)).decision
    return max(rule.windows) if decision is None else decision.window_days


def value_now(run: RetrainingRun, model: ProductionModel, measured: MeasuredChampion) -> ChampionValue:
    """Returns the value after the measurement of this run, of a training on the days that the run has read.

    Where the measurement shows a change, the next run chooses other days.
    """
    content = {"looked": {model.name: {"measured": to_json(measured)}}}
    value = value_of(run, model, [*earlier_runs(run), replace(run.record, content=content)])
    if value.terms is None or model.window_days is None or not value.terms.windows:
        return value
    return replace(value, terms=replace(value.terms, windows=(model.window_days,)))


def record_pictures(run: RetrainingRun) -> None:
    """Draws the decisions of each model that is retrained when it pays, on the runs of its champion in MLflow."""
    models = [model for model in run.production.models if value_rules(model) is not None]
    standings = run.standings() if models else {}
    for model in models:
        champion = standings[model.registered_name].champion
        value = value_of(run, model, [*earlier_runs(run), replace(run.record, content=run.content)])
        was_measured = any(each.champion is not None for each in value.observations)
        if champion is None or champion.run_id is None or value.terms is None or not was_measured:
            continue
        title = f"{model.registered_name}: when retraining pays"
        metric = (run.production.policy and run.production.policy.metric) or model.metric
        label = f"-{metric}" if metric_named(metric).higher_is_better else metric
        svg = draw_value(title, label, value.observations, value.terms)
        if fault := final_fault(run.ledger.write_svg, champion.run_id, PICTURE, svg):
            run.caller.view.notice(f"the picture of {model.registered_name} is not recorded: {fault}")


def _observation(
    run_date: str, measured: MeasuredChampion | None, verdict: Mapping[str, Any], *, window_days: int | None
) -> RunObservation:
    """Returns what a run has measured. verdict: the JSON form of its result of the model."""
    day, candidate = date.fromisoformat(run_date).toordinal(), _candidate_value(measured, verdict)
    metric = verdict.get("metric", "") if measured is None else measured.metric
    sign = -1 if metric and metric_named(metric).higher_is_better else 1
    stderr = 0.0 if measured is None else measured.stderr
    return RunObservation(
        champion=None if measured is None else MetricMeasurement(day=day, value=sign * measured.value, stderr=stderr),
        candidate=None if candidate is None else MetricMeasurement(day=day, value=sign * candidate, stderr=stderr),
        is_promoted=verdict.get("outcome") == PROMOTED,
        window_days=window_days,
    )


def _candidate_value(measured: MeasuredChampion | None, verdict: Mapping[str, Any]) -> float | None:
    """Returns the metric of a candidate that was decided about, as if it was measured on the champion's rows.

    Both were compared on the same rows, of which those are left out that the candidate was trained on.
    """
    value: float | None = verdict.get("candidate_value")
    if value is None or not abs(value) <= MAX_METRIC or verdict.get("outcome") not in (PROMOTED, KEPT):
        return None
    if verdict.get("is_waiting"):
        return None
    other = verdict.get("champion_value")
    if measured is None or other is None:
        return value
    is_same = (verdict.get("champion_version"), verdict.get("metric")) == (measured.version, measured.metric)
    return measured.value + value - other if is_same else value
