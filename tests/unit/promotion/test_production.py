"""The file of production models: what it says, and every fault in it at once."""

from pathlib import Path

import pytest

from tasks.batch import BatchFileError
from tasks.promotion.production import load_production, with_tokenizer_of

GOOD = """\
name: shop
devices: {cpu: 1}
models:
  - name: digits
    job: &job
      model: {architecture: ViTForImageClassification, config: {image_size: 8}}
      num_steps: 5
      evaluation: {metrics: [accuracy, loss]}
    data: {source: digits}
    min_gain: 0.01
  - name: words
    job:
      model: {architecture: LlamaForCausalLM}
      num_steps: 5
    data: {path: "words.jsonl", seq_len: 8}
    compare_on: {path: "*.txt", seq_len: 8}
    warm_start: false
"""

BAD = """\
name: shop
device: {cpu: 1}
models:
  - name: digits
    job:
      model: {architecture: ViTForImageClassification}
      base: models:/shop.digits@champion
      num_step: 5
    data: {source: digit}
    min_gain: -1
  - name: digits
    job:
      model: {architecture: LlamaForCausalLM}
      num_steps: 0
    data: {path: "none.jsonl", seq_len: 8}
    compare_on: {path: "nothing.jsonl"}
  - name: words
    job: [1]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "words.jsonl").write_text('{"text": "a b"}\n')
    (tmp_path / "trusted.txt").write_text("a b")
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "retraining.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_its_models_in_order(folder):
    production = load_production(written(folder, GOOD))
    digits, words = production.models
    assert (production.name, production.devices, production.folder) == ("shop", {"cpu": 1}, folder)
    assert [model.registered_name for model in production.models] == ["shop.digits", "shop.words"]
    assert (digits.metric, digits.min_gain, digits.warm_start, digits.compare_on) == ("accuracy", 0.01, True, None)
    assert digits.job.base is None
    assert (words.metric, words.warm_start) == ("loss", False)
    assert words.job.data.path == str(folder / "words.jsonl")
    assert words.compare_on is not None
    assert words.compare_on.data.path == str(folder / "*.txt")
    assert words.compare_on.model == words.job.model
    assert [job.name for job in production.jobs] == ["digits", "words", "words.compare_on"]


def test_all_faults_are_told_at_once_with_place_and_line(folder):
    with pytest.raises(BatchFileError) as raised:
        load_production(written(folder, BAD))
    found = {(fault.line, fault.place) for fault in raised.value.faults}
    assert found == {
        (2, "device"),
        (7, "models[0].job.base"),
        (8, "models[0].job.num_step"),
        (9, "models[0].data.source"),
        (10, "models[0].min_gain"),
        (11, "models[1].name"),
        (14, "models[1].job.num_steps"),
        (15, "models[1].data.path"),
        (16, "models[1].compare_on.path"),
        (17, "models[2].data"),
        (18, "models[2].job"),
    }
    assert all(fault.message and fault.remedy for fault in raised.value.faults)
    lines = [fault.line for fault in raised.value.faults]
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("name: shop\nmodels: []\n", "models: "),
        ("name: shop\n", "models: is missing"),
        ("models:\n  - digits\n", "models[0]: "),
        ("name: shop\nmodels: [\n", "is not YAML"),
    ],
)
def test_a_file_that_says_nothing_is_told(folder, text, told):
    with pytest.raises(BatchFileError) as raised:
        load_production(written(folder, text))
    assert any(told in str(fault) for fault in raised.value.faults)


def test_a_file_that_is_not_there_is_told(folder):
    with pytest.raises(BatchFileError, match="cannot be read"):
        load_production(folder / "missing.yaml")


def test_text_is_read_with_the_tokenizer_of_the_champion(folder):
    _, words = load_production(written(folder, GOOD)).models
    champion = folder / "champion"
    champion.mkdir()
    assert with_tokenizer_of(champion, words) == words
    assert with_tokenizer_of(None, words) == words
    (champion / "tokenizer.json").write_text("{}")
    found = with_tokenizer_of(champion, words)
    assert found.job.data.tokenizer == str(champion)
    assert found.compare_on is not None
    assert found.compare_on.data.tokenizer == str(champion)
    assert with_tokenizer_of(folder, found) == found
