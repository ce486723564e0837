"""Command and environment of the embedded server of a run without a pool, tested without starting it."""

import subprocess
from types import SimpleNamespace

import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from ringmaster.flows.services import embedded_server
from ringmaster.flows.services.embedded_server import ServerNotStarted, protect_embedded_server, start_server
from ringmaster.flows.services.hosts import ALLOWED_HOSTS
from tests.ports import free_port

AUTH = "ringmaster:secret-word"


@pytest.fixture
def started(monkeypatch):
    """The commands and options of processes that would have been started, and that have exited at once."""
    every = []
    nothing = dict.fromkeys(("terminate", "kill", "wait"), lambda *_, **__: None)
    ended = SimpleNamespace(poll=lambda: 7, returncode=7, **nothing)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: every.append((command, options)) or ended)
    return every


@pytest.fixture
def known():
    """Prefect's servers of this process, restored after the test."""
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
    assert "ringmaster.flows.services.prefect_server" in command and "--until-stdin-ends" in command
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
        server.port = free_port()
        with pytest.raises(ServerNotStarted, match=r"ended with exit code 7.*To fix: run it again"):
            server.start()
    assert not server.running
    ((command, _),) = started
    assert command[-3:] == ["--port", str(server.port), "--until-stdin-ends"]


def test_a_slow_start_is_told_of_and_given_up_in_the_end(monkeypatch, capfd):
    times = iter(range(0, 2000, 20))
    monkeypatch.setattr(embedded_server.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(embedded_server.time, "sleep", lambda _: None)
    process = SimpleNamespace(poll=lambda: None)
    with pytest.raises(ServerNotStarted, match=r"has not answered for 6.. s: this machine is busy"):
        embedded_server._wait_until_it_answers(f"http://127.0.0.1:{free_port()}/api/health", process)
    assert capfd.readouterr().err.count("it is waited for") > 3


def test_where_another_server_is_named_nothing_is_changed(known):
    with temporary_settings({PREFECT_API_URL: "http://elsewhere:4200/api"}):
        protect_embedded_server()
    assert not known
