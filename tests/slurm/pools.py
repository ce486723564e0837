"""A Prefect work pool of type `slurm` for tests: its deployment, its worker, and its runs."""

import json
import os
import subprocess
import sys

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from ringmaster.flows.pool.batch_worker import WORKERS
from ringmaster.model_lineage import QUIET_ENVIRONMENT
from tests.cluster.machines import SOURCE, end
from tests.cluster.waiting import until
from tests.pool_home import FOREIGN
from tests.slurm.flows import serve

ENTRY_POINT = "[prefect.collections]\nringmaster = ringmaster.flows.pool.batch_worker\n"


def collections_plugin(folder):
    """Returns a folder that registers the worker's type, as the installed package does."""
    metadata = folder / "plugin" / "slurm_worker-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slurm-worker\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    return metadata.parent


class WorkPool:
    """A work pool whose flow runs are jobs of a cluster. Its deployment is the flow `serve`."""

    def __init__(self, folder, *, cluster, prefect, name):
        self.folder, self.cluster, self.prefect, self.name = folder, cluster, prefect, name
        self.worker = None
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)},
            **QUIET_ENVIRONMENT,
            **cluster.environment,
            "DO_NOT_TRACK": "true",
            "RINGMASTER_HOME": str(folder / "home"),
            "PREFECT_API_URL": f"{prefect.url}/api",
            "PREFECT_HOME": str(folder / "prefect-of-clients"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src"), str(collections_plugin(folder))]),
            "A_PASSWORD": "of-the-pool",
        }

    def create(self):
        """Creates the work pool and the deployment."""
        template = WORKERS["slurm"].get_default_base_job_template()
        with self.client() as client:
            client.create_work_pool(WorkPoolCreate(name=self.name, type="slurm", base_job_template=template))
            self.deployment = client.create_deployment(
                client.create_flow(serve),
                name=self.name,
                entrypoint="tests.slurm.flows.serve",
                work_pool_name=self.name,
                pull_steps=[],
            )
        return self

    def client(self):
        """Returns a client of the Prefect server."""
        with temporary_settings({PREFECT_API_URL: f"{self.prefect.url}/api"}):
            return get_client(sync_client=True)

    def start_worker(self):
        """Starts Prefect's worker, as a person does on a login node."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", self.name, "--type", "slurm"]
        with (self.folder / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                [*command, "--name", "worker"],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop_worker(self, **how):
        """Ends the worker."""
        end(self.worker, **how)
        self.worker = None

    def run(self, folder, **variables):
        """Starts a flow run; returns its id."""
        folder.mkdir()
        with self.client() as client:
            return client.create_flow_run_from_deployment(
                self.deployment, parameters={"folder": str(folder)}, job_variables=variables
            ).id

    def state(self, run):
        """Returns the state of a flow run."""
        with self.client() as client:
            return client.read_flow_run(run).state

    def infrastructure(self, run):
        """Returns the id of a flow run's job, "" while Prefect does not know it."""
        with self.client() as client:
            return client.read_flow_run(run).infrastructure_pid or ""

    def ends(self, run, kind):
        """Waits for the final state of a flow run, which has to be of a kind; returns its message."""
        state = until(f"flow run is {kind}", lambda: (s := self.state(run)).is_final() and s)
        assert state.type == StateType(kind), f"{state}\n{self.log()}"
        return state.message

    def begun(self, folder):
        """Waits until a flow run serves; returns what it has written down."""
        file = folder / "begun.json"
        return json.loads(until(f"the flow run serves\n{self.log()}", lambda: file.exists() and file.read_text()))

    def log(self):
        """Returns the end of the worker's log."""
        file = self.folder / "worker.log"
        return file.read_text()[-3000:] if file.exists() else ""

    def close(self):
        """Ends the worker."""
        if self.worker is not None:
            self.stop_worker()
