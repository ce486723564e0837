"""The samples of rows: encoded part by part, chosen for both splits, and described.

Classes that are found in the data are numbered as they come in a part of a file, and get their final numbers when parts
are put together.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.codec import to_json
from ringmaster.errors import DataError
from ringmaster.techniques.data import arrow_files, class_labels, encoded_rows, sample_checks
from ringmaster.techniques.data.file_rows import RowReading
from ringmaster.techniques.data.row_files import (
    MAX_FAULTS,
    RowError,
    RowErrors,
)
from ringmaster.techniques.data.row_kind import (
    LABEL,
    NOTHING,
    Columns,
    RowKind,
    SampleContext,
)
from ringmaster.techniques.data.row_tokenizer import RowTokenizer, complete_tokenizer
from ringmaster.techniques.data.samples import PaddedSamples, Sample, lengths_of, packed
from ringmaster.techniques.data.stored_source import TextProgress, described, note_on_unread
from ringmaster.techniques.data.tokenizer_folders import save_tokenizer
from ringmaster.techniques.data_source import PreparedData, Row, shown
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.models.model_folders import config_in

DEFAULT_MAX_LENGTH = 1024
"""The most tokens of a sample where the spec names no `seq_len`, as in TRL's trainers."""
# What chooses files and rows, and what batches are made of. The tokenizer is known by its content.
NOT_OF_SAMPLES = frozenset(
    {"path", "held_out_path", "held_out", "window", "time_column", "name", "version", "tokenizer"}
    | {"padding", "sampling", "packing", "original_path", "original_held_out_path"}
)
PADDED_ON_THE_LEFT = ("xlnet",)
"""The `model_type` of models whose classifiers read the last token of a batch, whatever row it is of."""
SAMPLES_OF_LENGTHS = 1 << 16
# How many rows after the first one without a sample are searched for others.
ROWS_AFTER_A_FAULT = 10_000
ABOUT = "about.json"


class RowSamples:
    """Data that is being prepared in a folder.

    rows: returns the rows, each time it is called. where: the data, in messages. cache_dir: where the samples of single
    files are kept; None where they depend on all rows.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: RowKind,
        spec: DataSpec,
        columns: Columns,
        where: str,
        rows: Callable[[], Iterator[Row]],
        cache_dir: Path | None,
    ) -> None:
        self._folder, self._kind, self._spec, self._columns, self._where = folder, kind, spec, columns, where
        self._rows, self._cache_dir = rows, cache_dir
        # The folder of a tokenizer is mostly that of the model, whose limits and padding are then known here.
        reads_model = spec.tokenizer is not None and kind.needs_tokenizer and not kind.is_causal
        self._config = config_in(str(spec.tokenizer)) if reads_model else None
        self._most_read: int | None
        self._most_read, self._who_reads = kind.most_tokens(spec) or (None, "")
        self._max_length = spec.seq_len or self._default_length()
        self._progress = TextProgress("preparing", what="rows")
        self._options = kind.options(spec)
        self._label_column = columns.columns[LABEL] if kind.has_classes else None
        self._labels: tuple[str, ...] = self._options.labels if kind.has_classes else ()
        self._finds_classes = kind.has_classes and not self._labels
        self._context = self._with_tokenizer()

    def _default_length(self) -> int:
        """The most tokens of a sample where the spec names none: those that the tokenizer's model reads.

        Rows of causal models are not cut to it, as their answers come last.
        """
        limits = (DEFAULT_MAX_LENGTH, self._most_read, num_positions(self._config))
        return min(each for each in limits if each is not None)

    def write(self) -> PreparedData:
        """Writes the samples, and the manifest of named data; returns the description."""
        spec, blocks = self._spec, iter([encoded_rows.RowBlock(rows=self._rows)])
        if self._cache_dir is not None:
            reading = RowReading(columns=self._columns.needed, content=self._columns.content)
            blocks = encoded_rows.blocks_of_files(spec, reading)
        with encoded_rows.encoded_blocks(
            blocks, spec, self._encode, folder=self._folder, cache_dir=self._cache_dir, settings=self._settings()
        ) as selected:
            self._check_rows(selected)
            labels = None if self._label_column is None else class_labels.ClassLabels(self._labels)
            if self._finds_classes:
                labels = self._learnt_classes(selected)
            lengths = self._write_selected(selected, labels)
            prepared = self._with_content_faults(self._described(labels, lengths), selected)
            return replace(
                prepared,
                num_truncated=sum(int(each.column("num_cut")[each.wanted].sum()) for each in selected),
                num_left_out=sum(map(_num_left_out, selected)),
                notes=(*prepared.notes, *encoded_rows.notes_on_written(selected), *self._remarks(selected)),
            )

    def _remarks(self, blocks: Sequence[encoded_rows.EncodedBlock]) -> Iterator[str]:
        """Yields what users should know of some rows, with how many there are."""
        given = (each.facts["remark"].filter(each.wanted).drop_null().to_pylist() for each in blocks)
        for remark, number in Counter(chain.from_iterable(given)).items():
            yield f"{number:,} {'row' if number == 1 else 'rows'}: {remark}"
        if self._kind.reads_messages:
            remarks = np.concatenate([each.column("remarks")[each.wanted] for each in blocks])
            yield from self._context.tokenizer.template.notes(remarks)

    def _with_tokenizer(self) -> SampleContext:
        """What samples are made with, apart from classes."""
        kind, spec = self._kind, self._spec
        context = SampleContext(spec=spec, options=self._options, max_length=self._max_length)
        if kind.needs_tokenizer:
            folder, is_trained = self._folder / "tokenizer", spec.tokenizer is None
            trained = (self._columns.by_role(row.content) for row in self._rows() if not row.held_out)
            texts = chain.from_iterable(self._texts(row, context) for row in trained)
            save_tokenizer(folder, spec, texts, set_up=partial(kind.set_up_tokenizer, options=self._options))
            has_padding, has_chat_template = is_trained or not kind.is_causal, is_trained and kind.reads_messages
            if has_padding or has_chat_template:
                pad_id = getattr(self._config, "pad_token_id", None)
                complete_tokenizer(folder, has_padding=has_padding, has_chat_template=has_chat_template, pad_id=pad_id)
            context = replace(context, _tokenizer=RowTokenizer(folder))
        return context

    def _texts(self, row: Mapping[str, Any], context: SampleContext) -> list[str]:
        """The texts of a row; none of a wrong row, which `sample` refuses with its place."""
        try:
            return [text for text in self._kind.texts(row, context=context) if isinstance(text, str)]
        except ValueError:
            return []

    def _settings(self) -> dict[str, Any]:
        """What the samples of a file depend on besides its content."""
        kind, spec, tokenizer = self._kind, self._spec, self._folder / "tokenizer"
        return {
            "kind": [f"{type(kind).__module__}:{type(kind).__qualname__}", kind.version, *kind.code],
            "columns": self._columns.columns,
            "spec": {name: value for name, value in to_json(spec).items() if name not in NOT_OF_SAMPLES},
            "tokenizer": encoded_rows.content_of(tokenizer) if tokenizer.exists() else None,
            "max_length": self._max_length,
            **({} if self._context.retriever is None else {"store": self._context.retriever.digest}),
        }

    def _refused(self, error: Exception) -> ValueError:
        """What is to be raised for samples that differ."""
        what = f"{self._where}: samples of kind {self._kind.name}"
        return ValueError(f"{what} differ in shape: {error}. To fix: give all rows one shape")

    # Encoding rows

    def _encode(self, folder: Path, block: encoded_rows.RowBlock) -> None:
        """Writes the samples of the rows of a part. Raises RowErrors where they are wrong; later where in a window."""
        discovered = class_labels.DiscoveredClasses(column=self._label_column or LABEL, classes=self._kind.classes)
        classes = discovered if self._finds_classes else None
        context = replace(self._context, labels=classes or class_labels.ClassLabels(self._labels))
        faults: list[RowError] = []
        num_searched = num_before = 0
        rows, unreadable = block.rows(), None
        with (
            arrow_files.ArrowWriter(folder / encoded_rows.SAMPLES, refused=self._refused) as samples,
            arrow_files.ArrowWriter(folder / encoded_rows.ROWS) as known,
        ):
            while unreadable is None:
                chunk: list[Row] = []
                try:
                    chunk.extend(islice(rows, self._kind.rows_at_once))
                except RowErrors as error:  # those before it are reported with it
                    unreadable = error
                table, wrong, facts = self._samples(chunk, context, classes, num_before=num_before)
                num_before += 1
                if table.num_rows:
                    samples.write(table)
                # At once: a million lists of classes would slow down Python's collector.
                known.write(arrow_files.table_of({**encoded_rows.row_facts(chunk, block, self._spec), **facts}))
                if not block.is_windowed:
                    pairs = zip(chunk, wrong, strict=True)
                    faults += [sample_error(row.file, row.number, what) for row, what in pairs if what is not None]
                num_searched += len(chunk) if faults else 0
                if not chunk or len(faults) >= MAX_FAULTS or num_searched > ROWS_AFTER_A_FAULT:
                    break
        if faults or unreadable:
            raise RowErrors([*faults, *(unreadable.faults if unreadable else ())][:MAX_FAULTS]) from unreadable
        (folder / ABOUT).write_text(json.dumps({"classes": () if classes is None else classes.names}))

    def _samples(
        self,
        rows: Sequence[Row],
        context: SampleContext,
        classes: class_labels.DiscoveredClasses | None,
        *,
        num_before: int,
    ) -> tuple[arrow_files.Table, Sequence[str | None], dict[str, Any]]:
        """Returns the samples of rows, what is wrong with each row, and what else is known of each, as columns.

        num_before: how often rows of the part were read before.
        """
        kind = self._kind
        by_role = kind.with_passages(
            [kind.values(row, self._columns, spec=self._spec) for row in rows], context=self._context
        )
        self._prefetch(by_role)
        made: list[Mapping[str, Any]] = []
        compared = set(sample_checks.compared_places(len(rows), num_before=num_before))
        num_cut, has_sample = np.zeros(len(rows), np.uint8), np.zeros(len(rows), bool)
        is_written = np.zeros(len(rows), np.uint8)
        remarks = np.zeros(len(rows), np.uint8)
        faults: list[str | None] = [None] * len(rows)
        odd: list[str | None] = [None] * len(rows)
        numbers: list[list[int]] = [[] for _ in rows]
        for place, values in enumerate(by_role):
            num_cut_before, num_written_before = context.num_cut, context.num_written
            try:
                if classes is not None:
                    numbers[place] = classes.add(values[LABEL])
                sample = kind.sample(values, context=context)
                if place in compared and (reference := kind.reference(values, context=context)) is not None:
                    sample_checks.check_equal(sample, reference, max_length=context.max_length)
                made.append(sample)
            except DataError:
                raise
            except ValueError as error:
                faults[place] = str(error)
                context.take_remarks()
                continue
            num_cut[place] = context.num_cut > num_cut_before
            is_written[place] = context.num_written > num_written_before
            has_sample[place] = True
            remarks[place], odd[place] = context.take_remarks(), kind.remark(values, context=context)
            odd[place] = odd[place] or self._late_columns(rows[place])
        table, is_cut, is_learnt = self._table(made)
        content = self._content_facts(table, [by_role[place] for place in np.flatnonzero(has_sample)], has_sample)
        has_sample[has_sample] = is_learnt
        num_cut[has_sample] += is_cut[is_learnt]
        num_classes = np.fromiter(map(len, numbers), np.int64, count=len(numbers))
        facts = {
            "num_cut": num_cut,
            encoded_rows.WRITTEN: is_written,
            "remarks": remarks,
            "has_sample": has_sample.astype(np.uint8),
            **content,
            "remark": arrow_files.texts_column(odd),
            "fault": arrow_files.texts_column(faults),
            "classes": arrow_files.column_of(np.fromiter(chain.from_iterable(numbers), np.int32), num_classes),
        }
        return table if is_learnt.all() else table.filter(is_learnt), faults, facts

    @cached_property
    def _known_columns(self) -> frozenset[Any]:
        """The columns that are read, or that a note or a message names where they are not."""
        columns = self._columns
        return frozenset((*columns.needed, *columns.unread, *self._options.ignored_columns, self._spec.time_column))

    def _late_columns(self, row: Row) -> str | None:
        """What people should know of a row with columns that the first row lacks, and that are not read."""
        read = row.value if isinstance(row.value, Mapping) else {}
        late = [name for name in read.keys() - self._known_columns if read[name] not in NOTHING]
        return f"columns that the first row lacks are not read: {shown(sorted(late))}" if late else None

    def _content_facts(
        self, table: arrow_files.Table, sources: Sequence[Mapping[str, Any]], has_sample: NDArray[np.bool_]
    ) -> dict[str, Any]:
        """What is known of the content of samples, as columns of all rows; 0 for rows without one."""
        without_label = [{role: value for role, value in each.items() if role != LABEL} for each in sources]
        facts = sample_checks.content_facts(table, without_label, tokenizer=self._context._tokenizer)
        result = {name: np.zeros(len(has_sample), values.dtype) for name, values in facts.items()}
        for name, values in facts.items():
            result[name][has_sample] = values
        return result

    def _prefetch(self, by_role: Sequence[Mapping[str, Any]]) -> None:
        """Encodes the texts of rows together, and reports them."""
        texts: list[str] = []
        if self._kind.needs_tokenizer and self._kind.encodes_texts:
            texts = [text for row in by_role for text in self._texts(row, self._context)]
            self._context.tokenizer.prefetch(texts)
        self._progress.add(sum(map(len, texts)), num_texts=len(by_role))

    def _table(
        self, samples: Sequence[Mapping[str, Any]]
    ) -> tuple[arrow_files.Table, NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns samples as a table, which of them were cut, and in which a language model has labels to learn.

        Raises ValueError where names or shapes differ.
        """
        columns = dict[str, Any]()
        is_cut, is_learnt = np.zeros(len(samples), bool), np.ones(len(samples), bool)
        has_mask = self._kind.is_causal
        try:
            for name in samples[0] if samples else ():
                rows = [np.asarray(sample[name]) for sample in samples]
                first = rows[0]
                has_mask |= name == arrow_files.MASK
                if self._finds_classes and name == arrow_files.LABELS and first.dtype.kind == "f":
                    continue  # indicators of the classes that were found so far: they are made of those of all rows
                is_wave = first.dtype.kind == "f" and first.size > 0 and name not in RowKind.padding
                is_list = first.ndim > 0 and (first.dtype.kind in "biu" or first.size == 0 or is_wave)  # [] has floats
                if not is_list or name not in self._kind.padding:
                    dtype = None if first.ndim else first.dtype
                    columns[name] = arrow_files.column_of(np.stack(rows, dtype=dtype, casting="unsafe"))
                    continue
                lengths = np.fromiter((row.shape[-1] for row in rows), np.int64, count=len(rows))
                is_cut_here = self._kind.cuts and name not in self._kind.uncut and first.dtype.kind != "f"
                if is_cut_here and lengths.max() > self._max_length:
                    is_cut |= lengths > self._max_length
                    rows = [row[..., : self._max_length] for row in rows]
                    lengths = np.minimum(lengths, self._max_length)
                flat = rows if first.ndim == 1 else [np.moveaxis(row, -1, 0) for row in rows]
                # 32 bits for tokens, which Python makes numbers of 64, and for empty lists.
                is_small = first.dtype.kind in "iu" and first.dtype.itemsize < 4
                is_kept = is_small or is_wave
                values = np.concatenate(flat, dtype=first.dtype if is_kept else np.int64, casting="unsafe")
                values = values if is_kept else self._in_32_bits(values, name)
                if self._kind.is_causal and name == arrow_files.LABELS:  # without one, a batch has no mean loss
                    is_learnt = _has_labels(values, lengths)
                columns[name] = arrow_files.column_of(values, lengths)
            if len(samples) and (others := set().union(*samples) - samples[0].keys()):
                raise KeyError(min(others))
        except DataError:
            raise
        except (ValueError, KeyError, IndexError) as error:
            raise self._refused(error) from error
        if not has_mask and arrow_files.TOKENS in columns:  # all tokens of a sample are read
            values, lengths_of_rows = arrow_files.values_of(columns[arrow_files.TOKENS])
            columns[arrow_files.MASK] = arrow_files.column_of(np.ones(values.shape, np.uint8), lengths_of_rows)
        return arrow_files.table_of(columns), is_cut, is_learnt

    def _in_32_bits(self, values: arrow_files.Array, name: str) -> arrow_files.Array:
        """Returns whole numbers in 32 bits. Raises DataError where they do not fit."""
        bounds = np.iinfo(np.int32)
        if values.min(initial=0) < bounds.min or values.max(initial=0) > bounds.max:
            raise DataError(f"{self._where}: {name} has numbers of more than 32 bits. To fix: check the column of ids")
        return values.astype(np.int32)

    # Choosing samples

    def _check_rows(self, blocks: Sequence[encoded_rows.EncodedBlock]) -> None:
        """Raises RowErrors, with the first few, where no sample can be made of rows that are wanted."""
        wrong: list[RowError] = []
        for each in blocks:
            faults = each.facts["fault"]
            if faults.null_count < len(faults):
                wrong += [
                    sample_error(*each.place(row), faults[row].as_py())
                    for row in np.flatnonzero(each.wanted & faults.is_valid().to_numpy())[:MAX_FAULTS].tolist()
                ]
        if wrong:
            raise RowErrors(wrong[:MAX_FAULTS])

    def _learnt_classes(self, blocks: Sequence[encoded_rows.EncodedBlock]) -> class_labels.ClassLabels:
        """The classes in the rows that are read; only in those to train on, where others are held out separately.

        A class that training does not know is a mistake there. Raises ValueError where there are none, or too many.
        """
        column, names, has_rows = self._label_column, set[str](), False
        assert column is not None
        is_separate = self._spec.held_out_path is not None or self._spec.held_out_split is not None
        for each in blocks:
            defining = each.split("training") if is_separate else each.wanted
            has_rows |= bool(defining.any())
            numbers, _ = arrow_files.values_of(each.facts["classes"].filter(defining))
            known = _classes_of(each)
            names |= {known[number] for number in np.unique(numbers)}
        if has_rows and not names:
            raise ValueError(
                f"{self._where}: no row has a class in column {column!r}. To fix: name another label_column, "
                "or list the classes as data.labels"
            )
        class_labels.check_number(len(names), column=column)
        # A variant is then the unknown label of a row.
        labels = class_labels.in_order(class_labels.without_variants(names))
        unknown = (fault for each in blocks for fault in _unknown_classes(each, labels))
        if faults := list(islice(unknown, MAX_FAULTS)):
            raise RowErrors(faults)
        return labels

    def _write_selected(
        self, blocks: Sequence[encoded_rows.EncodedBlock], labels: class_labels.ClassLabels | None
    ) -> dict[str, list[NDArray[np.int64]]]:
        """Writes the samples; returns the lengths of those of each split. Raises ValueError where one has none."""
        lengths: dict[str, list[NDArray[np.int64]]] = {split: [] for split in arrow_files.SPLITS}
        with ExitStack() as files:
            writers = {
                split: files.enter_context(
                    arrow_files.ArrowWriter(arrow_files.split_file(self._folder, split), refused=self._refused)
                )
                for split in arrow_files.SPLITS
            }

            def written() -> Iterator[Sample]:
                """Writes all samples but those that are packed, which it yields."""
                known: dict[Any, Any] = {}  # the type of each column, and the row that has it first
                for split, table, row in chain.from_iterable(self._selected(each, labels) for each in blocks):
                    for field in table.schema:
                        of = field.name == arrow_files.LABELS or split  # labels are alike in both splits
                        type, first = known.setdefault((of, field.name), (field.type, row))
                        if field.type != type:
                            raise RowErrors([sample_error(*row, _other_form(field, type, first))])
                    lengths[split].append(lengths_of(table, uncut=self._kind.uncut))
                    if self._spec.packing and split == "training":
                        yield from _rows_of(table)
                    else:
                        writers[split].write(table)

            for rows in packed(written(), width=self._max_length):
                writers["training"].write(self._table(rows)[0])
        for split, use, remedy in (
            ("training", "train", "check the path, or lower held_out"),
            ("held_out", "evaluate", "raise held_out, or set it to 0"),
        ):
            if not lengths[split] and (split == "training" or self._spec.held_out > 0):
                if any(map(_num_left_out, blocks)):
                    remedy = "raise seq_len, which cuts off all that is learnt"
                raise ValueError(f"{self._where} holds no row to {use} on. To fix: {remedy}")
        return lengths

    def _selected(
        self, block: encoded_rows.EncodedBlock, labels: class_labels.ClassLabels | None
    ) -> Iterator[tuple[str, arrow_files.Table, tuple[str, int]]]:
        """Yields the samples of a part that are read, some at a time, with their split and the place of the first."""
        rows, place = np.flatnonzero(block.column("has_sample")), 0
        chosen = {split: block.split(split) for split in arrow_files.SPLITS}
        classes = block.facts["classes"].combine_chunks()
        numbers: NDArray[np.int64] | None = None
        if self._finds_classes and labels is not None:
            final = {name: number for number, name in enumerate(labels.names)}
            # That of a class which no row in the window has does not matter.
            numbers = np.array([final.get(name, 0) for name in _classes_of(block)] or [0], dtype=np.int64)
        for table in arrow_files.read_tables(block.folder / encoded_rows.SAMPLES):
            here, place = rows[place : place + table.num_rows], place + table.num_rows
            if numbers is not None and labels is not None and block.wanted[here].any():
                table = _renumbered(table, classes.take(here), numbers, len(labels.names))
            for split in arrow_files.SPLITS:
                if (mask := chosen[split][here]).any():
                    first = block.place(int(here[mask][0]))
                    yield split, table if mask.all() else table.filter(mask), first

    # Describing them

    def _described(
        self, labels: class_labels.ClassLabels | None, lengths: Mapping[str, Sequence[NDArray[np.int64]]]
    ) -> PreparedData:
        spec, kind, tokenizer = self._spec, self._kind, self._context._tokenizer
        longest = max(int(each.max(initial=0)) for each in chain.from_iterable(lengths.values()))
        width = self._max_length if spec.packing else (spec.seq_len if kind.cuts else None) or longest
        padding = {**kind.padding, arrow_files.TOKENS: 0 if tokenizer is None else tokenizer.pad_id}
        stored = next(arrow_files.read_tables(arrow_files.split_file(self._folder, "training")))
        samples = PaddedSamples(stored, collate=kind.collate, width=width, padding=padding, uncut=kind.uncut)
        prepared = described(
            self._folder,
            samples=samples,
            num_labels=None if labels is None else len(labels.names),
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            end_of_text_id=None if tokenizer is None else tokenizer.end_id,
        )
        tensors = {each.name: each.shape for each in prepared.tensors}
        trained = np.concatenate(lengths["training"])
        some = np.unique(np.linspace(0, len(trained) - 1, min(len(trained), SAMPLES_OF_LENGTHS)).astype(np.int64))
        typical = np.quantile(trained[some], (0.5, 0.95), method="higher")
        if self._finds_classes and labels is not None and tensors.get(arrow_files.LABELS) == (2,):
            class_labels.check_no_indicators(labels, column=self._label_column or arrow_files.LABELS)
        prepared = replace(
            prepared,
            kind="other" if len(tensors.get(arrow_files.TOKENS, ())) > 1 else prepared.kind,  # of pairs
            pad_token_id=None if tokenizer is None else tokenizer.pad_id,
            pads_left=getattr(self._config, "model_type", None) in PADDED_ON_THE_LEFT,
            empty_target=tuple(tokenizer.empty_target) if tokenizer is not None and kind.has_targets else (),
            labels=() if labels is None else labels.names,
            tensors=tuple(each for each in prepared.tensors if each.name not in kind.uncut),
            columns=tuple(sorted(self._columns.columns.items())),
            lengths=(width, width) if spec.packing else tuple(map(int, typical)),
        )
        if self._most_read is not None and longest > self._most_read:
            note = f"texts have up to {longest:,} tokens, of which {self._who_reads}, and {width:,} with an export"
            prepared = replace(prepared, notes=(note,))
        return kind.described(self._with_label_faults(prepared, labels))

    def _with_label_faults(self, prepared: PreparedData, labels: class_labels.ClassLabels | None) -> PreparedData:
        """The description with what is wrong with the labels, or with the samples as a whole."""
        faults = [*self._kind.training_faults(self._folder)]
        notes = [*note_on_unread(self._columns.unread, read=(), spec=self._spec)]
        if self._kind.has_targets and (languages := self._context.tokenizer.languages) is not None:
            notes.append(f"inputs are marked {languages[0]}, and targets {languages[1]}")
        if (column := self._columns.columns.get(LABEL)) is not None:
            result = class_labels.distinct_labels(self._folder, "training")
            classes = {int(number) for label in result for number in label} if labels is not None else set[int]()
            if len(result) == 1:
                names = [labels.names[number] for number in classes] if labels is not None else map(str, *result)
                faults.append(class_labels.constant_fault(names, num_rows=prepared.num_samples, column=column))
            if labels is not None:
                notes += class_labels.notes_on(labels, trained=classes, are_learnt=self._finds_classes)
        return replace(prepared, training_faults=tuple(faults), notes=(*prepared.notes, *notes))

    def _with_content_faults(self, prepared: PreparedData, blocks: Sequence[encoded_rows.EncodedBlock]) -> PreparedData:
        """The description with the samples that lost what their rows say."""
        notes, faults = sample_checks.notes_and_faults(blocks)
        return replace(prepared, notes=(*prepared.notes, *notes), training_faults=(*prepared.training_faults, *faults))


def _num_left_out(block: encoded_rows.EncodedBlock) -> int:
    """How many rows of a part are read, and have no label that is left."""
    return int((block.wanted & (block.column("has_sample") == 0)).sum())


def sample_error(file: str, number: int, what: str) -> RowError:
    """Returns the fault of a row of which no sample can be made. what: what is wrong, and how to mend it."""
    problem, _, remedy = what.removeprefix(f"{file} ").partition(". To fix: ")
    return RowError(f"{file}, row {number}:", problem, remedy or "check the row")


def _other_form(field: Any, type: Any, first: tuple[str, int]) -> str:
    """Returns what is wrong with a column whose rows had another type before, from the row `first` on."""
    place, is_list = f"{first[0]}, row {first[1]}", field.type.num_fields > 0
    if field.name == arrow_files.LABELS and is_list != (type.num_fields > 0):
        return (
            f"its label is {'a' if is_list else 'not a'} list, and that of {place} is {'none' if is_list else 'one'}. "
            'To fix: write all labels as lists, such as ["drama"], or none'
        )
    return f"its {field.name} is {field.type}, and that of {place} is {type}. To fix: give all rows one shape"


def _has_labels(labels: arrow_files.Array, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether rows of labels [all lengths, ...] have one that counts, in each of their sequences: [rows]."""
    num_before = np.concatenate([np.zeros_like(labels[:1], np.int64), np.cumsum(labels != IGNORED, axis=0)])
    ends = np.cumsum(lengths)
    counts = num_before[ends] - num_before[ends - lengths]
    return np.asarray((counts > 0).reshape(len(lengths), -1).all(-1))


def _classes_of(block: encoded_rows.EncodedBlock) -> tuple[str, ...]:
    """The classes that were found in a part, in the order of their numbers there."""
    return tuple(json.loads((block.folder / ABOUT).read_text())["classes"])


def _unknown_classes(block: encoded_rows.EncodedBlock, labels: class_labels.ClassLabels) -> Iterator[RowError]:
    """Yields the rows of a part with a class that is none of `labels`."""
    names = _classes_of(block)
    unknown = [number for number, name in enumerate(names) if name not in labels.names]
    numbers, lengths = arrow_files.values_of(block.facts["classes"])
    assert lengths is not None
    places = np.repeat(np.arange(len(block)), lengths)
    wrong = np.isin(numbers, unknown) & block.wanted[places] if unknown else np.zeros(len(numbers), bool)
    for row in dict.fromkeys(places[wrong].tolist()):
        name = next(names[number] for number in numbers[places == row] if number in unknown)
        try:
            labels.number(name)
        except ValueError as error:
            yield sample_error(*block.place(row), str(error))


def _renumbered(
    table: arrow_files.Table, classes: Any, numbers: NDArray[np.int64], num_classes: int
) -> arrow_files.Table:
    """Samples whose labels have the final numbers of classes; labels below 0 do not count and stay as they are.

    classes: the classes of each row. Where rows have several, the labels are indicators, which are made of these.
    """
    if arrow_files.LABELS not in table.column_names:
        result, lengths = arrow_files.values_of(classes)
        assert lengths is not None
        indicators = np.zeros((len(lengths), num_classes), np.float32)
        indicators[np.repeat(np.arange(len(lengths)), lengths), numbers[result]] = 1
        return table.append_column(arrow_files.LABELS, arrow_files.column_of(indicators))
    values, lengths = arrow_files.values_of(table[arrow_files.LABELS])
    final = np.where(values < 0, values, numbers[np.maximum(values, 0)]).astype(values.dtype)
    return table.set_column(
        table.column_names.index(arrow_files.LABELS), arrow_files.LABELS, arrow_files.column_of(final, lengths)
    )


def _rows_of(table: arrow_files.Table) -> list[Sample]:
    """Each row of a table of ragged columns."""
    columns = arrow_files.rows_by_column(table)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
