"""Data without files of rows: Python's library, digits, what a command reads, factories, Hugging Face `datasets`."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.codec import digest
from ringmaster.registry import resolve, source_digest
from ringmaster.techniques import data_source
from ringmaster.techniques.checkpoints.checkpoint import publish_once
from ringmaster.techniques.data import arrow_files
from ringmaster.techniques.data.class_labels import constant_fault, distinct_labels, with_class_names
from ringmaster.techniques.data.file_patterns import stamp
from ringmaster.techniques.data.file_rows import SplitRows, held_out_keys, is_held_out
from ringmaster.techniques.data.images import pixels_of, read_image
from ringmaster.techniques.data.row_kind import Columns
from ringmaster.techniques.data.stored_source import (
    StoredSource,
    TextProgress,
    described,
    note_on_unread,
    states_of_arguments,
)
from ringmaster.techniques.data.tokens import (
    LABEL_COLUMNS,
    TextOptions,
    as_tokenized,
    attended,
    refuse_labels,
    samples_of,
    tokenized_source,
    write_text,
)
from ringmaster.techniques.job_specs import DataSpec

# Tests, tables and whole applications. Without them a few MB of ordinary library code remain, prepared in seconds.
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
    | {"turtledemo", "tkinter", "distutils", "ensurepip", "__pycache__"}
)


class PythonStdlib(StoredSource):
    """The running Python's modules, each a document; they are split by file."""

    name = "python-stdlib"

    def check(self, spec: DataSpec) -> None:
        """Requires the length of a sample, as there is no common length of documents."""
        if spec.seq_len is None:
            raise ValueError(
                "data: seq_len is missing. To fix: set the number of tokens of a sample, e.g. seq_len: 128"
            )

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns the folder of the modules, and their states."""
        root = Path(sysconfig.get_path("stdlib"))
        return str(root), [(name, *stamp(root / name)) for name in _library_files(root)]

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> data_source.PreparedData:
        """Writes the tokens of the modules."""
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_library_files(root))

        def documents() -> Iterator[data_source.Row]:
            held_out = held_out_keys(files, share=spec.held_out)
            for name in files:
                text = (root / name).read_bytes().decode("utf-8", errors="replace")
                yield data_source.Row(file=name, number=1, value=None, content=text, held_out=name in held_out)

        return write_text(folder, spec=spec, rows=documents, where=self.name)


def _library_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        # config-* and _sysconfigdata* describe how this Python was built; they are not library code.
        subfolders[:] = sorted(s for s in subfolders if s not in LEFT_OUT and not s.startswith(("config-", "lib-")))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root).as_posix()


NUM_CLASSES = 10


class Digits(StoredSource):
    """Images [1, 8, 8] with their digits. The pixels have mean 0 and standard deviation 1 over the training images."""

    name = "digits"

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns what loads them."""
        return "sklearn.datasets.load_digits", None

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> data_source.PreparedData:
        """Writes the images, normalised and divided."""
        from sklearn.datasets import load_digits

        data = load_digits()
        pixels, labels = data.images[:, None].astype(np.float64), data.target.astype(np.int64)
        held_out = np.array([is_held_out(f"digits/{index}", share=spec.held_out) for index in range(len(labels))])
        pixels = (pixels - pixels[~held_out].mean()) / pixels[~held_out].std()
        for split, chosen in (("training", ~held_out), ("held_out", held_out)):
            with arrow_files.ArrowWriter(arrow_files.split_file(folder, split)) as writer:
                rows = {"pixel_values": pixels[chosen].astype(np.float32), "labels": labels[chosen]}
                writer.write(
                    arrow_files.table_of({name: arrow_files.column_of(values) for name, values in rows.items()})
                )
        return described(folder, num_labels=NUM_CLASSES)


class CommandData(StoredSource):
    """No samples, and a constant digest."""

    name = "command"

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns its name."""
        return self.name, None

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> data_source.PreparedData:
        """Writes nothing."""
        return data_source.PreparedData(
            name=self.name, digest=digest(self.name), num_samples=0, num_held_out=0, kind="other", source=self.name
        )


# Enough samples to detect other data, few enough to read them each time.
MAX_FINGERPRINTED = 128


class Factory(data_source.DataSource):
    """The samples that a user's function returns: map-style data sets, or those of Hugging Face `datasets`.

    Each process calls the function. Nothing is stored, except the rows of a streaming data set: these are read once
    into an Arrow file of a machine, as batches are drawn from all of them. Its own `take` limits a long one.
    """

    name = "factory"
    reads = ("factory",)

    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> data_source.PreparedData:
        """Calls the factory and describes its samples."""
        return describe_factory(spec, open_factory(spec, cache_dir=cache_dir))

    def open(
        self, spec: DataSpec, *, cache_dir: Path, prepared: data_source.PreparedData | None
    ) -> tuple[data_source.Dataset, data_source.Dataset]:
        """Calls the factory, and compares its samples with those that were prepared."""
        datasets = open_factory(spec, cache_dir=cache_dir)
        if prepared is not None:
            data_source.check_same(describe_factory(spec, datasets), prepared)
        return datasets


def open_factory(spec: DataSpec, *, cache_dir: Path) -> tuple[data_source.Dataset, data_source.Dataset]:
    """Calls the factory and returns its (training, held_out).

    Raises ValueError where the result is something else, or has no training samples.
    """
    assert spec.factory is not None
    made = resolve(spec.factory)(**spec.kwargs)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(
            f"data factory {spec.factory} returned {type(made).__name__}. To fix: return (training, held_out)"
        )
    training, held_out = (
        _map_style(each, split, spec, cache_dir) for each, split in zip(made, arrow_files.SPLITS, strict=True)
    )
    if len(training) == 0:
        raise ValueError(f"data factory {spec.factory} returned no training samples")
    sample: Any = training[0]
    if not isinstance(sample, dict) or not all(hasattr(value, "shape") for value in sample.values()):
        raise ValueError(
            f"data factory {spec.factory}: a sample is {type(sample).__name__}. To fix: return a dict of tensors, "
            f"named as the model's forward names its arguments"
        )
    return training, held_out


def _map_style(dataset: Any, split: str, spec: DataSpec, cache_dir: Path) -> data_source.Dataset:
    """A data set with samples by index: those of Hugging Face as tensors, unless they have a format, and streams read.

    Raises ValueError where it is another thing.
    """
    is_of_datasets = hasattr(dataset, "features") and hasattr(dataset, "with_format")
    if is_of_datasets and not hasattr(dataset, "__len__"):
        dataset = _read_stream(dataset, split, spec, cache_dir)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"data factory {spec.factory}: {split} is not a map-style data set. To fix: give it __len__ and "
            f"__getitem__(index) -> dict of tensors, or return a data set of Hugging Face datasets"
        )
    result: data_source.Dataset = (
        dataset.with_format("torch") if is_of_datasets and dataset.format["type"] is None else dataset
    )
    return result


def _read_stream(stream: Any, split: str, spec: DataSpec, cache_dir: Path) -> Any:
    """A streaming data set, read once for a factory and its arguments."""
    from datasets import Dataset as ArrowDataset
    from datasets.arrow_writer import ArrowWriter as RowWriter

    assert spec.factory is not None
    key = digest([spec.factory, source_digest(resolve(spec.factory)), dict(spec.kwargs), split])
    folder = cache_dir.absolute() / "data" / f"stream-{key}"

    def write(aside: Path) -> None:
        progress = TextProgress(f"reading the stream of {spec.factory}", what="rows")
        with RowWriter(path=str(aside / "rows.arrow"), features=stream.features) as rows:
            for row in stream:
                rows.write(row)
                progress.add(0, num_texts=1)
            rows.finalize()

    publish_once(folder, write)
    return ArrowDataset.from_file(str(folder / "rows.arrow"))


def describe_factory(
    spec: DataSpec, datasets: tuple[data_source.Dataset, data_source.Dataset]
) -> data_source.PreparedData:
    """Returns the properties of a factory's data that a model depends on.

    The training set may have the attributes `digest`, `vocab_size` and `num_labels`. Shapes are read from its first
    sample. Without a `digest`, up to 128 samples of each set, evenly spaced, are fingerprinted.
    """
    assert spec.factory is not None
    training, held_out = datasets
    sample = training[0]
    shapes = {name: tuple(value.shape) for name, value in sample.items()}
    # For others, the kind determines the tensors, and labels are taken for numbers of classes.
    is_described = len(shapes.get("input_ids", ())) > 1 or "float" in str(getattr(sample.get("labels"), "dtype", ""))
    return data_source.PreparedData(
        name=spec.factory.rpartition(":")[2],
        digest=str(getattr(training, "digest", None) or _samples_digest(datasets)),
        num_samples=len(training),
        num_held_out=len(held_out),
        vocab_size=getattr(training, "vocab_size", None),
        num_labels=getattr(training, "num_labels", None),
        source=spec.factory,
        tensors=data_source.sample_tensors(sample, shapes) if is_described else (),
        **data_source.shape_fields(shapes),
    )


def _samples_digest(datasets: tuple[data_source.Dataset, data_source.Dataset]) -> str:
    from ringmaster.techniques.training.dropout import seed_generators

    sha = hashlib.sha256()
    for dataset in datasets:
        sha.update(str(len(dataset)).encode())
        chosen = np.linspace(0, len(dataset) - 1, num=min(len(dataset), MAX_FINGERPRINTED), dtype=np.int64)
        for index in chosen:
            seed_generators(int(index))  # so that random augmentation is the same each time
            for name, value in sorted(dataset[int(index)].items()):
                array = np.ascontiguousarray(np.asarray(value))
                sha.update(f"{name} {array.dtype.str} {array.shape}".encode())
                sha.update(array.tobytes())
    return sha.hexdigest()[:16]


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

    def samples(self, table: arrow_files.Table, prepared: data_source.PreparedData) -> data_source.Dataset:
        """Returns the samples in the rows of a table."""
        return samples_of(table, prepared, collate=self.collate)

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns the data set, and what changes as soon as its rows become other samples."""
        location, files = super().origin(spec)
        return location, {"version": 2, "files": files}

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> data_source.PreparedData:
        """Writes the tokens of text, those of rows with labels, or other columns as they are."""
        text_column = self.options(spec).text_column
        splits = load_splits(spec)
        names = splits[0].column_names
        has_masks = any(name in names for name in LABEL_COLUMNS - {arrow_files.LABELS})
        if (spec.seq_len is not None or has_masks) and (tokenized := tokenized_source(spec, names)) is not None:
            return tokenized.write(folder, as_tokenized(spec), where=where, cache_dir=cache_dir)
        is_text = text_column in names
        if is_text or ("input_ids" in names and spec.seq_len is not None):
            column = text_column if is_text else "input_ids"

            if not is_text:
                refuse_labels({*names}.difference(self.options(spec).ignored_columns), where)
            columns = Columns(columns={column: column}, roles=(column,), optional=frozenset())
            masks = [] if is_text or arrow_files.MASK not in names else [arrow_files.MASK]

            def content(row: dict[str, Any], place: str) -> Any:
                value = columns.content(row, place)[column]
                return attended(value, row[arrow_files.MASK], place) if masks else value

            rows = partial(
                rows_of_splits,
                splits,
                spec,
                [column, *masks],
                content=content,
                key=lambda content, _: str(content),
            )
            prepared, read = write_text(folder, spec=spec, rows=rows, where=where, column=text_column), [column]
        else:
            prepared, masks = _write_columns(folder, splits, spec, text_column), []
            stored = arrow_files.open_split(folder, "training").column_names
            read = [name for name in names if RENAMED.get(name, name) in stored]
        note = note_on_unread(names, read=[*read, *masks], spec=spec)
        prepared = replace(prepared, notes=(*prepared.notes, *note))
        return with_facts_of_splits(prepared, splits, spec, columns=read)


def with_facts_of_splits(
    prepared: data_source.PreparedData, splits: list[Any], spec: DataSpec, *, columns: Sequence[str]
) -> data_source.PreparedData:
    """Returns the description with what is wrong where rows of the split to train on are in that to evaluate on.

    Its source names the revision of a data set of the hub. columns: those that are read. Some equal rows of such a data
    set are not a fault, as few users can change it.
    """
    prepared = _with_revision(prepared, splits[0], spec)
    if len(splits) < 2:
        return prepared
    leaks = SplitRows(_stored_rows(splits, spec, columns), identity=lambda row: row.content).leaks()
    if leaks is None:
        return prepared
    fault, remedy = leaks.fault
    if leaks.are_all or Path(str(spec.dataset)).is_dir():
        return replace(prepared, training_faults=(*prepared.training_faults, f"{fault}. To fix: {remedy}"))
    return replace(prepared, notes=(*prepared.notes, fault))


def _with_revision(prepared: data_source.PreparedData, split: Any, spec: DataSpec) -> data_source.PreparedData:
    """The description of a data set of the hub with its commit, by which `datasets` names the folder of its files.

    Without one, with the requested revision, or with a note that there is none.
    """
    is_of_files = "data_files" in spec.kwargs and "/" not in str(spec.dataset)  # as of the name json
    if Path(str(spec.dataset)).is_dir() or is_of_files:
        return prepared
    parts = (part for file in split.cache_files for part in Path(file["filename"]).parts)
    revision = next(filter(_COMMIT.fullmatch, parts), None) or spec.kwargs.get("revision")
    if revision is not None:
        return replace(prepared, source=f"hf://{spec.dataset}@{revision}")
    note = f"the revision of {spec.dataset} that was read is not known; set data.kwargs.revision to read the same again"
    return replace(prepared, notes=(*prepared.notes, note))


_COMMIT = re.compile(r"[0-9a-f]{40}")


def _stored_rows(splits: list[Any], spec: DataSpec, columns: Sequence[str]) -> Iterator[data_source.Row]:
    """Yields rows as they are stored, images as the bytes of their files."""
    for name, split in zip((spec.split, spec.held_out_split), splits, strict=True):
        file, classes = f"dataset {spec.dataset!r}, split {name!r}", _classes_by_column(split, columns)
        for number, row in enumerate(split.select_columns([*columns]), start=1):
            # The bytes of a file alone: it may have another name.
            content = {
                key: value.get("bytes") or value if isinstance(value, dict) else value
                for key, value in with_class_names(row, classes).items()
            }
            yield data_source.Row(
                file=file, number=number, value=row, content=content, held_out=name == spec.held_out_split
            )


def load_splits(spec: DataSpec) -> list[Any]:
    """Returns the training split and, where one is named, the held-out split. Raises ValueError without them."""
    import datasets

    assert spec.dataset is not None
    folder = Path(spec.dataset)
    is_saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    # The library's own cache knows the files of this machine by their times, which can be set.
    anew = {"download_mode": "force_redownload"} if folder.is_dir() or states_of_arguments(spec) else {}
    try:
        loaded = (
            datasets.load_from_disk(str(folder))
            if is_saved
            else datasets.load_dataset(spec.dataset, **{**anew, **spec.kwargs})
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
    for name in wanted:
        features = loaded[name].info.features
        features.update({column: _undecoded(feature) for column, feature in features.items()})
    return [loaded[name] for name in wanted]


def _undecoded(feature: Any) -> Any:
    """A feature with its images and recordings as files, which `datasets` would decode by other packages."""
    import datasets

    if isinstance(feature, dict):
        return {name: _undecoded(each) for name, each in feature.items()}
    if isinstance(feature, (datasets.Image, datasets.Audio)):
        return replace(feature, decode=False)
    inner = getattr(feature, "feature", None)  # of a list
    return feature if inner is None else replace(feature, feature=_undecoded(inner))


def _image_or_value(value: Any, place: str) -> Any:
    """An image, decoded, of what `datasets` stores of it, also inside lists and mappings; other values as they are."""
    if isinstance(value, list):
        return (
            [_image_or_value(each, place) for each in value] if value and isinstance(value[0], list | dict) else value
        )
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path"}:
        return read_image(value, what=f"{place}: the image")
    return {name: _image_or_value(each, place) for name, each in value.items()}


def rows_of_splits(
    splits: list[Any],
    spec: DataSpec,
    names: Sequence[str],
    *,
    content: Callable[[dict[str, Any], str], Any],
    key: Callable[[Any, int], str],
) -> Iterator[data_source.Row]:
    """Yields the rows of splits.

    names: the columns that are read. content: returns what is read of a row; called with the row, and its place in
    messages. Classes are there by their names, as each split may number them in its own order. key: returns the text by
    whose hash a row of a single split is held out, of its content and its index.
    """
    import datasets

    where = f"dataset {spec.dataset!r}"
    for position, split in enumerate(splits):
        classes = _classes_by_column(split, names)
        recordings = {name for name in names if isinstance(split.features[name], datasets.Audio)}
        for index, row in enumerate(split.select_columns([*names])):
            place = f"{where}, row {index + 1}"
            values = {
                name: value if name in recordings else _image_or_value(value, place) for name, value in row.items()
            }
            read = content(with_class_names(values, classes), place)
            held_out = position == 1 if len(splits) == 2 else is_held_out(key(read, index), share=spec.held_out)
            yield data_source.Row(file=where, number=index + 1, value=values, content=read, held_out=held_out)


def class_names(feature: Any) -> tuple[str, ...]:
    """Returns the names of the classes that a `datasets` feature declares, of a label or of a list of labels."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())


def _classes_by_column(split: Any, columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {name: names for name in columns if (names := class_names(split.features[name]))}


def _renumbered_classes(splits: list[Any], spec: DataSpec) -> list[dict[str, arrow_files.Array]]:
    """Returns, for each split, the number in the training split of each class of a column whose classes differ there.

    Raises ValueError where the training split does not name a class.
    """
    first, result = splits[0], list[dict[str, arrow_files.Array]]()
    for name, split in zip((spec.split, spec.held_out_split), splits, strict=False):
        numbers = dict[str, arrow_files.Array]()
        for column, feature in split.features.items():
            own, known = class_names(feature), class_names(first.features.get(column))
            if own == known:
                continue
            if not known or not set(own) <= set(known) or not own:
                named = [data_source.shown(each) or "of no names" for each in (known, own)]
                raise ValueError(
                    f"dataset {spec.dataset!r}, column {column!r}: the classes of the split {spec.split!r} are "
                    f"{named[0]}, and those of {name!r} {named[1]}. To fix: cast both to one ClassLabel, by datasets' "
                    "cast_column"
                )
            numbers[column] = np.array([known.index(each) for each in own])
        result.append(numbers)
    return result


def _write_columns(folder: Path, splits: list[Any], spec: DataSpec, text_column: str) -> data_source.PreparedData:
    with (
        arrow_files.ArrowWriter(arrow_files.split_file(folder, "training")) as training,
        arrow_files.ArrowWriter(arrow_files.split_file(folder, "held_out")) as held_out,
    ):
        for number, (split, classes) in enumerate(zip(splits, _renumbered_classes(splits, spec), strict=True)):
            for start in range(0, len(split), ROWS_PER_CALL):
                columns = _columns(split[start : start + ROWS_PER_CALL], spec, text_column)
                for name, numbers in classes.items():
                    if (values := columns.get(RENAMED.get(name, name))) is not None:
                        values[...] = np.where(values < 0, values, numbers[values])
                table = arrow_files.table_of({name: arrow_files.column_of(values) for name, values in columns.items()})
                rows = range(start, min(start + ROWS_PER_CALL, len(split)))
                chosen = np.array(
                    [number == 1 if len(splits) == 2 else is_held_out(f"row {r}", share=spec.held_out) for r in rows]
                )
                training.write(table.filter(~chosen))
                held_out.write(table.filter(chosen))
    features = splits[0].features
    label = next((features[name] for name in ("label", "labels") if name in features), None)
    names = class_names(label)
    prepared = described(folder, num_labels=len(names) or None)
    if not all(map(str.isdecimal, names)):  # numbers are what a data set calls classes without names
        prepared = replace(prepared, labels=names)
    if "labels" not in columns or columns["labels"].ndim > 1:
        return prepared
    if len(same := distinct_labels(folder, "training")) != 1:
        return prepared
    fault = constant_fault(map(str, *same), num_rows=prepared.num_samples, column="label")
    return replace(prepared, training_faults=(fault,))


def _columns(batch: dict[str, list[Any]], spec: DataSpec, text_column: str) -> dict[str, arrow_files.Array]:
    """The numeric and image columns of some rows. Other columns (ids, captions) are not inputs of a model."""
    columns = {}
    for name, values in batch.items():
        where = f"dataset {spec.dataset!r}, column {name!r}"
        read = [_image_or_value(value, where) for value in values]
        try:
            arrays = [
                pixels_of(value, mode=value.mode if value.mode in ("L", "RGB") else "RGB")
                if hasattr(value, "getbands")
                else value
                for value in read
            ]
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
