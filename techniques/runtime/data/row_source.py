"""Base class of data sources that make one sample of each row: the columns that are read, the sample, its padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.interface.data_source import PreparedData, Row, SampleTensor
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.arrays import Array, ColumnWriter, open_columns
from ringmaster.techniques.runtime.data.file_rows import Reading, preparation_of_files, rows_of_files
from ringmaster.techniques.runtime.data.prepared import Preparation
from ringmaster.techniques.runtime.data.sources.hugging_face import load_splits, preparation_of_dataset
from ringmaster.techniques.runtime.data.splits import is_held_out
from ringmaster.techniques.runtime.data.stored_source import StoredSource, described
from ringmaster.techniques.runtime.data.tokens import Document, Encoder, encoder_of

Encode = Callable[[str], list[int]]

ROWS_PER_CALL = 256


class RowSource(StoredSource):
    """Makes one sample of each row of JSONL, CSV and Parquet files, or of a Hugging Face data set.

    A sample's arrays are stored with equal shapes. One-dimensional arrays named in `padding` are filled up to the
    spec's `seq_len`, and cut where they are longer. A sample with `input_ids` also gets an `attention_mask` of its
    tokens, and its tokens as `labels`, unless it has these. `collate` makes a batch of the stored arrays.

    version: to be incremented when the same rows become other samples than before, which are then prepared again.
    padding: the values that arrays are filled up with, by the arrays' names.
    options: the source's own keys among the spec's `kwargs`, with their defaults. All others go to `load_dataset`.
    needs_tokenizer: whether `sample` encodes text. It is encoded by the spec's tokenizer, or by one that is trained on
        what `texts` returns.
    """

    reads = ("path", "dataset")
    version: ClassVar[int] = 1
    padding: ClassVar[Mapping[str, int]] = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    options: ClassVar[Mapping[str, Any]] = {}
    needs_tokenizer: ClassVar[bool] = False

    @abstractmethod
    def columns(self, spec: DataSpec) -> tuple[str, ...]:
        """Returns the columns that are read of each row."""

    @abstractmethod
    def sample(self, row: Mapping[str, Any], *, spec: DataSpec, encode: Encode) -> Mapping[str, Any]:
        """Returns the arrays of one sample, or what `np.asarray` takes, by the names of `forward`'s arguments.

        encode: returns the token ids of a text, without special tokens.

        Raises ValueError where a row is wrong; the message gets its place.
        """

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the texts of a row on which a tokenizer is trained where the spec names none."""
        return ()

    def option(self, spec: DataSpec, name: str) -> Any:
        """Returns the value of one of `options`."""
        return spec.kwargs.get(name, self.options[name])

    def check(self, spec: DataSpec) -> None:
        """Refuses unknown options of rows in files."""
        if spec.path is not None and (unknown := [name for name in spec.kwargs if name not in self.options]):
            known = ", ".join(self.options) or "none"
            raise ValueError(f"data: kind {self.name} has no option {unknown[0]!r}. To fix: its options are: {known}")

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the rows become samples."""
        if spec.path is not None:
            found = preparation_of_files(spec, cache_dir=cache_dir, rows=self.rows_of_path, write=self._write_files)
        else:
            found = preparation_of_dataset(spec, write=partial(self._write_dataset, spec))
        return replace(found, state={"version": self.version, "files": found.state})

    def rows(self, spec: DataSpec) -> Iterator[Row] | None:
        """Returns the rows of files; their content is a mapping of the columns that are read."""
        return None if spec.path is None else self.rows_of_path(spec)

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields the rows of files, with the columns that are read."""
        columns = self.columns(spec)
        for row in rows_of_files(spec, Reading(columns=columns, content=partial(_content, columns=columns))):
            if not isinstance(row.content, Mapping):
                raise ValueError(f"{row.file} has no columns. To fix: give JSONL, CSV or Parquet for kind {self.name}")
            yield row

    def _write_files(self, folder: Path, spec: DataSpec, where: str) -> PreparedData:
        return self._write(folder, spec, partial(self.rows_of_path, spec), where)

    def _write_dataset(self, spec: DataSpec, folder: Path) -> PreparedData:
        others = {name: value for name, value in spec.kwargs.items() if name not in self.options}
        splits = load_splits(replace(spec, kwargs=others))
        rows = partial(_rows_of_splits, splits, spec, self.columns(spec))
        return self._write(folder, spec, rows, f"dataset {spec.dataset!r}")

    def _write(self, folder: Path, spec: DataSpec, rows: Callable[[], Iterator[Row]], where: str) -> PreparedData:
        encoder = encoder_of(spec, self._documents(rows(), spec)) if self.needs_tokenizer else None
        left = rows()
        with ColumnWriter(folder) as writer:
            while chunk := list(islice(left, ROWS_PER_CALL)):
                for split, held_out in (("training", False), ("held_out", True)):
                    if samples := [self._sample(row, spec, encoder) for row in chunk if row.held_out is held_out]:
                        writer.append(split, self._stacked(samples, spec, where))
        if not writer.num_rows("training"):
            raise ValueError(f"{where} holds no row to train on. To fix: check the path, or lower held_out")
        if spec.held_out > 0 and not writer.num_rows("held_out"):
            raise ValueError(f"{where} holds no row to evaluate on. To fix: raise held_out, or set it to 0")
        tensors = self._tensors(folder)
        if encoder is None:
            return replace(described(folder), tensors=tensors)
        encoder.save(folder / "tokenizer")
        found = described(folder, vocab_size=encoder.vocab_size, end_of_text_id=encoder.end_of_text_id)
        return replace(found, tensors=tensors)

    def _tensors(self, folder: Path) -> tuple[SampleTensor, ...]:
        batch = self.collate({name: column[:1] for name, column in open_columns(folder, "training").items()})
        return tuple(
            SampleTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape[1:]))
            for name, tensor in batch.items()
        )

    def _documents(self, rows: Iterable[Row], spec: DataSpec) -> Iterator[Document]:
        for row in rows:
            for text in self.texts(row.content, spec=spec):
                yield Document(content=text, held_out=row.held_out)

    def _sample(self, row: Row, spec: DataSpec, encoder: Encoder | None) -> dict[str, Array]:
        def encode(text: str) -> list[int]:
            assert encoder is not None, f"{type(self).__qualname__} does not say that it needs a tokenizer"
            return encoder.encode([text])[0]

        try:
            made = self.sample(row.content, spec=spec, encode=encode)
        except ValueError as error:
            raise ValueError(f"{row.file}, row {row.number}: {error}") from error
        sample = {name: np.asarray(value) for name, value in made.items()}
        if "input_ids" in sample:
            sample.setdefault("attention_mask", np.ones_like(sample["input_ids"]))
            sample.setdefault("labels", sample["input_ids"])
        return {name: self._padded(name, array, spec.seq_len) for name, array in sample.items()}

    def _padded(self, name: str, array: Array, length: int | None) -> Array:
        if name not in self.padding or array.ndim != 1:
            return array
        kept = array[:length]
        missing = 0 if length is None else length - len(kept)
        return np.pad(kept.astype(np.int32), (0, missing), constant_values=self.padding[name])

    def _stacked(self, samples: list[dict[str, Array]], spec: DataSpec, where: str) -> dict[str, Array]:
        try:
            return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        except (ValueError, KeyError) as error:
            remedy = "set seq_len, to which tokens are filled up" if spec.seq_len is None else "give all rows one shape"
            raise ValueError(
                f"{where}: samples of kind {self.name} differ in shape: {error}. To fix: {remedy}"
            ) from error


def _content(row: Any, where: str, *, columns: tuple[str, ...]) -> dict[str, Any]:
    there = sorted(row) if isinstance(row, Mapping) else []
    if missing := [name for name in columns if name not in there]:
        raise ValueError(f"{where} has no column {missing[0]!r}; it has {there}. To fix: name the column, or add it")
    return {name: row[name] for name in columns}


def _rows_of_splits(splits: list[Any], spec: DataSpec, columns: tuple[str, ...]) -> Iterator[Row]:
    place = f"dataset {spec.dataset!r}"
    for position, split in enumerate(splits):
        for index, row in enumerate(split):
            is_of_held_out = position == 1 if len(splits) == 2 else is_held_out(f"row {index}", share=spec.held_out)
            content = _content(row, place, columns=columns)
            yield Row(file=place, number=index + 1, value=row, content=content, held_out=is_of_held_out)
