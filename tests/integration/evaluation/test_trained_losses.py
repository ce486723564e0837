"""Evaluations that name no loss: an exported model is read by the loss that it was trained with."""

import json
from dataclasses import replace

import pytest
import torch

from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, Job, ModelSpec
from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.data.inference import with_options_of_data
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.models.adapter_modules import merge
from ringmaster.techniques.models.adapters import attach, first_state, sites
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_adapter, export_model
from ringmaster.techniques.models.peft_format import has_lost_base, on_base
from ringmaster.techniques.scoring import score_together
from tests.integration.workbench import LLAMA

BERT = ModelSpec(
    architecture="BertModel",
    config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
)
RANKS, PREFERRED = ("hit_at_1", "hit_at_5", "mrr"), ("preference_accuracy",)


def write(file, rows):
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(file)


def triplets(*, names=("negative",)):
    for number in range(32):
        wrong = {name: f"color{number % 5} city{(number + place) % 7}" for place, name in enumerate(names, 1)}
        yield {"anchor": f"city{number % 7} river{number % 4}", "positive": f"river{number % 4} color{number}", **wrong}


def pairs():
    for number in range(32):
        yield {"prompt": f"city{number % 7} has", "chosen": f" river{number % 4}", "rejected": f" color{number % 5}"}


def exported(folder, job, cache_dir):
    prepared = prepare(job.data, cache_dir=cache_dir)
    model = build_model(job.model, data=prepared, seed=0)
    export_model(folder, spec=job.model, model=model, state=model.state_dict(), prepared=prepared, job=job)
    return folder


def sums(models, job, cache_dir, name):
    found = score_together(models, job=job, cache_dir=cache_dir)
    assert not found.faults
    arrays = found.scores[name].arrays
    return {
        key: arrays[key].sum() for key in arrays if key.startswith(("hits_at", "reciprocal", "ranked", "preferred"))
    }


CASES = {
    "late-interaction": ("embedding", BERT, triplets, {}, RANKS),
    "contrastive": ("embedding", BERT, triplets, {"temperature": 0.1}, RANKS),
    "orpo": ("preference", LLAMA, pairs, {}, PREFERRED),
    "simpo": ("preference", LLAMA, pairs, {"beta": 2.5}, PREFERRED),
}


@pytest.mark.parametrize("loss", CASES)
def test_a_models_metrics_are_those_of_its_own_loss(tmp_path, loss):
    kind, model, rows, options, metrics = CASES[loss]
    data = DataSpec(kind=kind, path=write(tmp_path / "rows.jsonl", rows()), seq_len=16, held_out=0.5)
    trained = with_options_of_data(
        Job(name="j", model=model, data=data, loss=loss, loss_options=options, num_steps=1,
            evaluation=EvaluationSpec(metrics=metrics))
    )  # fmt: skip
    folder = exported(tmp_path / "model", trained, tmp_path / "cache")
    asked = replace(trained, loss=None, loss_options={})
    known = sums({"own": folder}, trained, tmp_path / "cache", "own")
    assert len(known) == len(metrics) + 1 - (kind == "preference")
    assert sums({"own": folder}, asked, tmp_path / "cache", "own") == known
    # A model without a loss is compared by that of the first one.
    (folder / "loss.json").rename(tmp_path / "loss.json")
    silent = folder.rename(tmp_path / "silent")
    again = exported(tmp_path / "again", trained, tmp_path / "cache")
    assert sums({"own": again, "other": silent}, asked, tmp_path / "cache", "other") == known
    # Alone, it is read by the usual loss of the kind of data.
    usual = {"embedding": "contrastive", "preference": "simpo"}[kind]
    by_usual = with_options_of_data(replace(asked, loss=usual))
    expected = sums({"other": silent}, by_usual, tmp_path / "cache", "other")
    assert sums({"other": silent}, asked, tmp_path / "cache", "other") == expected
    assert expected.keys() == known.keys()


def test_the_hard_negatives_are_those_of_the_data_that_is_evaluated_on(tmp_path):
    alone = DataSpec(kind="embedding", path=write(tmp_path / "a.jsonl", triplets(names=())), seq_len=16, held_out=0.5)
    trained = Job(name="j", model=BERT, data=alone, loss="late-interaction", num_steps=1)
    folder = exported(tmp_path / "model", trained, tmp_path / "cache")
    data = replace(alone, path=write(tmp_path / "b.jsonl", triplets()))
    job = Job(name="j", model=ModelSpec(), data=data, num_steps=1, evaluation=EvaluationSpec(metrics=RANKS))
    assert (
        sums({"m": folder}, job, tmp_path / "cache", "m")["ranked_rows"]
        == prepare(data, cache_dir=tmp_path / "cache").num_held_out
    )


@pytest.mark.parametrize("is_whole", [False, True], ids=["adapter", "whole"])
def test_a_model_of_dpo_is_compared_with_its_base(tmp_path, is_whole):
    data = DataSpec(kind="preference", path=write(tmp_path / "a.jsonl", pairs()), seq_len=16, held_out=0.5)
    job = Job(name="j", model=LLAMA, data=data, loss="dpo", num_steps=1, global_batch_size=32)
    base = exported(tmp_path / "base", replace(job, loss=None), tmp_path / "cache")
    prepared = prepare(data, cache_dir=tmp_path / "cache")
    model = build_model(LLAMA, data=prepared, seed=0, weights_from=base).eval()
    adapter = Adapter(rank=4)
    draw = torch.Generator().manual_seed(0)
    state = first_state(model, adapter, sites(model, adapter), seed=0)
    state = {name: value + 0.2 * torch.randn(value.shape, generator=draw) for name, value in state.items()}
    folder = tmp_path / "trained"
    export_adapter(folder, adapter=adapter, spec=LLAMA, base=str(base), state=state, prepared=prepared, job=job)
    trained = attach(
        build_model(LLAMA, data=prepared, seed=0, weights_from=base), Adapter(from_pretrained=str(folder)), seed=0
    )
    if is_whole:
        whole = merge(trained).state_dict()
        export_model(folder, spec=LLAMA, model=model, state=whole, prepared=prepared, base=str(base), job=job)
    asked = replace(job, loss=None, evaluation=EvaluationSpec(metrics=("preference_accuracy",)))
    arrays = score_together({"m": folder}, job=asked, cache_dir=tmp_path / "cache").scores["m"].arrays

    _, held_out = open_data(data, cache_dir=tmp_path / "cache", prepared=prepared)
    batch = fetch(held_out, list(range(len(held_out))))
    labels = torch.nn.functional.pad(batch["labels"][..., 1:], (0, 1), value=IGNORED)

    @torch.no_grad()
    def log_probabilities(model):
        logits = model(input_ids=batch["input_ids"].flatten(0, 1)).logits.log_softmax(-1)
        chosen = logits.reshape(*labels.shape, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (chosen * (labels != IGNORED)).sum(-1)

    rewards = log_probabilities(trained.eval()) - log_probabilities(model)
    expected = rewards[:, 0] > rewards[:, 1]
    assert 0 < expected.sum() < len(expected)
    assert arrays["preferred_pairs"].tolist() == expected.double().tolist()
    losses = -torch.nn.functional.logsigmoid(0.1 * (rewards[:, 0] - rewards[:, 1]))
    assert arrays["loss_sums"] == pytest.approx(losses.numpy(), abs=1e-5)
    if is_whole:  # the base moves: the lineage knows where it is
        moved = base.rename(tmp_path / "moved")
        (fault,) = score_together({"m": folder}, job=asked, cache_dir=tmp_path / "cache").faults.values()
        assert "which are not known. To fix: write their folder" in fault and str(folder / "loss.json") in fault
        assert has_lost_base(folder)
        folder = on_base(folder, moved, copy=tmp_path / "copy")
        again = score_together({"m": folder}, job=asked, cache_dir=tmp_path / "cache").scores["m"].arrays
        assert (again["loss_sums"] == arrays["loss_sums"]).all()


def test_data_of_another_kind_is_read_by_the_models_own_loss(tmp_path):
    data = DataSpec(kind="preference", path=write(tmp_path / "a.jsonl", pairs()), seq_len=16, held_out=0.5)
    job = Job(name="j", model=LLAMA, data=data, loss="dpo", num_steps=1)
    folder = exported(tmp_path / "model", job, tmp_path / "cache")
    completions = [{"prompt": each["prompt"], "completion": each["chosen"]} for each in pairs()]
    file = write(tmp_path / "b.jsonl", completions)
    rows = DataSpec(kind="completion", path=file, seq_len=16, held_out=0.5, tokenizer=str(folder))
    plain = Job(name="j", model=ModelSpec(), data=rows, num_steps=1)
    arrays = score_together({"m": folder}, job=plain, cache_dir=tmp_path / "cache").scores["m"].arrays
    assert arrays["loss_counts"].sum() > 0
