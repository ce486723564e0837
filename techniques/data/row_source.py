"""Base class of data sources that make one sample of each row of files, or of a Hugging Face data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.techniques.data.arrow_files import TOKENS, Table
from ringmaster.techniques.data.file_rows import RowReading, rows_of_files
from ringmaster.techniques.data.row_kind import LABEL, Columns, RowKind, SampleContext, columns_of_files, retriever_of
from ringmaster.techniques.data.row_samples import RowSamples
from ringmaster.techniques.data.samples import PaddedSamples
from ringmaster.techniques.data.sources.hugging_face import load_splits, rows_of_splits, with_leaks_of_splits
from ringmaster.techniques.data_source import Dataset, PreparedData, Row
from ringmaster.techniques.job import DataSpec
from ringmaster.techniques.metric import IGNORED

__all__ = ["Columns", "RowSource", "SampleContext", "columns_of_files"]


class RowSource(RowKind):
    """Reads the rows of JSONL, CSV and Parquet files, or of a Hugging Face data set; see `RowKind` for the samples."""

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns where the rows come from, and what changes as soon as they become other samples, or another form."""
        location, files = super().origin(spec)
        retriever = retriever_of(spec)
        read = {} if retriever is None else {"store": retriever.digest}
        return location, {"form": "arrow", "version": self.version, "files": files, **read}

    def rows(self, spec: DataSpec) -> Iterator[Row] | None:
        """Returns the rows of files; their content is a mapping of the columns that are read."""
        return None if spec.path is None else self.rows_of_path(spec)

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields the rows of files, with the columns that are read."""
        columns = self.columns(spec)
        yield from rows_of_files(spec, RowReading(columns=columns.names, content=columns.content))

    def samples(self, table: Table, prepared: PreparedData) -> Dataset:
        """Returns the samples in the rows of a table, which are padded."""
        padding = {**self.padding, TOKENS: prepared.pad_token_id or 0}
        return PaddedSamples(
            table, collate=self.collate, width=prepared.seq_len or 1, padding=padding, uncut=self.uncut
        )

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes a sample of each row."""
        prepared = partial(RowSamples, folder, kind=self, where=where)
        if spec.path is not None:
            is_kept = self.keeps_files and (spec.tokenizer is not None or not self.needs_tokenizer)
            rows, kept_in = partial(self.rows_of_path, spec), cache_dir if is_kept else None
            return prepared(spec=spec, columns=self.columns(spec), rows=rows, cache_dir=kept_in).write()
        own = {each.name for each in fields(self.options_class)}
        others = {name: value for name, value in spec.kwargs.items() if name not in own}
        splits = load_splits(replace(spec, kwargs=others))
        columns = self.columns(spec, splits[0].column_names)
        if self.has_classes and not self.options(spec).labels:
            labels = _class_names(splits[0].features[columns.columns[LABEL]])
            spec = replace(spec, options={**spec.options, "labels": labels})
        named = {name: names for name in columns.names if (names := _class_names(splits[0].features[name]))}

        def content(row: dict[str, Any], place: str) -> dict[str, Any]:
            return columns.content(row | {name: _with_names(row[name], names) for name, names in named.items()}, place)

        rows = partial(rows_of_splits, splits, spec, columns.names, content=content, key=_split_key)
        result = prepared(spec=spec, columns=columns, rows=rows, cache_dir=None).write()
        return with_leaks_of_splits(result, splits, spec, columns=columns.names)


def _class_names(feature: Any) -> tuple[str, ...]:
    """The names of the classes that a `datasets` feature declares, of a label or of a list of labels."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _with_names(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    if value is not None and value < 0:  # `ClassLabel` has -1 where there is no label
        return IGNORED
    return None if value is None else names[value]


def _split_key(content: Mapping[str, Any], index: int) -> str:
    """The text by whose hash a row is held out: its content, or its number where that is no JSON value (an image)."""
    try:
        return json.dumps(content)
    except (TypeError, ValueError):
        return f"row {index}"
