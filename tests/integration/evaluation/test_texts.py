"""Behavioural tests of a text classifier saved by `save_pretrained`, encoded by its tokenizer or a user's function."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.examination import ExaminationRequest, examine
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec

DEVICE = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())
GOOD, BAD, THINGS = ["fine", "lovely", "great"], ["awful", "broken", "cold"], ["food", "room", "staff", "view"]
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "was", *GOOD, *BAD, *THINGS]
JOB = Job(name="x", model=ModelSpec(), data=DataSpec(source="digits"), num_steps=1, evaluation=EvaluationSpec())
SUITE = """\
name: reviews
tests:
  - {name: praise, kind: minimum, template: "the {thing} was {word}", lexicons: {thing: [food, room], word: [fine, great]}, label: 1}
  - {name: each, kind: minimum, texts: [the food was awful, lovely view], labels: [0, 1]}
  - {name: thing, kind: invariance, texts: [the food was great, the food was cold], change: {replace: {food: staff}}}
  - {name: case, kind: invariance, texts: [the food was great, awful], change: {case: upper}}
  - {name: worse, kind: direction, texts: [the food was great], change: {append: " awful"}, direction: {label: 1, moves: down, by: 0.01}}
  - {name: steady, kind: invariance, texts: [the food was great], change: {append: " awful"}, tolerance: 0.001}
"""  # noqa: E501


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a BERT that has learnt which words are good (label 1), and a tokenizer without capital letters."""
    folder = tmp_path_factory.mktemp("classifier")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    texts = [f"the {thing} was {word}" for thing in THINGS for word in GOOD + BAD]
    texts += [f"{word} {thing}" for thing in THINGS for word in GOOD + BAD] + [*GOOD, *BAD]
    texts += [f"the {thing} was {good} {bad}" for thing in THINGS for good in GOOD for bad in BAD]
    labels = torch.tensor([int(not any(word in text.split() for word in BAD)) for text in texts])
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def results(classifier, suite, *, environment, folder):
    request = ExaminationRequest(
        job=JOB, held_out=False, suite=suite, environment=environment, device=DEVICE, folder=folder
    )
    found = examine(classifier, request)
    assert not found.faults
    return {test.test: test for test in found.tests}


def test_a_classifier_of_texts_is_asked_by_its_own_tokenizer(classifier, bench, tmp_path):
    (tmp_path / "tests.yaml").write_text(SUITE)
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=tmp_path / "cache")
    found = results(classifier, load_suite(tmp_path / "tests.yaml"), environment=environment, folder=tmp_path)
    assert {name: (test.num_cases, test.fault) for name, test in found.items()} == {
        "praise": (4, ""), "each": (2, ""), "thing": (2, ""), "case": (2, ""), "worse": (1, ""), "steady": (1, ""),
    }  # fmt: skip
    assert [name for name, test in found.items() if not test.passed] == ["case", "steady"]
    assert "'awful' and 'AWFUL'" in " ".join(found["case"].examples) or "GREAT" in " ".join(found["case"].examples)
    assert "a probability changed by" in found["steady"].examples[0]


def test_a_function_may_make_texts_into_tensors_instead(classifier, bench, tmp_path):
    """Encodes the same cases by a user's function, which lower-cases texts, as the tokenizer does not."""
    (tmp_path / "own_lower_case.py").write_text(
        "import transformers\n"
        f"tokenizer = transformers.AutoTokenizer.from_pretrained({str(classifier)!r})\n"
        "def read(texts):\n"
        "    batch = tokenizer([text.lower() for text in texts], padding=True, return_tensors='pt')\n"
        "    return {key: batch[key] for key in ('input_ids', 'attention_mask')}\n"
    )
    (tmp_path / "tests.yaml").write_text(f"encode: own_lower_case:read\n{SUITE}")
    environment = GangEnvironment(
        server=bench.server, devices=(DEVICE,), cache_dir=tmp_path / "cache", import_paths=(str(tmp_path.resolve()),)
    )
    found = results(classifier, load_suite(tmp_path / "tests.yaml"), environment=environment, folder=tmp_path)
    assert [name for name, test in found.items() if not test.passed] == ["steady"]


def test_tests_of_language_models_are_told_to_be_none_of_a_classifiers(classifier, bench, tmp_path):
    (tmp_path / "tests.yaml").write_text(
        "name: x\ntests: [{name: grammar, kind: minimum, texts: [the food], over: [food the]}]"
    )
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=tmp_path / "cache")
    found = results(classifier, load_suite(tmp_path / "tests.yaml"), environment=environment, folder=tmp_path)
    assert "causal language model" in found["grammar"].fault and not found["grammar"].passed
