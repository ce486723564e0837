"""Data without files of rows: Python's library, scikit-learn's digits, what a command reads, and factories."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.codec import digest
from ringmaster.registry import resolve
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.data.arrow_files import (
    SPLITS,
    Array,
    ArrowWriter,
    column_of,
    split_file,
    table_of,
)
from ringmaster.techniques.data.file_patterns import stamp
from ringmaster.techniques.data.file_rows import held_out_keys, is_held_out
from ringmaster.techniques.data.stored_source import StoredSource, TextProgress, described, locked
from ringmaster.techniques.data.tokens import write_text
from ringmaster.techniques.data_source import (
    Dataset,
    DataSource,
    PreparedData,
    Row,
    check_same,
    sample_tensors,
    shape_fields,
)
from ringmaster.techniques.job import DataSpec

# Tests, tables and whole applications. Without them a few MB of ordinary library code remain, prepared in seconds.
LEFT_OUT = frozenset(
    (
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "encodings",
        "turtledemo",
        "tkinter",
        "distutils",
        "ensurepip",
        "__pycache__",
    )
)


class PythonStdlib(StoredSource):
    """The running Python's modules, each a document; they are split by file."""

    name = "python-stdlib"

    def check(self, spec: DataSpec) -> None:
        """Requires the length of a sample, as there is no common length of documents."""
        if spec.seq_len is None:
            raise ValueError("data: seq_len is missing. To fix: say how many tokens a sample has, e.g. seq_len: 128")

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns the folder of the modules, and their states."""
        root = Path(sysconfig.get_path("stdlib"))
        return str(root), [(name, *stamp(root / name)) for name in _library_files(root)]

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the tokens of the modules."""
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_library_files(root))

        def documents() -> Iterator[Row]:
            held_out = held_out_keys(files, share=spec.held_out)
            for name in files:
                text = (root / name).read_bytes().decode("utf-8", errors="replace")
                yield Row(file=name, number=1, value=None, content=text, held_out=name in held_out)

        return write_text(folder, spec=spec, rows=documents, where=self.name)


def _library_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        # config-* and _sysconfigdata* describe how this Python was built; they are no library code.
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

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the images, normalised and divided."""
        return _write_digits(folder, share=spec.held_out)


def _write_digits(folder: Path, *, share: float) -> PreparedData:
    pixels, labels = _load_digits()
    held_out = np.array([is_held_out(f"digits/{index}", share=share) for index in range(len(labels))])
    pixels = (pixels - pixels[~held_out].mean()) / pixels[~held_out].std()
    for split, chosen in (("training", ~held_out), ("held_out", held_out)):
        with ArrowWriter(split_file(folder, split)) as writer:
            rows = {"pixel_values": pixels[chosen].astype(np.float32), "labels": labels[chosen]}
            writer.write(table_of({name: column_of(values) for name, values in rows.items()}))
    return described(folder, num_labels=NUM_CLASSES)


def _load_digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images[:, None].astype(np.float64), data.target.astype(np.int64)


class CommandData(StoredSource):
    """No samples, and a constant digest."""

    name = "command"

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns its name."""
        return self.name, None

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes nothing."""
        name = self.name
        return PreparedData(name=name, digest=digest(name), num_samples=0, num_held_out=0, kind="other", source=name)


# Enough samples to detect other data, few enough to read them each time.
MAX_FINGERPRINTED = 128


class Factory(DataSource):
    """The samples that a user's function returns: map-style data sets, or those of Hugging Face `datasets`.

    Each process calls the function. Nothing is stored, except the rows of a streaming data set: these are read once
    into an Arrow file of a machine, as batches are drawn from all of them. Its own `take` limits a long one.
    """

    name = "factory"
    reads = ("factory",)

    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Calls the factory and describes its samples."""
        return describe_factory(spec, open_factory(spec, cache_dir=cache_dir))

    def open(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> tuple[Dataset, Dataset]:
        """Calls the factory, and compares its samples with those that were prepared."""
        datasets = open_factory(spec, cache_dir=cache_dir)
        if prepared is not None:
            check_same(describe_factory(spec, datasets), prepared)
        return datasets


def open_factory(spec: DataSpec, *, cache_dir: Path) -> tuple[Dataset, Dataset]:
    """Calls the factory and returns its (training, held_out).

    Raises ValueError where the result is something else, or has no training samples.
    """
    assert spec.factory is not None
    made = resolve(spec.factory)(**spec.kwargs)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(
            f"data factory {spec.factory} returned {type(made).__name__}. To fix: return (training, held_out)"
        )
    training, held_out = (_map_style(each, split, spec, cache_dir) for each, split in zip(made, SPLITS, strict=True))
    if len(training) == 0:
        raise ValueError(f"data factory {spec.factory} returned no training samples")
    _check_sample(training[0], factory=spec.factory)
    return training, held_out


def _map_style(dataset: Any, split: str, spec: DataSpec, cache_dir: Path) -> Dataset:
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
    result: Dataset = dataset.with_format("torch") if is_of_datasets and dataset.format["type"] is None else dataset
    return result


def _read_stream(stream: Any, split: str, spec: DataSpec, cache_dir: Path) -> Any:
    """A streaming data set, read once for a factory and its arguments."""
    from datasets import Dataset as ArrowDataset
    from datasets.arrow_writer import ArrowWriter as RowWriter

    key = digest([spec.factory, dict(spec.kwargs), split])
    folder = cache_dir.absolute() / "data" / f"stream-{key}"
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            with publish(folder) as aside, RowWriter(path=str(aside / "rows.arrow"), features=stream.features) as rows:
                progress = TextProgress(f"reading the stream of {spec.factory}", what="rows")
                for row in stream:
                    rows.write(row)
                    progress.add(0, num_texts=1)
                rows.finalize()
    return ArrowDataset.from_file(str(folder / "rows.arrow"))


def describe_factory(spec: DataSpec, datasets: tuple[Dataset, Dataset]) -> PreparedData:
    """Returns the properties of a factory's data that a model depends on.

    The training set may have the attributes `digest`, `vocab_size` and `num_labels`. Shapes are read from its first
    sample. Without a `digest`, up to 128 samples of each set, evenly spaced, are fingerprinted.
    """
    assert spec.factory is not None
    training, held_out = datasets
    sample = training[0]
    shapes = {name: tuple(value.shape) for name, value in sample.items()}
    return PreparedData(
        name=spec.factory.rpartition(":")[2],
        digest=str(getattr(training, "digest", None) or _samples_digest(datasets)),
        num_samples=len(training),
        num_held_out=len(held_out),
        vocab_size=getattr(training, "vocab_size", None),
        num_labels=getattr(training, "num_labels", None),
        source=spec.factory,
        tensors=sample_tensors(sample, shapes) if len(shapes.get("input_ids", ())) > 1 else (),
        **shape_fields(shapes),
    )


def _check_sample(sample: Any, *, factory: str) -> None:
    if not isinstance(sample, dict) or not all(hasattr(value, "shape") for value in sample.values()):
        raise ValueError(
            f"data factory {factory}: a sample is {type(sample).__name__}. To fix: return a dict of tensors, "
            f"named as the model's forward names its arguments"
        )


def _samples_digest(datasets: tuple[Dataset, Dataset]) -> str:
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
