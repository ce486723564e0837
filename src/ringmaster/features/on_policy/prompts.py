"""Prompts alone, to which a language model in training writes the completions itself."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.chat_template import ANSWER, Message
from ringmaster.techniques.data.sources import chat
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.job_specs import DataSpec

PROMPT = "prompt"
ROW = "row"
"""The tensor of a sample with its row as JSON in UTF-8, padded with 0: [bytes]."""
TAKEN = ("prompts", "completions", "completion_ids")
"""The names of arguments of reward functions that no column may have."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(DataOptions):
    """The column of prompts."""

    prompt_column: str | None = column("prompt", "messages", "question", "instruction")


class Prompt(chat.ConversationSource):
    """The tokens of a prompt, and its row. A prompt is a text, or a list of messages for the tokenizer's chat template.

    Messages are rendered up to where the assistant's answer begins, with the row's `tools` and behind its `system`. All
    columns but the prompt's are for the functions that reward completions. Prompts are never cut: one that is longer
    than `seq_len` is refused.
    """

    name = "prompt"
    options_class = PromptOptions
    needs_tokenizer = True
    copies_labels = False
    message_roles = chat.ConversationSource.message_roles | {"chosen", "rejected"}  # for functions that reward
    version = 6
    padding: ClassVar[Mapping[str, int]] = {"input_ids": 0, "attention_mask": 0, ROW: 0}
    uncut: ClassVar[frozenset[str]] = frozenset({ROW})

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> row_source.Columns:
        """Returns the prompt's column, and all others under their own names."""
        result = super().columns(spec, available)
        there = row_source.columns_of_files(spec, kind=self.name) if available is None else available
        others = {name: name for name in there if name not in (*result.columns.values(), PROMPT)}
        if taken := sorted(set(TAKEN) & set(others)):
            raise ValueError(f"a column has the name {taken[0]}, of an argument of rewards. To fix: rename it")
        return row_source.Columns(
            columns={**result.columns, **others}, roles=(PROMPT, *others), optional=frozenset(others)
        )

    def texts(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Iterable[str]:
        """Returns the prompt, or the contents of its messages where a tokenizer is trained on them."""
        return chat.texts_of((row[PROMPT],), context)

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the prompt's tokens and mask, and the row as bytes."""
        prompt = row[PROMPT]
        if isinstance(prompt, str):
            _refuse_beside_text(row, context.options.ignored_columns)
            encoded = context.tokenizer.encode(prompt)
            tokens = [*context.tokenizer.start_ids, *encoded] if encoded else []
        else:
            prompt, tools = _messages(row, context)
            tokens = context.tokenizer.prompt(prompt, tools=tools)
        if not tokens:
            raise ValueError("the prompt is empty. To fix: remove the row")
        if len(tokens) > context.max_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and prompts are not cut at {context.max_length}. To fix: raise "
                "data.seq_len, or remove the row"
            )
        encoded_row = json.dumps({**row, PROMPT: prompt}, default=str).encode()  # dates of Parquet files become texts
        return {
            "input_ids": tokens,
            "attention_mask": [1] * len(tokens),
            ROW: np.frombuffer(encoded_row, dtype=np.uint8),
        }

    def reference(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any] | None:
        """Returns what `apply_chat_template` gives for a prompt of messages; None for a text."""
        if isinstance(row[PROMPT], str):
            return None
        messages, tools = _messages(row, context)
        result = context.tokenizer.by_library(messages, tools=tools, add_generation_prompt=True)
        return None if result is None else {"input_ids": result[0]}


def _messages(
    row: Mapping[str, Any], context: row_source.SampleContext
) -> tuple[list[Message], list[Mapping[str, Any]] | None]:
    """The messages of a prompt, and its tools. Raises ValueError where they are wrong, or end with an answer."""
    read = {name: value for name, value in row.items() if name not in context.options.ignored_columns}
    messages = chat.messages_of(row[PROMPT], roles=context.tokenizer.template.roles)
    messages = chat.with_system(messages, read.get("system") or read.get("system_prompt"))
    if messages[-1]["role"] == ANSWER:
        raise ValueError(
            "the prompt ends with a message of the assistant's, and what is written would be another one. To fix: "
            "remove that message, or name another prompt_column"
        )
    return messages, chat.tools_of(read.get("tools"))


def _refuse_beside_text(row: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Raises ValueError where a row has what belongs to a prompt, and its prompt is a text without it."""
    for name in ("system", "system_prompt", "input", "tools"):
        if name not in ignored and row.get(name):
            raise ValueError(
                f"{name!r} cannot be combined with a prompt of text, which is read alone. To fix: put it into the "
                f"prompt, as text or as a list of messages; or set data.ignored_columns: [{name}], for rewards alone"
            )
