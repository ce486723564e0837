"""The search over configs: it tries few, and the same ones whether results are new or were known."""

import random

import pytest

from ringmaster.tasks.profiling.search import FAR_BEHIND, MAX_MISSES, ConfigSearch, ProfilingFailure, worthwhile
from ringmaster.techniques import Profile
from ringmaster.techniques.preflight_result import Candidate
from tests.unit.profiling.solos import FACTS


def candidates(number, technique="single", num_devices=1):
    return [
        Candidate(
            technique=technique,
            config={"micro_batch": i},
            num_devices=num_devices,
            num_ranks=num_devices,
            least_bytes=1,
        )
        for i in range(number)
    ]


def profile(step_s, technique="single", num_devices=1):
    return Profile(technique=technique, num_devices=num_devices, num_ranks=num_devices, step_s=step_s, peak_bytes=1)


NO_ROOM = ProfilingFailure(kind="out_of_memory", message="no room")
REFUSED = ProfilingFailure(kind="refused", message="kernels attention:flash are left out")
BROKEN = ProfilingFailure(kind="failed", message="broken")


def tried(*outcomes, **options):
    """The search after trials with the given outcomes. The outcomes must all be used."""
    every = candidates(8, **options)
    search = ConfigSearch(key="k", job="j", candidates=every, fingerprints=[f"{options}{i}" for i in range(8)])
    known, left = {}, list(outcomes)
    while (wanted := search.next_trial()) is not None:
        known[wanted[0]] = left.pop(0)
        search.take(known)
    assert not left
    return search


def test_it_ends_after_some_configs_that_are_no_faster():
    slower = [profile(1.1)] * MAX_MISSES
    assert len(tried(profile(1.0), *slower).profiles) == 1 + MAX_MISSES
    assert len(tried(profile(2.0), profile(1.0), profile(1.0), profile(0.9), *slower).profiles) == 4 + MAX_MISSES


def test_what_runs_out_of_memory_or_differs_too_much_is_passed_over():
    search = tried(NO_ROOM, REFUSED, profile(1.0), *[profile(2.0)] * MAX_MISSES)
    assert [p.step_s for p in search.profiles] == [1.0, *[2.0] * MAX_MISSES]
    assert search.failures == (NO_ROOM, REFUSED)


def test_memory_that_never_suffices_gives_no_profile():
    assert tried(*[NO_ROOM] * 8).profiles == ()


def test_what_is_broken_ends_it():
    assert tried(BROKEN).failures == (BROKEN,)


def test_what_is_known_is_not_tried_again():
    search = ConfigSearch(key="k", job="j", candidates=candidates(3), fingerprints=["a", "b", "c"])
    search.take({"a": profile(2.0), "b": profile(1.0)})
    assert search.next_trial()[0] == "c"
    search.take({"c": profile(3.0)})
    assert search.next_trial() is None


def test_techniques_far_behind_on_as_many_devices_are_not_refined():
    def search(technique, num_devices, step_s):
        found = ConfigSearch(
            key="k",
            job="j",
            candidates=candidates(1, technique, num_devices),
            fingerprints=[technique + str(num_devices)],
        )
        if step_s is not None:
            found.results["x"] = profile(step_s, technique, num_devices)
        return found

    alone = search("single", 1, 1.0)
    best, near = search("ddp", 2, 1.0), search("fsdp", 2, FAR_BEHIND * 0.99)
    behind, untried = search("single", 2, FAR_BEHIND * 1.01), search("zero2", 2, None)
    assert worthwhile([alone, best, near, behind, untried]) == [alone, best, near, untried]
    behind.key = "another job's"
    assert behind in worthwhile([alone, best, near, behind, untried])


@pytest.mark.parametrize("seed", range(8))
def test_what_one_batch_measured_is_all_that_the_next_one_wants(seed, monkeypatch, tmp_path):
    """Otherwise a second run of a batch would continue the search where the first one had stopped."""
    from ringmaster.tasks.profiling import stage
    from ringmaster.tasks.profiling import trials as trial_runner
    from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
    from ringmaster.techniques.preflight_result import Preflight
    from tests.unit.execution.fakes import cluster, job

    draw, measured, kept = random.Random(seed), [], {}
    data = dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels"))
    data["num_held_out"] = 100
    every = [c for t, n in [("single", 1), ("single", 2), ("ddp", 2), ("fsdp", 2)] for c in candidates(6, t, n)]
    jobs = [job(name, global_batch_size=size) for name, size in (("a", 8), ("b", 8), ("c", 16))]

    def poll(jobs, **_):
        preflights = {
            j.name: Preflight(job=j.name, data=data, facts=FACTS, candidates=tuple(every), refusals=()) for j in jobs
        }
        return preflights, {}

    def wave(environment, trials, *, limit_s):
        assert len({trial.fingerprint for trial in trials}) == len(trials)
        measured.extend(trial.fingerprint for trial in trials)
        return {t.fingerprint: outcome(t.candidate) for t in trials}

    def outcome(candidate):
        if draw.random() < 0.2:
            return NO_ROOM
        return profile(draw.uniform(1, 2), candidate.technique, candidate.num_devices)

    monkeypatch.setattr(stage, "preflight_jobs", poll)
    monkeypatch.setattr(trial_runner, "run_wave", wave)
    known = stage.ProfileStore(find=lambda names: {n: kept[n] for n in names if n in kept}, keep=kept.__setitem__)
    node = cluster(2)
    environment = GangEnvironment(server=None, devices=node.devices, cache_dir=tmp_path)
    first = stage.profile_jobs(jobs, environment=environment, cluster=node, profile_store=known, policy="thorough")
    assert first.num_trials == len(measured) == len(set(measured)) > 8
    assert first.profiles["a"] == first.profiles["b"] != first.profiles["c"]
    second = stage.profile_jobs(jobs, environment=environment, cluster=node, profile_store=known, policy="thorough")
    assert second.num_trials == 0
    assert second.profiles == first.profiles
