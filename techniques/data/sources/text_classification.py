"""Texts, or pairs of texts, with one class each, or with several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster.techniques.data.row_samples.class_labels import as_list
from ringmaster.techniques.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.interface.job import DataSpec


class TextClassification(RowSource):
    """The tokens of a text, or of a pair, with the number of its class.

    Where labels are lists, a text may have several classes: its label is 1 for each of them and 0 for the others. The
    number of the class then follows the order of `labels` in the same way.
    """

    name = "text-classification"
    version = 2
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("text", "sentence", "sentence1", "premise", "question1"),
        "text_pair": ("text_pair", "sentence2", "hypothesis", "question2"),
        "label": ("label", "labels", "class"),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"text_pair"})
    label_role: ClassVar[str | None] = "label"
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the text, and the second one of a pair."""
        return row["text"], row["text_pair"]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with the tokenizer's special tokens, and the label."""
        return {**encoded_texts(row, context), "labels": self.label(row["label"], context)}

    def label(self, value: Any, context: SampleContext) -> Any:
        """Returns the number of the class, or an indicator for each class."""
        value = as_list(value)
        if isinstance(value, (list, tuple)):
            return context.labels.indicators(value)
        return context.labels.number(value)


def encoded_texts(row: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
    """Returns the tensors of a row's text, or of a pair of texts."""
    tokenizer = context.tokenizer
    ids, pair = (None if row[role] is None else tokenizer.encode(text_of(row, role)) for role in ("text", "text_pair"))
    assert ids is not None
    marked = tokenizer.with_special(ids, pair, at_most=context.max_length)
    segments = {} if marked.segments is None else {"token_type_ids": marked.segments}
    return {"input_ids": marked.tokens, **segments}


def text_of(row: Mapping[str, Any], role: str) -> str:
    """Returns the text of a role. Raises ValueError where it is another value, or empty."""
    value = row[role]
    if not isinstance(value, str):
        raise ValueError(f"the {role} is {type(value).__name__}, not text. To fix: name another {role}_column")
    if not value:
        raise ValueError(f"the {role} is empty. To fix: add text, or remove the row")
    return value
