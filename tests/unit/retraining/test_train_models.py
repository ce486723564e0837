"""A continued retraining run: it takes over what it has trained itself, and no models of earlier runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.errors import InputError, UntrainableJobs
from ringmaster.flows.caller import Caller
from ringmaster.flows.retraining import compare_models, train_models
from ringmaster.flows.retraining.select_models import InspectedModel, SelectedModels, _plain, _read
from ringmaster.model_lineage import Origin
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.retraining import promotion
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.tasks.retraining.promotion import DecisionRecord, ServingVersions
from ringmaster.tasks.retraining.selection import DueDecision
from ringmaster.techniques import DataSpec, Job, ModelSpec
from tests.unit.promotion.fakes import FakeLedger, version

NAME, BATCH_RUN = "shop.a", "the night's"
LOSSES = {"a": 2.0, "a-lr1": 1.0, "a-lr2": 3.0}


class Begun(Exception):
    """Raised when a batch is begun. jobs: the names of its jobs."""

    def __init__(self, jobs):
        self.jobs = jobs


class Ledger(FakeLedger):
    def metrics_of(self, record):
        return {"loss": LOSSES[record.origin.job]}

    def add_version(self, record, name, *, text):
        self.records.append(replace(record, registered_name=name, version=3))


def job(name):
    model = ModelSpec(architecture="LlamaForCausalLM")
    return Job(name=name, model=model, data=DataSpec(source="python-stdlib", seq_len=16), num_steps=4)


def made(number, *, job, name=NAME):
    return replace(version(number, digest="d1", name=name), origin=Origin(job=job, batch_run_id=BATCH_RUN))


@pytest.fixture
def run(monkeypatch):
    """A run whose process died before its batch began. Version 1 has the same data, and is of an earlier run."""
    old = replace(version(1, digest="d1", name=NAME), origin=Origin(job="a", batch_run_id="an earlier one"))
    ledger, content = Ledger([old]), {}
    jobs = tuple(map(job, LOSSES))
    batch = Batch.of(name="shop", jobs=jobs, objective="makespan", devices="auto", folder=Path("/"))
    content["training"] = batch.to_json()

    def standings():
        latest = [record for record in ledger.records if record.registered_name == NAME][-1]
        return {NAME: ServingVersions(name=NAME, champion=old, challenger=old, latest=latest)}

    def train_batch(said, **_):
        raise Begun([job.name for job in said.jobs])

    model = ProductionModel(registered_name=NAME, job=jobs[0], variants=jobs[1:])
    check = InspectedModel(
        model=model,
        serving=standings()[NAME],
        data={"digest": "d1"},
        due=DueDecision(is_due=True, why=""),
        newest_before=1,
    )
    monkeypatch.setattr(train_models, "can_go_on", lambda batch: False)
    monkeypatch.setattr(train_models, "_keep_what_was_read", lambda *_: None)
    monkeypatch.setattr(train_models, "train_batch", train_batch)
    production = SimpleNamespace(policy=None)
    return SimpleNamespace(
        content=content, ledger=ledger, standings=standings, save=lambda **said: content.update(said),
        batch=batch, check=check, production=production, caller=Caller(),
    )  # fmt: skip


def train(run):
    return train_models.train_models(run, {"a": run.check}, SelectedModels(batch=run.batch), seed=0)


def test_a_batch_that_was_never_begun_is_trained_though_an_old_version_is_of_the_same_data(run):
    with pytest.raises(Begun) as begun:
        train(run)
    assert begun.value.jobs == list(LOSSES)


def test_what_this_night_has_trained_is_not_trained_again_and_the_best_of_its_sweep_is_found(run):
    run.ledger.records += [made(2, job="a"), *(made(1, job=f"a-lr{i}", name=f"shop.a-lr{i}") for i in (1, 2))]
    assert train(run) is None
    assert run.content["is_trained"]
    newest = run.ledger.records[-1]
    assert (newest.registered_name, newest.version, newest.origin.job) == (NAME, 3, "a-lr1")


REFUSALS = {
    "of some jobs": ({"a-lr1": "it does not fit"}, {"a-lr1": "it does not fit"}, ["a", "a-lr2"]),
    "of the batch": (None, dict.fromkeys(LOSSES, "no plan meets the deadline"), None),
}


@pytest.mark.parametrize(("of_jobs", "refused", "tried_again"), REFUSALS.values(), ids=REFUSALS)
def test_what_a_batch_refuses_fails_and_the_other_jobs_are_trained(run, monkeypatch, of_jobs, refused, tried_again):
    tried = []

    def train_batch(batch, **_):
        tried.append([job.name for job in batch.jobs])
        if len(tried) == 2:
            raise Begun(tried[-1])
        cause = None if of_jobs is None else UntrainableJobs(of_jobs)
        raise InputError(["no plan meets the deadline"]) from cause

    monkeypatch.setattr(train_models, "train_batch", train_batch)
    if tried_again is None:
        assert train(run) is None
        assert run.content["is_trained"]
        verdict = compare_models._not_compared(
            run, run.check, run.standings()[NAME], SelectedModels(batch=run.batch), None
        )
        assert (verdict.outcome, verdict.why) == ("failed", "no plan meets the deadline")
    else:
        with pytest.raises(Begun) as begun:
            train(run)
        assert begun.value.jobs == tried_again
    assert run.content["refused"] == refused


def test_a_night_of_a_former_release_is_gone_on_with_by_its_data_alone(run):
    run.check = replace(run.check, newest_before=None)
    assert train(run) is None


@pytest.mark.parametrize(("newest", "outcome"), [(1, "failed"), (2, "promoted")])
def test_only_what_was_decided_of_this_nights_version_is_its_verdict(run, newest, outcome):
    if newest == 2:
        run.ledger.records.append(made(2, job="a"))
    promotion.write_decision(
        run.ledger,
        run.ledger.records[-1],
        DecisionRecord(version=newest, outcome="promoted", reasons=("better",)),
    )
    verdict = compare_models._not_compared(run, run.check, run.standings()[NAME], SelectedModels(batch=run.batch), None)
    assert verdict.outcome == outcome


def test_the_newest_version_is_kept_with_what_a_night_saw(run):
    run.download = lambda record: Path("/champion")
    said, where = _plain(run.check), run.standings()
    assert _read(run, run.check.model, where, said).newest_before == 1
    del said["newest"]
    assert _read(run, run.check.model, where, said).newest_before is None


@pytest.mark.parametrize("is_begun", [True, False])
def test_smaller_children_are_trained_after_the_deadline_only_where_they_were_begun(monkeypatch, tmp_path, is_begun):
    content = {"children_cost": 1.0}
    production = SimpleNamespace(
        devices=None, folder=tmp_path, entry=SimpleNamespace(night=SimpleNamespace(price_per_device_hour=1.0))
    )
    run = SimpleNamespace(
        is_late=True, caller=Caller(), production=production, content=content, save=lambda **more: content.update(more)
    )
    batch, trained = Batch(name="smaller", jobs=(job("a"),), folder=Path("elsewhere"), text=""), []

    def train_batch(batch, *, name, resume, seed, caller):
        trained.append((batch, resume))
        return SimpleNamespace(status="done", to_json=dict)

    monkeypatch.setattr(train_models, "can_go_on", lambda batch: is_begun)
    monkeypatch.setattr(train_models, "train_batch", train_batch)
    monkeypatch.setattr(train_models, "cost_of_batch", lambda result, *, price_per_device_hour: 2.0)
    if not is_begun:
        with pytest.raises(InputError, match="the deadline of the run has passed"):
            train_models.train_children(run, batch, seed=0)
        return
    train_models.train_children(run, batch, seed=0)
    assert trained == [(replace(batch, folder=tmp_path, devices=None), True)]
    assert content == {"children_cost": 3.0}
