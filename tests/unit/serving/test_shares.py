"""Fair shares of device time, and the order of each client's requests."""

from hypothesis import given
from hypothesis import strategies as st

from ringmaster.features.endpoint.server.shares import FairShares, RequestStream, within_budget


def test_requests_wait_for_those_before_them():
    stream = RequestStream(next_seq=1)
    stream.waiting |= {3: "c", 1: "a"}
    assert stream.ready() == [1]
    del stream.waiting[1]
    stream.next_seq = 2
    assert stream.ready() == []
    stream.refused.add(2)
    assert stream.ready() == [3]


def test_samples_have_no_order():
    assert RequestStream(waiting={7: "x", 2: "y"}).ready() == [2, 7]


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=5), st.integers(10, 60))
def test_no_client_gets_more_than_twice_the_time_of_another_that_waits_and_one_computation(costs, num_turns):
    shares, used = FairShares(), dict.fromkeys(map(str, range(len(costs))), 0.0)
    for _ in range(num_turns):
        chosen = [*shares.eligible(used)]
        assert chosen
        least = min(used.values())
        assert any(used[each] == least for each in chosen)
        assert all(used[each] <= 2 * least + 1e-9 for each in chosen)
        for each in chosen:
            used[each] += costs[int(each)]
            shares.add(each, costs[int(each)])


def test_who_comes_back_gets_no_time_for_its_absence():
    shares = FairShares()
    assert [*shares.eligible({"a"})] == ["a"]
    shares.add("a", 100.0)
    assert {*shares.eligible({"a", "b"})} == {"a", "b"}


def test_a_computation_has_at_least_one_request():
    assert within_budget("ab", cost=lambda each: 10, budget=5) == ["a"]
    assert within_budget("abc", cost=lambda each: 2, budget=5) == ["a", "b"]
