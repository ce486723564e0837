"""Gradients of divided batches: of every loss on ragged rows, with and without an adapter; and what the probe says."""

import importlib
from itertools import product

import pytest
import torch

from ringmaster.features.on_policy.loss import ADVANTAGES
from ringmaster.features.preference.preference_rows import DESIRABLE, MARGIN
from ringmaster.features.stores.passage_answers import PASSAGE_SCORES
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.loss import BUILTIN_LOSSES, loss_class
from ringmaster.techniques.models.adapters import attach
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.training.bound_loss import bind_loss, disable_dropout
from ringmaster.techniques.training.dropout import DrawSites, name_modules
from tests.matrix import matrix
from tests.speech_models import WAV2VEC2

probing = importlib.import_module("ringmaster.techniques.probing.probe")  # its package has a function of this name

VOCAB_SIZE, NUM_TOKENS = 64, 20
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = ModelSpec(architecture="LlamaForCausalLM", config=SMALL)
TOKENS = PreparedData(
    name="t", digest="", num_samples=4, num_held_out=4, kind="tokens", vocab_size=VOCAB_SIZE, seq_len=20, source=""
)
SPECS = {
    "contrastive": ModelSpec(architecture="BertModel", config=SMALL),
    "late-interaction": ModelSpec(architecture="BertModel", config=SMALL),
    "mse": ModelSpec(architecture="BertForTokenClassification", config={**SMALL, "num_labels": 1}),
    "bradley-terry": ModelSpec(architecture="BertForSequenceClassification", config={**SMALL, "num_labels": 1}),
    "ctc": WAV2VEC2,
}
OPTIONS = {
    "cross-entropy": [{}, {"label_smoothing": 0.1, "class_weights": [1.0 + 0.1 * i for i in range(VOCAB_SIZE)]}],
    "mse": [{}],
    "ctc": [{}],
    "dpo": [{}, {"loss_type": "ipo"}, {"beta": 0.5, "label_smoothing": 0.1}],
    "orpo": [{}, {"prompt_loss": False}],
    "simpo": [{}],
    "kto": [{}, {"beta": 0.5, "undesirable_weight": 2.0}],
    "bradley-terry": [{}, {"center_rewards_coefficient": 0.1}],
    "grpo": [
        {"rewards": ["math:fsum"], "num_generations": 2, "beta": beta, "loss_type": loss_type}
        for beta, loss_type in [(0.0, "dapo"), (0.1, "dapo"), (0.1, "grpo"), (0.0, "dr_grpo"), (0.1, "rloo")]
    ],
    "on-policy-distillation": [{}, {"beta": 0.4}, {"loss_type": "policy_gradient"}],
    "contrastive": [{}],
    "late-interaction": [{}, {"hard_negatives": 2}],
    "rag-sequence": [{"num_passages": 3}],
}
WHOLE, PARTS = [[0, 1, 2, 3]], [[[0, 1], [2, 3]], [[3], [0, 2], [1]], [[0], [1], [2], [3]]]


def ragged_batch(function):
    """Rows of different lengths, padded on the right; the sequences of a row have a prompt in common."""
    draw = torch.Generator().manual_seed(2)
    num = 1 if function.num_sequences is None else function.num_sequences
    ids = torch.randint(3, VOCAB_SIZE, (4, num, NUM_TOKENS), generator=draw)
    ids[:, :, :4] = ids[:, :1, :4]
    lengths = torch.randint(6, NUM_TOKENS + 1, (4, num, 1), generator=draw)
    mask = torch.arange(NUM_TOKENS) < lengths
    labels = ids.masked_fill(~mask, -100)
    labels[..., :4] = -100
    batch = {"input_ids": ids * mask, "labels": labels, "attention_mask": mask.long()}
    if function.name in ("contrastive", "late-interaction", "bradley-terry"):
        del batch["labels"]
    if function.name == "bradley-terry":
        batch[MARGIN] = torch.rand(4, generator=draw)
    if function.name == "kto":
        batch[DESIRABLE] = torch.tensor([[1], [0], [0], [1]])
    if function.name == "rag-sequence":
        batch[PASSAGE_SCORES] = torch.randn(4, num, generator=draw)
    if function.name == "ctc":
        lengths = torch.tensor([[900], [700], [600], [800]])
        speech = (torch.arange(900) < lengths).long()
        batch["attention_mask"], batch["input_values"] = speech[:, None], torch.randn(4, 1, 900, generator=draw)
        del batch["input_ids"]
    if function.name == "mse":
        batch["labels"] = torch.randn(labels.shape, generator=draw)
    if function.num_written_tokens:
        batch[ADVANTAGES] = torch.randn(4, num, generator=draw)
    return {name: value if function.num_sequences else value.squeeze(1) for name, value in batch.items()}


def gradients(model, loss, batch, parts):
    model.zero_grad()
    loss, count = loss.given(loss.totals(batch)), 0.0
    for part in parts:
        rows = {name: value[part] for name, value in batch.items()}
        total, number = loss(model(**loss.forward_inputs(rows)), rows)
        total.backward()
        count += float(number)
    return [p.grad / count for p in model.parameters() if p.grad is not None]


def difference(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) / max(
        float(a.abs().max()) for a in one
    )


def test_every_loss_is_divided_here():
    others = {"weighted-outputs"}  # of models of features, which are divided in tests/integration/ludwig
    assert OPTIONS.keys() == BUILTIN_LOSSES.keys() - others


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(("name", "options"), [(name, each) for name, some in OPTIONS.items() for each in some])
def test_a_loss_has_the_gradients_of_the_whole_batch_in_all_its_parts(name, options, adapter):
    spec = SPECS.get(name, LLAMA)
    model = build_model(spec, data=TOKENS, seed=0)
    if adapter is not None:
        attach(model, adapter, seed=0)
        with torch.no_grad():  # the second factor of an adapter begins with zeros, so that the first has no gradient
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.02)
    loss = bind_loss(name, model, spec, options=options)
    disable_dropout(model, loss)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = probing.with_reference_near(model, loss, ragged_batch(loss.function))
    if name == "bradley-terry":  # the outputs of a fresh model are nearly equal
        model.double()
    whole = gradients(model, loss, batch, WHOLE)
    assert max(float(each.abs().max()) for each in whole) > 1e-4
    differences = [difference(whole, gradients(model, loss, batch, parts)) for parts in PARTS]
    name_modules(model.float())
    reason = probing.why_undivided(model, loss, batch, DrawSites())
    if loss_class(name).mixes_rows:
        assert min(differences) > 0.01
        assert "dividing a batch changes its gradients" in reason
    else:
        assert max(differences) < 3e-6
        assert reason == ""


@pytest.mark.parametrize(
    ("name", "same_from"),
    matrix(
        product(["dpo", "orpo", "simpo"], [8, 50, 90]),
        quick=[("dpo", 8), ("orpo", 90)],
        ids=lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_preferences_with_long_common_prompts_are_divided(name, same_from, tmp_path):
    data = DataSpec(factory="tests.unit.probing.samples:long_prompts", kwargs={"num_common": same_from})
    prepared = prepare(data, cache_dir=tmp_path)
    job = Job(name="j", model=LLAMA, data=data, num_steps=1, loss=name, adapter=Adapter())
    assert prepared.seq_len == 96
    assert probing.probe(job, data=prepared, cache_dir=tmp_path).undivided == ""
