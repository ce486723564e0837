"""A trial: a few steps from fresh weights, measured with everything else that a segment does."""

import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from ringmaster.techniques.checkpoints.checkpoint import WritePieces
from ringmaster.techniques.checkpoints.state import HostCopies
from ringmaster.techniques.estimates.device_rates import standard_error, time_on_ranks
from ringmaster.techniques.processes.gang_events import JobReady, JobResult, OutcomeStatus, TrialMeasured
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.processes.reporter import MEASURE, STOP, Reporter
from ringmaster.techniques.training.rank_job import Root
from ringmaster.techniques.training.trainer import (
    ENOUGH_S,
    MIN_STEPS,
    USUAL_STEPS,
    WARM_UP_STEPS,
    StepReport,
    Trainer,
)

MIN_S = 0.4  # total of measured steps: steps of milliseconds are measured more often than usual
TIMEOUT_S = 300.0
EVALUATED_BATCHES = 2


class ProfiledTrainer(Protocol):
    """What a trial measures: a trainer, or a group of jobs that are trained together."""

    ranks: RankContext

    def step(self, votes: tuple[float, ...] = ()) -> StepReport:
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


def trial(trainer: ProfiledTrainer, order: GangOrder, reporter: Reporter) -> JobResult:
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
    return JobResult(status=OutcomeStatus.DONE)


def _timed_step(trainer: ProfiledTrainer, reporter: Reporter) -> tuple[float, tuple[bool, bool]]:
    votes = (float(reporter.has_command(STOP)), float(reporter.has_command(MEASURE)))
    started_s = time.perf_counter()
    report = trainer.step(votes)
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    stop, measure = report.vote_sums[0] > 0, report.vote_sums[1] > 0
    return time.perf_counter() - started_s, (stop, measure)


def _measure(trainer: ProfiledTrainer, reporter: Reporter) -> list[float]:
    """Returns the seconds of several steps, as many on every rank: enough steps, or enough seconds."""
    seconds: list[float] = []
    while len(seconds) < MIN_STEPS or not _enough(trainer, seconds):
        seconds.append(_timed_step(trainer, reporter)[0])
    return seconds


def _enough(trainer: ProfiledTrainer, seconds: list[float]) -> bool:
    total_s = sum(seconds)
    is_enough = total_s >= ENOUGH_S or (len(seconds) >= USUAL_STEPS and total_s >= MIN_S)
    return trainer.ranks.sum([float(is_enough)])[0] > 0


def _measure_saving(trainer: ProfiledTrainer, order: GangOrder) -> dict[str, float]:
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


def _copy_s(trainer: ProfiledTrainer) -> float:
    """Returns the seconds for which a background save stalls training: a copy of the state to existing buffers.

    Writing the copy takes no GPU time, but on a CPU it takes time of the cores that train.
    """
    copies = HostCopies(is_pinned=trainer.ranks.device.type == "cuda")
    trainer.pieces(copies=copies)
    started_s = time.perf_counter()
    trainer.pieces(copies=copies)
    return time.perf_counter() - started_s
