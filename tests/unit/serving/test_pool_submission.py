"""An endpoint is submitted to a pool as one job under one option, which keeps its devices."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringmaster.errors import InputError
from ringmaster.features.endpoint.server.endpoint_file import load_endpoint_file
from ringmaster.features.endpoint.server.endpoint_server import alone
from ringmaster.features.endpoint.server.pool_gang import devices_of
from ringmaster.features.endpoint.server.pool_submission import submit_endpoint, url_of, wait_until_served
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.pool.active_batches import fault_of
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.techniques.processes.order import Slot
from tests.fake_engine import cpu_devices

POOL = PoolAddress(database="", prefect_api="", mlflow_uri="", metrics_url="http://10.0.0.1:9464/metrics")


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def node(database):
    NodeRegistry(database).register(NodeRecord(name="n1", incarnation="i", address="a", devices=cpu_devices(2)))


def entry_of(tmp_path, **serve):
    base = tmp_path / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    save_file({"w": np.zeros(1)}, base / "model.safetensors")
    file = tmp_path / "mine.yaml"
    bases = [{"name": "tiny", "from_pretrained": str(base)}]
    file.write_text(json.dumps({"name": "mine", "serve": {"bases": bases, **serve}}))
    return load_endpoint_file(file)


def submit(tmp_path, database, **serve):
    return submit_endpoint(entry_of(tmp_path, **serve), database, home=tmp_path / "home")


@pytest.mark.usefixtures("node")
def test_its_one_option_holds_a_device_of_one_kind_and_its_only_step_is_its_life(tmp_path, database):
    endpoint = submit(tmp_path, database, idle_s=30)
    submission = Submissions(database).find(endpoint.batch)
    assert submission is not None and fault_of(submission) is None
    (job,) = submission.jobs
    (profile,) = submission.profiles[job.name]
    assert (job.num_steps, profile.step_s, profile.num_devices, profile.holds_devices) == (1, 30, 1, True)
    assert profile.device_type == cpu_devices(1)[0].device_kind()
    stored = load_endpoint_file(endpoint.folder / "endpoint.yaml")
    assert stored == entry_of(tmp_path, idle_s=30)
    assert (endpoint.folder / "endpoint.yaml").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("node")
def test_while_it_waits_it_is_planned_beyond_every_deadline_that_was_promised(tmp_path, database):
    jobs = [{"id": "a/x", "deadline": 4000.0}, {"id": "a/y"}]
    Journal(database, batch="").write_plan({"problem": {"jobs": jobs}, "plan": {}}, why="test")
    before = submit(tmp_path, database, idle_s=30)
    profiles = Submissions(database).find(before.batch).profiles["mine"]
    assert profiles[0].step_s == 30, "no batch is active, so the plan is an old one"
    Submissions(database).end(before.batch)
    file = tmp_path / "other.yaml"
    file.write_text(
        json.dumps({"name": "other", "serve": {"bases": entry_of(tmp_path).model_dump()["serve"]["bases"]}})
    )
    submit_endpoint(load_endpoint_file(file), database, home=tmp_path / "home")
    after = submit(tmp_path, database, idle_s=30)
    assert Submissions(database).find(after.batch).profiles["mine"][0].step_s == 4000


@pytest.mark.usefixtures("node")
def test_all_that_is_wrong_is_said_at_once(tmp_path, database):
    submit(tmp_path, database)
    with pytest.raises(InputError) as refused:
        submit(tmp_path, database, device="cpu", port=8000)
    text = str(refused.value)
    assert "device" in text and "port" in text and "ringmaster jobs cancel mine" in text


def test_a_pool_without_nodes_is_refused(tmp_path, database):
    with pytest.raises(InputError, match="no trusted node"):
        submit(tmp_path, database)
    assert not (tmp_path / "home").exists()


@pytest.mark.usefixtures("node")
def test_an_endpoint_that_this_machine_serves_is_refused(tmp_path, database):
    folder = tmp_path / "home" / "endpoints" / "mine"
    folder.mkdir(parents=True)
    with alone(folder, "mine"), pytest.raises(InputError, match="served already"):
        submit(tmp_path, database)


@pytest.mark.usefixtures("node")
def test_its_clients_stay_on_the_kind_of_device_that_they_began_on(tmp_path, database):
    folder = tmp_path / "home" / "endpoints" / "mine"
    folder.mkdir(parents=True)
    (folder / "devices.json").write_text(json.dumps({"kind": "NVIDIA H200"}))
    (folder / "server.json").write_text(json.dumps({"url": "http://of.a.killed.server"}))
    endpoint = submit(tmp_path, database)
    assert Submissions(database).find(endpoint.batch).profiles["mine"][0].device_type == "NVIDIA H200"
    assert url_of(folder) is None


@pytest.mark.usefixtures("node")
def test_replicas_are_on_devices_of_one_node(tmp_path, database):
    with pytest.raises(InputError, match="no node has more than 2"):
        submit(tmp_path, database, devices=3)
    endpoint = submit(tmp_path, database, devices=2)
    (profile,) = Submissions(database).find(endpoint.batch).profiles["mine"]
    assert (profile.num_devices, profile.num_nodes, profile.num_ranks) == (2, 1, 1)


def test_a_rank_computes_on_the_devices_of_its_order():
    cores = [Slot(kind="cpu", index=i, cores=(2 * i, 2 * i + 1)) for i in range(2)]
    gpus = [Slot(kind="gpu", index=i, uuid=f"GPU-{i}") for i in (5, 7)]
    assert [each.cores for each in devices_of(cores)] == [(0, 1), (2, 3)]
    assert [each.name for each in devices_of(gpus)] == ["cuda:0", "cuda:1"]


@pytest.mark.usefixtures("node")
def test_it_is_served_once_its_rank_runs_and_its_server_answers(tmp_path, database):
    endpoint, notices = submit(tmp_path, database), []
    journal = Journal(database, batch=endpoint.batch)
    journal.write_job("mine", status=JobStatus.RUNNING)
    write = threading.Timer(0.1, (endpoint.folder / "server.json").write_text, ['{"url": "http://10.0.0.7:1"}'])
    write.start()
    served = wait_until_served(endpoint, database, pool=POOL, notice=notices.append)
    assert served.url == "http://10.0.0.1:9464/endpoints/mine"
    assert served.keys == json.loads((endpoint.folder / "keys.json").read_text())
    elsewhere = replace(POOL, metrics_url="")
    assert wait_until_served(endpoint, database, pool=elsewhere, notice=notices.append).url == "http://10.0.0.7:1"


@pytest.mark.usefixtures("node")
def test_one_that_fails_before_it_answers_says_why(tmp_path, database):
    endpoint = submit(tmp_path, database)
    Journal(database, batch=endpoint.batch).write_job("mine", status=JobStatus.FAILED, message="the base is broken")
    with pytest.raises(InputError, match="mine is failed: the base is broken"):
        wait_until_served(endpoint, database, pool=POOL, notice=print)
