"""Lent nodes whose engine reports that they are lost or have ended, while their agents still send heartbeats."""

import pytest

from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.tasks.pool.pool_engine import PoolEngine
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus, NodeProvider
from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.pool.workers import Worker, call

ID = "slurm:7"


class Lending(NodeProvider):
    """An engine that reports what a test sets."""

    def __init__(self):
        self.reported, self.released = {}, []

    def report(self, status, why="its Slurm job 7 has ended"):
        self.reported = {ID: Allocation(id=ID, status=status, why=why)}

    def allocations(self):
        return self.reported

    def release(self, allocation):
        self.released.append(allocation)


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def lending():
    lending = Lending()
    lending.report(AllocationStatus.RUNNING)
    return lending


@pytest.fixture
def engine(database, lending):
    engine = PoolEngine(database, timeouts=Timeouts(), provider=lending)
    yield engine
    engine.close()


@pytest.fixture
def worker(database, engine):
    worker = Worker(database, allocation=ID)
    (node,) = engine.nodes()
    assert not node.is_leaving
    return worker


def test_a_lost_node_that_sends_heartbeats_takes_no_segments_and_keeps_those_that_it_has(lending, engine, worker):
    future = engine.start(call(1))
    worker.take_all()
    lending.report(AllocationStatus.LOST)
    assert worker.beat()
    (node,) = engine.nodes()
    assert node.is_leaving, "nothing more is started there, and what runs there writes checkpoints"
    assert not future.done(), "its processes may live, until it is silent"
    engine.release(node.name)
    assert not lending.released, "there is nothing to give back"
    lending.report(AllocationStatus.RUNNING)
    (node,) = engine.nodes()
    assert not node.is_leaving, "the engine has reached its machine again"
    engine.release(node.name)
    assert lending.released == [ID]


def test_a_node_whose_allocation_has_ended_does_not_come_back_under_it(database, lending, engine, worker):
    future = engine.start(call(1))
    worker.take_all()
    lending.report(AllocationStatus.ENDED)
    assert engine.nodes() == []
    assert future.result(timeout=0).status == "lost"
    assert not worker.beat(), "by this its agent learns that it was given up"
    again = Worker(database, incarnation="n-two", allocation=ID)
    assert engine.nodes() == [] == engine.nodes()
    assert again.beat()
    assert engine.start(call(2)).result(timeout=0).status == "lost"


@pytest.mark.parametrize("status", [AllocationStatus.LOST, AllocationStatus.ENDED])
def test_what_the_engine_has_forgotten_takes_no_segments_either(database, lending, engine, worker, status):
    lending.report(status)
    engine.nodes()
    lending.reported = {}
    Worker(database, incarnation="n-two", allocation=ID)
    assert [node for node in engine.nodes() if not node.is_leaving] == []


def test_a_node_that_an_engine_has_yet_to_report_serves(database, lending, engine):
    lending.reported = {}
    Worker(database, allocation=ID)
    (node,) = engine.nodes()
    assert node.is_lent and not node.is_leaving
