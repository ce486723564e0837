"""The preflight of a batch: bases with other tokens, and what is shown of the data."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringmaster.codec import to_json
from ringmaster.features.target.job import Variables
from ringmaster.tasks.profiling import preflight_runs as stage
from ringmaster.techniques import Adapter, DataSpec, OptimizerSpec
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.estimates.job_preflight import num_workers
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.technique import GangShape
from tests.unit.profiling.solos import job, preflight


@pytest.fixture
def prepared(tmp_path):
    """A function prepared(name, words) that returns the JSON form of data with a tokenizer of some words."""

    def prepare(name, words):
        (tmp_path / name / "tokenizer").mkdir(parents=True)
        vocabulary = {word: number for number, word in enumerate(words)}
        (tmp_path / name / "tokenizer" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        facts = {"digest": name, "num_samples": 1, "num_held_out": 1, "kind": "tokens", "source": name}
        return to_json(PreparedData(name=name, folder=str(tmp_path / name), **facts))

    return prepare


@pytest.mark.parametrize(("words", "is_refused"), [("ba", True), ("ab", False)])
def test_a_job_whose_base_has_other_tokens_is_refused_before_training(
    prepared, tmp_path, monkeypatch, words, is_refused
):
    jobs = (job("first"), job("second", base="first"))
    data = {"first": prepared("one", "ab"), "second": prepared("other", words)}

    def inspect(order, preflights, fail, **_):
        preflights |= {each.name: replace(preflight(each), data=data[each.name]) for each in order.jobs}
        return 0

    monkeypatch.setattr(stage, "_preflight", inspect)
    order, told = PreflightOrder(jobs=jobs, shapes=(), techniques={}, cache_dir=str(tmp_path), cores=()), []
    found, faults = stage.run_preflight(order, server=None, notice=print, failed=lambda job, why: told.append(job))
    assert sorted(found) == (["first"] if is_refused else ["first", "second"])
    assert sorted(faults) == told == (["second"] if is_refused else [])
    assert all("its base first is trained with another tokenizer" in why for why in faults.values())
    assert all("To fix: set data.tokenizer" in why for why in faults.values())


def test_workers_of_local_updates_are_chosen_once_and_only_where_they_are_permitted():
    found = replace(preflight(job("a")), workers=4)
    permitted = replace(job("a"), features=(Variables(sync_every=(1, 8)),))
    assert found.settled(job("a")).features == ()
    assert found.settled(permitted).feature(Variables).workers == 4
    given = permitted.with_features(Variables(sync_every=(1, 8), workers=2))
    assert found.settled(given).feature(Variables).workers == 2
    gangs = [GangShape(kind="cpu", num_devices=num, memory_bytes=1) for num in range(1, 7)]
    assert num_workers(replace(job("a"), global_batch_size=16), gangs) == 4
    assert num_workers(replace(job("a"), global_batch_size=16, num_devices=(1, 2)), gangs) == 2
    assert num_workers(replace(job("a"), global_batch_size=7), gangs) == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_jobs_that_differ_in_nothing_that_is_inspected_are_inspected_once(prepared, tmp_path, monkeypatch, is_refused):
    """A grid of learning rates and seeds; another batch size is another inspection."""
    first = job("first")
    lr = replace(first, name="lr", optimizer=replace(first.optimizer, lr=0.5), seed=7, num_steps=3, num_epochs=None)
    other = replace(first, name="other", global_batch_size=2 * first.global_batch_size)
    inspected, data = [], prepared("one", "ab")

    def inspect(order, preflights, fail, **_):
        inspected.extend(each.name for each in order.jobs)
        for each in order.jobs:
            if is_refused:
                fail(each.name, "no")
            else:
                preflights[each.name] = replace(preflight(each), data=data)
        return 0

    monkeypatch.setattr(stage, "_preflight", inspect)
    order, told = PreflightOrder(jobs=(first, lr, other), shapes=(), techniques={}, cache_dir=str(tmp_path)), []
    found, faults = stage.run_preflight(order, server=None, notice=print, failed=lambda job, why: told.append(job))
    assert inspected == ["first", "other"]
    assert sorted(faults if is_refused else found) == ["first", "lr", "other"]
    assert sorted(told) == sorted(faults)
    assert all(name == each.job for name, each in found.items())


def test_a_preflight_that_was_started_ahead_is_not_made_again(prepared, tmp_path, monkeypatch):
    first, data, inspected, lines, told = job("first"), prepared("one", "ab"), [], [], []

    def inspect(order, preflights, fail, *, notice, **_):
        inspected.extend(each.name for each in order.jobs)
        preflights["first"] = replace(preflight(first), data=data)
        fail("second", "no")
        notice("preflight")
        return 0

    monkeypatch.setattr(stage, "_preflight", inspect)
    order = PreflightOrder(
        jobs=(first, replace(first, name="second", global_batch_size=3)),
        shapes=(),
        techniques={},
        cache_dir=str(tmp_path),
    )
    ahead = stage.PreflightAhead(order, server=None, notice=lines.append)
    other = replace(order, jobs=(first,))
    assert ahead.result(other, notice=print, failed=print) is None
    found, faults = ahead.result(order, notice=lines.append, failed=lambda name, why: told.append((name, why)))
    assert (list(found), faults, told) == (["first"], {"second": "no"}, [("second", "no")])
    assert (inspected, lines) == (["first", "second"], ["preflight"])


def test_a_preflight_that_could_not_be_made_ahead_has_no_result(tmp_path):
    def spawn(**_):
        raise RuntimeError("the fork server did not start")

    order = PreflightOrder(jobs=(job("first"),), shapes=(), techniques={}, cache_dir=str(tmp_path))
    ahead = stage.PreflightAhead(order, server=SimpleNamespace(spawn=spawn), notice=print)
    assert ahead.result(order, notice=print, failed=print) is None


def test_jobs_with_other_bases_are_inspected_each():
    """The weights of each base are compared with the model; those of a job of the batch are not there yet."""
    jobs = [job(name, base=f"models:/{name}@champion") for name in ("a", "b", "c")]
    weights = {"a": "/cache/one", "b": "/cache/two", "c": "/cache/one"}
    a, b, c = (stage.preflight_key(each, weights=weights) for each in jobs)
    assert a == c != b
    assert a != stage.preflight_key(jobs[0], weights={}) != stage.preflight_key(job("a"), weights={})


def test_text_without_a_kind_is_shown_before_planning(prepared):
    text = replace(job("text"), data=DataSpec(path="prose.txt", seq_len=8))
    found = stage.data_lines([text], {"text": replace(preflight(text), data=prepared("prose", "ab"))})
    assert found == ["text: prose as language-modeling; 1 samples to train on, 1 held out"]


def test_jobs_that_differ_in_what_scales_a_gradient_are_inspected_once():
    """A weight decay that an optimizer may refuse, or none, is another inspection."""

    def key(decay=None, alpha=16.0):
        options = {} if decay is None else {"weight_decay": decay}
        own = replace(job("a"), adapter=Adapter(alpha=alpha), optimizer=OptimizerSpec(options=options))
        return stage.preflight_key(own, weights={})

    assert key(0.1) == key(0.01) == key(0.1, alpha=32.0)
    assert len({key(), key(0.0), key(0.1), key(-0.1)}) == 4
