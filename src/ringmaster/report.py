"""Connects a training loop of your own to the job that runs it. Needs the standard library alone.

from ringmaster import report

if folder := report.resume():                                # before the first step
    model.load_state_dict(torch.load(folder / "state.pt"))   # and optimizer, step, ...
for step in range(first_step, num_steps):
    ...
    report.report(step=step + 1, loss=loss)
    if report.should_save():
        with report.checkpoint() as folder:
            torch.save(..., folder / "state.pt")

Outside of a job nothing is reported, nothing is due, and there is nothing to resume. With several processes each of
them makes the same calls; they agree over torch.distributed, and the first one reports. docs/commands.md has the rest.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringmaster.errors import PERMANENT_ERRORS

PREEMPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the command was stopped and can continue
PROFILE = "profile"
INSPECT = "inspect"  # the mode of an order that only requests the number of steps
SAVING = "`if report.should_save():` with `with report.checkpoint() as folder: torch.save(..., folder / 'state.pt')`"
REPORTING = (
    "add these lines to its loop: `from ringmaster import report` at its top, after each step "
    f"`report.report(step=step, loss=loss)`, and then {SAVING}"
)
METRICS = "ringmaster_metrics.json"  # of a checkpoint: a job that is resumed after its last step has no others


class ProgressReporter:
    """The connection of this process to the supervisor of its job.

    order: what the job is to do (docs/commands.md); empty outside of a job.
    step: the number of steps done.
    last_metrics: the metrics of the model where the script evaluates nothing after its last step.
    has_trainer: whether a trainer of a library reports the steps of an unedited script.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path, pipe = environment.get("RINGMASTER_ORDER"), environment.get("RINGMASTER_REPORT")
        self.order: Mapping[str, Any] = json.loads(Path(path).read_text()) if path and pipe else {}
        self._pipe = pipe or ""
        self._is_first_rank = int(environment.get("RANK", "0")) == 0
        self.step = self._saved_step = self.order.get("first_step", 0)
        self.last_metrics: dict[str, float] = {}
        self.has_trainer = False
        self._metrics_step: int | None = None
        self._has_started = self._is_stopped = self._is_ending = self._has_ended = False
        self._begun_s = self._saved_s = time.monotonic()

    @property
    def is_trial(self) -> bool:
        """Whether the job is only measured: what is trained is thrown away."""
        return self.order.get("mode") == PROFILE

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole job; 0 outside of a job."""
        return int(self.order.get("num_steps", 0))

    def say(self, event: str, **details: Any) -> None:
        """Writes an event of the protocol, from the first rank only."""
        if self.order and self._is_first_rank:
            with Path(self._pipe).open("a") as pipe:
                pipe.write(json.dumps({"event": event, **details}) + "\n")

    def resume(self) -> Path | None:
        """Returns the folder of the checkpoint to continue from, or None. Call it just before the first step."""
        self._start()
        if not self.order or self.order["restore_from"] is None:
            return None
        folder = Path(self.order["restore_from"])
        self.last_metrics = json.loads((folder / METRICS).read_text())
        return folder

    def report(self, *, step: int, loss: Any = None, **metrics: float) -> None:
        """Reports that `step` steps are done.

        Steps since the last report that had none of their own count as equally long. The metrics that are given last,
        after the last step, are those of the finished model; they may come without a loss, once the loop is over.
        """
        if not self.order:
            return
        self._start()
        if loss is not None and step > self.step:
            self.last_metrics = {"loss": float(loss)}
            seconds = (time.monotonic() - self._begun_s) / (step - self.step)
            for each in range(self.step + 1, step + 1):
                self.say("step", step=each, seconds=seconds, loss=float(loss))
            self.step = step
        elif loss is not None:  # a script that cannot resume does these steps again
            self.say("beat")
        if metrics:
            self.last_metrics |= {name: float(value) for name, value in metrics.items()}
            self.say("metrics", step=step, metrics=self.last_metrics)
            self._metrics_step = step
        self._begun_s = time.monotonic()

    def should_save(self) -> bool:
        """Returns whether a checkpoint is due: at intervals, before the job is stopped, and after its last step."""
        if not self.order or self.step == self._saved_step:
            return False
        every_s = self.order["checkpoint_every_s"]
        is_due = every_s is not None and time.monotonic() - self._saved_s >= every_s
        last_step = self.order["last_step"] or self.num_steps
        is_due, self._is_ending = self._agree(is_due, self._is_stopped or self.step == last_step)
        return is_due or self._is_ending

    def should_stop(self) -> bool:
        """Returns whether the process ends with its next checkpoint: the job is stopped, or continues later."""
        is_last = self.step == self.num_steps and not self.is_trial
        return self._is_ending and not is_last

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """Yields an empty folder for a checkpoint of the last step; ends the process where the job is to stop.

        After the last step of the job the process continues: it may evaluate and export its model.
        """
        if not self.order:
            raise RuntimeError("there is no job to write a checkpoint for. To fix: call should_save() before")
        folder, begun_s = Path(self.order["save_to"]) / f"step-{self.step}", time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        self.note_checkpoint(folder, seconds=time.monotonic() - begun_s)
        if self.should_stop():
            self.end()

    def note_checkpoint(self, folder: Path, *, seconds: float) -> None:
        """Reports a checkpoint once all ranks have written it."""
        if self._is_first_rank:
            (folder / METRICS).write_text(json.dumps(self.last_metrics))
        self._agree(True)
        self._saved_step, self._saved_s = self.step, time.monotonic()
        self.say("checkpoint", step=self.step, folder=str(folder), seconds=seconds)
        self._begun_s = self._saved_s

    def export_folder(self) -> Path | None:
        """Returns the folder for the finished model, or None. Where nothing is written, the last checkpoint is it."""
        return Path(self.order["export_to"]) if self.order else None

    def end(self) -> None:
        """Ends the process before the script's own end. Raises SystemExit with the status of the reason."""
        is_done = self.is_trial or self.step == self.order["last_step"]
        self._has_ended = True
        self.say("done" if is_done else "preempted", step=self.step)
        sys.exit(0 if is_done else PREEMPTED_STATUS)

    def fail(self, message: str) -> None:
        """Ends the process because the script and its job do not fit. Raises SystemExit."""
        self._has_ended = True
        self.say("failed", kind="invalid", message=message)
        sys.exit(message)

    def _start(self) -> None:
        if self._has_started or not self.order:
            return
        self._has_started = True
        if self.order["mode"] == INSPECT:
            self.fail("a loop of its own does not define its number of steps. To fix: give --steps")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._stop)
        atexit.register(self._at_exit)
        self.say("start", step=self.step)
        self._begun_s = self._saved_s = time.monotonic()

    def _stop(self, *_: object) -> None:
        self._is_stopped = True

    def _agree(self, *requests: bool) -> list[bool]:
        """Returns for each request whether any rank makes it; waits for all ranks."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return list(requests)
        torch = sys.modules["torch"]
        device = "cuda" if "nccl" in dist.get_backend() else "cpu"
        votes = torch.tensor(requests, dtype=torch.int32, device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]

    def _at_exit(self) -> None:
        """Reports how the script ended, unless that was reported already."""
        if self._has_ended:
            return
        last_type = getattr(sys, "last_type", None)  # of an exception that nothing caught
        if last_type is not None:
            kind = "invalid" if issubclass(last_type, PERMANENT_ERRORS) else "crashed"
            if issubclass(last_type, MemoryError) or "OutOfMemory" in last_type.__name__:
                kind = "out_of_memory"
            self.say("failed", kind=kind, message=f"{last_type.__name__}: {getattr(sys, 'last_value', '')}")
        elif self._saved_step == self.step and (self.is_trial or self.step == self.num_steps):
            if self._metrics_step != self.step:
                self.say("metrics", step=self.step, metrics=self.last_metrics)
            self.say("done", step=self.step)
        elif self.step < self.num_steps:
            self.say(
                "failed",
                kind="invalid",
                message=f"the script ended by itself after step {self.step}, and its job has {self.num_steps} steps. "
                f"To fix: num_steps: {self.step}, or let the script continue",
            )
        else:
            message = f"the script wrote no checkpoint of its last step, {self.step}. To fix: add {SAVING} to its loop"
            self.say("failed", kind="invalid", message=message)


REPORTER = ProgressReporter(os.environ)
order = REPORTER.order
report, resume, export_folder = REPORTER.report, REPORTER.resume, REPORTER.export_folder
should_save, should_stop, checkpoint = REPORTER.should_save, REPORTER.should_stop, REPORTER.checkpoint
