"""Metrics of tokens under teacher forcing, of pairs of answers, and of embeddings."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sklearn.metrics import top_k_accuracy_score
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from ringmaster.features.embeddings.retrieval_metrics import RecallAt1
from ringmaster.features.sequence_metrics.token_sequences import RougeL, f_measure, words
from ringmaster.tasks.evaluation.scores import compare, estimate
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.metric import Outputs
from ringmaster.techniques.models.sentence_embeddings import Pooling, embeddings
from tests.drawing import draws
from tests.unit.evaluation.measuring import LOSS, measured, rows_of, scores_of

WORDS = ["a", "b", "The", "the", "cat,", "sat", "x1", "--"]


def likely(tokens, num_tokens=8):
    """Returns logits of which the given tokens are the largest."""
    return torch.nn.functional.one_hot(torch.as_tensor(tokens), num_tokens).float()


@draws(50)
@given(st.lists(st.sampled_from(WORDS), max_size=9), st.lists(st.sampled_from(WORDS), max_size=9))
def test_the_f_measure_is_that_of_rouge_score(candidate, reference):
    one, other = " ".join(candidate), " ".join(reference)
    wanted = RougeScorer(["rougeL"]).score(other, one)["rougeL"].fmeasure
    assert f_measure(words(one), words(other)) == pytest.approx(wanted)


def test_words_are_of_any_alphabet():
    assert words("Ça va? Да_нет 42") == ["ça", "va", "да", "нет", "42"]


@pytest.fixture
def tokenizer_dir(tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@draws(20)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 6))
def test_rows_of_labelled_tokens(tmp_path_factory, seed, num_rows):
    """On one, two and three ranks. Without a tokenizer, tokens take the place of words."""
    draw = np.random.default_rng(seed)
    labels, predicted = draw.integers(0, 3, (num_rows, 4)), draw.integers(0, 3, (num_rows, 4))
    predicted = np.where(draw.random(labels.shape) < 0.6, labels, predicted)
    counted = draw.random(labels.shape) < 0.7
    counted[0, 0] = True
    batch = {"labels": torch.tensor(np.where(counted, labels, -100))}
    pairs = [(own[c].tolist(), true[c].tolist()) for own, true, c in zip(predicted, labels, counted, strict=True)]
    pairs = [pair for pair in pairs if pair[1]]
    scorer = RougeScorer(["rougeL"])
    texts = [[" ".join(f"w{i}" for i in each) for each in pair] for pair in pairs]
    wanted = {
        "exact_match": np.mean([own == true for own, true in pairs]),
        "rouge_l": np.mean([scorer.score(true, own)["rougeL"].fmeasure for own, true in texts]),
    }
    for num_parts in (1, 2, 3):
        found = measured(("exact_match", "rouge_l"), batch, num_parts=num_parts, logits=likely(predicted))
        assert found == pytest.approx(wanted)


def test_rouge_reads_words_where_there_is_a_tokenizer(tokenizer_dir):
    labels, predicted = [WORDS.index(w) for w in ("the", "cat,", "sat")], [WORDS.index(w) for w in ("The", "--", "sat")]
    batch, logits = {"labels": torch.tensor([labels])}, likely([predicted])
    data = PreparedData(
        name="", digest="", num_samples=1, num_held_out=1, kind="tokens", source="", folder=str(tokenizer_dir.parent)
    )
    found = measured(("rouge_l",), batch, data=data, logits=logits)["rouge_l"]
    assert found == pytest.approx(RougeScorer(["rougeL"]).score("the cat, sat", "The -- sat")["rougeL"].fmeasure)
    assert found == pytest.approx(0.8)
    assert measured(("rouge_l",), batch, logits=logits)["rouge_l"] == pytest.approx(1 / 3)
    outputs = Outputs(
        output=None, batch=batch, logits=logits, labels=batch["labels"], losses=None, tokenizer_dir=tokenizer_dir / "no"
    )
    with pytest.raises(OSError, match="no"):  # rather than a value of another kind
        RougeL().compute_sums(outputs)


def test_rows_of_classes_have_no_text():
    for name in ("exact_match", "rouge_l"):
        with pytest.raises(ValueError, match=f"{name} needs a label and a logit for each token"):
            measured((name,), {"labels": torch.tensor([0, 1])}, logits=torch.ones(2, 3))


class Preferences:
    """A loss over pairs: the reward of an answer is its first logit."""

    inputs, shifted, base = None, True, None

    def __call__(self, output, batch):
        return LOSS(output, batch)

    def is_known(self, batch):
        return True

    def predictions(self, output, batch):
        return output.logits, None

    def rewards(self, output, batch):
        return output.logits[:, 0, 0].reshape(len(batch["labels"]), 2)

    def written(self, output, batch):
        return None


def test_preferred_answers_have_the_larger_reward():
    batch = {"input_ids": torch.zeros(4, 2, 3).long(), "labels": torch.zeros(4, 2, 3).long()}
    logits = torch.zeros(8, 3, 5)
    logits[:, 0, 0] = torch.tensor([1.0, 0.0, 2.0, 3.0, 1.0, 1.0, 0.5, -0.5])
    for num_parts in (1, 2, 3):
        found = measured(("preference_accuracy",), batch, num_parts=num_parts, loss=Preferences(), logits=logits)
        assert found == {"preference_accuracy": 0.5}
    with pytest.raises(ValueError, match="preference_accuracy needs a loss over pairs"):
        measured(("preference_accuracy",), batch, logits=logits)
    with pytest.raises(ValueError, match="accuracy cannot be computed"):
        measured(("accuracy",), batch, loss=Preferences(), logits=logits)


def pairs_of(seed, *, num_rows, noise, num_tokens=3, num_features=4):
    draw = np.random.default_rng(seed)
    anchors = draw.normal(size=(num_rows, 1, num_tokens, num_features))
    states = np.concatenate([anchors, anchors + noise * draw.normal(size=anchors.shape)], axis=1)
    mask = draw.random((num_rows, 2, num_tokens)) < 0.7
    mask[:, :, 0] = True
    return {"attention_mask": torch.tensor(mask).long()}, torch.tensor(states).flatten(0, 1)


@draws(40)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(6, 20))
def test_recall_of_embeddings(seed, num_rows):
    batch, states = pairs_of(seed, num_rows=num_rows, noise=1.0)
    unit = embeddings(states, batch["attention_mask"].flatten(0, 1), Pooling()).reshape(num_rows, 2, -1).numpy()
    similarity, own = unit[:, 0] @ unit[:, 1].T, np.arange(num_rows)
    wanted = {f"recall_at_{k}": top_k_accuracy_score(own, similarity, k=k, labels=own) for k in (1, 5)}
    for division in ({}, {"num_parts": 2}, {"num_parts": 3}, {"replicas": 2}):
        found = measured(("recall_at_1", "recall_at_5"), batch, **division, last_hidden_state=states)
        assert found == pytest.approx(wanted, abs=1e-12)


def test_an_embedding_is_the_unit_mean_of_the_tokens_that_count():
    states = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])
    assert embeddings(states, torch.tensor([[1, 1, 0]]), Pooling()).tolist() == [pytest.approx([0.6, 0.8])]
    assert embeddings(states * 0, torch.tensor([[1, 1, 0]]), Pooling()).tolist() == [[0.0, 0.0]]


def test_equal_embeddings_find_what_chance_finds():
    batch = {"attention_mask": torch.ones(10, 2, 1).long()}
    found = measured(("recall_at_1", "recall_at_5"), batch, last_hidden_state=torch.ones(20, 1, 2))
    assert found == pytest.approx({"recall_at_1": 0.1, "recall_at_5": 0.5})
    none = rows_of("recall_at_1", batch, last_hidden_state=torch.ones(20, 1, 2)).where(np.zeros(10, bool))
    assert math.isnan(none.value)
    assert math.isnan(estimate(none).low)


def test_more_anchors_than_are_compared_at_a_time(monkeypatch):
    batch, states = pairs_of(3, num_rows=20, noise=1.0)
    whole = measured(("recall_at_1",), batch, last_hidden_state=states)
    monkeypatch.setattr("ringmaster.features.embeddings.retrieval_metrics.NUM_ANCHORS", 7)
    assert measured(("recall_at_1",), batch, last_hidden_state=states) == whole


def test_outputs_without_embeddings_of_pairs_are_refused():
    batch, states = pairs_of(1, num_rows=4, noise=0.1)
    for wrong, output in (
        ({"input_ids": torch.zeros(4, 2, 3)}, {"last_hidden_state": states}),
        ({"attention_mask": torch.ones(4, 3)}, {"last_hidden_state": states}),
        (batch, {"logits": states}),
        (batch, {"last_hidden_state": states[:, :2]}),
    ):
        with pytest.raises(ValueError, match="recall_at_1 needs last_hidden_state"):
            measured(("recall_at_1",), wrong, **output)


def test_samples_and_slices_of_anchors_are_compared_with_all_positives():
    batch, states = pairs_of(2, num_rows=30, noise=2.0)
    rows = rows_of("recall_at_1", batch, last_hidden_state=states)
    found = rows.sums["found_pairs"]
    assert 0 < found.sum() < 30
    assert rows.value == pytest.approx(found.mean())
    mask = np.arange(30) < 12
    assert rows.where(mask).value == pytest.approx(found[mask].mean())
    counts = np.random.default_rng(1).multinomial(30, np.full(30, 1 / 30), size=4).astype(float)
    assert rows.drawn(counts) == pytest.approx(counts @ found / 30)
    told = estimate(rows)
    assert told.low < told.value < told.high
    own = states.reshape(30, 2, 3, 4)[:, [0, 0]].flatten(0, 1)
    whole = {"attention_mask": torch.ones(30, 2, 3).long()}
    better = rows_of("recall_at_1", whole, last_hidden_state=own)
    assert compare(better, rows).p_better < 0.05
    least = estimate(better)
    assert (least.value, least.high) == (1.0, 1.0)
    assert least.low == pytest.approx(0.886, abs=1e-3)  # Wilson's, of 30 of 30


def test_a_metric_of_scored_rows_that_does_not_suit_is_told():
    scores = scores_of("recall_at_1", {"labels": torch.zeros(2).long()}, logits=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"these rows have no recall_at_1, which needs last_hidden_state.* To fix"):
        scores.rows("recall_at_1")


def test_the_two_recalls_share_their_embeddings():
    calls = []

    class Counting(RecallAt1):
        def compute_sums(self, outputs):
            calls.append(outputs)
            return super().compute_sums(outputs)

    from ringmaster.techniques.training.metric_totals import outputs_of, sums_of

    batch, states = pairs_of(1, num_rows=4, noise=0.1)
    outputs = outputs_of(LOSS, SimpleNamespace(last_hidden_state=states), batch, losses=None)
    sums_of([Counting(), Counting()], outputs)
    assert len(calls) == 1
