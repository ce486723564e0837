"""Early stopping of a sweep's trials, as pure rules over their results.

A trial has a *goal*, the step up to which it may train; the planner plans it only that far. ASHA and successive halving
set goals rung by rung. A trial that has reached its goal pauses and frees its devices, until it is promoted, which
raises its goal, or stopped. A paused trial loses nothing: it continues from its checkpoint.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.batch.document import Finding
from ringmaster.techniques import Job

NONE, ASHA, HALVING, MEDIAN = "none", "asha", "halving", "median"
FEWEST_OTHERS = 3  # the fewest other trials for a meaningful median


@dataclass(frozen=True, kw_only=True)
class TrialState:
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

    def best(self, step: int) -> float:
        """Returns the best score up to a step."""
        return max((score for at, score in self.scores.items() if at <= step), default=-math.inf)


@dataclass(frozen=True, kw_only=True)
class StoppingDecisions:
    """New goals by trial, and the trials to stop with the reasons."""

    goals: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)


EARLIEST = 10
"""The divisor of a trial's steps that gives its earliest default rung: learning curves cross in the beginning."""


@dataclass(frozen=True, kw_only=True)
class StoppingPolicy:
    """A stopping policy and its parameters.

    policy: "none", "asha", "halving" or "median".
    min_steps: the first rung; None for the total divided twice by the reduction factor, but at least a tenth of the
        total.
    reduction_factor: eta; one trial in eta goes on from each rung.
    """

    policy: str = ASHA
    min_steps: int | None = None
    reduction_factor: int = 4

    @property
    def has_rungs(self) -> bool:
        """Whether trials pause at rungs."""
        return self.policy in (ASHA, HALVING)

    def first_step(self, total: int) -> int:
        """Returns the step at which a trial of `total` steps is first compared."""
        return self.min_steps or max(1, total // self.reduction_factor**2, math.ceil(total / EARLIEST))

    def judged(self, job: Job) -> Job:
        """Returns a trial that is evaluated where the policy compares it: at its rungs, or as often as the first rung.

        Evaluations that the trial has anyway are kept.
        """
        evaluation, total = job.evaluation, job.num_steps
        if total is None:  # once its steps are known
            return job
        if self.has_rungs:
            rungs = {*evaluation.at_steps, *self.rungs(total)[:-1]}
            return replace(job, evaluation=replace(evaluation, at_steps=tuple(sorted(rungs))))
        if self.policy == MEDIAN and evaluation.every_steps is None:
            return replace(job, evaluation=replace(evaluation, every_steps=self.first_step(total)))
        return job

    def rungs(self, total: int) -> list[int]:
        """Returns the rungs of a trial of `total` steps: r, r eta, r eta^2, ..., and the last step.

        Apart from the first, no rung lies in the second half, as a trial that is nearly done is not worth stopping.
        """
        if not self.has_rungs:
            return [total]
        rungs = []
        first = step = self.first_step(total)
        while step < total and (step == first or 2 * step <= total):
            rungs.append(step)
            step *= self.reduction_factor
        return [*rungs, total]

    def judge(self, trials: Sequence[TrialState], *, num_slots: int) -> StoppingDecisions:
        """Returns the decisions that follow from the trials' states. num_slots: how many trials can run in parallel."""
        if self.has_rungs:
            return _by_rungs(self, trials, num_slots=num_slots)
        return _by_median(self, trials) if self.policy == MEDIAN else StoppingDecisions()

    def findings(self, job: Mapping[str, Any], *, varied: Sequence[str]) -> Iterator[Finding]:
        """Yields the faults that keep the policy from comparing trials of a job. varied: the keys of the space."""
        if self.policy == NONE:
            return
        total = job.get("num_steps")
        if not isinstance(total, int):
            if job.get("num_epochs") is None:
                remedy = "give the template num_steps or num_epochs, or choose the policy none"
                yield Finding(("early_stopping",), "counts in steps, and the template does not say how many", remedy)
        elif self.min_steps is not None and self.min_steps >= total:
            problem = f"must be less than the {total} steps of a trial, got {self.min_steps}"
            yield Finding(("early_stopping", "min_steps"), problem, "lower it, or give the trials more steps")
        for key in ("num_steps", "num_epochs"):
            if key in varied:
                problem = "cannot be varied where trials are compared on their way"
                yield Finding(("space", key), problem, "leave it out, or choose the policy none")


def _by_rungs(stopping: StoppingPolicy, trials: Sequence[TrialState], *, num_slots: int) -> StoppingDecisions:
    """Asynchronous successive halving (Li et al., 2020, arXiv:1810.05934, algorithm 2), or the synchronous version.

    Of the n trials that have reached a rung, the best n // eta may go on. Both versions wait where waiting costs
    nothing. ASHA promotes no trial while other trials can use the devices, because further arrivals at the rung can
    only improve the choice. Once no trial is to come, the choice is final, and all of the best go on together: the plan
    then sees all that is left. Halving promotes none before that. A trial that can no longer be among the best is
    stopped.
    """
    if not trials:
        return StoppingDecisions()
    eta, goals, stops = stopping.reduction_factor, {}, {}
    rungs = stopping.rungs(trials[0].total)
    num_under_way = sum(trial.is_under_way for trial in trials)
    for rung, following in reversed(list(itertools.pairwise(rungs))):
        there = sorted((t for t in trials if rung in t.scores), key=lambda t: -t.scores[rung])
        num_to_come = sum(not t.has_ended and rung not in t.scores for t in trials)
        most = max(1, (len(there) + num_to_come) // eta)
        is_final = num_to_come == 0
        now = most if is_final else 0 if stopping.policy == HALVING else len(there) // eta
        for place, trial in enumerate(there):
            if trial.has_ended or trial.goal != rung:
                continue
            if place >= most or math.isinf(trial.scores[rung]):
                stops[trial.name] = _why(trial, rung, place=place, num=len(there))
            elif place < now and (is_final or num_under_way <= num_slots):
                goals[trial.name] = following
                num_under_way += 1
    return StoppingDecisions(goals=goals, stops=stops)


def _why(trial: TrialState, step: int, *, place: int, num: int) -> str:
    if math.isinf(trial.scores[step]):
        return f"stopped early at step {step}: its score is no number"
    return f"stopped early at step {step}: number {place + 1} of the {num} trials that have come there"


def _by_median(stopping: StoppingPolicy, trials: Sequence[TrialState]) -> StoppingDecisions:
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
