"""The position of a member in a group's gang: its events, saves and last step, from its first step to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.techniques.runtime.checkpoints.saving import Asks, Saver
from ringmaster.techniques.runtime.processes.events import Metrics, OutcomeStatus, Ready
from ringmaster.techniques.runtime.processes.ranks import Ranks
from ringmaster.techniques.runtime.processes.reporter import STOP, Reporter
from ringmaster.techniques.training.fused.group import MemberReport
from ringmaster.techniques.training.fused.member import Member
from ringmaster.techniques.training.segment_loop import Progress, evaluation_due, tell_passed_over
from ringmaster.techniques.training.trainer import StepReport


class Position:
    """A member's position in a gang: reports the member's events and saves its checkpoints. `last_step` may grow."""

    def __init__(self, member: Member, ranks: Ranks, reporter: Reporter) -> None:
        self.member, self.first_step, self.last_step = member, member.next_step, member.order.last_step
        self._reporter, self._sender = reporter, reporter.about(member.name)
        self._progress = Progress(self._sender, ranks)
        self._saver = Saver(member, member.store(), self._sender, ranks=ranks)
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
        return self.member.next_step > 0 and evaluation_due(self.member.order, self.member.next_step)

    def go_on(self, num_steps: int) -> None:
        """Extends `last_step` to `num_steps` beyond the ordered last step, at most to the job's last."""
        job, ordered = self.member.job, self.member.order.last_step
        self.last_step = max(self.last_step, min(job.total_steps, ordered + num_steps))

    # -- events --------------------------------------------------------------------------------------------------------

    def ready(self, *, startup_s: float) -> None:
        """Reports that the member is about to take its first step, and which damaged checkpoints were skipped."""
        self._seconds["startup_s"] = startup_s
        self._sender.send(Ready(step=self.first_step, startup_s=startup_s))
        tell_passed_over(self.member.passed_over, self._sender, step=self.first_step)

    def stepped(self, report: MemberReport, *, seconds: float) -> None:
        """Reports a step. seconds: the duration of the gang's step."""
        self._progress.add(
            StepReport(
                step=report.step,
                loss=report.loss,
                seconds=seconds,
                asked=(),
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
            self._sender.send(Metrics(step=self.member.next_step, metrics=metrics, wall_s=time.time()))

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
            self._saver.follow(Asks(*asks))
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

        The outcome has the form that `ringmaster.techniques.training.segment_loop.train` returns.
        """
        self._saver.finish()
        self._progress.flush()
        step = self._saver.saved_step if self._saver.has_failed else self.member.next_step
        outcome: dict[str, Any] = {"status": status, "first_step": self.first_step, "step": step}
        outcome |= self._seconds
        if status == OutcomeStatus.DONE and self._metrics is not None:
            outcome["metrics"] = dict(self._metrics)
        return {**outcome, "message": message} if message else outcome

    def _is_dismissed(self) -> bool:
        return self._reporter.told(STOP) or self.name in self._reporter.told_to_leave()
