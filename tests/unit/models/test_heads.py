"""Fresh heads on pretrained models, the names of classes, and the tokenizers that exports contain."""

from dataclasses import replace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.data_source import SampleTensor
from ringmaster.techniques.job import ModelSpec
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
REVIEWS = PreparedData(
    name="reviews",
    digest="d",
    num_samples=8,
    num_held_out=2,
    kind="tokens",
    vocab_size=40,
    seq_len=8,
    num_labels=3,
    labels=("bad", "good", "so so"),
    pad_token_id=0,
    source="reviews.csv",
)


@pytest.fixture
def pretrained(tmp_path):
    """A folder with a BERT for masked words, and its tokenizer."""
    folder = tmp_path / "pretrained"
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_pretrained_weights_get_a_fresh_head_for_the_datas_classes(pretrained):
    spec = ModelSpec(from_pretrained=str(pretrained), architecture="BertForSequenceClassification")
    first, second = (build_model(spec, data=REVIEWS, seed=seed) for seed in (0, 1))
    body = transformers.BertForMaskedLM.from_pretrained(pretrained).bert.encoder.state_dict()
    assert all(torch.equal(tensor, first.bert.encoder.state_dict()[name]) for name, tensor in body.items())
    assert first.config.id2label == {0: "bad", 1: "good", 2: "so so"}
    assert first.classifier.out_features == 3
    assert not torch.equal(first.classifier.weight, second.classifier.weight)  # drawn from the seed
    assert spec.is_drawn


def test_a_fresh_model_has_the_datas_classes():
    model = build_model(ModelSpec(architecture="BertForSequenceClassification", config=SIZES), data=REVIEWS, seed=0)
    assert model.config.label2id == {"bad": 0, "good": 1, "so so": 2}
    assert model.config.num_labels == 3
    assert model.config.pad_token_id == 0


def test_a_classifier_of_decoders_knows_the_padding():
    sizes = {**SIZES, "num_key_value_heads": 2}
    data = replace(REVIEWS, pad_token_id=7)
    model = build_model(ModelSpec(architecture="LlamaForSequenceClassification", config=sizes), data=data, seed=0)
    assert model.config.pad_token_id == 7
    causal = build_model(ModelSpec(architecture="LlamaForCausalLM", config=sizes), data=data, seed=0)
    assert causal.config.pad_token_id is None  # the embedding of a padding token would not be trained


@pytest.mark.parametrize(
    ("shape", "problem"), [((3,), "multi_label_classification"), ((), "regression")], ids=["several", "number"]
)
def test_a_classifier_says_what_its_logits_are(shape, problem):
    labels = SampleTensor(name="labels", dtype="float32", shape=shape)
    data = replace(REVIEWS, tensors=(labels,))
    model = build_model(ModelSpec(architecture="BertForSequenceClassification", config=SIZES), data=data, seed=0)
    assert model.config.problem_type == problem


@pytest.fixture
def classifier(tmp_path):
    """A function that saves a classifier of the given classes, and returns its folder."""

    def save(*names):
        config = transformers.BertConfig(**SIZES, id2label=dict(enumerate(names)))
        folder = tmp_path / "-".join(names)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("as_base", [False, True], ids=["from_pretrained", "base"])
def test_a_model_of_other_classes_is_refused(classifier, as_base):
    folder = classifier("good", "bad", "so so")
    spec = ModelSpec(architecture="BertForSequenceClassification", config=SIZES)
    weights_from = folder if as_base else None
    with pytest.raises(ValueError, match=r"has the classes good, bad, so so, and reviews has bad, good, so so. To fix"):
        build_model(
            spec if as_base else ModelSpec(from_pretrained=str(folder)),
            data=REVIEWS,
            seed=0,
            weights_from=weights_from,
        )


def test_a_model_of_the_same_classes_is_trained_further(classifier):
    folder = classifier(*REVIEWS.labels)
    spec = ModelSpec(from_pretrained=str(folder))
    model = build_model(spec, data=REVIEWS, seed=0)
    saved = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert torch.equal(model.classifier.weight, saved.classifier.weight)
    assert not spec.is_drawn


def test_an_export_has_the_tokenizer_of_its_base(pretrained, tmp_path):
    spec = ModelSpec(from_pretrained=str(pretrained), architecture="BertForSequenceClassification")
    model = build_model(spec, data=REVIEWS, seed=0)
    state = model.state_dict()
    export_model(tmp_path / "m", spec=spec, model=model, state=state, prepared=REVIEWS, base=str(pretrained))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert loaded("word")["input_ids"] == [1]
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "m"))
    assert classify("word")[0]["label"] in REVIEWS.labels
