"""The devices of a run on this machine, while other runs of its home are active."""

from types import SimpleNamespace

import pytest

from ringmaster.flows.batch import context
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.execution.leases import leases_of


def gpus(number):
    devices = tuple(
        Device(kind="gpu", index=n, name="H", memory_bytes=1, cores=(), uuid=f"GPU-{n}") for n in range(number)
    )
    return Cluster(nodes=(Node(name="n", devices=devices),))


@pytest.mark.parametrize(
    ("wanted", "held", "chosen"),
    [(1, [], [0]), (1, [0], [1]), (2, [1], [0, 2]), (2, [0, 1], [0, 2]), (3, [0], [0, 1, 2])],
)
def test_gpus_that_no_other_run_holds_are_chosen(tmp_path, monkeypatch, wanted, held, chosen):
    monkeypatch.setattr(context, "detect", lambda devices: gpus(3 if devices["gpu"] == "all" else devices["gpu"]))
    assert leases_of(tmp_path, gpus(3)).take([f"n:gpu:{n}" for n in held], holder="batch other")
    cluster = context._cluster(SimpleNamespace(devices={"gpu": wanted}), tmp_path)
    assert [device.index for device in cluster.devices] == chosen
