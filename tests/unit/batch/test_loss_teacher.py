"""The teacher of a loss in batch files: a job of the batch, a folder, or a model of the hub."""

import json

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.control.job_changes import change_faults
from ringmaster.tasks.recording.ancestry import kind_of
from ringmaster.techniques.job_specs import ModelSpec

TEXT = """
jobs:
  - name: large
    model: {{architecture: LlamaForCausalLM, config: {{hidden_size: 64{of_large}}}}}
    data: {{kind: completion, path: answers.jsonl{tokenizer}}}
    num_steps: 10
    {more}
  - name: small
    model: {{architecture: LlamaForCausalLM, config: {{hidden_size: 32{of_small}}}}}
    data: {{kind: prompt, path: prompts.jsonl{tokenizer}}}
    num_steps: 10
    loss: {loss}
    {of_student}
"""
FIELDS = {"tokenizer": ", tokenizer: some/tokenizer", "more": "", "of_large": "", "of_small": "", "of_student": ""}


def parse(tmp_path, loss, **fields):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Write a poem"}\n')
    (tmp_path / "answers.jsonl").write_text('{"prompt": "Write", "completion": "a"}\n')
    return parse_batch(TEXT.format(**{**FIELDS, "loss": loss, **fields}), folder=tmp_path, name="x.yaml")


def a_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_job_of_the_batch_is_the_teacher(tmp_path):
    batch = parse(tmp_path, '{name: on-policy-distillation, teacher: "job:large", beta: 0.5}')
    large, small = batch.jobs
    feature = small.feature(LossTeacher)
    assert feature == LossTeacher(job="large", model=large.model)
    assert (small.parents, feature.teacher, feature.frozen_models) == (("large",), "large", (large.model,))
    assert small.loss_options == {"beta": 0.5}
    assert small.evaluation.metrics == ("loss",)
    assert kind_of(small, has_parents=True) == "distilled"
    assert small.renamed("other", lambda name: f"batch.{name}").parents == ("batch.large",)
    assert Batch.of(name="x", jobs=batch.jobs, folder=tmp_path).jobs == batch.jobs
    assert Batch.from_json(batch.to_json()).jobs == batch.jobs
    assert change_faults(small, {"loss.temperature": 0.7}) == []


@pytest.mark.parametrize("teacher", ["teachers", "owner/model"])
def test_a_pretrained_model_is_the_teacher(tmp_path, teacher):
    expected = str(a_model(tmp_path / teacher)) if teacher == "teachers" else teacher
    batch = parse(tmp_path, f"{{name: on-policy-distillation, teacher: {teacher}}}")
    small = batch.jobs[1]
    assert small.feature(LossTeacher) == LossTeacher(model=ModelSpec(from_pretrained=expected))
    assert (small.parents, small.feature(LossTeacher).teacher) == ((), expected)
    assert Batch.of(name="x", jobs=batch.jobs, folder=tmp_path).jobs == batch.jobs


def test_a_student_may_have_an_adapter(tmp_path):
    loss = '{name: on-policy-distillation, teacher: "job:large"}'
    fields = {"of_student": "base: large\n    adapter: {kind: lora, rank: 4}", "of_small": ", num_hidden_layers: 2"}
    (small,) = parse(tmp_path, loss, **fields, of_large=", num_hidden_layers: 2").jobs[1:]
    assert small.adapter is not None
    assert small.feature(LossTeacher).job == small.base == "large"


@pytest.mark.parametrize(
    ("loss", "fields", "said"),
    [
        (
            "on-policy-distillation",
            {},
            "jobs[1].loss.teacher: is missing. To fix: give job:NAME for a job of the batch",
        ),
        ("{name: on-policy-distillation, teacher: 3}", {}, "jobs[1].loss.teacher: must be job:NAME"),
        ("{name: on-policy-distillation, teacher: ./none}", {}, "jobs[1].loss.teacher: folder"),
        (
            "{name: on-policy-distillation, teacher: models:/a@champion}",
            {},
            "loss.teacher: models:/a@champion is a reg",
        ),
        ("{name: on-policy-distillation, teacher: job:larg}", {}, "jobs[1].loss.teacher: no job is named 'larg'"),
        ("{name: on-policy-distillation, teacher: job:small}", {}, "go round in a circle"),
        (
            "{name: on-policy-distillation, teacher: job:large, beta: 2}",
            {},
            "loss.beta: must be a number at least 0 and",
        ),
        (
            "{name: on-policy-distillation, teacher: job:large}",
            {"more": "adapter: {kind: lora, rank: 4}"},
            "jobs[1].loss.teacher: large trains an adapter, and a teacher is a whole model",
        ),
        (
            "{name: on-policy-distillation, teacher: job:large}",
            {"tokenizer": ""},
            "jobs[1].loss.teacher: large reads other tokens",
        ),
        (
            "{name: on-policy-distillation, teacher: job:large}",
            {"of_large": ", vocab_size: 300", "of_small": ", vocab_size: 320"},
            "jobs[1].loss.teacher: large has a vocabulary of 300 tokens, and this job one of 320",
        ),
        (
            "{name: on-policy-distillation, teacher: job:large}",
            {"of_student": "adaptation: {kind: distilled, teacher: large}"},
            "jobs[1].adaptation: does not go with a loss that has a teacher",
        ),
        (
            "{name: on-policy-distillation, teacher: job:large}",
            {"of_student": "loss_teacher: {job: large}"},
            "jobs[1].loss_teacher: is an unknown key",
        ),
        ("{name: dpo, teacher: job:large}", {}, "jobs[1].loss.teacher: is not an option of dpo"),
    ],
)
def test_what_is_no_teacher_is_refused(tmp_path, loss, fields, said):
    with pytest.raises(BatchFileError) as raised:
        parse(tmp_path, loss, **fields)
    assert said in str(raised.value)


def test_the_loss_reads_prompts(tmp_path):
    with pytest.raises(BatchFileError, match="is not prompt, and the loss on-policy-distillation reads prompts"):
        parse_batch(
            TEXT.format(**FIELDS, loss="{name: on-policy-distillation, teacher: job:large}").replace(
                "kind: prompt, path: prompts.jsonl", "kind: completion, path: answers.jsonl"
            ),
            folder=tmp_path,
            name="x.yaml",
        )
