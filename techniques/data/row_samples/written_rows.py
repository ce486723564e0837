"""The prepared data of rows: their samples written into its folder, and its description."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ringmaster.errors import DataError
from ringmaster.techniques.data.arrays import ColumnWriter, fingerprint, open_columns
from ringmaster.techniques.data.encoding.documents import Document
from ringmaster.techniques.data.encoding.encoders import encoder_of
from ringmaster.techniques.data.encoding.progress import Progress
from ringmaster.techniques.data.manifest import ManifestBuilder
from ringmaster.techniques.data.row_samples.class_labels import (
    ClassLabels,
    FoundClasses,
    check_no_indicators,
    check_number,
    in_order,
    notes_on,
    without_variants,
)
from ringmaster.techniques.data.row_samples.ragged import PaddedSamples
from ringmaster.techniques.data.row_samples.row_columns import Columns
from ringmaster.techniques.data.row_samples.row_kind import RowKind, SampleContext
from ringmaster.techniques.data.row_samples.sample_arrays import SampleForm
from ringmaster.techniques.data.row_samples.sample_blocks import BlockMaker, sample_fault
from ringmaster.techniques.data.row_samples.sample_writer import SampleCounts, SampleWriter
from ringmaster.techniques.data.row_samples.tokenizer import RowTokenizer, give_padding_token
from ringmaster.techniques.data.rows import MAX_FAULTS, FaultyRows, RowFault
from ringmaster.techniques.data.training_faults import constant_fault, distinct_labels
from ringmaster.techniques.interface.data_source import PreparedData, Row, SampleTensor
from ringmaster.techniques.interface.job import DataSpec

DEFAULT_MAX_LENGTH = 1024
"""The most tokens of a sample where the spec names no `seq_len`, as in TRL's trainers."""


class PreparedRows:
    """Data that is being prepared in a folder. where: the data, in messages."""

    def __init__(self, folder: Path, *, kind: RowKind, spec: DataSpec, columns: Columns, where: str) -> None:
        self.folder, self.kind, self.spec, self.columns, self.where = folder, kind, spec, columns, where

    @property
    def form(self) -> SampleForm:
        """How samples are stored."""
        return SampleForm(
            what=f"{self.where}: samples of kind {self.kind.name}",
            ragged=frozenset(self.kind.padding),
            uncut=self.kind.uncut,
            max_length=self.spec.seq_len or DEFAULT_MAX_LENGTH,
        )

    def context(self, rows: Callable[[], Iterator[Row]]) -> SampleContext:
        """Returns what samples are made with, apart from classes. rows: those on which a tokenizer may be trained."""
        kind, spec, tokenizer = self.kind, self.spec, None
        if kind.needs_tokenizer:
            folder, is_trained = self.folder / "tokenizer", spec.tokenizer is None
            encoder_of(spec, self._documents(rows() if is_trained else ())).save(folder)
            if is_trained or not kind.is_causal:
                give_padding_token(folder)
            kind.prepare_tokenizer(folder, is_trained=is_trained)
            tokenizer = RowTokenizer(folder)
        return SampleContext(spec=spec, max_length=self.form.max_length, _tokenizer=tokenizer)

    @property
    def label_column(self) -> str | None:
        """The column with the classes, or None for kinds without classes."""
        return None if self.kind.label_role is None else self.columns.columns[self.kind.label_role]

    @property
    def has_separate_held_out(self) -> bool:
        """Whether rows of their own are held out: a class that training does not know is a mistake there."""
        return self.spec.held_out_path is not None or self.spec.held_out_split is not None

    def labels(self, names: Collection[str], *, has_rows: bool) -> ClassLabels:
        """Returns the classes that were found in rows. Raises ValueError where there are none, or too many."""
        assert self.label_column is not None
        if has_rows and not names:
            raise ValueError(
                f"{self.where}: no row has a class in column {self.label_column!r}. To fix: name another label_column, "
                "or list the classes as data.labels"
            )
        check_number(len(names), column=self.label_column)
        return in_order(without_variants(names))  # a variant is then the unknown label of a row

    @contextmanager
    def writer(self) -> Iterator[SampleWriter]:
        """Opens what writes the samples. Raises ValueError at its end where a split has none."""
        with ColumnWriter(self.folder) as columns:
            writer = SampleWriter(columns, form=self.form, packs=self.spec.packing)
            yield writer
            writer.close()
        counts = writer.counts
        if not counts.num_samples["training"]:
            remedy = _remedy(counts, "check the path, or lower held_out")
            raise ValueError(f"{self.where} holds no row to train on. To fix: {remedy}")
        if self.spec.held_out > 0 and not counts.num_samples["held_out"]:
            remedy = _remedy(counts, "raise held_out, or set it to 0")
            raise ValueError(f"{self.where} holds no row to evaluate on. To fix: {remedy}")

    def description(self, context: SampleContext, counts: SampleCounts) -> PreparedData:
        """Returns the description of what was written."""
        folder, columns, tokenizer, labels = self.folder, self.columns, context._tokenizer, context._labels
        width = context.max_length if self.spec.packing else self.spec.seq_len or counts.longest
        padding = {**self.kind.padding, "input_ids": tokenizer.pad_id if tokenizer is not None else 0}
        stored = open_columns(folder, "training")
        samples = PaddedSamples(stored, collate=self.kind.collate, width=width, padding=padding)
        batch = samples.rows([0])
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
        if labels is not None and not self.spec.labels and shapes.get("labels") == (2,):
            check_no_indicators(labels, column=self.label_column or "labels")
        is_tokens = len(shapes.get("input_ids", ())) == 1
        image = shapes.get("pixel_values", ())
        plain = {} if self.kind.label_role is not None else _num_values(folder)
        prepared = PreparedData(
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
            lengths=(width, width) if self.spec.packing else _typical_lengths(samples),
        )
        return self.kind.described(self._with_label_faults(prepared, labels))

    def _with_label_faults(self, prepared: PreparedData, labels: ClassLabels | None) -> PreparedData:
        """The description with what is wrong with the labels, or with the samples as a whole."""
        faults, notes = [*self.kind.training_faults(self.folder)], list[str]()
        if (column := self.columns.columns.get("label")) is not None:
            found = distinct_labels(self.folder, "training")
            classes = {int(number) for label in found for number in label} if labels is not None else set[int]()
            if len(found) == 1:
                names = [labels.names[number] for number in classes] if labels is not None else map(str, *found)
                faults.append(constant_fault(names, num_rows=prepared.num_samples, column=column))
            if labels is not None:
                notes += notes_on(labels, trained=classes, are_found=not self.spec.labels)
        return replace(prepared, training_faults=tuple(faults), notes=tuple(notes))

    def _documents(self, rows: Iterable[Row]) -> Iterator[Document]:
        for row in rows:
            for text in self.kind.texts_to_encode(self.columns.by_role(row.content), spec=self.spec):
                yield Document(content=text, held_out=row.held_out)


def write_rows(prepared: PreparedRows, rows: Callable[[], Iterator[Row]], *, is_named: bool) -> PreparedData:
    """Writes the samples of rows, and with `is_named` their manifest; returns the description.

    rows: returns the rows each time it is called.
    """
    context, manifest = prepared.context(rows), ManifestBuilder()
    if prepared.label_column is not None:
        context = replace(context, _labels=_classes(prepared, rows()))
    maker = BlockMaker(
        prepared.kind,
        columns=prepared.columns,
        context=context,
        form=prepared.form,
        progress=Progress("preparing", what="rows"),
    )
    with prepared.writer() as writer:
        for chunk, block in maker.blocks(rows()):
            writer.add(block, held_out=np.array([row.held_out for row in chunk]))
            for row in chunk if is_named else ():
                manifest.add(row.content, held_out=row.held_out)
    if is_named:
        manifest.built().write(prepared.folder)
    return prepared.description(context, writer.counts)


def _classes(prepared: PreparedRows, rows: Iterable[Row]) -> ClassLabels:
    """The named classes, else those found in the labels of rows."""
    column = prepared.label_column
    assert column is not None
    if prepared.spec.labels:
        return ClassLabels(prepared.spec.labels)
    found, has_rows = FoundClasses(column=column, classes=prepared.kind.classes), False
    faults: list[RowFault] = []
    for row in rows:
        if row.held_out and prepared.has_separate_held_out:
            continue
        has_rows = True
        try:
            found.add(row.content[column])
        except DataError:
            raise
        except ValueError as error:
            faults.append(sample_fault(row.file, row.number, str(error)))
            if len(faults) == MAX_FAULTS:
                break
    if faults:
        raise FaultyRows(faults)
    return prepared.labels(found.names, has_rows=has_rows)


def _typical_lengths(samples: PaddedSamples) -> tuple[int, ...]:
    """The `PreparedData.lengths` of samples, of at most 65,536 of them."""
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(len(samples), 1 << 16)).astype(np.int64))
    return tuple(int(length) for length in np.quantile(samples.lengths(chosen), (0.5, 0.95), method="higher"))


def _num_values(folder: Path) -> dict[str, int]:
    """One more than the largest value of integer labels, a number for each sample, and of token ids."""
    columns = [open_columns(folder, split) for split in ("training", "held_out")]
    found = {}
    for name, stored in (("labels", "labels"), ("input_ids", "input_ids.values")):
        parts = [part[stored] for part in columns if stored in part]
        if parts and parts[0].dtype.kind in "iu" and (name != "labels" or parts[0].ndim == 1):
            found[name] = 1 + max(int(part.max(initial=0)) for part in parts)
    return found


def _remedy(counts: SampleCounts, remedy: str) -> str:
    """What to do where a split has no sample."""
    return "raise seq_len, which cuts off all that is learnt" if counts.num_left_out else remedy
