"""Several samples in one row: nothing is lost, and a model learns the same as from each sample in a row of its own."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.errors import StepError
from ringmaster.techniques import registry
from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.data.samples import first_fit
from ringmaster.techniques.data.samples import packed as packed_rows
from ringmaster.techniques.job import AdaptationSpec, Job
from ringmaster.techniques.job_specs import Adapter, DataSpec, ModelSpec
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.probing import probe
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.bound_loss import next_token_loss
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = ModelSpec(architecture="LlamaForCausalLM", config={**_SIZES, "num_key_value_heads": 2})
MODELS = [
    LLAMA,
    replace(LLAMA, config={**LLAMA.config, "attn_implementation": "eager"}),
    ModelSpec(architecture="MistralForCausalLM", config={**_SIZES, "num_key_value_heads": 1, "sliding_window": 5}),
    ModelSpec(architecture="MixtralForCausalLM", config={**_SIZES, "num_key_value_heads": 1, "num_local_experts": 4}),
    ModelSpec(
        architecture="GPT2LMHeadModel",
        config={"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
]
WIDTH = 48


@pytest.fixture
def spec(tmp_path):
    """Prompts and completions of very different lengths, of which two are too long."""
    lengths = [3, 30, 1, 7, 90, 12, 5, 22, 60, 2, 9, 16] * 2
    rows = [{"prompt": "q" * (1 + i % 3), "completion": "a" * length} for i, length in enumerate(lengths)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(kind="completion", path=str(file), seq_len=WIDTH, vocab_size=257, held_out=0.2)


@pytest.fixture
def packed(spec):
    return replace(spec, packing=True)


def opened(spec, tmp_path):
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    return prepared, *open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)


def samples_of(rows):
    """The (tokens, labels) of each sample of packed or plain rows, without padding, sorted."""
    found = []
    for row in rows:
        positions = row.get("position_ids", torch.arange(len(row["input_ids"])))
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
        for first, end in pairwise(starts):
            tokens, labels = row["input_ids"][first:end].tolist(), row["labels"][first:end].tolist()
            assert positions[first:end].tolist() == list(range(end - first))
            last = max((i for i, label in enumerate(labels) if label != IGNORED), default=-1)
            if last >= 0:  # a token of padding is a sample of its own, without a label
                found.append((tokens[: last + 1], labels[: last + 1]))
    return sorted(found)


@given(st.lists(st.integers(0, 20), max_size=60))
def test_every_sample_is_in_one_row(sizes):
    rows = first_fit(sizes, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in row) for row in rows]
    assert all(total <= 20 for total in totals)
    assert sum(total <= 10 for total in totals) <= 1  # else two rows would fit into one


def test_packed_rows_hold_the_same_samples(spec, packed, tmp_path):
    plain, one_each, held_out = opened(spec, tmp_path)
    prepared, rows, same = opened(packed, tmp_path)
    assert samples_of(rows) == samples_of(one_each)
    assert prepared.num_samples == len(rows) < len(one_each) * 0.6
    assert prepared.num_truncated == plain.num_truncated > 0
    assert [s["input_ids"].tolist() for s in same] == [s["input_ids"].tolist() for s in held_out]
    assert "position_ids" not in same[0]
    assert {tensor.name for tensor in prepared.tensors} == {"input_ids", "labels", "position_ids"}


def test_no_sample_predicts_the_first_token_of_the_next_one():
    samples = [{"input_ids": np.arange(10, 12)}, {"input_ids": np.arange(20, 27)}]
    (made,) = packed_rows(samples, width=5)
    rows = [{name: array.tolist() for name, array in row.items()} for row in made]
    assert rows == [
        {
            "input_ids": [20, 21, 22, 23, 24],
            "labels": [IGNORED, 21, 22, 23, 24],
            "position_ids": [0, 1, 2, 3, 4],
        },
        {"input_ids": [10, 11], "labels": [IGNORED, 11], "position_ids": [0, 1]},
    ]


def test_samples_with_masks_are_not_packed():
    with pytest.raises(ValueError, match=r"samples with attention_mask cannot be packed\. To fix"):
        list(packed_rows([{"input_ids": np.arange(2), "attention_mask": np.ones(2)}], width=5))


def test_rows_are_packed_as_they_come(packed, tmp_path, monkeypatch):
    """Rows that do not fit into memory are packed some at a time."""
    _, one_each, _ = opened(packed, tmp_path)
    monkeypatch.setattr("ringmaster.techniques.data.samples.ROWS_AT_ONCE", 1)
    monkeypatch.setattr("ringmaster.techniques.data.row_kind.RowKind.rows_at_once", 2)
    _, rows, _ = opened(replace(packed, name="again"), tmp_path)
    assert samples_of(rows) == samples_of(one_each)
    assert len(rows) > len(one_each)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.architecture}-{m.config.get('attn_implementation', '')}")
def test_a_model_learns_the_same(spec, packed, tmp_path, model):
    sums = []
    for each in (spec, packed):
        prepared, training, _ = opened(each, tmp_path)
        network = build_model(model, data=prepared, seed=0)
        batch = fetch(training, range(len(training)))
        loss, count = next_token_loss(network(**{k: v for k, v in batch.items() if k != "labels"}), batch)
        loss.backward()
        sums.append((loss.item(), int(count), [p.grad / count for p in network.parameters() if p.grad is not None]))
    (loss, count, gradients), (other, others, of_packed) = sums
    assert others == count
    assert other == pytest.approx(loss, rel=1e-6)
    largest = max(float((a - b).abs().max()) for a, b in zip(gradients, of_packed, strict=True))
    assert largest <= 1e-5 * max(float(gradient.abs().max()) for gradient in gradients) + 1e-8


def job(model, data, **changes):
    return Job(name="packed", model=model, data=data, num_steps=2, **changes)


def fault(job, tmp_path):
    with pytest.raises(StepError) as caught:
        probe(job, data=prepare(job.data, cache_dir=tmp_path / "cache"), cache_dir=tmp_path / "cache")
    return str(caught.value)


def test_a_model_that_keeps_samples_apart_passes(packed, tmp_path):
    data = prepare(packed, cache_dir=tmp_path / "cache")
    assert probe(job(LLAMA, packed), data=data, cache_dir=tmp_path / "cache").undivided == ""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            ModelSpec(architecture="MptForCausalLM", config={"d_model": 32, "n_heads": 2, "n_layers": 2}),
            "MptForCausalLM takes no position_ids, by which .* apart. To fix: set data.packing to false",
        ),
        (
            ModelSpec(architecture="BloomForCausalLM", config={"hidden_size": 32, "n_head": 2, "n_layer": 2}),
            "BloomForCausalLM takes no position_ids, by which .* apart. To fix: set data.packing to false",
        ),
        (
            ModelSpec(
                architecture="FalconForCausalLM",
                config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            ),
            "FalconForCausalLM does not keep samples in one row apart .* To fix: set data.packing to false",
        ),
        (replace(LLAMA, attention="flash"), "attention flash does not keep samples apart. To fix: .* take .* sdpa"),
    ],
    ids=["positions", "alibi", "masks", "flash"],
)
def test_a_model_that_mixes_samples_is_refused(packed, tmp_path, model, says):
    with pytest.raises(StepError, match=says):
        probe(job(model, packed), data=prepare(packed, cache_dir=tmp_path / "cache"), cache_dir=tmp_path / "cache")


def test_losses_of_sequences_prefixes_and_teachers_are_refused(packed, tmp_path):
    distilled = AdaptationSpec(kind="distilled", teacher="a")
    own = "tests.integration.stubs:loss_of_some_tokens"
    assert "a loss of one's own reads whole" in fault(job(LLAMA, packed, loss=own), tmp_path)
    assert "the loss dpo reads whole sequences" in fault(job(LLAMA, packed, loss="dpo"), tmp_path)
    assert "the teacher" in fault(job(LLAMA, packed, features=(distilled,)), tmp_path)
    assert "a prefix lies before a row" in fault(job(LLAMA, packed, adapter=Adapter(kind="prefix")), tmp_path)


@pytest.mark.parametrize(
    "spec",
    [{"source": "python-stdlib"}, {"path": "*.txt"}, {"path": "a.jsonl", "kind": "preference"}],
    ids=["stream", "text", "preference"],
)
def test_other_kinds_are_not_packed(tmp_path, spec):
    with pytest.raises(ValueError, match=r"cannot be packed\. To fix: set packing to false"):
        prepare(DataSpec(**spec, packing=True), cache_dir=tmp_path)


def test_techniques_that_count_positions_themselves_refuse_packed_samples(spec, packed, tmp_path):
    shape = GangShape(kind="cpu", num_devices=4, memory_bytes=1 << 33)
    model = replace(LLAMA, config={**LLAMA.config, "num_hidden_layers": 4, "num_attention_heads": 4})
    reasons, configs = {}, {}
    for each in (spec, packed):
        one = job(model, each)
        facts = model_facts(model, data=prepare(each, cache_dir=tmp_path / "cache"))
        techniques = {
            name: registry.load(registry.dotted_path(name)) for name in ("pipeline", "context", "mesh", "ddp")
        }
        reasons[each.packing] = {name: technique.supports(one, shape, facts) for name, technique in techniques.items()}
        configs[each.packing] = {config["pp"] for config in techniques["mesh"].configs(one, shape, facts)}
        adapted = [replace(one, name=name, adapter=Adapter()) for name in "ab"]
        reasons[each.packing]["shared_base"] = grouping_obstacle(adapted, facts)
    one, other = (job(model, data, adapter=Adapter()) for data in (spec, replace(spec, sampling="length-grouped")))
    facts = model_facts(model, data=prepare(spec, cache_dir=tmp_path / "cache"))
    assert grouping_obstacle([one, other], facts) is None  # the order of samples is each job's own
    assert reasons[False] == dict.fromkeys(reasons[False])
    assert {name for name, reason in reasons[True].items() if reason} == {"pipeline", "context", "shared_base"}
    assert "packed samples have positions of their own" in reasons[True]["context"]
    assert configs[False] > configs[True] == {1}
