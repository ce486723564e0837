"""The engine that `ringmaster up` configures: its options, its faults, and the services that it adds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.codec import from_json
from ringmaster.errors import InputError
from ringmaster.features.ray.ray_engine import RayOptions
from ringmaster.features.slurm.slurm_engine import SlurmOptions
from ringmaster.flows import settings
from ringmaster.flows.services.service_definitions import PoolOptions, compose, databases, engine_environment
from ringmaster.tasks.planning.node_prices import NodePrices
from ringmaster.tasks.pool.engines import EngineOptions, NodeDeployment, WorkPoolOptions, engine_options
from ringmaster.tasks.pool.node_scaler import ElasticityOptions

HOME = Path("/srv/ringmaster")
WORK_POOL = WorkPoolOptions(work_pool="gpus", max_nodes=4, idle_s=60.0, devices="cpu:2")


@pytest.fixture
def options(tmp_path):
    return PoolOptions(
        home=tmp_path,
        databases=databases("postgresql://u:p@127.0.0.1/x", home=tmp_path),
        password="correct horse 100% battery",
        worker=False,
    )


def test_machines_of_ones_own_are_the_default(options):
    assert EngineOptions().faults(has_server=False) == []
    assert engine_environment(EngineOptions(), home=HOME) == {}
    assert "flows" not in {service.name for service in compose(options)}


def test_an_engine_that_lends_nodes_needs_a_process_for_flows_and_a_deployment_of_nodes(options):
    services = {service.name: service for service in compose(replace(options, engine=WORK_POOL))}
    assert list(services) == ["prefect", "mlflow", "metrics", "deployments", "controller", "flows"]
    deployment = from_json(NodeDeployment, json.loads(services["deployments"].command[-1]))
    assert deployment == NodeDeployment(work_pool="gpus", work_pool_type="process", devices="cpu:2")


def test_the_controller_reads_the_options_from_its_environment(options, monkeypatch):
    services = {service.name: service for service in compose(replace(options, engine=WORK_POOL))}
    for name, value in engine_environment(WORK_POOL, home=HOME).items():
        assert services["controller"].environment[name] == value
        monkeypatch.setenv(name, value)
    assert settings.elasticity() == ElasticityOptions(max_nodes=4, idle_s=60.0)
    assert settings.engine(default="workers") == "work-pool"


def test_the_worker_of_slurm_asks_for_requested_nodes_often(options, monkeypatch):
    def seconds():
        services = {service.name: service for service in compose(replace(options, engine=SlurmOptions()))}
        return services["slurm"].environment["PREFECT_WORKER_QUERY_SECONDS"]

    monkeypatch.delenv("PREFECT_WORKER_QUERY_SECONDS", raising=False)
    assert float(seconds()) <= 3, "each node comes later by this"
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "7")
    assert seconds() == "7"


def test_a_ray_cluster_of_this_machine_alone_is_a_service_that_asks_for_a_token(options):
    ray = replace(options, engine=RayOptions(devices="cpu:1", port=7001))
    services = {service.name: service for service in compose(ray)}
    assert list(services) == ["prefect", "mlflow", "metrics", "deployments", "ray", "controller", "flows"]
    environment = services["controller"].environment
    assert environment["RINGMASTER_RAY_ADDRESS"] == "127.0.0.1:7001"
    assert environment["RINGMASTER_RAY_DEVICES"] == "cpu:1"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "7001" in services["ray"].command
    assert RayOptions().faults(has_server=False) == [], "SQLite will do on one machine"


def test_an_existing_ray_cluster_is_used_as_it_is(options):
    ray = RayOptions(address="10.0.0.5:6379")
    services = {service.name: service for service in compose(replace(options, engine=ray))}
    assert "ray" not in services
    assert services["controller"].environment["RINGMASTER_RAY_ADDRESS"] == "10.0.0.5:6379"
    assert "RAY_AUTH_MODE" not in services["controller"].environment


def test_limits_that_are_no_numbers_are_refused(monkeypatch):
    monkeypatch.setenv(settings.MAX_NODES, "many")
    with pytest.raises(InputError, match="RINGMASTER_MAX_NODES=many"):
        settings.elasticity()


def test_prices_of_nodes_reach_the_controller(monkeypatch):
    asked = RayOptions(max_nodes=4, node_price=2.5, hour_worth=40.0)
    for name, value in engine_environment(asked, home=HOME).items():
        monkeypatch.setenv(name, value)
    assert settings.elasticity().prices == NodePrices(per_node_hour=2.5, per_hour_earlier=40.0)
    monkeypatch.setenv(settings.NODE_PRICES, "2.5")
    with pytest.raises(InputError, match=r"RINGMASTER_NODE_PRICES=2\.5 is"):
        settings.elasticity()


@pytest.mark.parametrize(
    "name, options, faults",
    [
        ("slrum", {}, ["slrum", "--database"]),
        ("local", {}, ["without a pool", "--database"]),
        ("work-pool", {}, ["--work-pool NAME", "--database"]),
        ("ray", {"address": "10.0.0.5:6379"}, ["--database"]),
        ("workers", {"address": "10.0.0.5:6379"}, ["--address is of --engine ray, not of workers"]),
        ("workers", {"work_pool_template": Path("/no/such/file")}, ["--work-pool-template /no/such/file"]),
        ("workers", {"work_pool": "gpus"}, ["--work-pool is of --engine work-pool"]),
        ("workers", {"partition": "gpu", "gres": "gpu:8"}, ["--partition, --gres is of --engine slurm"]),
        ("ray", {"hour_worth": 40.0, "budget": 300.0}, ["--hour-worth, --budget needs the price"]),
        ("workers", {"node_price": 2.5}, ["--node-price is of engines that lend nodes"]),
        ("workers", {"sbatch_options": ["--account=ml"]}, ["--sbatch is of --engine slurm"]),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(name, options, faults):
    found = engine_options(name, options).faults(has_server=False)
    assert len(found) == len(faults)
    assert all(part in fault for part, fault in zip(faults, found, strict=True))
