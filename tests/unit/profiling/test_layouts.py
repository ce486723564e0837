"""Groups over several devices: the offered layouts, the trials and the predictions."""

from dataclasses import replace

import pytest

from ringmaster.tasks.planning.fusion import choose_groups
from ringmaster.tasks.profiling import stage as stages
from ringmaster.tasks.profiling import trials as trial_runner
from ringmaster.tasks.profiling.group_layouts import AGAIN, ONE_DEVICE, GroupLayout, classes, layouts
from ringmaster.tasks.profiling.group_search import group_profiles, group_searches, groups_among
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.profiling.search import ProfilingFailure, planning_problem
from ringmaster.techniques import OptimizerSpec
from ringmaster.techniques.preflight_result import Candidate, MemoryEstimate
from ringmaster.techniques.technique import SHARDED, WHOLE
from tests.unit.profiling.solos import FACTS, alone, cluster, job, preflight

TWO_WHOLE, TWO_SHARDED = GroupLayout(num_devices=2, base=WHOLE), GroupLayout(num_devices=2, base=SHARDED)
ONE_AGAIN = GroupLayout(recompute=AGAIN)
BASE_BYTES, LAYER_BYTES, OWN_BYTES = 1000, 100, 100
SHARE_BYTES = BASE_BYTES // 2 + 2 * LAYER_BYTES
DDP = {"micro_batch": 2, "recompute": "none"}
FSDP = {**DDP, "reshard": True}
AGAIN_BYTES = 10  # needed by a job in addition to the base where its activations are recomputed


def looked_at(job, *, fits=("single", "ddp", "fsdp"), **facts):
    """The preflight of a job that the given techniques can train. Each device needs OWN_BYTES in addition to the base.

    "again": `single`, with recomputed activations.
    """
    batch = job.global_batch_size
    configs = {
        "single": ("single", 1, {"micro_batch": batch, "recompute": "none"}, BASE_BYTES + OWN_BYTES, 0.7),
        "again": ("single", 1, {"micro_batch": batch, "recompute": "full"}, BASE_BYTES + AGAIN_BYTES, 0.9),
        "ddp": ("ddp", 2, DDP, BASE_BYTES + OWN_BYTES, 0.7),
        "fsdp": ("fsdp", 2, FSDP, SHARE_BYTES + OWN_BYTES, 0.7),
    }
    candidates = [
        Candidate(
            technique=technique,
            config=config,
            num_devices=num_devices,
            num_ranks=num_devices,
            least_bytes=1,
            memory=MemoryEstimate(device_bytes=device_bytes),
            step_s=step_s,
        )
        for name, (technique, num_devices, config, device_bytes, step_s) in configs.items()
        if name in fits
    ]
    known = replace(FACTS, parameter_bytes=BASE_BYTES, largest_layer_bytes=LAYER_BYTES, **facts)
    return replace(preflight(job), facts=known, candidates=tuple(candidates))


def measured(technique, step_s, config):
    return replace(alone(step_s, num_devices=2), technique=technique, config=config, num_ranks=2)


OWN = {"single": alone(1.0), "ddp": measured("ddp", 0.6, DDP), "fsdp": measured("fsdp", 0.7, FSDP)}


def num_in(profile):
    return 1 + len(profile.members)


class Batch:
    """Jobs that the given techniques can train alone. Trials of groups give made-up results by layout and size."""

    def __init__(self, num_jobs, *, num_devices, fits=("single", "ddp", "fsdp"), memory_bytes=10_000, jobs=None):
        self.jobs = jobs or [job(f"job-{i:02}") for i in range(num_jobs)]
        self.num_devices, self.memory_bytes = num_devices, memory_bytes
        self.preflights = {each.name: looked_at(each, fits=fits) for each in self.jobs}
        self.profiles = {each.name: tuple(OWN[name] for name in fits if name in OWN) for each in self.jobs}
        self.tried, self.told, self.kept = [], [], {}

    def classes(self):
        keys = {each.name: "key" for each in self.jobs}
        return {
            layout: classes(self.jobs, self.preflights, self.profiles, keys=keys, layout=layout)
            for layout in layouts(self.num_devices)
        }

    def searches(self):
        devices = cluster(self.num_devices, memory_bytes=self.memory_bytes)
        return group_searches(self.classes(), cluster=devices, num_nodes=1)

    def groups(self, step_s=None):
        """The profiles of groups. step_s: a trial's result or failure by devices and jobs; None runs no trials."""

        def measure(trials):
            for trial in trials:
                num_devices, size = trial.candidate.num_devices, 1 + len(trial.members)
                self.tried.append((trial.candidate.config.get("base"), num_devices, size))
                self.kept[trial.fingerprint] = (
                    ProfilingFailure(kind="failed", message=failed)
                    if isinstance(failed := step_s(num_devices, size), str)
                    else replace(alone(failed, num_devices=num_devices), technique="shared_base")
                )
            return {trial.fingerprint: self.kept[trial.fingerprint] for trial in trials}

        found = group_profiles(
            self.searches(),
            num_jobs=len(self.jobs),
            find=lambda names: {name: self.kept[name] for name in names if name in self.kept},
            measure=measure if step_s else None,
            notice=self.told.append,
        )
        return [profile for mine in found.values() for profile in mine]


def law(num_devices, size):
    return 0.4 / num_devices + 0.6 * size / num_devices


def test_gangs_are_of_one_two_four_devices_and_of_all():
    kept = ["one device", "2 devices", "2 devices, the base divided", "3 devices", "3 devices, the base divided"]
    again = [f"{each}, activations computed again" for each in kept]
    assert [str(layout) for layout in layouts(3)] == [*kept, *again]
    assert layouts(1) == [ONE_DEVICE, ONE_AGAIN]
    assert {layout.num_devices for layout in layouts(8)} == {1, 2, 4, 8}


def test_a_layout_knows_what_a_job_takes_like_that_by_itself():
    one = job("a")
    seen = looked_at(one)
    every = tuple(OWN.values())
    assert [layout.profile(one, seen, every) for layout in (ONE_DEVICE, TWO_WHOLE, TWO_SHARDED)] == list(every)
    assert TWO_WHOLE.profile(one, seen, (OWN["single"],)) is None
    slow, fast = replace(OWN["ddp"], technique="zero1", step_s=0.9), OWN["ddp"]
    assert TWO_WHOLE.profile(one, seen, (slow, fast)) is fast
    # No equal technique was measured, but one on as many devices was.
    assert TWO_SHARDED.profile(one, seen, (OWN["single"], replace(OWN["ddp"], technique="tensor"))).step_s == 0.7
    over_nodes = replace(OWN["ddp"], num_nodes=2)
    assert TWO_WHOLE.profile(one, seen, (over_nodes,)) is None


def test_memory_is_foretold_for_each_device():
    one = job("a", optimizer=OptimizerSpec(name="adamw"))
    seen = looked_at(one)
    assert (TWO_WHOLE.base_bytes(seen.facts), TWO_SHARDED.base_bytes(seen.facts)) == (BASE_BYTES, SHARE_BYTES)
    assert TWO_WHOLE.own_bytes(one, seen) == TWO_SHARDED.own_bytes(one, seen) == OWN_BYTES
    # A job alone also divides its adapter: 16 bytes a parameter, half of them on the other device.
    assert TWO_SHARDED.own_bytes(one, looked_at(one, num_trained=10)) == OWN_BYTES + 80
    assert TWO_SHARDED.own_bytes(one, looked_at(one, fits=("single", "ddp"))) is None
    gathered = looked_at(one, fits=("fsdp",))
    gathered = replace(gathered, candidates=(replace(gathered.candidates[0], config={**FSDP, "reshard": False}),))
    assert TWO_SHARDED.own_bytes(one, gathered) is None


def test_jobs_whose_batches_or_wishes_do_not_allow_it_are_in_no_class_of_that_size():
    jobs = [job("a"), job("b"), job("odd", global_batch_size=3), job("lone", num_devices=(1,)), job("c", exact=True)]
    batch = Batch(0, num_devices=2, jobs=jobs)
    seen = {layout: [[s.job.name for s in mine] for mine in found] for layout, found in batch.classes().items()}
    assert seen[TWO_WHOLE] == seen[TWO_SHARDED] == [["a", "b"]]
    assert [sorted(names) for names in seen[ONE_DEVICE]] == [["a", "b", "lone", "odd"]]


def test_a_base_that_no_device_can_hold_is_offered_divided_and_tried_as_the_first():
    batch = Batch(16, num_devices=4, fits=("fsdp",), memory_bytes=BASE_BYTES - 1 + 2 * OWN_BYTES)
    found = batch.groups(lambda num_devices, size: 0.3 + 0.4 * size)
    # 1199 bytes hold the share of the base, 700, and four adapters.
    assert {(p.num_devices, p.num_ranks, p.config["base"]) for p in found} == {(2, 2, SHARDED)}
    assert {num_in(p): p.at_once for p in found} == {2: None, 4: None, 8: 4, 16: 4}
    assert batch.tried == [(SHARDED, 2, 2)]
    assert all(p.gang_step_s == pytest.approx(0.3 + 0.4 * min(4, num_in(p))) for p in found)
    assert {p.source for p in found if num_in(p) == 2} == {"measured"}
    assert batch.told == [
        "job-00 and the 15 like it are not trained 8 or more together: a device has too little memory"
    ]


def test_where_jobs_are_many_more_than_devices_one_device_a_group_will_do():
    batch = Batch(32, num_devices=2)
    found = batch.groups(law)
    several = {num_in(p) for p in found if p.num_devices == 2}
    assert {num_in(p) for p in found if p.num_devices == 1} == {2, 4, 8, 16, 32}
    assert several == {32}  # 32 jobs on one device would take longer than half of the class on each device


def test_where_jobs_do_not_divide_evenly_groups_over_devices_are_offered_and_one_size_is_tried():
    batch = Batch(3, num_devices=2)
    found = batch.groups(law)
    assert batch.tried == [(None, 1, 2), (WHOLE, 2, 2)]
    assert {num_in(p) for p in found if p.num_devices == 1} == {2, 3}
    assert {(num_in(p), p.config["base"], p.source) for p in found if p.num_devices == 2} == {
        (2, WHOLE, "measured"),
        (3, WHOLE, "predicted"),
    }
    all_of_them = {p.num_devices: p.gang_step_s for p in found if num_in(p) == 3}
    assert all_of_them[2] < all_of_them[1]


def test_without_trials_there_a_group_pays_as_large_a_share_once_as_on_one_device():
    batch = Batch(3, num_devices=2)
    batch.groups(lambda num_devices, size: law(1, size))
    batch.kept = {k: p for k, p in batch.kept.items() if p.num_devices == 1}
    (over_two,) = (p for p in batch.groups() if p.num_devices == 2 and num_in(p) == 3)
    assert over_two.source == "predicted"
    assert over_two.gang_step_s == pytest.approx(0.6 * (0.4 + 0.6 * 3))  # 0.6: the step of a job alone on two devices


def test_what_memory_does_not_suffice_for_on_one_device_is_offered_divided():
    batch = Batch(8, num_devices=2, memory_bytes=BASE_BYTES + 3 * OWN_BYTES)
    found = batch.groups(law)
    assert {num_in(p): p.at_once for p in found if p.num_devices == 1} == {2: None, 4: 3, 8: 3}
    assert {num_in(p): p.at_once for p in found if p.config.get("base") == SHARDED} == {4: None}
    assert not any(p.config.get("base") == WHOLE for p in found)  # no more jobs fit there than on one device
    assert "not trained 8 or more together" in batch.told[0]


def test_what_is_computed_again_takes_longer_by_what_was_foretold_of_it():
    one = job("a")
    seen = looked_at(one, fits=("single", "again"))
    measured_again = replace(alone(1.1), config={"micro_batch": one.global_batch_size, "recompute": "full"})
    assert ONE_AGAIN.profile(one, seen, (OWN["single"],)).step_s == pytest.approx(0.9 / 0.7)
    assert ONE_AGAIN.profile(one, seen, (OWN["single"], measured_again)) is measured_again
    assert ONE_AGAIN.profile(one, seen, ()) is None
    unknown = replace(seen, candidates=tuple(replace(each, step_s=None) for each in seen.candidates))
    assert ONE_AGAIN.profile(one, unknown, (OWN["single"],)).step_s == pytest.approx(4 / 3)


def test_activations_are_computed_again_where_two_jobs_fit_no_other_way():
    fits = ("single", "again")
    batch, untried = (
        Batch(4, num_devices=1, fits=fits, memory_bytes=BASE_BYTES + OWN_BYTES + AGAIN_BYTES) for _ in range(2)
    )
    found = batch.groups(lambda num_devices, size: 0.4 + 0.6 * size)
    assert {(num_in(p), p.at_once, p.config["recompute"]) for p in found} == {(2, None, "full"), (4, None, "full")}
    assert len(batch.tried) == 2  # for the first layout in which a group fits
    assert all(p.peak_bytes == BASE_BYTES + num_in(p) * AGAIN_BYTES for p in untried.groups())


def test_activations_are_kept_where_memory_suffices():
    found = Batch(4, num_devices=1, fits=("single", "again")).groups(law)
    assert {p.config["recompute"] for p in found} == {"none"}


def test_what_fails_on_two_devices_is_still_trained_on_one():
    batch = Batch(3, num_devices=2)
    found = batch.groups(lambda num_devices, size: law(1, size) if num_devices == 1 else "no such luck")
    assert {p.num_devices for p in found} == {1}
    assert batch.told == [
        "job-00 and the 2 like it are not trained together on 2 devices, as a trial failed: no such luck"
    ]


def test_what_fails_on_one_device_is_not_tried_on_two():
    batch = Batch(3, num_devices=2)
    assert batch.groups(lambda *_: "no such luck") == []
    assert batch.tried == [(None, 1, 2)]


def test_some_of_the_jobs_are_offered_what_they_would_be_as_a_batch_of_their_own():
    whole, few = Batch(8, num_devices=2), Batch(3, num_devices=2)
    searches = whole.searches()
    among = [p for mine in groups_among([each.name for each in few.jobs], searches).values() for p in mine]
    assert {(p.num_devices, num_in(p)) for p in among} == {(p.num_devices, num_in(p)) for p in few.groups()}
    assert {num_in(p) for p in among if p.num_devices == 2} == {2, 3}
    assert groups_among(["job-00"], searches) == groups_among([], searches) == {}


def test_all_layouts_have_the_same_leader():
    jobs = [job("a", num_steps=500), job("b", num_steps=3000), job("c", num_steps=900)]
    found = Batch(0, num_devices=2, jobs=jobs).groups(law)
    orders = {p.num_devices: [f.job for f in p.members] for p in found if num_in(p) == 3}
    assert orders == {1: ["c", "a"], 2: ["c", "a"]}


def test_the_stage_offers_groups_of_one_device_and_of_several(monkeypatch, tmp_path):
    data = dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels"))
    tried = []

    def wave(_, trials, *, limit_s):
        found = {}
        for trial in trials:
            candidate, size = trial.candidate, 1 + len(trial.members)
            tried.append((candidate.technique, candidate.num_devices, size))
            step_s = law(candidate.num_devices, size)
            found[trial.fingerprint] = replace(OWN.get(candidate.technique, OWN["single"]), step_s=step_s)
        return found

    def poll(jobs, **_):
        return {each.name: replace(looked_at(each), data={**data, "num_held_out": 100}) for each in jobs}, {}

    monkeypatch.setattr(stages, "preflight_jobs", poll)
    monkeypatch.setattr(trial_runner, "run_wave", wave)
    devices = cluster(2)
    jobs = [job(f"job-{i}") for i in range(3)]
    environment = GangEnvironment(server=None, devices=devices.devices, cache_dir=tmp_path)
    profiled = stages.profile_jobs(jobs, environment=environment, cluster=devices, policy="thorough")
    assert [each for each in tried if each[0] == "shared_base"] == [("shared_base", 1, 2), ("shared_base", 2, 2)]
    problem = planning_problem(jobs, profiled.profiles, devices, name="x", groups=profiled.groups)
    fusion = choose_groups(problem)
    (segment,) = fusion.fused_plan.segments
    option = problem.job(segment.job).options[segment.option]
    assert (option.technique, option.num_devices, len(option.jobs)) == ("shared_base", 2, 2)
    assert option.config == {"recompute": "none", "base": WHOLE}
