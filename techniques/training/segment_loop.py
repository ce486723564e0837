"""The training loop of a segment: from the newest checkpoint to its last step, or until a stop command."""

import math
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, WritePieces
from ringmaster.techniques.checkpoints.saving import CheckpointedState, Saver, SaveVotes, WriteRetries, takes_nothing
from ringmaster.techniques.checkpoints.state import HostCopies
from ringmaster.techniques.estimates.device_rates import standard_error, time_on_ranks
from ringmaster.techniques.processes.events import (
    NUM_ROWS,
    EvaluationReported,
    JobEvent,
    JobReady,
    OutcomeStatus,
    Steps,
    TrialMeasured,
)
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import Ranks
from ringmaster.techniques.processes.reporter import MEASURE, STOP, Reporter
from ringmaster.techniques.training.job_state import Root
from ringmaster.techniques.training.parts import TrainerPart, TrainingState
from ringmaster.techniques.training.trainer import (
    ENOUGH_S,
    LEAST_STEPS,
    USUAL_STEPS,
    WARM_UP_STEPS,
    StepReport,
    Trainer,
)

LEAST_S = 0.4  # total of measured steps: steps of milliseconds are measured more often than usual
TIMEOUT_S = 300.0
EVALUATED_BATCHES = 2


class TrialSubject(Protocol):
    """What a trial measures: a trainer, or a group of jobs that are trained together."""

    ranks: Ranks

    def step(self, asks: tuple[float, ...] = ()) -> StepReport:
        """Trains the next global step."""

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """Returns the pieces that this rank writes into a checkpoint of the present state."""

    def save(self, root: Root) -> float:
        """Checkpoints the state; returns the seconds."""

    def export(self, folder: Path, root: Root) -> None:
        """Writes the finished model of the newest checkpoint under `root`."""

    def evaluate(self, *, max_batches: int | None = None) -> Any:
        """Measures the metrics over held-out data, on at most `max_batches` global batches."""

    def num_evaluated_batches(self) -> float:
        """Returns the number of global batches of one evaluation."""


class SegmentSubject(TrialSubject, CheckpointedState, TrainingState, Protocol):
    """What a segment brings to its last step: a trainer, or the encoding of a knowledge store.

    parts: as of `JobTrainingState`.
    """

    parts: tuple[TrainerPart, ...]

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


def trial(trainer: TrialSubject, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Warms up, sends "ready", measures on command, sends "measured", and keeps its devices busy until stopped.

    By the order of these events, the supervisor can start all measurements of a node together, and end no trial before
    the last measurement is done. The reference kernel is timed before and after, when no gang of the node trains.
    """
    reporter.phase("trying", timeout_s=TIMEOUT_S)
    reference_s = time.monotonic()
    reporter.send(time_on_ranks(trainer.ranks))
    reference_s = time.monotonic() - reference_s
    warm_up = [_timed_step(trainer, reporter)[0] for _ in range(WARM_UP_STEPS)]
    ready_s = time.monotonic() - order.ordered_at_s - reference_s
    reporter.send(JobReady())
    seconds: list[float] = []
    stop = measure = False
    while not stop:
        _, (stop, measure) = _timed_step(trainer, reporter)
        if measure and not seconds:
            seconds = _measure(trainer, reporter)
            further_s = trainer.rule.unmeasured_s(trainer) if isinstance(trainer, Trainer) else 0.0
            median_s = statistics.median(seconds) + further_s
            # The first steps are slower; their excess over the median counts as start-up time.
            startup_s = ready_s - len(warm_up) * median_s
            measured = {
                "step_s": median_s,
                "spread": standard_error(seconds),
                "num_measured_steps": len(seconds),
                "startup_s": max(startup_s, 0.0),
                "peak_bytes": int(trainer.ranks.max(trainer.ranks.peak_bytes())),  # of the rank that held most
            }
            profile = {**measured, **_measure_saving(trainer, order)}
            reporter.send(TrialMeasured(profile=profile, mean_step_s=statistics.fmean(seconds) + further_s))
    reporter.send(time_on_ranks(trainer.ranks))
    return {"status": "done"}


def _timed_step(trainer: TrialSubject, reporter: Reporter) -> tuple[float, tuple[bool, bool]]:
    asks = (float(reporter.has_command(STOP)), float(reporter.has_command(MEASURE)))
    started_s = time.perf_counter()
    report = trainer.step(asks)
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    stop, measure = report.requests[0] > 0, report.requests[1] > 0
    return time.perf_counter() - started_s, (stop, measure)


def _measure(trainer: TrialSubject, reporter: Reporter) -> list[float]:
    """Returns the seconds of several steps, as many on every rank: enough steps, or enough seconds."""
    seconds: list[float] = []
    while len(seconds) < LEAST_STEPS or not _enough(trainer, seconds):
        seconds.append(_timed_step(trainer, reporter)[0])
    return seconds


def _enough(trainer: TrialSubject, seconds: list[float]) -> bool:
    total_s = sum(seconds)
    is_enough = total_s >= ENOUGH_S or (len(seconds) >= USUAL_STEPS and total_s >= LEAST_S)
    return trainer.ranks.sum([float(is_enough)])[0] > 0


def _measure_saving(trainer: TrialSubject, order: GangOrder) -> dict[str, float]:
    """Measures the seconds of a checkpoint, of the stall by a background save, of an evaluation and of an export."""
    scratch = Path(order.folder) / "scratch"
    working_s = time.thread_time()
    save_s = trainer.save(scratch / "checkpoints")
    working_s = time.thread_time() - working_s
    stall_s = trainer.ranks.max(_copy_s(trainer) + (working_s if trainer.ranks.device.type == "cpu" else 0.0))
    started_s = time.perf_counter()
    trainer.export(scratch / "model", scratch / "checkpoints")
    export_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    trainer.evaluate(max_batches=EVALUATED_BATCHES)
    evaluated_s = time.perf_counter() - started_s
    if trainer.ranks.rank == 0:
        shutil.rmtree(scratch)
    num_batches = trainer.num_evaluated_batches()
    evaluate_s = evaluated_s * num_batches / max(min(EVALUATED_BATCHES, num_batches), 1)
    return {"save_s": save_s, "stall_s": stall_s, "export_s": export_s, "evaluate_s": evaluate_s}


def _copy_s(trainer: TrialSubject) -> float:
    """Returns the seconds for which a background save stalls training: a copy of the state to existing buffers.

    Writing the copy takes no GPU time, but on a CPU it takes time of the cores that train.
    """
    copies = HostCopies(is_pinned=trainer.ranks.device.type == "cuda")
    trainer.pieces(copies=copies)
    started_s = time.perf_counter()
    trainer.pieces(copies=copies)
    return time.perf_counter() - started_s


REPORT_EVERY_S = 0.2
BUILD_TIMEOUT_S = 300.0  # to read data, make a model, compile: silent work of unknown length
SAVE_TIMEOUT_S = 300.0
# A rank counts as hung when a step takes this many times the slowest so far, and at least some seconds.
TIMEOUT_STEPS, LEAST_TIMEOUT_S, FIRST_STEP_TIMEOUT_S = 20.0, 10.0, 300.0


def train_segment(trainer: SegmentSubject, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Trains to `order.last_step`; after a job's last step, evaluates and exports its model. Returns the result."""
    assert order.checkpoint_dir is not None and order.model_dir is not None
    root = order.checkpoint_dir
    reporter.phase("restoring", timeout_s=SAVE_TIMEOUT_S)
    first_step = trainer.restore(root, known_step=order.known_step)
    trainer.begin_segment(root)
    startup_s = time.monotonic() - order.ordered_at_s
    reporter.send(JobReady(step=first_step, startup_s=startup_s))
    for event in trainer.first_events():
        reporter.send(event)
    saver = Saver(trainer, trainer.store(root), reporter, ranks=trainer.ranks)
    stopped, reached = False, None
    may_end = any(part.may_end_job for part in trainer.parts)
    if order.job.is_evaluated(first_step) and (may_end or first_step >= order.last_step):
        # The gang that trained up to this step may have died before it reported the metrics.
        reached = _evaluate(trainer, reporter)
    if reached is None:
        stopped, reached = _steps(trainer, order, reporter, saver)
    result: dict[str, Any] = {"first_step": first_step, "step": trainer.next_step, "startup_s": startup_s}
    if trainer.next_step > first_step:
        reporter.phase("saving", timeout_s=SAVE_TIMEOUT_S)
        result["save_s"] = saver.save_at_once(gives_up=lambda: reporter.has_command(STOP))
        if result["save_s"] is None:  # a command has ended the wait for a full disk
            return {"status": OutcomeStatus.PREEMPTED, **result, "step": saver.saved_step, "save_s": 0.0}
    if reached is not None or trainer.next_step == order.job.total_steps:
        reporter.phase("evaluating", timeout_s=SAVE_TIMEOUT_S)
        started_s = time.perf_counter()
        result["metrics"] = reached or trainer.evaluate()
        result |= {NUM_ROWS: trainer.num_evaluated_rows(), "evaluate_s": time.perf_counter() - started_s}
        for part in trainer.parts:
            result |= part.final_values(result["metrics"])
        reporter.phase("exporting", timeout_s=SAVE_TIMEOUT_S)
        started_s = time.perf_counter()
        if not _exported(trainer, order, reporter):
            return {"status": OutcomeStatus.PREEMPTED, **result}
        result["export_s"] = time.perf_counter() - started_s
        for part in trainer.parts:
            result |= part.after_export(trainer, reporter)
    return {"status": OutcomeStatus.PREEMPTED if stopped else OutcomeStatus.DONE, **result}


def _exported(trainer: SegmentSubject, order: GangOrder, reporter: Reporter) -> bool:
    """Writes the finished model, and waits where its disk or store takes nothing; returns whether it is written.

    A stop command ends the wait. The state of the last step is in a checkpoint.
    """
    assert order.checkpoint_dir is not None and order.model_dir is not None
    retries = WriteRetries(trainer.ranks, reporter, gives_up=lambda: reporter.has_command(STOP))
    while True:
        fault: OSError | None = None
        try:
            trainer.export(Path(order.model_dir), order.checkpoint_dir)
        except OSError as error:
            fault = error
        has_failed, is_hopeless = trainer.ranks.sum([float(fault is not None), float(not takes_nothing(fault))])
        if not has_failed:
            return True
        what = fault or OSError("the model could not be written on another rank")
        if is_hopeless:
            raise what
        if not retries.wait(OSError(f"the model cannot be written: {what}"), step=trainer.next_step):
            return False


def _evaluate(trainer: SegmentSubject, reporter: Reporter) -> dict[str, float] | None:
    """Evaluates and reports the present state; returns the metrics if they end the job."""
    reporter.phase("evaluating", timeout_s=SAVE_TIMEOUT_S)
    metrics = trainer.evaluate()
    num_rows = trainer.num_evaluated_rows()
    reporter.send(EvaluationReported(step=trainer.next_step, metrics=metrics, wall_s=time.time(), num_rows=num_rows))
    return metrics if any(part.ends_job(metrics) for part in trainer.parts) else None


def _steps(
    trainer: SegmentSubject, order: GangOrder, reporter: Reporter, saver: Saver
) -> tuple[bool, dict[str, float] | None]:
    """Trains the steps of the segment, until an evaluation ends the job.

    Returns whether a command stopped it early, and the metrics that have ended the job.
    """
    progress = StepProgress(reporter, trainer.ranks)
    timeout = StepTimeout(reporter)
    every_s, saved_s, last_step = order.checkpoint_every_s, time.monotonic(), order.last_step
    is_first = trainer.ranks.rank == 0
    while trainer.next_step < last_step:
        save_due = every_s is not None and saver.is_idle and time.monotonic() - saved_s >= every_s
        # All ranks act on the sums, so that they stop, save and continue at the same step. Only rank 0 sends the
        # last step.
        commanded_until = float(reporter.commanded_until()) if is_first else 0.0
        report = trainer.step((float(reporter.has_command(STOP)), float(save_due), commanded_until, *saver.asks()))
        if not math.isfinite(report.loss):
            saver.finish()  # the state being saved is valid, and all ranks reach this line
            raise ValueError(lost_loss(report.loss, step=report.step))
        progress.add(report)
        timeout.learn(report.seconds)
        stop, save = (total > 0 for total in report.requests[:2])
        last_step = max(last_step, int(report.requests[2]))
        saver.follow(SaveVotes(*report.requests[3:]))
        if saver.has_failed:  # further steps would be lost at the next fault
            progress.flush()
            reporter.phase("saving", timeout_s=SAVE_TIMEOUT_S)
            if saver.save_at_once(gives_up=lambda: reporter.has_command(STOP)) is None:
                return True, None
            saved_s = time.monotonic()
            timeout.announce()
        if stop and trainer.next_step < last_step:
            progress.flush()
            return True, None
        if save and trainer.next_step < last_step:
            saved_s = time.monotonic()
            reporter.phase("saving", timeout_s=SAVE_TIMEOUT_S)
            saver.begin()
            timeout.announce()
        if order.job.is_evaluated(trainer.next_step):
            progress.flush()
            if (reached := _evaluate(trainer, reporter)) is not None:
                return False, reached
            timeout.announce()
    progress.flush()
    return False, None


def lost_loss(loss: float, *, step: int) -> str:
    """Returns the message for a loss that is not finite."""
    return f"the loss became {loss} at step {step}. To fix: a lower learning rate, a warm-up, or clip_grad_norm"


class StepProgress:
    """Collects steps and sends them a few times a second, so that reporting does not slow down quick steps."""

    def __init__(self, reporter: Reporter, ranks: Ranks) -> None:
        self._reporter, self._ranks = reporter, ranks
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
                    first_step=self._steps[0].step,
                    losses=tuple(report.loss for report in self._steps),
                    rewards=tuple(report.reward for report in self._steps if report.reward is not None),
                    seconds=tuple(report.seconds for report in self._steps),
                    wall_s=time.time(),
                    num_samples=sum(report.num_samples for report in self._steps),
                    num_tokens=sum(report.num_tokens for report in self._steps),
                    peak_bytes=self._ranks.peak_bytes(),
                    measurements=tuple(each for report in self._steps for each in report.measurements),
                )
            )
        self._steps, self._sent_s = [], time.monotonic()


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
        timeout_s = max(TIMEOUT_STEPS * self._slowest_s, LEAST_TIMEOUT_S)
        if self._timeout_s == FIRST_STEP_TIMEOUT_S or timeout_s > self._timeout_s:
            self._timeout_s = timeout_s
            self.announce()

    def announce(self) -> None:
        """Reports that the rank is training, with the present timeout."""
        self._reporter.phase("training", timeout_s=self._timeout_s)
