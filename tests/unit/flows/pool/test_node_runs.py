"""The flow runs of lent nodes, as Prefect's server lists them. No server answers here."""

from contextlib import contextmanager
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from prefect.client.schemas.objects import FlowRun

from ringmaster.flows.pool.segment_runs import PrefectNodeRuns

PAGE = 200  # what Prefect's server returns at most, whatever is asked for


class FakePrefect:
    """Prefect's server: lists its runs in pages."""

    def __init__(self, num_runs):
        self.runs = [FlowRun(id=UUID(int=number), flow_id=UUID(int=0), name="node") for number in range(num_runs)]

    @contextmanager
    def use(self):
        yield self

    def read_flow_runs(self, *, limit=PAGE, offset=0, **filters):
        return self.runs[offset : offset + min(limit, PAGE)]


@pytest.mark.parametrize("num_runs", [0, 1, PAGE, PAGE + 1, 2 * PAGE + 56])
def test_all_runs_are_listed_however_many_there_are(monkeypatch, num_runs):
    runs = PrefectNodeRuns()
    monkeypatch.setattr(runs, "_client", FakePrefect(num_runs))
    assert {run.id for run in runs.live()} == {str(UUID(int=number)) for number in range(num_runs)}
