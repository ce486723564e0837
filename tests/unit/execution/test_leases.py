"""Leases: no device is leased twice, and a device whose holder has ended is free again."""

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.execution.leases import FileLeases, leases_of
from ringmaster.tasks.process_identity import identity
from tests.children import exit_status, in_a_child, started


def take(path, holder):
    """Takes a lease in a child process. Exits with 1 if it was granted."""
    sys.exit(int(FileLeases(path).take(["n:cpu:0"], holder=holder)))


def give_back(path):
    FileLeases(path).give_back(["n:cpu:0"])


def hold_often(folder):
    """Takes the lease ten times. Each time it creates a file exclusively, which fails if another holder's exists."""
    leases = FileLeases(folder / "leases.db")
    num_held = 0
    while num_held < 10:
        if leases.take(["n:cpu:0"], holder=str(os.getpid())):
            os.close(os.open(folder / "busy", os.O_CREAT | os.O_EXCL))
            (folder / "busy").unlink()
            leases.give_back(["n:cpu:0"])
            num_held += 1


def test_all_or_none(tmp_path):
    leases = FileLeases(tmp_path / "leases.db")
    assert leases.take(["n:cpu:0"], holder="a")
    assert not leases.take(["n:cpu:1", "n:cpu:0"], holder="b")
    assert leases.held() == {"n:cpu:0": "a"}
    leases.give_back(["n:cpu:0"])
    assert leases.take(["n:cpu:1", "n:cpu:0"], holder="b")
    assert leases.held() == {"n:cpu:0": "b", "n:cpu:1": "b"}


def test_a_lease_holds_against_another_process_while_its_holder_lives(tmp_path):
    leases = FileLeases(tmp_path / "leases.db")
    assert leases.take(["n:cpu:0"], holder="us")
    assert in_a_child(take, tmp_path / "leases.db", "them") == 0
    leases.give_back(["n:cpu:0"])
    assert in_a_child(take, tmp_path / "leases.db", "them") == 1
    assert leases.held() == {}  # the child has ended without releasing the lease
    assert leases.take(["n:cpu:0"], holder="us")


def test_nobody_gives_back_what_another_holds(tmp_path):
    leases = FileLeases(tmp_path / "leases.db")
    assert leases.take(["n:cpu:0"], holder="us")
    assert in_a_child(give_back, tmp_path / "leases.db") == 0
    assert leases.held() == {"n:cpu:0": "us"}


def test_a_process_that_got_the_number_of_a_dead_one_is_not_its_heir(tmp_path):
    leases = FileLeases(tmp_path / "leases.db")
    boot, _, born = identity(os.getpid()).rpartition(":")
    dead = f"{boot}:{int(born) - 1}"
    with sqlite3.connect(tmp_path / "leases.db") as db:
        db.execute("INSERT INTO device_leases VALUES ('n:cpu:0', 'old', ?, ?, 0)", (os.getpid(), dead))
    assert leases.held() == {}
    assert leases.take(["n:cpu:0"], holder="new")


def test_a_clock_that_is_set_frees_nobodys_devices(tmp_path, monkeypatch):
    leases = FileLeases(tmp_path / "leases.db")
    assert leases.take(["n:cpu:0"], holder="us")
    began_s = psutil.Process().create_time()
    # The kernel counts a process's start from the boot, and the computed time of the boot moves with the clock.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began_s + 3600)
    monkeypatch.setattr(time, "time", lambda: began_s - 3600)
    assert leases.held() == {"n:cpu:0": "us"}
    assert not leases.take(["n:cpu:0"], holder="them")


def test_a_holder_that_is_dead_but_not_yet_buried_holds_nothing(tmp_path):
    leases = FileLeases(tmp_path / "leases.db")
    call = f"from {__name__} import take; take({str(tmp_path / 'leases.db')!r}, 'them')"
    child = subprocess.Popen([sys.executable, "-c", call], cwd=Path(__file__).parents[3])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # the child stays a zombie
    assert leases.held() == {}
    assert child.wait() == 1  # the lease was granted


def test_many_processes_at_once_never_share_a_device(tmp_path):
    """All processes also race to create the ledger."""
    children = [started(hold_often, tmp_path) for _ in range(4)]
    assert [exit_status(child) for child in children] == [0] * 4


def machine(*devices):
    return Cluster(nodes=(Node(name="n", devices=devices),))


def slots(*shares):
    return machine(
        *(Device(kind="cpu", index=i, name="x", memory_bytes=1, cores=cores) for i, cores in enumerate(shares))
    )


def gpus(*numbers):
    return machine(*(Device(kind="gpu", index=n, name="x", memory_bytes=1, cores=(), uuid=f"GPU-{n}") for n in numbers))


def test_slots_of_different_sizes_share_no_core(tmp_path):
    whole, halves = leases_of(tmp_path, slots((0, 1))), leases_of(tmp_path, slots((0,), (1,)))
    assert halves.take(["n:cpu:1"], holder="batch a")
    assert not whole.take(["n:cpu:0"], holder="batch b")
    assert whole.held() == {"n:cpu:0": "batch a"}
    assert halves.held() == {"n:cpu:1": "batch a"}
    halves.give_back(["n:cpu:1"])
    assert whole.take(["n:cpu:0"], holder="batch b")
    assert halves.held() == {"n:cpu:0": "batch b", "n:cpu:1": "batch b"}


def test_processes_that_see_different_devices_under_one_number_do_not_wait_for_each_other(tmp_path):
    """As the tasks of a Slurm job do, each of which sees its own GPUs, or its own cores."""
    for one, other in ((gpus(0), gpus(1)), (slots((0,)), slots((1,)))):
        names = list(one.lease_names().values())
        assert names == list(other.lease_names().values())
        assert leases_of(tmp_path, one).take(names, holder="a")
        assert leases_of(tmp_path, other).take(names, holder="b")


def test_a_gpu_is_leased_once_under_all_its_numbers(tmp_path):
    assert leases_of(tmp_path, gpus(1)).take(["n:gpu:0"], holder="a")
    every = leases_of(tmp_path, gpus(0, 1))
    assert every.held() == {"n:gpu:1": "a"}
    assert not every.take(["n:gpu:1"], holder="b")
    assert every.take(["n:gpu:0"], holder="b")
