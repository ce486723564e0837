"""The result of preparing data, and the cache in which it is prepared once for all processes of a machine."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ringmaster.techniques.interface.values import digest, from_json, to_json
from ringmaster.techniques.runtime.checkpoints.publish import publish

if TYPE_CHECKING:
    import torch

# Incremented whenever the same files would be prepared into other samples than before.
FORMAT = 1


class Dataset(Protocol):
    """Map-style data set: each sample is a dict of tensors, with the same shapes in all samples."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        """Returns sample `index`, 0 <= index < len."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Data that is ready to be read, with the properties that a model depends on.

    name: a name for people, e.g. "python-stdlib".
    digest: identifies the samples' content: equal samples have the same digest on every machine. Of a factory's samples
        only a part is fingerprinted, see `sources.factories`.
    num_samples, num_held_out: number of samples for training, and for evaluation.
    kind: "tokens", "images" or "other".
    vocab_size, seq_len: of token samples; seq_len in tokens.
    end_of_text_id: the token between documents.
    num_labels: number of labels of labelled samples.
    image_size, num_channels: of images; image_size in pixels, for square images only.
    source: the path, URI or dotted name that the data comes from.
    folder: the folder of the prepared arrays; "" for factories.
    """

    name: str
    digest: str
    num_samples: int
    num_held_out: int
    kind: str
    vocab_size: int | None = None
    seq_len: int | None = None
    end_of_text_id: int | None = None
    num_labels: int | None = None
    image_size: int | None = None
    num_channels: int | None = None
    source: str
    folder: str = ""

    @property
    def tokenizer_dir(self) -> Path | None:
        """The folder with the tokenizer's files, or None where the data has no tokenizer of its own."""
        folder = Path(self.folder) / "tokenizer"
        return folder if self.folder and folder.is_dir() else None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of data, which can be prepared.

    location: the path or URI.
    state: a JSON value that changes as soon as the files do, and is cheap to obtain.
    write: prepares the samples into a folder and returns their description; called at most once for each state.
    """

    name: str
    location: str
    state: Any
    write: Callable[[Path], PreparedData]


def prepare_once(source: Source, *, settings: Any, cache_dir: Path) -> PreparedData:
    """Returns `source` prepared under `settings` (a value): from the cache where it is there, or else written now.

    It is safe across processes. One process writes into a temporary folder, under a lock that ends with the process.
    The others wait until the folder is renamed.
    """
    key = digest({"format": FORMAT, "settings": settings, "source": source.location, "state": source.state})
    folder = cache_dir.absolute() / "data" / f"{_slug(source.name)}-{key}"
    if not folder.exists():
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                _write(source, folder)
    return read_prepared(folder)


def read_prepared(folder: Path) -> PreparedData:
    """Reads the description of the data in `folder`."""
    prepared = from_json(PreparedData, json.loads((folder / "prepared.json").read_text()))
    return dataclasses.replace(prepared, folder=str(folder))


def stamp(path: Path) -> tuple[int, int]:
    """Returns size in bytes and time of the last change in ns, a cheap way to detect that a file has changed."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _write(source: Source, folder: Path) -> None:
    with publish(folder) as aside:
        prepared = dataclasses.replace(source.write(aside), name=source.name, source=source.location)
        (aside / "prepared.json").write_text(json.dumps(to_json(prepared), indent=1))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-60:] or "data"
