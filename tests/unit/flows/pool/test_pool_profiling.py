"""Profiling of a batch on a pool: choice of nodes, devices held free for it, and nodes of several kinds."""

import itertools
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import StateType
from prefect.states import Completed, Crashed, Running, Scheduled

from ringmaster.codec import to_json
from ringmaster.errors import DevicesBusy, InputError, NodeUnavailable
from ringmaster.flows.caller import Caller
from ringmaster.flows.pool import profiling
from ringmaster.flows.pool.own_node import healthy, lent
from ringmaster.flows.pool.profiling import merged, one_of_each_kind, profile_on_pool
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Cluster, Device
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus, Timeouts
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from tests.fake_engine import cpu_devices
from tests.unit.execution.fakes import job, profile
from tests.unit.flows.pool.standing_pool import played

PLACE = SimpleNamespace(cache_dir=Path("/somewhere/cache"))
BATCH = Batch(name="nightly", jobs=(job("a"), job("b")), folder=Path("/somewhere"), text="name: nightly\n")
MEASURED = ProfilingResult(
    jobs=BATCH.jobs, preflights={}, profiles={each.name: (profile(),) for each in BATCH.jobs}, faults={}, num_trials=2
)


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


PATIENCE = Timeouts(beat_every_s=0.01, fence_after_s=1.0, lost_after_s=2.0)
TWO = DevicesWanted(least=1, most=2)


def test_devices_are_lent_for_trials_and_given_back_whatever_happens(database):
    requests = Requests(database)

    def borrow():
        return lent(requests, node("n"), whose="nightly", wanted=TWO, timeouts=PATIENCE)

    with played(database) as executor:
        with borrow() as devices:
            assert executor.loans == ["n"]
            assert devices == node("n").devices
            (granted,) = requests.open(RequestKind.LEND, status=RequestStatus.GRANTED)
            while requests.read(granted.id).content["beats"] < 2:
                threading.Event().wait(0.01)
        with pytest.raises(RuntimeError), borrow():
            raise RuntimeError
    assert not requests.open(RequestKind.LEND, status=RequestStatus.GRANTED)
    assert len(requests.open(RequestKind.LEND, status=RequestStatus.WITHDRAWN)) == 2


def test_devices_that_stay_busy_are_given_up(database):
    requests = Requests(database)
    with (
        pytest.raises(DevicesBusy, match="1 devices of n were not idle within 0 s"),
        lent(requests, node("n"), whose="nightly", wanted=TWO, timeouts=PATIENCE, idle_within_s=0.0),
    ):
        raise AssertionError("nobody has lent any")
    assert [request.content["node"] for request in requests.open(RequestKind.LEND, status=RequestStatus.WITHDRAWN)] == [
        "n"
    ]


def node(name, *, kind="A100", num_devices=2, health=None):
    devices = tuple(
        Device(kind="gpu", index=i, name=kind, memory_bytes=1, cores=(), uuid=f"GPU-{i}") for i in range(num_devices)
    )
    return NodeRecord(name=name, incarnation="1", address="", devices=devices, health=health or {})


def test_each_kind_of_devices_is_measured_on_its_largest_node(monkeypatch):
    nodes = [
        node("n1"),
        node("n2", num_devices=4),
        node("n3", kind="H200"),
        node("n4", num_devices=4, health={"0": "-"}),
    ]
    chosen = one_of_each_kind(nodes, avoid=set())
    assert {kind: each.name for kind, each in chosen.items()} == {"A100": "n2", "H200": "n3"}
    assert one_of_each_kind(nodes, avoid={"n2", "n3"})["A100"].name == "n4"
    assert one_of_each_kind(nodes, avoid={"n2", "n3"})["H200"].name == "n3"
    monkeypatch.setenv("RINGMASTER_NODE", "n1")
    assert one_of_each_kind(nodes, avoid=set())["A100"].name == "n1"


def test_profiles_of_several_kinds_say_which_they_are_of():
    jobs = (job("a"), job("b"), job("c"))

    def profiled(*, trained, faults):
        profiles = {each.name: (profile(),) * (each.name in trained) for each in jobs}
        return ProfilingResult(jobs=jobs, preflights={}, profiles=profiles, faults=faults, num_trials=2)

    small = profiled(trained="a", faults={"b": "too large", "c": "too large"})
    assert merged({"A100": small}) is small
    both = merged({"A100": small, "H200": profiled(trained="ab", faults={"c": "its data is missing"})})
    assert [each.device_type for each in both.profiles["a"]] == ["A100", "H200"]
    assert [each.device_type for each in both.profiles["b"]] == ["H200"]
    assert both.faults == {"c": "on A100: too large; on H200: its data is missing"}
    assert both.num_trials == 4


def test_what_cannot_be_measured_on_one_node_is_measured_on_another(database, monkeypatch):
    for name in ("n1", "n2"):
        NodeRegistry(database).register(node(name))
    journal = Journal(database, batch="nightly-1")
    started = []

    def start(name, key, *, notice):
        started.append(name)
        if len(started) > 1:
            journal.put("profiled:A100", to_json(MEASURED))
        return name

    monkeypatch.setattr(profiling, "_start", start)
    monkeypatch.setattr(profiling, "_wait", lambda run, *_: "Crashed: it is broken" if len(started) == 1 else "")
    profiled = profile_on_pool(BATCH, key="nightly-1", database=database, caller=Caller())
    assert sorted(started) == ["n1", "n2"]
    assert profiled.profiles["a"] == (profile(),)
    profile_on_pool(BATCH, key="nightly-1", database=database, caller=Caller())  # reuses the measurements
    assert len(started) == 2


def test_a_node_that_leaves_while_a_batch_is_measured_on_it_fails_no_batch(database, monkeypatch):
    """Its worker is killed and restarted more often than profiling of a batch may fail."""
    monkeypatch.setenv("RINGMASTER_NODE", "n1")
    NodeRegistry(database).register(node("n1"))
    refused = [NodeUnavailable(["the devices of n1 cannot be had"])] * 5
    notices = []

    @contextmanager
    def open_node_context(batch, *, home, caller):
        cluster = Cluster(nodes=(healthy(node("n1")),))
        yield SimpleNamespace(
            is_pool_node=True,
            cluster=cluster,
            batch=BATCH,
            environment=PLACE,
            profile_store=None,
            lend=None,
            caller=caller,
        )

    def measure(jobs, **_):
        if refused:
            raise refused.pop()
        return MEASURED

    monkeypatch.setattr(profiling, "open_node_context", open_node_context)
    monkeypatch.setattr(profiling, "profile_task", measure)
    monkeypatch.setattr(profiling, "notices", lambda notice: notices.append)
    assert profile_on_pool(BATCH, key="nightly-1", database=database, caller=Caller()).num_trials == MEASURED.num_trials
    assert notices == ["not measured: n1: the devices of n1 cannot be had"] * 5


class Prefect:
    """A Prefect server that returns the given states of a run in order, and repeats the last."""

    def __init__(self, *states):
        self.states, self.told = list(states), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read_flow_run(self, id):
        return SimpleNamespace(state=self.states.pop(0) if len(self.states) > 1 else self.states[0])

    def set_flow_run_state(self, id, state):
        self.told.append(state.type)


@pytest.mark.parametrize(
    ("states", "fault", "told"),
    [
        ([Scheduled()], profiling.GONE, [StateType.CANCELLED]),
        ([Running(), Crashed(message="no sign of life")], f"{profiling.GONE} (Crashed: no sign of life)", []),
        ([Completed()], "", []),
    ],
    ids=["not-begun", "begun", "done"],
)
def test_a_run_that_no_worker_will_take_any_more_is_not_waited_for(database, monkeypatch, states, fault, told):
    server = Prefect(*states)
    monkeypatch.setattr(profiling, "get_client", lambda **_: server)
    monkeypatch.setattr(profiling, "LOOK_EVERY_S", 0.01)
    assert profiling._wait(SimpleNamespace(id="run-1"), node("n1"), database) == fault
    assert server.told == told


def test_a_run_is_waited_for_as_long_as_its_node_is_there(database, monkeypatch):
    NodeRegistry(database).register(node("n1"))
    monkeypatch.setattr(profiling, "get_client", lambda **_: Prefect(Scheduled(), Scheduled(), Running(), Completed()))
    monkeypatch.setattr(profiling, "LOOK_EVERY_S", 0.01)
    assert profiling._wait(SimpleNamespace(id="run-1"), node("n1"), database) == ""


@pytest.mark.parametrize(
    ("now", "is_gone"),
    [
        (NodeRecord(name="n1", incarnation="1", address="", devices=cpu_devices(1)), False),
        (NodeRecord(name="n1", incarnation="2", address="", devices=cpu_devices(1)), True),
        (NodeRecord(name="n1", incarnation="1", address="", devices=cpu_devices(1), status=NodeStatus.LEAVING), True),
    ],
    ids=["serves", "another-worker", "leaves"],
)
def test_a_run_that_ends_with_its_node_says_so(database, monkeypatch, now, is_gone):
    NodeRegistry(database).register(now)
    monkeypatch.setattr(profiling, "get_client", lambda **_: Prefect(Crashed(message="exit status 143")))
    said = profiling._wait(SimpleNamespace(id="run-1"), node("n1"), database)
    assert (profiling.GONE in said) == is_gone
    assert "Crashed: exit status 143" in said


def test_a_node_that_leaves_is_avoided_and_counts_as_no_failure(database, monkeypatch):
    for name in ("n1", "n2"):
        NodeRegistry(database).register(node(name))
    journal = Journal(database, batch="nightly-1")
    started = []

    def start(name, key, *, notice):
        started.append(name)
        return name

    def wait(run, *_):
        if len(started) > profiling.MAX_ATTEMPTS:
            journal.put("profiled:A100", to_json(MEASURED))
            return ""
        return f"{profiling.GONE} (Crashed: exit status 143)"

    monkeypatch.setattr(profiling, "_start", start)
    monkeypatch.setattr(profiling, "_wait", wait)
    assert profile_on_pool(BATCH, key="nightly-1", database=database, caller=Caller()).num_trials == MEASURED.num_trials
    assert all(one != other for one, other in itertools.pairwise(started)), "one that leaves is avoided"


@pytest.mark.parametrize(
    ("own", "lent", "most_lent", "num_nodes"),
    [(1, 0, 0, 1), (2, 0, 4, 2), (0, 1, 4, 4), (2, 1, 4, 6), (0, 3, 2, 3), (0, 1, 0, 1)],
)
def test_a_gang_may_span_the_nodes_that_the_engine_may_lend(database, monkeypatch, own, lent, most_lent, num_nodes):
    nodes, found = NodeRegistry(database), []
    for number in range(own + lent):
        allocation = "" if number < own else f"slurm:{number}"
        nodes.register(replace(node(f"n{number}"), allocation=allocation))
    nodes.register(replace(node("smaller", num_devices=1), allocation="slurm:9"))
    nodes.note_most_lent(7)
    nodes.note_most_lent(most_lent)

    def measure(jobs, *, num_nodes, **_):
        found.append(num_nodes)
        return MEASURED

    monkeypatch.setattr(profiling, "profile_task", measure)
    cluster = Cluster(nodes=(healthy(node("n0")),))
    context = SimpleNamespace(
        cluster=cluster, batch=BATCH, environment=PLACE, profile_store=None, lend=None, caller=Caller()
    )
    profiling._measure(context, Journal(database, batch="nightly-1"))
    assert found == [num_nodes]


def test_a_batch_for_devices_that_the_pool_lacks_is_refused(database):
    NodeRegistry(database).register(node("n1"))
    batch = replace(BATCH, devices={"cpu": 2})
    with pytest.raises(InputError, match=r"devices of kind cpu; the pool has n1 \(2 gpu\)"):
        profile_on_pool(batch, key="nightly-1", database=database, caller=Caller())
