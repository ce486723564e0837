"""The batch job of a simulated node: it registers under its allocation, and serves until SIGTERM, without torch.

In Prefect it does what a flow run does: it is Running while it serves, and Completed in the end.
"""

import json
import os
import signal
import threading
import urllib.request

from benchmarks.execution.simulated_nodes import SimulatedNodes
from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.tasks.storage.database import Database

# As the true batch script: a signal ends the flow run in order.
BATCH_SCRIPT = """\
#!/bin/sh
exec {python} -m benchmarks.execution.stub_pilot
"""


def main() -> None:
    """Serves one node of one device."""
    leaving = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: leaving.set())
    database = Database(os.environ["RINGMASTER_DATABASE"])
    node = SimulatedNodes(
        database=database,
        names=(os.environ["SLURMD_NODENAME"],),
        devices_per_node=1,
        beat_every_s=Timeouts.of_environment().beat_every_s,
        allocation=f"slurm:{os.environ['SLURM_JOB_ID']}",
    )
    report("RUNNING")
    node.register()
    node.serve(leaving)
    database.close()
    report("COMPLETED")


def report(state: str) -> None:
    """Sets the state of this job's flow run."""
    url = f"{os.environ['PREFECT_API_URL']}/flow_runs/{os.environ['PREFECT__FLOW_RUN_ID']}/set_state"
    body = json.dumps({"state": {"type": state, "name": state.title()}, "force": True}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    main()
