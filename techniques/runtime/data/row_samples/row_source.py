"""Base class of data sources that make one sample of each row: the columns that are read, the sample, its padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.interface.data_source import Dataset, PreparedData, Row, SampleTensor
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.runtime.data.arrays import Array, ColumnWriter, fingerprint, open_columns
from ringmaster.techniques.runtime.data.file_rows import Reading, preparation_of_files, rows_of_files
from ringmaster.techniques.runtime.data.manifest import ManifestBuilder
from ringmaster.techniques.runtime.data.prepared import Preparation
from ringmaster.techniques.runtime.data.row_samples.class_labels import ClassLabels, class_labels
from ringmaster.techniques.runtime.data.row_samples.packing import POSITIONS
from ringmaster.techniques.runtime.data.row_samples.ragged import PaddedSamples
from ringmaster.techniques.runtime.data.row_samples.row_columns import Columns, columns_of_files
from ringmaster.techniques.runtime.data.row_samples.sample_writer import SampleCounts, SampleWriter
from ringmaster.techniques.runtime.data.row_samples.tokenizer import RowTokenizer, give_padding_token
from ringmaster.techniques.runtime.data.sources.hugging_face import load_splits, preparation_of_dataset
from ringmaster.techniques.runtime.data.splits import is_held_out
from ringmaster.techniques.runtime.data.stored_source import StoredSource
from ringmaster.techniques.runtime.data.tokens import Document, encoder_of

ROWS_PER_CALL = 256
DEFAULT_MAX_LENGTH = 1024
"""The most tokens of a sample where the spec names no `seq_len`, as in TRL's trainers."""


@dataclass(frozen=True, kw_only=True)
class SampleContext:
    """What a sample is made with, besides its row.

    labels: the classes, for kinds of data that have some.
    """

    spec: DataSpec
    max_length: int
    _tokenizer: RowTokenizer | None = None
    _labels: ClassLabels | None = None

    @property
    def tokenizer(self) -> RowTokenizer:
        """The tokenizer of the data; only for kinds that set `needs_tokenizer`."""
        assert self._tokenizer is not None, "a kind of data that encodes text sets needs_tokenizer"
        return self._tokenizer

    @property
    def num_cut(self) -> int:
        """How often the tokenizer has cut a text so far."""
        return 0 if self._tokenizer is None else self._tokenizer.num_cut

    @property
    def labels(self) -> ClassLabels:
        """The classes of the data; only for kinds that name a `label_role`."""
        assert self._labels is not None, "a kind of data with classes names its label_role"
        return self._labels


class RowSource(StoredSource):
    """Makes one sample of each row of JSONL, CSV and Parquet files, or of a Hugging Face data set.

    Arrays of a sample named in `padding` may differ in length from row to row, in their last dimension. They are cut
    at the maximal length, and padded when a batch is made. All other arrays must have equal shapes. `collate` makes a
    batch of the padded arrays.

    version: to be incremented when the same rows become other samples than before, which are then prepared again.
    roles: what is read of a row, and for each the names of columns that usually hold it, the most usual first. A row
        is passed to `sample` by these names. Another column is selected by the spec's `ROLE_column`, or by that key of
        its `kwargs`.
    optional: the roles that rows may lack.
    label_role: the role that holds classes, which are found in the data unless the spec names its `labels`.
    options: the source's own keys among the spec's `kwargs`, with their defaults. All others go to `load_dataset`.
    needs_tokenizer: whether `sample` encodes text. It is encoded by the spec's tokenizer, or by one that is trained on
        what `texts` returns.
    encodes_texts: whether `sample` encodes what `texts` returns, so that the texts of many rows are encoded together.
    padding: the values that fill arrays up, by the arrays' names. `input_ids` are filled with the padding token.
    uncut: arrays of `padding` that are no tokens, and so have any length.
    is_causal: whether samples are for causal language models. Such samples need no attention mask, as no token attends
        to the padding behind it.
    samples_class: opens the stored columns of a split.
    packs: whether several samples may lie in one row; only for causal ones of `input_ids` and `labels`.
    """

    reads = ("path", "dataset")
    pads = True
    version: ClassVar[int] = 1
    roles: ClassVar[Mapping[str, tuple[str, ...]]]
    optional: ClassVar[frozenset[str]] = frozenset()
    label_role: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    needs_tokenizer: ClassVar[bool] = False
    encodes_texts: ClassVar[bool] = True
    padding: ClassVar[Mapping[str, int]] = {
        "input_ids": 0,
        "attention_mask": 0,
        "token_type_ids": 0,
        "labels": IGNORED,
        POSITIONS: 0,  # each token of padding is then a sample of its own
    }
    is_causal: ClassVar[bool] = False
    samples_class: ClassVar[type[PaddedSamples]] = PaddedSamples
    uncut: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the arrays of one sample, or what `np.asarray` takes, by the names of `forward`'s arguments.

        row: the values by role; None for an optional role that the row lacks.

        Raises ValueError where a row is wrong; the message gets its place.
        """

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the texts of a row: those that `sample` encodes, and on which a tokenizer is trained."""
        return ()

    def classes(self, value: Any) -> Iterable[Any]:
        """Returns the classes in the label of a row."""
        return value if isinstance(value, (list, tuple)) else (value,)

    def prepare_tokenizer(self, folder: Path, *, is_trained: bool) -> None:
        """Changes the tokenizer in `folder` before it is used. is_trained: whether it was trained on the data."""

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description of the samples, where a kind knows more of them."""
        return prepared

    def option(self, spec: DataSpec, name: str) -> Any:
        """Returns the value of one of `options`."""
        return spec.kwargs.get(name, self.options[name])

    def column(self, spec: DataSpec, role: str) -> str | None:
        """Returns the column that the spec names for a role, or None."""
        key = f"{role}_column"
        named: str | None = getattr(spec, key, None) or spec.kwargs.get(key)
        return None if role == "text" and named == DataSpec.text_column else named

    def check(self, spec: DataSpec) -> None:
        """Refuses unknown options of rows in files."""
        if spec.path is None:
            return
        known = (*self.options, *(f"{role}_column" for role in self.roles))
        if unknown := [name for name in spec.kwargs if name not in known]:
            raise ValueError(
                f"data: kind {self.name} has no option {unknown[0]!r}. To fix: its options are: {', '.join(known)}"
            )

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the column of each role. available: the columns that rows have; None for those of the first row.

        Raises ValueError, with the columns that there are, where a required role has none.
        """
        named = {role: self.column(spec, role) for role in self.roles}
        there = columns_of_files(spec, kind=self.name) if available is None else available
        return Columns.find(self.roles, named=named, optional=self.optional, there=there)

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the rows become samples."""
        if spec.path is not None:
            found = preparation_of_files(spec, cache_dir=cache_dir, rows=self.rows_of_path, write=self._write_files)
        else:
            found = preparation_of_dataset(spec, write=partial(self._write_dataset, spec))
        return replace(found, state=self.state(found.state))

    def state(self, files: Any) -> Mapping[str, Any]:
        """Returns what changes as soon as the rows become other samples, or are stored in another form."""
        return {"form": "ragged", "version": self.version, "files": files}

    def rows(self, spec: DataSpec) -> Iterator[Row] | None:
        """Returns the rows of files; their content is a mapping of the columns that are read."""
        return None if spec.path is None else self.rows_of_path(spec)

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields the rows of files, with the columns that are read."""
        columns = self.columns(spec)
        for row in rows_of_files(spec, Reading(columns=columns.names, content=columns.content)):
            if not isinstance(row.content, Mapping):
                raise ValueError(f"{row.file} has no columns. To fix: give JSONL, CSV or Parquet for kind {self.name}")
            yield row

    def open(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> tuple[Dataset, Dataset]:
        """Opens the samples of `prepared` where this machine has them, or else prepares them."""
        found = self.found(spec, cache_dir=cache_dir, prepared=prepared)
        padding = {**self.padding, "input_ids": found.pad_token_id or 0}
        training, held_out = (
            self.samples_class(
                open_columns(Path(found.folder), split), collate=self.collate, width=found.seq_len or 1, padding=padding
            )
            for split in ("training", "held_out")
        )
        return training, held_out

    def _write_files(self, folder: Path, spec: DataSpec, where: str) -> PreparedData:
        columns, manifest = self.columns(spec), ManifestBuilder()

        def rows() -> Iterator[Row]:
            return self.rows_of_path(spec)

        prepared = self._write(folder, spec, rows, columns, where, manifest=None if spec.name is None else manifest)
        if spec.name is not None:
            manifest.built().write(folder)
        return prepared

    def _write_dataset(self, spec: DataSpec, folder: Path) -> PreparedData:
        own = (*self.options, *(f"{role}_column" for role in self.roles))
        others = {name: value for name, value in spec.kwargs.items() if name not in own}
        splits = load_splits(replace(spec, kwargs=others))
        where = f"dataset {spec.dataset!r}"
        columns = self.columns(spec, splits[0].column_names)
        if self.label_role is not None and not spec.labels:
            spec = replace(spec, labels=_class_names(splits[0].features[columns.columns[self.label_role]]))
        return self._write(folder, spec, partial(_rows_of_splits, splits, spec, columns, where), columns, where)

    def _write(
        self,
        folder: Path,
        spec: DataSpec,
        rows: Callable[[], Iterator[Row]],
        columns: Columns,
        where: str,
        *,
        manifest: ManifestBuilder | None = None,
    ) -> PreparedData:
        context = self._context(folder, spec, rows, columns)
        left = rows()
        with ColumnWriter(folder) as columns_writer:
            writer = SampleWriter(
                columns_writer,
                what=f"{where}: samples of kind {self.name}",
                ragged=frozenset(self.padding),
                uncut=self.uncut,
                max_length=context.max_length,
                packs=spec.packing,
                needs_labels=self.is_causal,
            )
            while chunk := list(islice(left, ROWS_PER_CALL)):
                if self.needs_tokenizer and self.encodes_texts:
                    by_role = (columns.by_role(row.content) for row in chunk)
                    context.tokenizer.prefetch(text for row in by_role for text in self._texts(row, spec))
                for split, held_out in (("training", False), ("held_out", True)):
                    chosen, samples = [row for row in chunk if row.held_out is held_out], list[dict[str, Array]]()
                    for row in chosen:
                        num_cut = context.num_cut
                        samples.append(self._sample(row, context, columns))
                        writer.counts.num_truncated += context.num_cut > num_cut
                    writer.add(split, samples)
                for row in chunk if manifest is not None else ():
                    assert manifest is not None
                    manifest.add(row.content, held_out=row.held_out)
            writer.close()
        counts = writer.counts
        if not counts.num_samples["training"]:
            raise ValueError(
                f"{where} holds no row to train on. To fix: {_remedy(counts, 'check the path, or lower held_out')}"
            )
        if spec.held_out > 0 and not counts.num_samples["held_out"]:
            remedy = _remedy(counts, "raise held_out, or set it to 0")
            raise ValueError(f"{where} holds no row to evaluate on. To fix: {remedy}")
        width = context.max_length if spec.packing else spec.seq_len or counts.longest
        return self.described(self._description(folder, context, width=width, counts=counts, columns=columns))

    def _context(
        self, folder: Path, spec: DataSpec, rows: Callable[[], Iterator[Row]], columns: Columns
    ) -> SampleContext:
        tokenizer = None
        if self.needs_tokenizer:
            encoder_of(spec, self._documents(rows(), spec, columns)).save(folder / "tokenizer")
            if spec.tokenizer is None:
                give_padding_token(folder / "tokenizer")
            self.prepare_tokenizer(folder / "tokenizer", is_trained=spec.tokenizer is None)
            tokenizer = RowTokenizer(folder / "tokenizer")
        labels = None
        if self.label_role is not None:
            column = columns.columns[self.label_role]
            values = ((row.content[column], f"{row.file}, row {row.number}") for row in rows())
            labels = class_labels(values, named=spec.labels, classes=self.classes, column=column)
        length = spec.seq_len or DEFAULT_MAX_LENGTH
        return SampleContext(spec=spec, max_length=length, _tokenizer=tokenizer, _labels=labels)

    def _description(
        self,
        folder: Path,
        context: SampleContext,
        *,
        width: int,
        counts: SampleCounts,
        columns: Columns,
    ) -> PreparedData:
        tokenizer, labels = context._tokenizer, context._labels
        padding = {**self.padding, "input_ids": tokenizer.pad_id if tokenizer is not None else 0}
        stored = open_columns(folder, "training")
        batch = PaddedSamples(stored, collate=self.collate, width=width, padding=padding).rows([0])
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
        is_tokens = len(shapes.get("input_ids", ())) == 1
        image = shapes.get("pixel_values", ())
        plain = {} if self.label_role is not None else _num_values(folder)
        return PreparedData(
            name="",
            source="",
            digest=fingerprint(folder),
            num_samples=counts.num_samples["training"],
            num_held_out=counts.num_samples["held_out"],
            kind="tokens" if is_tokens else "images" if image else "other",
            vocab_size=tokenizer.vocab_size if tokenizer is not None else plain.get("input_ids"),
            end_of_text_id=None if tokenizer is None else tokenizer.end_id,
            pad_token_id=None if tokenizer is None else tokenizer.pad_id,
            seq_len=width if "input_ids" in shapes else None,
            num_labels=plain.get("labels") if labels is None else len(labels.names),
            labels=() if labels is None else labels.names,
            image_size=image[-1] if len(image) == 3 and image[-1] == image[-2] else None,
            num_channels=image[0] if len(image) == 3 else None,
            tensors=tuple(
                SampleTensor(name=name, dtype=str(batch[name].dtype).removeprefix("torch."), shape=shape)
                for name, shape in shapes.items()
            ),
            num_truncated=counts.num_truncated,
            num_left_out=counts.num_left_out,
            columns=tuple(sorted(columns.columns.items())),
        )

    def _documents(self, rows: Iterable[Row], spec: DataSpec, columns: Columns) -> Iterator[Document]:
        for row in rows:
            for text in self._texts(columns.by_role(row.content), spec):
                yield Document(content=text, held_out=row.held_out)

    def _texts(self, row: Mapping[str, Any], spec: DataSpec) -> Iterator[str]:
        try:
            texts = list(self.texts(row, spec=spec))
        except ValueError:  # a wrong row, which `sample` refuses with its place
            texts = []
        yield from (text for text in texts if isinstance(text, str))

    def _sample(self, row: Row, context: SampleContext, columns: Columns) -> dict[str, Array]:
        try:
            made = self.sample(columns.by_role(row.content), context=context)
        except ValueError as error:
            raise ValueError(f"{row.file}, row {row.number}: {error}") from error
        sample = {name: np.asarray(value) for name, value in made.items()}
        if "input_ids" in sample and not self.is_causal:
            sample.setdefault("attention_mask", np.ones_like(sample["input_ids"]))
        return sample


def _remedy(counts: SampleCounts, remedy: str) -> str:
    """What to do where a split has no sample."""
    return "raise seq_len, which cuts off all that is learnt" if counts.num_left_out else remedy


def _num_values(folder: Path) -> dict[str, int]:
    """One more than the largest value of integer labels, a number for each sample, and of token ids."""
    columns = [open_columns(folder, split) for split in ("training", "held_out")]
    found = {}
    for name, stored in (("labels", "labels"), ("input_ids", "input_ids.values")):
        parts = [part[stored] for part in columns if stored in part]
        if parts and parts[0].dtype.kind in "iu" and (name != "labels" or parts[0].ndim == 1):
            found[name] = 1 + max(int(part.max(initial=0)) for part in parts)
    return found


def _class_names(feature: Any) -> tuple[str, ...]:
    """The names of the classes that a `datasets` feature declares, of a label or of a list of labels."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _with_names(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [names[each] for each in value]
    return value if value is None or value < 0 else names[value]


def _rows_of_splits(splits: list[Any], spec: DataSpec, columns: Columns, where: str) -> Iterator[Row]:
    named = {name: names for name in columns.names if (names := _class_names(splits[0].features[name]))}
    for position, split in enumerate(splits):
        for index, row in enumerate(split.select_columns([*columns.names])):
            row |= {name: _with_names(row[name], names) for name, names in named.items()}
            is_of_held_out = position == 1 if len(splits) == 2 else is_held_out(f"row {index}", share=spec.held_out)
            content = columns.content(row, where)
            yield Row(file=where, number=index + 1, value=row, content=content, held_out=is_of_held_out)
