"""A home with the files of a pool, for tests of commands where its processes live, have ended, or are elsewhere."""

import json
import platform
import signal
from dataclasses import replace

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.services.pool_processes import ServiceState, ServiceStatus, SupervisorRecord
from ringmaster.flows.services.service_files import ServiceFiles
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.sqlite_files import sqlite_url
from ringmaster.tasks.pool.engines import Service
from ringmaster.tasks.process_identity import pid_namespace
from ringmaster.techniques.processes.stopped import is_stopped
from tests.ports import free_port

SERVERS = ("prefect", "mlflow", "controller")
OTHER_BOOT = "00000000-0000-0000-0000-000000000000"


class PoolHome:
    """A home with the files of a pool, of which each service, and the supervisor, has a process of its own."""

    def __init__(self, folder, start):
        self.folder, self.files = folder, ServiceFiles(folder / "pool")
        self.files.make()
        url, database = f"http://127.0.0.1:{free_port()}", sqlite_url(folder / "pool" / "pool.db")
        self.address = PoolAddress(database=database, prefect_api=f"{url}/api", mlflow_uri=url)
        services = [Service(name=name, command=(), environment={}) for name in SERVERS]
        self.files.write_services(services, address=self.address)
        self.processes = {name: start() for name in ("supervisor", *SERVERS)}
        self.write()

    def write(self, **changed):
        """Writes the files. changed: other processes of services."""
        self.processes |= changed
        supervisor = self.processes["supervisor"]
        self.record(SupervisorRecord.of(supervisor, home=self.folder))
        states = [
            ServiceState(name=n, status=ServiceStatus.UP, pid=p.pid, born=p.born, num_restarts=0, message="")
            for n, p in self.processes.items()
            if n != "supervisor"
        ]
        content = {"by": to_json(supervisor), "services": to_json(states)}
        (self.files.folder / "state.json").write_text(json.dumps(content))
        self.name(self.address)

    def record(self, record):
        (self.files.folder / "supervisor.json").write_text(json.dumps(to_json(record)))

    def name(self, address):
        settings.pool_file(self.folder).write_text(json.dumps(to_json(address)))

    def move(self, place):
        """Makes its processes those of another place: a `container`, or a `machine`."""
        changed = {
            "machine": {"born": f"{OTHER_BOOT}:1", "host": f"not-{platform.node()}"},
            "container": {"namespace": f"{pid_namespace()}0"},
        }[place]
        self.record(replace(SupervisorRecord.of(self.processes["supervisor"], home=self.folder), **changed))

    def kill(self, *names, number=signal.SIGKILL):
        """Kills processes, by default all; returns once they have ended."""
        for name in names or self.processes:
            self.processes[name].signal(number)
        for name in names or self.processes:
            assert number != signal.SIGKILL or self.processes[name].wait(120)

    def stop(self, name):
        """Stops a process."""
        self.processes[name].signal(signal.SIGSTOP)
        while not is_stopped(self.processes[name].pid):
            pass
