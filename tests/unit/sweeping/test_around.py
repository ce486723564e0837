"""Jobs around one that is known to be good."""

import pytest

from ringmaster.tasks.sweeping.around import around
from tests.unit.execution.fakes import job


def test_the_job_itself_comes_first_and_the_others_lie_around_it():
    found = around(job("digits"), keys=("optimizer.lr", "global_batch_size"), num_jobs=8)
    assert found[0] == job("digits")
    assert [each.name for each in found] == ["digits", *(f"digits-{i}" for i in range(1, 8))]
    rates = [each.optimizer.lr for each in found]
    assert len(set(rates)) == 8 and all(1e-3 / 3 <= rate <= 3e-3 for rate in rates)
    assert all(isinstance(each.global_batch_size, int) and 5 <= each.global_batch_size <= 48 for each in found)


def test_the_same_seed_draws_the_same_jobs():
    assert around(job("a"), seed=1) == around(job("a"), seed=1) != around(job("a"), seed=2)


@pytest.mark.parametrize("key", ["optimizer.name", "optimizer.rate", "exact", "clip_grad_norm"])
def test_what_is_no_positive_number_is_refused(key):
    with pytest.raises(ValueError, match=f"{key} is .*To fix: leave it out"):
        around(job("a"), keys=(key,))
    with pytest.raises(ValueError, match="above 1"):
        around(job("a"), factor=1.0)
