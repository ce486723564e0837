"""Approval by a person: a flow run in a real Prefect server pauses, and continues with or without an answer."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("prefect")

from prefect import flow, resume_flow_run
from prefect.client.orchestration import get_client
from prefect.input import read_flow_run_input
from prefect.settings import PREFECT_API_URL, temporary_settings

from ringmaster.flows.retraining import approval
from tests.cluster.waiting import until
from tests.integration.training.test_worker import PrefectServer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


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
    """Returns what `ask` returned. answer: the input that is given as soon as the run is paused."""
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        seen = {run.id for run in client.read_flow_runs()}

        def run():
            with temporary_settings({PREFECT_API_URL: server.api}):
                return asks(timeout_s)

        def asked():
            """The paused run, once it has its form, which arrives shortly after the pause."""
            for run in client.read_flow_runs():
                if run.id not in seen and run.state and run.state.is_paused():
                    schema = run.state.state_details.run_input_keyset["schema"]
                    return run if read_flow_run_input(schema, run.id) is not None else None
            return None

        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(run)
            if answer is not None:
                resume_flow_run(until("the run asks", asked).id, run_input=answer)
            return result.result()


@pytest.mark.parametrize("approve", [True, False])
def test_a_person_agrees_or_does_not(server, monkeypatch, approve):
    monkeypatch.setattr(approval, "POLL_S", 1)
    answer = {"approve": approve, "name": "Ann", "comment": "it is Friday"}
    assert answered(server, 300, answer) == {"approved": approve, "who": "Ann", "why": "it is Friday"}


@pytest.mark.parametrize("timeout_s", [3, 0])  # 0: times out before the run is paused
def test_where_nobody_answers_the_run_goes_on(server, monkeypatch, timeout_s):
    monkeypatch.setattr(approval, "POLL_S", 1)
    found = answered(server, timeout_s)
    assert found["approved"] is None
    assert f"nobody answered within {timeout_s} s" in found["why"]
