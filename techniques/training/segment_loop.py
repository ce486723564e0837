"""The loop of a segment: a gang trains each of its jobs from the newest checkpoint to the job's own last step.

Mostly that is one job. A gang that trains a group is known to its supervisor as the lead job, the job of the order.
Events of the other members carry the member's name, and members end one by one. A member that fails leaves the group,
and the others continue unaffected. When the lead job ends early, all other members are checkpointed, so that they can
continue without it.

If a config limits how many jobs are trained at once, the lead job and the first members start. The others wait. When a
job has left, the next waiting job joins between two steps, in the sequence of the order's `members`.

All ranks of a gang act on the sums of the commands that they received, so they do the same at the same steps. A loss
that is not finite fails one job, also with several ranks, because all ranks see it. Any other error may occur on one
rank alone, and ends a gang of several ranks.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol, TypeVar

from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.processes.failures import failure_kind
from ringmaster.techniques.processes.gang_events import JobOfGroupEnded, JobResult, OutcomeStatus
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.processes.reporter import STOP, Reporter
from ringmaster.techniques.training.callbacks import TrainerCallback
from ringmaster.techniques.training.job_session import JobSession, SessionJob
from ringmaster.techniques.training.trainer import StepReport

T = TypeVar("T")

BUILD_TIMEOUT_S = 300.0  # to read data, make a model, compile: silent work of unknown length
SAVE_TIMEOUT_S = 300.0
# A rank counts as hung when a step takes this many times the slowest so far, and at least some seconds.
TIMEOUT_STEPS, MIN_TIMEOUT_S, FIRST_STEP_TIMEOUT_S = 20.0, 10.0, 300.0
LOST = "the loss became {loss} at step {step}. To fix: a lower learning rate, a warm-up, or clip_grad_norm"
NOTHING = "the batch of step {step} has no label to learn from. To fix: leave such samples out"


class Stepper(Protocol):
    """What takes the steps of the jobs that a gang trains now.

    isolates: whether a job that fails leaves the others unaffected. If not, its error ends the gang.
    """

    ranks: RankContext
    isolates: bool

    def open(self, order: GangOrder) -> SessionJob:
        """Returns a job, with its newest checkpoint restored."""

    def join(self, rank_job: SessionJob) -> None:
        """Trains a job from the next step on."""

    def remove_job(self, rank_job: SessionJob) -> None:
        """Trains a job no longer."""

    def step(self, rank_jobs: Sequence[SessionJob], votes: tuple[float, ...]) -> dict[str, StepReport]:
        """Takes the next step of jobs; returns their reports by name. votes: summed over the ranks, if given."""

    def evaluate(self, rank_jobs: Sequence[SessionJob]) -> Mapping[str, Mapping[str, float]]:
        """Returns the metrics of jobs over their held-out data, by name."""


class StandaloneJob(SessionJob, Protocol):
    """A job that a gang trains alone: a trainer, or what a feature makes instead."""

    def step(self, votes: tuple[float, ...] = ()) -> StepReport:
        """Trains the next global step; `votes` are summed over the ranks."""

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics over held-out data."""


class SingleStepper:
    """Takes the steps of one job. The votes of the ranks are summed with its loss."""

    isolates = False

    def __init__(self, rank_job: StandaloneJob) -> None:
        self._rank_job, self.ranks = rank_job, rank_job.ranks

    def open(self, order: GangOrder) -> SessionJob:
        """Restores the job's newest checkpoint."""
        assert order.checkpoint_dir is not None
        self._rank_job.restore(order.checkpoint_dir, known_step=order.known_step)
        return self._rank_job

    def join(self, rank_job: SessionJob) -> None:
        """Does nothing."""

    def remove_job(self, rank_job: SessionJob) -> None:
        """Does nothing."""

    def step(self, rank_jobs: Sequence[SessionJob], votes: tuple[float, ...]) -> dict[str, StepReport]:
        """Takes the job's next step."""
        return {self._rank_job.job.name: self._rank_job.step(votes)}

    def evaluate(self, rank_jobs: Sequence[SessionJob]) -> dict[str, dict[str, float]]:
        """Evaluates the job."""
        return {self._rank_job.job.name: self._rank_job.evaluate()}


def train_segment(rank_job: StandaloneJob, order: GangOrder, reporter: Reporter) -> JobResult:
    """Trains one job to `order.last_step`; after its last step, evaluates and exports its model. Returns the result."""
    segment = SegmentLoop(SingleStepper(rank_job), [order], reporter)
    segment.train()
    return segment.outcomes[order.job.name]


@dataclass(frozen=True, kw_only=True)
class _Votes:
    """What a rank contributes to the sum after a step, and which of the values belong to which job.

    values: whether to stop, the lead job's last step, whether each of `waiting` leaves, and those of the jobs.
    waiting: the names of the jobs that wait for a position.
    sessions: the jobs in training, and how many values each has: whether it leaves, and the state of its saves.
    """

    values: tuple[float, ...]
    waiting: Sequence[str]
    sessions: Sequence[tuple[JobSession, int]]


class SegmentLoop:
    """The jobs that a gang trains now, the jobs that wait, and the outcomes of those that have ended.

    orders: of the jobs; the lead job's first.
    at_once: the most jobs that are trained at once; None for all.
    """

    def __init__(
        self, stepper: Stepper, orders: Sequence[GangOrder], reporter: Reporter, *, at_once: int | None = None
    ) -> None:
        self._stepper, self._order, self._reporter = stepper, orders[0], reporter
        self._ranks = stepper.ranks
        self._waiting = list(orders)
        self._at_once = at_once or len(orders)
        self._sessions: dict[str, JobSession] = {}
        self.outcomes: dict[str, JobResult] = {}
        self._until = 0  # last step of the latest command to the lead job to continue

    def train(self) -> None:
        """Trains all jobs, step by step, until none is left."""
        self._fill(since_s=self._order.ordered_at_s)
        timeout = StepTimeout(self._reporter)
        while self._sessions:
            seconds, did_more = self._step()
            timeout.learn(seconds)
            if self._fill(since_s=time.monotonic()) or did_more:
                timeout.announce()

    @property
    def _is_dissolved(self) -> bool:
        """Whether the lead job ended early."""
        lead = self.outcomes.get(self._order.job.name)
        return lead is not None and lead.status != OutcomeStatus.DONE

    @property
    def _in_line(self) -> list[str]:
        """The names of the jobs that wait for a position, in order."""
        return [order.job.name for order in self._waiting]

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self) -> tuple[float, bool]:
        """Takes one step of all jobs, and does what is due or commanded after it.

        Returns the duration of the step in seconds, and whether jobs were saved, evaluated or ended.
        """
        started_s, sessions = time.perf_counter(), list(self._sessions.values())
        votes = None if self._stepper.isolates else self._votes()
        values = () if votes is None else votes.values
        reports = self._all_or_each(sessions, lambda rank_jobs: self._stepper.step(rank_jobs, values))
        seconds = time.perf_counter() - started_s
        for name, report in reports.items():
            if math.isfinite(report.loss):
                self._sessions[name].progress.add(report)
            else:
                self._lose(self._sessions[name], report)
        self._reporter.beat()
        if votes is None:  # a job that failed has no votes any more
            votes = self._votes()
            return seconds, self._act_on(votes, self._ranks.sum([*votes.values]))
        return seconds, self._act_on(votes, reports[self._order.job.name].vote_sums)

    def _lose(self, session: JobSession, report: StepReport) -> None:
        """Ends a job whose loss is not finite."""
        message = (LOST if report.count else NOTHING).format(loss=report.loss, step=report.index)
        if self._stepper.isolates:
            self._end(session, OutcomeStatus.INVALID, message=message)
        else:
            session.end(OutcomeStatus.INVALID)  # the state being saved is valid, and all ranks reach this line
            raise ValueError(message)

    def _all_or_each(
        self, sessions: Sequence[JobSession], act: Callable[[Sequence[SessionJob]], Mapping[str, T]]
    ) -> Mapping[str, T]:
        """Runs `act` on all jobs at once. If it fails, runs it on each alone: the job at fault fails again."""
        try:
            return act([session.rank_job for session in sessions])
        except Exception as error:  # a user's data or loss may raise anything: the others can continue
            if self._ends_gang(error):
                raise
            traceback.print_exception(error)
        result: dict[str, T] = {}
        for session in sessions:
            self._try(session, lambda session=session: result.update(act([session.rank_job])))  # type: ignore[misc]
            self._reporter.beat()
        return result

    def _votes(self) -> _Votes:
        """Returns the votes of this rank, in the same order on every rank.

        A command to one rank reaches all. Only the first rank sets the last step.
        """
        reported, sessions = self._reporter.commanded_to_leave(), list(self._sessions.values())
        is_over = self._reporter.has_command(STOP) or self._order.job.name in reported
        until = float(self._reporter.commanded_until()) if self._ranks.rank == 0 else 0.0
        never_begun = {name: float(name in reported) for name in self._in_line}
        votes = [(float(session.name in reported), *session.votes()) for session in sessions]
        values = (float(is_over), until, *never_begun.values(), *chain.from_iterable(votes))
        return _Votes(values=values, waiting=[*never_begun], sessions=[*zip(sessions, map(len, votes), strict=True)])

    def _act_on(self, votes: _Votes, sums: Sequence[float]) -> bool:
        """Saves, evaluates and ends jobs after a step, as due or commanded; returns whether it did any of these.

        sums: of all ranks' votes.
        """
        left = iter(sums)
        is_over, self._until = next(left) > 0, int(next(left))
        leaving, due = {name for name in votes.waiting if next(left) > 0}, set[str]()
        for session, num_values in votes.sessions:
            leaves, *saves = islice(left, num_values)
            if leaves:
                leaving.add(session.name)
            if session.advance_save(saves):
                due.add(session.name)
        self._prolong(self._sessions.values())
        is_over = is_over or self._is_dissolved
        if is_over:
            self._end_waiting(self._in_line, OutcomeStatus.PREEMPTED)
        else:
            self._end_waiting(leaving, OutcomeStatus.LEFT)
        under_way = [session for session in self._sessions.values() if not session.is_done]
        ending = [session for session in under_way if is_over or session.name in leaving]
        unsaved = [session for session in under_way if session not in ending and session.is_unsaved]
        saving = [s for s in under_way if s not in ending and s not in unsaved and s.name in due]
        if ending or saving or unsaved:
            self._reporter.phase("saving", timeout_s=SAVE_TIMEOUT_S)
        for session in unsaved:
            self._try(session, session.save)
        for session in saving:
            session.begin_save()
        for session in self._saved(ending):
            self._end(session, OutcomeStatus.PREEMPTED if is_over else OutcomeStatus.LEFT)
        settled = self._settle(
            [session for session in self._sessions.values() if session.is_done or session.is_evaluated]
        )
        return bool(ending or saving or unsaved or settled)

    def _settle(self, sessions: Sequence[JobSession]) -> bool:
        """Saves finished jobs, evaluates together all jobs that are due, and ends finished jobs."""
        if not sessions:
            return False
        kept = self._saved_or_ended([session for session in sessions if session.is_done])
        kept += [session for session in sessions if not session.is_done]
        measured = [session for session in kept if session.is_at_its_end or session.is_evaluated]
        while measured:
            self._reporter.phase("evaluating", timeout_s=SAVE_TIMEOUT_S)
            started_s = time.perf_counter()
            metrics = self._all_or_each(measured, self._stepper.evaluate)
            seconds = (time.perf_counter() - started_s) / len(measured)
            for name, result in metrics.items():
                self._sessions[name].measured(result, seconds=seconds)
            measured = self._continued([session for session in measured if session.name in self._sessions])
        done = self._saved_or_ended([session for session in self._sessions.values() if session.is_done])
        if any(session.is_at_its_end for session in done):
            self._reporter.phase("exporting", timeout_s=SAVE_TIMEOUT_S)
        for session in done:
            if not session.is_at_its_end:
                self._end(session, OutcomeStatus.PREEMPTED if session.is_interrupted else OutcomeStatus.DONE)
            elif self._try(session, session.export):
                self._end(session, OutcomeStatus.DONE if session.is_exported else OutcomeStatus.PREEMPTED)
            self._reporter.beat()
        return True

    def _continued(self, sessions: Sequence[JobSession]) -> list[JobSession]:
        """Returns the jobs of which another evaluation follows at once, the same on every rank."""
        leaving = self._reporter.commanded_to_leave()
        is_over = self._reporter.has_command(STOP) or self._order.job.name in leaving
        votes = list[tuple[JobSession, TrainerCallback, tuple[float, ...]]]()
        for session, callback in ((each, callback) for each in sessions for callback in each.rank_job.callbacks):
            values = callback.evaluation_votes(self._reporter, is_leaving=is_over or session.name in leaving)
            votes += [(session, callback, values)] if values else []
        sums = iter(self._ranks.sum([*chain.from_iterable(values for *_, values in votes)]) if votes else ())
        return [
            session
            for session, callback, values in votes
            if callback.continues_evaluation([*islice(sums, len(values))])
        ]

    def _saved_or_ended(self, sessions: Sequence[JobSession]) -> list[JobSession]:
        """Saves finished jobs; ends those of which a command ends the wait for a full disk, and returns the others."""
        if any(session.has_unsaved_steps for session in sessions):
            self._reporter.phase("saving", timeout_s=SAVE_TIMEOUT_S)
        saved = self._saved(sessions)
        for session in saved:
            if session.is_unsaved:
                self._end(session, OutcomeStatus.PREEMPTED)
        return [session for session in saved if not session.is_unsaved]

    def _saved(self, sessions: Sequence[JobSession]) -> list[JobSession]:
        """Writes the last checkpoints of jobs concurrently; returns the jobs for which this succeeded."""
        for session in sessions:
            session.begin_last_save()
        return [session for session in sessions if self._try(session, session.save)]

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def _fill(self, *, since_s: float) -> bool:
        """Fills free positions with waiting jobs; returns whether any joined.

        Jobs with nothing left to train join too, so that they can be evaluated.
        since_s: the time from which the first jobs' start-up is counted.
        """
        has_any = False
        while self._waiting and len(self._sessions) < self._at_once:
            self._reporter.phase("restoring", timeout_s=SAVE_TIMEOUT_S)
            known = set(self._sessions)
            while self._waiting and len(self._sessions) < self._at_once:
                self._admit(self._waiting.pop(0))
                self._reporter.beat()
            new = [session for name, session in self._sessions.items() if name not in known]
            startup_s = time.monotonic() - since_s
            for session in new:
                self._stepper.join(session.rank_job)
                session.ready(startup_s=startup_s)
            self._prolong(new)
            self._settle([session for session in new if session.may_end_now])
            has_any, since_s = True, time.monotonic()
        return has_any

    def _end_waiting(self, jobs: Collection[str], status: OutcomeStatus) -> None:
        """Ends those of `jobs` that are waiting, with `status`."""
        gone = [order for order in self._waiting if order.job.name in jobs]
        self._waiting = [order for order in self._waiting if order.job.name not in jobs]
        for order in gone:
            self._close(order.job.name, JobResult(status=status, step=_steps_done(order)))

    def _prolong(self, sessions: Iterable[JobSession]) -> None:
        """Extends the jobs' last steps by as many steps as the lead job's was extended."""
        if self._until > self._order.last_step:
            for session in sessions:
                session.prolong(self._until - self._order.last_step)

    def _admit(self, order: GangOrder) -> None:
        """Admits a waiting job, which restores its newest checkpoint."""
        name = order.job.name
        try:
            rank_job = self._stepper.open(order)
        except Exception as error:  # noqa: BLE001 - a user's data may raise anything: the others can continue
            status, message = self._verdict(name, error)
            self._close(name, JobResult(status=status, step=_steps_done(order), message=message))
        else:
            sender = self._reporter.about(name) if self._stepper.isolates else self._reporter
            self._sessions[name] = JobSession(rank_job, reporter=self._reporter, sender=sender)

    def _try(self, session: JobSession, action: Callable[[], None]) -> bool:
        """Runs `action`; returns whether it succeeded. A job for which it fails is checkpointed and leaves."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - as above
            status, message = self._verdict(session.name, error)
            if action == session.save:
                status = OutcomeStatus.INVALID
            if status == OutcomeStatus.INVALID or self._try(session, session.save):
                self._end(session, status, message=message)
            return False
        return True

    def _ends_gang(self, error: Exception) -> bool:
        """Whether an error is not one job's alone."""
        is_of_device = failure_kind(error) == OutcomeStatus.OUT_OF_MEMORY
        return not self._stepper.isolates or self._ranks.num_ranks > 1 or is_of_device

    def _verdict(self, job: str, error: Exception) -> tuple[OutcomeStatus, str]:
        """The status and message of a job in which an error occurred; re-raises errors that are not the job's alone."""
        kind = failure_kind(error)
        if self._ends_gang(error) or (kind != OutcomeStatus.INVALID and job == self._order.job.name):
            raise error
        traceback.print_exception(error)
        # A retry may fix any other error. It can also occur when the job is trained alone, and is handled there.
        status = OutcomeStatus.INVALID if kind == OutcomeStatus.INVALID else OutcomeStatus.PREEMPTED
        return status, f"{type(error).__name__}: {error}"

    def _end(self, session: JobSession, status: OutcomeStatus, *, message: str = "") -> None:
        del self._sessions[session.name]
        self._stepper.remove_job(session.rank_job)
        is_lead = session.name == self._order.job.name
        status = OutcomeStatus.PREEMPTED if is_lead and status == OutcomeStatus.LEFT else status
        self._close(session.name, session.end(status, message=message))

    def _close(self, job: str, outcome: JobResult) -> None:
        """Keeps the outcome of a job. None joins any more once the lead job has ended early."""
        self.outcomes[job] = outcome
        if self._is_dissolved:
            self._end_waiting(self._in_line, OutcomeStatus.PREEMPTED)
        if job != self._order.job.name and outcome.status != OutcomeStatus.PREEMPTED:
            self._reporter.about(job).send(JobOfGroupEnded(outcome=outcome))


def _steps_done(order: GangOrder) -> int:
    """The steps of a job's newest checkpoint, for a job that could not be opened."""
    checkpoint = CheckpointStore(order.checkpoint_dir).newest() if order.checkpoint_dir is not None else None
    return checkpoint.manifest.step if checkpoint is not None else 0


class StepTimeout:
    """The time that a step may take before its rank counts as hung, learnt from the steps so far."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._slowest_s = 0.0
        self._timeout_s = FIRST_STEP_TIMEOUT_S
        self.announce()

    def learn(self, seconds: float) -> None:
        """Updates the timeout with the duration of a step."""
        self._slowest_s = max(self._slowest_s, seconds)
        timeout_s = max(TIMEOUT_STEPS * self._slowest_s, MIN_TIMEOUT_S)
        if self._timeout_s == FIRST_STEP_TIMEOUT_S or timeout_s > self._timeout_s:
            self._timeout_s = timeout_s
            self.announce()

    def announce(self) -> None:
        """Reports that the rank is training, with the present timeout."""
        self._reporter.phase("training", timeout_s=self._timeout_s)
