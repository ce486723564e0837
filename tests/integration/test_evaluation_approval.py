"""Asking a person: a flow run that pauses in a real Prefect server, and goes on with the answer or without."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("prefect")

from prefect import flow, resume_flow_run
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import approval
from tests.integration.test_worker import PrefectServer
from tests.unit.pool.test_host import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@flow(name="asks", persist_result=False)
def asks(timeout_s: float) -> dict:
    return vars(approval.ask("# Promote it?", timeout_s=timeout_s))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server
    server.stop()


def answered(server, timeout_s, answer=None):
    """What `ask` returned. answer: given as soon as the run is paused."""
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        seen = {run.id for run in client.read_flow_runs()}

        def run():
            with temporary_settings({PREFECT_API_URL: server.api}):
                return asks(timeout_s)

        def paused():
            return [r for r in client.read_flow_runs() if r.id not in seen and r.state and r.state.is_paused()]

        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(run)
            if answer is not None:
                until(paused, timeout_s=120)
                resume_flow_run(paused()[0].id, run_input=answer)
            return result.result(timeout=120)


@pytest.mark.parametrize("approve", [True, False])
def test_a_person_agrees_or_does_not(server, monkeypatch, approve):
    monkeypatch.setattr(approval, "POLL_S", 1)
    answer = {"approve": approve, "name": "Ann", "comment": "it is Friday"}
    assert answered(server, 300, answer) == {"approved": approve, "who": "Ann", "why": "it is Friday"}


def test_where_nobody_answers_the_run_goes_on(server, monkeypatch):
    monkeypatch.setattr(approval, "POLL_S", 1)
    found = answered(server, 3)
    assert found["approved"] is None
    assert "nobody answered within 3 s" in found["why"]
