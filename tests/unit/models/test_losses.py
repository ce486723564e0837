import math

import pytest
import torch

from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.training.bound_loss import bind_loss
from ringmaster.techniques.training.metric_totals import MetricTotals
from tests.unit.models.conftest import FOUR, GPT2, IMAGES, LLAMA, RESNET, TOKENS, VIT

T5 = ModelSpec(
    architecture="T5ForConditionalGeneration",
    config={"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2},
)
BERT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def batch_of(data, rows=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    if data.kind == "tokens":
        ids = torch.randint(0, data.vocab_size, (rows, data.seq_len), generator=draw)
        return {"input_ids": ids, "labels": ids}
    pixels = torch.randn(rows, 1, data.image_size, data.image_size, generator=draw)
    return {"pixel_values": pixels, "labels": torch.arange(rows) % data.num_labels}


def computed(spec, data, batch, job_loss=None):
    model = build_model(spec, data=data, seed=0).eval()
    loss = bind_loss(job_loss, model, spec)
    output = model(**loss.forward_inputs(batch))
    return model, loss, output, loss(output, batch)


@pytest.mark.parametrize(("spec", "data"), FOUR)
def test_sum_over_count_is_the_models_own_loss(spec, data):
    batch = batch_of(data)
    model, loss, _, (total, count) = computed(spec, data, batch)
    assert "labels" not in loss.forward_inputs(batch)
    assert total.item() / int(count) == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert total.requires_grad
    assert total.dtype == torch.float32


@pytest.mark.parametrize(("spec", "data"), [(LLAMA, TOKENS), (VIT, IMAGES)])
def test_a_divided_batch_has_the_same_loss(spec, data):
    batch = batch_of(data)
    if data is TOKENS:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 3:] = -100
    whole_sum, whole_count = computed(spec, data, batch)[3]
    parts = [computed(spec, data, {k: v[rows] for k, v in batch.items()})[3] for rows in ([0], [1, 2, 3])]
    assert sum(int(count) for _, count in parts) == int(whole_count)
    assert sum(total.item() for total, _ in parts) == pytest.approx(whole_sum.item(), rel=1e-6)


def test_ignored_labels_count_for_nothing():
    batch = batch_of(TOKENS, rows=2)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][1, 5] = 7
    _, loss, output, (total, count) = computed(LLAMA, TOKENS, batch)
    expected = -torch.log_softmax(output.logits[1, 4], -1)[7]
    assert int(count) == 1
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    metrics = MetricTotals(("accuracy",), loss=loss)
    metrics.add(output, batch)
    assert metrics.parts()[2].tolist() == [1]


def test_an_encoder_decoder_is_given_its_labels_and_its_loss_counts_them():
    batch = batch_of(TOKENS)
    model, loss, _, (total, count) = computed(T5, TOKENS, batch)
    assert "labels" in loss.forward_inputs(batch), "of which it makes the decoder's inputs"
    assert count == batch["labels"].numel()
    assert total.item() == pytest.approx(int(count) * model(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, 1.0, 2.0, -1.0])),
        ({"num_labels": 3}, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
        ({"num_labels": 3}, torch.tensor([0, 2, 1, 1])),
    ],
)
def test_a_classifiers_loss_follows_its_labels_as_in_transformers(fields, labels):
    spec = ModelSpec(architecture="BertForSequenceClassification", config={**BERT, **fields})
    batch = {**batch_of(TOKENS), "labels": labels}
    model, _, _, (total, count) = computed(spec, TOKENS, batch)
    assert total.item() / int(count) == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_columns_that_forward_does_not_take_are_left_out():
    batch = {**batch_of(TOKENS), "row": torch.arange(4)}
    assert sorted(computed(LLAMA, TOKENS, batch)[1].forward_inputs(batch)) == ["input_ids"]
    with pytest.raises(ValueError, match=r"forward takes .*input_ids.*samples have row"):
        computed(LLAMA, TOKENS, batch)[1].forward_inputs({"row": torch.arange(4)})


def test_a_users_model_and_loss(users):
    spec = ModelSpec(factory=f"{users}:tied")
    ids = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "labels": ids}
    model, _, _, (total, count) = computed(spec, TOKENS, batch)
    assert (total.item(), count) == (pytest.approx(3 * model(**batch)["loss"].item()), 3)
    _, _, output, (total, count) = computed(spec, TOKENS, batch, job_loss=f"{users}:summed")
    assert (total.item(), count) == (pytest.approx(output["logits"].sum().item()), 3)
    with pytest.raises(ValueError, match=r"returned Tensor.*\(sum, count\)"):
        computed(spec, TOKENS, batch, job_loss=f"{users}:mean")
    with pytest.raises(ValueError, match=r"returns no loss.*set the job's loss"):
        computed(ModelSpec(factory=f"{users}:looks"), TOKENS, {"x": torch.ones(2, 3)})


def test_metrics_add_up_over_batches_and_ranks():
    names = ("loss", "perplexity", "accuracy")
    batches = [batch_of(IMAGES, rows=rows, seed=rows) for rows in (4, 3)]
    together = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    parts = []
    for batch in batches:
        _, loss, output, _ = computed(RESNET, IMAGES, batch)
        metrics = MetricTotals(names, loss=loss)
        metrics.add(output, batch)
        parts.append(metrics.parts())
    _, _, output, (total, _) = computed(RESNET, IMAGES, together)
    result = metrics.result(list(zip(*parts, strict=True)))
    assert result["loss"] == pytest.approx(total.item() / 7, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(total.item() / 7), rel=1e-6)
    assert result["accuracy"] == pytest.approx(int((output.logits.argmax(-1) == together["labels"]).sum()) / 7)


def test_a_language_model_is_scored_on_the_next_token():
    batch = batch_of(TOKENS)
    _, loss, output, _ = computed(GPT2, TOKENS, batch)
    output.logits = torch.nn.functional.one_hot(batch["input_ids"].roll(-1, dims=1), 64).float()
    metrics = MetricTotals(("accuracy",), loss=loss)
    metrics.add(output, batch)
    assert metrics.result() == {"accuracy": 1.0}


def test_a_users_loss_of_a_language_model_may_read_labels_of_rows(users):
    batch = {**batch_of(TOKENS), "labels": torch.arange(4)}
    _, loss, output, (total, count) = computed(LLAMA, TOKENS, batch, job_loss=f"{users}:summed")
    metrics = MetricTotals(("loss",), loss=loss)
    metrics.add(output, batch)
    assert [part.tolist() for part in metrics.parts()[1:]] == [[pytest.approx(total.item())], [count]]
    with pytest.raises(ValueError, match="accuracy cannot be computed"):
        MetricTotals(("accuracy",), loss=loss).add(output, batch)


def test_metrics_that_cannot_be_are_told(users):
    _, loss, _, _ = computed(VIT, IMAGES, batch_of(IMAGES))
    with pytest.raises(ValueError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        MetricTotals(("acuracy",), loss=loss)
    assert MetricTotals(("loss",), loss=loss).result() == {}  # of no row
    batch = {"input_ids": torch.arange(12).reshape(3, 4)}
    _, loss, output, _ = computed(ModelSpec(factory=f"{users}:tied"), TOKENS, batch, job_loss=f"{users}:summed")
    with pytest.raises(
        ValueError, match=r"accuracy cannot be computed: .*the samples have no labels. accuracy needs .*To fix"
    ):
        MetricTotals(("loss", "accuracy"), loss=loss).add(output, batch)
    with pytest.raises(ValueError, match=r"logits \[3, 4, .*labels \[3, 2\]"):
        MetricTotals(("accuracy",), loss=loss).add(output, {**batch, "labels": batch["input_ids"][:, :2]})
