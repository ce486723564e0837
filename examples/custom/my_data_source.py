"""Our own kind of data: prompts with answers, of which a model learns the answers alone.

A package names it in its pyproject.toml, under the kind's own name:

    [project.entry-points."ringmaster.data_sources"]
    answers = "my_data_source:Answers"

Where the package is installed, `data: {kind: answers, path: "questions/*.jsonl", seq_len: 128}` of a job reads it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ringmaster import RowSource
from ringmaster.techniques.data.row_source import SampleContext
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.metric import IGNORED


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(DataOptions):
    """The columns that are read, and the usual names of each."""

    prompt_column: str | None = column("prompt")
    answer_column: str | None = column("answer", "reply")


class Answers(RowSource):
    """The tokens of a prompt and its answer. The labels of the prompt do not count."""

    name = "answers"
    options_class = AnswerOptions
    needs_tokenizer = True
    is_causal = True

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns both texts."""
        return row.values()

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens and labels; batches of them are padded."""
        prompt, answer = (context.tokenizer.encode(row[role]) for role in ("prompt", "answer"))
        return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}
