"""The checks of an engine before `ringmaster up` starts anything: fake commands of Slurm, and ports of this machine."""

import json
import socket

import pytest

from ringmaster.errors import InputError
from ringmaster.flows.services import up_and_down
from ringmaster.flows.services.service_definitions import PoolOptions, databases
from ringmaster.tasks.pool.engines import EngineOptions, engine_options
from tests.ports import free_port

SCRIPT = """\
#!/bin/sh
case "$*" in
*partition) echo "PartitionName=batch Default=YES MaxTime=01:00:00 State=UP" ;;
*node) echo "NodeName=n1 Gres=gpu:2 State=IDLE Partitions=batch" ;;
*) echo "$@" > {folder}/asked ;;
esac
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with commands of Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (folder / name).write_text(SCRIPT.format(folder=folder))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def slurm(**options):
    return engine_options("slurm", options)


def ray(**options):
    return engine_options("ray", options)


def test_slurm_is_asked_for_what_the_jobs_of_nodes_will_ask(site, tmp_path):
    engine = slurm(partition="batch", time="1h", gres="gpu:2", sbatch_options=["--account=ml"])
    assert engine.queried_faults(tmp_path) == []
    asked = (site / "asked").read_text().split()
    assert {"--test-only", "--partition=batch", "--time=60", "--gres=gpu:2", "--exclusive"} <= {*asked}
    assert asked[-1] == "--account=ml"


def test_defaults_of_a_template_count_unless_an_option_says_otherwise(site, tmp_path):
    template = tmp_path / "template.json"
    properties = {"partition": {"default": "old"}, "account": {"default": "ml"}, "qos": {"default": None}}
    template.write_text(json.dumps({"variables": {"properties": properties}}))
    (fault,) = slurm(work_pool_template=template).queried_faults(tmp_path)
    assert "--partition old" in fault
    assert slurm(work_pool_template=template, partition="batch").queried_faults(tmp_path) == []
    assert "--account=ml" in (site / "asked").read_text()


def test_gpus_that_nothing_asks_for_are_refused_where_jobs_share_nodes(site, tmp_path):
    assert slurm(devices="gpu:2").queried_faults(tmp_path) == []
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"variables": {"properties": {"exclusive": {"default": False}}}}))
    (fault,) = slurm(devices="gpu:2", work_pool_template=template).queried_faults(tmp_path)
    assert "nothing requests GPUs from Slurm" in fault
    assert slurm(devices="gpu:2", gres="gpu:2", work_pool_template=template).queried_faults(tmp_path) == []


def test_up_refuses_all_faults_at_once_and_starts_nothing(site, tmp_path):
    options = PoolOptions(
        home=tmp_path,
        databases=databases("postgresql://u:p@127.0.0.1/x", home=tmp_path),
        password="short",
        engine=slurm(partition="nope", gres="gpu:3"),
        **{f"port_{name}": port for name, port in zip(("prefect", "mlflow", "metrics"), ports(3), strict=True)},
    )
    with pytest.raises(InputError) as caught:
        up_and_down.start(options, database_server=None)
    assert len(caught.value.faults) == 3
    assert not (tmp_path / "pool").exists()


def test_commands_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (fault,) = slurm(partition="nope").queried_faults(tmp_path)
    assert fault.startswith("sbatch, squeue, scancel, scontrol cannot be found") and "To fix" in fault


def test_a_ray_cluster_that_is_not_there_is_found_before_ray_would_find_it(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ringmaster-ml[ray]'")
    engine = ray(address=f"127.0.0.1:{free_port()}")
    (fault,) = engine.queried_faults(tmp_path)
    assert "nothing answers there: " in fault and "To fix: " in fault
    (fault,) = ray(address=engine.address, devices="tpu:1").queried_faults(tmp_path)
    assert fault.startswith("--node-devices: ")


@pytest.mark.full
def test_a_port_that_is_not_of_ray_is_given_up(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ringmaster-ml[ray]'")
    monkeypatch.setattr("ringmaster.features.ray.ray_engine.ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        engine = ray(address=f"127.0.0.1:{other.getsockname()[1]}")
        (fault,) = engine.queried_faults(tmp_path)
    assert "Ray does not answer" in fault and "To fix: " in fault


def test_other_engines_need_no_questions(tmp_path):
    for engine in (EngineOptions(), ray(), engine_options("work-pool", {"work_pool": "x"})):
        assert engine.queried_faults(tmp_path) == []


def ports(number):
    found = []
    while len(found) < number:
        found.append(free_port(but=found))
    return found
