from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.techniques.data.samples import Sampler


def batch_indices(*, step, **sizes):
    return Sampler(**sizes).indices(step)


SIZES = {"num_samples": st.integers(1, 40), "global_batch_size": st.integers(1, 60), "seed": st.integers(-3, 2**63)}


@given(**SIZES, step=st.integers(0, 20))
def test_a_batch_is_a_function_of_seed_and_step_alone(num_samples, global_batch_size, seed, step):
    sizes = {"num_samples": num_samples, "global_batch_size": global_batch_size, "seed": seed}
    alone = batch_indices(**sizes, step=step)
    in_turn = [batch_indices(**sizes, step=k) for k in range(step + 1)][-1]
    assert alone.shape == (global_batch_size,)
    assert alone.dtype == np.int64
    assert np.array_equal(alone, in_turn)


@given(**SIZES)
def test_every_sample_comes_once_an_epoch_whatever_the_batch_size(num_samples, global_batch_size, seed):
    num_epochs = 3
    steps = -(-num_samples * num_epochs // global_batch_size)
    sizes = {"num_samples": num_samples, "global_batch_size": global_batch_size, "seed": seed}
    stream = np.concatenate([batch_indices(**sizes, step=k) for k in range(steps)])
    for epoch in range(num_epochs):
        seen = Counter(stream[epoch * num_samples : (epoch + 1) * num_samples].tolist())
        assert seen == Counter(range(num_samples))


def test_the_stream_of_samples_does_not_depend_on_how_it_is_cut():
    by_3 = np.concatenate([batch_indices(num_samples=7, global_batch_size=3, seed=1, step=k) for k in range(7)])
    by_21 = batch_indices(num_samples=7, global_batch_size=21, seed=1, step=0)
    assert np.array_equal(by_3, by_21)


def test_seeds_and_epochs_are_shuffled_differently():
    first, second = (batch_indices(num_samples=100, global_batch_size=100, seed=0, step=k) for k in (0, 1))
    other = batch_indices(num_samples=100, global_batch_size=100, seed=1, step=0)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, np.arange(100))


def test_the_order_is_the_same_in_every_version():
    """A job that is resumed after an update must get the same batches."""
    batch = batch_indices(num_samples=10, global_batch_size=10, seed=0, step=0)
    assert batch.tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="empty"):
        batch_indices(num_samples=0, global_batch_size=4, seed=0, step=0)


def grouped(num_samples, *, global_batch_size, seed=0):
    lengths = np.random.default_rng(seed + 1).integers(1, 1000, num_samples)
    sizes = {"num_samples": num_samples, "global_batch_size": global_batch_size, "seed": seed}
    return lengths, Sampler(**sizes, lengths=lengths), Sampler(**sizes)


@given(**SIZES)
def test_every_sample_of_grouped_batches_comes_once_an_epoch(num_samples, global_batch_size, seed):
    lengths = np.arange(num_samples) % 7
    sizes = {"num_samples": num_samples, "global_batch_size": global_batch_size, "seed": seed, "lengths": lengths}
    steps = -(-num_samples * 3 // global_batch_size)
    stream = np.concatenate([Sampler(**sizes).indices(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    together = Sampler(**sizes)
    assert np.array_equal(stream, np.concatenate([together.indices(step) for step in reversed(range(steps))][::-1]))


def test_samples_of_a_grouped_batch_have_similar_lengths():
    lengths, sampler, at_random = grouped(1010, global_batch_size=8)
    steps = range(3 * 1010 // 8)  # batches are aligned in later epochs too
    narrow, wide = (np.mean([np.ptp(lengths[of.indices(step)]) for step in steps]) for of in (sampler, at_random))
    assert narrow < wide / 10


def test_the_first_grouped_batch_has_the_longest_sample():
    for seed in range(20):
        lengths, sampler, _ = grouped(45, global_batch_size=8, seed=seed)
        assert lengths[sampler.indices(0)].max() == lengths.max()


def test_the_first_grouped_batches_are_as_long_as_later_ones():
    """A trial measures the first steps: if lengths fell from batch to batch, it would measure too long steps."""
    lengths, sampler, _ = grouped(4000, global_batch_size=8)
    means = [lengths[sampler.indices(step)].mean() for step in range(1, 101)]
    assert abs(np.corrcoef(np.arange(50), means[:50])[0, 1]) < 0.5


def test_grouped_epochs_and_seeds_differ():
    _, sampler, _ = grouped(96, global_batch_size=8)
    _, other, _ = grouped(96, global_batch_size=8, seed=1)
    batches = [{tuple(sorted(of.indices(step))) for step in steps} for of, steps in (
        (sampler, range(12)), (sampler, range(12, 24)), (other, range(12)))]  # fmt: skip
    assert len(batches[0] & batches[1]) < 4
    assert len(batches[0] & batches[2]) < 4


def test_grouped_batches_are_the_same_in_every_version():
    sampler = Sampler(num_samples=10, global_batch_size=2, seed=0, lengths=np.arange(10))
    assert [sampler.indices(step).tolist() for step in range(6)] == [[9, 2], [5, 3], [6, 0], [8, 1], [7, 4], [9, 4]]
