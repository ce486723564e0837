"""Whether the pool that a home names runs, and is this home's: after a power cut, a reboot, a copy of the home."""

import json
import os
import platform
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ringmaster.codec import to_json
from ringmaster.errors import InputError, LedgerError, ServerStartError
from ringmaster.flows import cli, settings
from ringmaster.flows.batch import embedded_prefect
from ringmaster.flows.pool import batch_requests
from ringmaster.flows.pool.batch_requests import database_of, pool_address
from ringmaster.flows.services import up_and_down
from ringmaster.flows.services.pool_processes import ServiceStatus
from ringmaster.flows.services.service_definitions import PoolOptions, databases
from ringmaster.flows.services.service_files import ServiceFiles
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobStatus, Journal
from tests.ports import free_port
from tests.unit.pool.bench import submission
from tests.unit.services.pool_home import OTHER_BOOT


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RINGMASTER_", "PREFECT_", "MLFLOW_")):
            monkeypatch.delenv(name)


def expect_ended(capsys):
    assert settings.checked_pool() is None and settings.checked_pool() is None
    said = capsys.readouterr().err
    assert said.count("it ended without `ringmaster down`") == 1, "it is told once"
    assert "dead: supervisor, prefect, mlflow, controller" in said and "To fix: `ringmaster up`" in said


def test_a_pool_whose_processes_live_is_used(home, capsys):
    assert settings.checked_pool() == home.address
    assert settings.pool_fault() is None and settings.pool_lacks() == []
    assert capsys.readouterr().err == ""


def test_one_that_was_killed_is_told_once_and_commands_go_on_without_it(home, capsys):
    home.kill()
    expect_ended(capsys)
    assert settings.tracking_uri(home.folder).startswith("sqlite:")
    assert settings.recorded_pool() == home.address


def test_other_processes_that_got_the_numbers_do_not_count(home, capsys):
    born = {name: replace(process, born=f"{process.born}0") for name, process in home.processes.items()}
    home.write(**born)
    expect_ended(capsys)


def test_processes_of_another_boot_of_this_machine_do_not_count(home, capsys):
    ticks = {name: process.born.partition(":")[2] for name, process in home.processes.items()}
    home.write(**{name: replace(p, born=f"{OTHER_BOOT}:{ticks[name]}") for name, p in home.processes.items()})
    expect_ended(capsys)


@pytest.mark.parametrize("place", ["machine", "container"])
def test_of_processes_that_cannot_be_seen_from_here_nothing_is_claimed(home, place):
    home.kill()
    home.move(place)
    with home.files.alone():  # the lock of a supervisor, which is seen from other containers
        assert settings.checked_pool() == home.address
        assert settings.pool_fault() is None
    (lack,) = settings.pool_lacks() if place == "machine" else [settings.pool_fault()]
    assert ("its servers do not answer here" if place == "machine" else "it ended without `ringmaster down`") in lack


def test_files_of_an_earlier_release_are_read(home, capsys):
    process = home.processes["supervisor"]
    (home.files.folder / "supervisor.json").write_text(json.dumps({"pid": process.pid, "born": process.born}))
    assert settings.checked_pool() == home.address
    home.kill()
    expect_ended(capsys)


def test_a_pool_that_the_environment_names_is_used(home, monkeypatch):
    home.kill()
    for name, value in home.address.environment().items():
        monkeypatch.setenv(name, value)
    assert settings.checked_pool() == home.address


def test_where_the_records_are_on_a_server_the_command_ends(home):
    home.name(replace(home.address, database="postgresql://db/ringmaster"))
    home.kill()
    with pytest.raises(InputError, match="it ended without `ringmaster down`"):
        settings.checked_pool()


def test_requests_to_a_pool_that_has_ended_are_refused_with_that_reason(home):
    home.kill()
    with pytest.raises(InputError, match="it ended without `ringmaster down`"):
        pool_address()
    with pytest.raises(InputError, match="it ended without `ringmaster down`"), database_of("night"):
        pass


@pytest.fixture
def copy(home, tmp_path, monkeypatch):
    """A copy of a home whose pool runs."""
    shutil.copytree(home.folder, tmp_path / "copy", symlinks=True)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "copy"))
    return tmp_path / "copy"


def test_a_copied_home_does_not_use_the_pool_of_the_original(home, copy, capsys):
    assert settings.checked_pool() is None and settings.recorded_pool() is None
    said = capsys.readouterr().err
    assert f"{copy} is a copy of {home.folder}" in said and f"RINGMASTER_HOME={home.folder} names that pool" in said
    files = ServiceFiles(copy / "pool")
    assert files.supervisor() is None and files.states() == ()
    assert not up_and_down.is_up(copy)


def test_down_of_a_copied_home_ends_nothing(home, copy, capsys):
    for _ in range(2):
        assert up_and_down.stop(copy)
        assert f"`RINGMASTER_HOME={home.folder} ringmaster down` ends that one" in capsys.readouterr().err
    assert not settings.pool_file(copy).exists()
    assert all(process.lives() for process in home.processes.values())
    assert settings.pool_file(home.folder).exists()


def test_another_path_to_the_home_and_a_home_that_was_moved_are_no_copies(home, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(home.folder)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "link"))
    assert settings.checked_pool() == home.address
    home.folder.rename(tmp_path / "moved")
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "moved"))
    assert settings.checked_pool() == home.address


def test_what_nothing_starts_again_is_told_with_what_to_do(home, capsys):
    home.kill("supervisor", "mlflow")
    assert settings.checked_pool() == home.address
    said = capsys.readouterr().err.replace("\n", " ")
    pids = {name: home.processes[name].pid for name in ("supervisor", "mlflow")}
    assert f"the supervisor (process {pids['supervisor']}) has ended; mlflow (process {pids['mlflow']}) has" in said
    assert "To fix: `ringmaster up`" in said


@pytest.mark.parametrize("fault", ["has ended", "is stopped (SIGSTOP)"])
def test_records_are_not_asked_of_an_mlflow_that_cannot_answer(home, fault):
    home.kill("mlflow") if fault == "has ended" else home.stop("mlflow")
    with pytest.raises(LedgerError) as raised:
        settings.ledger(home.folder)
    assert f"mlflow (process {home.processes['mlflow'].pid}) {fault}" in str(raised.value)
    assert settings.pool_lacks() == [
        f"mlflow (process {home.processes['mlflow'].pid}) {fault}; the supervisor starts it again"
    ]
    assert settings.processes_behind("http://elsewhere:5000", home.folder) is None


def test_a_prefect_that_nothing_starts_again_is_not_waited_for(home):
    home.kill("supervisor", "prefect")
    with pytest.raises(ServerStartError, match=r"prefect .* has ended. To fix: `ringmaster up`"):
        embedded_prefect._ask_pool(home.address.prefect_api)


def test_it_is_up_only_while_all_of_it_is(home, start):
    assert up_and_down.is_up(home.folder)
    home.kill("prefect")
    assert not up_and_down.is_up(home.folder)
    home.write(prefect=start())
    assert up_and_down.is_up(home.folder)
    home.stop("supervisor")
    assert not up_and_down.is_up(home.folder)


def test_status_says_that_the_pool_has_ended_and_what_it_left(home):
    database = Database(home.address.database)
    Submissions(database).submit(submission())
    key = Submissions(database).names()[0][0]
    Journal(database, batch=key).write_job("a", status=JobStatus.RUNNING, step=3)
    database.close()
    home.kill()
    done = CliRunner().invoke(cli.app, ["status", "--json"])
    assert done.exit_code == 1
    assert "it ended without `ringmaster down`" in done.stderr
    assert {row["job"]: row["status"] for row in json.loads(done.stdout)} == {"a": "interrupted", "b": "waiting"}


def test_watch_gives_up_where_the_database_of_a_pool_is_away(home, monkeypatch):
    monkeypatch.setattr(batch_requests, "DATABASE_TIMEOUT_S", 0.1)
    home.name(replace(home.address, database=f"postgresql://ringmaster@127.0.0.1:{free_port()}/ringmaster"))
    done = CliRunner().invoke(cli.app, ["watch", "--once"])
    assert isinstance(done.exception, InputError)
    assert "the pool's database does not answer" in str(done.exception)


def test_down_of_a_pool_that_was_killed_is_harmless(home):
    home.kill()
    assert up_and_down.stop(home.folder) and up_and_down.stop(home.folder)
    assert not settings.pool_file(home.folder).exists()
    assert settings.pool_fault() is None


def test_a_pool_that_runs_in_another_container_is_neither_started_again_nor_said_to_be_down(home, capsys):
    home.kill()
    home.move("container")
    options = PoolOptions(home=home.folder, databases=databases(None, home=home.folder), password="x" * 12)
    with home.files.alone():
        assert not up_and_down.stop(home.folder)
        assert f"runs in a container named {platform.node()}" in capsys.readouterr().err
        with pytest.raises(InputError, match="runs already, in a container named"):
            up_and_down.start(options, database_server=None)
        assert settings.pool_file(home.folder).exists()
    assert up_and_down.stop(home.folder), "its supervisor has ended"


def test_a_pool_that_is_being_started_is_reported_with_who_starts_it(home, capsys):
    settings.pool_file(home.folder).unlink()
    states = [replace(s, status=ServiceStatus.STARTING) if s.name == "mlflow" else s for s in home.files.states()]
    content = {"by": to_json(home.processes["supervisor"]), "services": to_json(states)}
    (home.files.folder / "state.json").write_text(json.dumps(content))
    who = f"is being started by process {os.getpid()}"
    options = PoolOptions(home=home.folder, databases=databases(None, home=home.folder), password="x" * 12)
    with home.files.alone("up"):
        done = CliRunner().invoke(cli.app, ["status"])
        assert done.exit_code == 1 and who in done.stderr
        pid = home.processes["mlflow"].pid
        assert f"Up: prefect, controller; not yet: mlflow (process {pid}) is starting" in done.stderr
        with pytest.raises(InputError, match=who):
            pool_address()
        with pytest.raises(InputError, match=f"another `ringmaster up`, process {os.getpid()}"):
            up_and_down.start(options, database_server=None)
        assert settings.checked_pool() is None and who in capsys.readouterr().err
        home.kill("supervisor")
        assert f"{who}. Up: nothing. To fix" in settings.pool_fault()
    assert settings.pool_fault() is None
