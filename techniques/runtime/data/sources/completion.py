"""Prompts with their completions, of which a language model learns the completions alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.runtime.data.row_samples.tokenizer import give_chat_template
from ringmaster.techniques.runtime.data.sources.chat import answered_chat, as_messages, texts_of
from ringmaster.techniques.runtime.data.sources.text_classification import text_of


class Completion(RowSource):
    """The tokens of a prompt and of its completion. The prompt has no labels.

    Both are texts, and the completion ends with the end of text; or both are lists of messages, which the tokenizer's
    chat template renders. The `input` of an instruction, as in Alpaca's files, follows the prompt after an empty line.
    """

    name = "completion"
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prompt": ("prompt", "instruction", "question"),
        "completion": ("completion", "response", "output", "answer"),
        "input": ("input",),
    }
    optional: ClassVar[frozenset[str]] = frozenset({"input"})
    needs_tokenizer = True
    is_causal = True
    packs = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns both texts, also those of messages where a tokenizer is trained on them."""
        prompt = f"{row['prompt']}\n\n{row['input']}" if row["input"] else row["prompt"]
        return texts_of((prompt, row["completion"]), spec=spec)

    def prepare_tokenizer(self, folder: Path, *, is_trained: bool) -> None:
        """Gives a tokenizer that was trained on the data a chat template."""
        if is_trained:
            give_chat_template(folder)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those of the completion."""
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            return answered_chat(as_messages(row["prompt"]), as_messages(row["completion"]), context)
        prompt = text_of(row, "prompt")
        if row["input"]:
            prompt = f"{prompt}\n\n{text_of(row, 'input')}"
        return answered(context.tokenizer.encode(prompt), completion_of(text_of(row, "completion"), context))


def completion_of(text: str, context: SampleContext) -> list[int]:
    """Returns the tokens of a completion with the end of text."""
    end = context.tokenizer.end_id
    return context.tokenizer.encode(text) + ([] if end is None else [end])


def answered(prompt: list[int], completion: list[int]) -> dict[str, list[int]]:
    """Returns the tokens of a prompt and its completion, with labels for the completion alone."""
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}
