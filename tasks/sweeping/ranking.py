"""How the trials of a sweep are compared: by one metric on held-out data, or by what a feature puts in its place.

The module `sweep` of a feature lists its kinds of ranking in `RANKINGS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from ringmaster.features import listed
from ringmaster.findings import Finding
from ringmaster.techniques.metric import metric_named

Metrics = Mapping[str, float]
"""The metrics of one evaluation of a trial, by name."""
Reports = Mapping[str, Mapping[int, Metrics]]
"""The metrics on held-out data, by trial and step."""


def last(reports: Mapping[int, Metrics]) -> Metrics:
    """Returns the last metrics of a trial."""
    return reports[max(reports)] if reports else {}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The standing of a trial among those that were trained to their ends, or among the others.

    place: trials of lower places come first.
    is_ranked: whether the trial has a rank, and may be the best one.
    rank: its rank, where several trials may have the same one; None for the next one in the order of places.
    columns: what the leaderboard says in addition.
    """

    place: tuple[float, ...]
    is_ranked: bool = True
    rank: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The comparison of trials by one metric on held-out data.

    Attributes:
        metric: the objective, or the first of several.
        is_absolute: whether the order of two trials does not depend on others that come after the same step later.
        keys: further keys of a sweep's file that lead to this ranking; each has one of these sections, or a list.
    """

    metric: str
    is_absolute: ClassVar[bool] = True
    keys: ClassVar[Mapping[str, type[BaseModel]]] = {}

    @classmethod
    def of(cls, metric: str, sections: Mapping[str, Sequence[Any]]) -> Ranking:
        """Returns the ranking that a file describes. sections: by `keys`, at least one of them."""
        return cls(metric=metric)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The metrics by which trials are compared."""
        return (self.metric,)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that trials are evaluated with, the first objective first."""
        return self.objectives

    def score(self, metrics: Metrics) -> float:
        """Returns how good an evaluation of a trial is, higher is better; minus infinity without a finite value."""
        return self.targets(metrics)[0]

    def scores(self, reports: Reports) -> dict[str, dict[int, float]]:
        """Returns the scores by trial and step, by which early stopping compares trials after the same step."""
        return {name: {step: self.score(each) for step, each in steps.items()} for name, steps in reports.items()}

    def targets(self, metrics: Metrics) -> tuple[float, ...]:
        """Returns what a sampler maximizes, a value for each objective; minus infinity for one that is not finite."""
        values = [(name, metrics.get(name, math.nan)) for name in self.objectives]
        signs = {name: 1.0 if metric_named(name).higher_is_better else -1.0 for name in self.objectives}
        return tuple(signs[name] * value if math.isfinite(value) else -math.inf for name, value in values)

    def violations(self, metrics: Metrics) -> Mapping[str, float]:
        """Returns by how much each constraint is broken, by its name; 0 or less where it is kept."""
        return {}

    def standings(self, finals: Mapping[str, Metrics], *, are_done: bool) -> dict[str, Standing]:
        """Returns the standings of trials by name.

        finals: their last metrics. are_done: whether they were trained to their ends.
        """
        scores = {name: self.score(metrics) for name, metrics in finals.items()}
        return {name: Standing(place=(-score,), is_ranked=math.isfinite(score)) for name, score in scores.items()}

    def findings(self) -> Iterator[Finding]:
        """Yields the faults of what a file says of the ranking."""
        return iter(())

    def why_no_winner(self, finals: Mapping[str, Metrics]) -> str:
        """Returns why none of the trials that were trained to their ends is the best. finals: their last metrics."""
        return "no trial was trained to its end" if not finals else f"no trial has a finite {self.metric}"


def sections_of_rankings() -> dict[str, type[BaseModel]]:
    """Returns the sections of all further keys of a sweep's file, by key."""
    return {key: section for kind in listed("sweep", "RANKINGS") for key, section in kind.keys.items()}


def ranking_of(metric: str, sections: Mapping[str, Sequence[Any]]) -> Ranking:
    """Returns the ranking that a file describes. metric: its objective. sections: of the further keys that it has."""
    for kind in listed("sweep", "RANKINGS"):
        own: dict[str, Sequence[Any]] = {key: value for key, value in sections.items() if key in kind.keys and value}
        if own:
            made: Ranking = kind.of(metric, own)
            return made
    return Ranking(metric=metric)
