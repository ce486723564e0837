"""Scheduler of a running sweep: receives the trials' results and decides which trials continue and what to try next.

The scheduler runs alongside an executor, in the same process or another one, and acts by `SteeringRequest`. Results and
decisions are written to the batch's journal before any request. After a kill at any moment, the next scheduler of the
sweep continues from the journal and repeats the same requests, which changes nothing.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringmaster.clock import boot_s
from ringmaster.codec import to_json
from ringmaster.tasks.execution.execution_events import ExecutionEvent, GangReport, JobEnded
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.tasks.storage.journal import ENDED, JobStatus, Journal
from ringmaster.tasks.sweeping.early_stopping import SweepTrial, SweepTrialRecords
from ringmaster.tasks.sweeping.space import Values
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.tasks.sweeping.stop_rules import StopProposal, StopRule, SweepProgress
from ringmaster.tasks.sweeping.stop_rules import stop_rules as all_stop_rules
from ringmaster.techniques import Job
from ringmaster.techniques.processes.gang_events import EvaluationReported

FACT = "sweep"
"""A fact of the batch: {"values": by trial, "goals": by trial, "reports": by trial and step, "proposals": by rule}."""
TOO_LATE = "stopped early: the sweep's deadline has passed"

Act = Callable[[SteeringRequest], None]
Later = Callable[[Callable[[], None]], None]
"""Schedules a call on the thread that may act, between two events."""


class SweepScheduler:
    """The scheduler of one run of a sweep.

    Call `begin` once the jobs are known, then `attach`, and register `listen` as the executor's listener.

    stop_rules: those that end the sweep; all others only propose to, by `notice`.
    clock: seconds that no correction of the system's clock moves.

    Its owner may set `on_first_done`, which is called when the first trial has come to its end.
    """

    PURPOSE = "the scheduler of the sweep"

    def __init__(
        self,
        spec: SweepSpec,
        *,
        stop_rules: Sequence[StopRule] = (),
        notice: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        self.spec, self._notice, self._clock = spec, notice, clock
        given = {rule.key: rule for rule in stop_rules}
        self._ending_rules = frozenset(given)
        self._rules = [given.get(key) or kind() for key, kind in all_stop_rules().items()]
        self._num_judged = 0
        self.proposals: dict[str, StopProposal] = {}
        self.values: dict[str, Values] = {}
        self.reports: dict[str, dict[int, dict[str, float]]] = {}
        self.records = SweepTrialRecords()
        self.run_id: str | None = None
        self.on_first_done: Callable[[], None] = lambda: None
        self._goals: dict[str, int] = {}
        self._statuses: dict[str, str] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    # -- interface to the executor -------------------------------------------------------------------------------------

    def begin(self, journal: Journal, jobs: Sequence[Job], *, num_slots: int) -> None:
        """Starts the sweep, or continues it from the journal.

        jobs: the trainable jobs of the batch, with their steps resolved. num_slots: the number of trials that can run
        in parallel.
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
        self.proposals = {
            key: StopProposal(**{**each, "ends": key in self._ending_rules})
            for key, each in fact.get("proposals", {}).items()
        }
        first = {name: self._first_rung(self._jobs[name]) for name in known if name in self._jobs}
        self._goals = {**first, **fact.get("goals", {})}
        self.records = self.spec.stopping.records(
            [*self._jobs], metric=self.spec.objective, fact=fact, stored=journal.get
        )
        self._statuses = {name: record.status for name, record in journal.jobs().items()}
        for name in set(self.spec.trials) - set(self._jobs):
            self._statuses[name] = JobStatus.FAILED
        self._proposed_later = self._likes(name for name in self.values if name not in known and name in self._jobs)
        self._keep()

    def with_rungs(self, jobs: Iterable[Job]) -> tuple[Job, ...]:
        """Returns trials with evaluations at their rungs, once their steps are known: a template may give epochs."""
        return tuple(self.spec.stopping.with_rungs(job) for job in jobs)

    def record_changes(self) -> dict[str, dict[str, Any]]:
        """Returns what the jobs' records must contain about the sweep before an executor reads them, by job."""
        changes: dict[str, dict[str, Any]] = {name: {"goal": self._goals.get(name, 0)} for name in self._jobs}
        for name, like in self._proposed_later.items():
            changes[name] |= {"settled": to_json(self._job(name, like=like)), "like": like}
        return changes

    def pending_request(self) -> SteeringRequest:
        """Returns everything requested so far, to be repeated if the executor may not have received it."""
        left = self._left()
        likes = {name: like for name, like in self._proposed_later.items() if name in left}
        return SteeringRequest(
            jobs={name: self._job(name, like=like) for name, like in likes.items()},
            likes=likes,
            goals={name: goal for name, goal in self._goals.items() if name in left},
            of_features=self.records.awaited(self.trials()),
        )

    def attach(self, act: Act, *, later: Later, elapsed_s: float) -> None:
        """Sends requests to `act` from now on. elapsed_s: the seconds since the sweep was first started."""
        self._act, self._later, self._started_s = act, later, self._clock() - elapsed_s
        if self.spec.deadline_s is not None:
            left_s = max(0.0, self.spec.deadline_s - elapsed_s)
            self._timer = threading.Timer(left_s, later, [self.decide])
            self._timer.daemon = True
            self._timer.start()
        if awaited := self.records.awaited(self.trials()):
            later(lambda: act(SteeringRequest(of_features=awaited)))  # a kill may have been before it was received
        later(self.decide)

    def listen(self, event: ExecutionEvent) -> None:
        """Handles an event of the executor."""
        if isinstance(event, GangReport) and isinstance(event.event, EvaluationReported):
            self._take_evaluation(event.job, event.event)
        elif isinstance(event, JobEnded):
            if event.record.status == JobStatus.DONE:
                last = EvaluationReported(step=event.record.step, metrics=event.record.metrics)
                self._take_evaluation(event.job, last)
                if JobStatus.DONE not in self._statuses.values():
                    self.on_first_done()
            self._statuses[event.job] = event.record.status
        else:
            return
        self._later(self.decide)

    def is_open(self) -> bool:
        """Whether further requests may follow, even if no trial runs at the moment."""
        return any(self._statuses.get(name) not in ENDED for name in self.spec.trials)

    def close(self, *, run_id: str | None) -> None:
        """Stops making requests. run_id: the batch's run in MLflow, or None if it was not recorded."""
        self.run_id = run_id
        if self._timer is not None:
            self._timer.cancel()

    def trial_values(self) -> dict[str, Values]:
        """Returns the values of each trial as its job has them, whoever proposed it: also of added jobs.

        A trial whose job a person has changed, and a job that was added, have their own values at the keys that differ.
        """
        result, contents = dict(self.values), dict[str, Mapping[str, Any]]()
        for name, record in self._journal.jobs().items():
            variation = record.variation
            source = name if variation is None else variation.job
            proposed = self._proposed(name, like=record.like) if variation is None else contents.get(source)
            if proposed is None:
                continue
            contents[name] = proposed if record.settled is None else record.settled
            before = dict(_flat(proposed))
            changed = {key: value for key, value in _flat(contents[name]) if before.get(key) != value}
            result[name] = {**result[source], **_by_keys(changed, contents[name], keys=result[source])}
        return result

    def _proposed(self, name: str, *, like: str | None) -> Mapping[str, Any] | None:
        """The JSON of a trial's job with the values that were proposed; None where there are none yet."""
        if name not in self.values or name not in self._jobs:
            return None
        proposed: Mapping[str, Any] = to_json(self._jobs[name] if like is None else self._job(name, like=like))
        return proposed

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Sends the requests that follow from the current results."""
        with self._lock:
            steering = self._steering()
            if steering:
                self._goals |= steering.goals
                self.records.request(steering.of_features)
                self._keep()
                self._act(steering)

    def trials(self) -> list[SweepTrial]:
        """Returns the state of each trainable trial."""
        names = [name for name in self.spec.trials if name in self._jobs]
        scores = self.spec.ranking.scores({name: self.reports.get(name, {}) for name in names})
        states = (
            SweepTrial(
                name=name,
                total=self._jobs[name].total_steps,
                goal=self._goals.get(name, 0),
                scores=scores[name],
                has_ended=self._statuses.get(name) in ENDED,
            )
            for name in names
        )
        return [self.records.state(state) for state in states]

    def _steering(self) -> SteeringRequest:
        deadline_s = self.spec.deadline_s
        if deadline_s is not None and self._clock() >= self._started_s + deadline_s:
            return SteeringRequest(stops=dict.fromkeys(self._left(), TOO_LATE))
        if ending := self._ending():
            return SteeringRequest(stops=dict.fromkeys(self._left(), ending))
        self._propose()
        unsettled = [name for name in self._left() if name in self.values and not self._goals.get(name)]
        likes = self._likes(unsettled)
        jobs = {name: self._job(name, like=like) for name, like in likes.items()}
        goals = {name: self._first_rung(job) for name, job in jobs.items()}
        self._goals |= goals
        decisions = self.spec.stopping.judge(
            self.trials(), num_slots=self._num_slots, is_absolute=self.spec.ranking.is_absolute
        )
        stops = {**decisions.stops, **{name: self._why_untrainable(name) for name in unsettled if name not in likes}}
        return SteeringRequest(
            jobs=jobs,
            likes=likes,
            goals={**goals, **decisions.goals},
            stops={name: why for name, why in stops.items() if self._statuses.get(name) not in ENDED},
            of_features=decisions.of_features,
        )

    def _ending(self) -> str:
        """Returns why the sweep ends now; empty while it goes on. Rules are asked when a trial has ended."""
        num_ended = sum(self._statuses.get(name) in ENDED for name in self._jobs)
        rules = [rule for rule in self._rules if rule.key not in self.proposals]
        if rules and self._num_judged < num_ended < len(self._jobs):
            self._num_judged, progress = num_ended, self.progress()
            made = {rule.key: proposal for rule in rules if (proposal := rule.proposal(progress))}
            for key, proposal in made.items():
                self.proposals[key] = replace(proposal, ends=key in self._ending_rules)
                self._notice(self.proposals[key].reason)
            if made:
                self._keep()
        return next((f"stopped early: {each.reason}" for each in self.proposals.values() if each.ends), "")

    def progress(self) -> SweepProgress:
        """Returns what is known of the sweep."""
        return SweepProgress(
            spec=self.spec,
            trials=self.trials(),
            reports=self.reports,
            done=frozenset(name for name in self._jobs if self._statuses.get(name) == JobStatus.DONE),
            device_s=sum(each.seconds * each.spec.num_devices for each in self._journal.segments()),
        )

    def _left(self) -> list[str]:
        return [name for name in self._jobs if self._statuses.get(name) not in ENDED]

    def _propose(self) -> None:
        """Assigns values to the trials that are next.

        Trial k is proposed once the first k - `num_parallel` + 1 trials have a score, and from these scores only, so
        that the proposals do not depend on which trial was faster.
        """
        names = self.spec.trials
        while len(self.values) < len(names):
            number = len(self.values)
            num_known = max(0, number - self.spec.num_parallel + 1)
            known = [self._compared_metrics(name) for name in names[:num_known]]
            if None in known:
                break
            results = zip(names[:number], [*known, *[None] * (number - num_known)], strict=True)
            earlier = [self.spec.proposed_trial(self.values[name], metrics) for name, metrics in results]
            self.values[names[number]] = self.spec.propose(number, earlier)

    def _compared_metrics(self, name: str) -> Mapping[str, float] | None:
        """Returns the metrics of a trial for proposals, or None while they are unknown.

        They are those at the first rung, where all trials are comparable, or the best ones at the trial's end.
        """
        reports, total = self.reports.get(name, {}), self._jobs[name].total_steps if name in self._jobs else 0
        first = self.spec.stopping.rungs(total)[0]
        if first in reports:
            return reports[first]
        has_ended = self._statuses.get(name) in ENDED
        return max(reports.values(), key=self.spec.ranking.score, default={}) if has_ended else None

    def _job(self, name: str, *, like: str) -> Job:
        job = self.spec.job(name, self.values[name])
        if job.num_steps is not None:
            return job
        return self.spec.stopping.with_rungs(replace(job, num_steps=self._jobs[like].total_steps, num_epochs=None))

    def _first_rung(self, job: Job) -> int:
        return self.spec.stopping.rungs(job.total_steps)[0]

    def _likes(self, names: Iterable[str]) -> dict[str, str]:
        """Returns, for each of the given trials, an initial trial of the same shape that can be trained.

        Trials of a shape that cannot be trained here are left out.
        """
        result = {}
        for name in names:
            shape = self.spec.shape(self.values[name])
            like = next((other for other, theirs in self._shapes.items() if theirs == shape), None)
            if like is not None:
                result[name] = like
        return result

    def _why_untrainable(self, name: str) -> str:
        shape = ", ".join(f"{key}: {value}" for key, value in self.spec.shape(self.values[name]).items())
        return f"stopped early: no trial with {shape} can be trained here; the failed trials have the reasons"

    # -- state ---------------------------------------------------------------------------------------------------------

    def _take_evaluation(self, name: str, report: EvaluationReported) -> None:
        with self._lock:
            reports = self.reports.setdefault(name, {})
            metrics = self.records.take(name, report, is_known=report.step in reports)
            if metrics is not None:
                reports[report.step] = dict(metrics)
                self._keep()

    def _keep(self) -> None:
        fact: dict[str, Any] = {"values": self.values, "goals": self._goals, "reports": self.reports}
        if self.proposals:
            fact["proposals"] = {key: vars(each) for key, each in self.proposals.items()}
        further = self.records.keep(fact)
        self._journal.put_all({FACT: fact, **further})


NO_VALUES = frozenset({"name", "warm_start", "evaluation"})
"""What a job that was added and its source differ in, although nobody has set it."""


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a job's JSON by dotted keys as in batch files, without what no person sets."""
    for key, value in content.items():
        if not prefix and key in NO_VALUES:
            continue
        path = f"{prefix}{'loss' if not prefix and key == 'loss_options' else key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _by_keys(changed: Mapping[str, Any], content: Mapping[str, Any], *, keys: Iterable[str]) -> dict[str, Any]:
    """Changed values by the keys of a sweep, some of which stand for all keys below them, or by their own."""
    result: dict[str, Any] = {}
    for path, value in changed.items():
        above = next((key for key in keys if path.startswith(f"{key}.")), None)
        result[above or path] = value if above is None else _at(content, above)
    return result


def _at(content: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        content = content["loss_options" if key == "loss" and isinstance(content.get("loss_options"), Mapping) else key]
    return content
