"""Selection of models by time and cost: groups that the batch would train together, in seconds and device-hours."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster import extras
from ringmaster.flows.caller import Caller
from ringmaster.flows.retraining import select_models
from ringmaster.flows.retraining.select_models import InspectedModel
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.profiling.group_layouts import ONE_DEVICE, classes
from ringmaster.tasks.profiling.group_search import group_profiles, group_searches
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.profiling.trials import ProfileStore
from ringmaster.tasks.retraining.production import Production, ProductionEntry, ProductionModel, RetrainingEntry
from ringmaster.tasks.retraining.promotion import ServingVersions
from ringmaster.tasks.retraining.selection import DueDecision
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.job import DISTILLED, QUANTIZED, AdaptationSpec
from ringmaster.techniques.preflight_result import Candidate, Preflight
from tests.unit.profiling.solos import FACTS
from tests.unit.promotion.fakes import FakeLedger, version

# A job alone takes 50 s to start and 50 s to train. n jobs of one group start only once.
STARTUP_S, STEPS, NAMES = 50.0, 50, ("a", "b", "c", "d")
DEVICES = (Device(kind="cpu", index=0, name="x", memory_bytes=1 << 30, cores=(0,)),)
CLUSTER = Cluster(nodes=(Node(name="here", devices=DEVICES),))
SHAPE = dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels"))


def job(name):
    model = ModelSpec(from_pretrained="owner/llama")
    data = DataSpec(source="python-stdlib", seq_len=16)
    return Job(name=name, model=model, data=data, adapter=Adapter(), global_batch_size=4, num_steps=STEPS)


def preflight(name):
    config = {"micro_batch": 4, "recompute": "none"}
    whole = Candidate(technique="single", config=config, num_devices=1, num_ranks=1, least_bytes=1100)
    return Preflight(job=name, data={**SHAPE, "num_held_out": 9}, facts=FACTS, candidates=(whole,), refusals=())


def profiled_jobs(*, with_groups=True):
    alone = Profile(technique="single", num_devices=1, num_ranks=1, step_s=1.0, startup_s=STARTUP_S, peak_bytes=1100)
    jobs = [job(name) for name in NAMES]
    preflights, profiles = {name: preflight(name) for name in NAMES}, dict.fromkeys(NAMES, (alone,))
    found = classes(jobs, preflights, profiles, keys=dict.fromkeys(NAMES, "key"))
    searches = group_searches({ONE_DEVICE: found}, cluster=CLUSTER, num_nodes=1)
    groups = (
        group_profiles(searches, num_jobs=len(NAMES), find=lambda _: {}, measure=None, notice=print)
        if with_groups
        else {}
    )
    return ProfilingResult(jobs=tuple(jobs), preflights=preflights, profiles=profiles, groups=groups)


@pytest.fixture
def chosen(monkeypatch):
    def choose(
        *,
        deadline=None,
        minutes=None,
        budget=None,
        priorities=None,
        with_groups=True,
        based_on=None,
        clock=None,
        **keys,
    ):
        def profiled(jobs, **_):
            result = profiled_jobs(with_groups=with_groups)
            return replace(result, jobs=tuple(job for job in result.jobs if job.name in {job.name for job in jobs}))

        monkeypatch.setattr(select_models, "profile_task", profiled)
        deadline = deadline or (None if minutes is None else f"02:{minutes:02}")
        models = tuple(
            ProductionModel(registered_name=f"shop.{name}", job=job(name), priority=(priorities or {}).get(name, 0))
            for name in NAMES
        )
        night = RetrainingEntry(starts="02:00", deadline=deadline, budget=budget)
        entry = ProductionEntry(name="shop", night=night, **keys)
        production = Production(entry=entry, models=models, devices="auto", folder=Path("/"))
        bench = SimpleNamespace(
            batch=SimpleNamespace(profiling_share=0.05),
            cluster=CLUSTER,
            profile_store=ProfileStore(),
            environment=GangEnvironment(server=None, devices=DEVICES, cache_dir=Path()),
            lend=None,
        )
        run = SimpleNamespace(
            caller=Caller() if clock is None else Caller(clock=clock),
            production=production,
            node_context=bench,
            ledger=FakeLedger([]),
            deadline_s=night.deadline_of("2026-11-20"),
            left_s=None
            if deadline is None
            else night.deadline_of("2026-11-20") - datetime(2026, 11, 20, 2, tzinfo=UTC).timestamp(),
            is_late=False,
            left_by_earlier=lambda _: {},
        )
        checks = {
            model.name: InspectedModel(
                model=model,
                serving=ServingVersions(name=model.registered_name, champion=(based_on or {}).get(model.name)),
                due=DueDecision(is_due=True, why="new data"),
            )
            for model in models
        }
        return select_models._plan_selection(run, checks)

    return choose


def test_the_batch_has_the_trackers_of_the_file(chosen, monkeypatch):
    monkeypatch.setitem(extras.PACKAGES, "trackio", ())
    assert json.loads(chosen(trackers=["trackio"]).batch.text)["trackers"] == ["trackio"]


def test_more_fits_in_the_night_where_jobs_are_trained_together(chosen):
    together, alone = chosen(minutes=5), chosen(minutes=5, with_groups=False)
    assert [job.name for job in together.batch.jobs] == list(NAMES)
    assert together.left == {}
    assert (together.plan["num_groups"], together.plan["num_fused"]) == (1, 4)
    assert together.plan["makespan_s"] == pytest.approx(STARTUP_S + 4 * STEPS)
    assert "a +3" in together.svg
    assert [job.name for job in alone.batch.jobs] == ["a", "b", "c"]
    assert alone.plan["num_groups"] == 0


HOURS = [5.0] * 3 + [1.0] * 2 + [5.0] * 19


def test_the_plan_waits_for_cheap_hours_within_the_deadline(chosen):
    starts_s = datetime(2026, 11, 20, 2, tzinfo=UTC).timestamp()  # the cheap hours begin at 3
    keys = {"objective": "cost", "price": HOURS, "time_zone": "UTC", "clock": lambda: starts_s, "with_groups": False}
    in_time, soon = chosen(minutes=59, **keys), chosen(deadline="04:00", **keys)
    (due_s,) = {*in_time.batch.deadlines_s.values()}
    assert due_s == 59 * 60 and in_time.plan["makespan_s"] < due_s
    assert in_time.plan["cost"] == pytest.approx(4 * 5.0 * 100 / 3600)
    assert soon.plan["makespan_s"] > 3600 and soon.plan["cost"] == pytest.approx(4 * 1.0 * 100 / 3600)
    assert soon.plan["unit"] == "in the currency of the prices" and soon.batch.objective == "cost"
    assert soon.batch.terms.features[0].every.price.values == tuple(HOURS)


def test_those_that_fit_are_grouped_as_a_batch_of_their_own(chosen):
    """The job that would lead the whole group is left out."""
    found = chosen(minutes=4, priorities={"b": 1, "c": 1, "d": 1})
    assert [job.name for job in found.batch.jobs] == ["b", "c", "d"]
    assert found.plan["makespan_s"] == pytest.approx(STARTUP_S + 3 * STEPS)
    assert list(found.left) == ["a"]


def test_a_model_whose_base_cannot_be_used_is_left_alone(chosen):
    found = chosen(with_groups=False, based_on={"a": version(1, name="shop.a"), "c": version(4, name="shop.c")})
    assert [job.name for job in found.batch.jobs] == ["b", "d"]
    assert {name: why[:26] for name, why in found.unfit.items()} == {
        "a": "job a: base models:/shop.a",
        "c": "job c: base models:/shop.c",
    }


@pytest.mark.full
def test_the_devices_of_a_group_are_paid_once(chosen):
    budget = (STARTUP_S + 4 * STEPS + 1) / 3600
    together, alone = chosen(budget=budget), chosen(budget=budget, with_groups=False)
    assert [job.name for job in together.batch.jobs] == list(NAMES)
    assert together.plan["cost"] == pytest.approx((STARTUP_S + 4 * STEPS) / 3600)
    assert [job.name for job in alone.batch.jobs] == ["a", "b"]
    assert "would cost 0.0833" in alone.left["c"]


def test_a_model_is_trained_on_from_the_version_in_whose_place_a_smaller_one_serves():
    large = version(1)
    student = replace(version(7, name="smaller.prices"), kind=DISTILLED, parents=(large.model_id,))
    small = replace(version(2), kind=QUANTIZED, parents=(student.model_id,))
    run = SimpleNamespace(ledger=FakeLedger([large, student, small]))
    model = ProductionModel(registered_name="shop.prices", job=job("prices"))
    assert select_models._larger(run, model, small) == large
    assert select_models._larger(run, model, large) == large
    quantizes = replace(model, job=model.job.with_features(AdaptationSpec(kind=QUANTIZED)))
    assert select_models._larger(run, quantizes, small) == small
    alone = SimpleNamespace(ledger=FakeLedger([small]))
    assert select_models._larger(alone, model, small) == small
