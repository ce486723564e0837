"""Answers of a proxy in front of Prefect (such as a maintenance page) are retried like an unavailable Prefect."""

import json
from types import SimpleNamespace
from uuid import uuid4

import pytest

from ringmaster.flows.pool.runs.child_runs import ChildRuns
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.pool.bench import submission


class Proxy:
    """A server that answers with a page of HTML instead of Prefect's JSON."""

    def create_flow_run_from_deployment(self, *_, **__):
        return json.loads("<html>back soon</html>")


def test_an_answer_that_is_none_is_tried_again(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    Submissions(database).submit(submission())
    runs = ChildRuns(Submissions(database))
    runs._client, runs._deployment = Proxy(), uuid4()
    share = SimpleNamespace(order=SimpleNamespace(job=SimpleNamespace(name="a")))
    with pytest.raises(ConnectionError, match="JSONDecodeError"):
        runs.launch(SimpleNamespace(segment=1, node="n", batch="b1", share=share, incarnation="one"))
    database.close()
