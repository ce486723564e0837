"""Text for language models: documents of text, JSONL, CSV and Parquet files that a glob or a URL matches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.techniques.interface.data_source import PreparedData, Row
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data.file_rows import Reading, preparation_of_files, rows_of_files
from ringmaster.techniques.runtime.data.prepared import Preparation
from ringmaster.techniques.runtime.data.stored_source import StoredSource
from ringmaster.techniques.runtime.data.tokens import Document, write_tokens

Content = str | list[int]


class TextFiles(StoredSource):
    """The documents in all files that `spec.path` and, if given, `spec.held_out_path` match.

    A text file is one document. In other files each row is one: its `text_column` has text or token ids (or its
    `input_ids`, if there is no such column).
    """

    name = "language-modeling"
    reads = ("path",)

    def check(self, spec: DataSpec) -> None:
        """Refuses options, as text has none."""
        if spec.path is not None and spec.kwargs:
            raise ValueError(
                f"data: kind {self.name} has no option {min(spec.kwargs)!r}. To fix: remove kwargs, or set data.kind"
            )

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the documents become one stream of tokens, which is cut into samples."""
        return preparation_of_files(spec, cache_dir=cache_dir, rows=self.rows, write=self._write)

    def rows(self, spec: DataSpec) -> Iterator[Row]:
        """Yields every row before tokenisation; its content is its text or its token ids."""
        content = partial(_content, column=spec.text_column)
        return rows_of_files(spec, Reading(columns=(spec.text_column, "input_ids"), content=content))

    def _write(self, folder: Path, spec: DataSpec, where: str) -> PreparedData:
        def documents() -> Iterator[Document]:
            for row in self.rows(spec):
                yield Document(content=row.content, held_out=row.held_out)

        return write_tokens(folder, spec=spec, documents=documents, where=where)


def _content(row: Any, where: str, *, column: str) -> Content:
    """The text or the token ids of a row."""
    content = row.get(column, row.get("input_ids")) if isinstance(row, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(token, int) for token in content):
        return content
    there = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(
        f"{where} has no text (nor input_ids) in column {column!r}; it has {there}. To fix: set text_column"
    )
