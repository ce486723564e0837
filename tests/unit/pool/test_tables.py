"""The messages of executor, nodes and batches in a pool's database."""

from dataclasses import replace

import pytest

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import JobEnded
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.pool.event_log import BatchEvents, EventLog, LogPosition
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus
from ringmaster.tasks.pool.submissions import BatchStatus, Submission, Submissions
from ringmaster.tasks.storage import message_store as pool_mail
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobRecord, JobStatus, Journal
from ringmaster.tasks.storage.message_store import GangShare, MessageStore
from ringmaster.techniques.processes.gang_events import JobReady, Outcome, Steps
from ringmaster.techniques.processes.order import GangOrder
from tests.fake_engine import cpu_devices
from tests.unit.execution.fakes import job, profile


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def submission(name="nightly-1", jobs=("a", "b")):
    made = tuple(job(each) for each in jobs)
    terms = PlanningTerms(deadlines_s={"a": 60.0})
    return Submission(
        id=name,
        name="nightly",
        jobs=made,
        profiles={each.name: (profile(),) for each in made},
        folder="/runs/1",
        cache_dir="/cache",
        terms=terms,
    )


def share(last_step=10):
    order = GangOrder(
        purpose="train",
        job=job("a"),
        technique="t:T",
        config={},
        slots=(),
        folder="f",
        cache_dir="c",
        last_step=last_step,
    )
    return GangShare(order=order, num_ranks=1)


def test_a_worker_registers_its_node_and_another_one_replaces_it(database):
    nodes = NodeRegistry(database)
    devices = (Device(kind="cpu", index=0, name="cpu", memory_bytes=1, cores=(0,)),)
    nodes.register(NodeRecord(name="n", incarnation="one", address="10.0.0.1", devices=devices))
    assert nodes.beat("n", incarnation="one", health={"0": "ECC errors"}, status=NodeStatus.LEAVING)
    (node,) = nodes.all()
    assert (node.devices, node.beats, node.health, node.status) == (devices, 1, {"0": "ECC errors"}, NodeStatus.LEAVING)
    others = (*devices, Device(kind="cpu", index=1, name="cpu", memory_bytes=1, cores=(1,)))
    nodes.register(NodeRecord(name="n", incarnation="two", address="10.0.0.1", devices=others))
    assert [node.devices for node in nodes.all()] == [others]
    assert not nodes.beat("n", incarnation="one", health={})
    nodes.remove("n", incarnation="one")
    assert [node.incarnation for node in nodes.all()] == ["two"]
    nodes.remove("n", incarnation="two")
    assert not nodes.all()


def test_a_worker_that_leaves_in_order_is_registered_no_more_and_remembered(database):
    nodes = NodeRegistry(database)
    for name in ("n", "m"):
        nodes.register(NodeRecord(name=name, incarnation=f"{name}-one", address="10.0.0.1", devices=cpu_devices(1)))
    nodes.mark_left("n", incarnation="n-another")
    assert len(nodes.all()) == 2
    nodes.mark_left("n", incarnation="n-one")
    assert [node.name for node in nodes.all()] == ["m"]
    assert nodes.left() == {"n-one"}
    assert not nodes.beat("n", incarnation="n-one", health={}), "a late heartbeat must not bring it back"
    nodes.register(NodeRecord(name="n", incarnation="n-two", address="10.0.0.1", devices=cpu_devices(1)))
    assert (len(nodes.all()), nodes.left()) == (2, frozenset())


def test_an_order_is_taken_once_and_only_by_whom_it_was_given_to(database):
    message_store = MessageStore(database)
    for _ in range(2):  # a retry gives no second order
        message_store.give(7, batch="b", shares={"n": ("one", share())})
    assert message_store.take(7, "n", incarnation="another") is None
    assert message_store.take(7, "n", incarnation="one") == share()
    assert message_store.take(7, "n", incarnation="one") is None
    (order,) = message_store.orders()
    assert (order.status, order.share, order.batch) == ("taken", share(), "b")


def test_words_are_kept_once_and_in_order_and_an_outcome_ends_the_order(database):
    message_store = MessageStore(database)
    message_store.give(7, batch="b", shares={"n": ("one", share())})
    message_store.store(7, "n", events=[(0, JobReady(step=0))])
    message_store.store(7, "n", events=[(0, JobReady(step=0)), (1, Outcome(status="done"))])
    words = message_store.events(after=0)
    assert [word.content.NAME for word in words] == ["ready", "outcome"]
    assert message_store.events(after=words[0].id) == words[1:]
    assert message_store.orders() == []


@pytest.mark.parametrize("num_words", [0, 3, 4, 7])
def test_many_words_are_read_by_one_short_transaction_after_another(database, monkeypatch, num_words):
    message_store, read, sizes = MessageStore(database), database.read, []
    for number in range(num_words):
        for segment in (7, 8):
            message_store.store(segment, "n", events=[(number, Steps(first_step=number, seconds=()))])

    def noted(act):
        sizes.append(len(rows := read(act)))
        return rows

    monkeypatch.setattr(pool_mail, "WORDS_A_PAGE", 2)
    monkeypatch.setattr(database, "read", noted)
    assert [(word.segment, word.number) for word in message_store.events(after=0, segments=[8])] == [
        (8, number) for number in range(num_words)
    ]
    assert max(sizes) <= 2
    newest = [(word.segment, word.number) for word in message_store.events(after=2)]
    assert newest == [(segment, number) for number in range(1, num_words) for segment in (7, 8)]


def test_commands_are_read_on_from_where_one_was(database):
    message_store = MessageStore(database)
    message_store.command(7, "stop")
    message_store.command(8, "until 5")
    (first, *_), second = message_store.commands(after=0)
    assert second[1:] == (8, "until 5")
    assert message_store.commands(after=first) == [second]


def test_what_is_left_of_a_batch_is_dropped_and_nobody_who_reads_on_misses_anything(database):
    message_store = MessageStore(database)
    for segment, batch in ((7, "b"), (8, "other"), (9, "b")):
        message_store.give(segment, batch=batch, shares={"n": ("one", share())})
        message_store.command(segment, "stop")
        message_store.store(segment, "n", events=[(0, JobReady(step=0)), (1, Outcome(status="done"))])
    read, (told, *_) = message_store.newest_event(), message_store.commands(after=0)[-1]
    message_store.clear("b")
    assert [word.segment for word in message_store.events(after=0)] == [8, 8, 9], "the newest one stays, for its number"
    assert [segment for _, segment, _ in message_store.commands(after=0)] == [8, 9]
    assert (message_store.shares(7), len(message_store.shares(8))) == ([], 1)
    message_store.command(10, "stop")
    message_store.store(10, "n", events=[(0, JobReady(step=0))])
    assert [word.segment for word in message_store.events(after=read)] == [10]
    assert [segment for _, segment, _ in message_store.commands(after=told)] == [10]


def test_a_request_is_asked_once_and_answered(database):
    requests = Requests(database)
    number = requests.ask(RequestKind.CANCEL, {"batch": "b", "jobs": []}, key="k")
    assert requests.ask(RequestKind.CANCEL, {"batch": "b", "jobs": []}, key="k") == number
    assert [request.content for request in requests.open(RequestKind.CANCEL)] == [{"batch": "b", "jobs": []}]
    assert not requests.open(RequestKind.LEND)
    requests.answer(number, status=RequestStatus.REFUSED, answer={"message": "no such batch"})
    assert requests.wait(number).answer == {"message": "no such batch"}
    assert not requests.open()


def test_a_batch_is_submitted_once_with_its_jobs(database):
    submissions = Submissions(database)
    submissions.submit(submission(), failed={"c": "no technique can train it"})
    submissions.submit(submission(jobs=("x",)))
    assert submissions.unended() == [submission()]
    assert submissions.find("nightly-1").terms.deadlines_s == {"a": 60.0}
    jobs = Journal(database, batch="nightly-1").jobs()
    assert {name: record.status for name, record in jobs.items()} == {"a": "waiting", "b": "waiting", "c": "failed"}
    every = Journal(database, batch=None)
    every.write_job("nightly-1/a", status=JobStatus.DONE, step=10)
    assert Journal(database, batch="nightly-1").jobs()["a"].step == 10
    submissions.end("nightly-1")
    assert submissions.unended() == []


def test_the_flow_runs_of_active_batches_are_known_without_reading_the_batches(database):
    submissions = Submissions(database)
    submissions.submit(submission("b1"))
    submissions.submit(replace(submission("b2"), flow_run="run-2"))
    assert submissions.active() == {"b1": "", "b2": "run-2"}
    submissions.end("b2")
    assert submissions.active() == {"b1": ""}
    assert [submissions.flow_run(id) for id in ("b1", "b2", "b3")] == ["", "run-2", ""]


def test_what_was_told_of_a_batch_is_read_on_from_any_event(database):
    told = EventLog(database)
    events = [JobEnded(record=JobRecord(name=job, status=JobStatus.DONE, step=10)) for job in "ab"]
    for event in events:
        told.append("b", event)
        told.append("other", event)
    entries, _ = BatchEvents(database, "b").rows(LogPosition(), most=9)
    assert [entry.event for entry in entries] == events
    later, _ = BatchEvents(database, "b").rows(LogPosition(decision=entries[0].id), most=9)
    assert [entry.event for entry in later] == events[1:]
    assert told.newest() == 4


def test_a_batch_stands_until_it_has_ended_and_may_be_reopened(database):
    submissions = Submissions(database)
    assert submissions.status("nightly-1") is None
    submissions.submit(submission())
    submissions.end("nightly-1")
    assert submissions.names() == [("nightly-1", "nightly", BatchStatus.ENDED)]
    submissions.reopen("nightly-1")
    assert submissions.status("nightly-1") == BatchStatus.SUBMITTED


def test_whoever_asked_renews_the_request_for_as_long_as_it_stands(database):
    requests = Requests(database)
    number = requests.ask(RequestKind.LEND, {"node": "n"})
    assert requests.renew(number)
    requests.answer(number, status=RequestStatus.GRANTED)
    assert requests.renew(number)
    assert requests.read(number).content == {"node": "n", "beats": 2}
    requests.answer(number, status=RequestStatus.WITHDRAWN)
    assert not requests.renew(number)
