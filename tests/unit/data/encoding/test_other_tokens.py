"""Whether two tokenizers give tokens other numbers."""

import json

import pytest
from transformers import AutoTokenizer

from ringmaster.techniques.data.tokenizer_folders import have_other_tokens
from tests.matrix import matrix
from tests.unit.data.encoding.tokenizers_of_sorts import SORTS, saved


# That of characters has a million of them.
@pytest.mark.parametrize("sort", matrix(SORTS, quick=[sort for sort in SORTS if sort != "characters"]))
def test_a_tokenizer_that_is_saved_again_has_the_same_tokens(tmp_path, sort):
    folder = saved(sort, tmp_path / "one")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "other")
    assert not have_other_tokens(tmp_path / "one", tmp_path / "other")
    assert not have_other_tokens(tmp_path / "one", None)
    assert not have_other_tokens(tmp_path / "one", tmp_path)


def test_added_tokens_in_another_order_are_other_tokens(tmp_path):
    for name, added in (("one", ["<a>", "<b>"]), ("other", ["<b>", "<a>"]), ("more", ["<a>", "<b>", "<c>"])):
        tokenizer = AutoTokenizer.from_pretrained(saved("byte-level", tmp_path / name))
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(tmp_path / name)
    assert have_other_tokens(tmp_path / "one", tmp_path / "other")
    assert not have_other_tokens(tmp_path / "one", tmp_path / "more")
    assert not have_other_tokens(tmp_path / "more", tmp_path / "one")


def test_tokens_of_a_unigram_in_another_order_are_other_tokens(tmp_path):
    for name in ("one", "other"):
        saved("unigram", tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    pieces = content["model"]["vocab"]
    pieces[4], pieces[5] = pieces[5], pieces[4]
    file.write_text(json.dumps(content))
    assert have_other_tokens(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(normalizer={"type": "Lowercase"}),
        lambda content: content["model"]["merges"].reverse(),
    ],
    ids=["normalizer", "merges"],
)
def test_the_same_words_by_other_rules_are_other_tokens(tmp_path, change):
    for name in ("one", "other"):
        saved("byte-level", tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    assert have_other_tokens(tmp_path / "one", tmp_path / "other")


def test_rules_that_are_written_in_another_way_are_the_same(tmp_path):
    for name in ("one", "other"):
        saved("byte-level", tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["model"]["ignore_merges"]
    file.write_text(json.dumps(content))
    assert not have_other_tokens(tmp_path / "one", tmp_path / "other")


def test_words_of_a_tokenizer_in_python_in_another_order_are_other_tokens(tmp_path):
    for name in ("one", "other"):
        saved("esm", tmp_path / name)
    file = tmp_path / "other" / "vocab.txt"
    words = file.read_text().split("\n")
    words[5], words[6] = words[6], words[5]
    file.write_text("\n".join(words))
    assert have_other_tokens(tmp_path / "one", tmp_path / "other")
