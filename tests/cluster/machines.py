"""The nodes of a test: network namespaces on a bridge (as root), or plain processes on this machine.

Every process on a node inherits a mark in its environment, by which it is found and ended by its own pid.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster.stubs import NODE

SOURCE = Path(__file__).parents[2]
END_TIMEOUT_S = 30
MOUNT = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


def can_make_networks():
    """Returns whether this machine allows network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"rm{os.getpid()}try"
    if _ip("netns", "add", name, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


class Network:
    """The network between nodes and servers.

    address: the servers' address. subnet: the subnet of all. has_wires: whether a node can be disconnected.
    """

    def __init__(self):
        self.has_wires = can_make_networks()
        self._name, self._nodes = f"rm{os.getpid()}", []
        self.address, self.subnet = "127.0.0.1", "127.0.0.0/8"
        if self.has_wires:
            self._prefix = f"10.{100 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
            self.address, self.subnet = f"{self._prefix}.1", f"{self._prefix}.0/24"
            _ip("link", "add", self._name, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")

    def node(self, name, *, core):
        """Adds a node, whose processes are bound to one core."""
        node = Node(name, core=core)
        self._nodes.append(node)
        if self.has_wires:
            number = len(self._nodes)
            node.namespace, node.wire = f"{self._name}n{number}", f"{self._name}v{number}"
            node.address = f"{self._prefix}.{number + 1}"
            _ip("netns", "add", node.namespace)
            _ip("link", "add", node.wire, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
            _ip("link", "set", node.wire, "master", self._name, "up")
            for command in (("link", "set", "lo", "up"), ("link", "set", "eth0", "up")):
                _ip("-n", node.namespace, *command)
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
            node.servers = self.address
        return node

    def close(self):
        """Ends all processes on the nodes, and removes the network."""
        for node in self._nodes:
            node.lose()
            if node.namespace:
                _ip("netns", "del", node.namespace, check=False)
                _ip("link", "del", node.wire, check=False)
        if self.has_wires:
            _ip("link", "del", self._name, check=False)


class Node:
    """A simulated machine of the pool with one core; processes use the value of `cores` at their start."""

    def __init__(self, name, *, core):
        self.name, self.cores = name, (core,)
        self.mark = f"{name}-{os.getpid()}"
        self.address, self.namespace, self.wire, self.servers = "127.0.0.1", None, None, None
        self._mounts = []

    def give_own(self, path, folder):
        """Gives the node a folder of its own in the place of `path`, for processes that are started from now on."""
        if not self.namespace:
            pytest.skip("a node has folders of its own only where we may make namespaces (as root)")
        folder.mkdir()
        self._mounts = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(folder), str(path)]

    def popen(self, command, *, environment, log):
        """Starts a process on the node."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}"] if self.namespace else []
        with log.open("ab") as output:
            return subprocess.Popen(
                [*inside, *self._mounts, "taskset", "-c", ",".join(map(str, self.cores)), *command],
                env={**environment, NODE: self.mark},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self):
        """Returns all processes on the node."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self.mark]

    def cut(self):
        """Disconnects the node from the network; its processes continue."""
        if not self.namespace:
            pytest.skip("a node can be cut off only where we may make network namespaces (as root)")
        _ip("link", "set", self.wire, "down")

    def reject(self):
        """Makes every server refuse the node's connections, as a rejecting firewall does; its processes continue.

        The servers' address is added to the node's own interface: packets for it stay on the node, where nobody
        listens.
        """
        if not self.namespace:
            pytest.skip("a node can be rejected only where we may make network namespaces (as root)")
        _ip("-n", self.namespace, "addr", "add", f"{self.servers}/32", "dev", "lo")

    def unplug(self):
        """Disconnects the node where possible, so that the end of its processes is not observed."""
        if self.namespace:
            self.cut()

    def mend(self):
        """Reconnects the node."""
        if self.namespace:
            _ip("link", "set", self.wire, "up")
            _ip("-n", self.namespace, "addr", "del", f"{self.servers}/32", "dev", "lo", check=False)  # if rejected

    def lose(self):
        """Kills every process on the node, as a power loss does, including those that were just being started."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
            assert not alive, f"killed on {self.name} in vain: {alive}"


def end(process, *, number=signal.SIGTERM):
    """Ends a process and its children; SIGTERM lets it end them itself."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        process.wait()
        return
    for one in family[:1] if number == signal.SIGTERM else family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_TIMEOUT_S)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _mark_of(process):
    try:
        return process.environ().get(NODE)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None


def _ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)
