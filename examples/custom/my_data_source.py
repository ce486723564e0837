"""Our own kind of data: prompts with answers, of which a model learns the answers alone.

A package names it in its pyproject.toml, under the kind's own name:

    [project.entry-points."ringmaster.data_sources"]
    answers = "my_data_source:Answers"

Where the package is installed, `data: {kind: answers, path: "questions/*.jsonl", seq_len: 128}` of a job reads it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from ringmaster import DataSpec, RowSource
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.row_source import Encode


class Answers(RowSource):
    """The tokens of a prompt and its answer. The labels of the prompt do not count."""

    name = "answers"
    needs_tokenizer = True
    options: ClassVar = {"prompt_column": "prompt", "answer_column": "answer"}

    def columns(self, spec: DataSpec) -> tuple[str, ...]:
        """Returns the two columns."""
        return tuple(self.option(spec, name) for name in self.options)

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns both texts."""
        return row.values()

    def sample(self, row: Mapping[str, Any], *, spec: DataSpec, encode: Encode) -> Mapping[str, Any]:
        """Returns tokens and labels; `RowSource` fills them up to seq_len and adds the attention mask."""
        prompt, answer = (encode(row[name]) for name in self.columns(spec))
        return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}
