"""What is done about a flow run, given its job."""

from dataclasses import replace

import pytest

from ringmaster.flows.pool.slurm.worker import UNSUBMITTED_S, JobRun, SubmissionVerdict, decide, jobs_by_run
from ringmaster.tasks.pool.slurm.commands import SlurmJob, comment_of

RUN = JobRun(id="abc", infrastructure="slurm:7")
JOB = SlurmJob(id=7, states=frozenset({"RUNNING"}), node="n1", comment=comment_of("abc"))
CANCELLED = replace(RUN, is_cancelling=True)
UNKNOWN = replace(RUN, infrastructure="")


def in_state(*states, **changes):
    return replace(JOB, states=frozenset(states), **changes)


def _name(each):
    """Names a case alike in every process: the order of a set differs."""
    return "-".join(sorted(each.states)) if isinstance(each, SlurmJob) else str(each)


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
        (replace(UNKNOWN, age_s=UNSUBMITTED_S), None, SubmissionVerdict.CRASHED),
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


def test_a_crash_names_job_node_state_and_cause():
    job = in_state("NODE_FAIL", exit="signal 9", reason="NodeDown")
    assert decide(RUN, {"abc": job}).message == "Slurm job 7 has ended on n1: NODE_FAIL, signal 9 (NodeDown)"
    assert decide(RUN, {}).message == "Slurm job 7 has ended, and Slurm has forgotten how"


def test_of_several_jobs_of_a_run_the_newest_counts():
    newer = replace(JOB, id=8)
    assert jobs_by_run([newer, JOB, replace(JOB, id=9, comment="")]) == {"abc": newer}
    assert decide(RUN, jobs_by_run([newer, JOB])).verdict == SubmissionVerdict.ADOPT
