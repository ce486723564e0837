"""The config of a model that leaves it to the model in a folder, or the registered one, that its job adapts."""

import json
from dataclasses import replace

import pytest

from ringmaster.errors import InputError
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.batch.parent_rules import with_base_configs
from ringmaster.techniques.job import AdaptationSpec

BASE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "rms_norm_eps": 1e-3, "vocab_size": 300}
BATCH = """\
jobs:
  - &job {name: a, base: "models:/tiny/1", model: {architecture: LlamaForCausalLM}, data: {source: digits},
          num_steps: 1}
  - {<<: *job, name: b, base: a}
"""


@pytest.fixture
def base(tmp_path):
    config = {**BASE, **SIZES, "id2label": {"0": "x"}, "pad_token_id": 7, "of_another_release": 1, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def jobs(tmp_path):
    return parse_batch(BATCH, folder=tmp_path, name="trials").jobs


def test_a_model_without_a_width_has_the_config_of_its_base_also_through_another_job(jobs, base):
    first, second = with_base_configs(jobs, {"a": base})
    assert first.model.config == second.model.config == SIZES
    assert with_base_configs(jobs, {}) == jobs


def test_its_own_fields_come_first(jobs, base):
    own = replace(jobs[0], model=replace(jobs[0].model, config={"rms_norm_eps": 0.5}))
    assert with_base_configs([own], {"a": base})[0].model.config == {**SIZES, "rms_norm_eps": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"hidden_size": 64}},
        {"architecture": "GPT2LMHeadModel"},
        {"architecture": None, "from_pretrained": "org/other"},
        {"architecture": None, "factory": "models:build"},
    ],
)
def test_a_whole_config_and_another_kind_of_model_stay(jobs, base, changes):
    own = replace(jobs[0], model=replace(jobs[0].model, **changes))
    assert with_base_configs([own], {"a": base}) == (own,)


def test_a_narrowed_model_has_the_sizes_that_its_job_gives_and_so_do_its_children(jobs, base):
    narrowed = jobs[0].with_features(AdaptationSpec(kind="pruned", method="structured"))
    assert with_base_configs([narrowed, jobs[1]], {"a": base}) == (narrowed, jobs[1])


@pytest.mark.parametrize(
    ("section", "key", "remedy"),
    [
        ("model", "from_pretrained", "name it as the job's base, `base: models:/tiny/1`"),
        ("data", "tokenizer", "`ringmaster lineage restore tiny/1 FOLDER`"),
    ],
)
def test_a_registered_model_in_place_of_a_folder_is_refused(tmp_path, section, key, remedy):
    values = {"model": "{architecture: LlamaForCausalLM}", "data": "{source: digits}"}
    values[section] = f'{{{key}: "models:/tiny/1"}}'
    text = f"jobs:\n  - {{name: a, num_steps: 1, model: {values['model']}, data: {values['data']}}}\n"
    with pytest.raises(InputError) as raised:
        parse_batch(text, folder=tmp_path, name="trials")
    assert remedy in str(raised.value)
