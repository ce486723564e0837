"""Words with a class each, such as the names of persons and places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext


class TokenClassification(RowSource):
    """The tokens of a row's words, with a label for the first token of each word.

    The other tokens of a word, and special tokens, do not count. Each word but the first is encoded with a space before
    it.
    """

    name = "token-classification"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tokens": ("tokens", "words"),
        "label": ("labels", "tags", "ner_tags", "pos_tags", "label"),
    }
    label_role = "label"
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the words as they are encoded."""
        return _spaced(row["tokens"])

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with special tokens, and the label of each."""
        words, classes = row["tokens"], row["label"]
        for name, value in (("tokens", words), ("label", classes)):
            if not isinstance(value, list):
                raise ValueError(f"{name} are {type(value).__name__}, not a list. To fix: name another {name}_column")
        if len(words) != len(classes):
            raise ValueError(f"there are {len(words)} tokens and {len(classes)} labels. To fix: give a label for each")
        tokens: list[int] = []
        labels: list[int] = []
        for word, value in zip(_spaced(words), classes, strict=True):
            ids = context.tokenizer.encode(word)
            tokens += ids
            labels += [context.labels.number(value), *[IGNORED] * (len(ids) - 1)][: len(ids)]
        marked = context.tokenizer.with_special(tokens, at_most=context.max_length)
        first = context.tokenizer.num_before
        kept = len(marked.tokens) - context.tokenizer.num_special
        return {
            "input_ids": marked.tokens,
            "labels": [IGNORED] * first + labels[:kept] + [IGNORED] * (len(marked.tokens) - first - kept),
        }


def _spaced(words: Any) -> list[str]:
    if not isinstance(words, list):
        return []
    return [str(word) if place == 0 else f" {word}" for place, word in enumerate(words)]
