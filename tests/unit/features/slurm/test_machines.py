"""What becomes of allocations, by what Slurm says of their jobs."""

import os
from dataclasses import replace

import pytest

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.features.slurm.slurm_engine import Slurm, SlurmNode
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.pool.batch_scheduler import END_GRACE_S, SchedulerJob, SchedulerMachines
from ringmaster.tasks.pool.provider import AllocationStatus
from ringmaster.tasks.pool.work_pool import WorkPoolProvider

PENDING, RUNNING, LEAVING, LOST, ENDED = AllocationStatus
JOB = SchedulerJob(id=7, states=frozenset({"RUNNING"}), node="n1", flow_run="abc", end_s=500.0)


class FakeSlurm(Slurm):
    """A cluster of two nodes, whose jobs a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, SchedulerJob] = {}
        self.states = {"n1": SlurmNode(name="n1", states=frozenset({"ALLOCATED"}))}
        self.is_away = self.refuses = False
        self.asked: list[tuple[str, int]] = []

    def has(self, *jobs):
        self.known = {job.id: job for job in jobs}

    def jobs(self):
        if self.is_away:
            raise EngineUnavailable("away")
        return list(self.known.values())

    def nodes(self, names):
        return {name: node for name, node in self.states.items() if name in names}

    def end(self, job):
        self.asked.append(("end", job))
        if self.refuses:
            raise SchedulerError("Slurm refuses scancel: Access/permission denied")

    def cancel(self, job):
        self.asked.append(("cancel", job))
        if self.refuses:
            raise SchedulerError("Slurm refuses scancel: Access/permission denied")


class FakeNodeRuns:
    """Flow runs, for each of which `submit` starts a job of a cluster."""

    def __init__(self, slurm):
        self.slurm, self.there, self.num_started = slurm, {}, 0

    def live(self):
        return list(self.there.values())

    def start(self):
        self.num_started += 1
        id = f"run-{self.num_started}"
        self.there[id] = NodeRun(id=id)
        return id

    def cancel(self, id):
        del self.there[id]

    def submit(self):
        """Starts the jobs of the runs: the first runs, the others wait."""
        for id, run in self.there.items():
            number = int(id.removeprefix("run-"))
            self.there[id] = replace(run, infrastructure=Slurm.allocation_of(number), is_begun=number == 1)
            job = JOB if number == 1 else in_state("PENDING", node="")
            self.slurm.known[number] = replace(job, id=number, flow_run=id)


@pytest.fixture
def slurm():
    return FakeSlurm()


@pytest.fixture
def site(slurm):
    now = [0.0]
    machines = SchedulerMachines(slurm, clock=lambda: now[0])
    machines.now = now
    return machines


def in_state(*states, **changes):
    return replace(JOB, states=frozenset(states), **changes)


def poll(site, *, runs=()):
    return site.poll([NodeRun(id="abc", infrastructure=Slurm.allocation_of(number)) for number in runs])


def status(site, slurm, job):
    slurm.has(job)
    return poll(site)["slurm:7"].status


def _name(each):
    """Names a case alike in every process: the order of a set differs."""
    return "-".join(sorted(each.states)) if isinstance(each, SchedulerJob) else str(each)


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        (in_state("PENDING", node=""), PENDING),
        (in_state("RUNNING"), RUNNING),
        (in_state("RUNNING", is_preempted=True), LEAVING),
        (in_state("COMPLETING"), LEAVING),
        (in_state("CANCELLED", "COMPLETING"), LEAVING),
        (in_state("SUSPENDED"), LOST),
        (in_state("NODE_FAIL"), LOST),
        (in_state("CANCELLED"), ENDED),
        (in_state("PREEMPTED"), ENDED),
        (in_state("TIMEOUT"), ENDED),
        (in_state("FAILED"), ENDED),
        (in_state("PENDING", num_restarts=1), ENDED),
        (in_state("PENDING", num_restarts=1, node=""), LOST),  # nobody saw where it ran
    ],
    ids=_name,
)
def test_each_state_of_a_job_says_what_the_pool_may_do(site, slurm, job, wanted):
    assert status(site, slurm, job) == wanted


def test_only_what_runs_has_an_end(site, slurm):
    assert status(site, slurm, JOB) == RUNNING
    assert poll(site)["slurm:7"].until_s == 500.0
    assert status(site, slurm, in_state("CANCELLED")) == ENDED
    assert poll(site)["slurm:7"].until_s is None


def test_a_drained_node_leaves_with_the_reason_of_its_administrator(site, slurm):
    slurm.states["n1"] = SlurmNode(name="n1", states=frozenset({"MIXED", "DRAIN"}), reason="fan is loud")
    assert status(site, slurm, JOB) == LEAVING
    assert "fan is loud" in poll(site)["slurm:7"].why


def test_what_ended_on_a_node_that_was_away_stays_lost_when_the_node_comes_back(site, slurm):
    assert status(site, slurm, JOB) == RUNNING
    slurm.states["n1"] = SlurmNode(name="n1", states=frozenset({"DOWN", "NOT_RESPONDING"}))
    assert status(site, slurm, in_state("CANCELLED")) == LOST
    slurm.states["n1"] = SlurmNode(name="n1", states=frozenset({"IDLE"}))
    assert status(site, slurm, in_state("CANCELLED")) == LOST


def test_a_node_that_does_not_answer_for_a_moment_keeps_its_job(site, slurm):
    slurm.states["n1"] = SlurmNode(name="n1", states=frozenset({"ALLOCATED", "NOT_RESPONDING"}))
    assert status(site, slurm, JOB) == RUNNING


def test_a_requeued_job_has_ended_where_it_was_seen_and_is_cancelled(site, slurm):
    assert status(site, slurm, JOB) == RUNNING
    assert status(site, slurm, in_state("PENDING", node="", num_restarts=1)) == ENDED
    assert slurm.asked == [("cancel", 7)]


def test_a_forgotten_job_has_ended_if_its_end_was_seen(site, slurm):
    slurm.has(JOB)
    poll(site, runs=[7])
    slurm.has()
    assert poll(site, runs=[7])["slurm:7"].status == LOST  # Slurm's controller may have lost its state
    slurm.has(in_state("COMPLETED"))
    poll(site, runs=[7])
    slurm.has()
    assert poll(site, runs=[7])["slurm:7"].status == ENDED
    assert poll(site, runs=[7, 8])["slurm:8"].status == LOST


def test_jobs_of_others_are_left_alone(site, slurm):
    slurm.has(replace(JOB, flow_run="", num_restarts=3))
    assert not poll(site)
    assert not slurm.asked


def test_a_job_of_another_users_pool_is_left_alone(site, slurm):
    slurm.has(replace(JOB, user_id=os.getuid() + 1, num_restarts=1))
    assert not poll(site)
    assert not slurm.asked
    slurm.has(replace(JOB, user_id=os.getuid(), num_restarts=1))
    assert poll(site) and slurm.asked == [("cancel", 7)]


def test_a_job_that_slurm_refuses_to_end_leaves_the_others_their_turn(site, slurm, caplog):
    slurm.has(replace(JOB, num_restarts=1), replace(JOB, id=8, num_restarts=1))
    slurm.refuses = True
    assert poll(site).keys() == {"slurm:7", "slurm:8"}
    site.end("slurm:7")
    assert slurm.asked == [("cancel", 7), ("cancel", 8), ("end", 7)]
    assert caplog.text.count("permission denied") == 3


def test_a_job_is_ended_in_order_and_cancelled_where_it_does_not_end(site, slurm):
    slurm.has(JOB)
    poll(site)
    site.end("slurm:7"), site.end("slurm:7")
    poll(site)
    assert slurm.asked == [("end", 7)]
    site.now[0] = END_GRACE_S + 1
    poll(site)
    assert slurm.asked == [("end", 7), ("cancel", 7)]


def test_a_job_that_was_given_back_leaves_until_it_has_ended_and_its_replacement_stays(site, slurm):
    runs = FakeNodeRuns(slurm)
    provider = WorkPoolProvider(node_runs=runs, machines=site)
    provider.request(1)
    provider.poll()
    runs.submit()
    provider.served({"slurm:1"})
    provider.poll()
    provider.release("slurm:1")
    provider.poll()
    runs.submit()
    del runs.there["run-1"]  # its agent has left, and its job ends for some seconds more
    for _ in range(3):
        provider.poll()
        assert provider.allocations()["slurm:1"].status == LEAVING
    assert list(runs.there) == ["run-2"], "the one that replaces it"


def test_a_job_that_waits_is_cancelled_as_nothing_would_receive_a_signal(site, slurm):
    slurm.has(in_state("PENDING", node=""))
    poll(site)
    site.end("slurm:7")
    assert slurm.asked == [("cancel", 7)]


def test_slurm_that_is_away_is_no_answer(site, slurm):
    slurm.is_away = True
    with pytest.raises(EngineUnavailable):
        poll(site)
