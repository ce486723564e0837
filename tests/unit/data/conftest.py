import json
import random

import pytest

WORDS = ["the", "model", "learns", "a", "token", "from", "each", "row", "of", "data", "and", "forgets", "none"]


@pytest.fixture
def text():
    """A function text(n) that returns n lines of made-up prose, the same in every run."""

    def write(num_lines: int, seed: int = 0) -> str:
        draw = random.Random(seed)
        return "".join(" ".join(draw.choices(WORDS, k=12)) + ".\n" for _ in range(num_lines))

    return write


@pytest.fixture
def jsonl(tmp_path, text):
    """A function jsonl(name, rows) that writes a file of rows. A whole number represents that many rows of prose."""

    def write(name, rows):
        if isinstance(rows, int):
            rows = [{"text": text(3, seed)} for seed in range(rows)]
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


def saved_tokenizer(folder, *, more_words=(), **settings):
    """Saves a small WordPiece tokenizer as BERT's, and returns its folder. more_words: added to its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "three", "##two", "what", "is", "it", "yes", "1", ";"]
    words += more_words
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=names, **special, **settings)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bert_tokenizer(tmp_path):
    return saved_tokenizer(tmp_path / "bert")


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' : ' + m.content + ' ; ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tmp_path):
    """A tokenizer with a chat template of its own."""
    return saved_tokenizer(tmp_path / "chat", chat_template=CHAT_TEMPLATE)


@pytest.fixture
def numbers_tokenizer(tmp_path):
    """The same, which knows numbers, too."""
    digits = [*"023456789", *(f"##{digit}" for digit in range(10)), "sentence", "another"]
    return saved_tokenizer(tmp_path / "numbers", more_words=digits, chat_template=CHAT_TEMPLATE)
