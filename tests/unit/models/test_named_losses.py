"""Losses that jobs name: their formulas against torch's and by hand, and equal sums of divided batches."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.nn import functional

from ringmaster.features.preference.preference_rows import DESIRABLE, MARGIN
from ringmaster.features.stores.passage_answers import PASSAGE_SCORES
from ringmaster.techniques import loss as registry
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.loss import (
    CLASSIFIER,
    LossFunction,
    Values,
    option,
)
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.training.bound_loss import REFERENCE, bind_loss, disable_dropout
from ringmaster.techniques.training.metric_totals import MetricTotals
from tests.integration.losses.pairs import VOCAB_SIZE, Preferences, Texts
from tests.unit.models.conftest import GPT2, IMAGES, LLAMA, TOKENS, VIT

PAIRS = PreparedData(
    name="pairs", digest="", num_samples=8, num_held_out=8, kind="tokens", vocab_size=VOCAB_SIZE, seq_len=12, source=""
)
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = ModelSpec(architecture="BertModel", config=SMALL)
SCORER = ModelSpec(architecture="BertForSequenceClassification", config={**SMALL, "num_labels": 1})
T5 = ModelSpec(
    architecture="T5ForConditionalGeneration",
    config={"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2},
)
TOKEN_CLASSIFIER = ModelSpec(architecture="BertForTokenClassification", config={**SMALL, "num_labels": 5})


def batch_of(rows, num):
    return {key: torch.stack([rows[i][key] for i in range(num)]) for key in rows[0]}


def preferences(num=6):
    return batch_of(Preferences(num, 12, 3), num)


def part(batch, rows):
    return {name: value[rows] for name, value in batch.items()}


def made(spec, data, name, **options):
    model = build_model(spec, data=data, seed=0)
    loss = bind_loss(name, model, spec, options=options)
    return model.eval(), loss


def compute(model, loss, batch):
    with torch.no_grad():
        return loss(model(**loss.forward_inputs(batch)), batch)


@torch.no_grad()
def by_hand(model, batch):
    """Returns log-probabilities of the labelled tokens, [rows, 2], and their numbers, one sequence at a time."""
    sums, counts = [], []
    for ids, labels in zip(batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1), strict=True):
        logs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        places = [i for i in range(1, len(ids)) if labels[i] != -100]
        sums.append(sum(logs[i - 1, ids[i]] for i in places))
        counts.append(len(places))
    return torch.stack(sums).reshape(-1, 2), torch.tensor(counts).reshape(-1, 2)


# -- cross entropy -----------------------------------------------------------------------------------------------------


def labelled(spec, data):
    draw = torch.Generator().manual_seed(1)
    if data is IMAGES:
        pixels = torch.randn(6, 1, data.image_size, data.image_size, generator=draw)
        return {"pixel_values": pixels, "labels": torch.arange(6) % data.num_labels}
    ids = torch.randint(0, data.vocab_size, (4, data.seq_len), generator=draw)
    labels = torch.randint(0, 5, ids.shape, generator=draw) if spec is TOKEN_CLASSIFIER else ids.clone()
    labels[1, 3:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("spec", "data"),
    [(LLAMA, TOKENS), (VIT, IMAGES), (TOKEN_CLASSIFIER, TOKENS), (T5, TOKENS)],
    ids=["llama", "vit", "bert-tokens", "t5"],
)
def test_cross_entropy_is_torchs(spec, data, weighted):
    batch = labelled(spec, data)
    model = build_model(spec, data=data, seed=0).eval()
    labels = batch["labels"]
    logits = model(**batch).logits.detach()
    if spec is LLAMA:
        logits, labels = logits[:, :-1], labels[:, 1:]
    weights = [1.0 + 0.1 * i for i in range(logits.shape[-1])] if weighted else []
    options = {"label_smoothing": 0.1, **({"class_weights": weights} if weighted else {})}
    loss = bind_loss("cross-entropy", model, spec, options=options)
    expected = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), weight=torch.tensor(weights) if weighted else None, label_smoothing=0.1
    )
    total, count = compute(model, loss, batch)
    assert float(total / count) == pytest.approx(float(expected), rel=1e-5)
    parts = [compute(model, loss, part(batch, rows)) for rows in ([0], slice(1, None))]
    assert float(sum(each for each, _ in parts)) == pytest.approx(float(total), rel=1e-5)
    assert float(sum(each for _, each in parts)) == pytest.approx(float(count), rel=1e-6)


def test_cross_entropy_without_options_is_the_models_own_loss():
    batch = labelled(LLAMA, TOKENS)
    model, loss = made(LLAMA, TOKENS, "cross-entropy")
    own = compute(model, bind_loss(None, model, LLAMA), batch)
    assert [float(x) for x in compute(model, loss, batch)] == pytest.approx([float(x) for x in own])


def test_mse_is_torchs():
    spec = ModelSpec(architecture="BertForSequenceClassification", config={**SMALL, "num_labels": 3})
    model, loss = made(spec, TOKENS, "mse")
    batch = {"input_ids": labelled(LLAMA, TOKENS)["input_ids"], "labels": torch.randn(4, 3)}
    total, count = compute(model, loss, batch)
    expected = functional.mse_loss(model(input_ids=batch["input_ids"]).logits.detach(), batch["labels"])
    assert float(total / count) == pytest.approx(float(expected), rel=1e-5)


# -- preferences -------------------------------------------------------------------------------------------------------


def reference_of(batch):
    return {
        **batch,
        REFERENCE: -torch.rand(len(batch["input_ids"]), 2, generator=torch.Generator().manual_seed(5)) * 40,
    }


def test_dpo_is_the_papers_equation_7():
    model, loss = made(LLAMA, PAIRS, "dpo", beta=0.3, label_smoothing=0.1)
    batch = reference_of(preferences())
    logps, _ = by_hand(model, batch)
    rewards = 0.3 * (logps - batch[REFERENCE])
    h = rewards[:, 0] - rewards[:, 1]
    expected = -(0.9 * h.sigmoid().log() + 0.1 * (-h).sigmoid().log())
    total, count = compute(model, loss, batch)
    assert int(count) == 6
    assert float(total) == pytest.approx(float(expected.sum()), rel=1e-4)
    found = loss.rewards(model(**loss.forward_inputs(batch)), batch)
    assert torch.allclose(found, rewards, atol=1e-4)


def test_ipo_averages_over_tokens():
    model, loss = made(LLAMA, PAIRS, "dpo", beta=0.3, loss_type="ipo")
    batch = reference_of(preferences())
    logps, counts = by_hand(model, batch)
    means = (logps - batch[REFERENCE]) / counts
    expected = (means[:, 0] - means[:, 1] - 1 / 0.6) ** 2
    assert float(compute(model, loss, batch)[0]) == pytest.approx(float(expected.sum()), rel=1e-4)


def test_simpo_is_the_papers_equation_6():
    model, loss = made(LLAMA, PAIRS, "simpo", beta=2.5, gamma=0.7)
    batch = preferences()
    logps, counts = by_hand(model, batch)
    rewards = 2.5 * logps / counts
    expected = -(rewards[:, 0] - rewards[:, 1] - 0.7).sigmoid().log()
    assert float(compute(model, loss, batch)[0]) == pytest.approx(float(expected.sum()), rel=1e-4)
    assert torch.allclose(loss.rewards(model(**loss.forward_inputs(batch)), batch), rewards, atol=1e-4)


@pytest.mark.parametrize("prompt_loss", [True, False])
def test_orpo_adds_a_mean_over_tokens_and_one_over_pairs(prompt_loss):
    model, loss = made(LLAMA, PAIRS, "orpo", beta=0.2, prompt_loss=prompt_loss)
    batch = preferences()
    logps, counts = by_hand(model, batch)
    odds = torch.log(torch.exp(logps / counts) / (1 - torch.exp(logps / counts)))
    ratio = (odds[:, 0] - odds[:, 1]).sigmoid().log().mean()
    chosen = part(batch, slice(None))
    ids = batch["input_ids"]
    real = (ids != 0) if prompt_loss else batch["labels"] != -100
    chosen["labels"] = torch.where(real, ids, -100)
    entropies, tokens = by_hand(model, chosen)
    expected = -entropies[:, 0].sum() / tokens[:, 0].sum() - 0.2 * ratio
    total, count = compute(model, loss, batch)
    assert float(total / count) == pytest.approx(float(expected), rel=1e-4)


def test_orpo_of_a_divided_batch_needs_the_totals_of_the_whole():
    model, loss = made(LLAMA, PAIRS, "orpo")
    batch = preferences()
    divisions = [[0], [1, 2], [3, 4, 5]]
    totals = {}
    for rows in divisions:
        for name, value in loss.totals(part(batch, rows)).items():
            totals[name] = totals.get(name, 0) + value
    assert totals == loss.totals(batch)
    whole = float(compute(model, loss, batch)[0])
    divided = sum(float(compute(model, loss.given(totals), part(batch, rows))[0]) for rows in divisions)
    assert divided == pytest.approx(whole, rel=1e-5)
    apart = sum(float(compute(model, loss, part(batch, rows))[0]) for rows in divisions)
    assert apart != pytest.approx(whole, rel=1e-4)


def test_a_probability_of_one_has_a_finite_loss():
    _, loss = made(LLAMA, PAIRS, "orpo")
    batch = preferences(2)
    logits = functional.one_hot(batch["input_ids"].flatten(0, 1).roll(-1, -1), VOCAB_SIZE).float() * 1e4
    logits.requires_grad_()
    total, _ = loss(SimpleNamespace(logits=logits), batch)
    total.backward()
    assert math.isfinite(float(total))
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo"])
def test_rows_are_scored_alone(name):
    model, loss = made(LLAMA, PAIRS, name)
    batch = reference_of(preferences())
    sums, counts = loss.by_row(model(**loss.forward_inputs(batch)), batch)
    alone = [compute(model, loss, part(batch, [i])) for i in range(6)]
    assert sums.tolist() == pytest.approx([float(total) for total, _ in alone], rel=1e-4)
    assert counts.tolist() == [1.0] * 6


def test_without_its_reference_a_dpo_loss_is_left_out():
    model, loss = made(LLAMA, PAIRS, "dpo")
    batch = preferences()
    output = model(**loss.forward_inputs(batch))
    assert not loss.is_known(batch)
    assert loss.rewards(output, batch) is None
    metrics = MetricTotals(("loss", "accuracy", "preference_accuracy"), loss=loss)
    metrics.add(output, batch)
    found = metrics.result()
    assert math.isnan(found["loss"])
    assert math.isnan(found["preference_accuracy"])
    assert 0 <= found["accuracy"] <= 1


def test_preferences_train_without_dropout():
    spec = GPT2
    model = build_model(spec, data=PAIRS, seed=0)
    loss = bind_loss("simpo", model, spec)
    batch = preferences()
    assert float(compute(model, loss, batch)[0]) != float(compute(model, loss, batch)[0])
    disable_dropout(model, loss)
    assert float(compute(model, loss, batch)[0]) == float(compute(model, loss, batch)[0])
    assert loss.sequences([0, 3]) == [0, 1, 6, 7]


# -- contrastive -------------------------------------------------------------------------------------------------------


def test_contrastive_ranks_each_positive_among_all():
    model, loss = made(BERT, PAIRS, "contrastive", temperature=0.1)
    batch = batch_of(Texts(5, 12, 0), 5)
    vectors = []
    for ids, mask in zip(batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1), strict=True):
        hidden = model(input_ids=ids[None], attention_mask=mask[None]).last_hidden_state[0]
        vectors.append(functional.normalize(hidden[mask.bool()].mean(0), dim=0))
    anchors, positives = torch.stack(vectors[::2]), torch.stack(vectors[1::2])
    expected = functional.cross_entropy(anchors @ positives.T / 0.1, torch.arange(5))
    total, count = compute(model, loss, batch)
    assert float(total / count) == pytest.approx(float(expected), rel=1e-4)
    assert loss.by_row(model(**loss.forward_inputs(batch)), batch) is None


def test_hard_negatives_are_candidates_of_every_anchor():
    """As in MultipleNegativesRankingLoss of sentence-transformers, with triplets."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (5, 3, 7), generator=draw)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model, loss = made(BERT, PAIRS, "contrastive", hard_negatives=True)
    states = model(input_ids=ids.flatten(0, 1), attention_mask=batch["attention_mask"].flatten(0, 1)).last_hidden_state
    anchors, positives, negatives = functional.normalize(states.mean(1), dim=-1).reshape(5, 3, -1).unbind(1)
    similarities = anchors @ torch.cat([positives, negatives]).T / 0.05
    total, count = compute(model, loss, batch)
    assert float(total / count) == pytest.approx(
        float(functional.cross_entropy(similarities, torch.arange(5))), rel=1e-4
    )
    assert loss.sequences([0, 3]) == [0, 1, 2, 9, 10, 11]
    with pytest.raises(ValueError, match=r"input_ids of a sample is \[2, 7\], and not of 3 sequences"):
        compute(model, loss, {name: tensor[:, :2] for name, tensor in batch.items()})


def triplets(num_rows, num_sequences, *, seed=0):
    """Sequences of 4 to 7 tokens, padded to 7, with their mask, which begins at the first token."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (num_rows, num_sequences, 7), generator=draw)
    mask = torch.arange(7) < torch.randint(4, 8, (num_rows, num_sequences, 1), generator=draw)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.mark.parametrize("num_negatives", [0, 1, 3])
def test_late_interaction_adds_the_largest_cosine_of_each_token_of_the_question(num_negatives):
    """Each text is encoded alone and without padding, and compared token by token."""
    batch = triplets(4, 2 + num_negatives)
    model, loss = made(BERT, PAIRS, "late-interaction", temperature=0.5, hard_negatives=num_negatives)

    @torch.no_grad()
    def vectors(row, place):
        ids = batch["input_ids"][row, place][batch["attention_mask"][row, place].bool()]
        return functional.normalize(model(input_ids=ids[None]).last_hidden_state[0], dim=-1)

    def similarity(row, other, place):
        return float(sum((vectors(other, place) @ token).max() for token in vectors(row, 0)))

    candidates = [(other, place) for place in range(1, 2 + num_negatives) for other in range(4)]
    scores = torch.tensor([[similarity(row, *each) for each in candidates] for row in range(4)])
    total, count = compute(model, loss, batch)
    expected = functional.cross_entropy(scores / 0.5, torch.arange(4))
    assert float(total / count) == pytest.approx(float(expected), rel=1e-4)
    rewards = loss.rewards(model(**loss.forward_inputs(batch)), batch)
    if num_negatives == 0:
        assert rewards is None
    else:
        own = [[similarity(row, row, place) for place in range(1, 2 + num_negatives)] for row in range(4)]
        assert rewards.tolist() == [pytest.approx(row, rel=1e-4) for row in own]


@pytest.mark.parametrize("name", ["contrastive", "late-interaction"])
def test_samples_with_other_negatives_than_the_loss_compares_are_refused_with_their_number(name):
    _, loss = made(BERT, PAIRS, name)
    with pytest.raises(ValueError, match=r"of 2 sequences\. To fix: set hard_negatives: 3 in the loss, or give"):
        loss.forward_inputs(triplets(2, 5))


def test_the_right_passage_is_ranked_among_its_negatives():
    batch = triplets(8, 5)
    model, loss = made(BERT, PAIRS, "contrastive", hard_negatives=3)
    output = model(**loss.forward_inputs(batch))
    rewards = loss.rewards(output, batch)
    ranks = [1 + sum(float(other) >= float(row[0]) for other in row[1:]) for row in rewards]
    totals = MetricTotals(["hit_at_1", "hit_at_5", "mrr"], loss=loss)
    totals.add(output, batch)
    assert len(set(ranks)) > 1
    assert totals.result() == pytest.approx(
        {"hit_at_1": ranks.count(1) / 8, "hit_at_5": 1.0, "mrr": sum(1 / rank for rank in ranks) / 8}
    )
    # Equal scores are not success.
    batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:] = 5, 1
    totals = MetricTotals(["hit_at_1", "mrr"], loss=loss)
    totals.add(model(**loss.forward_inputs(batch)), batch)
    assert totals.result() == pytest.approx({"hit_at_1": 0.0, "mrr": 0.25})


def test_rag_sequence_sums_an_answer_over_its_passages():
    """The probability of each answer is the sum over passages of p(z | x) p(y | x, z), computed of products."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB_SIZE, (4, 3, 9), generator=draw)
    labels = ids.masked_fill(torch.arange(9) < 6, -100)
    scores = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0], [50.0, 0.0, -50.0], [1.0, 0.5, 0.2]])
    batch = {"input_ids": ids, "labels": labels, PASSAGE_SCORES: scores}
    model, loss = made(LLAMA, PAIRS, "rag-sequence", num_passages=3)
    with torch.no_grad():
        logs = model(input_ids=ids.flatten(0, 1)).logits.double().log_softmax(-1).reshape(4, 3, 9, -1)
    p_answer = logs[..., :-1, :].gather(-1, ids[..., 1:, None])[..., 5:, 0].sum(-1).exp()
    expected = -(scores.double().softmax(-1) * p_answer).sum(-1).log()
    sums, counts = loss.by_row(model(**loss.forward_inputs(batch)), batch)
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert counts.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="the samples have no passage_scores"):
        compute(model, loss, {"input_ids": ids, "labels": labels})


# -- single completions ------------------------------------------------------------------------------------------------


def completions(num=6):
    batch = {name: pairs[:, 0] for name, pairs in preferences(num).items()}
    return {**batch, DESIRABLE: torch.tensor([1, 0, 0, 1, 1, 0][:num])}


@pytest.mark.parametrize("divergence", [6.0, -3.0])
def test_kto_is_its_formula(divergence):
    batch = completions()
    model, loss = made(LLAMA, PAIRS, "kto", beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    log_p, _ = by_hand(model, {name: tokens.repeat(2, 1, 1) for name, tokens in batch.items() if name != DESIRABLE})
    reference = torch.linspace(-9, -6, 6)
    baseline = max(divergence / 6, 0.0)
    expected = []
    for ratio, desirable in zip(log_p.flatten()[:6] - reference, batch[DESIRABLE], strict=True):
        gain = ratio - baseline if desirable else baseline - ratio
        expected.append((1.5 if desirable else 0.7) * float(1 - torch.sigmoid(0.5 * gain)))
    loss = loss.given({"rows": 6.0, "divergence": divergence})
    total, count = compute(model, loss, {**batch, REFERENCE: reference})
    assert (float(total), int(count)) == (pytest.approx(sum(expected), rel=1e-5), 6)


def test_rewards_of_completions_are_right_by_their_sign():
    batch = completions()
    model, loss = made(LLAMA, PAIRS, "kto")
    output = model(**loss.forward_inputs(batch))
    log_p, _ = by_hand(model, {name: tokens.repeat(2, 1, 1) for name, tokens in batch.items() if name != DESIRABLE})
    reference = log_p.flatten()[:6] + torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, 1.0])  # of 1, 0, 0, 1, 1, 0
    totals = MetricTotals(["preference_accuracy"], loss=loss.given({"rows": 6.0, "divergence": 0.0}))
    totals.add(output, {**batch, REFERENCE: reference})
    assert totals.result() == {"preference_accuracy": pytest.approx(4 / 6)}


def test_mismatched_rows_have_the_completion_of_the_row_before():
    """TRL makes them of the prompt's tokens and those of the other completion, and cuts them."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 0], [11, 12, 0, 0, 0, 0], [21, 22, 23, 24, 0, 0]])
    labels = torch.full_like(ids, -100)
    labels[0, 2:5], labels[1, 1:2], labels[2, 3:4] = ids[0, 2:5], ids[1, 1:2], ids[2, 3:4]
    batch = {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}
    _, loss = made(LLAMA, PAIRS, "kto")
    rows = loss.first_pass(batch, {name: value.roll(1, 0) for name, value in batch.items()})
    assert rows["input_ids"].tolist() == [[5, 6, 24, 0, 0, 0], [11, 7, 8, 9, 0, 0], [21, 22, 23, 12, 0, 0]]
    assert [[int(i) for i in row if i != -100] for row in rows["labels"]] == [[24], [7, 8, 9], [12]]
    assert (rows["labels"] == rows["input_ids"])[rows["labels"] != -100].all()
    assert rows["attention_mask"].sum(1).tolist() == [3, 4, 4]
    long = {**batch, "labels": labels.clone()}
    long["labels"][1] = torch.tensor([-100, -100, -100, -100, -100, 0])
    assert loss.first_pass(long, batch)["labels"][1].tolist() == [-100] * 5 + [12]
    assert made(LLAMA, PAIRS, "kto", loss_type="apo_zero_unpaired")[1].first_pass(batch, batch) is None


def test_a_row_that_is_scored_alone_has_no_baseline():
    batch = {**completions(), REFERENCE: torch.linspace(-9, -6, 6)}
    model, loss = made(LLAMA, PAIRS, "kto")
    _, plain = made(LLAMA, PAIRS, "kto", loss_type="apo_zero_unpaired")
    output = model(**loss.forward_inputs(batch))
    sums, _ = loss.given({"rows": 6.0, "divergence": 60.0}).by_row(output, batch)
    assert float(sums.sum()) == pytest.approx(float(plain(output, batch)[0]), rel=1e-6)


# -- reward models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_reward_models_learn_by_the_model_of_bradley_and_terry(coefficient):
    rewards, margins = torch.tensor([[2.0, 1.0], [0.5, 0.5], [-1.0, 3.0]]), torch.tensor([0.0, 0.5, 2.0])
    _, loss = made(SCORER, PAIRS, "bradley-terry", center_rewards_coefficient=coefficient)
    batch = {"input_ids": torch.zeros(3, 2, 4), MARGIN: margins}
    output = SimpleNamespace(logits=rewards.reshape(6, 1))
    sums, counts = loss.by_row(output, batch)
    for row, (chosen, rejected) in enumerate(rewards.tolist()):
        p = 1 / (1 + math.exp(-(chosen - rejected - float(margins[row]))))
        assert float(sums[row]) == pytest.approx(-math.log(p) + coefficient * (chosen + rejected) ** 2, rel=1e-5)
    assert counts.tolist() == [1, 1, 1]
    totals = MetricTotals(["reward_accuracy"], loss=loss)
    totals.add(output, batch)
    assert totals.result() == {"reward_accuracy": pytest.approx(1 / 3)}  # equal rewards are not right
    with pytest.raises(ValueError, match=r"returns logits \[3, 2, 4\], and not one number for each answer"):
        loss(SimpleNamespace(logits=torch.zeros(6, 4)), batch)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dpo", {"bta": 0.1}, "bta is not an option of dpo. To fix: it has beta, label_smoothing, loss_type"),
        ("dpo", {"beta": 0}, "beta must be a number above 0, not 0"),
        ("dpo", {"beta": True}, "beta must be a number above 0, not True"),
        ("dpo", {"loss_type": "hinge"}, "loss_type must be one of sigmoid, ipo"),
        ("cross-entropy", {"class_weights": [1, -1]}, "class_weights must be a list of numbers at least 0"),
        ("orpo", {"prompt_loss": 1}, "prompt_loss must be true or false"),
        ("contrastive", {"hard_negatives": -1}, "must be true, false or a whole number of hard negatives, not -1"),
        ("mse", {"beta": 1}, "beta is not an option of mse. To fix: it has none"),
        ("kto", {"desirable_weight": -1}, "desirable_weight must be a number at least 0, not -1"),
        ("kto", {"desirable_weight": 0, "undesirable_weight": 0.0}, "is 0, and undesirable_weight too"),
        ("kto", {"loss_type": "dpo"}, "loss_type must be one of kto, apo_zero_unpaired"),
        ("bradley-terry", {"margin": 1}, "margin is not an option of bradley-terry"),
        ("dop", {}, "unknown loss 'dop': did you mean 'dpo'"),
    ],
)
def test_wrong_options_are_refused(name, options, said):
    with pytest.raises(ValueError, match=said):
        registry.loss_function(name, options)


def test_a_loss_for_other_models_is_refused():
    with pytest.raises(ValueError, match="loss dpo is for causal models, and BertModel is not one"):
        made(BERT, PAIRS, "dpo")


def test_samples_that_are_no_pairs_are_refused():
    _, loss = made(LLAMA, TOKENS, "simpo")
    with pytest.raises(ValueError, match=r"input_ids of a sample is \[\d+\], and not of 2 sequences"):
        loss.forward_inputs(labelled(LLAMA, TOKENS))


@dataclass(frozen=True, kw_only=True)
class Focal(LossFunction):
    """As in docs/losses.md."""

    name: ClassVar[str] = "focal"
    kinds: ClassVar[tuple[str, ...]] = (CLASSIFIER,)

    gamma: float = option(2.0, Values(least=0))

    def row_sums(self, inputs):
        log_p = inputs.logits.log_softmax(-1).gather(-1, inputs.labels[:, None])[:, 0]
        losses = -((1 - log_p.exp()) ** self.gamma) * log_p
        return losses, losses.new_ones(len(losses))


def test_a_loss_of_another_package(monkeypatch):
    paths = {"focal": f"{__name__}:Focal", "other": f"{__name__}:Focal"}
    monkeypatch.setattr("ringmaster.registry.installed", lambda group: paths if group == "ringmaster.losses" else {})
    batch = labelled(VIT, IMAGES)
    model, loss = made(VIT, IMAGES, "focal", gamma=0)
    plain, own = made(VIT, IMAGES, "cross-entropy")
    assert float(compute(model, loss, batch)[0]) == pytest.approx(float(compute(plain, own, batch)[0]), rel=1e-5)
    assert registry.loss_code_path("focal") == paths["focal"]
    assert (registry.loss_code_path("dpo"), registry.loss_code_path("a:b")) == (None, "a:b")
    with pytest.raises(ValueError, match="entry point 'other' has the loss 'focal'"):
        registry.loss_function("other", {})


def test_every_builtin_loss_has_its_own_name():
    assert [registry.loss_class(name).name for name in registry.BUILTIN_LOSSES] == list(registry.BUILTIN_LOSSES)
