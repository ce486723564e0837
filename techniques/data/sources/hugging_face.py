"""Hugging Face `datasets`, by hub name or from a folder: text becomes tokens, images and numbers stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.techniques.data.arrow_files import Array, ArrowWriter, column_of, open_split, split_file, table_of
from ringmaster.techniques.data.file_rows import is_held_out
from ringmaster.techniques.data.images import pixels_of, read_image
from ringmaster.techniques.data.stored_source import StoredSource, described
from ringmaster.techniques.data.tokens import TextOptions, write_text
from ringmaster.techniques.data.unfit_data import SplitRows, constant_fault, distinct_labels
from ringmaster.techniques.data_source import PreparedData, Row
from ringmaster.techniques.job import DataSpec

ROWS_PER_CALL = 256
# Column names to the argument names of Hugging Face models.
RENAMED = {"image": "pixel_values", "img": "pixel_values", "label": "labels"}


class HuggingFace(StoredSource):
    """The splits `split` and `held_out_split`, as text for language models, or with their columns as they are.

    Without `held_out_split`, a share `held_out` of the rows of `split` is held out. A folder has the output of
    `save_to_disk`, or files that `load_dataset` reads; `kwargs` go to `load_dataset` (name, revision, data_files, ...).
    A hub data set is read once: to follow its changes, give a revision.
    """

    name = "hugging-face"
    options_class = TextOptions
    reads = ("dataset",)

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the tokens of text, or other columns as they are."""
        text_column = self.options(spec).text_column
        splits = load_splits(spec)
        names = splits[0].column_names
        is_text = text_column in names
        if is_text or ("input_ids" in names and spec.seq_len is not None):
            column = text_column if is_text else "input_ids"
            from ringmaster.techniques.data.row_source import Columns  # which imports this module

            columns = Columns(columns={column: column}, roles=(column,), optional=frozenset())
            rows = partial(
                rows_of_splits,
                splits,
                spec,
                [column],
                content=lambda row, place: columns.content(row, place)[column],
                key=lambda content, _: str(content),
            )
            prepared = write_text(folder, spec=spec, rows=rows, where=where, column=text_column)
            return with_leaks_of_splits(prepared, splits, spec, columns=[column])
        prepared = _write_columns(folder, splits, spec, text_column)
        stored = open_split(folder, "training").column_names
        read = [name for name in names if RENAMED.get(name, name) in stored]
        return with_leaks_of_splits(prepared, splits, spec, columns=read)


def with_leaks_of_splits(
    prepared: PreparedData, splits: list[Any], spec: DataSpec, *, columns: Sequence[str]
) -> PreparedData:
    """Returns the description with what is wrong where rows of the split to train on are in that to evaluate on.

    columns: those that are read. Some equal rows of a data set of the hub are no fault, as few people can change it.
    """
    if len(splits) < 2:
        return prepared
    leaks = SplitRows(_stored_rows(splits, spec, columns), identity=lambda row: row.content).leaks()
    if leaks is None:
        return prepared
    fault, remedy = leaks.fault
    if leaks.are_all or Path(str(spec.dataset)).is_dir():
        return replace(prepared, training_faults=(*prepared.training_faults, f"{fault}. To fix: {remedy}"))
    return replace(prepared, notes=(*prepared.notes, fault))


def _stored_rows(splits: list[Any], spec: DataSpec, columns: Sequence[str]) -> Iterator[Row]:
    """Yields rows as they are stored, images as the bytes of their files."""
    for name, split in zip((spec.split, spec.held_out_split), splits, strict=True):
        chosen = split.select_columns([*columns])
        for column, feature in chosen.features.items():
            if getattr(feature, "decode", False):
                chosen = chosen.cast_column(column, replace(feature, decode=False))
        file = f"dataset {spec.dataset!r}, split {name!r}"
        for number, row in enumerate(chosen, start=1):
            # The bytes of a file alone: it may have another name.
            content = {
                key: value.get("bytes") or value if isinstance(value, dict) else value for key, value in row.items()
            }
            yield Row(file=file, number=number, value=row, content=content, held_out=name == spec.held_out_split)


def load_splits(spec: DataSpec) -> list[Any]:
    """Returns the training split and, where one is named, the held-out split. Raises ValueError without them."""
    import datasets

    assert spec.dataset is not None
    folder = Path(spec.dataset)
    is_saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        loaded = (
            datasets.load_from_disk(str(folder)) if is_saved else datasets.load_dataset(spec.dataset, **spec.kwargs)
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"dataset {spec.dataset!r} cannot be loaded: {error}. To fix: check the name or folder, and the network"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        loaded = {spec.split: loaded}
    wanted = [spec.split] + ([spec.held_out_split] if spec.held_out_split else [])
    if missing := [name for name in wanted if name not in loaded]:
        raise ValueError(
            f"dataset {spec.dataset!r} has no split {missing[0]!r}; it has {', '.join(loaded)}. "
            f"To fix: set split and held_out_split"
        )
    if not len(loaded[spec.split]):
        raise ValueError(f"dataset {spec.dataset!r}, split {spec.split!r} is empty")
    return [loaded[name] for name in wanted]


def rows_of_splits(
    splits: list[Any],
    spec: DataSpec,
    names: Sequence[str],
    *,
    content: Callable[[dict[str, Any], str], Any],
    key: Callable[[Any, int], str],
) -> Iterator[Row]:
    """Yields the rows of splits.

    names: the columns that are read. content: returns what is read of a row; called with the row, and its place in
    messages. key: returns the text by whose hash a row of a single split is held out, of its content and its index.
    """
    where = f"dataset {spec.dataset!r}"
    for position, split in enumerate(splits):
        for index, row in enumerate(split.select_columns([*names])):
            read = content(row, f"{where}, row {index + 1}")
            held_out = position == 1 if len(splits) == 2 else is_held_out(key(read, index), share=spec.held_out)
            yield Row(file=where, number=index + 1, value=row, content=read, held_out=held_out)


def _write_columns(folder: Path, splits: list[Any], spec: DataSpec, text_column: str) -> PreparedData:
    with (
        ArrowWriter(split_file(folder, "training")) as training,
        ArrowWriter(split_file(folder, "held_out")) as held_out,
    ):
        for number, split in enumerate(splits):
            for start in range(0, len(split), ROWS_PER_CALL):
                columns = _columns(split[start : start + ROWS_PER_CALL], spec, text_column)
                table = table_of({name: column_of(values) for name, values in columns.items()})
                rows = range(start, min(start + ROWS_PER_CALL, len(split)))
                chosen = np.array(
                    [number == 1 if len(splits) == 2 else is_held_out(f"row {r}", share=spec.held_out) for r in rows]
                )
                training.write(table.filter(~chosen))
                held_out.write(table.filter(chosen))
    features = splits[0].features
    label = next((features[name] for name in ("label", "labels") if name in features), None)
    prepared = described(folder, num_labels=getattr(label, "num_classes", None))
    if "labels" not in columns or columns["labels"].ndim > 1:
        return prepared
    if len(same := distinct_labels(folder, "training")) != 1:
        return prepared
    fault = constant_fault(map(str, *same), num_rows=prepared.num_samples, column="label")
    return replace(prepared, training_faults=(fault,))


def _columns(batch: dict[str, list[Any]], spec: DataSpec, text_column: str) -> dict[str, Array]:
    """The numeric and image columns of some rows. Other columns (ids, captions) are not inputs of a model."""
    columns = {}
    for name, values in batch.items():
        where = f"dataset {spec.dataset!r}, column {name!r}"
        try:
            arrays = [_pixels(value) if hasattr(value, "getbands") else value for value in values]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        try:
            column = np.stack([np.asarray(value) for value in arrays])
        except ValueError as error:
            raise ValueError(
                f"{where}: rows differ in shape ({error}). To fix: pad or "
                f"resize them, drop the column, set seq_len for input_ids, give the samples by a factory, or set "
                f"data.kind to what makes samples of {', '.join(batch)}"
            ) from error
        if column.dtype.kind in "biuf":
            columns[RENAMED.get(name, name)] = column
    if not columns:
        raise ValueError(
            f"dataset {spec.dataset!r} has neither text in {text_column!r} nor columns of numbers or "
            f"images; it has {', '.join(batch)}. To fix: set text_column"
        )
    return columns


def _pixels(image: Any) -> Array:
    return pixels_of(read_image(image), mode=image.mode if image.mode in ("L", "RGB") else "RGB")
