"""The nodes of a test: network namespaces on a bridge where we are root, else plain processes that share the machine.

Whatever is started on a node inherits a mark in its environment, by which it is found again, and ended, by its own pid.
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
END_PATIENCE_S = 30


def can_make_networks():
    """Whether this machine lets us make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"rm{os.getpid()}try"
    if _ip("netns", "add", name, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


class Network:
    """By what nodes and servers reach each other.

    address: the servers'. subnet: of all. has_wires: whether a node can be cut off.
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
        """A further node, whose processes are bound to one core."""
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
        """Ends what runs on the nodes, and takes the wires away."""
        for node in self._nodes:
            node.lose()
            if node.namespace:
                _ip("netns", "del", node.namespace, check=False)
                _ip("link", "del", node.wire, check=False)
        if self.has_wires:
            _ip("link", "del", self._name, check=False)


class Node:
    """A machine of the pool, with one core of this one; what is started there has those that `cores` names by then."""

    def __init__(self, name, *, core):
        self.name, self.cores = name, (core,)
        self.mark = f"{name}-{os.getpid()}"
        self.address, self.namespace, self.wire, self.servers = "127.0.0.1", None, None, None

    def popen(self, command, *, environment, log):
        """Starts a process there."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}"] if self.namespace else []
        with log.open("ab") as output:
            return subprocess.Popen(
                [*inside, "taskset", "-c", ",".join(map(str, self.cores)), *command],
                env={**environment, NODE: self.mark},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self):
        """All that runs there."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self.mark]

    def cut(self):
        """Takes the node off the network; what runs there goes on."""
        if not self.namespace:
            pytest.skip("a node can be cut off only where we may make network namespaces (as root)")
        _ip("link", "set", self.wire, "down")

    def reject(self):
        """Has every server refuse the node's connections, as a firewall that rejects does; what runs there goes on.

        The servers' address becomes the node's own besides: packets for it stay there, where nobody listens.
        """
        if not self.namespace:
            pytest.skip("a node can be rejected only where we may make network namespaces (as root)")
        _ip("-n", self.namespace, "addr", "add", f"{self.servers}/32", "dev", "lo")

    def unplug(self):
        """As `cut` where that is possible: nobody hears that what ran there has ended."""
        if self.namespace:
            self.cut()

    def mend(self):
        """Puts it back."""
        if self.namespace:
            _ip("link", "set", self.wire, "up")
            _ip("-n", self.namespace, "addr", "del", f"{self.servers}/32", "dev", "lo", check=False)  # unless rejected

    def lose(self):
        """Ends every process there at once, as a power cut does; those too that one of them was just starting."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(processes, timeout=END_PATIENCE_S)
            assert not alive, f"killed on {self.name} in vain: {alive}"


def end(process, *, number=signal.SIGTERM):
    """Ends a process of ours and what it started, in order where it listens to that."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        process.wait()
        return
    for one in family[:1] if number == signal.SIGTERM else family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_PATIENCE_S)
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
