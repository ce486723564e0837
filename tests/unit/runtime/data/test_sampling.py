from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.techniques.runtime.data import batch_indices

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
