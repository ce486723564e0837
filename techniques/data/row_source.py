"""Data sources that make one sample of each row of files, or of a Hugging Face data set."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data import arrow_files
from ringmaster.techniques.data.file_patterns import matching, stamp
from ringmaster.techniques.data.file_rows import RowReading, data_files, rows_of_files
from ringmaster.techniques.data.row_files import (
    SUFFIXES,
    class_names_in,
    format_of,
)
from ringmaster.techniques.data.row_kind import (
    LABEL,
    Columns,
    RowKind,
    SampleContext,
    columns_of_files,
    retriever_of,
    text_of,
)
from ringmaster.techniques.data.row_samples import RowSamples
from ringmaster.techniques.data.samples import PaddedSamples
from ringmaster.techniques.data.sources.builtin import class_names, load_splits, rows_of_splits, with_facts_of_splits
from ringmaster.techniques.data_source import Dataset, PreparedData, Row
from ringmaster.techniques.job_specs import DataSpec

__all__ = ["Columns", "RowSource", "SampleContext", "columns_of_files", "retriever_of", "text_of"]


class RowSource(RowKind):
    """Reads the rows of JSONL, CSV and Parquet files, or of a Hugging Face data set; see `RowKind` for the samples."""

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns where the rows come from, and what changes as soon as they become other samples, or another form."""
        location, files = super().origin(spec)
        retriever = retriever_of(spec)
        read: dict[str, Any] = {} if retriever is None else {"store": retriever.digest}
        read |= {"images": states} if (states := self._file_states(spec)) else {}
        return location, {"form": "arrow", "version": self.version, "files": files, **read}

    def _file_states(self, spec: DataSpec) -> list[Any]:
        """Returns the states of the files that a table names; a Parquet file, which may hold them itself, is not read.

        Wrong rows are refused where they are prepared.
        """
        result: list[Any] = []
        if not self.file_role or spec.path is None or is_url(spec.path):
            return result
        with suppress(ValueError, OSError):
            if any(format_of(file.path, spec.format) == "parquet" for files in data_files(spec) for file in files):
                return result
            columns = self.columns(spec)
            for row in self.rows_of_path(spec):
                for path in self.file_paths(self.values(row, columns, spec=spec)):
                    result.append([path, *stamp(Path(path))])
        return result

    def rows(self, spec: DataSpec) -> Iterator[Row] | None:
        """Returns the rows of files; their content is a mapping of the columns that are read."""
        return None if spec.path is None else self.rows_of_path(spec)

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields the rows of files, with the columns that are read."""
        columns = self.columns(spec)
        yield from rows_of_files(spec, RowReading(columns=columns.needed, content=columns.content))

    def samples(self, table: arrow_files.Table, prepared: PreparedData) -> Dataset:
        """Returns the samples in the rows of a table, which are padded."""
        padding = {**self.padding, arrow_files.TOKENS: prepared.pad_token_id or 0}
        ragged = self.padding.keys() - self.uncut
        widest = max((each.shape[-1] for each in prepared.tensors if each.name in ragged and each.shape), default=1)
        return PaddedSamples(
            table,
            collate=self.collate,
            width=prepared.seq_len or widest,
            padding=padding,
            uncut=self.uncut,
            pads_left=prepared.pads_left,
            rounds_width=self.rounds_width,
        )

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes a sample of each row."""
        prepared = partial(RowSamples, folder, kind=self, where=where)
        if spec.path is not None:
            columns = self.columns(spec)
            if self.has_classes and not self.options(spec).labels:
                labels = _class_names_of_files(spec, columns.columns[LABEL])
                spec = replace(spec, options={**spec.options, "labels": labels})
            is_kept = self.keeps_files and (spec.tokenizer is not None or not self.needs_tokenizer)
            rows, kept_in = partial(self.rows_of_path, spec), cache_dir if is_kept else None
            return prepared(spec=spec, columns=columns, rows=rows, cache_dir=kept_in).write()
        own = {each.name for each in fields(self.options_class)}
        others = {name: value for name, value in spec.kwargs.items() if name not in own}
        splits = load_splits(replace(spec, kwargs=others))
        columns = self.columns(spec, splits[0].column_names)
        if self.has_classes and not self.options(spec).labels:
            labels = class_names(splits[0].features.get(columns.columns[LABEL]))
            spec = replace(spec, options={**spec.options, "labels": labels})
        needed = [name for name in columns.needed if name in splits[0].column_names]
        rows = partial(rows_of_splits, splits, spec, needed, content=columns.content, key=_split_key)
        result = prepared(spec=spec, columns=columns, rows=rows, cache_dir=None).write()
        read = [name for name in replace(columns, decisive={}, late={}).needed if name in needed]
        return with_facts_of_splits(result, splits, spec, columns=read)


def _class_names_of_files(spec: DataSpec, column: str) -> tuple[str, ...]:
    """The names of the classes of a column that Parquet files to train on declare, in the order of their numbers."""
    assert spec.path is not None
    files = matching(spec.path)
    paths = map(files.path, files.names)
    tables = (path for path in paths if (spec.format or SUFFIXES.get(Path(path).suffix.lower())) == "parquet")
    return tuple(dict.fromkeys(chain.from_iterable(class_names_in(path).get(column, ()) for path in tables)))


def _split_key(content: Mapping[str, Any], index: int) -> str:
    """The text by whose hash a row is held out: its content, or its number where that is not JSON (an image)."""
    try:
        return json.dumps(content)
    except (TypeError, ValueError):
        return f"row {index}"
