"""What the tests' jobs name: losses, factories and techniques that misbehave on purpose."""

import resource
import threading

import fsspec
from fsspec.implementations.local import LocalFileSystem
from torch.nn.functional import cross_entropy

from techniques.ddp import Ddp
from techniques.engine import training
from techniques.engine.saving import THREAD_NAME
from techniques.fsdp import Fsdp
from techniques.single import Single


def loss_of_some_tokens(output, batch):
    """Counts the tokens whose id is even: of each row another number."""
    logits, labels = output.logits[:, :-1], batch["input_ids"][:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counts = (labels.flatten() % 2 == 0).float()
    return (losses * counts).sum(), counts.sum()


def loss_that_fails(output, batch):
    raise RuntimeError("no such luck")


def loss_that_is_not_a_number(output, batch):
    """As a model that diverges gives it from its third batch on."""
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
    """Ranks that may be silent for a moment only, so that a test need not wait for one that hangs."""

    def parallelize(self, model, mesh, config):
        training.LEAST_PATIENCE_S = 1.0
        return super().parallelize(model, mesh, config)


class ImpatientSingle(_Impatient, Single):
    name = "impatient-single"


class ImpatientDdp(_Impatient, Ddp):
    name = "impatient-ddp"


class NoRoom(Single):
    """A disk that is full from the third save to the fifth: no file may grow beyond some bytes."""

    name = "no-room"
    full_saves = range(3, 6)
    num_saves = 0

    def optimizer_state(self, model, optimizer):
        self.num_saves += 1
        limit = 512 if self.num_saves in self.full_saves else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return super().optimizer_state(model, optimizer)

    def accumulate(self, model, *, is_last):
        wait_for_saves()  # so that every save has an end after some steps
        return super().accumulate(model, is_last=is_last)


class NoRoomAtTheEnd(NoRoom):
    name = "no-room-at-the-end"
    full_saves = range(3, 1000)


def wait_for_saves():
    """Until what is written while training goes on is written."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


class Shelf(LocalFileSystem):
    """A store of objects that all ranks see: nothing in it can be moved."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("shelf://"))

    def mv(self, *_, **__):
        raise NotImplementedError("objects cannot be moved")


fsspec.register_implementation("shelf", Shelf, clobber=True)


class ShelvedSingle(Single):
    """Knows the shelf, as every technique knows the stores whose libraries are installed."""

    name = "shelved-single"


class ShelvedFsdp(Fsdp):
    """The same on several ranks."""

    name = "shelved-fsdp"


class Picky(Single):
    """Runs out of memory with more than two rows at a time."""

    name = "picky"

    def parallelize(self, model, mesh, config):
        if config["micro_batch"] > 2:
            raise MemoryError("more than two rows")
        return super().parallelize(model, mesh, config)
