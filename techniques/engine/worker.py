"""A worker process: takes its device, meets its peers, does what the order says, and tells how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from ringmaster.techniques import registry
from ringmaster.techniques.black_box import BlackBox, checked_result
from ringmaster.techniques.engine import training, trials
from ringmaster.techniques.engine.channel import Channel, ChannelClosed
from ringmaster.techniques.engine.failures import failure_kind
from ringmaster.techniques.engine.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.engine.ranks import join
from ringmaster.techniques.engine.reporter import Reporter
from ringmaster.techniques.engine.trainer import Trainer
from ringmaster.techniques.engine.training import BUILD_PATIENCE_S
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.values import from_json


def main(channel: Channel, argument: dict[str, Any]) -> NoReturn:
    """Runs one rank of a gang and ends the process. The target of every worker process."""
    reporter = Reporter(channel)
    rank = argument.pop("rank")
    order = from_json(GangOrder, argument)
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    try:
        _run(order, rank, reporter)
    except ChannelClosed:
        os.kill(os.getpid(), signal.SIGKILL)  # hung up on, as the fork server is about to do
        _leave(1)
    except Exception as error:  # noqa: BLE001 - told to the supervisor, with its kind; the trace goes to the log
        with contextlib.suppress(OSError):  # a full disk must not keep the cause from being told
            traceback.print_exc()
        reporter.send("failed", kind=failure_kind(error), message=f"{type(error).__name__}: {error}")
        _leave(1)


def _run(order: GangOrder, rank: int, reporter: Reporter) -> NoReturn:
    reporter.phase("starting", patience_s=BUILD_PATIENCE_S)
    technique = registry.load(order.technique)
    if isinstance(technique, BlackBox):
        technique.rank = rank
        if order.purpose == TRIAL:
            result = technique.profile(order, reporter)
        else:
            result = checked_result(technique.run(order, reporter), order.job)
        reporter.send("result", result=result)
        _leave(0)
    slot = order.slots[0]
    shape = GangShape(kind=slot.kind, num_devices=order.num_devices, memory_bytes=slot.memory_bytes)
    num_ranks = technique.num_ranks(shape)
    ranks = join(order, rank, num_ranks=num_ranks, axes=technique.mesh_shape(shape, order.config))
    reporter.phase("building the model", patience_s=BUILD_PATIENCE_S)
    trainer = Trainer(order, technique, ranks, beat=reporter.beat)
    loop = {TRAIN: training.train, TRIAL: trials.trial}[order.purpose]
    result = loop(trainer, order, reporter)
    ranks.agree(True)  # nobody leaves while a peer may still wait for it
    reporter.send("result", result=result)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Ends the process with everything in place: a process group or a DDP model taken down by itself may wait for
    peers that have gone.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
