"""The segment of one job on a rank: what it reports, its saves, its evaluations, its export and its outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.saving import CheckpointSource, Saver, SaveVotes, WriteRetries, takes_nothing
from ringmaster.techniques.processes.core_load import CoreLoad
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    JobEvent,
    JobReady,
    JobResult,
    OutcomeStatus,
    Steps,
)
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.processes.reporter import STOP, Reporter
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback
from ringmaster.techniques.training.rank_job import Root
from ringmaster.techniques.training.trainer import StepReport

REPORT_EVERY_S = 0.2


class SessionJob(CheckpointSource, JobContext, Protocol):
    """What a session brings to its last step: a trainer, a member of a group, or something else that a feature makes.

    callbacks: as of `RankJob`.
    """

    callbacks: tuple[TrainerCallback, ...]

    def restore(self, root: Root, *, known_step: int = 0) -> int:
        """Loads the newest whole checkpoint under `root`, if any; returns the number of completed steps."""

    def begin_segment(self, root: Root) -> None:
        """Begins a segment after the checkpoint that was restored, if any."""

    def first_events(self) -> Iterator[JobEvent]:
        """Yields the events that a segment reports at its beginning."""

    def num_evaluated_rows(self) -> int:
        """Returns the number of held-out rows of one evaluation."""

    def store(self, root: Root) -> CheckpointStore:
        """Returns the checkpoints under `root`."""

    def export(self, folder: Path, root: Root) -> None:
        """Writes the finished model of the newest checkpoint under `root`."""


class StepProgress:
    """Collects steps and sends them a few times a second, so that reporting does not slow down quick steps."""

    def __init__(self, reporter: Reporter, ranks: RankContext) -> None:
        self._reporter, self._ranks = reporter, ranks
        self._load = CoreLoad() if ranks.device.type == "cpu" else None
        self._steps: list[StepReport] = []
        self._sent_s = time.monotonic()

    def add(self, report: StepReport) -> None:
        """Adds a completed step."""
        self._steps.append(report)
        if time.monotonic() - self._sent_s >= REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Sends all steps that were not sent yet."""
        if self._steps:
            self._reporter.send(
                Steps(
                    first_step=self._steps[0].index,
                    losses=tuple(report.loss for report in self._steps),
                    rewards=tuple(report.reward for report in self._steps if report.reward is not None),
                    seconds=tuple(report.seconds for report in self._steps),
                    wall_s=time.time(),
                    num_samples=sum(report.num_samples for report in self._steps),
                    num_tokens=sum(report.num_tokens for report in self._steps),
                    peak_bytes=self._ranks.peak_bytes(),
                    load=None if self._load is None else self._load.since_last(),
                    measurements=tuple(each for report in self._steps for each in report.measurements),
                )
            )
        self._steps, self._sent_s = [], time.monotonic()


class JobSession:
    """One job's segment. `last_step` may grow.

    rank_job: after its newest checkpoint was restored. is_exported: whether its finished model is written.
    reporter: of the gang, which has the commands. sender: of the job's events. progress: its steps.
    """

    def __init__(self, rank_job: SessionJob, *, reporter: Reporter, sender: Reporter) -> None:
        self.rank_job, self.first_step, self.last_step = rank_job, rank_job.next_step, rank_job.order.last_step
        assert rank_job.order.checkpoint_dir is not None
        self._reporter, self._sender, self._root = reporter, sender, rank_job.order.checkpoint_dir
        self.progress = StepProgress(sender, rank_job.ranks)
        self._saver = Saver(rank_job, rank_job.store(self._root), sender, ranks=rank_job.ranks)
        self._saved_s, self._saved_step = time.monotonic(), rank_job.next_step
        self._result = JobResult(first_step=self.first_step)
        self._metrics: Mapping[str, float] | None = None  # those with which the job ends
        self.is_exported = False

    @property
    def name(self) -> str:
        """The job's name."""
        return self.rank_job.job.name

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train in this segment."""
        return self.rank_job.next_step >= self.last_step or self._metrics is not None

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left to train in any segment."""
        return self.rank_job.next_step == self.rank_job.job.total_steps or self._metrics is not None

    @property
    def is_evaluated(self) -> bool:
        """Whether an evaluation is due at the present step, which is not the job's last."""
        return self.rank_job.job.is_evaluated(self.rank_job.next_step)

    @property
    def may_end_now(self) -> bool:
        """Whether an evaluation that the gang before may not have reported can end the job."""
        return self.is_done or (self.is_evaluated and any(callback.may_end_job for callback in self.rank_job.callbacks))

    @property
    def is_interrupted(self) -> bool:
        """Whether its evaluation has ended before its end, so that another gang goes on with it."""
        return any(callback.is_interrupted for callback in self.rank_job.callbacks)

    def prolong(self, num_steps: int) -> None:
        """Extends `last_step` to `num_steps` beyond the ordered last step, at most to the job's last."""
        job, ordered = self.rank_job.job, self.rank_job.order.last_step
        self.last_step = max(self.last_step, min(job.total_steps, ordered + num_steps))

    # -- events --------------------------------------------------------------------------------------------------------

    def ready(self, *, startup_s: float) -> None:
        """Reports that the job is about to take its first step, and what its callbacks report."""
        self._result = replace(self._result, startup_s=startup_s)
        self.rank_job.begin_segment(self._root)
        self._sender.send(JobReady(step=self.first_step, startup_s=startup_s))
        for event in self.rank_job.first_events():
            self._sender.send(event)

    def measured(self, metrics: Mapping[str, float], *, seconds: float) -> None:
        """Reports metrics, or keeps those with which the job ends. seconds: its share of the evaluation."""
        if self.is_at_its_end:
            self._metrics, self._result = metrics, replace(self._result, evaluate_s=seconds)
            return
        self.progress.flush()
        step, num_rows = self.rank_job.next_step, self.rank_job.num_evaluated_rows()
        report = EvaluationReported(step=step, metrics=metrics, wall_s=time.time(), num_rows=num_rows)
        for callback in self.rank_job.callbacks:
            report = callback.change_report(report)
        self._sender.send(report)
        if report.part is None and any(callback.ends_job(metrics) for callback in self.rank_job.callbacks):
            self._metrics, self._result = metrics, replace(self._result, evaluate_s=0.0)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def votes(self) -> tuple[float, ...]:
        """The rank's save requests, to be summed over the ranks. Either all ranks have a save under way, or none."""
        every_s = self.rank_job.order.checkpoint_every_s
        is_due = every_s is not None and time.monotonic() - self._saved_s >= every_s
        return (float(is_due),) if self._saver.is_idle else (float(is_due), *self._saver.votes())

    def advance_save(self, sums: Sequence[float]) -> bool:
        """Advances a save under way by the ranks' summed requests; returns whether another save is to begin."""
        is_due, *votes = sums
        if votes:
            self._saver.follow(SaveVotes(*votes))
        return is_due > 0 and self._saver.is_idle

    @property
    def is_unsaved(self) -> bool:
        """Whether its last save failed; `save` then tries again before the gang trains on."""
        return self._saver.has_failed

    def begin_save(self) -> None:
        """Copies the state and writes it while training continues."""
        self._saved_s = time.monotonic()
        self._saver.begin()

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether no last save was begun at the present step."""
        return self.rank_job.next_step > self._saved_step

    def begin_last_save(self) -> None:
        """Starts writing the unsaved state without a copy. The job must not train before `save`, which waits."""
        if self.has_unsaved_steps:
            self.progress.flush()
            self._saved_s, self._saved_step = time.monotonic(), self.rank_job.next_step
            self._saver.begin_last()

    def save(self) -> None:
        """Saves the last state and waits until it is published, also where a disk is full for a while.

        A command to stop or to leave ends the wait. Raises CheckpointError where it is full for too long.
        """
        self.begin_last_save()
        self._saver.finish_last(gives_up=self._has_stop_command)
        if self._saved_step > self.first_step and self._result.save_s is None:
            self._result = replace(self._result, save_s=time.monotonic() - self._saved_s)

    def export(self) -> None:
        """Writes the finished model, and waits where its disk or store takes nothing.

        A command to stop or to leave ends the wait. The state of the last step is in a checkpoint.
        """
        order, ranks, started_s = self.rank_job.order, self.rank_job.ranks, time.perf_counter()
        retries = WriteRetries(ranks, self._sender, gives_up=self._has_stop_command)
        while True:
            fault: OSError | None = None
            try:
                self.rank_job.export(Path(order.model_dir or ""), self._root)
            except OSError as error:
                fault = error
            has_failed, is_hopeless = ranks.sum([float(fault is not None), float(not takes_nothing(fault))])
            if not has_failed:
                break
            what = fault or OSError("the model could not be written on another rank")
            if is_hopeless:
                raise what
            if not retries.wait(OSError(f"the model cannot be written: {what}"), step=self.rank_job.next_step):
                return
        self._result = replace(self._result, export_s=time.perf_counter() - started_s)
        for callback in self.rank_job.callbacks:
            self._result = self._result.extended(callback.after_export(self.rank_job, self._reporter))
        self.is_exported = True

    def end(self, status: OutcomeStatus, *, message: str = "") -> JobResult:
        """Ends the session: finishes its save, sends its remaining steps and returns its result."""
        self._saver.finish()
        self.progress.flush()
        step = self._saver.saved_step if self._saver.has_failed else self.rank_job.next_step
        result = replace(self._result, status=status, message=message, step=step)
        if status == OutcomeStatus.DONE and self._metrics is not None:
            result = replace(result, metrics=dict(self._metrics), num_rows=self.rank_job.num_evaluated_rows())
            for callback in self.rank_job.callbacks:
                result = result.extended(callback.final_values(self._metrics))
        return result

    def _has_stop_command(self) -> bool:
        return self._reporter.has_command(STOP) or self.name in self._reporter.commanded_to_leave()
