"""Constraints and several objectives of a sweep.

Trials are compared by the rule of Deb (2000): a trial that keeps all constraints precedes one that does not, and of two
that do not, the one with the smaller violation precedes. A violation is relative to its bound, so that seconds and
shares can be added up.

By several objectives, trials are compared by their fronts and, within a front, by their crowding distance, also where
early stopping compares them (as in Schmucker et al., 2021, arXiv:2106.12639).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from ringmaster.features.sweep_objectives.drawing import DrawnTrial, draw_front
from ringmaster.features.sweep_objectives.front import front_numbers, front_scores
from ringmaster.findings import Finding, findings_where
from ringmaster.tasks.batch.references import EvaluationMetric, wrong
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.ranking import Metrics, Ranking, Reports, Standing
from ringmaster.tasks.sweeping.results import ResultSection, first_ranked
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.techniques.metric import metric_named
from ringmaster.text import enumerated

PENALTY = 1e100
"""The score of a trial that breaks a constraint is below minus this, and so below that of any that keeps all."""
MAX_OBJECTIVES = 3
"""The most objectives of a sweep: of more, nearly every trial is on the front."""
FIGURE = "sweep/front.svg"
INFEASIBLE = "infeasible"
"""The column of the leaderboard with the values that break constraints."""


class Constraint(BaseModel, extra="forbid", frozen=True, title="Constraint"):
    """Bounds of a metric on held-out data, which the best trial must keep."""

    metric: Annotated[EvaluationMetric, Field(description="The metric, such as latency/p99_s.")]
    at_most: float | None = Field(
        default=None, allow_inf_nan=False, strict=True, description="The largest value; it may be empty."
    )
    at_least: float | None = Field(
        default=None, allow_inf_nan=False, strict=True, description="The smallest value; it may be empty."
    )

    @model_validator(mode="after")
    def _has_bounds(self) -> Constraint:
        if self.at_most is None and self.at_least is None:
            raise wrong("has no bound", "give at_most or at_least")
        if self.at_most is not None and self.at_least is not None and self.at_most < self.at_least:
            raise wrong(f"has at_most {self.at_most:g} below at_least {self.at_least:g}", "exchange the two")
        return self

    def violation(self, metrics: Metrics) -> float:
        """Returns by how much a bound is broken, as a share of it; 0 or less where both are kept.

        It is infinite where the metric has no finite value.
        """
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return math.inf
        over = [] if self.at_most is None else [(value - self.at_most) / (abs(self.at_most) or 1.0)]
        under = [] if self.at_least is None else [(self.at_least - value) / (abs(self.at_least) or 1.0)]
        return max(over + under)

    def fault(self, metrics: Metrics) -> str:
        """Returns the value that breaks a bound; empty where both are kept."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return f"{self.metric} has no value"
        if self.at_most is not None and value > self.at_most:
            return f"{self.metric} {value:.4g} > {self.at_most:g}"
        if self.at_least is not None and value < self.at_least:
            return f"{self.metric} {value:.4g} < {self.at_least:g}"
        return ""

    def __str__(self) -> str:
        if self.at_most is None:
            return f"{self.metric} >= {self.at_least:g}"
        return f"{'' if self.at_least is None else f'{self.at_least:g} <= '}{self.metric} <= {self.at_most:g}"


class SweepObjective(BaseModel, extra="forbid", frozen=True, title="Objective"):
    """A metric on held-out data by which trials are compared, among others; its name alone is enough."""

    metric: Annotated[EvaluationMetric, Field(description="The metric, such as loss.")]
    direction: Literal["minimize", "maximize"] | None = Field(
        default=None, description="The direction of the metric; it may be empty."
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_right_direction(self) -> SweepObjective:
        own = "maximize" if metric_named(self.metric).higher_is_better else "minimize"
        if self.direction not in (None, own):
            better = "higher" if own == "maximize" else "lower"
            problem = f"has direction {self.direction}, and {self.metric} is better the {better} it is"
            raise wrong(problem, f"write {own}, or leave it out")
        return self


@dataclass(frozen=True, kw_only=True)
class ConstrainedRanking(Ranking):
    """The comparison of trials by a metric among those that keep all constraints."""

    constraints: tuple[Constraint, ...] = ()

    keys: ClassVar[Mapping[str, type[BaseModel]]] = {"constraints": Constraint, "objectives": SweepObjective}

    @classmethod
    def of(cls, metric: str, sections: Mapping[str, Sequence[Any]]) -> ConstrainedRanking:
        """Returns the ranking of a file that has constraints, or a list of objectives."""
        constraints = tuple(sections.get("constraints", ()))
        first, *others = [each.metric for each in sections.get("objectives", ())] or [metric]
        if not others:
            return ConstrainedRanking(metric=first, constraints=constraints)
        return FrontRanking(metric=first, others=tuple(others), constraints=constraints)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The objective, and the metrics of the constraints."""
        return tuple(dict.fromkeys([*self.objectives, *(each.metric for each in self.constraints)]))

    def findings(self) -> Iterator[Finding]:
        """Yields the metrics that several constraints bound."""
        bounded = [each.metric for each in self.constraints]
        for metric in sorted({each for each in bounded if bounded.count(each) > 1}):
            yield Finding(("constraints",), f"has {metric} twice", "give both of its bounds in one entry")

    def violations(self, metrics: Metrics) -> Mapping[str, float]:
        """Returns the violation of each constraint."""
        return {str(each): each.violation(metrics) for each in self.constraints}

    def violation(self, metrics: Metrics) -> float:
        """Returns the sum of the violations of the constraints that are broken."""
        return sum(each for each in self.violations(metrics).values() if each > 0)

    def faults(self, metrics: Metrics) -> list[str]:
        """Returns the values that break constraints."""
        return [fault for each in self.constraints if (fault := each.fault(metrics))]

    def score(self, metrics: Metrics) -> float:
        """Returns the objective, higher is better; less than of any other trial where a constraint is broken."""
        target, violation = super().score(metrics), self.violation(metrics)
        return -PENALTY * (1 + violation) if violation > 0 and math.isfinite(target) else target

    def standings(self, finals: Mapping[str, Metrics], *, are_done: bool) -> dict[str, Standing]:
        """Returns the standings of trials, which have no rank where they break a constraint."""
        result = {}
        for name, metrics in finals.items():
            targets, faults = self.targets(metrics), self.faults(metrics) if metrics else []
            result[name] = Standing(
                place=(self.violation(metrics), *(-each for each in targets)),
                is_ranked=not faults and all(map(math.isfinite, targets)),
                columns={INFEASIBLE: "; ".join(faults) or None},
            )
        return result

    def why_no_winner(self, finals: Mapping[str, Metrics]) -> str:
        """Returns the trial that comes nearest to keeping the constraints."""
        nearest = min(finals, key=lambda name: self.violation(finals[name]), default=None)
        if nearest is None or not (faults := self.faults(finals[nearest])):
            return super().why_no_winner(finals)
        return (
            f"no trial that was trained to its end keeps {self.in_words()}, so that none is the best, and nothing is "
            f"promoted. The nearest is {nearest}: {'; '.join(faults)}"
        )

    def in_words(self) -> str:
        """Returns the constraints."""
        return " and ".join(f"`{each}`" for each in self.constraints)


@dataclass(frozen=True, kw_only=True)
class FrontRanking(ConstrainedRanking):
    """The comparison of trials by several metrics, among those that keep all constraints.

    others: the objectives after the first one.
    """

    others: tuple[str, ...]

    is_absolute: ClassVar[bool] = False

    @property
    def objectives(self) -> tuple[str, ...]:
        """The metrics by which trials are compared."""
        return (self.metric, *self.others)

    def scores(self, reports: Reports) -> dict[str, dict[int, float]]:
        """Returns scores by trial and step: by front and crowding distance among the trials that have come there."""
        result = super().scores(reports)
        for step in {step for steps in reports.values() for step in steps}:
            there = {name: steps[step] for name, steps in reports.items() if step in steps}
            kept = [name for name, metrics in there.items() if self._is_comparable(metrics)]
            scores = front_scores([self.targets(there[name]) for name in kept])
            for name, metrics in there.items():
                if not self.violation(metrics):  # replaced below, but for one without a value
                    result[name][step] = -math.inf
            for name, score in zip(kept, scores, strict=True):
                result[name][step] = score
        return result

    def _is_comparable(self, metrics: Metrics) -> bool:
        return not self.violation(metrics) and all(map(math.isfinite, self.targets(metrics)))

    def standings(self, finals: Mapping[str, Metrics], *, are_done: bool) -> dict[str, Standing]:
        """Returns the standings of trials; those that were trained to their ends are ranked by their fronts."""
        result = super().standings(finals, are_done=are_done)
        kept = [name for name, standing in result.items() if standing.is_ranked]
        numbers = front_numbers([self.targets(finals[name]) for name in kept])
        for name, number in zip(kept, numbers, strict=True):
            place = (0.0, float(number), *result[name].place[1:])
            result[name] = replace(result[name], place=place, rank=number, is_ranked=are_done)
        return result

    def findings(self) -> Iterator[Finding]:
        """Yields the faults of the lists of objectives and of constraints."""
        yield from super().findings()
        num, twice = len(self.objectives), sorted({m for m in self.others if self.objectives.count(m) > 1})
        yield from findings_where(
            (num > MAX_OBJECTIVES, ("objective",), f"has {num} metrics", f"give {MAX_OBJECTIVES} at the most"),
            *((True, ("objective",), f"has {metric} twice", "remove one of the two") for metric in twice),
        )


def front_section(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> ResultSection | None:
    """Returns the Pareto front of a sweep with several objectives; None for one that has only one."""
    spec, ranking = sweep_scheduler.spec, sweep_scheduler.spec.ranking
    if not isinstance(ranking, FrontRanking):
        return None
    front = first_ranked(rows)
    columns = {metric: f"held-out {metric}" for metric in ranking.objectives}
    shown = [f"{row['job']} ({', '.join(f'{m} {row[c]:.4g}' for m, c in columns.items())})" for row in front]
    head = f"the front of {' and '.join(ranking.objectives)}: {enumerated(shown)}"
    ending = "it is as good as any other in all of them" if len(front) == 1 else "none is the best in all of them, so "
    ending += "" if len(front) == 1 else "that nothing is promoted: choose one, whose model the leaderboard names"
    trials = [
        DrawnTrial(
            name=row["job"],
            values={metric: row[column] for metric, column in columns.items() if row.get(column) is not None},
            front=row["rank"] if row["status"] == JobStatus.DONE else None,
            infeasible=row[INFEASIBLE] or "",
            is_done=row["status"] == JobStatus.DONE,
        )
        for row in rows
    ]
    figures = {}
    for i, (x, y) in enumerate(combinations(ranking.objectives, 2)):
        path = FIGURE if not i else FIGURE.replace(".svg", f"_{i + 1}.svg")
        has_line = len(ranking.objectives) == 2
        figures[path] = draw_front(f"{spec.name}: {y} over {x}", trials, x=x, y=y, has_line=has_line)
    return ResultSection(
        key="front",
        value=[row["job"] for row in front],
        lines=[f"{head}; {ending}"] if front else [],
        figures=figures,
    )


def constraints_section(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> ResultSection | None:
    """Returns how many trials keep the constraints of a sweep; None for one that has no constraints."""
    ranking = sweep_scheduler.spec.ranking
    if not isinstance(ranking, ConstrainedRanking) or not ranking.constraints:
        return None
    done = [row for row in rows if row["status"] == JobStatus.DONE]
    num_feasible = sum(row[INFEASIBLE] is None for row in done)
    return ResultSection(
        key="constraints",
        value=[each.model_dump() for each in ranking.constraints],
        lines=[f"{num_feasible} of the {len(done)} trials that were trained to their ends keep {ranking.in_words()}"],
    )


RANKINGS = (ConstrainedRanking,)
SECTIONS = (front_section, constraints_section)
