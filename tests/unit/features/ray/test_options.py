import pytest

from ringmaster.features.ray import ADDRESS, DEVICES
from ringmaster.features.ray.ray_engine import (
    RayOptions,
    namespace_of,
    node_environment,
    resources,
)

GPU_NODE = {"Alive": True, "Resources": {"CPU": 32.0, "GPU": 8.0}}
SMALL_NODE = {"Alive": True, "Resources": {"CPU": 8.0}}
DEAD_NODE = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 16.0}}


@pytest.mark.parametrize(
    ("devices", "nodes", "wanted"),
    [
        ("gpu:2", [], {"GPU": 2.0, "CPU": 0.0}),
        ("cpu:3", [], {"CPU": 3.0}),
        ("auto", [SMALL_NODE, GPU_NODE, DEAD_NODE], {"GPU": 8.0, "CPU": 0.0}),
        ("gpu:all", [SMALL_NODE, GPU_NODE], {"GPU": 8.0, "CPU": 0.0}),
        ("auto", [SMALL_NODE, DEAD_NODE], {"CPU": 8.0}),
        ("gpu:all", [SMALL_NODE], None),
        ("auto", [], None),
    ],
)
def test_what_is_asked_of_ray_for_a_node(devices, nodes, wanted):
    assert resources(devices, nodes) == wanted


@pytest.mark.parametrize("devices", ["gpu", "gpu:0", "tpu:4", "cpu:all", "8"])
def test_devices_that_cannot_be_understood_are_refused(devices):
    with pytest.raises(ValueError, match="To fix: auto, cpu:N, gpu:N or gpu:all"):
        RayOptions.of_environment({DEVICES: devices})


def test_pools_have_namespaces_of_their_own_that_do_not_depend_on_a_password():
    one = namespace_of("postgresql://ringmaster:secret@db:5432/one")
    assert one == namespace_of("postgresql://ringmaster:changed@db:5432/one")
    assert one != namespace_of("postgresql://ringmaster:secret@db:5432/two")


def test_nodes_get_what_they_need_to_reach_the_pool_and_no_more():
    pool = {"RINGMASTER_DATABASE": "sqlite:///x", "PREFECT_API_URL": "http://x/api", "AWS_ACCESS_KEY_ID": "x"}
    own = {
        ADDRESS: "auto",
        "RINGMASTER_ENGINE": "ray",
        "RINGMASTER_NODE": "here",
        "PATH": "/bin",
        "RAY_AUTH_TOKEN": "x",
    }
    assert node_environment(pool | own) == pool
