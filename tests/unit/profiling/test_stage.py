"""The profiling stage: what can be predicted is not tried, and what is tried keeps its limits."""

import math
from dataclasses import replace

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import DevicesBusy
from ringmaster.tasks.profiling import stage as stages
from ringmaster.tasks.profiling import trials as trial_runner
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.profiling.profile_store import MAX_STEPS, ProfileStore, combined
from ringmaster.tasks.profiling.search import GUESSED_STEP_S, ProfilingFailure
from ringmaster.techniques import Profile
from ringmaster.techniques.preflight_result import Candidate, Preflight
from tests.unit.profiling.solos import FACTS, cluster, job

DATA = {**dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels"))}
DATA["num_held_out"] = 100


def candidate(technique, num_devices, step_s, *, micro_batch=4):
    config = {"micro_batch": micro_batch // num_devices, "recompute": "none"}
    return Candidate(
        technique=technique, config=config, num_devices=num_devices, num_ranks=1, least_bytes=1100, step_s=step_s
    )


PREDICTED_OPTIONS = (candidate("single", 1, 1.0), candidate("ddp", 2, 0.6), candidate("tensor", 2, 0.8))
UNPREDICTED = tuple(replace(each, step_s=None) for each in PREDICTED_OPTIONS)


class Stage:
    """The stage with made-up preflights, trials and store. true_s: seconds of a step of a trial, or its failure."""

    def __init__(self, monkeypatch, tmp_path):
        self.candidates = {}  # by job
        self.true_s, self.trial_s = {}, 2.0
        self.tried, self.limits_s, self.kept, self.newest, self.told = [], [], {}, [], []
        self.is_busy, self.now_s = False, 0.0
        monkeypatch.setattr(stages, "preflight_jobs", self._poll)
        monkeypatch.setattr(trial_runner, "run_wave", self._wave)
        monkeypatch.setattr(trial_runner.time, "monotonic", lambda: self.now_s)
        self.tmp_path = tmp_path

    def _poll(self, jobs, **_):
        def one(j):
            found = self.candidates.get(j.name, PREDICTED_OPTIONS)
            return Preflight(job=j.name, data=DATA, facts=FACTS, candidates=found, refusals=())

        return {j.name: one(j) for j in jobs}, {}

    def _wave(self, _, trials, *, limit_s):
        self.limits_s.append(limit_s)
        self.now_s += min(self.trial_s, limit_s)
        return {trial.fingerprint: self._result(trial, limit_s) for trial in trials}

    def _result(self, trial, limit_s):
        size = 1 + len(trial.members)
        option = trial.candidate.technique, trial.candidate.num_devices
        self.tried.append((*option, size))
        if self.trial_s > limit_s:
            return ProfilingFailure(kind="timed_out", message=f"it took more than {limit_s:.0f} s")
        true_s = self.true_s.get(option, 3.0)
        if isinstance(true_s, ProfilingFailure):
            return true_s
        return Profile(
            technique=option[0],
            config=trial.candidate.config,
            num_devices=option[1],
            num_ranks=1,
            step_s=true_s * (0.4 + 0.6 * size),
            peak_bytes=1,
            predicted_step_s=trial.candidate.step_s,
            key=trial.key,
        )

    def profile(self, *jobs, **options):
        def lend(wanted):
            if self.is_busy:
                raise DevicesBusy("1 device was not idle")
            return stages.nullcontext(node.devices)

        node = cluster(2)
        known = ProfileStore(
            find=lambda names: {n: self.kept[n] for n in names if n in self.kept},
            keep=self.kept.__setitem__,
            newest=lambda: self.newest,
        )
        environment = GangEnvironment(server=None, devices=node.devices, cache_dir=self.tmp_path)
        return stages.profile_jobs(
            jobs,
            environment=environment,
            cluster=node,
            profile_store=known,
            notice=self.told.append,
            lend=lend,
            **options,
        )


@pytest.fixture
def stage(monkeypatch, tmp_path):
    return Stage(monkeypatch, tmp_path)


def plain(name="a", **changes):
    return job(name, adapter=None, **changes)


def step_times(profiled, name="a"):
    return {(p.technique, p.num_devices): (p.source, p.step_s) for p in profiled.profiles[name]}


def test_what_is_predicted_is_not_tried(stage):
    found = stage.profile(plain(num_steps=10**6), plain("b", num_steps=10**6))
    assert (found.num_trials, stage.tried, found.faults) == (0, [], {})
    assert step_times(found) == {
        ("single", 1): ("predicted", 1.0),
        ("ddp", 2): ("predicted", 0.6),
        ("tensor", 2): ("predicted", 0.8),
    }
    assert {p.predicted_step_s for p in found.profiles["a"]} == {1.0, 0.6, 0.8}
    assert len({p.key.fingerprint for p in found.profiles["a"]}) == 3
    assert len({p.key.speed_class for p in found.profiles["a"]}) == 1


def test_measured_options_stand_beside_predicted_ones_that_they_correct(stage):
    """Predictions that are too low by a factor of three must not beat what was measured."""
    first = stage.profile(plain())
    (single,) = (p for p in first.profiles["a"] if p.technique == "single")
    stage.kept[single.key.fingerprint] = to_json(replace(single, source="measured", step_s=3.0, spread=0.01))
    found = step_times(stage.profile(plain()))
    assert found["single", 1] == ("measured", 3.0)
    for option, predicted_s in ((("ddp", 2), 0.6), (("tensor", 2), 0.8)):
        source, step_s = found[option]
        assert source == "predicted"
        assert 2.2 * predicted_s < step_s < 3.0 * predicted_s


def test_what_other_jobs_have_measured_on_such_devices_corrects_predictions_by_technique(stage):
    (single, ddp, _) = stage.profile(plain()).profiles["a"]

    def measured(number, profile, ratio, kind=ddp.key.device_kind):
        key = replace(profile.key, speed_class=f"other {number}", device_kind=kind)
        return to_json(
            replace(profile, source="measured", step_s=ratio * profile.predicted_step_s, spread=0.01, key=key)
        )

    stage.newest = [measured(n, ddp, 1.5) for n in range(6)] + [measured(n, single, 1.0) for n in range(6)]
    found = step_times(stage.profile(plain()))
    assert found["ddp", 2][1] / 0.6 > 1.15 * found["single", 1][1]
    stage.newest = [measured(n, ddp, 1.5, kind="another") for n in range(6)]
    assert step_times(stage.profile(plain()))["ddp", 2][1] == 0.6


def test_an_option_of_another_job_counts_once_however_often_it_was_stored(stage):
    _, ddp, _ = stage.profile(plain()).profiles["a"]
    key = replace(ddp.key, speed_class="another")
    once = to_json(replace(ddp, source="measured", step_s=1.5 * ddp.predicted_step_s, spread=0.01, key=key))
    older = {**once, "step_s": 9.0 * ddp.predicted_step_s}
    stage.newest = [once]
    expected = stage.profile(plain()).profiles["a"]
    stage.newest = [once] * 20 + [older] * 5
    assert stage.profile(plain()).profiles["a"] == expected


def test_an_option_that_ran_out_of_memory_is_not_offered_again(stage):
    (_, ddp, _) = stage.profile(plain()).profiles["a"]
    ProfileStore(keep=stage.kept.__setitem__).add(
        ddp.key.fingerprint, ProfilingFailure(kind="out_of_memory", message="no room")
    )
    assert ("ddp", 2) not in step_times(stage.profile(plain()))


def test_a_config_that_is_surely_slower_than_a_measured_one_of_its_kind_is_left_out(stage):
    stage.candidates["a"] = (candidate("single", 1, 1.0), candidate("single", 1, 1.5, micro_batch=2))
    (first,) = stage.profile(plain()).profiles["a"]
    stage.kept[first.key.fingerprint] = to_json(replace(first, source="measured", step_s=1.0))
    assert [p.source for p in stage.profile(plain()).profiles["a"]] == ["measured"]
    stage.kept[first.key.fingerprint] = to_json(ProfilingFailure(kind="out_of_memory", message="no room"))
    assert [p.predicted_step_s for p in stage.profile(plain()).profiles["a"]] == [1.5]


# -- the trials that are left ----------------------------------------------------------------------------------------


def test_what_nothing_predicts_is_tried_once_for_each_gang_size(stage):
    stage.candidates["a"] = UNPREDICTED
    found = stage.profile(plain(num_steps=10**6))
    assert (found.num_trials, stage.tried) == (2, [("single", 1, 1), ("ddp", 2, 1)])
    assert step_times(found) == {("single", 1): ("measured", 3.0), ("ddp", 2): ("measured", 3.0)}
    assert "at most 20 s each" in stage.told[0]
    assert (stage.profile(plain(num_steps=10**6)).num_trials, len(stage.tried)) == (0, 2)


def test_larger_gangs_are_tried_within_the_share_of_what_smaller_ones_have_shown(stage):
    """Of 60 steps of 3 s, 5 % are 9 s: the trial on one device leaves time for that on two, in a batch of less none."""
    stage.candidates["a"] = UNPREDICTED
    assert stage.profile(plain(num_steps=60)).num_trials == 2
    assert stage.limits_s == [20.0, 7.0]
    stage.tried, stage.kept = [], {}
    found = stage.profile(plain(num_steps=10))
    assert (stage.tried, step_times(found)) == ([("single", 1, 1)], {("single", 1): ("measured", 3.0)})
    assert "0.05 of the predicted 30 s in all" in stage.told[-1]


def test_a_share_of_0_makes_no_trials(stage):
    stage.candidates["a"] = UNPREDICTED
    found = stage.profile(plain(num_steps=10**6), share=0.0)
    assert (found.num_trials, found.faults) == (0, {})
    assert {step_s for _, step_s in step_times(found).values()} == {GUESSED_STEP_S}


def test_a_trial_that_hangs_ends_at_its_limit_and_the_guess_stands(stage):
    stage.candidates["a"] = UNPREDICTED
    stage.trial_s = math.inf
    found = stage.profile(plain())
    assert stage.limits_s == [20.0, 20.0]
    assert {step_s for _, step_s in step_times(found).values()} == {GUESSED_STEP_S}
    assert not found.faults
    assert any("its prediction remains: it took more than 20 s" in line for line in stage.told)
    assert stage.kept == {}


def test_a_trial_that_fails_fails_the_job_and_one_without_memory_does_not(stage):
    stage.candidates |= {"a": UNPREDICTED[:1], "b": UNPREDICTED}
    stage.true_s["single", 1] = ProfilingFailure(kind="failed", message="no such luck")
    assert stage.profile(plain()).faults == {"a": "no such luck (in its trial)"}
    stage.true_s["single", 1] = ProfilingFailure(kind="out_of_memory", message="no room")
    found = stage.profile(plain("b"))
    assert ("single", 1) not in step_times(found, "b")
    assert not found.faults


def test_where_devices_stay_busy_jobs_are_planned_by_guesses(stage):
    stage.is_busy, stage.candidates["a"] = True, UNPREDICTED
    found = stage.profile(plain())
    assert (found.num_trials, found.faults) == (0, {})
    assert stage.told == ["1 device was not idle: the remaining options are planned by predictions"]


def adapters(num, **changes):
    return [job(f"job-{i}", **changes) for i in range(num)]


def test_groups_are_decided_by_one_trial_of_a_group_and_one_of_a_job_alone(stage):
    found = stage.profile(*adapters(4))
    assert sorted(stage.tried) == [("shared_base", 1, 4), ("single", 1, 1)]
    assert found.num_trials == 2
    assert {p.source for p in found.profiles["job-0"] if p.technique == "single"} == {"measured"}
    (whole,) = (p for p in found.groups["job-0"] if len(p.members) == 3 and p.num_devices == 1)
    assert whole.gang_step_s == pytest.approx(3.0 * (0.4 + 0.6 * 4))
    assert stage.profile(*adapters(4)).num_trials == 0


def test_some_jobs_are_grouped_as_all_of_them_are(stage):
    found, asked = stage.profile(*adapters(4), policy="none"), []
    environment = GangEnvironment(server=None, devices=cluster(2).devices, cache_dir=stage.tmp_path)
    known = ProfileStore(find=lambda names: asked.append(names) or {}, newest=lambda: stage.newest)
    some = stages.groups_of_some(found, environment=environment, cluster=cluster(2), profile_store=known)
    assert some([f"job-{i}" for i in range(4)]) == found.groups
    assert len(asked) == 1


def test_trials_take_no_more_than_their_share_by_the_wall_with_all_that_belongs_to_them(stage):
    """Four jobs of 60 steps of 1 s on two devices are 120 s: of 5 % of these, a trial of 4 s leaves too little."""
    stage.trial_s = 4.0
    found = stage.profile(*adapters(4, num_steps=60), share=0.05)
    assert (found.num_trials, stage.limits_s) == (2, [6.0]), "both fit side by side"
    stage.tried, stage.limits_s, stage.kept = [], [], {}
    none = stage.profile(*adapters(4, num_steps=60), share=0.02)
    assert (none.num_trials, stage.tried) == (0, [])
    assert "0.02 of the predicted 120 s in all" in stage.told[-1]
    assert {p.source for mine in none.groups.values() for p in mine} == {"predicted"}


def test_a_trial_is_cut_off_where_the_share_ends(stage):
    stage.trial_s = 30.0
    found = stage.profile(*adapters(4, num_steps=60), share=0.05)
    assert stage.limits_s == [6.0]
    assert {p.source for mine in found.profiles.values() for p in mine} == {"predicted"}


def test_nothing_is_tried_where_nothing_may_be_or_every_job_has_a_device(stage):
    assert stage.profile(*adapters(4), policy="none").num_trials == 0
    assert stage.profile(*adapters(2)).num_trials == 0


# -- the store -------------------------------------------------------------------------------------------------------


def measured(step_s, num_steps, **changes):
    given = {"technique": "single", "num_devices": 1, "num_ranks": 1, "peak_bytes": 1}
    return Profile(step_s=step_s, num_measured_steps=num_steps, **{**given, **changes})


def test_a_handful_of_steps_does_not_displace_a_measurement_over_many():
    assert combined(measured(1.0, 200), measured(4.0, 5)).step_s < 1.04
    assert combined(measured(1.0, 0), measured(4.0, 1000)).step_s > 3.9
    long_ago = combined(measured(1.0, 10**6), measured(4.0, MAX_STEPS))
    assert long_ago.step_s == pytest.approx(2.0)
    assert long_ago.num_measured_steps == 2 * MAX_STEPS


def test_profiles_are_stored_with_their_load_and_read_as_on_a_quiet_machine():
    kept = {}
    store = ProfileStore(find=lambda names: {n: kept[n] for n in names if n in kept}, keep=kept.__setitem__)
    store.add("a", measured(3.0, 10, startup_s=2.0, load=2.0))
    assert (kept["a"]["step_s"], kept["a"]["load"]) == (3.0, 2.0)
    found = store.results(["a"])["a"]
    assert (found.step_s, found.startup_s, found.load) == (1.5, 1.0, 1.0)
    store.add("a", measured(1.5, 10))
    assert store.results(["a"])["a"].step_s == pytest.approx(1.5)
    store.add("a", ProfilingFailure(kind="failed", message="no such luck"))
    assert "step_s" in kept["a"]


def test_what_another_release_has_stored_and_cannot_be_read_is_not_known(stage):
    (single, *_) = stage.profile(plain()).profiles["a"]
    foreign = {**to_json(replace(single, source="measured", step_s=3.0)), "a_new_field": 1}
    stage.kept[single.key.fingerprint], stage.newest = foreign, [foreign, {"kind": "another"}]
    assert step_times(stage.profile(plain()))["single", 1] == ("predicted", 1.0)
    ProfileStore(find=lambda _: {"f": foreign}, keep=stage.kept.__setitem__).add("f", single)
    assert stage.kept["f"] == to_json(single)
