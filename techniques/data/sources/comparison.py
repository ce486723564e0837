"""Two answers to a prompt of which one is better, as reward models read them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.class_labels import read_number
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.sources import chat
from ringmaster.techniques.data.sources.completion import Preference, PreferenceOptions, answered
from ringmaster.techniques.data.sources.text_rows import LARGEST, filled
from ringmaster.techniques.data_source import DataOptions, PreparedData, column
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.loss import MARGIN


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(PreferenceOptions):
    """The columns of two answers, of which one is better."""

    margin_column: Annotated[
        str | None, Description("the column that says how much better the chosen answer is, such as score_difference")
    ] = column("margin", is_optional=True)


class Comparison(Preference):
    """Two rows of tokens, [2, tokens], as of kind preference, with their mask and the margin; 0 without one."""

    name = "comparison"
    usual_loss = "bradley-terry"
    options_class: ClassVar[type[DataOptions]] = ComparisonOptions
    is_causal = False
    copies_labels = False
    version = 1

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and the mask of both answers, the shorter one filled up, and the margin."""
        tokens = [answer["input_ids"] for answer in self.pair(row, context=context)]
        margin = 0.0 if row[MARGIN] in (None, "") else read_number(row[MARGIN])
        if not abs(margin) <= LARGEST:  # also of NaN
            raise ValueError(
                f"the margin is {row[MARGIN]!r:.40}, and not a finite number of 32 bits. To fix: correct it, or name "
                "another margin_column"
            )
        return {
            "input_ids": filled(tokens, context.tokenizer.pad_id),
            "attention_mask": filled([[1] * len(each) for each in tokens], 0),
            MARGIN: np.float32(margin),
        }

    def reference(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens of the tokenizer's own calls, as of kind preference."""
        known = super().reference(row, context=context)
        return None if known is None else {"input_ids": known["input_ids"]}

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description with one output."""
        return replace(prepared, num_labels=1)


def answer_context(tokenizer_dir: Path, *, max_length: int) -> row_source.SampleContext:
    """Returns what encodes answers as rows of the kind are encoded, by the tokenizer in a folder."""
    return row_source.SampleContext(
        spec=DataSpec(tokenizer=str(tokenizer_dir)),
        options=ComparisonOptions(),
        max_length=max_length,
        _tokenizer=RowTokenizer(tokenizer_dir),
    )


def answer_tokens(prompt: Any, answer: Any, context: row_source.SampleContext) -> dict[str, list[int]]:
    """Returns the tokens of a prompt and its answer, texts or lists of messages, with labels for the answer alone."""
    if isinstance(prompt, str):
        return answered(prompt, [answer], context)[0]
    roles = context.tokenizer.template.roles
    messages, messages_of_answer = (chat.as_messages(each, roles=roles) for each in (prompt, answer))
    if isinstance(answer, str):
        messages_of_answer = [{"role": "assistant", "content": answer}]
    return chat.answered_chat(messages, messages_of_answer, context)
