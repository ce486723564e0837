"""Groups of jobs that share a base: which are tried, and what is predicted from the trials."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from ringmaster.errors import DevicesBusy
from ringmaster.tasks.profiling import stage as stages
from ringmaster.tasks.profiling import trials as trial_runner
from ringmaster.tasks.profiling.group_layouts import MAX_TOGETHER, ONE_DEVICE
from ringmaster.tasks.profiling.group_search import group_profiles, group_searches
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.profiling.search import ProfilingFailure, planning_problem
from ringmaster.techniques import Profile
from tests.unit.profiling.solos import alone, classes_of, cluster, job, members, preflight


class Trials:
    """Trials whose results follow a formula, and which are recorded."""

    def __init__(self, *, fixed_s, kappa, out_of_memory=MAX_TOGETHER + 1, broken=False):
        self.fixed_s, self.kappa, self.limit, self.broken = fixed_s, kappa, out_of_memory, broken
        self.sizes, self.kept, self.told = [], {}, []

    def measure(self, trials):
        for trial in trials:
            size = 1 + len(trial.members)
            self.sizes.append(size)
            self.kept[trial.fingerprint] = self._result(trial, size)
        return {trial.fingerprint: self.kept[trial.fingerprint] for trial in trials}

    def _result(self, trial, size):
        if self.broken:
            return ProfilingFailure(kind="failed", message="no such luck")
        if size >= self.limit:
            return ProfilingFailure(kind="out_of_memory", message="no room")
        assert trial.candidate.technique == "shared_base"
        return Profile(
            technique="shared_base",
            num_devices=1,
            num_ranks=1,
            step_s=self.fixed_s + self.kappa * size,
            startup_s=1.9 + 0.1 * size,
            peak_bytes=1000 + 150 * size,
        )

    def find(self, fingerprints):
        return {name: self.kept[name] for name in fingerprints if name in self.kept}

    def profiles(self, found, *, num_devices=2, may_try=True, **options):
        searches = group_searches({ONE_DEVICE: [found]}, cluster=cluster(num_devices, **options), num_nodes=1)
        return group_profiles(
            searches,
            num_jobs=len(found),
            find=self.find,
            measure=self.measure if may_try else None,
            notice=self.told.append,
        )


def by_size(groups):
    return {1 + len(p.members): p for mine in groups.values() for p in mine if p.at_once is None}


def in_turns(groups):
    return {1 + len(p.members): p for mine in groups.values() for p in mine if p.at_once is not None}


def test_what_was_not_tried_is_predicted_from_what_was():
    trials = Trials(fixed_s=0.4, kappa=0.6)
    groups = trials.profiles(members(16))
    assert trials.sizes == [8, 2, 16]
    for size, profile in by_size(groups).items():
        assert profile.gang_step_s == pytest.approx(0.4 + 0.6 * size)
        assert profile.step_s == pytest.approx(1.0)
        assert profile.startup_s == pytest.approx(1.9 + 0.1 * size)
        assert profile.stall_s == pytest.approx(0.1 * size)
        assert profile.source == ("measured" if size in (2, 8, 16) else "predicted")
        assert profile.restricted_to([profile.members[0].job]).gang_step_s == pytest.approx(1.6)
    assert set(by_size(groups)) == {2, 4, 8, 16}
    assert set(groups) == {f"job-{i:02}" for i in range(0, 16, 2)}


def test_a_fellow_has_its_own_steps_and_end():
    jobs = [job("a", num_steps=9000), job("b", num_steps=300), job("c", num_steps=300)]
    jobs[1] = replace(jobs[1], evaluation=replace(jobs[1].evaluation, every_steps=100))
    (found,) = classes_of(jobs, profiles={"b": (alone(3.0), alone(2.0), alone(1.0, num_devices=2))})
    every = Trials(fixed_s=0.0, kappa=1.0).profiles(found, may_try=False)
    (whole,) = (p for p in every["a"] if len(p.members) == 2)
    assert [(f.job, f.num_steps, f.step_s) for f in whole.members] == [("b", 300, 2.0), ("c", 300, 1.0)]
    assert [f.end_s for f in whole.members] == pytest.approx([0.1 + 3 * 0.5 + 0.2, 0.1 + 0.5 + 0.2])
    row = planning_problem(jobs, {j.name: (alone(),) for j in jobs}, cluster(2), name="x", groups=every).jobs[0]
    (option,) = (option for option in row.options if option.jobs == ("b", "c"))
    assert option.runtime_s == pytest.approx(2 + 9000 * 1 + 300 * (2 + 1) + 0.8 + 1.8 + 0.8)


def test_without_trials_a_step_takes_as_long_as_of_one_after_another():
    trials = Trials(fixed_s=0.4, kappa=0.6)
    predicted = by_size(trials.profiles(members(8), may_try=False))
    assert trials.sizes == []
    for size, profile in predicted.items():
        assert profile.source == "predicted"
        assert (profile.gang_step_s, profile.startup_s, profile.peak_bytes) == (size, 2.0, 1000 + 100 * size)


def test_without_trials_a_group_launches_its_operators_once():
    preflights = {j.name: preflight(j) for j in [job(f"job-{i:02}") for i in range(8)]}
    for name, known in preflights.items():
        (whole,) = known.candidates
        preflights[name] = replace(known, candidates=(replace(whole, launch_share=0.4),))
    found = Trials(fixed_s=0.0, kappa=1.0).profiles(members(8, preflights=preflights), may_try=False)
    for size, profile in by_size(found).items():
        assert profile.gang_step_s == pytest.approx(0.4 + 0.6 * size)


@pytest.mark.parametrize(("num_jobs", "sizes"), [(2, [2]), (3, [2]), (7, [4, 2]), (8, [8, 2]), (100, [8, 2, 32])])
def test_three_sizes_are_tried_at_the_most(num_jobs, sizes):
    trials = Trials(fixed_s=0.4, kappa=0.6)
    trials.profiles(members(num_jobs), num_devices=1)
    assert trials.sizes == sizes


def test_what_an_earlier_batch_measured_is_not_tried_again():
    trials = Trials(fixed_s=0.4, kappa=0.6)
    first = trials.profiles(members(16))
    second = trials.profiles(members(16))
    assert trials.sizes == [8, 2, 16]
    assert second == first
    assert trials.profiles(members(16), may_try=False) == first
    trials.profiles(members(12))
    assert trials.sizes == [8, 2, 16]


def test_groups_that_are_no_faster_than_their_jobs_one_after_another_are_not_offered():
    assert Trials(fixed_s=0.0, kappa=1.5).profiles(members(8)) == {}
    assert set(by_size(Trials(fixed_s=1.6, kappa=0.7).profiles(members(8)))) == {8}


@pytest.mark.parametrize(
    ("kind", "sizes", "turns"),
    [
        ("cpu", {2, 4, 8}, {16: 9}),  # by the estimated memory of the jobs, 100 bytes in addition to the base
        ("gpu", {2, 4}, {8: 6, 16: 6}),  # by the measured memory of the jobs, 150 bytes
    ],
)
def test_of_groups_that_memory_does_not_suffice_for_as_many_as_fit_take_turns(kind, sizes, turns):
    trials = Trials(fixed_s=0.4, kappa=0.6)
    groups = trials.profiles(members(16), kind=kind, memory_bytes=1900)
    assert set(by_size(groups)) == sizes
    assert {size: profile.at_once for size, profile in in_turns(groups).items()} == turns
    assert all(profile.peak_bytes <= 1900 for profile in in_turns(groups).values()) or kind == "cpu"
    assert trials.sizes == [8, 2]
    assert f"not trained {min(turns)} or more together" in trials.told[0]


def test_what_ran_out_of_memory_bounds_who_is_there_at_once():
    trials = Trials(fixed_s=0.4, kappa=0.6, out_of_memory=8)
    groups = trials.profiles(members(16), kind="gpu")
    assert set(by_size(groups)) == {2, 4}
    assert {size: profile.at_once for size, profile in in_turns(groups).items()} == {8: 7, 16: 7}
    assert trials.sizes == [8, 2, 16]


def test_where_not_two_fit_there_is_no_group():
    trials = Trials(fixed_s=0.4, kappa=0.6)
    assert trials.profiles(members(16), memory_bytes=1199) == {}
    assert "not trained 2 or more together" in trials.told[0]


def test_any_two_of_those_that_take_turns_fit():
    """The two largest jobs determine the limit, as they may run at the same time."""
    jobs = [job(f"job-{i}", num_steps=2000 - i) for i in range(4)]
    preflights = {
        each.name: preflight(each, own_bytes=own) for each, own in zip(jobs, (100, 100, 300, 400), strict=True)
    }
    (found,) = classes_of(jobs, preflights=preflights)
    groups = Trials(fixed_s=0.4, kappa=0.6).profiles(found, num_devices=1, memory_bytes=1750)
    (whole,) = (p for p in in_turns(groups).values() if len(p.members) == 3)
    assert whole.at_once == 2


def test_jobs_that_take_turns_take_the_steps_of_the_gang_and_what_each_adds_while_it_is_there():
    """Four jobs, two at a time: 2000 steps of the first while the next two run, then 800 steps of the last alone."""
    steps = {"a": 2000, "b": 1000, "c": 1000, "d": 800}
    (found,) = classes_of([job(name, num_steps=num) for name, num in steps.items()])
    trials = Trials(fixed_s=0.4, kappa=0.6)
    groups = trials.profiles(found, num_devices=1, memory_bytes=1200)
    whole = in_turns(groups)[4]
    assert (whole.at_once, whole.source) == (2, "predicted")
    startup_s, ends_s = 1.9 + 0.1 * 4, 4 * (0.1 + 0.5 + 0.2)
    assert whole.runtime_s(num_steps=2000) == pytest.approx(startup_s + 0.4 * 2800 + 0.6 * 4800 + ends_s)
    pairs_s = sum(
        pair.runtime_s(num_steps=steps[lead]) for lead in "ac" for pair in groups[lead] if pair.at_once is None
    )
    assert whole.runtime_s(num_steps=2000) < pairs_s


def test_a_class_whose_trial_fails_is_trained_one_by_one():
    trials = Trials(fixed_s=0.4, kappa=0.6, broken=True)
    assert trials.profiles(members(16)) == {}
    assert "no such luck" in trials.told[0]


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """The profiling stage on a given number of devices, with made-up trials. It records trials and loans of devices."""
    shape = dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels"))
    data = {**shape, "num_held_out": 100}
    tried, kept, lent, here = [], {}, [], []

    def poll(jobs, **_):
        return {j.name: replace(preflight(j), data=data) for j in jobs}, {}

    def wave(_, trials, *, limit_s):
        tried.extend(1 + len(trial.members) for trial in trials)
        return {trial.fingerprint: alone(0.4 + 0.6 * (1 + len(trial.members))) for trial in trials}

    @contextmanager
    def lend(wanted):
        if "busy" in lent:
            raise DevicesBusy("1 devices of here were not idle")
        lent.append((wanted.least, wanted.most))
        yield here[-1].devices

    def profiled(jobs, *, num_devices=2, policy="thorough", **options):
        node = cluster(num_devices)
        here.append(node)
        environment = GangEnvironment(server=None, devices=node.devices, cache_dir=tmp_path)
        known = stages.ProfileStore(find=lambda names: {n: kept[n] for n in names if n in kept}, keep=kept.__setitem__)
        return stages.profile_jobs(
            jobs, environment=environment, cluster=node, profile_store=known, lend=lend, policy=policy, **options
        )

    def some_of(found, names, *, num_devices=2):
        node = cluster(num_devices)
        environment = GangEnvironment(server=None, devices=node.devices, cache_dir=tmp_path)
        known = stages.ProfileStore(find=lambda names: {n: kept[n] for n in names if n in kept})
        return stages.groups_of_some(found, environment=environment, cluster=node, profile_store=known)(names)

    profiled.some_of = some_of
    monkeypatch.setattr(stages, "preflight_jobs", poll)
    monkeypatch.setattr(trial_runner, "run_wave", wave)
    return profiled, tried, lent


def test_groups_are_tried_once_the_jobs_are_and_count_as_trials(stage):
    profiled, tried, lent = stage
    jobs = [job(f"job-{i}") for i in range(4)]
    first = profiled(jobs)
    assert (tried, lent, first.num_trials) == ([1, 4, 2], [(1, 1), (1, 2)], 3)
    assert set(by_size(first.groups)) == {2, 4}
    second = profiled(jobs)
    assert (second.groups, second.num_trials, len(lent)) == (first.groups, 0, 2)
    another = profiled([*jobs, job("fifth")])
    assert (another.num_trials, by_size(another.groups)[2].source) == (0, "measured")


def test_where_devices_stay_busy_jobs_are_planned_by_predictions(stage):
    profiled, tried, lent = stage
    lent.append("busy")
    told = []
    found = profiled([job(f"job-{i}") for i in range(2)], notice=told.append)
    assert (tried, found.num_trials, found.faults) == ([], 0, {})
    assert {p.source for mine in found.profiles.values() for p in mine} == {"predicted"}
    assert told[0] == "1 devices of here were not idle: the remaining options are planned by predictions"


def test_no_group_is_tried_where_nothing_may_be_or_every_job_has_a_device(stage):
    profiled, tried, lent = stage
    jobs = [job(f"job-{i}") for i in range(4)]
    foretold = profiled(jobs, policy="none")
    assert (tried, lent) == ([], [])
    assert {p.source for p in by_size(foretold.groups).values()} == {"predicted"}
    profiled(jobs, num_devices=4)
    assert tried == [1]


def test_batches_without_adapters_have_no_groups(stage):
    profiled, tried, _ = stage
    assert profiled([job(f"job-{i}", adapter=None) for i in range(4)]).groups == {}
    assert tried == [1]


def test_some_of_the_jobs_have_the_groups_that_a_batch_of_them_would_have(stage):
    profiled, tried, _ = stage
    jobs = [job(f"job-{i}", num_steps=2000 - i) for i in range(8)]
    every = profiled(jobs)
    num_tried = len(tried)
    assert profiled.some_of(every, [job.name for job in jobs]) == every.groups
    few = [jobs[1], jobs[3], jobs[4], jobs[6]]
    found = profiled.some_of(every, [job.name for job in few])
    (whole,) = (p for p in found["job-1"] if len(p.members) == 3)
    assert whole.gang_step_s == pytest.approx(0.4 + 0.6 * 4)
    assert len(tried) == num_tried
    assert profiled.some_of(every, ["job-3"]) == {}
    assert profiled.some_of(replace(every, groups={}), [job.name for job in jobs]) == {}
    by_itself = profiled(few).groups
    assert {lead: names_of(mine) for lead, mine in found.items()} == {
        lead: names_of(mine) for lead, mine in by_itself.items()
    }


def names_of(profiles):
    return [[member.job for member in profile.members] for profile in profiles]
