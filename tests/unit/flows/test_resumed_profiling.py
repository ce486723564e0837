"""A resumed run on this machine inspects the jobs that are left, and takes what is known of the others."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.flows.batch import local_run
from ringmaster.flows.batch.local_run import LocalRun
from ringmaster.flows.caller import Caller
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.profiling.machine_load import MachineLoad
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.preflight_result import Preflight, Refusal
from tests.unit.execution.fakes import cluster, job, open_journal, profile
from tests.unit.profiling.solos import FACTS

REFUSAL = Refusal(technique="ddp", num_devices=1, reason="needs two devices or more")


class Runs:
    """Processes of one run, one after another, whose profiling stage is made up and recorded."""

    def __init__(self, folder, monkeypatch):
        self.journal, self.asked = open_journal(folder), []
        self.batch = Batch(
            name="b", jobs=(job("a"), job("b", num_steps=None, num_epochs=2.0), job("c")), folder=Path(), text=""
        )
        monkeypatch.setattr(local_run, "profile_jobs", self._profile)

    def _profile(self, jobs, **_):
        self.asked.append([each.name for each in jobs])
        data = {"num_samples": 40}
        preflights = {
            each.name: Preflight(
                job=each.name,
                data=data,
                facts=replace(FACTS, num_parameters=len(each.name)),
                candidates=(),
                refusals=(REFUSAL,),
            )
            for each in jobs
        }
        resolved = tuple(stage_job(each) for each in jobs)
        return ProfilingResult(
            jobs=resolved, preflights=preflights, profiles={each.name: (profile(),) for each in jobs}
        )

    def profiled(self, *, sweep_scheduler=None):
        resources = dict.fromkeys(("environment", "profile_store", "lend"))
        node_context = SimpleNamespace(
            batch=self.batch, cluster=cluster(1), load=MachineLoad, caller=Caller(), **resources
        )
        run_paths = SimpleNamespace(folder=self.batch.folder, cache_dir=None)
        run = LocalRun(
            node_context,
            self.journal,
            recorder=None,
            run_paths=run_paths,
            seed=0,
            sweep_scheduler=sweep_scheduler,
            stack=ExitStack(),
        )
        return run.profile()


def stage_job(each):
    return job(each.name)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch)


def test_finished_jobs_are_not_inspected_again(runs):
    first = runs.profiled()
    for name, status in (("a", JobStatus.DONE), ("b", JobStatus.STOPPED), ("c", JobStatus.WAITING)):
        runs.journal.write_job(name, status=status)
    second = runs.profiled()
    assert runs.asked == [["a", "b", "c"], ["c"]]
    assert [each.name for each in second.jobs] == ["a", "b", "c"]
    assert second.preflights == first.preflights
    assert second.refused("a") == first.refused("a") != []
    assert (second.profiles["a"], len(second.profiles["c"])) == ((), 1)
    assert second.jobs[1].total_steps == round(2.0 * 40 / second.jobs[1].global_batch_size)
    assert second.faults == {}


def test_jobs_that_failed_are_inspected_again(runs):
    runs.profiled()
    runs.journal.write_job("a", status=JobStatus.FAILED, message="no such luck")
    runs.profiled()
    assert runs.asked[1] == ["a", "b", "c"]


def test_a_run_of_an_earlier_release_is_inspected_as_a_whole(runs):
    runs.journal.write_job("a", status=JobStatus.DONE)
    assert len(runs.profiled().profiles["a"]) == 1
    assert runs.asked == [["a", "b", "c"]]
