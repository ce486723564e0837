"""Words with a class each, such as the names of persons and places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster.techniques.data.row_samples.class_labels import as_list
from ringmaster.techniques.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED


class TokenClassification(RowSource):
    """The tokens of a row's words, with a label for the first token of each word.

    A word whose label is -100, as transformers writes it, has none. The other tokens of a word, and special tokens, do
    not count. Each word but the first is encoded with a space before it.
    """

    name = "token-classification"
    version = 2
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tokens": ("tokens", "words"),
        "label": ("labels", "tags", "ner_tags", "pos_tags", "label"),
    }
    label_role = "label"
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the words as they are encoded."""
        return _spaced(as_list(row["tokens"]))

    def classes(self, value: Any) -> Iterable[Any]:
        """Returns the classes of the words that have one."""
        return [each for each in super().classes(value) if not _is_unlabelled(each)]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with special tokens, and the label of each."""
        words, classes = as_list(row["tokens"]), as_list(row["label"])
        for name, value in (("tokens", words), ("label", classes)):
            if not isinstance(value, list):
                raise ValueError(f"{name} are {type(value).__name__}, not a list. To fix: name another {name}_column")
        if len(words) != len(classes):
            raise ValueError(f"there are {len(words)} tokens and {len(classes)} labels. To fix: give a label for each")
        for place, word in enumerate(words, start=1):
            if not isinstance(word, str) and (not isinstance(word, int) or isinstance(word, bool)):
                what = "null" if word is None else f"{word!r}, which is no text"
                raise ValueError(f"token {place} is {what}. To fix: give it a text, or remove it and its label")
        tokens: list[int] = []
        labels: list[int] = []
        for word, value in zip(_spaced(words), classes, strict=True):
            ids = context.tokenizer.encode(word)
            tokens += ids
            number = IGNORED if _is_unlabelled(value) else context.labels.number(value)
            labels += [number, *[IGNORED] * (len(ids) - 1)][: len(ids)]
        marked = context.tokenizer.with_special(tokens, at_most=context.max_length)
        first = context.tokenizer.num_before
        kept = len(marked.tokens) - context.tokenizer.num_special
        return {
            "input_ids": marked.tokens,
            "labels": [IGNORED] * first + labels[:kept] + [IGNORED] * (len(marked.tokens) - first - kept),
        }


def _is_unlabelled(value: Any) -> bool:
    return not isinstance(value, str) and bool(value == IGNORED)


def _spaced(words: Any) -> list[str]:
    if not isinstance(words, list):
        return []
    return [str(word) if place == 0 else f" {word}" for place, word in enumerate(words)]
