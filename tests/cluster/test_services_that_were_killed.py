"""A pool whose processes are killed, as in a power cut, and a copy of its home: commands know what is alive."""

import json
import shutil
import signal

import pytest

from ringmaster.flows.services.pool_processes import ServiceStatus
from tests.cluster.waiting import until
from tests.pool_home import Home

NAMES = ["prefect", "mlflow", "metrics", "deployments", "controller", "worker"]
pytestmark = pytest.mark.timeout(1200)  # creating databases takes long on a busy machine


@pytest.fixture(scope="module")
def home(on_sqlite):
    """A home whose pool is up, and has trained a batch."""
    home, done = on_sqlite
    assert done.returncode == 0, done.stderr
    home.run_batch()
    return home


def kill(home, processes):
    for process in processes:
        process.signal(signal.SIGKILL)
    for process in processes:
        assert process.wait(120)


def test_a_copied_home_leaves_the_pool_of_the_original_alone(home, tmp_path):
    copy = Home(tmp_path / "copy")
    shutil.copytree(home.folder, copy.folder, symlinks=True)
    before = home.states()
    status = copy.ringmaster("status")
    assert status.returncode == 1
    assert f"{copy.folder} is a copy of {home.folder}" in status.stderr
    for _ in range(2):
        assert copy.down().returncode == 0
    assert home.states() == before
    assert all(state.lives() for name, state in before.items() if name != "deployments")
    assert copy.ringmaster("status").returncode == 0


def test_what_was_killed_with_its_supervisor_is_named_and_started_by_up(home):
    before = home.states()
    kill(home, [home.files.supervisor(), before["mlflow"].process])
    show = home.ringmaster("lineage", "show", "night.vit")
    assert show.returncode == 1
    assert f"mlflow (process {before['mlflow'].pid}) has ended" in show.stderr
    assert "To fix: `ringmaster up`" in show.stderr
    assert home.up().returncode == 0
    after = home.states()
    assert after["mlflow"].pid != before["mlflow"].pid and after["mlflow"].status == ServiceStatus.UP
    assert {after[name].pid == before[name].pid for name in ("prefect", "controller", "worker")} == {True}
    assert home.ringmaster("lineage", "show", "night.vit").returncode == 0


def test_after_a_power_cut_the_state_is_told_the_records_are_read_and_up_starts_all_of_it(home):
    while processes := home.processes():  # some start others
        kill(home, processes)
    status = home.ringmaster("status", "--json")
    assert status.returncode == 1
    assert "it ended without `ringmaster down`" in status.stderr and "To fix: `ringmaster up`" in status.stderr
    assert {(row["job"], row["status"]) for row in json.loads(status.stdout)} == {("vit", "done")}
    show = home.ringmaster("lineage", "show", "night.vit")
    assert show.returncode == 0, show.stderr
    assert "Traceback" not in show.stderr
    again = home.up()
    assert again.returncode == 0, again.stderr
    assert sorted(line.split()[0] for line in again.stderr.splitlines() if " up after " in line) == sorted(NAMES)
    until(
        "all of it is up", lambda: {s.status for s in home.states().values()} <= {ServiceStatus.UP, ServiceStatus.DONE}
    )
    assert home.ringmaster("status").returncode == 0


def test_after_a_power_cut_down_ends_nothing_and_a_batch_trains_without_a_pool(home):
    while processes := home.processes():
        kill(home, processes)
    assert home.run_batch()["model_uri"] == "models:/night.vit/2"
    for _ in range(2):
        assert home.down().returncode == 0
    assert home.ringmaster("status").returncode == 0
