"""What Slurm prints of jobs and nodes, in the forms of several releases."""

import json

import pytest

from ringmaster.features.slurm.slurm_engine import Slurm, SlurmNode, comment_of, nodes_of

OLD = {  # as squeue 22.05 prints it
    "job_id": 7,
    "job_state": "RUNNING",
    "nodes": "n2",
    "user_id": 1000,
    "comment": comment_of("abc"),
    "restart_cnt": 1,
    "end_time": 1795472903,
    "preempt_time": 0,
    "exit_code": 0,
    "state_reason": "None",
    "state_description": "",
    "flags": ["TRES_STR_CALC"],
}
NEW = {  # as squeue 24.05 prints it
    **OLD,
    "job_state": ["RUNNING"],
    "restart_cnt": 1,
    "end_time": {"set": True, "infinite": False, "number": 1795472903},
    "preempt_time": {"set": True, "infinite": False, "number": 0},
    "exit_code": {
        "status": ["SUCCESS"],
        "return_code": {"set": True, "infinite": False, "number": 0},
        "signal": {"id": {"set": False, "infinite": False, "number": 0}, "name": ""},
    },
}


def one(row):
    (job,) = Slurm().read_jobs(json.dumps({"jobs": [row], "errors": []}))
    return job


def test_both_forms_say_the_same():
    assert one(OLD) == one(NEW)
    job = one(OLD)
    assert (job.id, job.node, job.flow_run, job.num_restarts, job.end_s) == (7, "n2", "abc", 1, 1795472903.0)
    assert job.user_id == 1000
    assert (job.is_waiting, job.is_completing, job.has_ended, job.is_preempted, job.reason) == (*[False] * 4, "")


@pytest.mark.parametrize("states", ["COMPLETING", ["CANCELLED", "COMPLETING"]])
def test_a_job_has_not_ended_while_slurm_ends_its_processes(states):
    job = one({**OLD, "job_state": states})
    assert job.is_completing and not job.has_ended and not job.is_waiting


def test_how_a_job_ended_is_said_in_words():
    assert one({**OLD, "job_state": "FAILED", "exit_code": 3 << 8}).exit == "exit status 3"
    assert one({**OLD, "job_state": "CANCELLED", "exit_code": 9}).exit == "signal 9"
    signalled = {"return_code": {"set": False}, "signal": {"signal_id": 15, "name": "TERM"}}
    assert one({**NEW, "exit_code": signalled}).exit == "signal 15"
    assert one({**OLD, "job_state": "NODE_FAIL", "state_reason": "NodeDown"}).reason == "NodeDown"


def test_the_end_of_a_job_that_waits_is_unknown():
    waiting = {**OLD, "job_state": "PENDING", "end_time": 6090440194, "state_reason": "Resources", "nodes": ""}
    job = one(waiting)
    assert (job.is_waiting, job.end_s, job.reason) == (True, None, "Resources")
    assert one({**NEW, "end_time": {"set": True, "infinite": True, "number": 0}}).end_s is None


def test_a_list_with_errors_is_not_taken_for_an_empty_one():
    failed = {"errors": [{"description": "Failed while looking for jobs", "error": "Unspecified error"}], "jobs": []}
    with pytest.raises(ValueError, match="Failed while looking for jobs Unspecified error"):
        Slurm().read_jobs(json.dumps(failed))


def test_nodes_have_states_and_the_reasons_of_administrators():
    text = (
        "NodeName=n1 Arch=x86_64 State=ALLOCATED+DRAIN ThreadsPerCore=1 Reason=fan is loud [root@2026-11-23T22:30:23]\n"
        "NodeName=n2 Arch=x86_64 State=IDLE ThreadsPerCore=1\n"
        "NodeName=n3 State=DOWN* ThreadsPerCore=1 Reason=Not responding [slurm@2026-11-23T22:30:23]\n"
        "NodeName=n4 State=IDLE+DRAIN ThreadsPerCore=1 Reason=Kill task failed [root@2026-11-23T22:30:23]\n"
    )
    nodes = nodes_of(text)
    assert nodes["n1"] == SlurmNode(name="n1", states=frozenset({"ALLOCATED", "DRAIN"}), reason="fan is loud")
    assert {name: (node.is_drained, node.is_away) for name, node in nodes.items()} == {
        "n1": (True, False),
        "n2": (False, False),
        "n3": (False, True),
        "n4": (True, True),
    }


def test_jobs_have_ids_of_which_others_are_told_apart():
    assert Slurm.job_of(Slurm.allocation_of(12)) == 12
    assert [Slurm.job_of(other) for other in ("", "slurm:", "kubernetes:12", "slurm:x")] == [None] * 4
    assert one({**OLD, "comment": "nightly"}).flow_run == ""
