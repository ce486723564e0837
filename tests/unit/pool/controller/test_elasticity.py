"""The number of nodes that an elastic pool requests, and the nodes that it gives back."""

from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.planning.node_prices import NodePrices
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.pool import node_scaler
from ringmaster.tasks.pool.node_scaler import (
    DEFAULT_COME_S,
    ComingTimes,
    ElasticityOptions,
    IdleTimes,
    JobDemand,
    num_nodes_wanted,
)
from ringmaster.tasks.storage.journal import JobStatus
from tests.fake_engine import FakeEngine
from tests.unit.execution.fakes import at_once, profile
from tests.unit.pool.bench import EPOCH_S, Clock, PoolBench, submission

BEGUN_S = Clock().now_s
IDLE_S, COME_S = 30.0, 5
OPTIONS = ElasticityOptions(max_nodes=3, idle_s=IDLE_S)

sizes = st.integers(1, 8)
demands = st.builds(
    lambda device_s, least, more: JobDemand(device_s=device_s, least_devices=least, most_devices=least + more),
    st.floats(0.1, 1e6),
    sizes,
    st.integers(0, 8),
)


@given(st.lists(demands, max_size=6), sizes, st.integers(0, 4), st.floats(0.1, 600.0), st.integers(1, 9))
def test_the_number_of_nodes_is_within_its_limits(jobs, devices_per_node, num_own_devices, come_s, max_nodes):
    def wanted(jobs, come_s):
        return num_nodes_wanted(
            jobs,
            devices_per_node=devices_per_node,
            num_own_devices=num_own_devices,
            come_s=come_s,
            max_nodes=max_nodes,
        )

    number = wanted(jobs, come_s)
    assert 0 <= number <= max_nodes
    assert wanted((), come_s) == 0
    assert wanted(jobs, 2 * come_s) <= number, "nodes that take longer to come are worth less"
    if jobs:
        assert wanted([*jobs, jobs[0]], come_s) >= number, "more work never needs fewer nodes"
        assert number > 0 or num_own_devices > 0
        least = max(job.least_devices for job in jobs)
        assert number == max_nodes or number * devices_per_node + num_own_devices >= least


def test_a_node_is_requested_while_it_would_be_used_for_longer_than_it_takes_to_come():
    jobs = [JobDemand(device_s=100.0, least_devices=1, most_devices=4) for _ in range(6)]

    def wanted(come_s):
        return num_nodes_wanted(jobs, devices_per_node=2, num_own_devices=0, come_s=come_s, max_nodes=20)

    assert wanted(100.0) == 3, "600 device seconds on 3 nodes of 2 devices take 100 s"
    assert wanted(101.0) == 2
    assert wanted(1.0) == 12, "the gangs of six jobs use 24 devices at most"
    assert wanted(1e6) == 1


def test_the_time_that_nodes_take_to_come_is_the_median_of_the_last_ones():
    times = ComingTimes()
    assert times.come_s == DEFAULT_COME_S
    times.requested(3, now_s=0.0)
    times.came(1, now_s=10.0)
    times.requested(2, now_s=11.0)
    times.came(2, now_s=40.0)
    assert times.come_s == 40.0
    times.came(1, now_s=50.0)
    assert times.come_s == 40.0, "one that nobody had requested says nothing"


def test_idle_times_begin_anew_after_work():
    times = IdleTimes()
    times.note(["a", "b"], now_s=0.0)
    times.note(["a"], now_s=5.0)
    times.note(["a", "b"], now_s=6.0)
    assert times.longer_than(6.0, now_s=6.0) == ["a"]
    assert times.longer_than(6.0, now_s=12.0) == ["a", "b"]


class LendingEngine(FakeEngine):
    """Lends nodes of two devices, each COME_S seconds after it was requested."""

    def __post_init__(self):
        super().__post_init__()
        self.comes_s, self.num_lent = [], 0

    def request(self, num_nodes):
        super().request(num_nodes)
        num_there = sum(name.startswith("lent-") for name in self.there)
        self.comes_s = self.comes_s[: max(num_nodes - num_there, 0)]
        while num_there + len(self.comes_s) < num_nodes:
            self.comes_s.append(self.now_s + COME_S)

    def nodes(self):
        while self.comes_s and self.comes_s[0] <= self.now_s:
            self.comes_s.pop(0)
            self.num_lent += 1
            self.add(f"lent-{self.num_lent}", 2, is_lent=True)
        return super().nodes()


@pytest.fixture
def engine():
    return LendingEngine(defaultdict(lambda: 1.0), now_s=BEGUN_S, epoch_s=EPOCH_S - BEGUN_S)


@pytest.fixture
def pool(database, engine):
    return PoolBench(database, Clock(), engine=engine, elasticity=OPTIONS)


def run(pool, *, most_s=2000):
    for _ in range(most_s):
        if not pool.is_standing():
            return
        pool.step(seconds=1.0)
    raise AssertionError(f"it did not end: {pool.statuses()}")


def test_nodes_come_for_a_batch_and_are_given_back_after_an_idle_time(pool, engine):
    pool.pass_seconds(10)
    assert engine.asked == 0 and not engine.there
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100))
    run(pool)
    assert pool.statuses() == dict.fromkeys("abcdef", JobStatus.DONE)
    assert engine.num_lent == OPTIONS.max_nodes and not engine.released
    pool.pass_seconds(IDLE_S / 2)
    assert not engine.released
    pool.pass_seconds(IDLE_S)
    assert sorted(engine.released) == ["lent-1", "lent-2", "lent-3"] and not engine.there


def test_a_short_batch_gets_one_node(pool, engine):
    pool.submit(submission(jobs=("a", "b"), num_steps=10))
    run(pool)
    assert engine.num_lent == 1


def test_a_job_that_no_single_node_can_train_gets_as_many_as_it_needs(database, engine):
    make_plan = partial(checked_plan, work_s=1.0, seed=0, objective="makespan")
    pool = PoolBench(database, Clock(), make_plan=make_plan, engine=engine, elasticity=OPTIONS)
    profiles = {"a": (replace(profile("ddp", num_devices=4), num_nodes=2),), "b": (profile(),)}
    pool.submit(submission(profiles=profiles, num_steps=5))
    run(pool)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert engine.num_lent == 2


def test_a_node_with_work_is_kept(pool, engine):
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100))
    pool.pass_seconds(60)
    pool.submit(submission("b2", jobs=("x",), num_steps=300))
    run(pool)
    run_s = 0
    while pool.is_standing("b2") and run_s < 2000:
        pool.step(seconds=1.0)
        run_s += 1
    assert pool.statuses("b2") == {"x": JobStatus.DONE}, "the fake engine asserts that no node in use is given back"
    assert len(engine.released) == OPTIONS.max_nodes - 1


@pytest.mark.parametrize("price, num_nodes", [(0.001, 3), (1000.0, 1)])
def test_nodes_with_a_price_come_while_they_gain_more_than_they_cost(database, engine, monkeypatch, price, num_nodes):
    monkeypatch.setattr(node_scaler, "in_a_thread", lambda name, run: at_once(run))
    prices = NodePrices(per_node_hour=price, per_hour_earlier=1.0)
    pool = PoolBench(database, Clock(), engine=engine, elasticity=replace(OPTIONS, prices=prices))
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100))
    run(pool)
    assert pool.statuses() == dict.fromkeys("abcdef", JobStatus.DONE)
    assert engine.num_lent == num_nodes


def test_nodes_with_a_price_come_for_gangs_over_several_of_them(database, engine, monkeypatch, caplog):
    wide = replace(profile("fsdp", num_devices=2), num_nodes=2)
    check_that_cheap_nodes_come(database, engine, monkeypatch, caplog, profiles=dict.fromkeys("abcdef", (wide,)))
    assert engine.num_lent >= 2


# The third kind of batch for which nodes with a price come.
@pytest.mark.full
def test_nodes_with_a_price_come_where_the_own_nodes_are_too_small(database, engine, monkeypatch, caplog):
    engine.add("own", 1)
    wide = {name: (profile("ddp", num_devices=2),) for name in "ab"}
    check_that_cheap_nodes_come(
        database, engine, monkeypatch, caplog, profiles={**{name: (profile(),) for name in "cdef"}, **wide}
    )
    assert engine.num_lent == OPTIONS.max_nodes


def check_that_cheap_nodes_come(database, engine, monkeypatch, caplog, *, profiles):
    monkeypatch.setattr(node_scaler, "in_a_thread", lambda name, run: at_once(run))
    prices = NodePrices(per_node_hour=0.001, per_hour_earlier=1000.0)
    pool = PoolBench(database, Clock(), engine=engine, elasticity=replace(OPTIONS, prices=prices))
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100, profiles=profiles))
    run(pool)
    assert pool.statuses() == dict.fromkeys("abcdef", JobStatus.DONE)
    assert "could not be computed" not in caplog.text


def test_no_node_with_a_price_is_kept_beyond_the_budget(database, engine, monkeypatch, caplog):
    monkeypatch.setattr(node_scaler, "in_a_thread", lambda name, run: at_once(run))
    prices = NodePrices(per_node_hour=1000.0, per_hour_earlier=1.0, budget=1.0)
    pool = PoolBench(database, Clock(), engine=engine, elasticity=replace(OPTIONS, prices=prices))
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100))
    with caplog.at_level("INFO"):
        pool.pass_seconds(COME_S + 5)
    assert engine.asked == 0
    assert "more than the budget of 1" in caplog.text
    pool.pass_seconds(IDLE_S + 5)
    assert not engine.there
    assert JobStatus.WAITING in pool.statuses().values()


def test_no_node_comes_for_a_batch_that_waits_to_be_profiled_while_nodes_cost_more_than_the_budget(
    database, engine, monkeypatch, caplog
):
    monkeypatch.setattr(node_scaler, "in_a_thread", lambda name, run: at_once(run))
    prices = NodePrices(per_node_hour=1000.0, per_hour_earlier=1.0, budget=1.0)
    pool = PoolBench(database, Clock(), engine=engine, elasticity=replace(OPTIONS, prices=prices))
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100))
    pool.pass_seconds(COME_S + IDLE_S + 5)
    num_lent = engine.num_lent
    requests = Requests(pool.database)
    number = requests.ask(RequestKind.NODE, {"beats": 0})
    with caplog.at_level("INFO"):
        for _ in range(10):
            assert requests.renew(number)
            pool.pass_seconds(COME_S)
    assert (engine.asked, engine.num_lent) == (0, num_lent)
    assert caplog.text.count("no node is requested for a batch that waits to be profiled") == 1


def test_one_node_comes_for_a_batch_that_waits_to_be_profiled(pool, engine):
    number = Requests(pool.database).ask(RequestKind.NODE, {"beats": 0})
    pool.pass_seconds(COME_S + 2)
    assert list(engine.there) == ["lent-1"]
    Requests(pool.database).answer(number, status=RequestStatus.WITHDRAWN)
    pool.pass_seconds(IDLE_S + 2)
    assert engine.released == ["lent-1"]


def test_who_waits_for_a_node_and_dies_is_forgotten(pool, engine):
    number = Requests(pool.database).ask(RequestKind.NODE, {"beats": 0})
    pool.pass_seconds(200)
    assert Requests(pool.database).read(number).status == RequestStatus.WITHDRAWN
    assert engine.asked == 0 and not engine.there


def test_the_next_controller_goes_on_with_the_nodes_that_are_there(database, pool, engine):
    pool.submit(submission(jobs=tuple("abcdef"), num_steps=100))
    pool.pass_seconds(20)
    pool = PoolBench(database, pool.clock, engine=engine, elasticity=OPTIONS)
    run(pool)
    assert engine.num_lent == OPTIONS.max_nodes
    pool.pass_seconds(IDLE_S + 2)
    assert not engine.there


def test_a_pool_that_is_not_elastic_requests_nothing(database, engine):
    pool = PoolBench(database, Clock(), engine=engine)
    pool.submit(submission(jobs=("a",), num_steps=300))
    pool.pass_seconds(10)
    assert engine.asked == 0
