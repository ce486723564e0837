"""Prepares the data of rows: writes their samples into a folder, and describes them.

`write_rows` makes the samples of all rows. `write_kept` makes those of files whose samples are not kept yet, so that a
new file costs no other file's samples again. Kept are the samples of all rows of a file, or of a part of it, and the
`RowFacts` of each row. Classes that are found in the data are numbered as they come in the file, and get their final
numbers when files are put together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.errors import DataError
from ringmaster.techniques.data.arrays import (
    ENDS,
    LABELS,
    VALUES,
    Array,
    ArrayWriter,
    ColumnReader,
    ColumnWriter,
    RaggedArray,
    RaggedWriter,
    SampleArrays,
    SampleForm,
    fingerprint,
    num_values,
    open_columns,
)
from ringmaster.techniques.data.cached_files import (
    SPLIT,
    CachedFile,
    FileStore,
    KnownFile,
    RowFacts,
    RowFactsBuilder,
    SelectedFile,
    content_of,
    manifest_of,
    needs_moments,
    selected_files,
)
from ringmaster.techniques.data.class_labels import (
    ClassLabels,
    DiscoveredClasses,
    check_no_indicators,
    check_number,
    in_order,
    notes_on,
    without_variants,
)
from ringmaster.techniques.data.file_rows import DataFile, RowReading, rows_of_file
from ringmaster.techniques.data.manifest import ManifestBuilder
from ringmaster.techniques.data.row_files import MAX_FAULTS, RowError, RowErrors
from ringmaster.techniques.data.row_kind import Columns, RowKind, SampleContext
from ringmaster.techniques.data.row_tokenizer import RowTokenizer, give_chat_template, give_padding_token
from ringmaster.techniques.data.sample_blocks import (
    BlockMaker,
    SampleBlock,
    SampleCounts,
    SampleError,
    SampleWriter,
    sample_error,
)
from ringmaster.techniques.data.samples import PaddedSamples
from ringmaster.techniques.data.stored_source import TextProgress
from ringmaster.techniques.data.tokens import TextDocument, encoder_of
from ringmaster.techniques.data.unfit_data import constant_fault, distinct_labels
from ringmaster.techniques.data_source import PreparedData, Row, SampleTensor
from ringmaster.techniques.job import DataSpec

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
            if is_trained and kind.reads_messages:
                give_chat_template(folder)
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
        vocab_size = num_values(folder, "input_ids.values") if self.kind.label_role is None else None
        has_numbers = labels is None and "labels" in stored and stored["labels"].ndim == 1
        prepared = PreparedData(
            name="",
            source="",
            digest=fingerprint(folder),
            num_samples=counts.num_samples["training"],
            num_held_out=counts.num_samples["held_out"],
            kind="tokens" if is_tokens else "images" if image else "other",
            vocab_size=tokenizer.vocab_size if tokenizer is not None else vocab_size,
            end_of_text_id=None if tokenizer is None else tokenizer.end_id,
            pad_token_id=None if tokenizer is None else tokenizer.pad_id,
            seq_len=width if "input_ids" in shapes else None,
            num_labels=num_values(folder, "labels") if has_numbers else None if labels is None else len(labels.names),
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

    def _documents(self, rows: Iterable[Row]) -> Iterator[TextDocument]:
        for row in rows:
            for text in self.kind.texts_to_encode(self.columns.by_role(row.content), spec=self.spec):
                yield TextDocument(content=text, held_out=row.held_out)


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
        progress=TextProgress("preparing", what="rows"),
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
    found, has_rows = DiscoveredClasses(column=column, classes=prepared.kind.classes), False
    faults: list[RowError] = []
    for row in rows:
        if row.held_out and prepared.has_separate_held_out:
            continue
        has_rows = True
        try:
            found.add(row.content[column])
        except DataError:
            raise
        except ValueError as error:
            faults.append(sample_error(row.file, row.number, str(error)))
            if len(faults) == MAX_FAULTS:
                break
    if faults:
        raise RowErrors(faults)
    return prepared.labels(found.names, has_rows=has_rows)


def _typical_lengths(samples: PaddedSamples) -> tuple[int, ...]:
    """The `PreparedData.lengths` of samples, of at most 65,536 of them."""
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(len(samples), 1 << 16)).astype(np.int64))
    return tuple(int(length) for length in np.quantile(samples.lengths(chosen), (0.5, 0.95), method="higher"))


def _remedy(counts: SampleCounts, remedy: str) -> str:
    """What to do where a split has no sample."""
    return "raise seq_len, which cuts off all that is learnt" if counts.num_left_out else remedy


# What chooses files and rows, and what batches are made of. The tokenizer is known by its content.
NOT_OF_SAMPLES = frozenset(
    {"path", "held_out_path", "held_out", "window", "time_column", "name", "version", "tokenizer"}
    | {"padding", "sampling", "packing"}
)
ROWS_PER_BLOCK = 2048
SAMPLES, CLASSES, ABOUT = "samples", "classes", "about.json"


@dataclass(frozen=True, kw_only=True)
class FileSamples(CachedFile):
    """The kept samples of a file. folder: with the samples.

    num_cut, has_sample: of each row, as in `SampleBlock`. faults: the rows of which no sample can be made.
    class_names: the classes that were found, in the order of their numbers in the file. classes: those of each row.
    """

    num_cut: NDArray[np.uint8]
    has_sample: NDArray[np.bool_]
    faults: tuple[SampleError, ...]
    class_names: tuple[str, ...]
    classes: RaggedArray

    def blocks(self, wanted: NDArray[np.bool_]) -> Iterator[tuple[slice, SampleBlock]]:
        """Yields the samples of blocks of rows, with the rows' places; only of blocks with rows that are wanted."""
        reader = ColumnReader(self.folder / SAMPLES, SPLIT)
        ragged = [name.removesuffix(ENDS) for name in reader.names if name.endswith(ENDS)]
        plain = [name for name in reader.names if not name.endswith((VALUES, ENDS))]
        before = np.concatenate(([0], np.cumsum(self.has_sample)))
        for first in range(0, len(wanted), ROWS_PER_BLOCK):
            rows = slice(first, min(first + ROWS_PER_BLOCK, len(wanted)))
            start, stop = int(before[rows.start]), int(before[rows.stop])
            if not wanted[rows].any():
                continue
            has_any = stop > start
            arrays = SampleArrays(
                ragged={name: _ragged(reader, name, start, stop) for name in ragged if has_any},
                plain={name: reader.rows(name, start, stop) for name in plain if has_any},
            )
            yield rows, SampleBlock(arrays=arrays, num_cut=self.num_cut[rows], has_sample=self.has_sample[rows])


def write_kept(prepared: PreparedRows, *, cache_dir: Path) -> PreparedData:
    """Writes the samples of files, and the manifest of named data; returns the description.

    The samples are those of `write_rows`. Files whose samples are kept are only read for their digests.
    """
    context = prepared.context(lambda: iter(()))
    store = FileStore(cache_dir, settings=_settings(prepared))
    files = selected_files(prepared.spec, _SampleReader(store, prepared, context).read)
    _check_rows(files)
    is_found = prepared.label_column is not None and not prepared.spec.labels
    if prepared.label_column is not None:
        labels = _found_in(files, prepared) if is_found else ClassLabels(prepared.spec.labels)
        context = replace(context, _labels=labels)
    with prepared.writer() as writer:
        for each in files:
            numbers = _final_numbers(each.kept, context.labels) if is_found else None
            for rows, block in each.kept.blocks(each.wanted):
                if numbers is not None:
                    block = replace(block, arrays=_renumbered(block.arrays, numbers, len(context.labels.names)))
                writer.add(block, held_out=each.held_out[rows], wanted=each.wanted[rows])
    if prepared.spec.name is not None:
        manifest_of(files).write(prepared.folder)
    store.remove_unused()
    return prepared.description(context, writer.counts)


def _check_rows(files: Sequence[SelectedFile[FileSamples]]) -> None:
    """Raises RowErrors, with the first few, where no sample can be made of rows that are wanted."""
    wrong = [
        fault.of_file(each.kept.file.path) for each in files for fault in each.kept.faults if each.wanted[fault.place]
    ]
    if wrong:
        raise RowErrors(wrong[:MAX_FAULTS])


class _SampleReader:
    """Returns the samples of files: those that a store keeps, or else those that it makes."""

    def __init__(self, store: FileStore, prepared: PreparedRows, context: SampleContext) -> None:
        self._store, self._prepared, self._context = store, prepared, context
        self._progress = TextProgress("preparing", what="rows")

    def read(self, known: KnownFile, is_windowed: bool) -> FileSamples:
        """Returns the samples of a file. is_windowed: whether a window chooses among its rows."""
        spec, file = self._prepared.spec, replace(known.file, held_out=False)
        with_moments = is_windowed and needs_moments(spec)
        key = {"file": known.digest, "time_column": spec.time_column if with_moments else None}
        folder = self._store.folder_of(
            key, lambda aside: self._write(aside, file, with_moments=with_moments, keeps_faults=is_windowed)
        )
        reader, facts = ColumnReader(folder, SPLIT), RowFacts.read(folder)
        about = json.loads((folder / ABOUT).read_text())
        has_classes = CLASSES + ENDS in reader.names
        return FileSamples(
            file=known.file,
            folder=folder,
            facts=facts,
            num_cut=reader.rows("num_cut", 0, len(facts)),
            has_sample=reader.rows("has_sample", 0, len(facts)),
            faults=tuple(SampleError(**fault) for fault in about["faults"]),
            class_names=tuple(about["classes"]),
            classes=_ragged(reader, CLASSES, 0, len(facts)) if has_classes else RaggedArray.of([np.empty(0, np.int32)]),
        )

    def _write(self, folder: Path, file: DataFile, *, with_moments: bool, keeps_faults: bool) -> None:
        prepared, context = self._prepared, self._context
        kind, spec = prepared.kind, prepared.spec
        faults: list[SampleError] = []
        form, found = prepared.form, None
        if (column := prepared.label_column) is not None:
            found = None if spec.labels else DiscoveredClasses(column=column, classes=kind.classes)
            context = replace(context, _labels=ClassLabels(spec.labels) if found is None else found)
            form = replace(form, has_indicators_of_found_classes=found is not None)
        maker = BlockMaker(
            kind,
            columns=prepared.columns,
            context=context,
            form=form,
            progress=self._progress,
            faults=faults if keeps_faults else None,
        )
        reading = RowReading(columns=prepared.columns.names, content=prepared.columns.content)
        facts = RowFactsBuilder(with_moments=with_moments, time_column=spec.time_column)
        (folder / SAMPLES).mkdir()
        with ColumnWriter(folder / SAMPLES) as samples, ColumnWriter(folder) as columns:
            writer, ragged = ArrayWriter(samples, form), RaggedWriter(columns)
            columns.append(SPLIT, {"num_cut": np.empty(0, np.uint8), "has_sample": np.empty(0, bool)})
            for chunk, block in maker.blocks(kind.with_columns(rows_of_file(file, spec, reading))):
                for row in chunk:
                    facts.add_row(row)
                    facts.add_content(row.content)
                writer.append(SPLIT, block.arrays)
                columns.append(SPLIT, {"num_cut": block.num_cut, "has_sample": block.has_sample})
                if block.classes is not None:
                    ragged.append(SPLIT, CLASSES, block.classes)
            columns.append(SPLIT, facts.columns())
        about = {"faults": [asdict(fault) for fault in faults], "classes": [] if found is None else found.names}
        (folder / ABOUT).write_text(json.dumps(about))


def _settings(prepared: PreparedRows) -> dict[str, Any]:
    """What the samples of a file depend on besides its content."""
    kind, spec, tokenizer = prepared.kind, prepared.spec, prepared.folder / "tokenizer"
    return {
        "kind": [f"{type(kind).__module__}:{type(kind).__qualname__}", kind.version],
        "columns": prepared.columns.columns,
        "spec": {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in NOT_OF_SAMPLES},
        "tokenizer": content_of(tokenizer) if tokenizer.exists() else None,
    }


def _found_in(files: Sequence[SelectedFile[FileSamples]], prepared: PreparedRows) -> ClassLabels:
    """The classes in the rows that are read; only in those to train on, where others are held out separately."""
    names: set[str] = set()
    names_of: list[tuple[DataFile, set[str]]] = []
    defining = [each for each in files if not (prepared.has_separate_held_out and each.held_out.all())]
    for each in files:
        numbers = np.unique(each.kept.classes.chosen(each.wanted).values) if len(each.wanted) else ()
        of_file = {each.kept.class_names[number] for number in numbers}
        names_of.append((each.kept.file, of_file))
        if any(each is one for one in defining):
            names |= of_file
    labels = prepared.labels(names, has_rows=any(each.wanted.any() for each in defining))
    unknown = (
        fault
        for file, of_file in names_of
        if not of_file <= set(labels.names)
        for fault in _unknown_labels(file, prepared, labels)
    )
    if faults := list(islice(unknown, MAX_FAULTS)):
        raise RowErrors(faults)
    return labels


def _unknown_labels(file: DataFile, prepared: PreparedRows, labels: ClassLabels) -> Iterator[RowError]:
    """Yields the rows of a file with a class that is none of `labels`."""
    kind, spec, column = prepared.kind, prepared.spec, prepared.label_column
    assert column is not None
    reading = RowReading(columns=prepared.columns.names, content=prepared.columns.content)
    for row in kind.with_columns(rows_of_file(file, spec, reading)):
        try:
            for value in kind.classes(row.content[column]):
                labels.number(value)
        except ValueError as error:
            yield sample_error(row.file, row.number, str(error))


def _final_numbers(kept: FileSamples, labels: ClassLabels) -> NDArray[np.int64]:
    """The final numbers of a file's classes; that of a class which no row in the window has does not matter."""
    final = {name: number for number, name in enumerate(labels.names)}
    return np.array([final.get(name, 0) for name in kept.class_names] or [0], dtype=np.int64)


def _renumbered(arrays: SampleArrays, numbers: NDArray[np.int64], num_classes: int) -> SampleArrays:
    """Arrays whose labels have the final numbers of classes; labels below 0 do not count and stay as they are."""

    def final(values: Array) -> Array:
        changed: Array = np.where(values < 0, values, numbers[np.maximum(values, 0)]).astype(values.dtype)
        return changed

    ragged, plain = dict(arrays.ragged), dict(arrays.plain)
    if LABELS in plain:
        plain[LABELS] = final(plain[LABELS])
    if LABELS in ragged and ragged[LABELS].values.dtype.kind == "f":
        plain[LABELS] = _indicators(ragged.pop(LABELS), numbers, num_classes)
    elif LABELS in ragged:
        ragged[LABELS] = RaggedArray(final(ragged[LABELS].values), ragged[LABELS].lengths)
    return SampleArrays(ragged=ragged, plain=plain)


def _indicators(found: RaggedArray, numbers: NDArray[np.int64], num_classes: int) -> Array:
    """Indicators of the final classes from those of the classes that were known when a row was read."""
    rows, firsts = np.repeat(np.arange(len(found)), found.lengths), np.cumsum(found.lengths) - found.lengths
    places = np.arange(len(rows)) - np.repeat(firsts, found.lengths)
    has = found.values > 0
    indicators = np.zeros((len(found), num_classes), dtype=found.values.dtype)
    indicators[rows[has], numbers[places[has]]] = 1
    return indicators


def _ragged(reader: ColumnReader, name: str, start: int, stop: int) -> RaggedArray:
    """Reads rows of a ragged column."""
    before = int(reader.rows(name + ENDS, start - 1, start)[0]) if start else 0
    ends = reader.rows(name + ENDS, start, stop)
    lengths = np.diff(ends, prepend=before)
    return RaggedArray(reader.rows(name + VALUES, before, int(ends[-1]) if len(ends) else before), lengths)
