"""The loop of a trial: how fast is this option, and how much memory does it take, while its neighbours are busy too."""

from __future__ import annotations

import resource
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from ringmaster.techniques.engine.checkpoint import WritePieces
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.engine.ranks import Ranks
from ringmaster.techniques.engine.reporter import MEASURE, STOP, Reporter
from ringmaster.techniques.engine.state import HostCopies
from ringmaster.techniques.engine.trainer import Root, StepReport

WARM_UP_STEPS = 2
LEAST_STEPS, USUAL_STEPS = 3, 12
LEAST_S, ENOUGH_S = 0.4, 1.5  # of measured steps: what takes milliseconds is measured more often than usual
PATIENCE_S = 300.0
EVALUATED_BATCHES = 2


class Tried(Protocol):
    """What is measured of a trainer, and of a group of jobs that are trained together."""

    ranks: Ranks

    def step(self, asks: tuple[float, ...] = ()) -> StepReport:
        """The next global step."""

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """What this rank writes into a checkpoint of the state as it is."""

    def save(self, root: Root) -> float:
        """Checkpoints the state; returns the seconds."""

    def export(self, folder: Path, root: Root) -> None:
        """Writes the finished model of the newest checkpoint under `root`."""

    def evaluate(self, *, max_batches: int | None = None) -> Any:
        """Measures the metrics over held-out data, `max_batches` global batches at most."""

    def num_evaluated_batches(self) -> float:
        """Global batches of one evaluation."""


def trial(trainer: Tried, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Warms up, says "ready", measures when told to, sends "measured", and is a busy neighbour until told to stop.

    The events' order lets the supervisor start all measurements of a node together and end none before the last.
    """
    reporter.phase("trying", patience_s=PATIENCE_S)
    warm_up = [_timed_step(trainer, reporter)[0] for _ in range(WARM_UP_STEPS)]
    ready_s = time.monotonic() - order.ordered_at_s
    reporter.send("ready")
    seconds: list[float] = []
    stop = measure = False
    while not stop:
        _, (stop, measure) = _timed_step(trainer, reporter)
        if measure and not seconds:
            seconds = _measure(trainer, reporter)
            median_s = statistics.median(seconds)
            # The first steps are slower: what they took beyond the median belongs to the start.
            startup_s = ready_s - len(warm_up) * median_s
            measured = {"step_s": median_s, "startup_s": max(startup_s, 0.0), "peak_bytes": _peak(trainer)}
            reporter.send("measured", profile={**measured, **_measure_saving(trainer, order)})
    return {"status": "done"}


def _timed_step(trainer: Tried, reporter: Reporter) -> tuple[float, tuple[bool, bool]]:
    asks = (float(reporter.told(STOP)), float(reporter.told(MEASURE)))
    started_s = time.perf_counter()
    report = trainer.step(asks)
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    stop, measure = report.asked[0] > 0, report.asked[1] > 0
    return time.perf_counter() - started_s, (stop, measure)


def _measure(trainer: Tried, reporter: Reporter) -> list[float]:
    """Seconds of some steps: enough of them, or enough seconds of them; as many on every rank."""
    seconds: list[float] = []
    while len(seconds) < LEAST_STEPS or not _enough(trainer, seconds):
        seconds.append(_timed_step(trainer, reporter)[0])
    return seconds


def _enough(trainer: Tried, seconds: list[float]) -> bool:
    total_s = sum(seconds)
    is_enough = total_s >= ENOUGH_S or (len(seconds) >= USUAL_STEPS and total_s >= LEAST_S)
    return trainer.ranks.sum([float(is_enough)])[0] > 0


def _measure_saving(trainer: Tried, order: GangOrder) -> dict[str, float]:
    """Seconds of a checkpoint, of what one on the way takes from training, and of an evaluation and an export."""
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


def _copy_s(trainer: Tried) -> float:
    """Seconds for which a save on the way holds up training: the state is copied to buffers that are there already.

    Writing it takes no time of a GPU, but of the cores that train where there is none.
    """
    copies = HostCopies(is_pinned=trainer.ranks.device.type == "cuda")
    trainer.pieces(copies=copies)
    started_s = time.perf_counter()
    trainer.pieces(copies=copies)
    return time.perf_counter() - started_s


def _peak(trainer: Tried) -> int:
    """The most bytes that any rank's device held: of a GPU's allocator, or of a CPU rank's process."""
    if trainer.ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(trainer.ranks.max(peak))
