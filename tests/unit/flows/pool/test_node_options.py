from pathlib import Path

from ringmaster.flows.pool.node_options import NodeOptions
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.cluster import Cluster, Device, Node


def test_two_nodes_with_different_gpus_of_one_machine_lease_different_devices():
    """An engine such as Ray may lend a machine's GPUs in parts, by CUDA_VISIBLE_DEVICES."""

    def leased(*indices: int) -> set[str]:
        gpus = tuple(Device(kind="gpu", index=index, name="H", memory_bytes=1, cores=()) for index in indices)
        cluster = Cluster(nodes=(Node(name="machine", devices=gpus),))
        pool = PoolAddress(database="sqlite:///x", prefect_api="http://x/api", mlflow_uri="http://x")
        return {*NodeOptions(home=Path("/home"), pool=pool, name="n", cluster=cluster).lease_names}

    assert leased(0, 1) == {"machine:gpu:0", "machine:gpu:1"}
    assert not leased(0, 1) & leased(2, 3)
