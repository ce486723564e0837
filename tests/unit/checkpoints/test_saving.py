"""Asynchronous saves during training, rank by rank in lockstep, driven by the sums of every step."""

import errno
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from ringmaster.errors import CheckpointError
from ringmaster.files import WRITE_PATIENCE
from ringmaster.techniques.checkpoints import saving
from ringmaster.techniques.checkpoints.checkpoint import (
    CheckpointStore,
    CheckpointTensor,
    RankPieces,
    TensorPiece,
    publish,
)
from ringmaster.techniques.checkpoints.saving import THREAD_NAME, Saver, SaveVotes
from ringmaster.techniques.checkpoints.tensor_files import blocks_of
from ringmaster.techniques.processes.gang_events import CheckpointFailed, CheckpointSaved

CPU = torch.device("cpu")


def never():
    return False


@dataclass
class Told:
    """The heartbeats and events of one rank."""

    events: list = field(default_factory=list)
    num_beats: int = 0

    def beat(self):
        self.num_beats += 1

    def send(self, event):
        self.events.append(event)


class Trained:
    """The part of a trainer that a saver needs. `gate` delays the writing, and `fault` makes it fail."""

    def __init__(self, rank, num_ranks):
        self.ranks = SimpleNamespace(rank=rank, num_ranks=num_ranks, device=CPU)
        self.next_step, self.fault, self.gate, self.linked = 0, None, threading.Event(), []
        self.gate.set()

    def checkpoint_meta(self):
        return {"job": "a"}

    def after_publish(self, step, *, is_last):
        self.linked.append((step, is_last))

    def pieces(self, *, copies):
        value = {"w": torch.full((1,), float(self.next_step))}
        value = value if copies is None else copies.take(value)

        def pieces(file):
            self.gate.wait()
            if self.fault is not None:
                raise self.fault
            piece = TensorPiece(file=file, key="w", offset=(self.ranks.rank,), shape=(1,))
            stored = CheckpointTensor(dtype="F32", shape=(self.ranks.num_ranks,), pieces=(piece,))
            return RankPieces(tensors={"w": stored}, blocks=blocks_of(value))

        return pieces


class Gang:
    """The ranks of a gang, run one after another."""

    def __init__(self, root, *, num_ranks=2):
        self.root = root
        self.trainers = [Trained(rank, num_ranks) for rank in range(num_ranks)]
        self.told = [Told() for _ in self.trainers]
        self.savers = [
            Saver(
                trainer,
                CheckpointStore(root, rank=rank, num_ranks=num_ranks, attempt="a"),
                told,
                ranks=trainer.ranks,
            )
            for rank, (trainer, told) in enumerate(zip(self.trainers, self.told, strict=True))
        ]

    def step(self):
        sums = SaveVotes(*map(sum, zip(*[saver.votes() for saver in self.savers], strict=True)))
        for saver, trainer in zip(self.savers, self.trainers, strict=True):
            trainer.next_step += 1
            saver.follow(sums)

    def save(self):
        """Saves a checkpoint. Returns the number of steps that were trained meanwhile."""
        for saver in self.savers:
            saver.begin()
        num_steps = 0
        while not all(saver.is_idle for saver in self.savers):
            written()
            self.step()
            num_steps += 1
        return num_steps

    def newest(self):
        found = CheckpointStore(self.root).newest()
        return found.manifest.step if found else None


def written():
    """Waits for running writes."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_save_is_published_two_steps_after_it_was_written(tmp_path, num_ranks):
    gang = Gang(tmp_path, num_ranks=num_ranks)
    gang.step()
    assert gang.save() == 2
    assert gang.newest() == 1 and gang.trainers[0].next_step == 3
    for told in gang.told:
        (event,) = told.events
        assert isinstance(event, CheckpointSaved)
        assert event.step == 1 and 0 < event.stall_s < event.seconds


def saved_at_once(saver, *, gives_up):
    """Saves the state and waits until it is durable."""
    saver.begin_last()
    return saver.finish_last(gives_up=gives_up)


def test_training_goes_on_while_a_rank_writes(tmp_path):
    gang = Gang(tmp_path)
    gang.step()
    gang.trainers[1].gate.clear()
    for saver in gang.savers:
        saver.begin()
    for _ in range(5):
        gang.step()
    assert gang.trainers[0].next_step == 6 and gang.newest() is None
    gang.trainers[1].gate.set()
    for _ in range(2):
        written()
        gang.step()
    assert gang.newest() == 1


def test_where_one_rank_fails_all_drop_it_and_the_next_is_tried(tmp_path):
    gang = Gang(tmp_path)
    gang.step()
    gang.save()
    gang.trainers[1].fault = OSError(28, "No space left on device")
    gang.save()
    assert gang.newest() == 1 and not list(tmp_path.glob("*.tmp"))
    (zero, one) = (told.events[-1] for told in gang.told)
    assert type(zero) is type(one) is CheckpointFailed
    assert zero.message.endswith("on another rank")
    assert "No space left on device" in one.message
    gang.trainers[1].fault = None
    gang.save()
    assert gang.newest() == 5
    assert isinstance(gang.told[1].events[-1], CheckpointSaved)


def test_what_cannot_be_published_is_dropped_on_all_ranks(tmp_path):
    gang = Gang(tmp_path)
    (tmp_path / "latest.tmp").mkdir()  # the path of a file that is to be written
    gang.step()
    gang.save()
    assert [type(told.events[-1]) for told in gang.told] == [CheckpointFailed] * 2
    assert "latest.tmp" in gang.told[0].events[-1].message
    assert not list(tmp_path.glob("step-*.tmp"))


def test_a_mistake_in_the_thread_is_raised_where_training_is(tmp_path):
    gang = Gang(tmp_path, num_ranks=1)
    gang.trainers[0].fault = ZeroDivisionError("a mistake")
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        gang.save()


def test_the_end_waits_for_the_save_under_way(tmp_path):
    gang = Gang(tmp_path, num_ranks=1)
    gang.trainers[0].ranks.sum = lambda values: values
    gang.savers[0].begin()
    gang.trainers[0].next_step = 7
    assert saved_at_once(gang.savers[0], gives_up=never)
    assert gang.savers[0].is_idle and gang.newest() == 7
    assert [(type(event), event.step) for event in gang.told[0].events] == [(CheckpointSaved, 0)]


def full(message="No space left on device"):
    return OSError(errno.ENOSPC, message)


def test_a_disk_that_stays_full_fails_the_end_after_a_limited_time(tmp_path, monkeypatch):
    gang = Gang(tmp_path, num_ranks=1)
    gang.trainers[0].ranks.sum = lambda values: values
    gang.trainers[0].fault = full()
    monkeypatch.setenv(WRITE_PATIENCE, "0")
    with pytest.raises(CheckpointError, match=r"step-00000000 could not be written under .*No space left"):
        saved_at_once(gang.savers[0], gives_up=never)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def hasty(monkeypatch):
    """Retries without a pause."""
    monkeypatch.setattr(saving, "FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(saving, "LONGEST_RETRY_S", 0.0)


def test_a_rank_that_cannot_save_waits_with_its_state_and_says_so_once(tmp_path, hasty):
    gang, tries = Gang(tmp_path, num_ranks=1), []
    trainer, saver = gang.trainers[0], gang.savers[0]
    trainer.ranks.sum = lambda values: values
    trainer.next_step, trainer.fault = 5, full()

    def never_but_free_the_disk():
        tries.append(None)
        if len(tries) == 4:
            trainer.fault = None
        return False

    assert saved_at_once(saver, gives_up=never_but_free_the_disk)
    assert len(tries) == 4 and gang.newest() == 5
    failed, saved = gang.told[0].events
    assert (type(failed), failed.step, failed.waits) == (CheckpointFailed, 5, True)
    assert "No space left on device. The job waits with its state in memory" in failed.message
    assert (type(saved), saved.step) == (CheckpointSaved, 5)
    assert (saver.has_failed, saver.saved_step) == (False, 5)


def test_a_save_that_fails_while_training_goes_on_leaves_the_state_unsaved(tmp_path, hasty):
    """The loop then saves at once, before it trains any further."""
    gang = Gang(tmp_path, num_ranks=1)
    trainer, saver = gang.trainers[0], gang.savers[0]
    trainer.ranks.sum = lambda values: values
    gang.step()
    gang.save()
    assert (saver.has_failed, saver.saved_step) == (False, 1)
    trainer.fault = full()
    gang.save()
    assert (saver.has_failed, saver.saved_step) == (True, 1)
    trainer.fault = None
    assert saved_at_once(saver, gives_up=never)
    assert (saver.has_failed, saver.saved_step, gang.newest()) == (False, trainer.next_step, trainer.next_step)


def test_a_command_ends_the_wait_for_a_full_disk(tmp_path, hasty):
    gang = Gang(tmp_path, num_ranks=1)
    trainer, saver = gang.trainers[0], gang.savers[0]
    trainer.ranks.sum = lambda values: values
    trainer.next_step, trainer.fault = 5, full()
    assert not saved_at_once(saver, gives_up=lambda: True)
    assert (saver.has_failed, saver.saved_step) == (True, 0)
    trainer.fault = None
    assert saver.finish_last(gives_up=never)  # a later try writes the state that is still in memory
    assert (saver.has_failed, saver.saved_step, gang.newest()) == (False, 5, 5)


def test_a_fault_of_the_disk_that_safetensors_wraps_is_one_of_the_disk(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised, publish(tmp_path / "model"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert raised.value.errno == errno.ENOSPC and saving.takes_nothing(raised.value)
    assert not saving.takes_nothing(FileNotFoundError(errno.ENOENT, "no tokenizer"))


def test_a_rank_is_alive_for_as_long_as_it_writes(tmp_path):
    gang = Gang(tmp_path, num_ranks=1)
    gang.trainers[0].gate.clear()
    sums = []

    def total(values):
        sums.append(values)
        if len(sums) == 4:  # the write has hung for three rounds, and continues
            gang.trainers[0].gate.set()
        return values

    gang.trainers[0].ranks.sum = total
    saved_at_once(gang.savers[0], gives_up=never)
    assert sums[0] == sums[1] == sums[2]
    assert gang.told[0].num_beats < len(sums)
