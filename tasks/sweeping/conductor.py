"""Steers the trials of a sweep while they are trained: hears what they come to, and says which go on and what is next.

It runs beside an executor, in the same process or another one, and asks for things by `Directions`. What it has heard
and decided stands in the batch's journal before anything is asked for; whoever conducts the sweep next, after a kill at
any moment, begins from there, and asks for the same again, which changes nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringmaster.tasks.evaluation.compare import HIGHER_IS_BETTER
from ringmaster.tasks.execution.directions import GOAL, LIKE, SETTLED, Directions
from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid, JobEnded
from ringmaster.tasks.execution.journal import DONE, ENDED, FAILED, Journal
from ringmaster.tasks.sweeping.sampling import Tried
from ringmaster.tasks.sweeping.space import Values
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.tasks.sweeping.stopping import Trial
from ringmaster.techniques import Job
from ringmaster.techniques.values import to_json

FACT = "sweep"  # of the batch: {"values": by trial, "goals": by trial, "reports": by trial and step}
TOO_LATE = "stopped early: the sweep's deadline has passed"

Act = Callable[[Directions], None]
Later = Callable[[Callable[[], None]], None]
"""Has something done by the thread that may act, between two events."""


class Conductor:
    """Conducts one run of a sweep. `begin` it once its jobs are known, then `attach` it, and have it `listen`.

    clock: seconds since the epoch.
    """

    def __init__(self, spec: SweepSpec, *, clock: Callable[[], float] = time.time) -> None:
        self.spec, self._clock = spec, clock
        self.values: dict[str, Values] = {}
        self.reports: dict[str, dict[int, dict[str, float]]] = {}
        self.run_id: str | None = None
        self._goals: dict[str, int] = {}
        self._statuses: dict[str, str] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    # -- for whoever runs the batch ------------------------------------------------------------------------------------

    def begin(self, journal: Journal, jobs: Sequence[Job], *, num_slots: int) -> None:
        """Takes up the sweep where it stands.

        jobs: of the batch, with their steps resolved, those that can be trained. num_slots: trials that can run side by
        side.
        """
        self._journal, self._num_slots = journal, num_slots
        self._jobs = {job.name: job for job in jobs}
        provisional = dict(zip(self.spec.trials, self.spec.provisional(), strict=True))
        self._shapes = {name: self.spec.shape(provisional[name]) for name in self._jobs}
        fact = journal.get(FACT, {})
        known = dict(zip(self.spec.trials, self.spec.known(), strict=False))
        self.values = {**known, **fact.get("values", {})}
        self.reports = {
            name: {int(step): metrics for step, metrics in steps.items()}
            for name, steps in fact.get("reports", {}).items()
        }
        first = {name: self._first_rung(self._jobs[name]) for name in known if name in self._jobs}
        self._goals = {**first, **fact.get("goals", {})}
        self._statuses = {name: record.status for name, record in journal.jobs().items()}
        for name in set(self.spec.trials) - set(self._jobs):
            self._statuses[name] = FAILED
        self._late = self._likes(name for name in self.values if name not in known and name in self._jobs)
        self._keep()

    def judged(self, jobs: Iterable[Job]) -> tuple[Job, ...]:
        """Trials, now that their steps are known, with evaluations at their rungs: a template may say epochs."""
        return tuple(self._judged(job) for job in jobs)

    def details(self) -> dict[str, dict[str, Any]]:
        """What the records of the jobs must say of the sweep before an executor reads them, by job."""
        details: dict[str, dict[str, Any]] = {name: {GOAL: self._goals.get(name, 0)} for name in self._jobs}
        for name, like in self._late.items():
            details[name] |= {SETTLED: to_json(self._job(name, like=like)), LIKE: like}
        return details

    def asked(self) -> Directions:
        """All that was asked for, to be asked again where nobody knows whether it was heard."""
        left = self._left()
        late = {name: like for name, like in self._late.items() if name in left}
        return Directions(
            jobs={name: self._job(name, like=like) for name, like in late.items()},
            likes=late,
            goals={name: goal for name, goal in self._goals.items() if name in left},
        )

    def attach(self, act: Act, *, later: Later, started_s: float) -> None:
        """From now on, has things done by `act`. started_s: since the epoch, from which the deadline counts."""
        self._act, self._later, self._started_s = act, later, started_s
        if self.spec.deadline_s is not None:
            left_s = max(0.0, started_s + self.spec.deadline_s - self._clock())
            self._timer = threading.Timer(left_s, later, [self.decide])
            self._timer.daemon = True
            self._timer.start()
        later(self.decide)

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener."""
        if isinstance(event, GangSaid) and event.event["event"] == "metrics":
            self._hear(event.job, event.event["step"], event.event["metrics"])
        elif isinstance(event, JobEnded):
            if event.status == DONE:
                self._hear(event.job, event.details["step"], event.details["metrics"])
            self._statuses[event.job] = event.status
        else:
            return
        self._later(self.decide)

    def is_open(self) -> bool:
        """Whether more may be asked for, though nothing runs just now."""
        return any(self._statuses.get(name) not in ENDED for name in self.spec.trials)

    def close(self, *, run_id: str | None) -> None:
        """Nothing more is asked for. run_id: of the batch in MLflow, where it was recorded."""
        self.run_id = run_id
        if self._timer is not None:
            self._timer.cancel()

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Asks for what follows from all that is known."""
        with self._lock:
            directions = self._directions()
            if directions:
                self._goals |= directions.goals
                self._keep()
                self._act(directions)

    def trials(self) -> list[Trial]:
        """Where each trial stands."""
        return [self._trial(name) for name in self.spec.trials if name in self._jobs]

    def _directions(self) -> Directions:
        if self._is_late():
            return Directions(stops=dict.fromkeys(self._left(), TOO_LATE))
        self._propose()
        unsettled = [name for name in self._left() if name in self.values and not self._goals.get(name)]
        likes = self._likes(unsettled)
        jobs = {name: self._job(name, like=like) for name, like in likes.items()}
        goals = {name: self._first_rung(job) for name, job in jobs.items()}
        self._goals |= goals
        verdicts = self.spec.stopping.judge(self.trials(), num_slots=self._num_slots)
        stops = {**verdicts.stops, **{name: self._why_untrainable(name) for name in unsettled if name not in likes}}
        return Directions(
            jobs=jobs,
            likes=likes,
            goals={**goals, **verdicts.goals},
            stops={name: why for name, why in stops.items() if self._statuses.get(name) not in ENDED},
        )

    def _is_late(self) -> bool:
        deadline_s = self.spec.deadline_s
        return deadline_s is not None and self._clock() >= self._started_s + deadline_s

    def _left(self) -> list[str]:
        return [name for name in self._jobs if self._statuses.get(name) not in ENDED]

    def _propose(self) -> None:
        """Gives values to the trials whose turn it is.

        Trial k is proposed once the first k - `num_parallel` + 1 have shown what they are worth, and by these alone:
        which trial happened to be quicker changes no proposal.
        """
        names = self.spec.trials
        while len(self.values) < len(names):
            number = len(self.values)
            num_known = max(0, number - self.spec.num_parallel + 1)
            worth = [self._worth(name) for name in names[:num_known]]
            if None in worth:
                break
            scores = [*worth, *[None] * (number - num_known)]
            earlier = [Tried(values=self.values[name], score=s) for name, s in zip(names[:number], scores, strict=True)]
            self.values[names[number]] = self.spec.propose(number, earlier)

    def _worth(self, name: str) -> float | None:
        """What a trial counts for proposals: its score at the first rung, where all trials can be compared, or at its
        end; None as long as that is not known."""
        trial = self._trial(name)
        first = self.spec.stopping.rungs(trial.total)[0]
        if first in trial.scores:
            return trial.scores[first]
        return trial.best(trial.total) if trial.has_ended else None

    def _trial(self, name: str) -> Trial:
        status = self._statuses.get(name)
        total = self._jobs[name].total_steps if name in self._jobs else 0
        scores = {step: self.score(metrics) for step, metrics in self.reports.get(name, {}).items()}
        return Trial(
            name=name,
            total=total,
            goal=self._goals.get(name, 0),
            scores=scores,
            has_ended=status in ENDED,
        )

    def score(self, metrics: Mapping[str, float]) -> float:
        """The objective, so that higher is better; minus infinity for what is no number."""
        value = metrics.get(self.spec.objective, math.nan)
        if not math.isfinite(value):
            return -math.inf
        return value if HIGHER_IS_BETTER[self.spec.objective] else -value

    def _job(self, name: str, *, like: str) -> Job:
        job = self.spec.job(name, self.values[name])
        if job.num_steps is not None:
            return job
        return self._judged(replace(job, num_steps=self._jobs[like].total_steps, num_epochs=None))

    def _judged(self, job: Job) -> Job:
        every = self.spec.stopping.evaluated_every(job.total_steps, asked=job.evaluation.every_steps)
        return replace(job, evaluation=replace(job.evaluation, every_steps=every))

    def _first_rung(self, job: Job) -> int:
        return self.spec.stopping.rungs(job.total_steps)[0]

    def _likes(self, names: Iterable[str]) -> dict[str, str]:
        """For each of some trials one of the same shape that was there from the beginning and can be trained.

        Trials of a shape that cannot be trained here are left out.
        """
        found = {}
        for name in names:
            shape = self.spec.shape(self.values[name])
            like = next((other for other, theirs in self._shapes.items() if theirs == shape), None)
            if like is not None:
                found[name] = like
        return found

    def _why_untrainable(self, name: str) -> str:
        shape = ", ".join(f"{key}: {value}" for key, value in self.spec.shape(self.values[name]).items())
        return f"stopped early: no trial with {shape} can be trained here; the trials that failed say why"

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _hear(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            reports = self.reports.setdefault(name, {})
            if step not in reports:  # one that is told again, after a crash, is the same
                reports[step] = dict(metrics)
                self._keep()

    def _keep(self) -> None:
        self._journal.put(FACT, {"values": self.values, "goals": self._goals, "reports": self.reports})
