"""When a trial of a sweep is not worth going on with: rules over what trials have come to. No clock, no I/O.

A trial has a *goal*, the step up to which it may train; the planner plans it that far and no further. ASHA and
successive halving give goals rung by rung: a trial that has come to its goal rests there, its devices free, until it is
promoted, which raises its goal, or stopped. A trial that rests loses nothing: it goes on from its checkpoint.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.batch.faults import Finding

NONE, ASHA, HALVING, MEDIAN = "none", "asha", "halving", "median"
FEWEST_OTHERS = 3  # that a trial is compared with before the median of them says anything


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Where a trial stands. total: its steps. goal: 0 as long as its values are not settled.

    scores: by step, higher is better, minus infinity for what is no number. has_ended: it is done, failed or stopped.
    """

    name: str
    total: int
    goal: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def is_under_way(self) -> bool:
        """Whether it has something to train: it may, and has not come that far."""
        return not self.has_ended and self.goal > 0 and self.goal not in self.scores

    def best(self, step: int) -> float:
        """Its best score up to a step."""
        return max((score for at, score in self.scores.items() if at <= step), default=-math.inf)


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What follows: goals by trial, and why trials are stopped."""

    goals: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)


EARLIEST = 10
"""A trial is not judged before so many-th of its steps: learning curves cross in the beginning."""


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """A policy and its figures.

    min_steps: the first rung, None for the total divided by the reduction factor twice, and a tenth of it at the least.
    reduction_factor: eta, one of so many goes on from each rung.
    """

    policy: str = ASHA
    min_steps: int | None = None
    reduction_factor: int = 4

    @property
    def has_rungs(self) -> bool:
        """Whether trials rest on their way."""
        return self.policy in (ASHA, HALVING)

    def first_step(self, total: int) -> int:
        """Steps after which a trial of so many is judged first."""
        return self.min_steps or max(1, total // self.reduction_factor**2, math.ceil(total / EARLIEST))

    def evaluated_every(self, total: int, *, asked: int | None) -> int | None:
        """Steps between evaluations of a trial: `asked` where every rung is among them, which are multiples of the
        first; None for none on the way.
        """
        if self.policy == NONE:
            return asked
        first = self.first_step(total)
        return asked if asked is not None and asked > 0 and first % asked == 0 else first

    def rungs(self, total: int) -> list[int]:
        """Steps at which a trial of so many rests, r, r eta, r eta^2, ..., and its last one.

        Beyond the first there is none in the second half: what is nearly done is not worth stopping.
        """
        if not self.has_rungs:
            return [total]
        rungs = []
        first = step = self.first_step(total)
        while step < total and (step == first or 2 * step <= total):
            rungs.append(step)
            step *= self.reduction_factor
        return [*rungs, total]

    def judge(self, trials: Sequence[Trial], *, num_slots: int) -> Verdicts:
        """What follows from where the trials stand. num_slots: trials that can run side by side."""
        if self.has_rungs:
            return _by_rungs(self, trials, num_slots=num_slots)
        return _by_median(self, trials) if self.policy == MEDIAN else Verdicts()

    def findings(self, job: Mapping[str, Any], *, varied: Sequence[str]) -> Iterator[Finding]:
        """What keeps the policy from judging trials of such a job. varied: the keys of the space."""
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


def _by_rungs(stopping: Stopping, trials: Sequence[Trial], *, num_slots: int) -> Verdicts:
    """Asynchronous successive halving (Li et al., 2020, arXiv:1810.05934, algorithm 2), or the synchronous one.

    Of the n trials that have come to a rung the best n // eta may go on. Both wait where waiting costs nothing: asha
    promotes no trial as long as devices have other trials to train, as what comes to the rung meanwhile can only
    make the choice better; halving promotes none before the rung is full. A trial that cannot be among the best any
    more, whatever comes, is stopped.
    """
    if not trials:
        return Verdicts()
    eta, goals, stops = stopping.reduction_factor, {}, {}
    rungs = stopping.rungs(trials[0].total)
    num_under_way = sum(trial.is_under_way for trial in trials)
    for rung, following in reversed(list(itertools.pairwise(rungs))):
        there = sorted((t for t in trials if rung in t.scores), key=lambda t: -t.scores[rung])
        num_to_come = sum(not t.has_ended and rung not in t.scores for t in trials)
        most = max(1, (len(there) + num_to_come) // eta)
        now = most if num_to_come == 0 else len(there) // eta
        if stopping.policy == HALVING and num_to_come:
            now = 0
        for place, trial in enumerate(there):
            if trial.has_ended or trial.goal != rung:
                continue
            if place >= most or math.isinf(trial.scores[rung]):
                stops[trial.name] = _why(trial, rung, place=place, num=len(there))
            elif place < now and (stopping.policy == HALVING or num_under_way <= num_slots):
                goals[trial.name] = following
                num_under_way += 1
    return Verdicts(goals=goals, stops=stops)


def _why(trial: Trial, step: int, *, place: int, num: int) -> str:
    if math.isinf(trial.scores[step]):
        return f"stopped early at step {step}: its score is no number"
    return f"stopped early at step {step}: number {place + 1} of the {num} trials that have come there"


def _by_median(stopping: Stopping, trials: Sequence[Trial]) -> Verdicts:
    """The median stopping rule (Golovin et al., 2017, Google Vizier, section 3.2.2), on the best score so far.

    A trial ends at a step s where its best score up to s is below the median of those of the others that have come to
    s, however they went on.
    """
    stops = {}
    for trial in trials:
        step = max(trial.scores, default=0)
        if trial.has_ended or step < stopping.first_step(trial.total) or step >= trial.total:
            continue
        others = [t.best(step) for t in trials if t.name != trial.name and max(t.scores, default=0) >= step]
        if len(others) >= FEWEST_OTHERS and trial.best(step) < statistics.median(others):
            stops[trial.name] = f"stopped early at step {step}: its best is below the median of {len(others)} others"
    return Verdicts(stops=stops)
