"""Losses, factories and techniques that the jobs of the tests name; several misbehave on purpose."""

import errno
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.nn.functional import cross_entropy

from ringmaster.files import WRITE_PATIENCE
from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.checkpoints.saving import THREAD_NAME
from ringmaster.techniques.ddp import Ddp
from ringmaster.techniques.fsdp import Fsdp
from ringmaster.techniques.shared_base import SharedBase
from ringmaster.techniques.single import Single
from ringmaster.techniques.training import segment_loop, trainer
from ringmaster.techniques.training.dropout import DrawSites
from tests.integration import targets


def loss_of_some_tokens(output, batch):
    """Counts the tokens with an even id, a number that differs between rows."""
    logits, labels = output.logits[:, :-1], batch["input_ids"][:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counts = (labels.flatten() % 2 == 0).float()
    return (losses * counts).sum(), counts.sum()


def loss_that_fails(output, batch):
    raise RuntimeError("no such luck")


def loss_that_prints(output, batch):
    print("a loss is computed")
    return loss_of_some_tokens(output, batch)


def loss_of_few(output, batch):
    """Fails for a batch, but not for the four samples of a preflight's tiny step."""
    if len(batch["input_ids"]) > 4:
        raise RuntimeError("no such luck")
    return loss_of_some_tokens(output, batch)


def loss_that_hangs(outputs, batch):
    """Takes forever once it is to train more than the samples of an inspection."""
    try:
        return loss_of_few(outputs, batch)
    except RuntimeError:
        time.sleep(600)
        raise


def loss_that_is_wrong(output, batch):
    raise ValueError("no such luck: the labels are of other classes")


def loss_that_fails_when_measured(output, batch):
    if not torch.is_grad_enabled():
        raise RuntimeError("no such luck while measuring")
    return loss_of_some_tokens(output, batch)


def loss_that_is_not_a_number(output, batch):
    """Returns NaN from its third call on, as a model that diverges does."""
    global _num_losses
    _num_losses += 1
    return output.logits.sum() * (float("nan") if _num_losses > 2 else 0.0), 1


_num_losses = 0


def model_that_is_too_large(**_):
    raise MemoryError("cannot allocate 1 TiB")


def model_that_is_wrong(width):
    raise ValueError(f"width {width} is not a power of two")


def model_that_fails_at_random():
    raise OSError("the file server is away")


class _Impatient:
    """Ranks with a short heartbeat timeout, so that a test need not wait long for a rank that hangs."""

    def parallelize(self, model, mesh, config):
        segment_loop.MIN_TIMEOUT_S = 4.0  # longer than a step takes on a busy machine
        return super().parallelize(model, mesh, config)


class ImpatientSingle(_Impatient, Single):
    name = "impatient-single"


class ImpatientDdp(_Impatient, Ddp):
    name = "impatient-ddp"


class _Gated:
    """Ranks that train no step until the file `config["gate"]` exists."""

    def parallelize(self, model, mesh, config):
        self._gate = Path(config["gate"])
        return super().parallelize(model, mesh, config)

    def accumulate(self, model, *, is_last):
        while not self._gate.exists():
            time.sleep(0.01)
        return super().accumulate(model, is_last=is_last)


class GatedSingle(_Gated, Single):
    name = "gated-single"


class GatedDdp(_Gated, Ddp):
    name = "gated-ddp"


class DrawingAsBefore(Single):
    """Draws dropout as an earlier release did: from torch's generator, seeded by step, rank and micro-batch."""

    name = "drawing-as-before"

    def __init__(self):
        trainer.draws_of = lambda *_, **__: DrawSites()


class NoisyPoints:
    """A data set that augments each sample when it is read."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        point = torch.linspace(index, index + 1, 4) / 64
        return {"point": point + 0.1 * torch.randn(4) + random.random(), "target": point.sum()}


def noisy_points():
    return NoisyPoints(), NoisyPoints()


class _DroppingLine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, point):
        return torch.nn.functional.dropout(self.line(point), 0.5, self.training)


class _KillsItsFirstReader(NoisyPoints):
    """Kills the first process that preflights a job, and the first that runs a trial, as for lack of memory."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __getitem__(self, index):
        purpose = "look" if "ringmaster.techniques.estimates.job_preflight" in sys.modules else "trial"
        if not (marker := self.folder / purpose).exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def points_that_kill_at_first(folder):
    return _KillsItsFirstReader(folder), NoisyPoints()


def points_alone():
    return NoisyPoints()


def dropping_line():
    return _DroppingLine()


def squared_error(output, batch):
    return (output.squeeze(-1) - batch["target"]).square().sum(), len(output)


HEEDED = ("ready", "checkpoint")


def heard(folder, pid, number):
    """Returns the file whose creation acknowledges event `number` of a rank, counted over the events in HEEDED."""
    return Path(folder, f"heard-{pid}-{number}")


class HeedingSharedBase(SharedBase):
    """Pauses after each event in HEEDED until the test acknowledges it, so that the test never reacts too late."""

    name = "heeding-shared-base"

    def run(self, order, reporter):
        say, number = reporter.send, 0

        def send(event):
            nonlocal number
            say(event)
            if event.NAME in HEEDED:
                number += 1
                while self.rank == 0 and not heard(order.folder, os.getpid(), number).exists():
                    time.sleep(0.001)
                self.was_heard(event, reporter)

        reporter.send = send
        return super().run(order, reporter)

    def was_heard(self, event, reporter):
        """Called after a test has acknowledged an event."""


class HangingSharedBase(HeedingSharedBase):
    """Stops its process after the acknowledged checkpoint of job `HANGS_AT`, and announces a short timeout before."""

    name = "hanging-shared-base"
    HANGS_AT = "even"

    def was_heard(self, event, reporter):
        if self.rank == 0 and (event.NAME, getattr(event, "job", None)) == ("checkpoint", self.HANGS_AT):
            reporter.phase("training", timeout_s=0.5)
            os.kill(os.getpid(), signal.SIGSTOP)


class Boxed(BlackBox):
    """Trains nothing, and returns the result that its job contains."""

    name = "boxed"
    summary = "boxed"

    def supports(self, job, gang, facts):
        return None

    def profile(self, order, reporter):
        raise NotImplementedError

    def run(self, order, reporter):
        return order.job.model.kwargs["result"]


class Lingering(Boxed):
    """Starts a child process and waits forever."""

    name = "lingering"

    def run(self, order, reporter):
        targets.linger(reporter._channel, None)


class NoRoom(Single):
    """Simulates a disk that is full from the third save to the fifth, by a limit on file sizes."""

    name = "no-room"
    full_saves = range(3, 6)
    num_saves = 0

    def optimizer_state(self, model, optimizer):
        self.num_saves += 1
        limit = 512 if self.num_saves in self.full_saves else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return super().optimizer_state(model, optimizer)

    def accumulate(self, model, *, is_last):
        wait_for_saves()  # so that every save ends within a few steps
        return super().accumulate(model, is_last=is_last)


class NoRoomAtTheEnd(NoRoom):
    """A disk that stays full, for which the ranks do not wait."""

    name = "no-room-at-the-end"
    full_saves = range(3, 1000)

    def optimizer_state(self, model, optimizer):
        os.environ[WRITE_PATIENCE] = "0"
        return super().optimizer_state(model, optimizer)


class StoppedWithoutRoom(NoRoom):
    """A disk that stays full; the rank is commanded to stop while it waits."""

    name = "stopped-without-room"
    full_saves = range(3, 1000)

    def optimizer_state(self, model, optimizer):
        if self.num_saves > min(self.full_saves):
            signal.raise_signal(signal.SIGTERM)
        return super().optimizer_state(model, optimizer)


def wait_for_saves():
    """Waits for the checkpoints that background threads write."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


class Shelf(LocalFileSystem):
    """An object store that all ranks share; its objects cannot be moved."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("shelf://"))

    def mv(self, *_, **__):
        raise NotImplementedError("objects cannot be moved")


class FullShelf(Shelf):
    """A store that is full for the first N files of a process, where N is part of the path: full-2/..."""

    protocol = "full-shelf"
    num_refused = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("full-shelf://"))

    def _open(self, path, mode="rb", **options):
        if "w" in mode and FullShelf.num_refused < int(re.search(r"/full-(\d+)/", path)[1]):
            FullShelf.num_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._open(path, mode=mode, **options)


fsspec.register_implementation("shelf", Shelf, clobber=True)
fsspec.register_implementation("full-shelf", FullShelf, clobber=True)


class _Held:
    """Ranks that complete each save before the next step, and stop training after `config["most_saves"]` saves.

    A test can then kill them in time, however busy the machine is.
    """

    num_saves = 0

    def parallelize(self, model, mesh, config):
        self._most_saves = config.get("most_saves")
        return super().parallelize(model, mesh, config)

    def optimizer_state(self, model, optimizer):
        self.num_saves += 1
        return super().optimizer_state(model, optimizer)

    def accumulate(self, model, *, is_last):
        if self._most_saves is not None:
            wait_for_saves()
            while self.num_saves >= self._most_saves:
                time.sleep(0.01)
        return super().accumulate(model, is_last=is_last)


class HeldSingle(_Held, Single):
    name = "held-single"


class HeldFsdp(_Held, Fsdp):
    name = "held-fsdp"


class ShelvedSingle(HeldSingle):
    """Registers the shelf file system by importing this module, like the library of an installed store."""

    name = "shelved-single"


class ShelvedFsdp(HeldFsdp):
    """The same on several ranks."""

    name = "shelved-fsdp"


class Picky(Single):
    """Runs out of memory with more than two rows in a micro-batch."""

    name = "picky"

    def parallelize(self, model, mesh, config):
        if config["micro_batch"] > 2:
            raise MemoryError("more than two rows")
        return super().parallelize(model, mesh, config)
