"""Fingerprints are equal where jobs cannot differ in speed, and differ where they can."""

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from itertools import accumulate

import pytest

from ringmaster.codec import SINCE_LATER, from_json, to_json
from ringmaster.features.kernels.job import Numerics
from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.features.stores.job import StoreSettings
from ringmaster.features.target.job import Target
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.tasks.profiling import profile_store as module
from ringmaster.tasks.profiling.profile_store import fingerprint, speed_key
from ringmaster.techniques import (
    AdaptationSpec,
    Adapter,
    DataSpec,
    EvaluationSpec,
    Job,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from ringmaster.techniques.job import SAME, Composition
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.job_specs import ParameterGroup
from tests.unit.profiling.solos import FACTS

JOB = Job(
    name="a",
    model=ModelSpec(architecture="LlamaForCausalLM", config={"hidden_size": 32}),
    data=DataSpec(source="python-stdlib", seq_len=24),
    num_steps=10,
)
DATA = {
    "kind": "tokens",
    "seq_len": 24,
    "vocab_size": 300,
    "num_labels": None,
    "image_size": None,
    "num_channels": None,
    "num_held_out": 9_000,
    "num_samples": 90,
    "digest": "x",
    "folder": "/somewhere",
}


# A job that sets what others nest in, so that each field of each class has a place.
FULL = replace(
    replace(JOB, base="b"),
    adapter=Adapter(),
    clip_grad_norm=1.0,
    optimizer=OptimizerSpec(layer_decay=0.8, groups=(ParameterGroup(match="*.bias", lr=0.1, weight_decay=0.2),)),
    loss_options={"beta": 0.1},
    features=(
        AdaptationSpec(
            kind="distilled",
            teacher="t",
            teacher_model=ModelSpec(from_pretrained="t"),
            parents=("p",),
            weights=(1.0,),
            composition=Composition(component="c", jobs=("a", "b"), paths=("x", "y"), weights=(1.0, 1.0)),
        ),
        LocalUpdates(workers=2, sync_every=8),
        Numerics(tolerance=1e-5),
        StoreSettings(),
        Target(metric="loss", at_most=1.0),
        Untrusted(allow_untrusted=True),
        WarmStart(checkpoints="c", step=3),
    ),
)
# Fields whose presence costs time, and whose values do not.
SAME_VALUE = {"clip_grad_norm", "optimizer.layer_decay", "optimizer.groups.lr"}


NAMES = {"data.kind": "chat", "loss": "mine:loss", "evaluation.metrics": ("loss", "accuracy")}


def other(value, hint):
    """Another value of a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, value[0] if value else "x")
    if isinstance(value, Mapping):
        return {**value, "x": 1}
    assert value is None
    by_kind = {"tuple[str": ("x",), "tuple[int": (1,), "Mapping": {"x": "y"}, "str": "x", "int": 3, "float": 0.5}
    by_kind["WarmStart"] = WarmStart(checkpoints="x", step=3)
    return next(made for kind, made in by_kind.items() if kind in str(hint))


def pairs(value, path=""):
    """Yields each field of a job by its dotted name, with the job in which only this field differs."""
    for each in fields(value):
        item, name = getattr(value, each.name), f"{path}{each.name}"
        if name == "features":
            for part in item:
                for inner, new in pairs(part, f"{part.key}." if part.key else ""):
                    yield inner, value.with_features(new)
        elif is_dataclass(item):
            yield from ((inner, replace(value, **{each.name: new})) for inner, new in pairs(item, f"{name}."))
        elif name == "optimizer.groups":
            yield from ((inner, replace(value, groups=(new,))) for inner, new in pairs(item[0], f"{name}."))
            yield name, replace(value, groups=(*item, *item))
        else:
            yield name, replace(value, **{each.name: NAMES.get(name, other(item, each.type))})


def test_a_profile_stands_for_another_job_only_if_nothing_that_costs_time_differs():
    compared = dict(pairs(FULL))
    names = {each.name for each in fields(Job)} - {"features"}
    assert {path.split(".")[0] for path in compared} == names | {
        key for each in FULL.features for key in each.job_keys()
    }
    same = {name for name, job in compared.items() if speed_key(job, DATA) == speed_key(FULL, DATA)}
    free = SAME[Effect.TIME] | FULL.unaffected(Effect.TIME) | module.OF_OTHER_MODELS | SAME_VALUE
    expected = {name for name in compared if {*accumulate(name.split("."), "{}.{}".format)} & free}
    assert same == expected


def test_a_field_that_is_added_to_a_job_counts():
    later = make_dataclass("Job", [("later", int, field(default=0, metadata=SINCE_LATER))], bases=(Job,), frozen=True)
    data = make_dataclass("DataSpec", [("later", int, field(default=0))], bases=(DataSpec,), frozen=True)
    job = later(**{each.name: getattr(JOB, each.name) for each in fields(JOB)})
    assert speed_key(job, DATA) == speed_key(JOB, DATA)
    assert speed_key(replace(job, later=1), DATA) != speed_key(JOB, DATA)
    assert speed_key(replace(JOB, data=data(source="digits", later=1)), DATA) != speed_key(JOB, DATA)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": OptimizerSpec(lr=9.0)},
        {"optimizer": OptimizerSpec(options={})},
        {"schedule": ScheduleSpec(name="cosine", warmup_steps=3)},
        {"data": DataSpec(path="tomorrow.jsonl", seq_len=24)},
        {"data": DataSpec(path="today.txt", seq_len=24, kind="language-modeling")},
    ],
    ids=str,
)
def test_what_cannot_change_the_speed_shares_a_profile(change):
    assert speed_key(replace(JOB, **change), DATA) == speed_key(JOB, DATA)


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        ({"name": "muon", "options": {"ns_steps": 5}}, {"name": "muon", "options": {"ns_steps": 9}}, False),
        ({"options": {"amsgrad": True}}, {"options": {"amsgrad": False}}, False),
        ({"name": "sgd", "options": {"momentum": 0.0}}, {"name": "sgd", "options": {"momentum": 0.9}}, False),
        ({"name": "sgd", "options": {"momentum": 0.8}}, {"name": "sgd", "options": {"momentum": 0.9}}, True),
        ({"options": {"weight_decay": 0.1}}, {"options": {"weight_decay": 0.2}}, True),
    ],
    ids=str,
)
def test_options_of_an_optimizer_count_as_they_cost(first, second, are_equal):
    jobs = [replace(JOB, optimizer=OptimizerSpec(**each)) for each in (first, second)]
    assert (speed_key(jobs[0], DATA) == speed_key(jobs[1], DATA)) is are_equal


def test_data_that_are_padded_count_with_their_lengths():
    rows = {**DATA, "tensors": [{"name": "input_ids", "dtype": "int64", "shape": [24]}]}
    assert speed_key(JOB, {**rows, "lengths": [10, 20]}) == speed_key(JOB, {**rows, "lengths": [10, 19]})
    assert speed_key(JOB, {**rows, "lengths": [10, 20]}) != speed_key(JOB, {**rows, "lengths": [20, 20]})
    assert speed_key(JOB, {**rows, "digest": "x"}) != speed_key(JOB, {**rows, "digest": "y"})  # of an earlier release


@pytest.mark.parametrize(
    "change",
    [
        {"data": replace(JOB.data, padding="max_length")},
        {"data": replace(JOB.data, kwargs={"name": "other"})},
        {"data": replace(JOB.data, packing=True)},
        {"data": replace(JOB.data, kind="chat")},
        {"model": replace(JOB.model, attention="flex")},
        {"optimizer": OptimizerSpec(name="sgd")},
        {"optimizer": OptimizerSpec(layer_decay=0.9)},
        {"optimizer": OptimizerSpec(groups=(ParameterGroup(match="*.bias", lr=0.1),))},
        {"optimizer": OptimizerSpec(options={"amsgrad": True})},
        {"clip_grad_norm": 1.0},
        {"adapter": Adapter()},
        {"evaluation": EvaluationSpec(max_batches=99)},
        {"num_steps": 0},
    ],
    ids=str,
)
def test_what_may_change_the_speed_is_measured_anew(change):
    job = JOB.with_features(AdaptationSpec(kind="pruned")) if "num_steps" in change else JOB
    assert speed_key(replace(job, **change), DATA) != speed_key(job, DATA)


def test_a_job_that_was_stored_with_a_limit_in_batches_keeps_its_rows_its_form_and_its_key():
    stored = to_json(JOB) | {"evaluation": {**to_json(EvaluationSpec()), "max_batches": 16}}
    job = from_json(Job, stored)
    assert to_json(job) == stored and "max_rows" not in stored["evaluation"]
    assert job.max_evaluated_rows == 16 * job.global_batch_size
    same_rows = replace(job, evaluation=EvaluationSpec(max_rows=16 * job.global_batch_size))
    assert speed_key(job, DATA) == speed_key(same_rows, DATA) != speed_key(JOB, DATA)


def test_equal_values_have_equal_keys_however_they_are_written():
    config = {"hidden_size": 32}
    assert speed_key(replace(JOB, model=replace(JOB.model, config=dict(reversed(config.items())))), DATA) == speed_key(
        JOB, DATA
    )
    assert speed_key(JOB, {**DATA, "folder": "/elsewhere", "num_samples": 91}) == speed_key(JOB, DATA)
    assert speed_key(JOB, {**DATA, "vocab_size": 301}) != speed_key(JOB, DATA)
    assert speed_key(JOB, {**DATA, "seq_len": 48}) != speed_key(JOB, DATA)
    assert speed_key(JOB, DATA, facts=FACTS) != speed_key(JOB, DATA, facts=replace(FACTS, num_layers=3))


def test_the_option_the_device_and_the_libraries_count(monkeypatch):
    options = {"technique": "ddp", "config": {"micro_batch": 4}, "num_devices": 2, "device_kind": "cpu, 1 core"}
    first = fingerprint("k", **options)
    assert first == fingerprint("k", **options)
    others = {
        fingerprint("l", **options),
        *(
            fingerprint("k", **{**options, key: value})
            for key, value in [
                ("technique", "fsdp"),
                ("config", {"micro_batch": 2}),
                ("num_devices", 4),
                ("device_kind", "H200"),
            ]
        ),
    }
    monkeypatch.setattr(module, "_versions", lambda: {"torch": "0"})
    others.add(fingerprint("k", **options))
    assert len(others | {first}) == 7


@pytest.mark.parametrize("dotted", ["mine:model", "pkg.deep.mine:model"])
def test_changed_code_of_a_factory_is_another_speed(tmp_path, dotted):
    """Workers can import the factory, though this process cannot."""
    file = tmp_path.joinpath(*dotted.partition(":")[0].split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in file.relative_to(tmp_path).parents:
        (tmp_path / folder / "__init__.py").touch()
    job = replace(JOB, model=ModelSpec(factory=dotted))

    def key():
        return speed_key(job, DATA, import_paths=(str(tmp_path),))

    file.write_text("def model(): return 1")
    first = key()
    assert first == key()
    file.write_text("def model(): return 2")
    assert key() != first


def test_a_factory_in_a_compiled_or_missing_module_is_no_error():
    for dotted in ("math:sqrt", "nowhere.at.all:model"):
        assert speed_key(replace(JOB, model=ModelSpec(factory=dotted)), DATA)
