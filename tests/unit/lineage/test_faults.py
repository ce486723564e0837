import errno
import subprocess
import sys

import pytest

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import Ledger, mlflow_calls
from ringmaster.model_lineage.ledger.runs import flat_params
from ringmaster.model_lineage.mlflow_calls import RETRY_DELAYS_S, RetryingClient
from ringmaster.text import redacted


class Flaky:
    """A client whose `get` raises the given faults in order, and then answers."""

    def __init__(self, *faults):
        self.faults = list(faults)
        self.num_calls = 0

    def get(self, name):
        self.num_calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return f"got {name}"


def mlflow_error(message, code):
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ErrorCode

    return MlflowException(message, error_code=ErrorCode.Value(code))


def guarded(*faults):
    delays = []
    target = Flaky(*faults)
    client = RetryingClient(target, tracking_uri="postgresql://me:secret@db/mlflow")
    client._waiting._wait = delays.append
    return client, target, delays


def test_a_transient_fault_is_tried_again_after_growing_delays():
    locked = [mlflow_error("database is locked", "TEMPORARILY_UNAVAILABLE") for _ in RETRY_DELAYS_S]
    client, target, delays = guarded(*locked)
    assert client.get("x") == "got x"
    assert target.num_calls == len(RETRY_DELAYS_S) + 1
    assert delays == list(RETRY_DELAYS_S) == sorted(delays)


def test_a_ledger_that_waits_outlasts_any_outage_and_no_other_fault(monkeypatch):
    monkeypatch.setattr(mlflow_calls, "FIRST_WAIT_S", 0.0)
    notices = []
    target = Flaky(*(mlflow_error("API request to http://x failed", "INTERNAL_ERROR") for _ in range(20)))
    client = RetryingClient(target, tracking_uri="http://x", waiting=mlflow_calls.OutageRetry(notices.append))
    assert client.get("x") == "got x"
    away, back = notices
    assert away.startswith("MLflow is away: what needs it waits. MLflow at http://x: API request to http://x failed.")
    assert back == "MLflow is back"
    target.faults = [mlflow_error("no such run", "RESOURCE_DOES_NOT_EXIST")]
    with pytest.raises(LedgerError, match="no such run"):
        client.get("x")


def test_a_fault_that_stays_becomes_an_error_with_a_remedy():
    locked = [mlflow_error("database is locked", "TEMPORARILY_UNAVAILABLE") for _ in range(9)]
    client, target, _ = guarded(*locked)
    with pytest.raises(LedgerError, match=r"database is locked\. To fix: ") as caught:
        client.get("x")
    assert target.num_calls == len(RETRY_DELAYS_S) + 1
    assert "secret" not in str(caught.value)
    assert caught.value.code == "TEMPORARILY_UNAVAILABLE"


def test_a_server_that_answers_5xx_is_tried_again():
    from mlflow.exceptions import RestException

    client, target, delays = guarded(RestException({"error_code": "INTERNAL_ERROR", "message": "oops"}))
    assert client.get("x") == "got x"
    assert target.num_calls == 2
    assert delays == [RETRY_DELAYS_S[0]]


UNREACHABLE = """API request to http://x/api failed with exception HTTPConnectionPool(host='x', port=1): Max retries \
exceeded with url: /api?q=a (Caused by ReadTimeoutError("HTTPConnectionPool(host='x', port=1): Read timed out."))"""


@pytest.mark.parametrize(
    ("fault", "told", "may_pass"),
    [
        (lambda: mlflow_error("No Run with id=1 exists", "RESOURCE_DOES_NOT_EXIST"), "No Run with id=1", False),
        (lambda: mlflow_error("Detected out-of-date database schema (..)", "INTERNAL_ERROR"), "db upgrade", False),
        (lambda: mlflow_error("API request to http://x failed with exception", "INTERNAL_ERROR"), "server is up", True),
        (
            lambda: mlflow_error(UNREACHABLE, "INTERNAL_ERROR"),
            r"/mlflow: API request to it failed: Read timed out\. To",
            True,
        ),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), "No space left on device.*free space", True),
        (lambda: PermissionError(errno.EACCES, "Permission denied"), "Permission denied", False),
    ],
)
def test_other_faults_are_told_at_once_and_whether_they_may_pass(fault, told, may_pass):
    client, target, delays = guarded(fault())
    with pytest.raises(LedgerError, match=told) as caught:
        client.get("x")
    assert caught.value.may_pass == may_pass
    assert target.num_calls == 1
    assert delays == []


def test_passwords_are_not_told():
    assert redacted("postgresql://me:secret@db:5432/mlflow") == "postgresql://me:***@db:5432/mlflow"
    assert redacted("sqlite:////tmp/mlflow.db") == "sqlite:////tmp/mlflow.db"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "databricks", "sqlite:///:memory:"])
def test_a_uri_that_keeps_no_ledger_is_refused_with_what_does(uri):
    with pytest.raises(LedgerError, match="sqlite:////"):
        Ledger(uri)


def test_a_place_that_cannot_be_a_database_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("this is text, not a database")
    with pytest.raises(LedgerError, match="not a SQLite database"):
        Ledger(f"sqlite:///{tmp_path}/file").warm_up()
    with pytest.raises(LedgerError, match="cannot be written"):
        Ledger(f"sqlite:///{tmp_path}/file/mlflow.db").warm_up()


def test_nested_parameters_become_dotted_ones_and_none_is_left_out():
    assert flat_params({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}}) == {
        "a.b": 1,
        "e": [1, 2],
    }


def test_importing_the_package_leaves_mlflow_alone():
    code = "import sys, ringmaster.model_lineage; print(sorted({'mlflow', 'torch', 'sqlalchemy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
