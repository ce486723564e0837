"""Loading ahead: the same batches, at their own steps, whatever the samples draw, raise or need."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from ringmaster.techniques.training import batch_loader
from ringmaster.techniques.training.batch_loader import BatchLoader, RowsRequest
from ringmaster.techniques.training.dropout import Draws, drawing, seed_generators, use

REQUESTS = [RowsRequest(rows=(2 * i, 2 * i + 1)) for i in range(10)]


class Samples:
    """Samples that note the thread in which they are read. of: makes a value of an index."""

    def __init__(self, of=float):
        self.of, self.threads, self.read = of, [], []

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self.read.append(index)
        return {"x": torch.tensor(float(self.of(index)))}

    @property
    def num_ahead(self):
        return self.threads.count("batch-loader")


@pytest.fixture(autouse=True)
def loads_are_slow(monkeypatch):
    monkeypatch.setattr(batch_loader, "SLOW_S", 0.0)


def steps(loader, requests=REQUESTS, *, compute=lambda: None):
    """Yields the values of each batch, seeded and computed as a trainer does."""
    for step, request in enumerate(requests):
        loader.begin_step(iter(requests[step:]))
        seed_sample = lambda place, step=step: seed_generators(step, place)  # noqa: E731
        yield loader.batch(request, seed_sample=seed_sample)["x"].tolist()
        seed_generators(step)
        loader.load_ahead()
        compute()


def seeded(draw):
    """The values of the samples that `draw` makes, each after its seed."""
    values = []
    for step, request in enumerate(REQUESTS):
        for place, index in enumerate(request.rows):
            seed_generators(step, place)
            values.append(draw(index))
    return values


def test_batches_of_coming_steps_are_loaded_in_the_thread():
    samples = Samples()
    loader = BatchLoader(samples)
    assert [value for batch in steps(loader) for value in batch] == list(range(20))
    assert samples.threads == ["MainThread"] * 4 + ["batch-loader"] * 16
    assert samples.read == list(range(20))


def test_quick_samples_are_read_when_they_are_needed(monkeypatch):
    monkeypatch.setattr(batch_loader, "SLOW_S", 1e3)
    samples = Samples()
    assert len(list(steps(BatchLoader(samples)))) == 10 and samples.num_ahead == 0


def test_one_batch_at_most_is_loaded_ahead():
    samples = Samples()
    loader = BatchLoader(samples)
    for step, _ in zip(range(4), steps(loader), strict=False):
        loader.settle()
        assert len(samples.read) <= 2 * (step + 2)


@pytest.mark.parametrize(
    "draw",
    [lambda _: torch.rand(()), lambda _: np.random.rand(), lambda _: random.random()],
    ids=["torch", "numpy", "python"],
)
@pytest.mark.parametrize("first", [0, 11], ids=["always", "later"])
def test_samples_that_draw_are_read_after_their_seeds(draw, first):
    def of(index):
        return draw(index) if index >= first else index

    samples = Samples(of)
    values = [value for batch in steps(BatchLoader(samples)) for value in batch]
    assert values == pytest.approx([float(value) for value in seeded(of)], abs=1e-7)
    assert samples.num_ahead == 0 if first == 0 else samples.num_ahead > 0


def test_samples_are_not_drawn_by_the_hash_of_the_running_forward_pass():
    def of(index):
        return torch.rand(()) if index == 7 else index

    with drawing():
        use(Draws(seed=3, samples=[0, 1, 2]))
        values = [value for batch in steps(BatchLoader(Samples(of))) for value in batch]
    assert values == pytest.approx([float(value) for value in seeded(of)])


def test_a_model_that_draws_from_the_generators_keeps_its_draws():
    samples, drawn = Samples(lambda index: time.sleep(1e-3) or index), []
    values = list(steps(BatchLoader(samples), compute=lambda: drawn.append(random.random())))
    expected = [seed_generators(step) or random.random() for step in range(10)]
    assert drawn == expected and len(values) == 10 and samples.threads[-4:] == ["MainThread"] * 4


def test_a_fault_is_raised_at_its_own_step():
    def of(index):
        if index == 13:
            raise StopIteration(f"sample {index} is damaged")
        return index

    seen = []
    with pytest.raises((StopIteration, RuntimeError)) as fault:
        for batch in steps(BatchLoader(Samples(of))):
            seen.append(batch)
    assert len(seen) == 6 and "sample 13 is damaged" in str(fault.value.__cause__ or fault.value)


def test_samples_that_can_be_read_in_one_thread_alone_are_read_there():
    def of(index):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("objects created in a thread can only be used in that same thread")
        return index

    samples = Samples(of)
    assert [value for batch in steps(BatchLoader(samples)) for value in batch] == list(range(20))
    assert samples.threads[-8:] == ["MainThread"] * 8


def test_other_batches_than_foreseen_are_loaded_when_they_are_needed():
    loader = BatchLoader(Samples())
    for _ in zip(range(4), steps(loader), strict=False):
        pass
    assert loader.batch(RowsRequest(rows=(50, 51)))["x"].tolist() == [50, 51]
    assert [value for batch in steps(loader) for value in batch] == list(range(20))


def test_no_thread_is_left():
    others, loader = threading.enumerate(), BatchLoader(Samples())
    for _ in zip(range(5), steps(loader), strict=False):
        pass
    (thread,) = (each for each in threading.enumerate() if each not in others)
    del loader
    thread.join(timeout=30)
    assert not thread.is_alive()
