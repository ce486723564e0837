"""`ringmaster up` and `down`: starts a pool on SQLite, and leaves nothing behind."""

import json
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import sqlalchemy

from ringmaster.flows.deployments import AUTOMATION, SUBJECTS
from ringmaster.flows.services.pool_processes import ServiceStatus
from tests.attacks import UNAUTHORIZED, expect_closed_mlflow, expect_closed_prefect, open_to_others, send
from tests.cluster.waiting import until
from tests.pool_home import Home

NAMES = ["prefect", "mlflow", "metrics", "deployments", "controller", "worker"]
DOWN = NAMES[::-1]  # the order in which services end
pytestmark = pytest.mark.timeout(1200)  # creating databases takes long on a busy machine


def test_up_brings_a_pool_and_says_where_it_is(on_sqlite):
    home, done = on_sqlite
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["prefect"] == f"http://127.0.0.1:{home.ports[0]}"
    assert sorted(line.split()[0] for line in done.stderr.splitlines() if " up after " in line) == sorted(NAMES)
    assert "devices of kind" in done.stderr
    assert (home.folder / "pool.json").stat().st_mode & 0o777 == 0o600
    assert home.address().prefect_api == f"{said['prefect']}/api"
    assert said["metrics"] == home.address().metrics_url == f"http://127.0.0.1:{home.port_metrics}/metrics"


def test_the_work_pool_and_the_deployments_are_there(on_sqlite):
    home, _ = on_sqlite
    api = home.address().prefect_api
    assert home.ask(f"{api}/work_pools/ringmaster")[1]["type"] == "process"
    _, deployments = home.ask(f"{api}/deployments/filter", body={})
    assert {"train-batch", "sweep", "retrain-daily", "z-internal-segment"} <= {each["name"] for each in deployments}
    assert {each["work_pool_name"] for each in deployments} == {"ringmaster"}
    _, automations = home.ask(f"{api}/automations/filter", body={})
    assert {each["name"] for each in automations} == {AUTOMATION, *SUBJECTS}


@pytest.mark.xfail(
    sqlalchemy.__version__ >= "2.1", reason="Prefect's scheduler fails with SQLAlchemy 2.1 (bulk DML)", strict=True
)
def test_retraining_is_scheduled_once_a_file_is_named_and_stays_so(on_sqlite):
    home, _ = on_sqlite
    api = home.address().prefect_api

    def retraining():
        return home.ask(f"{api}/deployments/name/retrain-daily/retrain-daily")[1]

    before = retraining()
    (schedule,) = before["schedules"]
    assert not schedule["active"], "an example is not trained every night"
    mine = {"file": "/srv/mine.yaml"}
    one = f"{api}/deployments/{before['id']}"
    assert home.ask(one, method="PATCH", body={"parameters": mine})[0] == 204
    assert home.ask(f"{one}/schedules/{schedule['id']}", method="PATCH", body={"active": True})[0] == 204
    body = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}, "flows": {"name": {"any_": ["retrain-daily"]}}}
    until("Prefect has scheduled it", lambda: home.ask(f"{api}/flow_runs/count", body=body)[1] > 0)
    environment = {**home.environment, **home.address().environment()}
    subprocess.run(
        [sys.executable, "-m", "ringmaster.flows.deployments"], env=environment, check=True, capture_output=True
    )
    after = retraining()
    assert (after["parameters"], [each["active"] for each in after["schedules"]]) == (mine, [True])


def test_up_twice_says_what_runs_and_starts_nothing(on_sqlite):
    home, _ = on_sqlite
    # Compares services, not all processes: a worker starts further processes at any time.
    supervisor, before = home.files.supervisor(), home.states()
    again = home.up()
    assert again.returncode == 0
    told = [words for line in again.stderr.splitlines() if (words := line.split()[:2]) and words[0] in NAMES]
    assert told == [[name, "done" if name == "deployments" else "up"] for name in NAMES]
    assert supervisor is not None and home.files.supervisor() == supervisor
    assert home.states() == before


def test_a_server_that_dies_is_started_again(on_sqlite):
    home, _ = on_sqlite
    first = home.states()["mlflow"]
    first.process.signal(signal.SIGKILL)
    until(
        "MLflow is up again", lambda: (s := home.states()["mlflow"]).status == ServiceStatus.UP and s.num_restarts > 0
    )
    assert home.states()["mlflow"].pid != first.pid
    status, _ = home.ask(f"{home.address().mlflow_uri}/api/2.0/mlflow/experiments/get?experiment_id=0")
    assert status == 200


def test_a_pool_outlives_its_supervisor_and_the_next_up_takes_it_over(on_sqlite):
    home, _ = on_sqlite
    before = {name: state.pid for name, state in home.states().items()}
    home.files.supervisor().signal(signal.SIGKILL)
    until("the supervisor has ended", lambda: home.files.supervisor() is None)
    again = home.up()
    assert again.returncode == 0, again.stderr
    assert "taking over" in again.stderr
    assert {name: state.pid for name, state in home.states().items()} == before


def test_a_web_page_and_other_users_of_the_machine_are_kept_out(on_sqlite):
    home, _ = on_sqlite
    expect_closed_prefect(home.address().prefect_api, user=home.user)
    expect_closed_mlflow(home.address().mlflow_uri, user=home.user)


def test_metrics_of_the_pool_are_for_who_knows_the_password(on_sqlite):
    home, _ = on_sqlite
    url = home.address().metrics_url
    assert send(url)[0] == send(url, user="ringmaster:wrong wrong")[0] == UNAUTHORIZED
    assert send(url, user=home.user)[0] == 200
    assert send(url, user=home.user, headers={"Host": "evil.example"})[0] == 400


def test_a_report_about_a_pool_that_is_up_holds_no_password(on_sqlite, tmp_path):
    home, _ = on_sqlite
    done = home.ringmaster("diagnose", "-o", str(tmp_path / "report.tar.gz"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failures"] == {}
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        texts = {Path(m.name).name: archive.extractfile(m).read().decode() for m in archive.getmembers()}
    assert not [name for name, text in texts.items() if home.address().password in text]
    assert {answer["status"] for answer in json.loads(texts["servers.json"]).values()} == {200}
    assert [each["status"] for each in json.loads(texts["processes.json"])["services"]] == [
        "done" if name == "deployments" else "up" for name in NAMES
    ]


def test_up_says_where_the_password_is_and_does_not_print_it(on_sqlite):
    home, done = on_sqlite
    file = Path(json.loads(done.stdout)["password_file"])
    assert file.read_text().strip() == home.address().password
    assert f"cat {file}" in done.stderr
    everything = [done.stdout, done.stderr, *(log.read_text() for log in (home.folder / "pool").glob("*.log"))]
    everything += home.command_lines()
    assert not any(home.address().password in text for text in everything)


def test_all_that_is_written_is_its_owners_alone(on_sqlite):
    home, _ = on_sqlite
    assert open_to_others(home.folder) == []


def test_all_processes_log_json_where_it_was_chosen(on_sqlite):
    """`deployments` and the first lines of MLflow's launcher are not ours: docs/operations.md says so."""
    home, _ = on_sqlite
    roles = {"controller": "controller", "worker": "node", "supervisor": "supervisor", "mlflow": "mlflow"}
    for name, role in roles.items():
        lines = home.files.log(name).read_text().splitlines()
        found = [json.loads(line) for line in lines if name != "mlflow" or line.startswith("{")]
        assert found, name
        assert {line["role"] for line in found} == {role}
    port = urlsplit(home.address().prefect_api).port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"no request of HTTP\r\n\r\n")
        assert b"400" in connection.recv(100)
    for name in ("prefect", "metrics"):  # the other one may have nothing to say
        found = [json.loads(line) for line in home.files.log(name).read_text().splitlines()]
        assert {line["role"] for line in found} <= {name}
        assert name != "prefect" or "Invalid HTTP request received." in {line["message"] for line in found}


@pytest.fixture(scope="module")
def of_pool(on_sqlite):
    """The job of a batch that the pool has trained before it goes down."""
    return on_sqlite[0].run_batch()


def test_down_ends_all_of_it_in_order(on_sqlite, of_pool):
    home, _ = on_sqlite
    assert home.processes()
    done = home.down()
    assert done.returncode == 0, done.stderr
    told = [line.replace(",", "").split()[:2] for line in done.stderr.splitlines()]
    assert list(dict.fromkeys(name for name, *_ in told if name in NAMES)) == DOWN
    assert [name for name, *words in told if words == ["ended"]] == DOWN
    home.wait_until_nobody_is_left()
    assert not (home.folder / "pool.json").exists()
    assert home.down().returncode == 0  # a second `down` is harmless


def test_after_down_a_batch_is_recorded_beside_those_of_the_pool_whose_weights_stay(on_sqlite, of_pool):
    home, _ = on_sqlite
    assert of_pool["model_uri"] == "models:/night.vit/1"
    folder = Path(of_pool["model_dir"])
    plain = (folder / "model.safetensors").read_bytes()
    after = home.run_batch()
    assert after["model_uri"] == "models:/night.vit/2"
    assert (Path(after["model_dir"]) / "model.safetensors").exists()
    assert (folder / "model.safetensors").read_bytes() == plain, "a folder that was named stays readable"
    done = home.ringmaster("lineage", "restore", "night.vit/1", str(home.folder / "restored"))
    assert done.returncode == 0, done.stderr
    assert (home.folder / "restored" / "model.safetensors").read_bytes() == plain


def test_a_port_that_is_taken_is_named_and_nothing_is_started(tmp_path):
    home = Home(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", home.ports[1]))
        taken.listen()
        done = home.up()
    assert done.returncode == 2
    assert f"port {home.ports[1]} of 127.0.0.1 cannot be used for mlflow" in done.stderr
    assert home.processes() == []
    assert not (tmp_path / "pool").exists()


def test_a_damaged_database_is_named_with_a_remedy_before_anything_starts(tmp_path):
    home = Home(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database, and never was one")
    done = home.up("--no-worker")
    assert done.returncode == 2
    assert f"{tmp_path / 'mlflow.db'}" in done.stderr
    assert "To fix: " in done.stderr
    assert home.processes() == []
