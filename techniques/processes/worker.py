"""Worker process: takes its device, joins its peers, executes its order, and reports the result."""

import contextlib
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ringmaster import feature_check, features
from ringmaster.codec import from_json
from ringmaster.errors import ChannelClosed
from ringmaster.techniques import registry
from ringmaster.techniques.black_box import BlackBox, checked_result, checked_trial
from ringmaster.techniques.checkpoints.checkpoint import fetch_model, store_model
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.failures import failure_kind, is_of_code
from ringmaster.techniques.processes.gang_events import JobResult, OutcomeStatus, RankFailed, RankResult
from ringmaster.techniques.processes.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.processes.ranks import join, show_gpus
from ringmaster.techniques.processes.reporter import RankLog, Reporter
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.segment_loop import BUILD_TIMEOUT_S, train_segment
from ringmaster.techniques.training.trainer import Trainer
from ringmaster.techniques.training.trial import trial
from ringmaster.text import message_of

features.modules("trainer")  # loaded by a fork server once, and not by each of its children


def main(channel: Channel, argument: dict[str, Any]) -> NoReturn:
    """Runs one rank of a gang and ends the process. The target of every worker process."""
    reporter = Reporter(channel)
    _tolerate_full_logs()
    rank = argument.pop("rank")
    order = from_json(GangOrder, argument)
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    try:
        _run(order, rank, reporter)
    except ChannelClosed:
        os.kill(os.getpid(), signal.SIGKILL)  # the other end is closed: the fork server is about to kill this process
        _exit_process(1)
    except Exception as error:  # noqa: BLE001 - reported to the supervisor, with its kind; the trace goes to the log
        with contextlib.suppress(OSError):  # a full disk must not prevent the report
            traceback.print_exc()
        kind, of_code = failure_kind(error), is_of_code(error)
        is_new = rank == 0 and not (reporter.has_stepped or order.known_step)
        # Nothing has been trained, and nothing will be different; what an OSError names may be there at the next try.
        if kind == OutcomeStatus.CRASHED and of_code and is_new and not isinstance(error, OSError):
            kind = OutcomeStatus.INVALID
        message = f"{type(error).__name__}: {message_of(error)}"
        reporter.send(RankFailed(kind=kind, message=message, is_of_code=of_code))
        _exit_process(1)


def _run(order: GangOrder, rank: int, reporter: Reporter) -> NoReturn:
    for kind in ("job", "trainer"):
        feature_check.refuse_faulty_modules(kind)  # a job must not train without a part of what is installed
    reporter.phase("starting", timeout_s=BUILD_TIMEOUT_S)
    for folder, url in order.model_urls.items():
        fetch_model(url, Path(folder))
    technique = registry.load(order.technique)
    reporter.has_stepped = isinstance(technique, BlackBox)  # its loop may have done what it has not reported
    if rank == 0 and order.purpose == TRAIN and not (isinstance(technique, BlackBox) and technique.prints_itself):
        reporter.log = RankLog()
    if isinstance(technique, BlackBox):  # of commands, groups, rewriting and encoding, which have a loop of their own
        technique.rank = rank
        show_gpus(order.slots)
        if order.purpose == TRIAL:
            result = checked_trial(technique.profile(order, reporter))
        else:
            result = checked_result(technique.run(order, reporter), order.job)
            if rank == 0 and order.model_url is not None and Path(order.model_dir or "").is_dir():
                store_model(Path(order.model_dir or ""), order.model_url)
        reporter.send(RankResult(result=_with_features(result, order)))
        _exit_process(0)
    slot = order.slots[0]
    shape = GangShape(kind=slot.kind, num_devices=order.num_devices, memory_bytes=slot.memory_bytes)
    num_ranks = technique.num_ranks(shape)
    ranks = join(order, rank, num_ranks=num_ranks, axes=technique.mesh_shape(shape, order.config))
    reporter.phase("loading data and model", timeout_s=BUILD_TIMEOUT_S)
    trainer = Trainer(order, technique, ranks, beat=reporter.beat)
    result = trial(trainer, order, reporter) if order.purpose == TRIAL else train_segment(trainer, order, reporter)
    ranks.agree(True)  # no rank ends while a peer may still wait for it
    reporter.send(RankResult(result=_with_features(result, order)))
    _exit_process(0)


def _with_features(result: JobResult, order: GangOrder) -> JobResult:
    """Returns the result of a segment with what the features of its job add."""
    for feature in order.job.features:
        result = result.extended(feature.segment_result(cache_dir=Path(order.cache_dir)))
    return result


class _Log(io.FileIO):
    """A file whose writes never fail: what a full disk does not take is lost."""

    def write(self, content: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(content)
        return len(content)


def _tolerate_full_logs() -> None:
    """Lets a `print` of a model, a loss or a library not end a rank where the disk of its log is full."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_Log(number, "w", closefd=False))
        is_stderr = name == "stderr"
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=is_stderr))


def _exit_process(status: int) -> NoReturn:
    """Ends the process without cleanup.

    Destroying a process group or a DDP model may wait for peers that have ended.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
