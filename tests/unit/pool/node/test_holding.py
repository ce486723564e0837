"""A worker holds its machine's devices; runs without a pool and workers wait for each other."""

import pytest

from ringmaster.errors import NodeAlreadyServed
from ringmaster.flows.pool.own_node import hold_devices
from ringmaster.tasks.execution.leases import FileLeases

DEVICES = ("here:cpu:0", "here:cpu:1")


class Patience:
    """Timeouts whose waits run the given actions in order, and which record the notices."""

    def __init__(self, *actions):
        self.actions, self.notices = list(actions), []

    def wait(self, seconds):
        self.actions.pop(0)()


def hold(leases, timeouts, *, worker="a", may_share=False):
    hold_devices(
        leases, DEVICES, worker=worker, may_share=may_share, notice=timeouts.notices.append, wait=timeouts.wait
    )


@pytest.fixture
def leases(tmp_path):
    return FileLeases(tmp_path / "leases.db")


def test_a_worker_waits_for_a_run_that_has_a_device(leases):
    leases.take(DEVICES[:1], holder="batch tiny")
    timeouts = Patience(lambda: None, lambda: leases.give_back(DEVICES))
    hold(leases, timeouts)
    assert timeouts.notices == ["waiting for devices that are held by batch tiny"]
    assert leases.held() == dict.fromkeys(DEVICES, "worker a")


def test_workers_of_one_machine_share_what_may_be_shared(leases):
    hold(leases, Patience())
    timeouts = Patience()
    hold(leases, timeouts, worker="b", may_share=True)
    assert timeouts.notices == ["devices are shared with worker a"]


def test_gpus_are_not_shared(leases):
    hold(leases, Patience())
    timeouts = Patience(lambda: leases.give_back(DEVICES))
    hold(leases, timeouts, worker="b")
    assert leases.held() == dict.fromkeys(DEVICES, "worker b")


def test_one_worker_a_name(leases):
    hold(leases, Patience())
    with pytest.raises(NodeAlreadyServed, match="serves this machine already"):
        hold(leases, Patience(), may_share=True)
