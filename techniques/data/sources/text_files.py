"""Text for language models: documents of text, JSONL, CSV and Parquet files that a glob or a URL matches.

With a given tokenizer, the tokens of single files are kept, so that data with new files encodes only these. With a
tokenizer that is trained on the text, all tokens change when text is added, so nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.techniques.data.encoded_rows import parts_of_files
from ringmaster.techniques.data.file_rows import RowReading, rows_of_files
from ringmaster.techniques.data.stored_source import StoredSource
from ringmaster.techniques.data.tokens import TextOptions, write_text
from ringmaster.techniques.data_source import PreparedData, Row
from ringmaster.techniques.job import DataSpec

Content = str | list[int]
KTO_COLUMNS = frozenset({"prompt", "completion", "label"})
NO_KTO = (
    "has a prompt, a completion and a label, as for KTO, a loss that there is not. To fix: keep the rows whose label "
    "is true, and set data.kind to completion; or make rows of prompt, chosen and rejected, for dpo, orpo or simpo"
)


class TextFiles(StoredSource):
    """The documents in all files that `spec.path` and, if given, `spec.held_out_path` match.

    A text file is one document. In other files each row is one: its `text_column` has text or token ids (or its
    `input_ids`, if there is no such column).
    """

    name = "language-modeling"
    options_class = TextOptions
    reads = ("path",)

    def rows(self, spec: DataSpec) -> Iterator[Row]:
        """Yields every row before tokenisation; its content is its text, a `FileText` or its token ids."""
        return rows_of_files(spec, self._reading(spec))

    def _reading(self, spec: DataSpec) -> RowReading:
        column = self.options(spec).text_column
        return RowReading(columns=(column, "input_ids"), content=partial(_content, column=column))

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the documents as one stream of tokens, cut into samples."""
        return write_text(
            folder,
            spec=spec,
            rows=partial(self.rows, spec),
            where=where,
            column=self.options(spec).text_column,
            cache_dir=cache_dir,
            parts=partial(parts_of_files, spec, self._reading(spec)),
        )


def _content(row: Any, where: str, *, column: str) -> Content:
    """The text or the token ids of a row."""
    content = row.get(column, row.get("input_ids")) if isinstance(row, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(token, int) for token in content):
        return content
    if not isinstance(row, Mapping) or (column not in row and "input_ids" not in row):
        if isinstance(row, Mapping) and row.keys() >= KTO_COLUMNS:
            raise ValueError(f"{where} {NO_KTO}")
        there = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        what = f"has no text (nor input_ids) in column {column!r}; it has {there}"
        raise ValueError(f"{where} {what}. To fix: set text_column")
    read = column if column in row else "input_ids"
    text = "it is null" if content is None else f"it is of type {type(content).__name__}"
    raise ValueError(f"{where} has no text in column {read!r}: {text}. To fix: give it a text, or remove the row")
