"""The ids of texts are those of the tokenizer, by whichever way they are found."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ringmaster.techniques.data.text_encoder import TextEncoder

TEXTS = ["a text, isn't it?", "", "  [CLS] and <|endoftext|>\n\nnaïve 日本", "one " * 50]


def trained(splitting):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splitting, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "[CLS]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="[CLS]")


class Lowering(PreTrainedTokenizerFast):
    """Does more than its backend."""

    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus([each.lower() for each in text], *args, **kwargs)


def expected(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def found(encoder, texts):
    return [ids.tolist() for ids in encoder(texts)]


@pytest.mark.parametrize("whole_words", [True, False])
def test_the_ids_are_the_tokenizers(whole_words):
    # A prefix of texts is not a rule for words, so the second is encoded whole.
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=not whole_words))
    encoder = TextEncoder(tokenizer)
    assert (encoder.words is not None) is whole_words
    assert found(encoder, TEXTS) == expected(tokenizer, TEXTS)


def test_other_calls_of_the_tokenizer_in_between_change_nothing():
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=True))
    encoder = TextEncoder(tokenizer)
    first = found(encoder, TEXTS)
    tokenizer(TEXTS, padding="max_length", truncation=True, max_length=4)
    assert found(encoder, TEXTS) == first


def test_a_tokenizer_that_does_more_than_its_backend_is_called_itself():
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False)).backend_tokenizer
    tokenizer = Lowering(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="[CLS]")
    encoder = TextEncoder(tokenizer)
    assert encoder.words is None
    assert found(encoder, ["A Text", "TWO"]) == expected(tokenizer, ["a text", "two"])
