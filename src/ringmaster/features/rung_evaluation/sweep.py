"""`evaluation_error` of early stopping: held-out rows are computed at rungs until it is certain which trials continue.

Each trial is evaluated on a first part of the rows, and rests. Those that are too close to the cut are evaluated on
further rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from ringmaster.codec import from_json, to_json
from ringmaster.features.rung_evaluation.comparison import (
    FIRST_PART,
    EvaluatedRows,
    RowComparison,
    as_part,
    merged,
)
from ringmaster.features.rung_evaluation.row_parts import ENOUGH, PARTS, in_words, interval_of, place_of
from ringmaster.findings import Finding
from ringmaster.tasks.sweeping.early_stopping import (
    OpenPlaces,
    RungComparison,
    StoppingPolicy,
    SweepTrial,
    SweepTrialRecords,
)
from ringmaster.tasks.sweeping.ranking import Metrics, Ranking, Reports
from ringmaster.tasks.sweeping.results import HELD_OUT_ROWS
from ringmaster.tasks.sweeping.sampling import TPE
from ringmaster.techniques import Job
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.metric import METRICS, metric_named
from ringmaster.techniques.processes.gang_events import EvaluationReported, PartialEvaluation

ORDER_SEED = 0  # of the rows of trials
ROWS = "sweep rows "  # with the name of a trial, a fact: the held-out rows that it has computed, by step


@dataclass(frozen=True, kw_only=True)
class RowTrial(SweepTrial):
    """The state of a trial that is evaluated on parts of the rows.

    rows: the held-out rows by step. part: the part of them that was requested last, where it is not computed yet.
    """

    rows: Mapping[int, EvaluatedRows] = field(default_factory=dict)
    part: EvaluationSlice | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the trial has steps left to train up to its goal, or rows to evaluate there."""
        return super().is_under_way or (self.part is not None and not self.has_ended)

    def part_at(self, rung: int) -> EvaluationSlice | None:
        """Returns the part that it computes at a rung."""
        return self.part if self.part is not None and self.part.step == rung else None


@dataclass(frozen=True, kw_only=True)
class ComparisonByRows(RungComparison):
    """The comparison of the trials that have come to a rung, as far as their rows make it certain."""

    rows: RowComparison

    @property
    def estimates(self) -> Mapping[str, float]:
        """The scores of all rows."""
        return self.rows.estimates

    def open_places(
        self, there: Sequence[SweepTrial], *, rung: int, num_kept: int, most: int, is_final: bool, num_free: int
    ) -> OpenPlaces:
        """Returns the trials whose places are not certain, and the rows that are to make them so.

        A trial that computes a part is asked for more before its end, or told to end it, as soon as that is certain.
        """
        order = [trial.name for trial in there if not trial.has_ended_at(rung)]
        further = self.rows.open_parts(order, num_kept=num_kept, is_early=not is_final) if num_kept > 0 else {}
        parts, enough, num_started = dict[str, EvaluationSlice](), dict[str, int](), 0
        for trial in there:
            own = trial.part_at(rung) if isinstance(trial, RowTrial) else None
            if (share := further.get(trial.name)) is None:
                if own is not None:
                    enough[trial.name] = rung
            elif own is not None or is_final or num_started <= num_free:
                part = self.rows.part_up_to(trial.name, share, step=rung, seed=ORDER_SEED)
                if part is not None and (own is None or part.end > own.end):
                    parts[trial.name] = part
                    num_started += own is None
        requests: dict[str, Mapping[str, Any]] = {PARTS: parts, ENOUGH: enough}
        of_features = {key: values for key, values in requests.items() if values}
        if is_final and not further:
            return OpenPlaces(of_features=of_features)
        return OpenPlaces(
            may_be_kept=frozenset(self.rows.open_parts(order, num_kept=most, is_early=True)),
            may_be_beaten=frozenset(self.rows.open_parts(order, num_kept=num_kept, is_early=True)),
            of_features=of_features,
            num_started=num_started,
        )


class RowRecords(SweepTrialRecords):
    """The held-out rows that the trials of a sweep have computed, and the parts of them that were requested."""

    def __init__(
        self, trials: Sequence[str], *, metric: str, fact: Mapping[str, Any], stored: Callable[[str], Any]
    ) -> None:
        self._metric, self._sign = metric, 1.0 if metric_named(metric).higher_is_better else -1.0
        self._parts = {name: from_json(EvaluationSlice, part) for name, part in fact.get("parts", {}).items()}
        self._changed: set[str] = set()  # the trials whose rows are not stored yet
        self.rows: dict[str, dict[int, EvaluatedRows]] = {}  # by trial and step
        for name in trials:
            for at, each in (stored(f"{ROWS}{name}") or {}).items():
                rows = merged(None, from_json(PartialEvaluation, each), sign=self._sign)
                assert rows is not None, "it begins with the first row"
                self.rows.setdefault(name, {})[int(at)] = rows

    def take(self, trial: str, report: EvaluationReported, *, is_known: bool) -> Metrics | None:
        """Adds a part of a trial's rows, unless it is there; other metrics of a part are left out.

        An evaluation of all rows replaces the parts, as where the next gang's technique gives no values of rows.
        """
        known = self.rows.setdefault(trial, {})
        is_part_known = report.step in known
        if report.part is None:
            if known.pop(report.step, None) is not None:
                self._changed.add(trial)
            return super().take(trial, report, is_known=is_known and not is_part_known)
        if is_known and not is_part_known:
            return None
        rows = merged(known.get(report.step), report.part, sign=self._sign)
        if rows is None:  # a report repeated after a crash is equal
            return None
        known[report.step] = rows
        self._changed.add(trial)
        return {self._metric: self._sign * rows.mean}

    def state(self, trial: SweepTrial) -> SweepTrial:
        """Returns the state of a trial with its rows, and the part that it has not reported all of."""
        known = self.rows.get(trial.name, {})
        return RowTrial(**vars(trial), rows=known, part=None if trial.has_ended else self._awaited_part(trial))

    def _awaited_part(self, trial: SweepTrial) -> EvaluationSlice | None:
        part = self._parts.get(trial.name)
        rows = None if part is None else self.rows.get(trial.name, {}).get(part.step)
        if part is None or rows is None or trial.goal != part.step:
            return None
        return part if len(rows.values) < place_of(part.end, rows.whole) else None

    def awaited(self, trials: Sequence[SweepTrial]) -> Mapping[str, Mapping[str, Any]]:
        """Returns the parts that trials have not reported all of."""
        parts = {each.name: each.part for each in trials if isinstance(each, RowTrial) and each.part is not None}
        return {PARTS: parts} if parts else {}

    def request(self, of_features: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the parts that are requested now. Of those that are enough, no more is awaited than is there."""
        self._parts |= of_features.get(PARTS, {})
        for name, step in of_features.get(ENOUGH, {}).items():
            rows = self.rows[name][step]
            self._parts[name] = replace(self._parts[name], end=len(rows.values) / rows.whole)

    def keep(self, fact: dict[str, Any]) -> Mapping[str, Any]:
        """Adds the requested parts to the fact of the sweep; returns the rows of each trial that has new ones."""
        if self._parts:
            fact["parts"] = to_json(self._parts)
        changed, self._changed = self._changed, set()
        return {
            f"{ROWS}{name}": {at: to_json(as_part(each, sign=self._sign)) for at, each in self.rows[name].items()}
            for name in changed
        }

    def columns(self, reports: Reports) -> dict[str, Mapping[str, Any]]:
        """Returns the number of rows and the interval of each trial whose last evaluation did not compute all rows."""
        parts = self.last_parts(reports)
        texts = {name: " to ".join(f"{each:.4g}" for each in interval_of(part)) for name, part in parts.items()}
        return {
            name: {HELD_OUT_ROWS: len(part.rows.values), "interval of part": texts[name]}
            for name, part in parts.items()
        }

    def notes(self, reports: Reports) -> dict[str, str]:
        """Returns what the last figures of these trials are a part of."""
        return {name: in_words(part) for name, part in self.last_parts(reports).items()}

    def last_parts(self, reports: Reports) -> dict[str, PartialEvaluation]:
        """Returns the rows of the last evaluation of each trial whose last one did not compute all rows."""
        lasts = {name: self.rows.get(name, {}).get(max(steps, default=0)) for name, steps in reports.items()}
        return {
            name: as_part(rows, sign=self._sign)
            for name, rows in lasts.items()
            if rows is not None and not rows.is_whole
        }


class PartialEvaluationPolicy(StoppingPolicy, extra="forbid", frozen=True, title="Early stopping"):
    """The policy with the error of choices by a part of the rows."""

    evaluation_error: float | None = Field(
        default=None,
        gt=0,
        le=0.5,
        title="Error of partial evaluations",
        description="Trials are evaluated at rungs on a part of the held-out rows, and on more only until it is "
        "certain which of them continue. The number, such as 0.01, is the probability that any choice of the sweep "
        "differs from that by all rows. By default all rows are evaluated.",
    )

    @property
    def is_partial(self) -> bool:
        """Whether trials are evaluated at rungs on parts of the rows."""
        return self.evaluation_error is not None and self.has_rungs

    @property
    def first_part(self) -> float:
        """The share of the rows that a trial is evaluated on when it comes to a rung."""
        return FIRST_PART if self.is_partial else 1.0

    @property
    def num_averaged(self) -> int:
        """The evaluations up to a rung whose mean is compared; those before it cannot be made on more rows later."""
        return 1 if self.is_partial else super().num_averaged

    def with_rungs(self, job: Job) -> Job:
        """Returns a trial that computes a part of the rows at its rungs, but where it is evaluated anyway: all rows."""
        result = super().with_rungs(job)
        if not self.is_partial or job.num_steps is None:
            return result
        rungs = self.rungs(job.total_steps)[:-1]
        parts = [EvaluationSlice(step=rung, end=self.first_part, seed=ORDER_SEED) for rung in rungs]
        parts = [part for part in parts if part in job.evaluation.parts or not job.is_evaluated(part.step)]
        kept = (part for part in job.evaluation.parts if part not in parts)
        return replace(result, evaluation=replace(result.evaluation, parts=(*parts, *kept)))

    def comparison(self, trials: Sequence[SweepTrial], rung: int) -> RungComparison:
        """Returns the comparison of the trials that have reached a rung. trials: all of the sweep.

        The error of the sweep is divided by the number of its rungs (Bonferroni).
        """
        plain = super().comparison(trials, rung)
        if self.evaluation_error is None:
            return plain
        rows = {each.name: each.rows[rung] for each in trials if isinstance(each, RowTrial) and rung in each.rows}
        goals = {each.name: each.goal for each in trials if not each.has_ended}
        compared = RowComparison(
            scores=plain.scores,
            rows={name: own for name, own in rows.items() if name in plain.scores},
            may_go_on=frozenset(name for name in plain.scores if goals.get(name) == rung),
            error=self.evaluation_error / max(1, len(self.rungs(trials[0].total)) - 1),
            num_trials=len(trials),
        )
        return ComparisonByRows(scores=plain.scores, rows=compared)

    def comparable_scores(self, trials: Sequence[SweepTrial]) -> dict[str, dict[int, float]]:
        """Returns the scores of trials by step; those of different parts of the rows are estimated for all rows."""
        result = super().comparable_scores(trials)
        for rung in self.rungs(trials[0].total)[:-1] if self.is_partial and trials else ():
            for name, score in self.comparison(trials, rung).estimates.items():
                result[name][rung] = score
        return result

    def records(
        self, trials: Sequence[str], *, metric: str, fact: Mapping[str, Any], stored: Callable[[str], Any]
    ) -> SweepTrialRecords:
        """Returns the rows that the trials of a sweep have computed."""
        if self.is_partial:
            return RowRecords(trials, metric=metric, fact=fact, stored=stored)
        return super().records(trials, metric=metric, fact=fact, stored=stored)

    def findings(
        self, job: Mapping[str, Any], *, varied: Sequence[str], ranking: Ranking, sampler: str
    ) -> Iterator[Finding]:
        """Also yields why trials cannot be compared on parts of the rows, where the file wants that."""
        yield from super().findings(job, varied=varied, ranking=ranking, sampler=sampler)
        if not self.is_partial or ranking.metric not in METRICS.paths():  # which is a fault of its own
            return
        changed = [key for key in varied if key.partition(".")[0] in ("data", "loss", "evaluation")]
        is_mean = type(ranking) is Ranking and metric_named(ranking.metric).is_mean
        reasons = {
            f"{ranking.metric} is not a mean over rows": not is_mean,
            "tpe proposes trials by whole evaluations": sampler == TPE,
            f"{', '.join(changed)} may change the rows": bool(changed),
        }
        for why in (why for why, applies in reasons.items() if applies):
            problem, remedy = f"cannot be kept: {why}", "leave it out, so that rungs evaluate all rows"
            yield Finding(("early_stopping", "evaluation_error"), problem, remedy)


STOPPING_POLICIES = (PartialEvaluationPolicy,)
