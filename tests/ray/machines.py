"""A Ray cluster on this machine's loopback: a head without resources, and a raylet for each simulated machine."""

import contextlib
import os
import signal
import threading

import psutil

from ringmaster.features.ray import LOOPBACK_ALONE
from tests.cluster.machines import SOURCE
from tests.cluster.stubs import NODE
from tests.ports import free_port

HOST = "127.0.0.1"
STORE_BYTES = 80 * 1024**2  # the least that Ray takes is 75 MB
HEAD_S = 10  # seconds after which a raylet ends without the head, and a driver too; 60 by default
os.environ[LOOPBACK_ALONE] = "0"  # before Ray is imported
os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(HEAD_S)  # noqa: SIM112 - Ray spells it so
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - by default nodes come after all other work of the machine


class RayMachines:
    """The machines of a test: `start` starts the head, `add` a machine of one CPU."""

    def __init__(self, folder):
        self._folder, self._cluster, self._number = folder, None, 0
        self._processes, self._is_head_up = [], False
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.raylets = {}  # by mark of the machine
        # Where Ray notes the address of this machine's cluster, in a folder that it expects to be there.
        os.environ["RAY_TMPDIR"] = str(folder)
        (folder / "ray").mkdir()

    def start(self):
        """Starts the head, at the same address each time."""
        from ray.cluster_utils import Cluster

        self._number += 1
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "gcs_server_port": self.port,
            "temp_dir": str(self._folder / str(self._number)),
            **self._common(mark="head"),
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._note(self._cluster.head_node)
        self._is_head_up = True

    def add(self, mark):
        """Adds a machine; `mark` is in the environment of all of its processes."""
        node = self._cluster.add_node(num_cpus=1, **self._common(mark=mark))
        self._note(node)
        self.raylets[mark] = raylet = node.all_processes["raylet"][0].process
        # Workers end with their raylet; one that has ended and is not waited for would count as alive.
        threading.Thread(target=raylet.wait, daemon=True).start()
        return self

    def heal(self, marks):
        """Starts what is missing: the head, and the machines with these marks."""
        if not self._is_head_up:
            for mark in list(self.raylets):
                self.kill_raylet(mark)
            self.start()
        for mark in marks:
            if mark not in self.raylets:
                self.add(mark)

    def kill_raylet(self, mark):
        """Kills the raylet of a machine."""
        raylet = self.raylets.pop(mark)
        raylet.kill()
        raylet.wait()

    def kill_node(self, mark):
        """Kills all processes of the node on a machine, and those of Ray's actor, but no other part of Ray."""
        found = self._processes_with(f"{mark}-{os.getpid()}")
        node = [each for each in found if _has(each, "-m ringmaster.") or _has(each, "NodeActor")]
        for each in node:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(node, timeout=10)

    def kill_head(self):
        """Kills the head: Ray's store of the cluster's state, and the head's raylet."""
        self._is_head_up = False
        for name in ("gcs_server", "raylet"):
            process = self._cluster.head_node.all_processes[name][0].process
            process.kill()
            process.wait()

    def processes_of(self, mark):
        """Returns the processes of nodes on a machine, without those of Ray."""
        return [each for each in self._processes_with(f"{mark}-{os.getpid()}") if _has(each, "-m ringmaster.")]

    def _processes_with(self, ending):
        return [each for each in psutil.process_iter() if _mark(each).endswith(ending)]

    def close(self):
        """Kills all processes of the cluster, and all that they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        while left := self._processes_with(f"-{os.getpid()}"):
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(left, timeout=10)
        del os.environ["RAY_TMPDIR"]

    def _common(self, *, mark):
        environment = {NODE: f"{mark}-{os.getpid()}", "PYTHONPATH": f"{SOURCE}:{SOURCE / 'src'}"}
        return {"node_ip_address": HOST, "object_store_memory": STORE_BYTES, "env_vars": environment}

    def _note(self, node):
        self._processes += [info.process for each in node.all_processes.values() for info in each]


def _mark(process):
    try:
        return process.environ().get(NODE, "")
    except psutil.Error:
        return ""


def _has(process, word):
    try:
        return word in " ".join(process.cmdline())
    except psutil.Error:
        return False
