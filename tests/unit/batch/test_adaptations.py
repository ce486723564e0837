import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ringmaster.codec import from_json, to_json
from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.batch.parent_rules import unfit_parents, with_teachers
from ringmaster.tasks.profiling.profile_store import speed_key
from ringmaster.tasks.profiling.search import num_evaluations
from ringmaster.techniques import AdaptationSpec, EvaluationSpec, ModelSpec

JOBS = """
name: tonight
jobs:
  - &large
    name: large
    model: {architecture: LlamaForCausalLM, config: {hidden_size: 64, num_hidden_layers: 2}}
    data: {source: python-stdlib, seq_len: 32}
    num_steps: 10
"""


def parse(jobs: str, folder: Path = Path()) -> Batch:
    text = JOBS + textwrap.indent(textwrap.dedent(jobs).strip(), "  ")
    return parse_batch(text, folder=folder, name="tonight.yaml")


def faults(jobs: str, folder: Path = Path()) -> dict[str, str]:
    with pytest.raises(BatchFileError) as caught:
        parse(jobs, folder)
    return {fault.place: fault.message for fault in caught.value.faults}


def a_folder(folder: Path, shape: tuple[int, ...] = (2, 2), *, config: str = "{}", tokenizer: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text(tokenizer)
    save_file({"weight": torch.zeros(shape)}, folder / "model.safetensors")
    return folder


def test_every_kind_is_read(tmp_path):
    a_folder(tmp_path / "elsewhere")
    batch = parse(
        """
        - {<<: *large, name: student, adaptation: {kind: distilled, teacher: large, temperature: 3, weight: 0.9}}
        - {<<: *large, name: pruned, base: large, num_steps: 0, adaptation: {kind: pruned, method: magnitude}}
        - {<<: *large, name: sparse, base: large, adaptation: {kind: pruned, method: "2:4"}}
        - name: small
          model: {architecture: LlamaForCausalLM, config: {hidden_size: 64, num_hidden_layers: 2}}
          data: {source: python-stdlib, seq_len: 32}
          base: models:/large@champion
          adaptation: {kind: quantized, method: dynamic-int8}
        - {<<: *large, name: soup, num_steps: 0, adaptation: {kind: merged, method: average,
           parents: [large, sparse, ./elsewhere, "models:/other/3"], weights: [1, 2, 0, 4]}}
        """,
        tmp_path,
    )
    by_name = {job.name: job for job in batch.jobs}
    student = by_name["student"].adaptation
    assert student == AdaptationSpec(
        kind="distilled", teacher="large", teacher_model=by_name["large"].model, temperature=3.0, weight=0.9
    )
    assert [by_name[name].trains for name in by_name] == [True, True, False, True, False, False]
    assert by_name["small"].total_steps == 0
    assert by_name["soup"].parents == ("large", "sparse", str(tmp_path / "elsewhere"), "models:/other/3")
    assert by_name["student"].parents == ("large",)
    assert Batch.from_json(batch.to_json()) == batch
    again = Batch.of(name="tonight", jobs=batch.jobs, folder=tmp_path)
    assert again.jobs == batch.jobs


def test_a_job_without_an_adaptation_says_what_it_always_said():
    (job,) = parse("").jobs
    assert "adaptation" not in to_json(job)
    adapted = job.with_features(AdaptationSpec(kind="distilled", teacher="x"))
    assert from_json(type(job), to_json(adapted)) == adapted
    assert "teacher_model" not in to_json(adapted)["adaptation"]


def test_what_a_kind_needs_and_what_is_anothers_is_told_at_once():
    assert faults(
        """
        - {<<: *large, name: a, adaptation: {kind: shrunk}}
        - {<<: *large, name: b, adaptation: {kind: distilled, method: magnitude, sparsity: 0.3}, loss: "torch:sum"}
        - {<<: *large, name: c, adaptation: {kind: pruned, method: "2:4", sparsity: 0.7}}
        - {<<: *large, name: d, base: large, adaptation: {kind: quantized, method: int4}}
        - {<<: *large, name: e, adaptation: {kind: merged, method: task-arithmetic, parents: [large], weights: [1, 2]}}
        - {<<: *large, name: f, base: large, num_steps: 0,
           adaptation: {kind: merged, method: average, parents: [large, large], weights: [-1, 1]}}
        - {<<: *large, name: g, base: large, adaptation: {kind: pruned, sparsity: 1.0}}
        """
    ) == {
        "jobs[1].adaptation.kind": "'shrunk' is unknown",
        "jobs[2].adaptation.method": "'magnitude' is no way to get a distilled model",
        "jobs[2].adaptation.sparsity": "is for pruned models, and this one is distilled",
        "jobs[2].adaptation.teacher": "is missing",
        "jobs[2].loss": "does not go with a teacher, whose logits are weighed against the model's own loss",
        "jobs[3].base": "is missing: a pruned model comes from another",
        "jobs[3].adaptation.sparsity": "of 2:4 is always 0.5, got 0.7",
        "jobs[4].adaptation.method": "'int4' is unknown",
        "jobs[4].num_steps": "is given, and a quantized model is not trained",
        "jobs[5].adaptation.parents": "must be two models or more",
        "jobs[5].adaptation.weights": "are 2, and there are 1 parents",
        "jobs[5].base": "is missing",
        "jobs[5].num_steps": "is given, and a merged model is not trained",
        "jobs[6].adaptation.parents": "has 'large' twice",
        "jobs[6].adaptation.weights": "of an average must not be negative, nor all 0",
        "jobs[6].base": "has no part in an average",
        "jobs[7].adaptation.method": "is missing",
        "jobs[7].adaptation.sparsity": "must be less than 1, got 1.0",
    }


def test_parents_must_be_there_and_lead_nowhere_back(tmp_path):
    assert faults(
        """
        - {<<: *large, name: a, adaptation: {kind: distilled, teacher: larg}}
        - {<<: *large, name: b, num_steps: 0, adaptation: {kind: merged, method: average, parents: [large, c]}}
        - {<<: *large, name: c, base: b}
        - {<<: *large, name: d, adaptation: {kind: distilled, teacher: d}}
        - {<<: *large, name: e, adaptation: {kind: distilled, teacher: ./nowhere}}
        - {<<: *large, name: f, adaptation: {kind: distilled, teacher: "models:/large"}}
        """,
        tmp_path,
    ) == {
        "jobs[1].adaptation.teacher": "no job is named 'larg'",
        "jobs[2].adaptation.parents[1]": "parents go round in a circle: b -> c -> b",
        "jobs[4].adaptation.teacher": "parents go round in a circle: d -> d",
        "jobs[5].adaptation.teacher": f"folder {tmp_path / 'nowhere'} does not exist",
        "jobs[6].adaptation.teacher": "models:/large has no alias and no version",
    }


def test_adapters_whose_bases_go_round_in_a_circle_are_told():
    assert faults(
        """
        - {<<: *large, name: a, base: b, adapter: {rank: 2}}
        - {<<: *large, name: b, base: a, adapter: {rank: 2}}
        - {<<: *large, name: c, base: b, adapter: {rank: 2}}
        - {<<: *large, name: d, base: d, adapter: {rank: 2}}
        """
    ) == {
        "jobs[1].base": "bases go round in a circle: a -> b -> a",
        "jobs[4].base": "bases go round in a circle: d -> d",
    }


def test_a_job_named_none_is_the_base_of_no_job():
    jobs = """
        - &published {<<: *large, name: None, model: {from_pretrained: gpt2}, adapter: {rank: 2}}
        - {<<: *published, name: a, adapter: {rank: 4}}
        """
    assert [job.base for job in parse(jobs).jobs] == [None, None, None]


def test_models_that_do_not_match_are_told():
    quantized = "{kind: quantized, method: weight-only-int8}"
    assert faults(
        f"""
        - {{<<: *large, name: wide, model: {{architecture: LlamaForCausalLM, config: {{hidden_size: 128}}}}}}
        - {{<<: *large, name: gpt, model: {{architecture: GPT2LMHeadModel}}, data: {{source: python-stdlib, seq_len: 8,
           vocab_size: 999}}}}
        - {{<<: *large, name: small, base: large, num_steps: 0, adaptation: {quantized}}}
        - {{<<: *large, name: a, num_steps: 0, adaptation: {{kind: merged, method: average,
           parents: [large, wide, gpt, small]}}}}
        - {{<<: *large, name: b, adaptation: {{kind: distilled, teacher: gpt}}}}
        - {{<<: *large, name: c, base: small}}
        - {{<<: *large, name: ok, adaptation: {{kind: distilled, teacher: small}}}}
        """
    ) == {
        "jobs[4].adaptation.parents[1]": "wide has another model.config, so that its shapes do not match",
        "jobs[4].adaptation.parents[2]": "gpt is a GPT2LMHeadModel, whose weights do not fit a LlamaForCausalLM",
        "jobs[4].adaptation.parents[3]": (
            "small is quantized, and a quantized model is neither trained nor rewritten further"
        ),
        "jobs[5].adaptation.teacher": "gpt learnt another vocabulary: its data.vocab_size is another",
        "jobs[6].base": "small is quantized, and a quantized model is neither trained nor rewritten further",
    }


def test_folders_that_do_not_match_are_told(tmp_path):
    quantized = '{"ringmaster_quantization": {"method": "dynamic-int8", "modules": []}}'
    folders = {
        "a": a_folder(tmp_path / "a"),
        "b": a_folder(tmp_path / "b", (2, 3)),
        "c": a_folder(tmp_path / "c", tokenizer='{"other": 1}'),
        "q": a_folder(tmp_path / "q", config=quantized),
    }
    (job,) = parse("").jobs
    soup = job.with_features(AdaptationSpec(kind="merged", method="average", parents=("a", "b", "c")))
    tuned = replace(job, name="tuned", base="models:/q@champion")
    student = replace(job, name="student", features=(AdaptationSpec(kind="distilled", teacher="q"),))
    told = unfit_parents([soup, tuned, student], {**folders, "tuned": folders["q"]})
    assert told == [
        "job large: b and a do not match: weight is [2, 3] and [2, 2]. "
        "To fix: merge models of one architecture and size",
        "job large: c and a have different tokenizers. To fix: merge models that learnt the same tokens",
        "job tuned: models:/q@champion is quantized, and a quantized model is neither trained nor rewritten further. "
        "To fix: take what it was quantized from",
    ]
    (taught,) = with_teachers([student], folders)
    assert taught.adaptation.teacher_model == ModelSpec(from_pretrained=str(folders["q"]))


def test_jobs_share_profiles_where_their_adaptations_are_as_fast():
    (job,) = parse("").jobs
    data = dict.fromkeys(("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels"), 1)
    small, large = job.model, replace(job.model, config={"hidden_size": 512})

    def key(**changes) -> str:
        return speed_key(replace(job, **changes), {**data, "num_held_out": 9})

    def student(**changes) -> str:
        said = AdaptationSpec(kind="distilled", teacher="large", teacher_model=small)
        return key(features=(replace(said, **changes),))

    assert student(temperature=9.0, weight=0.1) == student()
    assert len({key(), student(), student(teacher_model=large)}) == 3
    pruned = AdaptationSpec(kind="pruned", method="magnitude")
    assert key(base="x", features=(pruned,)) == key(base="x", features=(replace(pruned, sparsity=0.9),))
    assert key(base="x", features=(pruned,)) != key(base="x", features=(pruned,), num_steps=0)


def test_a_job_without_steps_is_evaluated_once():
    (job,) = parse("").jobs
    assert num_evaluations(replace(job, num_steps=0, evaluation=EvaluationSpec(every_steps=3))) == 1
