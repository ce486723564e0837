"""States that runs of segments report to Prefect, tested without a server."""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import pytest

from ringmaster.flows.pool.runs import segment_runs
from ringmaster.flows.pool.runs.segment_runs import SegmentRuns
from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.pool.node.test_agent import Site


@pytest.fixture
def environment(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    environment = Site(database)
    yield environment
    environment.host.close()
    database.close()


def last_state(environment, segment, monkeypatch):
    """Claims the run of a segment whose order nobody takes. Returns the last state reported to Prefect."""
    told = []

    async def propose(client, state, flow_run_id):
        told.append(state)
        return state

    monkeypatch.setattr(segment_runs, "propose_state", propose)
    flow_run = SimpleNamespace(id=uuid4(), name="a 1 on n", parameters={"segment": segment, "node": "n"})
    asyncio.run(SegmentRuns(environment.host, lambda: None).run(flow_run))
    return told[-1]


def test_a_run_that_a_leaving_node_claimed_is_lost_and_nobody_takes_its_job_for_cancelled(environment, monkeypatch):
    environment.give(1)
    environment.host.drain(within_s=0.0, heed_s=0.0)  # its worker was stopped between the claim and the order
    state = last_state(environment, 1, monkeypatch)
    assert (state.type.value, state.message) == ("CRASHED", "node n left before segment 1 began")
    assert [order.status for order in environment.message_store.shares(1)] == ["given"]


def test_a_run_whose_order_was_withdrawn_is_cancelled(environment, monkeypatch):
    environment.give(1)
    assert environment.message_store.withdraw(1, "n")
    assert last_state(environment, 1, monkeypatch).type.value == "CANCELLED"
