"""The samples of single files under given settings, kept so that data with new files makes only the samples of these.

Kept are the samples of all rows of a file, or of a part of it, and of each row its `RowFacts`. Classes that are found
in the data are numbered as they come in the file, and get their final numbers when files are put together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import Array, ColumnReader, ColumnWriter
from ringmaster.techniques.data.encoding.progress import Progress
from ringmaster.techniques.data.file_cache.chosen_files import (
    ChosenFile,
    chosen_files,
    manifest_of,
    needs_moments,
)
from ringmaster.techniques.data.file_cache.parts import KnownFile
from ringmaster.techniques.data.file_cache.row_facts import SPLIT, RowFacts, RowFactsBuilder
from ringmaster.techniques.data.file_cache.store import FileStore, content_of
from ringmaster.techniques.data.file_rows import DataFile, Reading, rows_of_file
from ringmaster.techniques.data.row_samples.class_labels import (
    ClassLabels,
    FoundClasses,
)
from ringmaster.techniques.data.row_samples.ragged import ENDS, VALUES, Ragged, RaggedWriter
from ringmaster.techniques.data.row_samples.row_kind import SampleContext
from ringmaster.techniques.data.row_samples.sample_arrays import LABELS, ArrayWriter, SampleArrays
from ringmaster.techniques.data.row_samples.sample_blocks import (
    BlockMaker,
    SampleBlock,
    SampleFault,
    sample_fault,
)
from ringmaster.techniques.data.row_samples.written_rows import PreparedRows
from ringmaster.techniques.data.rows import MAX_FAULTS, FaultyRows, RowFault
from ringmaster.techniques.interface.data_source import PreparedData

# What chooses files and rows, and what batches are made of. The tokenizer is known by its content.
NOT_OF_SAMPLES = frozenset(
    {"path", "held_out_path", "held_out", "window", "time_column", "name", "version", "tokenizer"}
    | {"padding", "sampling", "packing"}
)
ROWS_PER_BLOCK = 2048
SAMPLES, CLASSES, ABOUT = "samples", "classes", "about.json"


@dataclass(frozen=True, kw_only=True)
class FileSamples:
    """What is kept of a file. folder: with the samples.

    num_cut, has_sample: of each row, as in `SampleBlock`. faults: the rows of which no sample can be made.
    class_names: the classes that were found, in the order of their numbers in the file. classes: those of each row.
    """

    file: DataFile
    folder: Path
    facts: RowFacts
    num_cut: NDArray[np.uint8]
    has_sample: NDArray[np.bool_]
    faults: tuple[SampleFault, ...]
    class_names: tuple[str, ...]
    classes: Ragged

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
    files = chosen_files(prepared.spec, _SampleReader(store, prepared, context).read)
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


def _check_rows(files: Sequence[ChosenFile[FileSamples]]) -> None:
    """Raises FaultyRows, with the first few, where no sample can be made of rows that are wanted."""
    wrong = [
        fault.of_file(each.kept.file.path) for each in files for fault in each.kept.faults if each.wanted[fault.place]
    ]
    if wrong:
        raise FaultyRows(wrong[:MAX_FAULTS])


class _SampleReader:
    """Returns the samples of files: those that a store keeps, or else those that it makes."""

    def __init__(self, store: FileStore, prepared: PreparedRows, context: SampleContext) -> None:
        self._store, self._prepared, self._context = store, prepared, context
        self._progress = Progress("preparing", what="rows")

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
            faults=tuple(SampleFault(**fault) for fault in about["faults"]),
            class_names=tuple(about["classes"]),
            classes=_ragged(reader, CLASSES, 0, len(facts)) if has_classes else Ragged.of([np.empty(0, np.int32)]),
        )

    def _write(self, folder: Path, file: DataFile, *, with_moments: bool, keeps_faults: bool) -> None:
        prepared, context = self._prepared, self._context
        kind, spec = prepared.kind, prepared.spec
        faults: list[SampleFault] = []
        form, found = prepared.form, None
        if (column := prepared.label_column) is not None:
            found = None if spec.labels else FoundClasses(column=column, classes=kind.classes)
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
        reading = Reading(columns=prepared.columns.names, content=prepared.columns.content)
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


def _found_in(files: Sequence[ChosenFile[FileSamples]], prepared: PreparedRows) -> ClassLabels:
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
        raise FaultyRows(faults)
    return labels


def _unknown_labels(file: DataFile, prepared: PreparedRows, labels: ClassLabels) -> Iterator[RowFault]:
    """Yields the rows of a file with a class that is none of `labels`."""
    kind, spec, column = prepared.kind, prepared.spec, prepared.label_column
    assert column is not None
    reading = Reading(columns=prepared.columns.names, content=prepared.columns.content)
    for row in kind.with_columns(rows_of_file(file, spec, reading)):
        try:
            for value in kind.classes(row.content[column]):
                labels.number(value)
        except ValueError as error:
            yield sample_fault(row.file, row.number, str(error))


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
        ragged[LABELS] = Ragged(final(ragged[LABELS].values), ragged[LABELS].lengths)
    return SampleArrays(ragged=ragged, plain=plain)


def _indicators(found: Ragged, numbers: NDArray[np.int64], num_classes: int) -> Array:
    """Indicators of the final classes from those of the classes that were known when a row was read."""
    rows, firsts = np.repeat(np.arange(len(found)), found.lengths), np.cumsum(found.lengths) - found.lengths
    places = np.arange(len(rows)) - np.repeat(firsts, found.lengths)
    has = found.values > 0
    indicators = np.zeros((len(found), num_classes), dtype=found.values.dtype)
    indicators[rows[has], numbers[places[has]]] = 1
    return indicators


def _ragged(reader: ColumnReader, name: str, start: int, stop: int) -> Ragged:
    """Reads rows of a ragged column."""
    before = int(reader.rows(name + ENDS, start - 1, start)[0]) if start else 0
    ends = reader.rows(name + ENDS, start, stop)
    lengths = np.diff(ends, prepend=before)
    return Ragged(reader.rows(name + VALUES, before, int(ends[-1]) if len(ends) else before), lengths)
