"""Rows that a controller cannot read or fails on are set aside and reported; everything else continues."""

import json
from itertools import product

import pytest
from sqlalchemy import text

from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.pool import controller as controller_module
from ringmaster.tasks.pool.event_log import BatchEvents, EventReader, LogPosition
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import DatabaseClosed
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.storage.quarantine import MAX_DEATHS, Quarantine
from tests.matrix import matrix
from tests.unit.pool.bench import Clock, Gangs, PoolBench, submission
from tests.unit.pool.workers import Worker

DONE = {"a": JobStatus.DONE, "b": JobStatus.DONE}
REQUEST = (
    "INSERT INTO requests (key, kind, content, status, answer, made_s) VALUES ('k', '{}', '{}', 'open', '{{}}', 0)"
)


def execute(database, *statements):
    for statement in statements:
        database.write(lambda connection, statement=statement: connection.exec_driver_sql(statement))


def finish(pool, gangs, *, moves=40):
    """Lets gangs and controller take turns until every batch has ended."""
    for _ in range(moves):
        for worker in gangs.workers:
            worker.beat()
        pool.step(seconds=1.0)
        statuses = Submissions(pool.database).names()
        if all(status == "ended" for _, _, status in statuses):
            return
        gangs.move()
    raise AssertionError(f"it did not end: {statuses}")


# What happens to the rows of batch b1, or to other rows, while its first segment runs.
DAMAGES = {
    "batch: broken JSON": "UPDATE batches SET content = '{\"id\": ' WHERE id = 'b1'",
    "batch: another kind of JSON": "UPDATE batches SET content = '[7]' WHERE id = 'b1'",
    "batch: an unknown field": "UPDATE batches SET content = json_set(content, '$.colour', 1) WHERE id = 'b1'",
    "batch: no time": "UPDATE batches SET content = json_set(content, '$.started_s', 'noon') WHERE id = 'b1'",
    "batch: terms": "UPDATE batches SET content = json_set(content, '$.terms', 7) WHERE id = 'b1'",
    "batch: a job": "UPDATE batches SET content = json_set(content, '$.jobs[0].num_steps', 'many') WHERE id = 'b1'",
    "job: a status": "UPDATE jobs SET status = 'asleep' WHERE batch = 'b1'",
    "job: details": "UPDATE jobs SET details = '{' WHERE batch = 'b1'",
    "job: a goal": "UPDATE jobs SET details = '{\"goal\": \"far\"}' WHERE batch = 'b1'",
    "fact: priorities": "INSERT INTO facts (batch, key, value) VALUES ('b1', 'priorities', '[[1]]')",
    "fact: broken JSON": "INSERT INTO facts (batch, key, value) VALUES ('b1', 'priorities', '{')",
    "segment: broken JSON": "UPDATE segments SET what = '{' WHERE batch = 'b1'",
    "segment: an unknown form": "UPDATE segments SET what = '{\"technique\": 1}' WHERE batch = 'b1'",
    "event log: broken JSON": "UPDATE told SET content = '{' WHERE batch = 'b1'",
    "event log: an unknown kind": "UPDATE told SET kind = 'Rested' WHERE batch = 'b1'",
    "event of a gang: broken JSON": "UPDATE said SET content = '{' WHERE segment = 1",
    "event of a gang: no step": 'UPDATE said SET content = \'{"event": "ready", "step": "x"}\' WHERE segment = 1',
    "order: broken JSON": "UPDATE orders SET content = '{' WHERE batch = 'b1'",
    "node: no devices": "INSERT INTO nodes VALUES ('x', 'x-1', '', '[]', 'serving', 0, '{}', 0, '')",
    "node: broken JSON": "INSERT INTO nodes VALUES ('x', 'x-1', '', '[{', 'serving', 0, '{}', 0, '')",
    "node: an unknown status": "INSERT INTO nodes SELECT 'x', 'x-1', '', devices, 'on', 0, '{}', 0, '' FROM nodes",
    "node: a capacity": "INSERT INTO nodes SELECT 'x', 'x-1', '', json_set(devices, '$[0].memory_bytes', -1), "
    "'serving', 0, '{}', 0, '' FROM nodes",
    "node: health": "INSERT INTO nodes SELECT 'x', 'x-1', '', devices, 'serving', 0, '[1]', 0, '' FROM nodes",
    "request: an unknown kind": REQUEST.format("dance", "{}"),
    "request: broken JSON": REQUEST.format("cancel", "{"),
    "request: another kind of JSON": REQUEST.format("pause", "[]"),
    "request: no such job": REQUEST.format("retry", '{"batch": "b1", "jobs": 7}'),
    "request: priority": REQUEST.format("set", '{"batch": "b1", "settings": {"priority": "high"}}'),
    "request: no settings": REQUEST.format("set", '{"batch": "b1", "settings": 7}'),
    "request: a clone of nothing": REQUEST.format("clone", '{"batch": "b1", "jobs": ["a", 7], "settings": []}'),
    "fact: terms": "INSERT INTO facts (batch, key, value) VALUES ('b1', 'terms', '[{\"weights\": 7}]')",
    "loan: no number": REQUEST.format("lend", '{"node": "n", "least": "one", "most": 2, "beats": 0}'),
    "loan: no node": REQUEST.format("lend", '{"node": ["n"], "least": 1, "most": 2, "beats": 0}'),
    "loan: broken JSON": REQUEST.format("lend", "{"),
    "steering": REQUEST.format("direct", '{"batch": "b1", "goals": {"a": "far"}}'),
    "steering: another kind of JSON": REQUEST.format("direct", '{"batch": "b1", "jobs": [1]}'),
    "steering: no such job": REQUEST.format("direct", '{"batch": "b1", "stops": {"z": "late"}}'),
}
FIRST_OF_KIND = {damage.partition(":")[0]: damage for damage in reversed(DAMAGES)}.values()


@pytest.mark.parametrize(
    ("damage", "changes_controller"),
    # Another controller reads the same rows by the same functions: one case of each kind of rows shows it.
    matrix(
        product(DAMAGES, [False, True]),
        quick=[*product(DAMAGES, [False]), *product(FIRST_OF_KIND, [True])],
        ids=[f"{damage}-{how}" for damage, how in product(DAMAGES, ["continues", "is replaced"])],
    ),
)
def test_what_is_damaged_harms_its_own_batch_at_most(database, damage, changes_controller):
    pool, worker = PoolBench(database, Clock()), Worker(database, "n", num_devices=2)
    gangs = Gangs(worker)
    pool.submit(submission("b1", ("a", "b")))
    for _ in range(2):
        worker.beat()
        pool.step(seconds=1.0)
        gangs.move()
    execute(database, DAMAGES[damage])
    if changes_controller:
        pool = PoolBench(database, pool.clock)
    Submissions(database).submit(submission("b2", ("a", "b")))
    finish(pool, gangs)
    assert pool.statuses("b2") == DONE
    assert set(pool.statuses("b1").values()) <= {JobStatus.DONE, JobStatus.FAILED}
    for record in Journal(database, batch="b1").jobs().values():
        assert record.status == JobStatus.DONE or record.message, "a job that fails says why"
    requests = Requests(database)
    assert requests.current() == []
    number = requests.ask(RequestKind.CANCEL, {"batch": "b1", "jobs": []})
    pool.step()
    assert "has ended" in requests.read(number).answer["message"]
    events = EventReader(BatchEvents(database, "b1"), LogPosition())
    assert all(entry.event is not None for entry in events.read())
    assert [node.name for node in NodeRegistry(database).all()] == ["n"]
    assert not pool.held()


def test_a_batch_that_the_controller_fails_on_is_set_aside_at_its_second_failure(database, monkeypatch, caplog):
    pool, gangs = PoolBench(database, Clock()), Gangs(Worker(database, "n"))
    read, tries = controller_module.read_batch_state, []

    def fail(database, batch):
        if batch.id == "b1":
            tries.append(batch.id)
            raise RuntimeError("no \0 such thing")
        return read(database, batch)

    monkeypatch.setattr(controller_module, "read_batch_state", fail)
    for id in ("b1", "b2"):
        Submissions(database).submit(submission(id))
    finish(pool, gangs)
    assert pool.statuses("b2") == DONE
    assert (len(tries), set(pool.statuses("b1").values())) == (2, {JobStatus.FAILED})
    message = Journal(database, batch="b1").jobs()["a"].message
    assert (
        message == "the pool's controller cannot handle it, and continues without it: RuntimeError: no \\x00 such thing"
    )
    assert "Traceback" in caplog.text
    assert [event.record.message for event in pool.told(controller_module.JobEnded)] == [message, message]


def test_a_batch_that_ends_the_controllers_process_is_set_aside(database, monkeypatch):
    read = controller_module.read_batch_state

    def die(database, batch):
        if batch.id == "b1":
            raise SystemExit(9)  # as os._exit, or the kernel for want of memory
        return read(database, batch)

    monkeypatch.setattr(controller_module, "read_batch_state", die)
    for id in ("b1", "b2"):
        Submissions(database).submit(submission(id))
    clock = Clock()
    for _ in range(MAX_DEATHS):
        with pytest.raises(SystemExit):
            PoolBench(database, clock)
    pool = PoolBench(database, clock)
    finish(pool, Gangs(Worker(database, "n")))
    assert pool.statuses("b2") == DONE
    assert set(pool.statuses("b1").values()) == {JobStatus.FAILED}
    assert "the process ended 3 times" in Journal(database, batch="b1").jobs()["a"].message


def test_a_request_that_the_controller_fails_on_is_answered_and_the_next_one_too(database, monkeypatch):
    monkeypatch.setattr(Executor, "pause", lambda _, jobs: 1 / 0)
    pool, _ = PoolBench(database, Clock()), Worker(database, "n")
    pool.submit(submission("b1"))
    requests = Requests(database)
    numbers = [requests.ask(kind, {"batch": "b1", "jobs": ["a"]}) for kind in (RequestKind.PAUSE, RequestKind.CANCEL)]
    pool.step()
    answered = [requests.read(number) for number in numbers]
    assert [request.status for request in answered] == [RequestStatus.REFUSED, RequestStatus.DONE]
    assert "ZeroDivisionError: division by zero" in answered[0].answer["message"]


def test_a_sweep_whose_steering_fails_is_ended_with_the_cause(database, monkeypatch):
    pool, gangs = PoolBench(database, Clock()), Gangs(Worker(database, "n"))
    pool.submit(submission("b1"))
    monkeypatch.setattr(pool.executor, "steer", lambda steering: 1 / 0)
    Requests(database).ask(RequestKind.DIRECT, {"batch": "b1", "goals": {"a": 3}})
    finish(pool, gangs)
    assert set(pool.statuses("b1").values()) == {JobStatus.FAILED}
    assert "the request that steers it was refused" in Journal(database, batch="b1").jobs()["a"].message


def test_an_event_that_cannot_be_logged_fails_its_batch_alone(database, monkeypatch):
    pool, gangs = PoolBench(database, Clock()), Gangs(Worker(database, "n"))
    logged = controller_module.as_logged

    def fail(event, batch):
        if batch == "b1":
            raise RecursionError("too deep")
        return logged(event, batch)

    monkeypatch.setattr(controller_module, "as_logged", fail)
    for id in ("b1", "b2"):
        Submissions(database).submit(submission(id))
    finish(pool, gangs)
    assert pool.statuses("b2") == DONE
    assert set(pool.statuses("b1").values()) == {JobStatus.FAILED}


def test_a_database_that_is_away_is_no_fault_of_a_row(database):
    def be_away():
        raise DatabaseClosed("it was closed")

    quarantine, aside = Quarantine(database), []
    with pytest.raises(DatabaseClosed):
        quarantine.handle("request 7", be_away, set_aside=aside.append)
    assert Quarantine(database).handle("request 7", lambda: "done", set_aside=aside.append) == "done"
    assert aside == []
    assert not database.read(lambda connection: connection.execute(text("SELECT * FROM facts")).all())


@pytest.mark.parametrize("value", ["\0", "\ud800", "a" * 100_000, "[/data/a.txt]", "\x1b[2J"], ids=ascii)
def test_any_text_of_a_person_is_answered(pool, value):
    for content in ({"batch": value}, {"batch": "b1", "jobs": [value]}, {"batch": "b1", "message": value}):
        assert pool.ask(RequestKind.CANCEL, **content).status == RequestStatus.REFUSED
    json.dumps(pool.ask(RequestKind.PAUSE, batch=value).answer)
