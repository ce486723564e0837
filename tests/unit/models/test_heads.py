"""Fresh heads on pretrained models, the names of classes, and the tokenizers that exports contain."""

from dataclasses import replace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.data_source import SampleTensor
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.models.architectures import note_on_classes, pretrained_config
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


def labelled(problem):
    """The data of `problem`, in which a label is a number of a class, an indicator for each, or a number."""
    dtype, shape = {"single": ("int64", ()), "multi": ("float32", (3,)), "number": ("float32", ())}[problem]
    labels = SampleTensor(name="labels", dtype=dtype, shape=shape)
    return replace(REVIEWS, labels=() if problem == "number" else REVIEWS.labels, tensors=(labels,))


TYPES = {"single": "single_label_classification", "multi": "multi_label_classification", "number": "regression"}


@pytest.mark.parametrize("saved", TYPES)
@pytest.mark.parametrize("problem", TYPES)
@pytest.mark.parametrize("config", [{}, {"num_labels": 3}])
def test_a_model_that_is_trained_further_says_what_its_logits_have_become(tmp_path, problem, saved, config):
    of_base = transformers.BertConfig(**SIZES, num_labels=3, problem_type=TYPES[saved])
    transformers.BertForSequenceClassification(of_base).save_pretrained(tmp_path / "base")
    spec, data = ModelSpec(from_pretrained=str(tmp_path / "base"), config=config), labelled(problem)
    model = build_model(spec, data=data, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    assert exported.problem_type == TYPES[problem]
    if problem != "number":
        assert exported.id2label == dict(enumerate(REVIEWS.labels))
        assert exported.label2id == {name: number for number, name in enumerate(REVIEWS.labels)}
        assert exported.num_labels == 3


def test_another_problem_than_that_of_the_labels_is_refused():
    spec = ModelSpec(architecture="BertForSequenceClassification", config={**SIZES, "problem_type": TYPES["single"]})
    with pytest.raises(ValueError, match=r"config.problem_type is single_.* make it multi_.* To fix: leave it out"):
        build_model(spec, data=labelled("multi"), seed=0)


def test_a_number_is_predicted_by_one_output(classifier):
    folder, data = str(classifier("LABEL_0", "LABEL_1")), replace(labelled("number"), num_labels=1, labels=())
    with pytest.raises(
        ValueError, match=r"has 2 outputs, and a row of .* has 1 number.* set model.config.num_labels to 1"
    ):
        build_model(ModelSpec(from_pretrained=folder), data=data, seed=0)
    fresh = ModelSpec(from_pretrained=folder, config={"num_labels": 1})
    assert build_model(fresh, data=data, seed=0).classifier.out_features == 1


def test_a_class_that_the_data_does_not_have_keeps_its_number(classifier):
    folder = classifier("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")
    model = build_model(ModelSpec(from_pretrained=str(folder)), data=REVIEWS, seed=0)
    assert model.config.id2label == {0: "bad", 1: "good", 2: "so so", 3: "LABEL_3"}
    assert model.classifier.out_features == 4


def test_classes_without_names_that_get_those_of_the_data_are_told(classifier, tmp_path):
    unnamed, named = classifier("LABEL_0", "LABEL_1", "LABEL_2"), classifier(*REVIEWS.labels)
    body = tmp_path / "body"
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(body)
    note = f"the classes of {unnamed} have no names, and are taken for bad, good, so so, in this order"
    assert note_on_classes(ModelSpec(from_pretrained=str(unnamed)), REVIEWS, None) == note
    fresh = ModelSpec(architecture="BertForSequenceClassification", from_pretrained=str(unnamed))
    for spec, base in (
        (ModelSpec(from_pretrained=str(named)), None),
        (ModelSpec(from_pretrained=str(body)), None),
        (fresh, None),
        (fresh, named),
    ):
        assert note_on_classes(spec, REVIEWS, base) is None
    assert note_on_classes(fresh, REVIEWS, unnamed) == note


PADDED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}


def test_a_pretrained_classifier_of_decoders_gets_the_padding_of_its_tokenizer(tmp_path):
    transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**PADDED)).save_pretrained(tmp_path / "base")
    data, spec = (
        replace(REVIEWS, pad_token_id=7, labels=(), num_labels=2),
        ModelSpec(from_pretrained=str(tmp_path / "base")),
    )
    model = build_model(spec, data=data, seed=0).eval()
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m").eval()
    row = torch.tensor([[3, 4, 0]])
    padded, mask = torch.tensor([[3, 4, 0, 7, 7]]), torch.tensor([[1, 1, 1, 0, 0]])
    for each in (model, exported):
        assert each.config.pad_token_id == 7
        assert torch.allclose(each(row).logits, each(padded, attention_mask=mask).logits, atol=1e-6)


def test_padding_inside_a_nested_config_and_padding_by_which_positions_are_counted(tmp_path):
    text = {**SIZES, "head_dim": 8, "num_key_value_heads": 1, "pad_token_id": 0}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    nested = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 16, "patch_size": 8})
    nested.architectures = ["Gemma3ForSequenceClassification"]
    nested.save_pretrained(tmp_path / "nested")
    offset = transformers.RobertaConfig(**SIZES, pad_token_id=1, architectures=["RobertaForSequenceClassification"])
    offset.save_pretrained(tmp_path / "offset")
    data = replace(REVIEWS, pad_token_id=7, labels=(), num_labels=2)
    config = pretrained_config(ModelSpec(from_pretrained=str(tmp_path / "nested")), data)
    assert (config.pad_token_id, config.text_config.pad_token_id) == (7, 7)
    assert pretrained_config(ModelSpec(from_pretrained=str(tmp_path / "offset")), data).pad_token_id == 1


def test_an_encoder_decoder_writes_the_padding_of_its_tokenizer(tmp_path):
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    config = transformers.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    data = replace(REVIEWS, pad_token_id=7, labels=(), num_labels=None)
    spec = ModelSpec(from_pretrained=str(tmp_path / "base"))
    model = build_model(spec, data=data, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    exported = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "m")
    assert (exported.config.pad_token_id, exported.generation_config.pad_token_id) == (7, 7)
    assert exported.generation_config.decoder_start_token_id == 0
