"""A running command: starts it, reads its events, stops it, and explains its end."""

import builtins
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Self

import psutil

from ringmaster.errors import PERMANENT_ERRORS, ChannelClosed
from ringmaster.features.external_trainers import protocol
from ringmaster.features.external_trainers.account import START_TIMEOUT_S, CommandProgress
from ringmaster.features.external_trainers.protocol import (
    RUN,
    CommandFailure,
    CommandFinished,
    Report,
    environment,
    free_port,
    words_of,
    write_order,
)
from ringmaster.report import INSPECT, PREEMPTED_STATUS, PROFILE, REPORTING
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.checkpoints.storage import MANIFEST
from ringmaster.techniques.job import Job
from ringmaster.techniques.processes.channel import Channel, woken_by
from ringmaster.techniques.processes.gang import num_out_of_memory_kills
from ringmaster.techniques.processes.gang_events import JobReady, JobResult, OutcomeStatus, TrialMeasured
from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
from ringmaster.techniques.processes.reporter import MEASURE, STOP, WAITING_TIMEOUT_S, Reporter, wait_for_stop
from ringmaster.techniques.training.trainer import ENOUGH_S, MIN_STEPS, USUAL_STEPS, WARM_UP_STEPS

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LIBC = ctypes.CDLL(None)


class CommandKeeper:
    """A running command, as seen from the worker.

    status: its exit status once it has ended, negative for a signal; None before.
    """

    def __init__(self, words: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _keep(theirs, words, environment=environment, folder=folder)
        theirs.close()
        self.channel = Channel(ours)
        self.status: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command's process group."""
        with contextlib.suppress(ChannelClosed):  # it has ended: `hear` will read its status
            self.channel.send({"signal": int(number)})

    def hear(self) -> None:
        """Processes the messages of the keeper. Raises ValueError where the command cannot be started."""
        while self.status is None and (message := self._message()) is not None:
            if "fault" in message:
                raise ValueError(message["fault"])
            self.status = message["status"]

    def _message(self) -> Mapping[str, Any] | None:
        try:
            return self.channel.poll()
        except ChannelClosed:
            return {"status": -signal.SIGKILL}  # the keeper itself was killed

    def close(self) -> None:
        """Ends the command and all processes that it started; returns when they have ended."""
        self.channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def peak_bytes(self) -> int:
        """Returns the most memory that the command, or a process that it started and that runs, has held."""
        peaks = [0]
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    peaks.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
        return max(peaks)


def _keep(connection: socket.socket, words: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> NoReturn:
    """Runs the keeper, in a fork of the worker."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        channel = Channel(connection)
        try:
            command = subprocess.Popen(
                words, env=environment, cwd=folder, stdin=subprocess.DEVNULL, preexec_fn=_begin, start_new_session=True
            )
        except OSError as error:
            channel.send({"fault": f"the command {words[0]!r} cannot be started: {error}"})
        else:
            status = _watch(channel, command.pid)
            _kill_descendants()
            channel.send({"status": status})
    except ChannelClosed:
        _kill_descendants()
    finally:
        os._exit(0)


def _begin() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the keeper itself is killed


def _watch(channel: Channel, pid: int) -> int:
    """Forwards signals until the command has ended; returns its status. Raises ChannelClosed when the worker ends."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with woken_by(channel) as wait:
        while (status := _reap(pid)) is None:
            wait()
            while (message := channel.poll()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, message["signal"])
    return status


def _reap(pid: int) -> int | None:
    """Reaps all ended children; returns the command's exit status if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _kill_descendants() -> None:
    """Kills children, and then their children, which become this process's own as the former end."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)


FINAL_STATUSES = (0, 2, 126, 127)  # by itself, wrong usage, and a shell's: not executable, not found
LAST_WORDS = 2000  # characters of the log that are searched for the cause of an unreported end


ERRORS = {
    OutcomeStatus.OUT_OF_MEMORY: MemoryError,
    OutcomeStatus.INVALID: ValueError,
    OutcomeStatus.CRASHED: RuntimeError,
}


class CommandProcess:
    """The command of an order, on the devices of its gang.

    Entering the context starts the command; leaving it ends the command in any case.

    export_to: the folder into which the command writes the finished model.
    """

    def __init__(self, order: GangOrder, reporter: Reporter, *, mode: str, root: Path) -> None:
        self.account = CommandProgress(order, reporter, mode=mode, root=root)
        self._order, self._reporter, self._mode, self._root = order, reporter, mode, root
        self._folder = Path(order.folder).resolve()
        self.export_to = self._folder / "export"
        self._seen_peak_bytes = 0
        self._is_terminated = False
        self._num_kills_before = num_out_of_memory_kills()

    def __enter__(self) -> Self:
        shutil.rmtree(self.export_to, ignore_errors=True)
        self.export_to.mkdir(parents=True)
        order_file, report_file, port = self._folder / "order.json", self._folder / "report", free_port()
        write_order(
            order_file,
            self._order,
            mode=self._mode,
            port=port,
            first_step=self.account.first_step,
            restore_from=self.account.restored_from,
            folders={"save_to": protocol.incoming(self._root), "export_to": self.export_to},
        )
        if cores := {core for slot in self._order.slots for core in slot.cores}:
            os.sched_setaffinity(0, cores)
        self._report = Report(report_file)
        self._kept = CommandKeeper(
            words_of(self._order, port=port),
            environment=environment(self._order, port=port, order_file=order_file, report_file=report_file),
            folder=Path(self._order.job.model.adopt or self._folder),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()
        self._report.close()

    @property
    def peak_bytes(self) -> int:
        """The peak memory that the command reported.

        Without a report, it is the whole memory of a GPU; on CPU slots, the most that one process of the command held.
        """
        if self.account.reported_peak_bytes is not None:
            return self.account.reported_peak_bytes
        slot = self._order.slots[0]
        return slot.memory_bytes if slot.kind == "gpu" else self._seen_peak_bytes

    def rounds(self) -> Iterator[list[float]]:
        """Waits for messages to this rank and events of the command, again and again, until the command has ended.

        Each round processes the new events, and yields the seconds of the steps among them.
        """
        with woken_by(self._report, self._kept.channel, self._reporter) as wait:
            while self._kept.status is None:
                wait()
                self._kept.hear()
                num_reported = len(self.account.step_seconds)
                for event in self._report.events():
                    self.account.note(event)
                seconds = self.account.step_seconds[num_reported:]
                if seconds and self._order.slots[0].kind == "cpu":  # its processes do not measure a GPU's memory
                    self._seen_peak_bytes = max(self._seen_peak_bytes, self._kept.peak_bytes())
                self.account.tell_steps(
                    num_reported, peak_bytes=self.account.reported_peak_bytes or self._seen_peak_bytes
                )
                yield seconds

    def terminate(self) -> None:
        """Requests the command, once, to write a checkpoint at its next step and end.

        In a trial the command does all that it does after the last step of a job.
        """
        if not self._is_terminated:
            self._is_terminated = True
            self._kept.signal(signal.SIGTERM)

    def ended(self) -> OutcomeStatus:
        """Returns how the command ended: done or preempted.

        Its events take precedence over its exit status, which launchers change. Raises MemoryError, ValueError or
        RuntimeError for the failure that it reported, or for the likely cause of its end.
        """
        end = self.account.end
        if isinstance(end, CommandFailure):
            raise ERRORS[OutcomeStatus(end.kind)](end.message)
        if end is not None:
            return OutcomeStatus.DONE if isinstance(end, CommandFinished) else OutcomeStatus.PREEMPTED
        # SIGTERM itself may have killed a command that had not begun, or was between a checkpoint and its next step.
        if self._kept.status == PREEMPTED_STATUS or (self._is_terminated and self.account.is_saved):
            return OutcomeStatus.PREEMPTED
        if num_out_of_memory_kills() > self._num_kills_before:
            raise MemoryError("the kernel killed a process of the command for want of memory")
        if self._kept.status == 0 and self.account.startup_s is None and not self._is_terminated:
            raise ValueError(f"the command ended with status 0, and reports nothing. To fix: {REPORTING}")
        line = self._last_line()
        last_words = f"; the last line of its output: {line}" if line else ""
        message = f"the command ended with status {self._kept.status} without saying done{last_words}"
        is_final = self._kept.status in FINAL_STATUSES and not self._is_terminated
        raise ValueError(message) if is_final or _names_permanent_error(line) else RuntimeError(message)

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._folder / "rank-0.log").read_text(errors="replace")[-LAST_WORDS:]
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                return lines[-1]
        return ""


def _names_permanent_error(line: str) -> bool:
    """Whether a line is the end of Python's traceback of an error that another try does not change."""
    error = getattr(builtins, line.partition(":")[0], None)
    return isinstance(error, type) and issubclass(error, PERMANENT_ERRORS)


def run(order: GangOrder, reporter: Reporter) -> JobResult:
    """Runs the command from the newest checkpoint to `order.last_step`.

    Returns what `training.segment_loop.train_segment` returns.
    """
    assert order.checkpoint_dir is not None and order.model_dir is not None
    reporter.phase("starting the command", timeout_s=START_TIMEOUT_S)
    with CommandProcess(order, reporter, mode=RUN, root=Path(order.checkpoint_dir)) as child:
        for _ in child.rounds():
            if reporter.has_command(STOP):
                child.terminate()
        status, progress = child.ended(), child.account
    result = JobResult(
        status=status,
        first_step=progress.first_step,
        step=progress.saved_step,
        startup_s=progress.startup_s,
        save_s=progress.seconds.get("checkpoint"),
    )
    if status == OutcomeStatus.DONE and progress.saved_step != order.last_step:
        raise ValueError(
            f"the command sent done at step {progress.saved_step}, and its order ends at {order.last_step}. "
            "To fix: report preempted after SIGTERM, else continue"
        )
    if status == OutcomeStatus.DONE and progress.saved_step == order.job.total_steps:
        result = replace(
            result,
            metrics=progress.metrics(),
            evaluate_s=progress.seconds["metrics"],
            export_s=progress.seconds.get("model", 0.0),
        )
        _publish(child.export_to, Path(order.model_dir), checkpoint=progress.saved_to)
    return result


def profile(order: GangOrder, reporter: Reporter) -> JobResult:
    """Measures some steps of the command while its neighbours are busy, then one save, evaluation and export.

    After that, the command no longer loads the machine for neighbours that are still being measured.
    """
    reporter.phase("trying", timeout_s=START_TIMEOUT_S)
    scratch = Path(order.folder) / "scratch"
    seconds: list[float] = []
    with CommandProcess(order, reporter, mode=PROFILE, root=scratch) as child:
        progress, is_ready = child.account, False
        for heard in child.rounds():
            if is_ready and reporter.has_command(MEASURE):
                seconds += heard
            if not is_ready and len(progress.step_seconds) >= WARM_UP_STEPS:
                is_ready = True
                reporter.send(JobReady())
            is_enough = len(seconds) >= MIN_STEPS and sum(seconds) >= ENOUGH_S
            if reporter.has_command(STOP) or is_enough or len(seconds) >= USUAL_STEPS:
                child.terminate()
        child.ended()
    if len(seconds) < MIN_STEPS:  # a job of few steps has ended before its neighbours were ready
        seconds = progress.step_seconds[WARM_UP_STEPS:]
    if len(seconds) < MIN_STEPS:
        raise ValueError(
            f"the command ended its trial after {len(progress.step_seconds)} steps. "
            f"To fix: in mode profile, continue until SIGTERM comes, for {WARM_UP_STEPS + MIN_STEPS} steps or more"
        )
    step_s = statistics.median(seconds)
    # The first steps are slower: their time beyond the median counts as start-up.
    first_s = sum(max(taken_s - step_s, 0.0) for taken_s in progress.step_seconds[:WARM_UP_STEPS])
    measured = {
        "step_s": step_s,
        "num_measured_steps": len(seconds),
        "startup_s": (progress.startup_s or 0.0) + first_s,
        "peak_bytes": child.peak_bytes,
        "save_s": progress.seconds.get("checkpoint", 0.0),
        "evaluate_s": progress.seconds.get("metrics", 0.0),
        "export_s": progress.seconds.get("model", 0.0),
    }
    shutil.rmtree(scratch)
    reporter.phase("waiting for its neighbours", timeout_s=WAITING_TIMEOUT_S)
    reporter.send(TrialMeasured(profile=measured))
    wait_for_stop(reporter)
    return JobResult(status=OutcomeStatus.DONE)


def inspect_script(job: Job, *, num_devices: int) -> dict[str, int]:
    """Starts the unedited script of a job until its first step, and returns what it reports about itself.

    Returns `num_steps` and `global_batch_size`. Raises ValueError where the script does not report them.
    """
    slots = tuple(Slot(kind="cpu", index=index) for index in range(num_devices))
    with TemporaryDirectory() as name:
        folder = Path(name)
        order = GangOrder(
            purpose=TRIAL, job=job, technique="command", config={}, slots=slots, folder=name, cache_dir=name
        )
        order_file, report_file, port = folder / "order.json", folder / "report", free_port()
        folders = {"save_to": folder, "export_to": folder}
        write_order(order_file, order, mode=INSPECT, port=port, first_step=0, restore_from=None, folders=folders)
        variables = environment(order, port=port, order_file=order_file, report_file=report_file)
        del variables["CUDA_VISIBLE_DEVICES"], variables["OMP_NUM_THREADS"]
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            variables["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        ended = subprocess.run(
            words_of(order, port=port),
            env=variables,
            cwd=job.model.adopt,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
        lines = report_file.read_text().splitlines() if report_file.exists() else []
    events = {event["event"]: event for event in map(json.loads, lines)}
    if "plan" not in events:
        reason = events.get("failed", {}).get("message") or (
            f"it ended with status {ended.returncode} before its training. To fix: correct what it wrote above"
            if ended.returncode
            else f"it reports nothing, and trains without Trainer or TRL. To fix: {REPORTING}; give --steps"
        )
        raise ValueError(f"the script does not report its number of steps: {reason}")
    return {name: events["plan"][name] for name in ("num_steps", "global_batch_size")}


def _publish(exported: Path, model_dir: Path, *, checkpoint: Path | None) -> None:
    """Makes what the command exported the job's model; its last checkpoint where it exported nothing."""
    with publish(model_dir) as aside:
        if any(exported.iterdir()):
            for path in exported.iterdir():
                shutil.move(path, aside / path.name)
        else:
            assert checkpoint is not None  # of the last step
            shutil.copytree(checkpoint, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
