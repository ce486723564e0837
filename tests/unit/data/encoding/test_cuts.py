"""Text that is encoded in parts has the ids of the whole, whatever characters it has."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ringmaster.techniques.data import text_encoder as documents_module
from ringmaster.techniques.data import text_encoder as words_module
from ringmaster.techniques.data.row_files import FileText
from ringmaster.techniques.data.text_encoder import GPT2, KNOWN_EXPRESSIONS, SPACES, WordEncoder, in_pieces, rule_of
from tests.drawing import draws

ByteLevel = pre_tokenizers.ByteLevel
GPT2_SPLIT = ByteLevel(add_prefix_space=False)
KNOWN_SPLITS = [
    pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for expression in sorted(KNOWN_EXPRESSIONS)
]
CASES = [(GPT2, GPT2_SPLIT), *((SPACES, split) for split in KNOWN_SPLITS)]
# Kinds of white space, what is none in some versions of Unicode, signs next to letters, marks, numbers, contractions.
NASTY = [
    *" \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\xad\u1680\u180e\u2003\u200b\u2028\u202f\u3000\ufeff\x00\x7f",
    *(
        "\r\n",
        "  ",
        "\n\n",
        " \n ",
        "   a",
        "\t x",
        "'s",
        "'ll",
        "'",
        "'S",
        "\u017f",
        "\u212a",
        "ab",
        "Z",
        "é",
        "e\u0301",
    ),
    *(
        "\u0301",
        "日",
        "。",
        "ไทย",
        "7",
        "12345",
        "²",
        "½",
        "٣",
        "!",
        "(",
        "--",
        "_",
        "/",
        "🙂",
        "👩\u200d👩",
        "<|endoftext|>",
    ),
]
TEXTS = st.one_of(
    st.lists(st.sampled_from(NASTY), max_size=40).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(st.characters(max_codepoint=127), max_size=60),
)


def words_of(split, text):
    return [word for word, _ in split.pre_tokenize_str(text)] if text else []


@pytest.mark.parametrize(("rule", "split"), CASES)
@draws(500)
@given(text=TEXTS)
def test_the_words_of_a_rule_are_split_as_the_whole(rule, split, text):
    found = rule.words.findall(text)
    assert "".join(found) == text
    assert [word for each in found for word in words_of(split, each)] == words_of(split, text)


@pytest.mark.parametrize(("rule", "split"), CASES)
@draws(500)
@given(text=TEXTS)
def test_both_sides_of_every_cut_are_split_as_the_whole(rule, split, text):
    rest, cuts = text, []
    while cut := rule.last_cut(rest):
        cuts.append(cut)
        rest = text[:cut]
    for cut in cuts:
        assert words_of(split, text[:cut]) + words_of(split, text[cut:]) == words_of(split, text)


@pytest.mark.parametrize(("rule", "split"), CASES)
@draws(500)
@given(before=TEXTS, end=st.sampled_from(["\n", "a\n", "\n\n", " \n"]), after=TEXTS)
def test_both_sides_of_a_line_end_are_split_as_the_whole(rule, split, before, end, after):
    text = before + end + after
    for place in range(len(text) + 1):
        if rule.ends_line(text, place):
            assert words_of(split, text[:place]) + words_of(split, text[place:]) == words_of(split, text)


@pytest.mark.parametrize(("rule", "ends"), [(GPT2, {2, 12}), (SPACES, {2, 5, 10, 12})])
def test_lines_end_before_visible_characters(rule, ends):
    text = "a\nb\n\n!\n \n\nc\nd\n"
    assert {place for place in range(len(text) + 1) if rule.ends_line(text, place)} == ends


class Stream(FileText):
    """A file's text that is read some characters at a time. path: the text, for this test."""

    step = 1

    def pieces(self):
        for start in range(0, len(self.path), self.step):
            yield self.path[start : start + self.step]


@draws(100)
@given(text=TEXTS, size=st.integers(1, 9), step=st.integers(1, 7))
def test_pieces_are_the_text_and_are_cut_by_the_rule(text, size, step):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PIECE_CHARACTERS", size)
        patch.setattr(Stream, "step", step)
        for given_text in (text, Stream(text)):
            pieces = list(in_pieces(given_text, rule=GPT2))
            assert list(in_pieces(given_text, rule=None)) == [(text, True)]
            assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
            assert "".join(piece for piece, _ in pieces) == text
            assert [word for piece, _ in pieces for word in words_of(GPT2_SPLIT, piece)] == words_of(GPT2_SPLIT, text)


def test_long_text_is_cut_and_its_ids_are_those_of_the_whole(monkeypatch):
    draw = random.Random(0)
    text = "".join(draw.choices([*NASTY, *[" a", " word", ".\n"] * 20], k=60_000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = GPT2_SPLIT, decoders.ByteLevel()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    monkeypatch.setattr(documents_module, "PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(words_module, "MAX_WORDS", 300)  # so that words are also forgotten
    encoder = WordEncoder(rule=GPT2, encode=lambda words: [each.ids for each in tokenizer.encode_batch(words)])
    pieces = [piece for piece, _ in in_pieces(text, rule=GPT2)]
    assert len(pieces) > 100
    assert max(map(len, pieces)) < 2100
    assert [token for piece in pieces for token in encoder([piece])[0].tolist()] == tokenizer.encode(text).ids


def test_text_that_is_too_long_to_be_encoded_whole_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_CHARACTERS_AT_ONCE", 200_000)
    text = "many words " * 54_000
    with pytest.raises(ValueError, match=r"more than 200,000 characters.*To fix: .*JSONL row"):
        list(in_pieces(text, rule=None))
    assert len(list(in_pieces(text, rule=SPACES))) > 6


def content_of(split, *, normalizer=None, added=(), dropout=None):
    tokenizer = Tokenizer(models.BPE(dropout=dropout))
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(list(added))
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize(
    ("tokenizer", "rule"),
    [
        (content_of(GPT2_SPLIT), GPT2),
        (content_of(GPT2_SPLIT, normalizer=normalizers.NFC()), GPT2),
        *((content_of(split), SPACES) for split in KNOWN_SPLITS),
        (content_of(ByteLevel(add_prefix_space=True)), None),
        (content_of(ByteLevel(add_prefix_space=False, use_regex=False)), None),
        (content_of(pre_tokenizers.Metaspace()), None),
        (content_of(pre_tokenizers.Sequence([pre_tokenizers.Digits(), GPT2_SPLIT])), None),
        (content_of(GPT2_SPLIT, normalizer=normalizers.Lowercase()), None),
        (content_of(GPT2_SPLIT, added=["a b"]), None),
        (content_of(GPT2_SPLIT, dropout=0.1), None),
    ],
)
def test_only_tokenizers_whose_cuts_are_known_are_cut(tokenizer, rule):
    assert rule_of(tokenizer) is rule
