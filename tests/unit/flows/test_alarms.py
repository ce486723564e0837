"""Alarms: when one is raised, and that it is raised once."""

from dataclasses import replace

import pytest

from ringmaster.tasks import alarms
from ringmaster.tasks.alarms import DeadlineAlarms, NodeAlarms, batch_failed, promotion_refused
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.pool.nodes import NodeRecord, NodeStatus
from ringmaster.tasks.timeline.run_timeline import JobLine, RunTimeline

DEVICES = tuple(Device(kind="cpu", name="a", memory_bytes=2**30, cores=(n,), index=n) for n in range(2))
ALPHA = NodeRecord(name="alpha", incarnation="1", address="10.0.0.1", devices=DEVICES)


def test_a_node_that_vanishes_is_told_once():
    watch = NodeAlarms()
    assert watch.poll([ALPHA]) == []
    (lost,) = watch.poll([])
    assert (lost.event, lost.resource) == (alarms.DEVICE_LOST, "ringmaster.node.alpha")
    assert "node alpha is gone, with 2 devices" in lost.message
    assert watch.poll([]) == []


def test_a_worker_that_ends_in_order_is_no_alarm():
    watch = NodeAlarms()
    watch.poll([replace(ALPHA, status=NodeStatus.LEAVING)])
    assert watch.poll([]) == []


def test_a_worker_that_has_left_in_order_between_two_checks_is_no_alarm():
    watch = NodeAlarms()
    watch.poll([ALPHA])
    assert watch.poll([], left={"1"}) == []


def test_a_device_is_told_when_it_falls_out_and_again_when_it_does_so_again():
    watch = NodeAlarms()
    sick = replace(ALPHA, health={"1": "it has fallen off the bus"})
    assert watch.poll([ALPHA]) == []
    (told,) = watch.poll([sick])
    assert told.resource == "ringmaster.device.alpha.1"
    assert told.message == "device 1 of alpha is out of the plan: it has fallen off the bus"
    assert watch.poll([sick]) == []
    assert watch.poll([ALPHA]) == []
    assert len(watch.poll([sick])) == 1


def standing(ends_s, status="running"):
    return RunTimeline(
        name="pool", zero_s=1000.0, now_s=5.0, jobs=(JobLine(name="run/a", status=status, step=3, ends_s=ends_s),)
    )


@pytest.mark.parametrize(("ends_s", "late_s"), [(80.0, None), (130.0, 20.0), (None, None)])
def test_a_deadline_is_in_danger_where_the_forecast_is_behind_it(ends_s, late_s):
    watch = DeadlineAlarms("nightly", deadlines_s={"a": 100.0}, started_s=1010.0)
    found = watch.poll(standing(ends_s))
    assert [alarm.facts["late_s"] for alarm in found] == ([] if late_s is None else [late_s])
    assert watch.poll(standing(ends_s)) == [], "each job once"


def test_what_has_ended_or_has_no_deadline_is_in_no_danger():
    assert DeadlineAlarms("b", deadlines_s={"a": 1.0}, started_s=0.0).poll(standing(9.0, status="done")) == []
    assert DeadlineAlarms("b", deadlines_s={}, started_s=0.0).poll(standing(9.0)) == []


def test_alarms_are_told_to_whoever_listens():
    heard = []
    DeadlineAlarms("nightly", deadlines_s={"a": 100.0}, started_s=1010.0).report_late(standing(130.0), heard.append)
    (told,) = heard
    assert told.resource == "ringmaster.job.nightly.a"
    assert told.message.startswith("a of batch nightly is forecast to end 20 s after its deadline")


def test_every_alarm_names_what_it_is_about():
    for alarm in (batch_failed("b", message="x"), promotion_refused("m", version=None, why="y")):
        assert alarm.event in alarms.EVENTS
        assert alarm.resource.startswith("ringmaster.")
        assert alarm.name in alarm.message


def test_the_watcher_of_a_pool_tells_who_left_in_order_from_who_is_lost(tmp_path):
    from ringmaster.flows.pool.controller import PoolAlarms
    from ringmaster.tasks.pool.nodes import NodeRegistry
    from ringmaster.tasks.storage.database import Database, file_url

    database, heard = Database(file_url(tmp_path / "pool.db"), synced=False), []
    try:
        watch = PoolAlarms(database, emit_alarm=heard.append)
        NodeRegistry(database).register(ALPHA)
        NodeRegistry(database).register(replace(ALPHA, name="beta", incarnation="2"))
        assert watch.poll() == []
        NodeRegistry(database).mark_left("beta", incarnation="2")
        NodeRegistry(database).remove("alpha", incarnation="1")
        assert watch.poll() == heard
        assert [alarm.name for alarm in heard] == ["alpha"]
    finally:
        database.close()
