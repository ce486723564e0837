"""Whole sweeps on a real executor with fake gangs, killed at arbitrary moments."""

from contextlib import suppress

import pytest

from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.space import CategoricalRange
from tests.matrix import matrix
from tests.unit.sweeping.sweeps import RATES, Gangs, Killed, Swept, loss, spec

SHAPES = CategoricalRange(key="global_batch_size", values=(8, 16))


@pytest.mark.parametrize("policy", ["none", "cut", "asha", "halving"])
def test_the_best_trial_comes_to_its_end_and_the_others_only_as_far_as_they_are_worth(tmp_path, policy):
    swept = Swept(tmp_path, spec(policy=policy)).run()
    finals = {job.name: loss(job, 64) for job in swept.jobs}
    assert min(finals, key=finals.get) in swept.names(JobStatus.DONE)
    assert set(swept.statuses.values()) == (
        {JobStatus.DONE} if policy == "none" else {JobStatus.DONE, JobStatus.STOPPED}
    )
    total = sum(record.step for record in swept.bench.journal.jobs().values())
    assert total == swept.bench.runner.num_steps, "no step is trained twice"
    # 16 x 4, 4 x 12 and 1 x 48 steps of 16 x 64; 16 x 4, 7 x 3 and 4 x 57 with cut. asha may promote trials that are
    # not among the best in the end.
    exact = {"none": 1024, "halving": 160, "cut": 313}
    assert total == exact.get(policy, total) and 160 <= total <= 1024
    assert policy != "asha" or total <= 300


def test_a_stopped_trial_keeps_what_was_measured_last_and_why(tmp_path):
    swept = Swept(tmp_path, spec(policy="halving")).run()
    records = swept.bench.journal.jobs()
    for name in swept.names(JobStatus.STOPPED):
        job = next(job for job in swept.jobs if job.name == name)
        assert records[name].metrics == {"loss": loss(job, records[name].step)}
        assert f"stopped early at step {records[name].step}: number " in records[name].message


def test_a_plan_goes_no_further_than_the_rung(tmp_path):
    swept = Swept(tmp_path, spec()).run()
    first = swept.bench.plans[0]
    assert {option.runtime_s for job in first.jobs for option in job.options} == {4 * 1.0 + 0.1}


@pytest.mark.parametrize("policy", matrix(["none", "asha"], quick=["asha"]))
def test_tpe_proposes_the_same_trials_in_whatever_order_they_end(tmp_path, policy):
    found = []
    for seed in range(2):
        swept = Swept(tmp_path / str(seed), spec(sampler="tpe", policy=policy), runner=Gangs(seed=seed)).run()
        found.append(swept.sweep_scheduler.values)
        assert set(swept.statuses.values()) <= {JobStatus.DONE, JobStatus.STOPPED}
    assert found[0] == found[1]
    assert len({str(values) for values in found[0].values()}) == 16, "nothing is proposed twice"


def test_tpe_learns(tmp_path):
    swept = Swept(tmp_path, spec(sampler="tpe", policy="none", num_trials=24)).run()
    jobs = [swept.bench.executor.job_table.entries[name].job for name in swept.sweep_scheduler.values]
    early, late = [[loss(job, 64) for job in part] for part in (jobs[:8], jobs[-8:])]
    assert sum(late) / 8 < 0.7 * sum(early) / 8


def test_a_trial_of_another_shape_has_the_profiles_of_that_shape(tmp_path):
    swept = Swept(tmp_path, spec(sampler="tpe", policy="none", space=(RATES, SHAPES)))
    swept.run()
    job_table = swept.bench.executor.job_table
    for name, values in swept.sweep_scheduler.values.items():
        assert job_table.entries[name].job.global_batch_size == values["global_batch_size"]
        like = swept.bench.journal.jobs()[name].like or name
        given = {job.name: job for job in swept.jobs}[like]
        assert given.global_batch_size == values["global_batch_size"]


@pytest.mark.parametrize("policy", ["none", "asha", "halving"])
def test_a_proposed_shape_that_cannot_be_trained_here_ends_that_trial_alone(tmp_path, policy):
    asked = spec(sampler="tpe", policy=policy, space=(RATES, SHAPES))
    cannot_train = {"cannot_train": lambda job: job.global_batch_size == 16}
    for num_messages in (3, None):  # killed once, then resumed
        with suppress(Killed):
            swept = Swept(tmp_path, asked, dies_after=num_messages, **cannot_train).run()
    proposed = {n: v["global_batch_size"] for n, v in swept.sweep_scheduler.values.items() if n not in swept.faults}
    ended = [name for name, size in proposed.items() if size == 16]
    assert ended, "tpe proposes it to trials whose place was kept by another shape"
    records = swept.bench.journal.jobs()
    for name in ended:
        assert records[name].status == JobStatus.STOPPED
        assert "no trial with global_batch_size: 16 can be trained here" in records[name].message
    assert set(swept.names(JobStatus.FAILED)) == set(swept.faults)
    assert len(swept.sweep_scheduler.values) == 16 and swept.names(JobStatus.DONE)


@pytest.mark.parametrize("every", [30, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("sampler", "policy"),
    matrix([("random", "asha"), ("random", "halving"), ("tpe", "asha"), ("tpe", "cut")], quick=[("tpe", "asha")]),
)
def test_a_sweep_that_is_killed_at_any_moment_goes_on(tmp_path, sampler, policy, every):
    asked = spec(sampler=sampler, policy=policy, num_trials=8)
    whole = Swept(tmp_path / "whole", asked).run()
    for num_messages in range(1, 60, every):
        folder, gangs = tmp_path / str(num_messages), Gangs()
        for each in range(3):  # repeatedly, each time a little later
            with suppress(Killed):
                Swept(folder, asked, runner=gangs, dies_after=num_messages + each).run()
            gangs.running.clear()
        again = Swept(folder, asked, runner=gangs).run()
        assert again.sweep_scheduler.values == whole.sweep_scheduler.values
        assert set(again.statuses.values()) <= {JobStatus.DONE, JobStatus.STOPPED}
        assert again.names(JobStatus.DONE)
        for name, reports in again.sweep_scheduler.reports.items():
            job = again.bench.executor.job_table.entries[name].job
            assert {step: metrics["loss"] for step, metrics in reports.items()} == {s: loss(job, s) for s in reports}
        if policy in ("halving", "cut"):
            assert again.statuses == whole.statuses


def test_after_the_deadline_nothing_goes_on(tmp_path):
    now_s = [0.0]
    swept = Swept(tmp_path, spec(policy="none", deadline_s=20.0), clock=lambda: now_s[0])
    swept.bench.other_listeners.append(lambda event: now_s.__setitem__(0, now_s[0] + 1.0))
    swept.run()
    swept.sweep_scheduler.close(run_id=None)
    assert swept.names(JobStatus.DONE)
    stopped = swept.names(JobStatus.STOPPED)
    assert stopped
    assert all("deadline" in swept.bench.journal.jobs()[name].message for name in stopped)


def test_the_first_trial_that_comes_to_its_end_is_told_once(tmp_path):
    ended = []
    swept = Swept(tmp_path, spec(policy="cut"))
    swept.sweep_scheduler.on_first_done = lambda: ended.append(swept.names(JobStatus.DONE))
    swept.run()
    assert len(swept.names(JobStatus.DONE)) > 1
    assert len(ended) == 1
