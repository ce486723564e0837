"""The node agent with fake gangs, on a real database."""

import queue
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.pool.node_agent import NodeAgent
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus, Timeouts
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.message_store import GangShare, MessageStore, OrderStatus
from ringmaster.techniques.processes.gang_events import (
    Beat,
    DeviceTelemetry,
    EvaluationReported,
    JobReady,
    JobResult,
    Outcome,
    OutcomeStatus,
    Steps,
)
from ringmaster.techniques.processes.order import GangOrder, Slot
from tests.unit.execution.fakes import job

QUICK = Timeouts(beat_every_s=0.02, fence_after_s=1.0, lost_after_s=2.0)
SLOTS = (Slot(kind="cpu", index=0),)
TIMEOUT_S = 120.0  # the longest wait for other threads and processes
DEVICES = (Device(kind="cpu", index=0, name="cpu", memory_bytes=1, cores=(0,)),)


class FakeServer:
    """A fork server that counts its ticks."""

    def __init__(self):
        self.num_ticks, self.is_started, self.is_closed = 0, False, False

    def start(self):
        self.is_started = True

    def tick(self, heard_s):
        self.num_ticks += 1

    def close(self):
        self.is_closed = True


class StubGang:
    """A fake gang that sends the events of its script until an `Outcome`. "stop" preempts it unless it is deaf."""

    def __init__(self, order, *, is_deaf=False):
        self.order, self.script, self.told, self.is_deaf = order, queue.Queue(), [], is_deaf

    def send(self, command):
        self.told.append(command)
        if command == "stop" and not self.is_deaf:
            self.script.put(Outcome(status=OutcomeStatus.PREEMPTED, result=JobResult(step=3)))

    def kill(self):
        self.script.put(Outcome(status=OutcomeStatus.CRASHED, message="killed"))

    def wait(self, on_event):
        while not isinstance(said := self.script.get(timeout=TIMEOUT_S), Outcome):
            if isinstance(said, Exception):
                raise said
            on_event(said)
        return said


class FakeGauges:
    """A device monitor that reports one event for the last measured segment, once."""

    def __init__(self):
        self.begun, self.due = [], {}

    def begin(self, segment, numbers, *, is_part=False):
        self.begun.append((segment, tuple(numbers), is_part))
        self.due = {segment: DeviceTelemetry(wall_s=1.0, node="", devices={})}

    def due_events(self):
        due, self.due = self.due, {}
        return due

    def end(self, segment):
        return DeviceTelemetry(wall_s=2.0, node="", devices={})

    def health(self):
        return {"0": "in use by a stranger"}


class NoGauges(FakeGauges):
    """A device monitor that measures nothing."""

    def due_events(self):
        return {}

    def end(self, segment):
        return None

    def health(self):
        return {}


class Site:
    """A node agent and its surroundings."""

    def __init__(self, database, **changes):
        self.database, self.message_store, self.nodes = database, MessageStore(database), NodeRegistry(database)
        self.gangs, self.started, self.server = {}, [], FakeServer()
        self.is_deaf, self.is_over = False, False
        settings = {"device_monitor": NoGauges(), "timeouts": QUICK, "start_gang": self.start_gang, **changes}
        self.host = NodeAgent(
            name="n", address="127.0.0.1", devices=DEVICES, database=database, server=self.server, **settings
        )
        self.host.start()

    def start_gang(self, server, order, num_ranks):
        gang = self.gangs[int(order.folder)] = StubGang(order, is_deaf=self.is_deaf)
        self.started.append(gang)
        if self.is_over:
            gang.kill()
        return gang

    def end(self):
        """Kills all gangs, and closes the agent."""
        self.is_over = True
        for gang in self.started:
            gang.kill()
        self.host.close()

    def give(self, segment, incarnation=None):
        order = GangOrder(
            purpose="train", job=job("a"), technique="t:T", config={}, slots=SLOTS, folder=str(segment), cache_dir="c"
        )
        incarnation = incarnation or self.host.incarnation
        self.message_store.give(segment, batch="b", shares={"n": (incarnation, GangShare(order=order, num_ranks=1))})

    def begin(self, segment):
        """Gives an order, and waits until its gang runs."""
        self.give(segment)
        until(lambda: segment in self.gangs)
        return self.gangs[segment]

    def outcome(self, segment):
        """Waits for the outcome of a segment that the agent reports."""
        until(lambda: segment in self.outcomes())
        return next(said for number, _, said in self.words() if number == segment and isinstance(said, Outcome))

    def words(self):
        return [(word.segment, word.number, word.content) for word in self.message_store.events(after=0)]

    def outcomes(self):
        return {segment: said.status for segment, _, said in self.words() if isinstance(said, Outcome)}


def until(condition, timeout_s=TIMEOUT_S):
    clock, deadline_s = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come"
        clock.wait(0.005)


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def site(database):
    site = Site(database)
    yield site
    site.end()


def test_a_share_is_run_once_and_its_words_are_mailed_in_order(site):
    gang = site.begin(7)
    assert site.host.running.keys() == {7}
    gang.script.put(JobReady(step=0))
    gang.script.put(Beat())  # only informs the supervisor that the rank is alive
    gang.script.put(EvaluationReported(step=1, metrics={"loss": 1.0, "perplexity": float("inf")}))
    gang.script.put(Outcome(status=OutcomeStatus.DONE, result=JobResult(step=10)))
    until(lambda: site.outcomes() == {7: OutcomeStatus.DONE} and not site.host.running)
    assert site.started == [gang]
    assert site.words() == [
        (7, 0, JobReady(step=0)),
        (7, 1, EvaluationReported(step=1, metrics={"loss": 1.0})),
        (
            7,
            2,
            Outcome(status=OutcomeStatus.DONE, message="", result=JobResult(step=10), was_killed=False),
        ),
    ]
    assert not site.message_store.orders()


def test_only_what_is_given_to_this_very_worker_is_taken(site):
    site.give(1, incarnation="another")
    site.begin(2)
    assert site.gangs.keys() == {2}
    assert [order.status for order in site.message_store.shares(1)] == [OrderStatus.GIVEN]


def test_an_order_whose_answer_was_lost_on_its_way_is_run_all_the_same(site, monkeypatch):
    take = site.host._message_store.take
    monkeypatch.setattr(site.host._message_store, "take", lambda *args, **kwargs: take(*args, **kwargs) and None)
    site.begin(1)


def test_an_order_that_was_withdrawn_is_not_run(site, monkeypatch):
    take, asked = site.host._message_store.take, threading.Event()

    def withdrawn(segment, node, *, incarnation):
        site.message_store.withdraw(segment, node)
        asked.set()
        return take(segment, node, incarnation=incarnation)

    monkeypatch.setattr(site.host._message_store, "take", withdrawn)
    site.give(1)
    assert asked.wait(TIMEOUT_S)
    monkeypatch.undo()
    site.begin(2)
    assert site.gangs.keys() == {2}


def test_commands_reach_their_gang_also_before_it_has_started(site):
    site.message_store.command(1, "until 5")
    site.message_store.command(2, "stop")  # a segment of another node
    until(lambda: site.host._gangs._commands)
    site.give(1)
    until(lambda: 1 in site.gangs and site.gangs[1].told == ["until 5"])
    site.message_store.command(1, "until 8")
    until(lambda: site.gangs[1].told == ["until 5", "until 8"])
    site.message_store.command(1, "kill")
    until(lambda: site.outcomes() == {1: OutcomeStatus.CRASHED})


def test_training_does_not_wait_for_a_database_that_is_away(site, tmp_path):
    gang = site.begin(1)
    with ThreadPoolExecutor() as pool:
        other = sqlite3.connect(tmp_path / "pool.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")  # nobody else can write
        for step in range(100):
            gang.script.put(Steps(first_step=step, seconds=()))
        gang.script.put(Outcome(status=OutcomeStatus.DONE))
        until(lambda: not site.host.running)
        assert not site.words()
        pool.submit(other.close).result()
    until(lambda: site.outcomes() == {1: OutcomeStatus.DONE})
    assert [getattr(said, "first_step", None) for _, _, said in site.words()] == [*range(100), None]


def test_what_gauges_tell_is_mailed_and_the_nodes_health_is_told(database):
    device_monitor = FakeGauges()
    site = Site(database, device_monitor=device_monitor)
    gang = site.begin(1)
    until(lambda: len(site.words()) == 1)
    gang.script.put(Outcome(status=OutcomeStatus.DONE))
    until(lambda: site.outcomes() == {1: OutcomeStatus.DONE})
    assert device_monitor.begun == [(1, (0,), False)]
    assert [getattr(said, "wall_s", None) for _, _, said in site.words()] == [1.0, 2.0, None]
    assert site.nodes.all()[0].health == {"0": "in use by a stranger"}
    site.end()


def test_a_gang_that_cannot_be_started_has_crashed(database):
    def refuse(*_, **__):
        raise OSError("no space left on device")

    site = Site(database, start_gang=refuse)
    site.give(1)
    outcome = site.outcome(1)
    assert outcome.status == OutcomeStatus.CRASHED
    assert "no space left" in outcome.message
    site.end()


def test_a_supervisor_that_fails_still_gives_an_outcome(site, monkeypatch):
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: failed.set())
    gang = site.begin(1)
    gang.wait = None  # has no effect on this wait, which has started already
    gang.script.put(RuntimeError("of the supervisor"))
    assert site.outcome(1).status == OutcomeStatus.CRASHED
    assert failed.wait(TIMEOUT_S)


@pytest.mark.parametrize("content", ['{"of": "another version"}', '{"order": ', "[]", "7"])
def test_an_order_that_cannot_be_read_is_told_and_the_worker_takes_others(site, content):
    with site.host._lock:  # so that it is not taken before
        site.give(1)
        site.database.write(
            lambda connection: connection.execute(text("UPDATE orders SET content = :c"), {"c": content})
        )
    outcome = site.outcome(1)
    assert (outcome.status, "cannot read its order" in outcome.message) == (OutcomeStatus.INVALID, True)
    site.begin(2)
    assert not site.host.ended.is_set()


def test_a_worker_whose_thread_of_orders_fails_ends(site, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(site.host, "_take", lambda segment: 1 / 0)
    site.give(1)
    until(site.host.ended.is_set)
    assert not site.host.was_replaced


def test_a_drained_node_stops_its_gangs_at_a_checkpoint_and_leaves(site):
    site.begin(1)
    site.host.drain(heed_s=0.0)
    assert site.outcomes() == {1: OutcomeStatus.PREEMPTED}
    assert not site.nodes.all()
    assert site.server.is_closed
    site.give(2)
    site.host._take(2)
    assert site.gangs.keys() == {1}


def test_a_node_that_drains_says_so(site):
    site.is_deaf = True
    site.begin(1)
    with ThreadPoolExecutor() as pool:
        drained = pool.submit(site.host.drain, heed_s=0.0)
        until(lambda: [node.status for node in site.nodes.all()] == [NodeStatus.LEAVING])
        site.gangs[1].script.put(Outcome(status=OutcomeStatus.PREEMPTED))
        drained.result(timeout=TIMEOUT_S)


def test_a_gang_that_does_not_stop_in_time_is_ended(site):
    site.is_deaf = True
    site.begin(1)
    site.host.drain(within_s=0.0)
    assert site.outcomes() == {1: OutcomeStatus.LOST}


def test_a_node_that_was_given_up_ends_its_gangs_and_begins_anew(site):
    before = site.host.incarnation
    site.begin(1)
    site.nodes.remove("n", incarnation=before)
    assert site.outcome(1).status == OutcomeStatus.LOST
    until(lambda: [node.incarnation for node in site.nodes.all()] not in ([], [before]))
    until(lambda: site.host.incarnation != before)
    assert not site.host.ended.is_set()
    site.begin(2)


def test_a_worker_whose_node_another_one_serves_ends(site):
    site.begin(1)
    site.nodes.register(NodeRecord(name="n", incarnation="another", address="", devices=DEVICES))
    assert site.outcome(1).status == OutcomeStatus.LOST
    assert site.host.ended.wait(TIMEOUT_S)
    assert [node.incarnation for node in site.nodes.all()] == ["another"]
