"""Early stopping of the trials of a sweep: which continue from a rung, which are stopped, and which wait for others.

A `StoppingPolicy` decides by the states of all trials alone, so that a sweep that is continued decides the same again.

The module `sweep` of a feature lists subclasses of `StoppingPolicy` in `STOPPING_POLICIES`: with further keys in files,
other comparisons at rungs, and what is kept of trials for these.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model, model_validator

from ringmaster.features import listed
from ringmaster.findings import Finding, findings_where
from ringmaster.tasks.sweeping.ranking import Metrics, Ranking, Reports
from ringmaster.techniques import Job
from ringmaster.techniques.processes.gang_events import EvaluationReported

NONE, CUT, ASHA, HALVING, MEDIAN = "none", "cut", "asha", "halving", "median"
CUTS = ((0.04, 2 / 5), (0.10, 1 / 2))
"""The rungs of `cut` as shares of a trial's steps, and the share of the trials there that continue from each.

Bad trials show in the first tenth of their steps, and the best few cannot be distinguished before the end: a fifth is
kept to the end.
"""
NUM_AVERAGED = 3  # evaluations up to a rung, whose mean `cut` compares
EARLIEST_CUT = 10  # steps: before that, a learning curve has no information
FEWEST_OTHERS = 3  # the fewest other trials for a meaningful median


@dataclass(frozen=True, kw_only=True)
class SweepTrial:
    """The state of a trial.

    total: the number of its steps.
    goal: the step up to which it may train; 0 while its values are not settled.
    scores: by step, higher is better; minus infinity for a value that is not finite.
    has_ended: whether it is done, failed or stopped.
    """

    name: str
    total: int
    goal: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def is_under_way(self) -> bool:
        """Whether the trial has steps left to train up to its goal."""
        return not self.has_ended and self.goal > 0 and self.goal not in self.scores

    def has_ended_at(self, rung: int) -> bool:
        """Returns whether the trial has ended at a rung, and not after it."""
        return self.has_ended and self.goal == rung

    def best(self, step: int) -> float:
        """Returns the best score up to a step."""
        return max((score for at, score in self.scores.items() if at <= step), default=-math.inf)

    def mean(self, step: int, count: int) -> float:
        """Returns the mean of the last `count` scores up to a step."""
        return statistics.fmean([self.scores[at] for at in sorted(self.scores) if at <= step][-count:])


@dataclass(frozen=True, kw_only=True)
class StoppingDecisions:
    """New goals by trial, the trials to stop with the reasons, and what features request, as in `SteeringRequest`."""

    goals: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)
    of_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OpenPlaces:
    """What is not certain at a rung.

    may_be_kept: the trials that must not be stopped yet. may_be_beaten: those that must not continue yet.
    of_features: what is requested to make it certain. num_started: the trials that this gets under way.
    """

    may_be_kept: frozenset[str] = frozenset()
    may_be_beaten: frozenset[str] = frozenset()
    of_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_started: int = 0


@dataclass(frozen=True, kw_only=True)
class RungComparison:
    """The comparison of the trials that have come to a rung. scores: of each, higher is better."""

    scores: Mapping[str, float]

    @property
    def estimates(self) -> Mapping[str, float]:
        """The scores in whose order trials continue."""
        return self.scores

    def open_places(
        self, there: Sequence[SweepTrial], *, rung: int, num_kept: int, most: int, is_final: bool, num_free: int
    ) -> OpenPlaces:
        """Returns what is not certain of the order of the trials at a rung.

        there: the trials, in the order of the estimates, of which the first `num_kept` may continue now.
        most: how many continue in the end at most. is_final: whether no trial is to come.
        num_free: how many trials can run in addition to those that are under way.
        """
        return OpenPlaces()


class SweepTrialRecords:
    """What a policy keeps of the trials of a running sweep apart from their scores; by default nothing.

    The scheduler of the sweep calls all methods, under its lock.
    """

    def take(self, trial: str, report: EvaluationReported, *, is_known: bool) -> Metrics | None:
        """Takes an evaluation. Returns the metrics by which the trial is compared after that step; None for no others.

        is_known: whether the trial has metrics of that step, as where a report is repeated after a crash.
        """
        return None if is_known else report.metrics

    def state(self, trial: SweepTrial) -> SweepTrial:
        """Returns the state of a trial with what is kept of it."""
        return trial

    def awaited(self, trials: Sequence[SweepTrial]) -> Mapping[str, Mapping[str, Any]]:
        """Returns what was requested and is not done, as in `SteeringRequest`."""
        return {}

    def request(self, of_features: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what is requested now."""

    def keep(self, fact: dict[str, Any]) -> Mapping[str, Any]:
        """Adds to the fact of the sweep; returns further facts of the batch to store with it."""
        return {}

    def columns(self, reports: Reports) -> dict[str, Mapping[str, Any]]:
        """Returns columns of the leaderboard that describe the last metrics of trials, by trial."""
        return {}

    def notes(self, reports: Reports) -> dict[str, str]:
        """Returns what the figures say of the last metrics of trials, by trial."""
        return {}


EARLIEST = 10
"""The divisor of a trial's steps that gives its earliest default rung: learning curves cross in the beginning."""


class StoppingPolicy(BaseModel, extra="forbid", frozen=True, title="Early stopping"):
    """The policy that stops trials early, a part of a sweep's file and form.

    `min_steps` is the first rung; None for the total divided twice by `reduction_factor`, but at least a tenth of the
    total. With "cut", no rung is before it; None for `EARLIEST_CUT`.
    """

    policy: Literal["cut", "asha", "halving", "median", "none"] = Field(
        default="cut",
        title="Policy",
        description="cut compares the trials at 4 and at 10 percent of their steps, and trains the best fifth to the "
        "end. asha pauses each trial at a rung, and continues the best ones when devices are free. halving "
        "continues them when all trials have reached the rung. median stops a trial that is worse than half of the "
        "others at its step. none trains all trials completely.",
    )
    min_steps: int | None = Field(
        default=None,
        ge=1,
        title="First rung",
        description="The number of steps before a trial is compared with others. With asha and halving, each further "
        "rung is this number times a power of the reduction factor. By default it is 10 with cut, else the number of "
        "steps divided by the square of the reduction factor, and at least a tenth of the steps.",
    )
    reduction_factor: int = Field(
        default=4,
        ge=2,
        le=100,
        title="Reduction factor",
        description="With asha and halving, one in this many trials continues from each rung.",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Also accepts the name of a policy alone. A reduction factor without a name is ASHA's."""
        if isinstance(value, dict) and "reduction_factor" in value:
            return {"policy": "asha", **value}
        return {"policy": value} if isinstance(value, str) else value

    @property
    def has_rungs(self) -> bool:
        """Whether trials pause at rungs."""
        return self.policy in (CUT, ASHA, HALVING)

    def first_step(self, total: int) -> int:
        """Returns the step at which a trial of `total` steps is first compared."""
        return self.min_steps or max(1, total // self.reduction_factor**2, math.ceil(total / EARLIEST))

    def with_rungs(self, job: Job) -> Job:
        """Returns a trial that is evaluated where the policy compares it: at its rungs, or as often as the first rung.

        Evaluations that the trial has anyway are kept. Those that are averaged are a hundredth of the steps apart.
        """
        evaluation, total = job.evaluation, job.num_steps
        if total is None:  # once its steps are known
            return job
        if self.has_rungs:
            num_before = self.num_averaged
            at = {r - k * max(1, total // 100) for r in self.rungs(total)[:-1] for k in range(num_before)}
            steps = sorted({*evaluation.at_steps, *(step for step in at if step > 0)})
            return replace(job, evaluation=replace(evaluation, at_steps=tuple(steps)))
        if self.policy == MEDIAN and evaluation.every_steps is None:
            return replace(job, evaluation=replace(evaluation, every_steps=self.first_step(total)))
        return job

    @property
    def num_averaged(self) -> int:
        """The number of the evaluations up to a rung whose mean is compared."""
        return NUM_AVERAGED if self.policy == CUT else 1

    def rungs(self, total: int) -> list[int]:
        """Returns the rungs of a trial of `total` steps: r, r eta, r eta^2, ..., and the last step.

        Apart from the first, no rung is in the second half, as a trial that is nearly done is not worth stopping.
        """
        if not self.has_rungs:
            return [total]
        if self.policy == CUT:
            return [*self._cuts(total), total]
        rungs = []
        first = step = self.first_step(total)
        while step < total and (step == first or 2 * step <= total):
            rungs.append(step)
            step *= self.reduction_factor
        return [*rungs, total]

    def _cuts(self, total: int) -> dict[int, float]:
        """Returns the rungs of `cut` in the first half of a trial, and the share that continues; equal ones are one."""
        cuts: dict[int, float] = {}
        for at, share in CUTS:
            step = max(math.ceil(at * total), self.min_steps or EARLIEST_CUT)
            if 2 * step <= total:
                cuts[step] = cuts.get(step, 1.0) * share
        return cuts

    def num_kept(self, num: int, *, rung: int, total: int) -> int:
        """Returns how many of `num` trials continue from a rung; at least one does."""
        if self.policy == CUT:
            return max(1, math.ceil(round(num * self._cuts(total)[rung], 6)))
        return max(1, num // self.reduction_factor)

    def comparison(self, trials: Sequence[SweepTrial], rung: int) -> RungComparison:
        """Returns the comparison of the trials that have reached a rung. trials: all of the sweep."""
        scores = {each.name: each.mean(rung, self.num_averaged) for each in trials if rung in each.scores}
        return RungComparison(scores=scores)

    def comparable_scores(self, trials: Sequence[SweepTrial]) -> dict[str, dict[int, float]]:
        """Returns the scores of trials by step, those after a step such that they can be compared."""
        return {trial.name: dict(trial.scores) for trial in trials}

    def records(
        self, trials: Sequence[str], *, metric: str, fact: Mapping[str, Any], stored: Callable[[str], Any]
    ) -> SweepTrialRecords:
        """Returns what is kept of the trials of a sweep that starts, or is continued.

        metric: the objective. fact: that of the sweep. stored: returns a further fact of its batch; None for none.
        """
        return SweepTrialRecords()

    def judge(self, trials: Sequence[SweepTrial], *, num_slots: int, is_absolute: bool = True) -> StoppingDecisions:
        """Returns the decisions that follow from the trials' states.

        num_slots: how many trials can run in parallel. is_absolute: whether the order of two trials after a step stays
        when others come there.
        """
        if self.has_rungs:
            return _by_rungs(self, trials, num_slots=num_slots, is_absolute=is_absolute)
        return _by_median(self, trials) if self.policy == MEDIAN else StoppingDecisions()

    def findings(
        self, job: Mapping[str, Any], *, varied: Sequence[str], ranking: Ranking, sampler: str
    ) -> Iterator[Finding]:
        """Yields the faults that keep the policy from comparing trials of a job. varied: the keys of the space."""
        if self.policy == NONE:
            return
        total, is_counted = job.get("num_steps"), isinstance(job.get("num_steps"), int)
        varied_too = "cannot be varied where trials are compared on their way"
        yield from findings_where(
            (
                not is_counted and job.get("num_epochs") is None,
                ("early_stopping",),
                "counts in steps, and the template does not define how many",
                "give the template num_steps or num_epochs, or choose the policy none",
            ),
            (
                is_counted and self.min_steps is not None and self.min_steps >= (total or 0),
                ("early_stopping", "min_steps"),
                f"must be less than the {total} steps of a trial, got {self.min_steps}",
                "lower it, or give the trials more steps",
            ),
            *(
                (key in varied, ("space", key), varied_too, "leave it out, or choose the policy none")
                for key in ("num_steps", "num_epochs")
            ),
        )


def _by_rungs(
    stopping: StoppingPolicy, trials: Sequence[SweepTrial], *, num_slots: int, is_absolute: bool
) -> StoppingDecisions:
    """Asynchronous successive halving (Li et al., 2020, arXiv:1810.05934, algorithm 2), the synchronous version, or
    the cuts.

    Of the trials that have reached a rung, the best may continue. All versions wait where waiting costs nothing: no
    trial is promoted while other trials can use the devices, because further arrivals at the rung can only improve the
    choice. Once no trial is to come, the choice is final, and all of the best continue together: the plan then sees all
    that is left. Before that, ASHA promotes the best n // eta of the n trials at the rung, the cuts those that no later
    arrival can displace, and halving none. A trial that can no longer be among the best is stopped.
    One whose place is not certain by the comparison at the rung rests.
    """
    if not trials:
        return StoppingDecisions()
    goals, stops, of_features = dict[str, int](), dict[str, str](), dict[str, dict[str, Any]]()
    total, num_under_way = trials[0].total, sum(trial.is_under_way for trial in trials)
    for rung, following in reversed(list(itertools.pairwise(stopping.rungs(total)))):
        comparison = stopping.comparison(trials, rung)
        scores = comparison.estimates
        # A trial that has ended here does not continue, such as one that has failed while more rows were evaluated.
        there = sorted((t for t in trials if t.name in scores), key=lambda t: (t.has_ended_at(rung), -scores[t.name]))
        num_to_come = sum(not t.has_ended and rung not in t.scores for t in trials)
        most = stopping.num_kept(len(there) + num_to_come, rung=rung, total=total)
        is_final = num_to_come == 0
        early = {ASHA: len(there) // stopping.reduction_factor, CUT: most - num_to_come}
        now = most if is_final else early.get(stopping.policy, 0)
        places = comparison.open_places(
            there, rung=rung, num_kept=now, most=most, is_final=is_final, num_free=num_slots - num_under_way
        )
        num_under_way += places.num_started
        for key, values in places.of_features.items():
            of_features.setdefault(key, {}).update(values)
        for place, trial in enumerate(there):
            if trial.has_ended or trial.goal != rung:
                continue
            is_beaten = place >= most and (is_absolute or is_final)
            if math.isinf(scores[trial.name]) or (is_beaten and trial.name not in places.may_be_kept):
                stops[trial.name] = _why(scores[trial.name], rung, place=place, num=len(there))
            elif place < now and trial.name not in places.may_be_beaten and (is_final or num_under_way <= num_slots):
                goals[trial.name] = following
                num_under_way += 1
    return StoppingDecisions(goals=goals, stops=stops, of_features=of_features)


def _why(score: float, step: int, *, place: int, num: int) -> str:
    if math.isinf(score):
        return f"stopped early at step {step}: its score is not a number"
    return f"stopped early at step {step}: number {place + 1} of the {num} trials that have come there"


def _by_median(stopping: StoppingPolicy, trials: Sequence[SweepTrial]) -> StoppingDecisions:
    """The median stopping rule (Golovin et al., 2017, Google Vizier, section 3.2.2), applied to the best score so far.

    A trial stops at step s if its best score up to s is below the median of the best scores up to s of all other trials
    that have reached s, whether or not these went on.
    """
    stops = {}
    for trial in trials:
        step = max(trial.scores, default=0)
        if trial.has_ended or step < stopping.first_step(trial.total) or step >= trial.total:
            continue
        others = [t.best(step) for t in trials if t.name != trial.name and max(t.scores, default=0) >= step]
        if len(others) >= FEWEST_OTHERS and trial.best(step) < statistics.median(others):
            stops[trial.name] = f"stopped early at step {step}: its best is below the median of {len(others)} others"
    return StoppingDecisions(stops=stops)


@cache
def stopping_policy() -> type[StoppingPolicy]:
    """Returns the model of the policy with the keys of all features."""
    bases = (*listed("sweep", "STOPPING_POLICIES"), StoppingPolicy)
    return create_model("StoppingPolicy", __base__=bases, __doc__=StoppingPolicy.__doc__)
