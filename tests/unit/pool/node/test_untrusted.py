"""What an untrusted node needs to serve, and which jobs it may get."""

import pytest

from ringmaster.errors import InputError
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.flows.pool import own_node
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.job_rules import usable_options
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import UNTRUSTED
from tests.fake_engine import cpu_devices
from tests.unit.execution.fakes import job, profile


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def volunteer(name="v"):
    return Cluster(nodes=(Node(name=name, devices=cpu_devices(1)),)).untrusted()


def test_an_untrusted_node_serves_where_it_computes_the_bits_of_trusted_ones(database, monkeypatch):
    monkeypatch.setattr(own_node, "calibration_of", lambda cluster: "own bits")
    cluster = volunteer()
    with pytest.raises(InputError, match="ringmaster pool calibrate"):
        own_node.check_calibration(cluster, database)
    kind = cluster.device_kind().removesuffix(UNTRUSTED)
    NodeRegistry(database).set_reference(kind, "other bits")
    with pytest.raises(InputError, match="computes other bits"):
        own_node.check_calibration(cluster, database)
    NodeRegistry(database).set_reference(kind, "own bits")
    own_node.check_calibration(cluster, database)


def test_an_expelled_node_has_no_device_that_may_be_used(database):
    registry = NodeRegistry(database)
    devices = volunteer().devices
    registry.register(NodeRecord(name="v", incarnation="1", address="", devices=devices))
    registry.expel("v", why="it lied")
    registry.register(NodeRecord(name="v", incarnation="2", address="", devices=devices))
    (node,) = registry.all()
    assert node.health == {"0": "it lied"}
    assert not node.devices[0].is_trusted


def test_a_profile_for_any_device_holds_for_trusted_ones_where_there_are_others():
    cluster = Cluster(nodes=(Node(name="t", devices=cpu_devices(1)), *volunteer().nodes))
    problem = planning_problem([job("a")], {"a": [profile()]}, cluster, name="b")
    (option,) = problem.jobs[0].options
    assert [option.runs_on(node) for node in problem.nodes] == [True, False]


def test_a_job_is_trained_by_untrusted_nodes_only_where_trusted_ones_can_repeat_it():
    def known(technique, kind):
        return Profile(technique=technique, num_devices=1, num_ranks=1, step_s=1.0, peak_bytes=1, device_type=kind)

    single, volunteered = known("single", "cpu"), known("single", "cpu" + UNTRUSTED)
    alone, other_kind = known("fsdp", "cpu" + UNTRUSTED), known("single", "gpu" + UNTRUSTED)
    every = [single, volunteered, alone, other_kind]
    assert usable_options(job("a"), every) == (single,)
    features = (Untrusted(allow_untrusted=True),)
    assert usable_options(job("a", features=features), every) == (single, volunteered)
    assert usable_options(job("a", features=features, exact=True), every) == (single, volunteered, alone)
