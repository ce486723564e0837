"""The submission of a flow run's job, by the worker of type `slurm`, to a cluster whose answers may be lost."""

import asyncio
import logging
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from prefect.client.schemas.objects import FlowRun

from ringmaster.errors import EngineUnavailable
from ringmaster.flows.pool import batch_worker as module
from ringmaster.flows.pool.batch_worker import WORKERS
from ringmaster.tasks.pool.batch_scheduler import SchedulerJob

SlurmWorker = WORKERS["slurm"]
RUN = FlowRun(id=UUID(int=1), flow_id=UUID(int=0), name="node")


class FakeSlurm:
    """A cluster. answers: what sbatch does in turn: "accepts", "is away", or "accepts in silence"."""

    def __init__(self, *answers, num_silent_looks=0):
        self.answers, self.num_silent_looks, self.accepted = list(answers), num_silent_looks, []

    def submit(self, options, *, script, environment):
        answer = self.answers.pop(0)
        if answer != "is away":
            number = len(self.accepted) + 1
            self.accepted.append(SchedulerJob(id=number, states=frozenset({"PENDING"}), flow_run=str(RUN.id)))
        if answer != "accepts":
            raise EngineUnavailable("Socket timed out on send/recv operation")
        return number

    def jobs(self):
        if self.num_silent_looks:
            self.num_silent_looks -= 1
            raise EngineUnavailable("Socket timed out on send/recv operation")
        return [SchedulerJob(id=99, states=frozenset({"RUNNING"}), flow_run="another run"), *self.accepted]


@pytest.fixture
def submit(monkeypatch):
    """Submits the job of a run to a cluster; returns its number."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(SlurmWorker, "get_flow_run_logger", lambda self, run: logging.getLogger(__name__))

    def submitted(slurm):
        worker = SlurmWorker(work_pool_name="slurm", scheduler=slurm)
        return asyncio.run(worker._submit(RUN, SlurmWorker.job_configuration(), []))

    return submitted


def test_a_job_whose_acceptance_was_not_heard_is_found_and_not_submitted_again(submit):
    slurm = FakeSlurm("accepts in silence", "accepts", num_silent_looks=2)
    assert submit(slurm) == 1
    assert len(slurm.accepted) == 1


def test_a_job_that_was_not_accepted_is_submitted_once_slurm_is_back(submit):
    slurm = FakeSlurm("is away", "is away", "accepts")
    assert submit(slurm) == 1
    assert len(slurm.accepted) == 1
