"""The embedded server of a run without a pool: its command, its environment, and who uses it, without starting it."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from ringmaster.errors import InputError, ServerStartError
from ringmaster.flows.batch import embedded_prefect as module
from ringmaster.flows.batch.embedded_prefect import FlowWithServer, embedded_server, has_lasting_server
from ringmaster.flows.caller import Caller
from ringmaster.flows.retrain_daily import retrain_daily
from ringmaster.flows.services import first_processes
from ringmaster.flows.services.first_processes import ServerProcess
from ringmaster.flows.services.serving import ALLOWED_HOSTS
from ringmaster.flows.sweep import sweep
from ringmaster.flows.train_batch import train_batch
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
def without_a_server(monkeypatch):
    """This process as before its first run, with Prefect's settings restored after the test."""
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    refresh_global_settings_context()
    yield
    monkeypatch.undo()
    refresh_global_settings_context()


@pytest.fixture
def answering(monkeypatch, started, without_a_server):
    """Servers that answer at once; as `started`."""
    monkeypatch.setattr(module, "_wait_until_it_answers", lambda server, notice: None)
    return started


def settings_now():
    return PREFECT_API_URL.value(), PREFECT_API_AUTH_STRING.value()


def test_it_asks_for_the_password_that_its_clients_know_and_checks_who_asks(started):
    ServerProcess.start(user=AUTH)
    ((command, options),) = started
    environment = options["env"]
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == environment["PREFECT_API_AUTH_STRING"] == AUTH
    assert "evil" not in environment[ALLOWED_HOSTS] and "127.0.0.1" in environment[ALLOWED_HOSTS].split(",")
    assert "ringmaster.flows.services.prefect_server" in command and "--until-stdin-ends" in command
    assert "secret-word" not in " ".join(command)
    assert options["stdin"] == subprocess.PIPE
    assert options["start_new_session"]


@pytest.mark.parametrize("run", [train_batch, sweep, retrain_daily, sweep.with_options(name="another")])
def test_a_flow_that_is_called_without_a_server_starts_it(run, started, without_a_server):
    with pytest.raises(ServerStartError, match=r"ended with exit code 7.*To fix: run it again"):
        run()
    assert len(started) == 1


def test_all_runs_and_threads_use_one_server_and_later_processes_get_no_password(answering):
    with embedded_server():
        api, user = settings_now()
        assert not has_lasting_server()
    ((command, options),) = answering
    assert api == f"http://127.0.0.1:{command[command.index('--port') + 1]}/api"
    assert options["env"]["PREFECT_SERVER_API_AUTH_STRING"] == user
    with embedded_server(), ThreadPoolExecutor() as threads:
        assert threads.submit(settings_now).result() == (api, user)
    assert len(answering) == 1
    assert not {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING"} & set(os.environ)


def test_a_run_within_settings_of_its_own_uses_the_server_too(answering):
    with temporary_settings({"flows.heartbeat_frequency": None}):
        with embedded_server():
            inside = settings_now()
        assert settings_now() == (None, None)
    assert settings_now() == inside != (None, None)
    assert len(answering) == 1


def test_a_password_that_the_user_has_set_is_kept(answering):
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH}), embedded_server():
        assert PREFECT_API_AUTH_STRING.value() == AUTH
    ((_, options),) = answering
    assert options["env"]["PREFECT_SERVER_API_AUTH_STRING"] == AUTH


def test_a_slow_start_is_told_of_and_given_up_in_the_end(monkeypatch):
    notices = []
    times = iter(range(0, 2000, 20))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    process = SimpleNamespace(poll=lambda: None)
    with pytest.raises(ServerStartError, match=r"for 6.. s .last answer: .*refused.*busy"):
        server = ServerProcess(api=f"http://127.0.0.1:{free_port()}/api", user=AUTH, process=process)
        module._wait_until_it_answers(server, notices.append)
    assert " ".join(notices).count("it is waited for") > 3


def test_where_another_server_is_named_none_is_started(started, monkeypatch):
    monkeypatch.setattr(module, "_check_answer", lambda url: None)
    with temporary_settings({PREFECT_API_URL: "http://elsewhere:4200/api"}):
        with embedded_server():
            assert PREFECT_API_URL.value() == "http://elsewhere:4200/api"
        assert has_lasting_server()
    assert not started


def test_without_a_server_there_is_none_that_lasts(without_a_server):
    assert not has_lasting_server()


def test_a_local_flow_keeps_what_the_flow_has():
    @FlowWithServer.of
    @flow(name="sum", persist_result=False)
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert (add.name, add.description, add.fn(1)) == ("sum", "Adds.", 3)
    assert [*add.parameters.properties] == ["a", "b"]
    other = add.with_options(name="other")
    assert isinstance(other, FlowWithServer) and other.name == "other"


def test_the_server_that_was_started_ahead_is_the_one_that_runs_use(answering, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with embedded_server(Caller(prefect=first_processes.start_prefect())):
        api, _ = settings_now()
    ((command, _),) = answering
    assert api == f"http://127.0.0.1:{command[command.index('--port') + 1]}/api"


def test_no_server_is_started_ahead_where_another_is_named_or_its_database_is_damaged(started, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere:4200/api")
    assert first_processes.start_prefect() is None
    monkeypatch.delenv("PREFECT_API_URL")
    (tmp_path / "prefect.db").write_text("not a database " * 99)
    with pytest.raises(InputError, match=r"Prefect's database .*damaged.*To fix"):
        first_processes.start_prefect()
    assert not started


@pytest.mark.parametrize(
    ("file", "text", "named_by"),
    [
        (".env", "PREFECT_API_URL={url}", r"\.env"),
        ("prefect.toml", '[api]\nurl = "{url}"', r"prefect\.toml"),
        (None, "", "PREFECT_API_URL"),
    ],
)
def test_another_server_that_does_not_answer_is_named(tmp_path, monkeypatch, without_a_server, file, text, named_by):
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    if file is None:
        monkeypatch.setenv("PREFECT_API_URL", url)
    else:
        (tmp_path / file).write_text(text.format(url=url))
    refresh_global_settings_context()
    with pytest.raises(ServerStartError, match=f"at {url}, which {named_by} names, does not answer: .*To fix: start"):
        embedded_server()
