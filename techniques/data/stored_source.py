"""Data sources whose samples are stored as columns: each state of the data is prepared once for a machine.

`prepare_once` is the cache that all processes of a machine share, and `TextProgress` reports a long preparation.
"""

from __future__ import annotations

import json
import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.codec import digest, from_json, to_json
from ringmaster.registry import source_digest
from ringmaster.techniques import data_source
from ringmaster.techniques.checkpoints.checkpoint import publish_once
from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data import arrow_files
from ringmaster.techniques.data.file_patterns import folder_state, local_copies, matching
from ringmaster.techniques.data.file_rows import check_not_empty, data_files, files_of, with_leaks
from ringmaster.techniques.data.samples import ArraySamples, as_tensors
from ringmaster.techniques.job_specs import DataSpec

if TYPE_CHECKING:
    import torch


DESCRIPTION = "data.json"
"""What describes the samples in a folder. Releases before 0.4 had another one, with files of another format."""
# Incremented whenever the same files would be prepared into other samples than before, or refused.
FORMAT = 6
# Settings that may name a folder, and arguments of `load_dataset` that may name files of this machine.
NAME_FOLDERS, NAME_FILES = ("processor", "encoded_as"), ("data_files", "data_dir")
# Packages whose classes change with a release alone.
OF_RELEASE = frozenset({"ringmaster", "builtins", "abc"})


def prepare_once(
    write: Callable[[Path], data_source.PreparedData],
    *,
    name: str,
    location: str,
    state: Any,
    settings: Any,
    cache_dir: Path,
) -> data_source.PreparedData:
    """Returns what `write` has written into a folder of the cache: at an earlier time, or else now.

    name: to be shown. location: the path or URI of what is prepared. state, settings: values on which it depends.
    """
    key = digest({"format": FORMAT, "settings": settings, "source": location, "state": state})
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-60:] or "data"
    folder = cache_dir.absolute() / "data" / f"{slug}-{key}"

    def write_with_description(aside: Path) -> None:
        written = write(aside)
        described = replace(written, name=name, source=written.source or location)
        (aside / DESCRIPTION).write_text(json.dumps(to_json(described), indent=1))

    publish_once(folder, write_with_description)
    prepared = from_json(data_source.PreparedData, json.loads((folder / DESCRIPTION).read_text()))
    return replace(prepared, folder=str(folder))


def states_of_arguments(spec: DataSpec) -> list[Any]:
    """Returns the states of the files of this machine that arguments of `load_dataset` name."""
    todo, result = [spec.kwargs.get(name) for name in NAME_FILES], list[Any]()
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
        elif value is not None and not is_url(str(value)):
            folder = Path(str(value))
            with suppress(ValueError):  # a file of the hub
                result += folder_state(folder) if folder.is_dir() else matching(str(value)).state()
    return result


def note_on_unread(there: Iterable[str], *, read: Collection[str], spec: DataSpec) -> tuple[str, ...]:
    """Returns what users should know of columns that are there and not read, nor ignored on purpose, if any."""
    known = {*read, *spec.options.get("ignored_columns", ()), spec.time_column}
    unread = [name for name in there if name not in known]
    return (f"columns that are not read: {data_source.shown(unread)}",) if unread else ()


class StoredSource(data_source.DataSource):
    """Writes columns once for each state of the data; batches are read from the memory-mapped files.

    copies_labels: whether tokens without labels are their own labels, as a language model has them.
    """

    copies_labels: ClassVar[bool] = True

    @property
    def code(self) -> tuple[str | None, ...]:
        """The digests of the source files of a user's class and its bases; empty for a kind of Ringmaster."""
        own = (each for each in type(self).__mro__ if each.__module__.partition(".")[0] not in OF_RELEASE)
        return tuple(map(source_digest, own))

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns where the samples come from, a path or URI, and what changes as soon as they do, a JSON value.

        It is cheap: it reads no content. By default, these are the files of the spec, or its data set.
        """
        if spec.path is not None:
            location = spec.path if is_url(spec.path) else str(Path(spec.path).absolute())
            return location, [entry for files in files_of(spec) for entry in files.state()]
        folder = Path(spec.dataset or "")
        files = states_of_arguments(spec)
        if not folder.is_dir():
            return f"hf://{spec.dataset}", files
        return str(folder.absolute()), [*folder_state(folder), *files]

    @abstractmethod
    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> data_source.PreparedData:
        """Writes the samples of local files, or of others, into a folder, and the manifest of data with a name.

        where: what messages call the data. Returns the description of the samples.
        """

    def write_origin(self, folder: Path, spec: DataSpec, *, cache_dir: Path) -> data_source.PreparedData:
        """Writes the samples of what a spec names. Files at URLs are copied into `cache_dir` first."""
        if spec.path is None:
            return self.write(folder, spec, where=f"dataset {spec.dataset!r}", cache_dir=cache_dir)
        where = f"path {spec.path!r}" if spec.name is None else f"data set {spec.name}"
        local, held_out = (path and local_copies(path, cache_dir=cache_dir) for path in (spec.path, spec.held_out_path))
        spec = replace(spec, path=local, held_out_path=held_out)
        files, _ = data_files(spec)
        check_not_empty(files, where=where)
        prepared = self.write(folder, spec, where=where, cache_dir=cache_dir)
        # Data with a name is checked where a batch file names it. Rows held out by their content are on one side.
        if spec.name is None and (spec.held_out_path is not None or len({file.held_out for file in files}) > 1):
            return with_leaks(prepared, spec, self)
        return prepared

    def samples(self, table: arrow_files.Table, prepared: data_source.PreparedData) -> data_source.Dataset:
        """Returns the samples in the rows of a table."""
        return ArraySamples(table, collate=self.collate)

    def collate(self, columns: Mapping[str, arrow_files.Array]) -> dict[str, torch.Tensor]:
        """Returns the batch of some rows of the stored columns, {name: [rows, ...]}.

        A row of the batch must not depend on the other rows: ranks and micro-batches divide them in any way. By
        default see `as_tensors`.
        """
        return as_tensors(columns, copies_labels=self.copies_labels)

    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> data_source.PreparedData:
        """Returns the prepared data: from the cache where it is there, or else written now."""
        location, state = self.origin(spec)
        names = filter(None, (spec.tokenizer, *({**spec.kwargs, **spec.options}.get(name) for name in NAME_FOLDERS)))
        folders = [folder_state(folder, is_deep=False) for folder in map(Path, names) if folder.is_dir()]
        return prepare_once(
            partial(self.write_origin, spec=spec, cache_dir=cache_dir),
            name=spec.dataset or spec.name or spec.original_path or spec.path or self.name,
            location=location,
            state=[state, folders, *self.code] if folders or self.code else state,
            settings=replace(spec, padding=DataSpec.padding, sampling=DataSpec.sampling),  # of batches, not of samples
            cache_dir=cache_dir,
        )

    def open(
        self, spec: DataSpec, *, cache_dir: Path, prepared: data_source.PreparedData | None
    ) -> tuple[data_source.Dataset, data_source.Dataset]:
        """Opens the samples of `prepared` where this machine has them, or else prepares them."""
        if prepared is None or not Path(prepared.folder, DESCRIPTION).is_file():
            result = self.prepare(spec, cache_dir=cache_dir)
            if prepared is not None:
                data_source.check_same(result, prepared)
            prepared = result
        training, held_out = (
            self.samples(arrow_files.open_split(Path(prepared.folder), split), prepared) for split in arrow_files.SPLITS
        )
        return training, held_out


def described(
    folder: Path,
    *,
    samples: ArraySamples | None = None,
    num_labels: int | None = None,
    vocab_size: int | None = None,
    end_of_text_id: int | None = None,
) -> data_source.PreparedData:
    """Returns the description of the columns that were written into `folder`.

    Where they are not given, the numbers of labels and of token ids are one more than the largest.

    samples: those to train on, whose tensors are described where they are not the columns as they are.
    """
    training, held_out = (arrow_files.open_split(folder, split) for split in arrow_files.SPLITS)
    batch = (samples or ArraySamples(training, collate=as_tensors)).rows(range(min(training.num_rows, 1)))
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
    has_numbers = arrow_files.LABELS in batch and batch[arrow_files.LABELS].is_floating_point()
    is_described = samples is not None or has_numbers  # else labels are taken for numbers of classes
    if num_labels is None and shapes.get(arrow_files.LABELS) == ():
        num_labels = arrow_files.num_values(folder, arrow_files.LABELS)
    if vocab_size is None and arrow_files.TOKENS in shapes:
        vocab_size = arrow_files.num_values(folder, arrow_files.TOKENS)
    return data_source.PreparedData(
        name="",
        source="",
        digest=arrow_files.fingerprint(folder),
        num_labels=num_labels,
        num_samples=training.num_rows,
        num_held_out=held_out.num_rows,
        vocab_size=vocab_size,
        end_of_text_id=end_of_text_id,
        tensors=data_source.sample_tensors(batch, shapes) if is_described else (),
        **data_source.shape_fields(shapes),
    )


INTERVAL_S = 5.0
MEGABYTE = 1_000_000

Listener = Callable[[str], object]

_listener: ContextVar[Listener] = ContextVar("_listener", default=logging.getLogger(__name__).info)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Sends lines of progress to `listener` inside the context; outside of one, they go to the log."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class TextProgress:
    """Counts texts and their characters. doing, what: what is done, and with what, for users."""

    def __init__(self, doing: str, *, what: str = "texts", clock: Callable[[], float] = time.monotonic) -> None:
        self._doing, self._what, self._clock = doing, what, clock
        self._num_texts = self._num_characters = 0
        self._start_s = self._last_s = clock()
        self._listener = _listener.get()  # now: a tokenizer is trained in another thread, which has no context

    def add(self, num_characters: int, *, num_texts: int) -> None:
        """Adds texts, or a piece of one, and reports if the last report is long ago. num_texts: those that end."""
        self._num_texts += num_texts
        self._num_characters += num_characters
        now_s = self._clock()
        if now_s - self._last_s < INTERVAL_S:
            return
        self._last_s = now_s
        line = f"{self._doing}: {self._num_texts:,} {self._what}"
        if self._num_characters:  # images have none
            size = self._num_characters / MEGABYTE
            line += f", {size:,.0f} MB, {size / max(now_s - self._start_s, 1e-9):.1f} MB/s"
        self._listener(line)
