"""The source files of Python's standard library: real data that every machine has without a download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ringmaster.codec import digest
from ringmaster.techniques.data.arrays import Array, ColumnWriter, fingerprint
from ringmaster.techniques.data.file_rows import held_out_keys, is_held_out
from ringmaster.techniques.data.files import stamp
from ringmaster.techniques.data.stored_source import Preparation, StoredSource
from ringmaster.techniques.data.tokens import Document, write_tokens
from ringmaster.techniques.data_source import PreparedData
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

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the modules become tokens."""
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_library_files(root))

        def documents() -> Iterator[Document]:
            held_out = held_out_keys(files, share=spec.held_out)
            for name in files:
                text = (root / name).read_bytes().decode("utf-8", errors="replace")
                yield Document(content=text, held_out=name in held_out)

        return Preparation(
            name=self.name,
            location=str(root),
            state=[(name, *stamp(root / name)) for name in files],
            write=lambda folder: write_tokens(folder, spec=spec, documents=documents, where=self.name),
        )


def _library_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        # config-* and _sysconfigdata* describe how this Python was built; they are no library code.
        subfolders[:] = sorted(s for s in subfolders if s not in LEFT_OUT and not s.startswith(("config-", "lib-")))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root).as_posix()


IMAGE_SIZE, NUM_CLASSES = 8, 10


class Digits(StoredSource):
    """Images [1, 8, 8] with their digits. The pixels have mean 0 and standard deviation 1 over the training images."""

    name = "digits"

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the images are normalised and divided."""
        return Preparation(
            name=self.name,
            location="sklearn.datasets.load_digits",
            state=None,
            write=lambda folder: _write_digits(folder, share=spec.held_out),
        )


def _write_digits(folder: Path, *, share: float) -> PreparedData:
    pixels, labels = _load_digits()
    held_out = np.array([is_held_out(f"digits/{index}", share=share) for index in range(len(labels))])
    pixels = (pixels - pixels[~held_out].mean()) / pixels[~held_out].std()
    with ColumnWriter(folder) as writer:
        for split, chosen in (("training", ~held_out), ("held_out", held_out)):
            rows = {"pixel_values": pixels[chosen].astype(np.float32), "labels": labels[chosen]}
            writer.append(split, rows)
    return PreparedData(
        name="",
        source="",
        digest=fingerprint(folder),
        kind="images",
        num_labels=NUM_CLASSES,
        image_size=IMAGE_SIZE,
        num_channels=1,
        num_samples=int((~held_out).sum()),
        num_held_out=int(held_out.sum()),
    )


def _load_digits() -> tuple[Array, Array]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ValueError("data source 'digits' needs scikit-learn. To fix: pip install scikit-learn") from error
    data = load_digits()
    return data.images[:, None].astype(np.float64), data.target.astype(np.int64)


class CommandsOwn(StoredSource):
    """No samples, and a constant digest."""

    name = "command"

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns a preparation that writes nothing."""
        name = self.name

        def write(folder: Path) -> PreparedData:
            return PreparedData(
                name=name, digest=digest(name), num_samples=0, num_held_out=0, kind="other", source=name
            )

        return Preparation(name=name, location=name, state=None, write=write)
