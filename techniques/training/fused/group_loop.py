"""The loop of a group's segment: one gang trains each job from its newest checkpoint to the job's own last step.

The supervisor sees a group as its lead job, the job of the order. Events of the other members carry the member's name,
and members end one by one. A member that fails leaves the group, and the others go on unaffected. When the lead job
ends early, all other members are checkpointed, so that they can go on without it.

If a config limits how many jobs are trained at once (`at_once`), the lead job and the first members start. The others
wait. When a job has left, the next waiting job joins between two steps, in the sequence of the order's `members`.

All ranks of a gang act on the sums of the commands that they received, so they do the same at the same steps. A loss
that is not finite fails one job, also with several ranks, because all ranks see it. Any other error may occur on one
rank alone, and ends a gang of several ranks.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.saving import Saver, SaveVotes
from ringmaster.techniques.processes.events import (
    NUM_ROWS,
    EvaluationReported,
    JobOfGroupEnded,
    JobReady,
    OutcomeStatus,
)
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import Ranks
from ringmaster.techniques.processes.reporter import STOP, Reporter
from ringmaster.techniques.processes.worker import failure_kind
from ringmaster.techniques.training import segment_loop
from ringmaster.techniques.training.fused.group import FusedGroup, MemberReport, join_group, open_group, orders_of
from ringmaster.techniques.training.fused.group_requirements import AT_ONCE
from ringmaster.techniques.training.fused.member import GroupMember
from ringmaster.techniques.training.trainer import StepReport

T = TypeVar("T")

NOTHING = "the batch of step {step} has no label to learn from. To fix: leave such samples out"


def run(order: GangOrder, reporter: Reporter, *, rank: int = 0) -> dict[str, Any]:
    """Trains the order's job and its members. Returns the lead job's result, with the members' results as "fellows".

    Raises errors that no single member causes: the base cannot be built, memory runs out, or a device fails.
    """
    segment = _GroupSegment(order, reporter, rank=rank)
    segment.train()
    return segment.result()


class _GroupSegment:
    """The jobs that a gang trains now, the jobs that wait, and the outcomes of those that have ended."""

    def __init__(self, order: GangOrder, reporter: Reporter, *, rank: int) -> None:
        self._order, self._reporter = order, reporter
        self._ranks = join_group(order, rank)
        reporter.phase("loading the base", timeout_s=segment_loop.BUILD_TIMEOUT_S)
        self._group = open_group(order, self._ranks)
        self._waiting = orders_of(order)
        self._at_once = order.config.get(AT_ONCE) or len(self._waiting)
        self._positions: dict[str, MemberSession] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._until = 0  # last step of the latest command to the lead job to go on

    def train(self) -> None:
        """Trains all jobs, step by step, until none is left."""
        self._fill(since_s=self._order.ordered_at_s)
        timeout = segment_loop.StepTimeout(self._reporter)
        while self._positions:
            timeout.learn(self._step())
            did_more = self._follow()
            if self._fill(since_s=time.monotonic()) or did_more:
                timeout.announce()
        self._ranks.agree(True)  # no rank exits while a peer may still wait for it

    def result(self) -> dict[str, Any]:
        """The lead job's outcome, with the members' outcomes by name."""
        outcomes = dict(self._outcomes)
        return {**outcomes.pop(self._order.job.name), "fellows": outcomes}

    @property
    def _is_dissolved(self) -> bool:
        """Whether the lead job ended early."""
        lead = self._outcomes.get(self._order.job.name)
        return lead is not None and lead["status"] != OutcomeStatus.DONE

    @property
    def _in_line(self) -> list[str]:
        """The names of the jobs that wait for a position, in order."""
        return [order.job.name for order in self._waiting]

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """Takes one step of all jobs; returns its duration in seconds."""
        started_s = time.perf_counter()
        reports = self._all_or_each(list(self._positions.values()), self._stepped)
        seconds = time.perf_counter() - started_s
        for name, report in reports.items():
            if math.isfinite(report.loss):
                self._positions[name].stepped(report, seconds=seconds)
            else:
                lost = (
                    segment_loop.lost_loss(report.loss, step=report.step)
                    if report.count
                    else NOTHING.format(step=report.step)
                )
                self._end(self._positions[name], OutcomeStatus.INVALID, message=lost)
        self._reporter.beat()
        return seconds

    def _stepped(self, positions: Sequence[MemberSession]) -> dict[str, MemberReport]:
        if len(positions) == len(self._group.members):
            return self._group.step()
        few = FusedGroup(self._group.stem)
        for position in positions:
            few.join(position.member)
        return few.step()

    def _evaluated(self, positions: Sequence[MemberSession]) -> dict[str, dict[str, float]]:
        return self._group.evaluate([position.member for position in positions], beat=self._reporter.beat)

    def _all_or_each(
        self, positions: Sequence[MemberSession], act: Callable[[Sequence[MemberSession]], dict[str, T]]
    ) -> dict[str, T]:
        """Runs `act` on all positions at once. If it fails, runs it on each alone: the job at fault fails again."""
        try:
            return act(positions)
        except Exception as error:  # a user's data or loss may raise anything: the others can go on
            if self._ranks.num_ranks > 1 or failure_kind(error) == OutcomeStatus.OUT_OF_MEMORY:
                raise
            traceback.print_exception(error)
        result: dict[str, T] = {}
        for position in positions:
            self._try(position, lambda position=position: result.update(act([position])))  # type: ignore[misc]
            self._reporter.beat()
        return result

    def _follow(self) -> bool:
        """Saves, evaluates and ends jobs after a step, as due or commanded; returns whether it did any of these."""
        is_over, self._until, leaving, due = self._requests()
        self._prolong(self._positions.values())
        is_over = is_over or self._is_dissolved
        if is_over:
            self._dismiss(self._in_line, OutcomeStatus.PREEMPTED)
        else:
            self._dismiss(leaving, OutcomeStatus.LEFT)
        on_the_way = [position for position in self._positions.values() if not position.is_done]
        ending = [position for position in on_the_way if is_over or position.name in leaving]
        unsaved = [position for position in on_the_way if position not in ending and position.is_unsaved]
        saving = [p for p in on_the_way if p not in ending and p not in unsaved and p.name in due]
        if ending or saving or unsaved:
            self._reporter.phase("saving", timeout_s=segment_loop.SAVE_TIMEOUT_S)
        for position in unsaved:
            self._try(position, position.save)
        for position in saving:
            position.begin_save()
        for position in self._saved(ending):
            self._end(position, OutcomeStatus.PREEMPTED if is_over else OutcomeStatus.LEFT)
        settled = self._settle(
            [position for position in self._positions.values() if position.is_done or position.wants_metrics]
        )
        return bool(ending or saving or unsaved or settled)

    def _requests(self) -> tuple[bool, int, set[str], set[str]]:
        """The requests of all ranks, equal on every rank: (stop, lead job's last step, jobs to leave, jobs to save).

        The ranks' requests are summed, so a command to one rank reaches all. Only the first rank sets the last step.
        """
        reported, positions = self._reporter.commanded_to_leave(), list(self._positions.values())
        waiting = self._in_line
        is_over = self._reporter.has_command(STOP) or self._order.job.name in reported
        asks = [(float(position.name in reported), *position.asks()) for position in positions]
        until = float(self._reporter.commanded_until()) if self._ranks.rank == 0 else 0.0
        never_begun = [float(name in reported) for name in waiting]
        sums = iter(self._ranks.sum([float(is_over), until, *never_begun, *chain.from_iterable(asks)]))
        is_over, until = next(sums) > 0, next(sums)
        leaving, due = {name for name in waiting if next(sums) > 0}, set[str]()
        for position, requests in zip(positions, asks, strict=True):
            leaves, *saves = islice(sums, len(requests))
            if leaves:
                leaving.add(position.name)
            if position.follow(saves):
                due.add(position.name)
        return is_over, int(until), leaving, due

    def _settle(self, positions: Sequence[MemberSession]) -> bool:
        """Saves finished jobs, evaluates together all jobs that are due, and ends finished jobs."""
        if not positions:
            return False
        self._reporter.phase("saving", timeout_s=segment_loop.SAVE_TIMEOUT_S)
        kept = [position for position in positions if not position.is_done]
        for position in self._saved([position for position in positions if position.is_done]):
            if position.is_unsaved:  # a command has ended the wait for a full disk
                self._end(position, OutcomeStatus.PREEMPTED)
            else:
                kept.append(position)
        if measured := [position for position in kept if position.is_at_its_end or position.wants_metrics]:
            self._reporter.phase("evaluating", timeout_s=segment_loop.SAVE_TIMEOUT_S)
            started_s = time.perf_counter()
            metrics = self._all_or_each(measured, self._evaluated)
            seconds = (time.perf_counter() - started_s) / len(measured)
            for name, result in metrics.items():
                self._positions[name].measured(result, seconds=seconds)
        done = [position for position in self._positions.values() if position.is_done]
        if any(position.is_at_its_end for position in done):
            self._reporter.phase("exporting", timeout_s=segment_loop.SAVE_TIMEOUT_S)
        for position in done:
            if not position.is_at_its_end or self._try(position, position.export):
                self._end(position, OutcomeStatus.DONE)
            self._reporter.beat()
        return True

    def _saved(self, positions: Sequence[MemberSession]) -> list[MemberSession]:
        """Writes the last checkpoints of all positions concurrently; returns the positions for which this succeeded."""
        for position in positions:
            position.begin_last_save()
        return [position for position in positions if self._try(position, position.save)]

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def _fill(self, *, since_s: float) -> bool:
        """Fills free positions with waiting jobs; returns whether any joined.

        Jobs with nothing left to train join too: the base takes their adapters, so that they can be evaluated.
        since_s: the time from which the first jobs' start-up is counted.
        """
        has_any = False
        while self._waiting and not self._is_dissolved and len(self._positions) < self._at_once:
            self._reporter.phase("restoring", timeout_s=segment_loop.SAVE_TIMEOUT_S)
            new = self._admitted()
            startup_s = time.monotonic() - since_s
            for position in new:
                self._group.join(position.member)
                position.ready(startup_s=startup_s)
            self._prolong(new)
            self._settle([position for position in new if position.is_done])
            has_any, since_s = True, time.monotonic()
        if self._is_dissolved:
            self._dismiss(self._in_line, OutcomeStatus.PREEMPTED)
        return has_any

    def _admitted(self) -> list[MemberSession]:
        """Admits waiting jobs to the free positions; each restores its newest checkpoint."""
        known = set(self._positions)
        while self._waiting and not self._is_dissolved and len(self._positions) < self._at_once:
            self._admit(self._waiting.pop(0))
            self._reporter.beat()
        return [position for name, position in self._positions.items() if name not in known]

    def _dismiss(self, jobs: Collection[str], status: OutcomeStatus) -> None:
        """Ends those of `jobs` that are waiting, with `status`."""
        gone = [order for order in self._waiting if order.job.name in jobs]
        self._waiting = [order for order in self._waiting if order.job.name not in jobs]
        for order in gone:
            self._close(order.job.name, {"status": status, "step": _steps_done(order)})

    def _prolong(self, positions: Iterable[MemberSession]) -> None:
        """Extends the positions' last steps by as many steps as the lead job's was extended."""
        for position in positions:
            if self._until > self._order.last_step:
                position.go_on(self._until - self._order.last_step)

    def _admit(self, order: GangOrder) -> None:
        try:
            member = GroupMember(order, self._group.stem.model, device=self._ranks.device, ranks=self._ranks)
            member.restore()
        except Exception as error:  # noqa: BLE001 - a user's data may raise anything: the others can go on
            status, message = self._verdict(order.job.name, error)
            self._close(order.job.name, {"status": status, "step": _steps_done(order), "message": message})
        else:
            self._positions[order.job.name] = MemberSession(member, self._ranks, self._reporter)

    def _try(self, position: MemberSession, action: Callable[[], None]) -> bool:
        """Runs `action`; returns whether it succeeded. A job for which it fails is checkpointed and leaves."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - as above
            status, message = self._verdict(position.name, error)
            if action == position.save:
                status = OutcomeStatus.INVALID
            if status == OutcomeStatus.INVALID or self._try(position, position.save):
                self._end(position, status, message=message)
            return False
        return True

    def _verdict(self, job: str, error: Exception) -> tuple[OutcomeStatus, str]:
        """The status and message of a job in which an error occurred; re-raises errors that are not the job's alone."""
        kind = failure_kind(error)
        if (
            kind == OutcomeStatus.OUT_OF_MEMORY
            or self._ranks.num_ranks > 1
            or (kind != OutcomeStatus.INVALID and job == self._order.job.name)
        ):
            raise error
        traceback.print_exception(error)
        # A retry may fix any other error. It can also occur when the job is trained alone, and is handled there.
        status = OutcomeStatus.INVALID if kind == OutcomeStatus.INVALID else OutcomeStatus.PREEMPTED
        return status, f"{type(error).__name__}: {error}"

    def _end(self, position: MemberSession, status: OutcomeStatus, *, message: str = "") -> None:
        del self._positions[position.name]
        self._group.leave(position.member)
        is_lead = position.name == self._order.job.name
        status = OutcomeStatus.PREEMPTED if is_lead and status == OutcomeStatus.LEFT else status
        self._close(position.name, position.end(status, message=message))

    def _close(self, job: str, outcome: dict[str, Any]) -> None:
        self._outcomes[job] = outcome
        if job != self._order.job.name and outcome["status"] != OutcomeStatus.PREEMPTED:
            self._reporter.about(job).send(JobOfGroupEnded(outcome=outcome))


def _steps_done(order: GangOrder) -> int:
    """The steps of a job's newest checkpoint, for a job whose member could not be created."""
    checkpoint = CheckpointStore(order.checkpoint_dir).newest() if order.checkpoint_dir is not None else None
    return checkpoint.manifest.step if checkpoint is not None else 0


class MemberSession:
    """A member's position in a gang: reports the member's events and saves its checkpoints. `last_step` may grow."""

    def __init__(self, member: GroupMember, ranks: Ranks, reporter: Reporter) -> None:
        self.member, self.first_step, self.last_step = member, member.next_step, member.order.last_step
        self._reporter, self._sender = reporter, reporter.about(member.name)
        self._progress = segment_loop.StepProgress(self._sender, ranks)
        self._saver = Saver(member, member.store(member.root), self._sender, ranks=ranks)
        self._saved_s, self._saved_step = time.monotonic(), member.next_step
        self._seconds: dict[str, float] = {}
        self._metrics: Mapping[str, float] | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.member.name

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train in this segment."""
        return self.member.next_step >= self.last_step

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left to train in any segment."""
        return self.member.next_step == self.member.job.total_steps

    @property
    def wants_metrics(self) -> bool:
        """Whether an evaluation is due after this step, which is not the job's last."""
        return self.member.job.is_evaluated(self.member.next_step)

    def go_on(self, num_steps: int) -> None:
        """Extends `last_step` to `num_steps` beyond the ordered last step, at most to the job's last."""
        job, ordered = self.member.job, self.member.order.last_step
        self.last_step = max(self.last_step, min(job.total_steps, ordered + num_steps))

    # -- events --------------------------------------------------------------------------------------------------------

    def ready(self, *, startup_s: float) -> None:
        """Reports that the member is about to take its first step, and which damaged checkpoints were skipped."""
        self._seconds["startup_s"] = startup_s
        self.member.begin_segment(self.member.root)
        self._sender.send(JobReady(step=self.first_step, startup_s=startup_s))
        for event in self.member.first_events():
            self._sender.send(event)

    def stepped(self, report: MemberReport, *, seconds: float) -> None:
        """Reports a step. seconds: the duration of the gang's step."""
        self._progress.add(
            StepReport(
                step=report.step,
                loss=report.loss,
                seconds=seconds,
                requests=(),
                num_samples=self.member.job.global_batch_size,
                num_tokens=report.num_tokens,
            )
        )

    def measured(self, metrics: Mapping[str, float], *, seconds: float) -> None:
        """Reports metrics, or stores them for the outcome at the job's end. seconds: its share of the evaluation."""
        if self.is_at_its_end:
            self._metrics, self._seconds["evaluate_s"] = metrics, seconds
        else:
            self._progress.flush()
            step, num_rows = self.member.next_step, self.member.num_evaluated_rows()
            self._sender.send(EvaluationReported(step=step, metrics=metrics, wall_s=time.time(), num_rows=num_rows))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def asks(self) -> tuple[float, ...]:
        """The rank's save requests, to be summed over the ranks. Either all ranks have a save under way, or none."""
        every_s = self.member.order.checkpoint_every_s
        is_due = every_s is not None and time.monotonic() - self._saved_s >= every_s
        return (float(is_due),) if self._saver.is_idle else (float(is_due), *self._saver.asks())

    def follow(self, sums: Sequence[float]) -> bool:
        """Advances a save under way by the ranks' summed requests; returns whether another save is to begin."""
        is_due, *asks = sums
        if asks:
            self._saver.follow(SaveVotes(*asks))
        return is_due > 0 and self._saver.is_idle

    @property
    def is_unsaved(self) -> bool:
        """Whether its last save failed; `save` then tries again before the gang trains on."""
        return self._saver.has_failed

    def begin_save(self) -> None:
        """Copies the state and writes it while training goes on."""
        self._saved_s = time.monotonic()
        self._saver.begin()

    def begin_last_save(self) -> None:
        """Starts writing the unsaved state without a copy. The member must not train before `save`, which waits."""
        if self.member.next_step > self._saved_step:
            self._saved_s, self._saved_step = time.monotonic(), self.member.next_step
            self._saver.begin_last()

    def save(self) -> None:
        """Saves the last state and waits until it is published, also where a disk is full for a while.

        A command to stop or to leave ends the wait. Raises CheckpointError where it is full for too long.
        """
        self.begin_last_save()
        self._saver.finish_last(gives_up=self._is_dismissed)
        if self._saved_step > self.first_step:
            self._seconds.setdefault("save_s", time.monotonic() - self._saved_s)

    def export(self) -> None:
        """Writes the finished model."""
        started_s = time.perf_counter()
        self.member.export()
        self._seconds["evaluate_s"] += time.perf_counter() - started_s

    def end(self, status: OutcomeStatus, *, message: str = "") -> dict[str, Any]:
        """Ends the position: finishes its save, sends its remaining steps and returns its outcome.

        The outcome has the form that `ringmaster.techniques.training.segment_loop.train_segment` returns.
        """
        self._saver.finish()
        self._progress.flush()
        step = self._saver.saved_step if self._saver.has_failed else self.member.next_step
        outcome: dict[str, Any] = {"status": status, "first_step": self.first_step, "step": step}
        outcome |= self._seconds
        if status == OutcomeStatus.DONE and self._metrics is not None:
            outcome |= {"metrics": dict(self._metrics), NUM_ROWS: self.member.num_evaluated_rows()}
        return {**outcome, "message": message} if message else outcome

    def _is_dismissed(self) -> bool:
        return self._reporter.has_command(STOP) or self.name in self._reporter.commanded_to_leave()
