"""The tokens of rendered conversations, and their marks, are those of the tokenizer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers
from transformers import PreTrainedTokenizerFast

from ringmaster.techniques.data.row_tokenizer import RenderedEncoder
from ringmaster.techniques.data.text_encoder import TextEncoder
from tests.drawing import draws
from tests.unit.data.encoding.test_cuts import CASES, TEXTS

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im_end|>x"]
SPLITS = [split for _, split in CASES]


def tokenizer_of(split, **added):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=sorted(SPLITS[0].alphabet()), special_tokens=SPECIAL, show_progress=False
    )
    inner.train_from_iterator(["assistant\nuser\n\nthe text, the  text's\n"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", **added)
    return tokenizer, RenderedEncoder(tokenizer, TextEncoder(tokenizer))


ENCODERS = [tokenizer_of(split) for split in SPLITS]


def reference(tokenizer, text, spans):
    """The ids and marks by the offsets of the tokenizer, character by character."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = {place for span in spans for place in span}
    marks = [not inside.isdisjoint(range(start, end)) for start, end in encoded["offset_mapping"]]
    return encoded["input_ids"], marks


def chatml(turns, answers):
    """A conversation of answers, each after a question, and the spans of the answers."""
    text, spans = "", []
    for turn, answer in zip(turns, answers, strict=False):
        text += f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        first = len(text)
        text += f"{answer}<|im_end|>\n"
        spans.append(range(first, len(text)))
    return text, spans


@pytest.mark.parametrize(("tokenizer", "encoder"), ENCODERS)
@draws(200)
@given(turns=st.lists(TEXTS, max_size=3), answers=st.lists(TEXTS, max_size=3))
def test_conversations_have_the_tokens_and_marks_of_the_tokenizer(tokenizer, encoder, turns, answers):
    text, spans = chatml(turns, answers)
    ids, marks = encoder(text, spans)
    assert (ids.tolist(), marks.tolist()) == reference(tokenizer, text, spans)


@pytest.mark.parametrize(("tokenizer", "encoder"), ENCODERS)
@draws(200)
@given(text=TEXTS, places=st.lists(st.integers(0, 40), max_size=4, unique=True))
def test_spans_may_begin_and_end_anywhere(tokenizer, encoder, text, places):
    edges = sorted(min(place, len(text)) for place in places)
    spans = [range(first, end) for first, end in zip(edges[::2], edges[1::2], strict=False)]
    ids, marks = encoder(text, spans)
    assert (ids.tolist(), marks.tolist()) == reference(tokenizer, text, spans)


@pytest.mark.parametrize(("tokenizer", "encoder"), ENCODERS)
def test_usual_conversations_are_not_encoded_by_the_tokenizer(tokenizer, encoder, monkeypatch):
    text, spans = chatml(["What?", "日本"], ["It is.\n\n  So", "日本 (é)"])
    wanted = reference(tokenizer, text, spans)
    monkeypatch.setattr(encoder, "_by_tokenizer", None)
    ids, marks = encoder(text, spans)
    assert (ids.tolist(), marks.tolist()) == wanted


def test_special_tokens_that_take_spaces_are_left_to_the_tokenizer():
    from tokenizers import AddedToken

    tokenizer, _ = tokenizer_of(SPLITS[0])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|mask|>", lstrip=True, special=True)]})
    encoder = RenderedEncoder(tokenizer, TextEncoder(tokenizer))
    text = "a  <|mask|> b"
    assert encoder(text, [])[0].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert np.array_equal(encoder(text, [range(1)])[0], encoder(text, [])[0])
