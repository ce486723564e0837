"""The assignment of parameters to ranks under ZeRO-1."""

from hypothesis import given
from hypothesis import strategies as st

from ringmaster.techniques.zero1 import owners

SIZES = st.lists(st.integers(0, 1 << 20), max_size=30)


def test_the_largest_go_first_each_to_the_rank_with_least():
    assert owners([3, 8, 4, 1], num_ranks=2) == [1, 0, 1, 1]


@given(sizes=SIZES, num_ranks=st.integers(1, 8))
def test_no_rank_has_more_than_its_even_share_and_one_parameter(sizes, num_ranks):
    owner_of = owners(sizes, num_ranks=num_ranks)
    loads = [
        sum(size for size, owner in zip(sizes, owner_of, strict=True) if owner == rank) for rank in range(num_ranks)
    ]
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes, default=0)


def test_a_rank_may_own_nothing():
    assert owners([5], num_ranks=3) == [0]
