"""Calls to a pool's Prefect server are retried while it is unavailable. Without a pool they are not."""

import httpx
import pytest

from ringmaster.flows import settings
from ringmaster.flows.batch.flow_runs import for_mlflow, for_prefect
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage import mlflow_calls

ADDRESS = PoolAddress(database="sqlite:///x", prefect_api="http://p/api", mlflow_uri="http://m")
REQUEST = httpx.Request("POST", "http://p/api/artifacts/")


def answer(code):
    return httpx.HTTPStatusError(f"{code}", request=REQUEST, response=httpx.Response(code, request=REQUEST))


class Server:
    """A call that raises the given faults in order, and then returns."""

    def __init__(self, *faults):
        self.faults = list(faults)

    def __call__(self):
        if self.faults:
            raise self.faults.pop(0)
        return "made"


@pytest.fixture
def on_a_pool(monkeypatch):
    monkeypatch.setattr(settings, "checked_pool", lambda: ADDRESS)
    monkeypatch.setattr(mlflow_calls, "FIRST_WAIT_S", 0.0)


@pytest.mark.usefixtures("on_a_pool")
def test_a_server_that_is_away_or_busy_is_waited_for():
    assert for_prefect(Server(httpx.ConnectError("refused"), httpx.ReadTimeout("late"), answer(503))) == "made"


@pytest.mark.usefixtures("on_a_pool")
def test_a_server_that_refuses_is_not():
    with pytest.raises(httpx.HTTPStatusError):
        for_prefect(Server(answer(404)))


def test_without_a_pool_whoever_asked_is_told_at_once(monkeypatch):
    monkeypatch.setattr(settings, "checked_pool", lambda: None)
    assert for_mlflow(print) is None
    with pytest.raises(httpx.ConnectError):
        for_prefect(Server(httpx.ConnectError("refused")))
