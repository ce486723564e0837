"""What is done about a flow run, given its job."""

from dataclasses import replace

import pytest

from ringmaster.features.slurm.slurm_engine import Slurm
from ringmaster.flows.pool import batch_worker
from ringmaster.flows.pool.batch_worker import UNSUBMITTED_S, SubmissionVerdict, jobs_by_run
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.pool.batch_scheduler import SchedulerJob

RUN = NodeRun(id="abc", infrastructure="slurm:7")
JOB = SchedulerJob(id=7, states=frozenset({"RUNNING"}), node="n1", flow_run="abc")
CANCELLED = replace(RUN, is_ending=True)
UNKNOWN = replace(RUN, infrastructure="")


def decide(run, jobs, age_s=0.0):
    return batch_worker.decide(run, jobs, age_s=age_s, scheduler=Slurm)


def in_state(*states, **changes):
    return replace(JOB, states=frozenset(states), **changes)


def _name(each):
    """Names a case alike in every process: the order of a set differs."""
    return "-".join(sorted(each.states)) if isinstance(each, SchedulerJob) else str(each)


@pytest.mark.parametrize(
    ("run", "job", "verdict"),
    [
        (RUN, JOB, SubmissionVerdict.NOTHING),
        (RUN, in_state("PENDING"), SubmissionVerdict.NOTHING),
        (RUN, in_state("COMPLETING"), SubmissionVerdict.NOTHING),
        (RUN, in_state("COMPLETED"), SubmissionVerdict.CRASHED),
        (RUN, in_state("NODE_FAIL"), SubmissionVerdict.CRASHED),
        (RUN, in_state("PENDING", num_restarts=1), SubmissionVerdict.CRASHED),
        (RUN, None, SubmissionVerdict.CRASHED),
        (UNKNOWN, JOB, SubmissionVerdict.ADOPT),
        (UNKNOWN, in_state("FAILED"), SubmissionVerdict.CRASHED),
        (UNKNOWN, None, SubmissionVerdict.NOTHING),
        (CANCELLED, JOB, SubmissionVerdict.END),
        (CANCELLED, in_state("PENDING"), SubmissionVerdict.CANCEL_JOB),
        (CANCELLED, in_state("COMPLETING"), SubmissionVerdict.NOTHING),
        (CANCELLED, in_state("CANCELLED"), SubmissionVerdict.CANCELLED),
        (CANCELLED, None, SubmissionVerdict.CANCELLED),
    ],
    ids=_name,
)
def test_each_state_of_a_job_has_its_verdict(run, job, verdict):
    assert decide(run, jobs_by_run([] if job is None else [job])).verdict == verdict


def test_a_run_that_nobody_submits_is_given_up_after_a_while():
    assert decide(UNKNOWN, {}, age_s=UNSUBMITTED_S).verdict == SubmissionVerdict.CRASHED


def test_a_crash_names_job_node_state_and_cause():
    job = in_state("NODE_FAIL", exit="signal 9", reason="NodeDown")
    assert decide(RUN, {"abc": job}).message == "Slurm job 7 has ended on n1: NODE_FAIL, signal 9 (NodeDown)"
    assert decide(RUN, {}).message == "Slurm job 7 has ended, and Slurm has forgotten how"


def test_of_several_jobs_of_a_run_the_newest_counts():
    newer = replace(JOB, id=8)
    assert jobs_by_run([newer, JOB, replace(JOB, id=9, flow_run="")]) == {"abc": newer}
    assert decide(RUN, jobs_by_run([newer, JOB])).verdict == SubmissionVerdict.ADOPT
