"""Approval requests that time out, in a real Prefect server: late answers to suspended runs."""

from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("prefect")

from prefect import flow
from prefect.client.schemas.objects import StateType
from prefect.input import keyset_from_paused_state
from prefect.states import Running, Suspended

from ringmaster.flows.form_fields import ANSWER_WITHIN_S
from ringmaster.flows.pool.controller import answer_late_runs
from ringmaster.flows.retraining.approval import NOBODY, TO_START, Start
from tests.integration.training.test_worker import prefect_server  # noqa: F401 - a fixture

pytestmark = pytest.mark.full


@flow(name="asks-to-start")
def asks():
    pass


def waiting(client, deployment="train-batch", **parameters):
    """A run of a deployment that is suspended until a person decides whether it is to start."""
    flow_id = client.create_flow(asks)
    made = client.create_deployment(flow_id, name=deployment, enforce_parameter_schema=False)
    run = client.create_flow_run_from_deployment(made, parameters=parameters)
    client.set_flow_run_state(run.id, Running(), force=True)
    state = Suspended(timeout_seconds=10**6, pause_key=TO_START)
    keyset = keyset_from_paused_state(state)
    state.state_details.run_input_keyset = keyset
    client.set_flow_run_state(run.id, state)
    Start.save(keyset, run.id)
    return client.read_flow_run(run.id), keyset


def answered_after(seconds, client):
    return answer_late_runs(client, clock=lambda: datetime.now(UTC) + timedelta(seconds=seconds))


@pytest.mark.parametrize(("without_answer", "starts"), [("train", True), ("stop", False)])
def test_who_does_not_answer_in_time_is_answered_for(client, without_answer, starts):
    run, keyset = waiting(client, answer_within_s=7200, without_answer=without_answer)
    assert run.name not in answered_after(3600, client)
    assert client.read_flow_run(run.id).state.name == "Suspended"
    assert run.name in answered_after(7200, client)
    assert client.read_flow_run(run.id).state.type == StateType.SCHEDULED, "it begins anew, with the answer"
    said = Start.load(keyset, run.id)
    assert (said.start, said.name) == (starts, NOBODY)
    assert "nobody answered within 7200 s" in said.comment


def test_what_the_run_was_not_told_is_as_in_the_form(client):
    run, keyset = waiting(client)
    assert run.name not in answered_after(ANSWER_WITHIN_S / 2, client)
    assert run.name in answered_after(ANSWER_WITHIN_S, client)
    assert Start.load(keyset, run.id).start is False


def test_runs_of_other_deployments_are_left_alone(client):
    run, _ = waiting(client, deployment="somebody-elses")
    assert run.name not in answered_after(10 * ANSWER_WITHIN_S, client)
    assert client.read_flow_run(run.id).state.name == "Suspended"
