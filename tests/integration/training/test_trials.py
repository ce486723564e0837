"""Trials: profiles are measured on the real devices, once."""

from dataclasses import replace

import pytest

from ringmaster.errors import UntrainableJobs
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.profiling import stage, trials
from ringmaster.tasks.profiling.machine_load import QuietTimes
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, preflight_jobs
from ringmaster.tasks.profiling.profile_store import ProfileStore
from ringmaster.tasks.profiling.stage import profile_jobs
from ringmaster.techniques import Adapter, DataSpec, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.processes.gang_events import ReferenceTimed
from ringmaster.techniques.profiles import PREDICTED
from tests.integration.stubs import Picky
from tests.integration.workbench import RESNET, VIT


@pytest.fixture
def here(bench):
    def make(*, memory_bytes=1 << 33, num_devices=2):
        devices = tuple(
            Device(kind="cpu", index=i, name="test", memory_bytes=memory_bytes, cores=bench.slot(i).cores)
            for i in range(num_devices)
        )
        environment = GangEnvironment(server=bench.server, devices=devices, cache_dir=bench.cache_dir)
        return {"environment": environment, "cluster": Cluster(nodes=(Node(name="here", devices=devices),))}

    return make


@pytest.fixture
def known():
    kept = {}
    memory = ProfileStore(find=lambda names: {n: kept[n] for n in names if n in kept}, keep=kept.__setitem__)
    return memory, kept


@pytest.mark.full
def test_a_second_run_tries_nothing(bench, here, known):
    memory, kept = known
    job = bench.job(num_steps=None, num_epochs=2.0, techniques=("single", "ddp", "fsdp"))
    jobs = [
        job,
        replace(job, name="other-lr", optimizer=OptimizerSpec(name="sgd", lr=1.0)),
        bench.job(RESNET, name="r"),
    ]
    first = profile_jobs(jobs, **here(), profile_store=memory, policy="thorough")
    assert first.faults == {}
    assert first.num_trials == len(kept) >= 4
    assert first.profiles["tiny"] == first.profiles["other-lr"]
    assert {(p.technique, p.num_devices, p.num_ranks) for p in first.profiles["tiny"]} == {
        ("single", 1, 1),
        ("single", 2, 1),
        ("ddp", 2, 2),
    }
    needless = {(r.technique, r.num_devices): r.reason for r in first.preflights["tiny"].refusals}
    assert "memory to spare" in needless["fsdp", 2]
    assert {p.technique for p in first.profiles["r"]} == {"single"}
    for profile in first.profiles["tiny"]:
        assert profile.source == "measured"
        assert min(profile.step_s, profile.save_s, profile.stall_s, profile.export_s, profile.evaluate_s) > 0
        assert profile.startup_s >= 0
        assert 1e6 < profile.peak_bytes < 4e9
    reasons = {(r.technique, r.num_devices): r.reason for r in first.preflights["r"].refusals}
    assert "dividing a batch changes its gradients" in reasons["ddp", 2]
    samples = first.preflights["tiny"].data["num_samples"]
    assert first.jobs[0].total_steps == round(2 * samples / 8)

    second = profile_jobs(jobs, **here(), profile_store=memory, policy="thorough")
    assert second.num_trials == 0
    assert second.profiles == first.profiles


@pytest.mark.full
def test_what_a_busy_machine_measured_is_stored_with_its_load(bench, here, known, tmp_path):
    place = here()
    place["environment"] = replace(place["environment"], cache_dir=tmp_path)
    # By this, the machine was far faster before.
    QuietTimes(tmp_path).load([ReferenceTimed(kind="cpu x1", mean_s=1e-6, fastest_s=1e-6)])
    memory, kept = known
    jobs = [bench.job(techniques=("single",), num_devices=(1,))]
    first = profile_jobs(jobs, **place, profile_store=memory, policy="thorough")
    assert {(profile.source, profile.load) for profile in first.profiles["tiny"]} == {("measured", 1.0)}
    assert all(row["load"] > 1.0 for row in kept.values())
    same = profile_jobs(jobs, **place, profile_store=memory, policy="thorough")
    assert same.num_trials == 0


@pytest.mark.full
def test_groups_are_measured_too_and_a_second_run_tries_nothing(bench, here, known):
    memory, kept = known
    job = bench.job(adapter=Adapter(rank=4), num_steps=10**6, techniques=("single", "shared_base"), num_devices=(1,))
    jobs = [replace(job, name=f"tiny-{i}", optimizer=OptimizerSpec(lr=10**-i)) for i in range(3)]
    jobs.append(replace(job, name="by-itself", num_steps=3, techniques=("single",)))
    first = profile_jobs(jobs, **here(), profile_store=memory, policy="thorough")
    assert first.faults == {}
    (pair,) = (row for row in kept.values() if row.get("technique") == "shared_base")
    assert min(pair[key] for key in ("step_s", "startup_s", "save_s", "stall_s", "evaluate_s", "export_s")) > 0
    assert 1e6 < pair["peak_bytes"] < 4e9
    # Whether groups save time depends on the machine.
    assert set(first.groups) <= {"tiny-0", "tiny-1"}
    assert "shared_base" not in {profile.technique for mine in first.profiles.values() for profile in mine}
    assert first.num_trials == len(kept)
    second = profile_jobs(jobs, **here(), profile_store=memory, policy="thorough")
    assert second.num_trials == 0
    assert (second.profiles, second.groups) == (first.profiles, first.groups)


@pytest.mark.full
def test_what_runs_out_of_memory_is_passed_over_and_remembered(bench, here, known):
    memory, kept = known
    registry.register(Picky)
    try:
        jobs = [bench.job(techniques=("picky",), num_devices=(1,))]
        first = profile_jobs(jobs, **here(), profile_store=memory, policy="thorough")
        second = profile_jobs(jobs, **here(), profile_store=memory, policy="thorough")
    finally:
        del registry.TECHNIQUES.registered["picky"]
    assert [p.config["micro_batch"] for p in first.profiles["tiny"]][:1] == [2]
    failures = {row["message"] for row in kept.values() if "kind" in row}
    assert failures == {"rank 0: MemoryError: more than two rows"}
    assert (first.num_trials, second.num_trials) == (len(kept), 0)


def test_a_job_that_fits_nowhere_says_why_and_the_others_are_profiled(bench, here):
    jobs = [
        bench.job(),
        bench.job(VIT, name="alone", techniques=("single",), num_devices=(1,)),
        bench.job(name="wrong", model=replace(VIT, config={"no_such_key": 1, "patch_size": 3})),
    ]
    profiled = profile_jobs(jobs, **here(memory_bytes=1 << 16))
    assert profiled.num_trials == 0
    begin = "no technique can train it here: needs 0.0 GiB of 0.0 a device at the least (single on 1"
    assert profiled.faults["tiny"].startswith(begin)
    assert "patch_size" in profiled.faults["wrong"] or "no_such_key" in profiled.faults["wrong"]
    assert set(profiled.faults) == {"tiny", "alone", "wrong"}


def test_a_trial_that_fails_says_so(bench, here):
    job = bench.job(loss="tests.integration.stubs:loss_of_few", num_devices=(1,))
    told = {}
    profiled = profile_jobs([job], **here(), failed=told.__setitem__, policy="thorough")
    assert profiled.profiles["tiny"] == ()
    assert profiled.faults["tiny"] == told["tiny"] == "rank 0: RuntimeError: no such luck (in its trial)"


def test_what_is_killed_from_outside_is_tried_again(bench, here, tmp_path):
    data = DataSpec(factory="tests.integration.stubs:points_that_kill_at_first", kwargs={"folder": str(tmp_path)})
    model = ModelSpec(factory="tests.integration.stubs:dropping_line")
    job = bench.job(model, data=data, loss="tests.integration.stubs:squared_error", techniques=("single",))
    notices = []
    # With two devices, a copy of the trial runs on the other one, and might be killed instead.
    jobs = [replace(job, num_devices=(1,))]
    profiled = profile_jobs(jobs, **here(num_devices=1), notice=notices.append, policy="thorough")
    assert profiled.faults == {}
    assert {profile.technique for profile in profiled.profiles["tiny"]} == {"single"}
    assert {file.name for file in tmp_path.iterdir()} == {"look", "trial"}
    assert [line.partition(":")[0] for line in notices if "again" in line] == [
        "trying again what was killed (attempt 2 of 3)"
    ]


def test_jobs_that_cannot_take_a_step_are_all_named_before_any_trial(bench, here):
    jobs = [
        bench.job(),
        replace(bench.job(loss="tests.integration.stubs:loss_that_fails"), name="lossless"),
        replace(bench.job(data=DataSpec(factory="tests.integration.stubs:points_alone")), name="alone"),
    ]
    notices = []
    with pytest.raises(UntrainableJobs) as refused:
        profile_jobs(jobs, **{**here(), "notice": notices.append}, all_or_none=True)
    assert list(refused.value.faults) == ["lossless", "alone"]
    assert "loss: it cannot be computed" in refused.value.faults["lossless"]
    assert "RuntimeError: no such luck" in refused.value.faults["lossless"]
    assert "To fix: return (training, held_out)" in refused.value.faults["alone"]
    assert not any(notice.startswith("trying") for notice in notices)


def test_a_job_is_planned_on_predictions_without_any_trial(bench, here, known):
    memory, kept = known
    profiled = profile_jobs([bench.job(num_steps=10**6)], **here(), profile_store=memory)
    assert (profiled.num_trials, kept, profiled.faults) == (0, {}, {})
    assert {profile.source for profile in profiled.profiles["tiny"]} == {PREDICTED}
    assert len({(p.technique, p.num_devices) for p in profiled.profiles["tiny"]}) == len(profiled.profiles["tiny"]) > 2


def test_a_trial_that_hangs_is_killed_at_its_limit(bench, here, monkeypatch):
    """A loss that sleeps: neither its gang nor that of its busy neighbour is waited for."""

    def unpredicted(*args, **options):
        preflights, faults = preflight_jobs(*args, **options)
        for name, preflight in preflights.items():
            candidates = tuple(replace(each, step_s=None) for each in preflight.candidates)
            preflights[name] = replace(preflight, candidates=candidates)
        return preflights, faults

    monkeypatch.setattr(stage, "preflight_jobs", unpredicted)
    monkeypatch.setattr(trials.ProfilingLimits, "left_s", lambda *_, **__: 4.0)
    notices = []
    jobs = [bench.job(loss="tests.integration.stubs:loss_that_hangs", num_devices=(1,))]
    profiled = profile_jobs(jobs, **here(), notice=notices.append)
    assert profiled.num_trials == 1
    assert {profile.source for profile in profiled.profiles["tiny"]} == {PREDICTED}
    assert any("its prediction remains: it took more than 4 s" in line for line in notices)
