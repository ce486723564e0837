"""Named components of a model in a batch file."""

from pathlib import Path

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.errors import BatchFileError
from ringmaster.features.composition.job import components_of
from ringmaster.tasks.batch import parse_batch
from ringmaster.techniques import Job

TEXT = """\
name: towers
jobs:
  - name: one
    model: {architecture: LlamaForCausalLM, config: {hidden_size: 32}}
    data: {source: python-stdlib, seq_len: 32}
    num_steps: 1
    components: %s
"""


def test_components_are_of_the_job_and_survive_json():
    (job,) = parse_batch(
        TEXT % "{stem: model.layers.0, words: model.embed_tokens}", folder=Path(), name="towers.yaml"
    ).jobs
    assert components_of(job) == {"stem": "model.layers.0", "words": "model.embed_tokens"}
    assert from_json(Job, to_json(job)) == job


def test_a_job_without_them_has_the_json_form_that_it_had():
    (job,) = parse_batch((TEXT % "null").rpartition("    components")[0], folder=Path(), name="towers.yaml").jobs
    assert job.features == ()
    assert "components" not in to_json(job)


@pytest.mark.parametrize("wrong", ["[stem]", "{stem: 3}", "{stem: 'model layers'}", "{'a/b': model}"])
def test_what_is_no_name_or_no_prefix_is_told(wrong):
    with pytest.raises(BatchFileError, match="components"):
        parse_batch(TEXT % wrong, folder=Path(), name="towers.yaml")
