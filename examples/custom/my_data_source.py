"""Our own kind of data: prompts with answers, of which a model learns the answers alone.

A package names it in its pyproject.toml, under the kind's own name:

    [project.entry-points."ringmaster.data_sources"]
    answers = "my_data_source:Answers"

Where the package is installed, `data: {kind: answers, path: "questions/*.jsonl", seq_len: 128}` of a job reads it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster import DataSpec, RowSource
from ringmaster.techniques.data.row_source import SampleContext
from ringmaster.techniques.metric import IGNORED


class Answers(RowSource):
    """The tokens of a prompt and its answer. The labels of the prompt do not count."""

    name = "answers"
    roles: ClassVar = {"prompt": ("prompt",), "answer": ("answer", "reply")}
    needs_tokenizer = True
    is_causal = True

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns both texts."""
        return row.values()

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens and labels; batches of them are padded."""
        prompt, answer = (context.tokenizer.encode(row[role]) for role in self.roles)
        return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}
