"""The budget of trials: a share of a batch's predicted time. Untried configs are predicted."""

from dataclasses import replace

import pytest

from ringmaster.tasks.profiling.budget import TYPICAL_WAVE_S, TrialBudget, predicted_batch_s
from ringmaster.tasks.profiling.search import ConfigSearch
from ringmaster.tasks.profiling.trials import Trial
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.interface.preflight import Candidate


def job(name, *, num_steps=100):
    model, data = ModelSpec(architecture="LlamaForCausalLM"), DataSpec(source="digits")
    return Job(name=name, model=model, data=data, num_steps=num_steps)


def candidate(step_s, num_devices=1):
    return Candidate(
        technique="single", config={}, num_devices=num_devices, num_ranks=1, least_bytes=1, step_s=step_s
    )  # fmt: skip


def search(name, step_s, *, num_devices=1, measured_s=None):
    found = ConfigSearch(key=name, job=name, candidates=[candidate(step_s, num_devices)], fingerprints=[name])
    if measured_s is not None:
        profile = Profile(technique="single", num_devices=num_devices, num_ranks=1, step_s=measured_s, peak_bytes=1)
        found.results[name] = profile
    return found


def trial(name, step_s, *, num_devices=1):
    return Trial(fingerprint=name, job=job(name), data={}, candidate=candidate(step_s, num_devices))


def budget(batch_s, *, share=0.2, num_devices=2, **spent):
    return TrialBudget(share=share, num_devices=num_devices, batch_s=lambda: batch_s, **spent)


def names(trials):
    return [each.fingerprint for each in trials]


def test_a_batch_takes_what_its_options_with_least_device_time_take():
    searches = {
        "a": [search("a", 1.0), search("a2", 0.6, num_devices=2)],
        "b": [search("b", 5.0, measured_s=2.0)],
        "none": [],
    }
    jobs = [job("a"), job("b", num_steps=10), job("none")]
    assert predicted_batch_s(jobs, searches, num_devices=2) == pytest.approx((100 * 1.0 + 10 * 2.0) / 2)


def test_what_is_unknown_has_no_bound():
    assert predicted_batch_s([job("a")], {"a": [search("a", None)]}, num_devices=1) is None
    trials = [trial(f"t{i}", 1.0) for i in range(20)]
    assert budget(None).affordable(trials, measured=()) == trials
    assert budget(0.1, share=None).affordable(trials, measured=()) == trials


def test_a_short_batch_is_not_tried_at_all():
    assert budget(TYPICAL_WAVE_S).affordable([trial("a", 0.1)], measured=()) == []
    assert budget(1000.0, share=0.0).affordable([trial("a", 0.1)], measured=()) == []


def test_as_many_waves_as_fit_unmeasured_jobs_first():
    trials = [trial("slow", 3.0), trial("quick", 1.0), trial("known", 0.5), trial("wide", 0.9, num_devices=2)]
    one_wave = budget(TYPICAL_WAVE_S / 0.2 * 1.5)
    assert names(one_wave.affordable(trials, measured={"known"})) == ["wide"]
    two_waves = budget(TYPICAL_WAVE_S / 0.2 * 2.5)
    assert names(two_waves.affordable(trials, measured={"known"})) == ["wide", "quick", "slow"]
    plenty = budget(1000.0)
    assert len(plenty.affordable(trials, measured={"known"})) == len(trials)


def test_what_waves_have_taken_counts():
    spent = budget(100.0)
    spent.spend(18.0, [trial("a", 1.0), trial("b", 1.0)])
    assert spent.affordable([trial("c", 1.0)], measured=()) == [], "a wave took 18 s, and 2 s are left"
    quick = replace(spent, spent_s=2.0, num_waves=2)
    assert len(quick.affordable([trial(f"t{i}", 1.0) for i in range(60)], measured=())) == 2 * 18
