"""Checks the events of a command against its order, and forwards them as the events of any worker."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from ringmaster.features.external_trainers import protocol
from ringmaster.features.external_trainers.protocol import (
    KINDS,
    RUN,
    CheckpointWritten,
    CommandEvaluation,
    CommandEvent,
    CommandFailure,
    CommandFinished,
    CommandHeartbeat,
    CommandStopped,
    ModelWritten,
    PeakMemory,
    PhaseBegun,
    StepDone,
    StepEvent,
    TrainingStarted,
)
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.processes import gang_events
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.training.rank_job import weights_digest

START_TIMEOUT_S = 600.0  # for a new interpreter, its imports, its data, its model
TIMEOUT_STEPS, MIN_TIMEOUT_S = 20.0, 300.0  # a command need not report that it saves or evaluates


class CommandProgress:
    """The state of one command, which continues from the newest whole checkpoint under `root`.

    restored_from: the folder of that checkpoint, None where there is none.
    first_step: the step of that checkpoint, else 0.
    saved_step, saved_to: the step and the folder of the command's newest checkpoint.
    startup_s: seconds from the order to the command's "start"; None before.
    step_seconds: the seconds of each step that the command did.
    seconds: the seconds of its last "checkpoint", "metrics" and "model".
    reported_peak_bytes: the largest peak that it reported, or None.
    end: the event that reported its end, or None.

    Raises ValueError where the checkpoint is of a job that would train other weights.
    """

    def __init__(self, order: GangOrder, reporter: Reporter, *, mode: str, root: Path) -> None:
        self._order, self._reporter, self._root = order, reporter, root
        self._is_run = mode == RUN
        data_digest = (order.data or {}).get("digest", "")
        self._meta = {"job": order.job.name, "weights_digest": weights_digest(order.job, data_digest=data_digest)}
        self.restored_from = self._newest(CheckpointStore(root))
        self.first_step = self.saved_step = self._step
        self.saved_to = self.restored_from
        self.startup_s: float | None = None
        self.step_seconds: list[float] = []
        self.seconds: dict[str, float] = {}
        self.reported_peak_bytes: int | None = None
        self.end: CommandFinished | CommandStopped | CommandFailure | None = None
        self._losses: list[float] = []
        self._metrics: tuple[int, Mapping[str, float]] | None = None
        self._heard_s = time.monotonic()
        self._timeout_s = 0.0

    def _newest(self, store: CheckpointStore) -> Path | None:
        newest = store.newest(known_step=self._order.known_step)
        self._step = newest.manifest.step if newest else 0
        for folder in store.passed_over:
            message = f"checkpoint {folder} is damaged and was passed over: training continues from step {self._step}"
            self._reporter.send(gang_events.CheckpointFailed(step=self._step, message=message))
        if newest is None:
            return None
        if newest.manifest.meta["weights_digest"] != self._meta["weights_digest"]:
            raise ValueError(
                f"{newest.location} is of another version of job {self._order.job.name}: its command, data or settings "
                "changed since. To fix: give the job another name, or remove the folder to start it afresh"
            )
        return newest.folder.resolve()

    @property
    def is_saved(self) -> bool:
        """Whether no step was done since the newest checkpoint."""
        return self._step == self.saved_step

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics of the trained model. Raises ValueError where the command did not report them."""
        if self._metrics is None or self._metrics[0] != self._step:
            raise ValueError(f"the command sent no metrics of step {self._step}. To fix: send them before done")
        return self._metrics[1]

    def note(self, event: CommandEvent) -> None:
        """Processes one event. Raises ValueError where it contradicts the order or the events before."""
        since_s, self._heard_s = time.monotonic() - self._heard_s, time.monotonic()
        match event:
            case TrainingStarted():
                self._start(event)
            case StepDone():
                self._one_step(event)
            case CheckpointWritten():
                self._checkpoint(event, since_s)
            case CommandEvaluation():
                self._evaluated(event, since_s)
            case ModelWritten():
                self.seconds["model"] = since_s if event.seconds is None else event.seconds
            case PeakMemory():
                self.reported_peak_bytes = max(event.peak_bytes, self.reported_peak_bytes or 0)
            case PhaseBegun():
                self._reporter.phase(event.phase, timeout_s=float(event.patience_s))
            case CommandHeartbeat():
                self._reporter.beat()
            case CommandFinished() | CommandStopped():
                self._check_end(event)
                self.end = event
            case CommandFailure():
                if event.kind not in KINDS:
                    kinds = ", ".join(KINDS)
                    raise ValueError(f"the command failed with kind {event.kind!r}. To fix: give one of {kinds}")
                self.end = event

    def tell_steps(self, num_reported: int, *, peak_bytes: int = 0) -> None:
        """Forwards the steps after the first `num_reported`. peak_bytes: the most memory that the command has held."""
        seconds = self.step_seconds[num_reported:]
        if not seconds:
            return
        if not self._is_run:
            self._reporter.beat()
            return
        first_step, losses = self._step - len(seconds), self._losses[num_reported:]
        self._reporter.send(
            gang_events.Steps(
                first_step=first_step,
                losses=tuple(losses),
                seconds=tuple(seconds),
                wall_s=time.time(),
                num_samples=len(seconds) * self._order.job.global_batch_size,
                peak_bytes=peak_bytes,
            )
        )
        self._announce_timeout(max(seconds))

    def _start(self, event: TrainingStarted) -> None:
        if event.step != self.first_step:
            raise ValueError(
                f"the command starts at step {event.step}, but its order starts at {self.first_step}. "
                "To fix: continue from restore_from, or from nothing where that is null"
            )
        self.startup_s = time.monotonic() - self._order.ordered_at_s
        if self._is_run:
            self._reporter.send(gang_events.JobReady(step=self.first_step, startup_s=self.startup_s))
            self._announce_timeout(0.0)

    def _one_step(self, event: StepDone) -> None:
        if self.startup_s is None:
            raise ValueError("the command sent a step before start. To fix: send start, with its first step")
        if event.step != self._step + 1:
            raise ValueError(
                f"the command sent step {event.step} after step {self._step}. "
                "To fix: report each step once, with the number of steps done"
            )
        if not math.isfinite(event.loss):
            raise ValueError(f"the loss became {event.loss} at step {self._step}. To fix: a lower learning rate")
        self._step = event.step
        if self._is_run and self._step > self._order.last_step:
            raise ValueError(f"the command did step {self._step}, and its order ends at {self._order.last_step}")
        self.step_seconds.append(float(event.seconds))
        self._losses.append(float(event.loss))

    def _checkpoint(self, event: CheckpointWritten, since_s: float) -> None:
        self._check_step(event)
        started_s = time.monotonic()
        folder, keep = Path(event.folder), self._order.keep_checkpoints
        self.saved_to = protocol.adopt(self._root, folder, step=self._step, meta=self._meta, keep=keep)
        self.saved_step = self._step
        stated_s = since_s if event.seconds is None else event.seconds
        self.seconds["checkpoint"] = stated_s + time.monotonic() - started_s
        if self._is_run:
            self._reporter.send(gang_events.CheckpointSaved(step=self._step, seconds=self.seconds["checkpoint"]))

    def _evaluated(self, event: CommandEvaluation, since_s: float) -> None:
        self._check_step(event)
        self._metrics = self._step, event.metrics
        self.seconds["metrics"] = since_s if event.seconds is None else event.seconds
        if self._is_run and self._step < self._order.job.total_steps:  # the last metrics belong to the result
            self._reporter.send(
                gang_events.EvaluationReported(step=self._step, metrics=self._metrics[1], wall_s=time.time())
            )

    def _check_end(self, event: CommandFinished | CommandStopped) -> None:
        self._check_step(event)
        if not self.is_saved:
            raise ValueError(
                f"the command sent {event.NAME} at step {self._step}, and its last checkpoint is of step "
                f"{self.saved_step}. To fix: write a checkpoint before"
            )

    def _check_step(self, event: StepEvent) -> None:
        if event.step != self._step:
            what = f"{event.NAME} of step {event.step}"
            raise ValueError(f"the command sent {what} after step {self._step}. To fix: send each step, and then this")

    def _announce_timeout(self, step_s: float) -> None:
        timeout_s = max(TIMEOUT_STEPS * step_s, MIN_TIMEOUT_S)
        if timeout_s > self._timeout_s:
            self._timeout_s = timeout_s
            self._reporter.phase("training", timeout_s=timeout_s)
