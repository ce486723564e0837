"""The loop of a segment: from the newest checkpoint to its last step, stopping early where it is told to."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringmaster.techniques.adaptations.comparing import COMPARING_PATIENCE_S, compare
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.engine.reporter import STOP, Reporter, Teller
from ringmaster.techniques.engine.saving import Asks, Saver
from ringmaster.techniques.engine.trainer import StepReport, Trainer
from ringmaster.techniques.values import to_json

REPORT_EVERY_S = 0.2
BUILD_PATIENCE_S = 300.0  # to read data, make a model, compile: silent work of unknown length
SAVE_PATIENCE_S = 300.0
# A step may take this many times the slowest so far, and at least some seconds, before its rank is taken for hung.
PATIENCE_STEPS, LEAST_PATIENCE_S, FIRST_STEP_PATIENCE_S = 20.0, 10.0, 300.0


def train(trainer: Trainer, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Trains to `order.last_step`; after a job's last step evaluates and exports its model. Returns the result."""
    assert order.checkpoint_dir is not None and order.model_dir is not None
    root = order.checkpoint_dir
    reporter.phase("restoring", patience_s=SAVE_PATIENCE_S)
    first_step = trainer.restore(root, known_step=order.known_step)
    startup_s = time.monotonic() - order.ordered_at_s
    reporter.send("ready", step=first_step, startup_s=startup_s)
    tell_passed_over(trainer.passed_over, reporter, step=first_step)
    saver = Saver(trainer, trainer.store(root), reporter, ranks=trainer.ranks)
    stopped = _steps(trainer, order, reporter, saver)
    if not stopped and 0 < trainer.next_step == first_step and evaluation_due(order, first_step):
        # Whoever trained up to here may have died before anybody heard how good it was.
        reporter.phase("evaluating", patience_s=SAVE_PATIENCE_S)
        reporter.send("metrics", step=first_step, metrics=trainer.evaluate())
    result: dict[str, Any] = {"first_step": first_step, "step": trainer.next_step, "startup_s": startup_s}
    if trainer.next_step > first_step:
        reporter.phase("saving", patience_s=SAVE_PATIENCE_S)
        result["save_s"] = saver.save_at_once()
    if trainer.next_step == order.job.total_steps:
        reporter.phase("evaluating", patience_s=SAVE_PATIENCE_S)
        started_s = time.perf_counter()
        result["metrics"] = trainer.evaluate()
        trainer.export(Path(order.model_dir), root)
        if order.job.adaptation is not None:
            result["compared"] = _compared(trainer, order, reporter)
        result["evaluate_s"] = time.perf_counter() - started_s
    return {"status": "preempted" if stopped else "done", **result}


def tell_passed_over(folders: Sequence[str], teller: Teller, *, step: int) -> None:
    """Says which newer checkpoints are damaged, where training goes on from `step`."""
    for folder in folders:
        message = f"checkpoint {folder} is damaged and was passed over: training goes on from step {step}"
        teller.send("checkpoint_failed", step=step, message=message)


def _compared(trainer: Trainer, order: GangOrder, reporter: Reporter) -> Any:
    """The finished model beside its parents, as rank 0 measures them; the others wait."""
    if trainer.ranks.rank == 0:
        trainer.adapting.verify(Path(order.model_dir or ""))
        return to_json(compare(order, trainer.ranks, reporter, folder=Path(order.model_dir or "")))
    reporter.phase("waiting for the comparison", patience_s=(1 + len(order.parents)) * COMPARING_PATIENCE_S)
    return None


def _steps(trainer: Trainer, order: GangOrder, reporter: Reporter, saver: Saver) -> bool:
    """The steps of the segment; returns whether they were cut short by a command."""
    progress = Progress(reporter)
    patience = Patience(reporter)
    every_s, saved_s, last_step = order.checkpoint_every_s, time.monotonic(), order.last_step
    is_first = trainer.ranks.rank == 0
    while trainer.next_step < last_step:
        save_due = every_s is not None and saver.is_idle and time.monotonic() - saved_s >= every_s
        # All ranks act on the sums, so that they stop, save and go on at the same step; rank 0 alone says how far.
        told_until = float(reporter.told_until()) if is_first else 0.0
        report = trainer.step((float(reporter.told(STOP)), float(save_due), told_until, *saver.asks()))
        if not math.isfinite(report.loss):
            saver.finish()  # the state before is sound, and all ranks are here
            raise ValueError(lost_loss(report.loss, step=report.step))
        progress.add(report)
        patience.learn(report.seconds)
        stop, save = (asked > 0 for asked in report.asked[:2])
        last_step = max(last_step, int(report.asked[2]))
        saver.follow(Asks(*report.asked[3:]))
        if stop and trainer.next_step < last_step:
            progress.flush()
            return True
        if save and trainer.next_step < last_step:
            saved_s = time.monotonic()
            reporter.phase("saving", patience_s=SAVE_PATIENCE_S)
            saver.begin()  # one that fails (a full disk) costs safety, not the training: it is told, and tried again
            patience.announce()
        if evaluation_due(order, trainer.next_step):
            progress.flush()
            reporter.send("metrics", step=trainer.next_step, metrics=trainer.evaluate())
    progress.flush()
    return False


def lost_loss(loss: float, *, step: int) -> str:
    """What to say of a loss that is no number any more."""
    return f"the loss became {loss} at step {step}. To fix: a lower learning rate, a warm-up, or clip_grad_norm"


def evaluation_due(order: GangOrder, step: int) -> bool:
    """Whether the job wants to be measured after so many steps, before its last."""
    every = order.job.evaluation.every_steps
    return every is not None and step % every == 0 and step < order.job.total_steps


class Progress:
    """Gathers steps and sends them a few times a second, so that quick steps are not slowed by telling of them."""

    def __init__(self, reporter: Teller) -> None:
        self._reporter = reporter
        self._steps: list[StepReport] = []
        self._sent_s = time.monotonic()

    def add(self, report: StepReport) -> None:
        """A step that was done."""
        self._steps.append(report)
        if time.monotonic() - self._sent_s >= REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Tells of all that were not told yet."""
        if self._steps:
            self._reporter.send(
                "steps",
                first_step=self._steps[0].step,
                losses=[report.loss for report in self._steps],
                seconds=[report.seconds for report in self._steps],
                wall_s=time.time(),
            )
        self._steps, self._sent_s = [], time.monotonic()


class Patience:
    """How long a step may take before its rank is taken for hung: learnt from the steps themselves."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._slowest_s = 0.0
        self._said_s = FIRST_STEP_PATIENCE_S
        self.announce()

    def learn(self, seconds: float) -> None:
        """A step took so long."""
        self._slowest_s = max(self._slowest_s, seconds)
        patience_s = max(PATIENCE_STEPS * self._slowest_s, LEAST_PATIENCE_S)
        if self._said_s == FIRST_STEP_PATIENCE_S or patience_s > self._said_s:
            self._said_s = patience_s
            self.announce()

    def announce(self) -> None:
        """From now on the rank trains."""
        self._reporter.phase("training", patience_s=self._said_s)
