"""Fingerprints are equal where jobs cannot differ in speed, and differ where they can."""

from dataclasses import replace

import pytest

from ringmaster.tasks.profiling import fingerprint as module
from ringmaster.tasks.profiling.fingerprint import fingerprint, speed_key
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, ScheduleSpec

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


@pytest.mark.parametrize(
    "change",
    [
        {"name": "b"},
        {"seed": 7},
        {"optimizer": OptimizerSpec(lr=9.0)},
        {"optimizer": OptimizerSpec(options={})},
        {"optimizer": OptimizerSpec(layer_decay=0.9)},
        {"schedule": ScheduleSpec(name="cosine", warmup_steps=3)},
        {"num_steps": 99},
        {"base": "models:/other@alias"},
        {"techniques": ("ddp",)},
        {"num_devices": (2,)},
    ],
    ids=str,
)
def test_what_cannot_change_the_speed_shares_a_profile(change):
    assert speed_key(replace(JOB, **change), DATA) == speed_key(JOB, DATA)


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch_size": 8},
        {"data": replace(JOB.data, kwargs={"name": "other"})},
        {"precision": "bf16"},
        {"model": replace(JOB.model, config={"hidden_size": 64})},
        {"model": replace(JOB.model, attention="flex")},
        {"optimizer": OptimizerSpec(name="sgd")},
        {"optimizer": OptimizerSpec(options={"amsgrad": True})},
        {"freeze": ("*", "!lm_head.*")},
        {"clip_grad_norm": 1.0},
        {"loss": "mine:loss"},
        {"evaluation": EvaluationSpec(max_batches=99)},
        {"exact": True},
    ],
    ids=str,
)
def test_what_may_change_the_speed_is_measured_anew(change):
    assert speed_key(replace(JOB, **change), DATA) != speed_key(JOB, DATA)


def test_equal_values_have_equal_keys_however_they_are_written():
    config = {"hidden_size": 32}
    assert speed_key(replace(JOB, model=replace(JOB.model, config=dict(reversed(config.items())))), DATA) == speed_key(
        JOB, DATA
    )
    assert speed_key(JOB, {**DATA, "folder": "/elsewhere", "num_samples": 91}) == speed_key(JOB, DATA)
    assert speed_key(JOB, {**DATA, "vocab_size": 301}) != speed_key(JOB, DATA)
    assert speed_key(JOB, {**DATA, "seq_len": 48}) != speed_key(JOB, DATA)
    assert speed_key(JOB, DATA, facts={"num_layers": 2}) != speed_key(JOB, DATA, facts={"num_layers": 3})


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
