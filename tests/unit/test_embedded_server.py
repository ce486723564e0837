"""What the server is started with that a run without a pool brings, seen without starting it."""

import subprocess

import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.embedded_server import protect_embedded_server, start_server
from flows.services.hosts import ALLOWED_HOSTS

AUTH = "ringmaster:secret-word"


@pytest.fixture
def started(monkeypatch):
    """The commands and environments of what would have been started."""
    every = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: every.append((command, options)))
    return every


@pytest.fixture
def known():
    """Prefect's servers of this process, which are put back."""
    before = dict(SubprocessASGIServer._instances)
    SubprocessASGIServer._instances.clear()
    yield SubprocessASGIServer._instances
    SubprocessASGIServer._instances.clear()
    SubprocessASGIServer._instances.update(before)


def test_it_asks_for_the_password_that_its_clients_know_and_checks_who_asks(started):
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH}):
        start_server(8123)
    ((command, options),) = started
    environment = options["env"]
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == environment["PREFECT_API_AUTH_STRING"] == AUTH
    assert environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:8123"
    assert "evil" not in environment[ALLOWED_HOSTS] and "127.0.0.1" in environment[ALLOWED_HOSTS].split(",")
    assert "flows.services.prefect_server" in command and "--until-stdin-ends" in command
    assert "secret-word" not in " ".join(command)
    assert options["stdin"] == subprocess.PIPE


def test_without_a_password_it_is_not_started(started):
    with (
        temporary_settings(restore_defaults={PREFECT_API_AUTH_STRING}),
        pytest.raises(RuntimeError, match="To fix: set PREFECT_API_AUTH_STRING"),
    ):
        start_server(8123)
    assert not started


def test_it_is_what_prefect_starts(started, known):
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH}, restore_defaults={PREFECT_API_URL}):
        protect_embedded_server()
        server = SubprocessASGIServer()
        server.port = 8123
        server._run_uvicorn_command()
    ((command, _),) = started
    assert command[-3:] == ["--port", "8123", "--until-stdin-ends"]


def test_where_another_server_is_named_nothing_is_changed(known):
    with temporary_settings({PREFECT_API_URL: "http://elsewhere:4200/api"}):
        protect_embedded_server()
    assert not known
