"""Prepares the data of a `DataSpec` once, and opens its samples as often as needed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data.prepared import Dataset, PreparedData, Source, prepare_once
from ringmaster.techniques.runtime.data.samples import ArraySamples
from ringmaster.techniques.runtime.data.sources.commands import of_command
from ringmaster.techniques.runtime.data.sources.digits import digits
from ringmaster.techniques.runtime.data.sources.factories import describe_factory, open_factory
from ringmaster.techniques.runtime.data.sources.hugging_face import hugging_face
from ringmaster.techniques.runtime.data.sources.python_stdlib import python_stdlib
from ringmaster.techniques.runtime.data.sources.text_files import text_files

SOURCES: Mapping[str, Callable[[DataSpec], Source]] = {
    "python-stdlib": python_stdlib,
    "digits": digits,
    "command": of_command,
}


def prepare(spec: DataSpec, *, cache_dir: Path) -> PreparedData:
    """Does the slow work (training a tokenizer, tokenising) once for each content, under `cache_dir`.

    Several processes may call it at the same time. Raises ValueError, with a remedy, where the data is unknown, empty,
    unreadable or too short.
    """
    check_spec(spec)
    if spec.factory is not None:
        return describe_factory(spec, open_factory(spec))
    return prepare_once(_source(spec, cache_dir), settings=spec, cache_dir=cache_dir)


def open_data(spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None = None) -> tuple[Dataset, Dataset]:
    """Opens the training and the held-out samples.

    prepared: the result of an earlier `prepare`. Exactly that data is opened, even if the files have changed since.

    Raises ValueError where the earlier data no longer exists (or is not on this machine) and the files now have other
    content.
    """
    check_spec(spec)
    if spec.factory is not None:
        datasets = open_factory(spec)
        if prepared is not None:
            _check_same(describe_factory(spec, datasets), prepared)
        return datasets
    if prepared is not None and Path(prepared.folder, "prepared.json").is_file():
        found = prepared
    else:
        found = prepare(spec, cache_dir=cache_dir)
        if prepared is not None:
            _check_same(found, prepared)
    folder = Path(found.folder)
    return ArraySamples.open(folder, "training"), ArraySamples.open(folder, "held_out")


def check_spec(spec: DataSpec) -> None:
    """Raises ValueError where `spec` is wrong in itself, without reading any data."""
    given = [name for name in ("source", "path", "dataset", "factory") if getattr(spec, name) is not None]
    if len(given) != 1:
        said = "none" if not given else " and ".join(given)
        raise ValueError(f"data: {said} given. To fix: give exactly one of source, path, dataset and factory")
    if spec.source is not None and spec.source not in SOURCES:
        close = difflib.get_close_matches(spec.source, SOURCES)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"data: there is no source {spec.source!r}{hint} There are: {', '.join(SOURCES)}")
    if not 0 <= spec.held_out < 1:
        raise ValueError(f"data: held_out {spec.held_out} is no share. To fix: give 0 <= held_out < 1")
    if spec.seq_len is not None and spec.seq_len < 2:
        raise ValueError(f"data: seq_len {spec.seq_len} is too short to predict a token. To fix: give 2 or more")
    if spec.source == "python-stdlib" and spec.seq_len is None:
        raise ValueError("data: seq_len is missing. To fix: say how many tokens a sample has, e.g. seq_len: 128")


def _source(spec: DataSpec, cache_dir: Path) -> Source:
    if spec.source is not None:
        return SOURCES[spec.source](spec)
    return text_files(spec, cache_dir=cache_dir) if spec.path is not None else hugging_face(spec)


def _check_same(found: PreparedData, wanted: PreparedData) -> None:
    if found.digest != wanted.digest:
        raise ValueError(
            f"data {wanted.name!r} has changed: its samples were {wanted.digest} and are now {found.digest}. "
            f"To fix: start the job anew, or bring back the data from {wanted.source}"
        )
