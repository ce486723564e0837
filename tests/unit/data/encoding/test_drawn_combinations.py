"""Drawn tokenizers, chat templates and kinds of data: tokens and labels are those of the library's own call."""

import json
import re
from itertools import chain, cycle
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED
from tests.unit.data.encoding.drawn_tokenizers import (
    CHAT,
    CLASSES,
    COMPLETION,
    EMBEDDING,
    FOREIGN,
    NUMBERS,
    PAIRS,
    PREFERENCE,
    TARGETS,
    TEXT,
    TOKENIZERS,
    WORD_CLASSES,
    WORDS,
)

pytestmark = pytest.mark.full

NUM_ROWS, CASES_OF_A_KIND = 12, 5
SEQ_LEN, LONG = 16, 4096  # of the windows of a stream; of samples that are not cut
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)
# Those of TRL's by the names of their files; with whether messages of the system, and tools, are rendered.
TEMPLATES = {
    "chatml": (CHATML, True, False),
    "chatml-marked": (MARKED_CHATML, True, False),
    "mistral": (MISTRAL, False, False),
    "zephyr": (ZEPHYR, True, False),
    "llama3": (None, True, False),
    "llama3_training": (None, True, False),
    "gemma": (None, False, False),
    "gemma_training": (None, False, False),
    "gemma3": (None, True, False),
    "phi3_training": (None, True, False),
    "qwen2_5": (None, True, True),
    "qwen2_5_training": (None, True, True),
    "qwen3_training": (None, True, True),
}
MARKERS = re.compile(r"<\|[^|'\"]+\|>|<(?:start|end)_of_turn>|\[/?INST\]")
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts words.",
        "parameters": {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]},
    },
}


def template_of(name):
    trl = pytest.importorskip("trl", reason="whose templates these are")
    return TEMPLATES[name][0] or (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def drawn_cases():
    """Draws tokenizers for each kind of data, and a template for kinds of messages."""
    draw = Random(20261128)
    templates = cycle(draw.sample(list(TEMPLATES), len(TEMPLATES)))
    cases = []
    for kind in (CLASSES, PAIRS, WORD_CLASSES, TARGETS, EMBEDDING, TEXT, COMPLETION, CHAT, PREFERENCE):
        suited = [name for name, each in TOKENIZERS.items() if kind in each.kinds]
        for place, tokenizer in enumerate(draw.sample(suited, min(CASES_OF_A_KIND, len(suited)))):
            has_messages = kind == CHAT or (kind in (COMPLETION, PREFERENCE) and place % 2 == 1)
            cases.append((kind, tokenizer, next(templates) if has_messages else None))
    return cases


def prepared_rows(folder, tokenizer, kind, rows, **settings):
    """Returns the training samples that the project makes of rows, in their order."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = DataSpec(kind=kind, path=str(path), tokenizer=str(tokenizer), held_out=0, **settings)
    found = prepare(spec, cache_dir=folder / "cache")
    training, _ = open_data(spec, cache_dir=folder / "cache", prepared=found)
    return [training[i] for i in range(len(training))]


def assert_tokens(found, expected, *, mask=None):
    assert found[: len(expected)].tolist() == list(expected)
    if mask is not None:
        assert mask.tolist() == [1] * len(expected) + [0] * (len(found) - len(expected))


def assert_labels(found, expected):
    assert found.tolist() == [*expected, *[IGNORED] * (len(found) - len(expected))]


def spaced(draw, text):
    """A text that may begin or end with spaces."""
    return draw.choice(["", "", "", " ", "  ", "\n"]) + text + draw.choice(["", "", "", " ", "\n"])


class Comparison:
    """One case: what `prepare` makes of drawn rows compared with the library's own calls, reimplemented here."""

    def __init__(self, folder, kind, name, template):
        self.draw = Random(f"{kind}-{name}-{template}")
        self.folder, self.drawn = folder, TOKENIZERS[name]
        made = self.drawn.make()
        if template is not None:
            made.chat_template = template_of(template)
            _, self.has_system, self.has_tools = TEMPLATES[template]
            if self.draw.random() < 0.5:  # otherwise its markers are plain text
                markers = dict.fromkeys(MARKERS.findall(made.chat_template))
                made.add_special_tokens({"additional_special_tokens": list(markers)})
        made.save_pretrained(folder / "tokenizer")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def text(self):
        return self.drawn.text(self.draw)

    def samples(self, kind, rows, *, seq_len=LONG):
        return prepared_rows(self.folder, self.folder / "tokenizer", kind, rows, seq_len=seq_len)

    def texts_and_classes(self, *, has_pair):
        names = ["negative", "positive", "unsure"]
        rows = [
            {"text": spaced(self.draw, self.text()), "label": names[i % 3]}
            | ({"text_pair": self.text()} if has_pair else {})
            for i in range(NUM_ROWS)
        ]
        for sample, row in zip(self.samples(CLASSES, rows), rows, strict=True):
            expected = self.tokenizer(row["text"], row.get("text_pair"))
            assert_tokens(sample["input_ids"], expected["input_ids"], mask=sample["attention_mask"])
            assert int(sample["labels"]) == names.index(row["label"])
            if has_pair and "token_type_ids" in expected:
                assert_tokens(sample["token_type_ids"], expected["token_type_ids"])

    def words_and_classes(self):
        rows = []
        for _ in range(NUM_ROWS):
            words = self.draw.choices(WORDS * 3 + FOREIGN + NUMBERS, k=self.draw.randint(2, 12))
            rows.append({"tokens": words, "tags": self.draw.choices(["A", "B", "O"], k=len(words))})
        for sample, row in zip(self.samples(WORD_CLASSES, rows), rows, strict=True):
            expected = self.tokenizer(row["tokens"], is_split_into_words=True)
            labels, before = [], None
            for word in expected.word_ids():
                labels.append(IGNORED if word is None or word == before else "ABO".index(row["tags"][word]))
                before = word
            assert_tokens(sample["input_ids"], expected["input_ids"], mask=sample["attention_mask"])
            assert_labels(sample["labels"], labels)

    def inputs_and_targets(self):
        rows = [{"source": self.text(), "target": self.text()} for _ in range(NUM_ROWS)]
        for sample, row in zip(self.samples(TARGETS, rows), rows, strict=True):
            expected = self.tokenizer(row["source"], text_target=row["target"])
            assert_tokens(sample["input_ids"], expected["input_ids"], mask=sample["attention_mask"])
            assert_labels(sample["labels"], expected["labels"])

    def anchors_and_positives(self):
        rows = [{"anchor": self.text(), "positive": self.text()} for _ in range(NUM_ROWS)]
        for sample, row in zip(self.samples(EMBEDDING, rows), rows, strict=True):
            for place, name in enumerate(("anchor", "positive")):
                expected = self.tokenizer(row[name])["input_ids"]
                assert_tokens(sample["input_ids"][place], expected, mask=sample["attention_mask"][place])

    def stream(self):
        rows = [{"text": spaced(self.draw, self.text())} for _ in range(NUM_ROWS)]
        texts = (self.tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows)
        expected = [*chain.from_iterable([*ids, self.tokenizer.eos_token_id] for ids in texts)]
        samples = self.samples(TEXT, rows, seq_len=SEQ_LEN)
        assert len(samples) == len(expected) // SEQ_LEN
        assert torch.cat([each["input_ids"] for each in samples]).tolist() == expected[: len(samples) * SEQ_LEN]

    def answer_to(self, prompt, answer, *, tools=None):
        """The tokens of a prompt and an answer, and how many of them are the prompt's, as in TRL's trainers."""
        if isinstance(prompt, str):
            alone, whole = (self.tokenizer(text)["input_ids"] for text in (prompt, prompt + answer))
            whole = [*whole, self.tokenizer.eos_token_id]
        else:
            alone = self.rendered(prompt, tools=tools, add_generation_prompt=True)["input_ids"]
            whole = self.rendered([*prompt, *answer], tools=tools)["input_ids"]
        return whole, num_common(alone, whole)

    def rendered(self, messages, **settings):
        return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **settings)

    def messages(self, *, num_turns):
        """Questions and answers in turn; the last message is an answer's question."""
        roles = ["user", "assistant"] * num_turns
        result = [{"role": role, "content": self.text()} for role in roles[:-1]]
        if self.has_system and self.draw.random() < 0.5:
            result.insert(0, {"role": "system", "content": self.text()})
        return result

    def answer(self):
        return [{"role": "assistant", "content": self.text()}]

    def completions(self, *, has_messages):
        rows = [
            {"prompt": self.messages(num_turns=self.draw.randint(1, 2)), "completion": self.answer()}
            if has_messages
            else {"prompt": self.text(), "completion": f" {self.text()}"}
            for _ in range(NUM_ROWS)
        ]
        for sample, row in zip(self.samples(COMPLETION, rows), rows, strict=True):
            tokens, num_of_prompt = self.answer_to(row["prompt"], row["completion"])
            assert_tokens(sample["input_ids"], tokens)
            assert_labels(sample["labels"], [IGNORED] * num_of_prompt + tokens[num_of_prompt:])

    def preferences(self, *, has_messages):
        rows = []
        for _ in range(NUM_ROWS):
            prompt = self.messages(num_turns=1) if has_messages else self.text()
            answers = [self.answer() if has_messages else f" {self.text()}" for _ in range(2)]
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        for sample, row in zip(self.samples(PREFERENCE, rows), rows, strict=True):
            both = [self.answer_to(row["prompt"], row[name]) for name in ("chosen", "rejected")]
            num_of_prompt = min(number for _, number in both)  # what both answers have in common
            for place, (tokens, _) in enumerate(both):
                assert_tokens(sample["input_ids"][place], tokens)
                assert_labels(sample["labels"][place], [IGNORED] * num_of_prompt + tokens[num_of_prompt:])

    def conversations(self):
        rows = []
        for number in range(NUM_ROWS):
            row = {"messages": [*self.messages(num_turns=self.draw.randint(1, 3)), *self.answer()], "tools": None}
            if self.has_tools and number % 2:
                call = {"type": "function", "function": {"name": "count", "arguments": {"of": self.text()}}}
                row["messages"][-1:] = [
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "name": "count", "content": self.draw.choice(NUMBERS)},
                    *self.answer(),
                ]
                row["tools"] = [TOOL]
            rows.append(row)
        for sample, row in zip(self.samples(CHAT, rows), rows, strict=True):
            tokens, is_learnt = self.conversation(row["messages"], row["tools"])
            assert_tokens(sample["input_ids"], tokens)
            marks = zip(tokens, is_learnt, strict=True)
            assert_labels(sample["labels"], [token if mark else IGNORED for token, mark in marks])

    def conversation(self, messages, tools):
        """The tokens of a conversation, and which of them the assistant wrote.

        The library tells these where the template marks them. Otherwise they are between what is rendered with the
        generation prompt before a message, and what is rendered with the message.
        """
        if re.search(r"\{%-?\s*generation", self.tokenizer.chat_template):
            rendered = self.rendered(messages, tools=tools, return_assistant_tokens_mask=True)
            return rendered["input_ids"], rendered["assistant_masks"]
        whole = self.rendered(messages, tools=tools)["input_ids"]
        marks = [0] * len(whole)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.rendered(messages[:turn], tools=tools, add_generation_prompt=True)["input_ids"]
                upto = self.rendered(messages[: turn + 1], tools=tools)["input_ids"]
                first, end = num_common(before, whole), num_common(upto, whole)
                marks[first:end] = [1] * (end - first)
        return whole, marks


def num_common(one, other):
    """The number of tokens with which both begin."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


@pytest.mark.parametrize(
    ("kind", "tokenizer", "template"), [pytest.param(*case, id="-".join(filter(None, case))) for case in drawn_cases()]
)
def test_samples_are_those_of_the_librarys_own_call(tmp_path, kind, tokenizer, template):
    compared = Comparison(tmp_path, kind, tokenizer, template)
    has_messages = template is not None
    {
        CLASSES: lambda: compared.texts_and_classes(has_pair=False),
        PAIRS: lambda: compared.texts_and_classes(has_pair=True),
        WORD_CLASSES: compared.words_and_classes,
        TARGETS: compared.inputs_and_targets,
        EMBEDDING: compared.anchors_and_positives,
        TEXT: compared.stream,
        COMPLETION: lambda: compared.completions(has_messages=has_messages),
        CHAT: compared.conversations,
        PREFERENCE: lambda: compared.preferences(has_messages=has_messages),
    }[kind]()
