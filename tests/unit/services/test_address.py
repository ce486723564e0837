"""The pool of a process: given by its environment, or by the file that `ringmaster up` left in its home."""

import json
from dataclasses import asdict

import pytest

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.settings import PoolAddress

VARIABLES = (
    "RINGMASTER_DATABASE",
    "PREFECT_API_URL",
    "PREFECT_API_AUTH_STRING",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
)
ADDRESS = PoolAddress(
    database="sqlite:////pool.db", prefect_api="http://127.0.0.1:4200/api", mlflow_uri="http://127.0.0.1:5000"
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    return tmp_path


def test_there_is_no_pool_by_default(home):
    assert settings.checked_pool() is None
    assert settings.tracking_uri(home).startswith("sqlite:")


def test_a_server_alone_is_no_pool(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere:4200/api")
    assert settings.checked_pool() is None


def test_the_home_names_the_pool_that_is_up(home):
    settings.pool_file(home).write_text(json.dumps(asdict(ADDRESS)))
    assert settings.checked_pool() == ADDRESS
    assert settings.tracking_uri(home) == ADDRESS.mlflow_uri


def test_the_environment_names_another_way_to_a_part_of_it(home, monkeypatch):
    settings.pool_file(home).write_text(json.dumps(asdict(ADDRESS)))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tunnel:5001")
    assert settings.checked_pool().mlflow_uri == "http://tunnel:5001"
    assert settings.checked_pool().database == ADDRESS.database


def test_the_environment_names_all_of_a_pool(monkeypatch):
    for name, value in ADDRESS.environment().items():
        monkeypatch.setenv(name, value)
    assert settings.checked_pool() == ADDRESS


def test_what_the_environment_leaves_out_is_told(monkeypatch):
    monkeypatch.setenv("RINGMASTER_DATABASE", "postgresql://db/ringmaster")
    monkeypatch.setenv("PREFECT_API_URL", "http://server:4200/api")
    with pytest.raises(InputError, match="MLFLOW_TRACKING_URI must also be set"):
        settings.checked_pool()


def test_clients_of_a_pool_with_a_password_have_it_and_it_is_shown_nowhere():
    address = PoolAddress(database="d", prefect_api="p", mlflow_uri="m", password="secret:word")
    environment = address.environment()
    assert environment["PREFECT_API_AUTH_STRING"] == "ringmaster:secret:word"
    assert environment["MLFLOW_TRACKING_PASSWORD"] == "secret:word"
    assert "secret" not in repr(address)


def test_results_are_json_and_never_pickles():
    environment = ADDRESS.environment()
    assert environment["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
    assert environment["PREFECT_RESULTS_PERSIST_BY_DEFAULT"] == "true"
    assert "PREFECT_API_AUTH_STRING" not in environment
