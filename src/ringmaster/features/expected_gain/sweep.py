"""`stop_when: worthless` of a sweep: it ends when its other trials cannot be expected to pay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ringmaster.features.expected_gain.estimate import (
    COVERAGE,
    EndedTrial,
    ExpectedGain,
    OpenTrial,
    expected_gain,
)
from ringmaster.findings import Finding, findings_where
from ringmaster.tasks.sweeping.early_stopping import SweepTrial
from ringmaster.tasks.sweeping.ranking import last
from ringmaster.tasks.sweeping.results import ResultSection
from ringmaster.tasks.sweeping.sampling import GRID, TPE
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.tasks.sweeping.stop_rules import StopProposal, StopRule, SweepProgress
from ringmaster.techniques.metric import metric_named

DEFAULT_GAIN = 0.001
HOUR_S = 3600.0


class Worthless(StopRule, extra="forbid", frozen=True, title="Other trials do not pay"):
    """Ends a sweep when its other trials cannot be expected to pay."""

    key: ClassVar[str] = "worthless"

    gain: float = Field(
        default=DEFAULT_GAIN,
        gt=0,
        lt=1,
        strict=True,
        title="Gain",
        description="The sweep ends when the other trials together can be expected to improve the objective by less "
        "than this share of its best value.",
    )
    gain_per_device_hour: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        strict=True,
        title="Gain for a device hour",
        description="The least improvement of the objective, in its own units, that is worth an hour of a device. With "
        "it, the sweep also ends when the other trials improve the objective by less for their device hours.",
    )

    def findings(self, spec: SweepSpec) -> Iterator[Finding]:
        """Yields why the gain of a sweep cannot be predicted."""
        yield from findings_where(
            (
                len(spec.ranking.objectives) > 1,
                ("stop_when",),
                "worthless goes with one objective, and the sweep has several",
                "leave it out, or give one objective and the others as constraints",
            )
        )

    def proposal(self, progress: SweepProgress) -> StopProposal | None:
        """Returns why the other trials do not pay; None while they do, or while too little is known."""
        gain = gain_of(progress)
        if gain is None:
            return None
        device_hours = progress.device_s / HOUR_S / gain.num_ended * gain.num_open
        is_dear = self.gain_per_device_hour is not None and gain.gain < self.gain_per_device_hour * device_hours
        if gain.share >= self.gain and not is_dear:
            return None
        why = f"; worth {self.gain_per_device_hour:g} for each of {device_hours:.3g} device hours" if is_dear else ""
        return StopProposal(
            reason=in_words(gain, metric=progress.spec.objective) + why,
            figures={
                "metric": progress.spec.objective,
                "best": self_signed(gain.best, progress.spec.objective),
                "gain": gain.gain,
                "interval": [gain.low, gain.high],
                "coverage": COVERAGE,
                "probability": gain.probability,
                "share": gain.share if math.isfinite(gain.share) else None,
                "num_ended": gain.num_ended,
                "num_open": gain.num_open,
                "device_hours": device_hours,
            },
        )


def self_signed(score: float, metric: str) -> float:
    """Returns the value of a metric from a score, which is higher the better it is."""
    return score if metric_named(metric).higher_is_better else -score


def in_words(gain: ExpectedGain, *, metric: str) -> str:
    """Returns what can be expected of the trials that have not ended."""
    return (
        f"after {gain.num_ended} of {gain.num_ended + gain.num_open} trials, the others can be expected to improve the "
        f"best {metric}, {self_signed(gain.best, metric):.4g}, by {gain.gain:.2g} ({gain.share:.2%} of it; "
        f"{COVERAGE:.0%} interval {gain.low:.2g} to {gain.high:.2g})"
    )


def gain_of(progress: SweepProgress) -> ExpectedGain | None:
    """Returns the gain that the trials which have not ended can be expected to bring; None where it is not known.

    Of several objectives it is never known. A grid is known only in random order. Those that TPE proposes are compared
    with others that it has proposed from results, once there are any, as these are better than random ones.
    """
    spec, ranking = progress.spec, progress.spec.ranking
    if len(ranking.objectives) > 1 or (spec.sampler == GRID and not spec.is_shuffled):
        return None
    scores = spec.stopping.comparable_scores(progress.trials)
    drawn_first = frozenset(spec.trials[: spec.num_known] if spec.sampler == TPE else ())
    ended = [
        EndedTrial(
            goal=trial.goal,
            final=_final(trial, progress),
            scores=scores[trial.name],
            is_like_later=trial.name not in drawn_first,
        )
        for trial in progress.trials
        if trial.has_ended
    ]
    open_trials = [
        OpenTrial(goal=trial.goal, total=trial.total, scores=scores[trial.name])
        for trial in progress.trials
        if not trial.has_ended
    ]
    return expected_gain(ended, open_trials)


def _final(trial: SweepTrial, progress: SweepProgress) -> float | None:
    """Returns the score of a trial that may be the best; None for one that breaks a constraint, or has no value."""
    metrics, ranking = last(progress.reports.get(trial.name, {})), progress.spec.ranking
    is_kept = all(violation <= 0 for violation in ranking.violations(metrics).values())
    (target,) = ranking.targets(metrics)
    return target if trial.name in progress.done and is_kept and math.isfinite(target) else None


def proposal_section(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> ResultSection | None:
    """Returns when the other trials of a sweep did not pay any more; None where they did to the end."""
    proposal = sweep_scheduler.proposals.get(Worthless.key)
    if proposal is None:
        return None
    ending = "the sweep ended there" if proposal.ends else "`stop_when: worthless` ends a sweep there"
    return ResultSection(
        key="worthless",
        value={**proposal.figures, "ended": proposal.ends},
        lines=[f"{proposal.reason}: {ending}"],
    )


STOP_RULES = (Worthless,)
SECTIONS = (proposal_section,)
