"""Import of models from folders, files of other programs and Hugging Face's hub, with their cards' base models.

Of an untrusted folder, weights and descriptions are imported, and nothing that is code (`inspect`).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ringmaster.files import link_or_copy
from ringmaster.model_lineage.base_models import (
    MODEL_FILES,
    WEIGHTS,
    Fetch,
    ModelFiles,
    base_fault,
    model_files,
    planned_bases,
    whole_or_nothing,
)
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.model_pages import CARD, read_card
from ringmaster.model_lineage.records import ModelRecord
from ringmaster.model_lineage.snapshot import Snapshot
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.model_files import MAX_FAULTS, name_fault, read_layout
from ringmaster.text import join_limited

INDEX = ".safetensors.index.json"
READ_AS_JSON = ("config.json", "adapter_config.json", "generation_config.json", "model.json", "tokenizer_config.json")
MAX_JSON_BYTES = 10_000_000  # the limit for each of these files
MAX_OTHER_BYTES = 200_000_000  # the limit for each other file without weights
BASE_KEY = "base_model_name_or_path"
TOKENIZER_FILES = ("tokenizer_file", "vocab_file", "merges_file")

Converter = Callable[[Path], AbstractContextManager[Path]]
"""Makes a temporary folder with the model of a file or folder. Raises ValueError, with a remedy, where it cannot."""


def import_model(
    ledger: Ledger,
    source: str,
    *,
    name: str,
    snapshot: Snapshot,
    store: TensorStore,
    fetch: Fetch,
    converter_of: Callable[[Path], Converter | None] = lambda _: None,
) -> ModelRecord:
    """Records the model in a folder, of a file or of a hub name as `name`, and adds it to the tensor store.

    The base models on its card become its parents. A base that the lineage contains is found by its source or its name.
    Any other base gets a node without weights, and its own card is followed in turn. Importing the same model again
    returns the same node. All inputs are checked before anything is copied, and weights and descriptions alone are
    (`inspect`); if a later step fails, what was recorded is removed again.

    converter_of: of a file or folder without safetensors, such as a checkpoint of another framework.

    Raises ValueError (LedgerError, TensorStoreError) if there is no valid model, and OSError if the hub cannot be
    reached.
    """
    place, given = Path(source).expanduser(), ExitStack()
    if place.exists():
        source = str(place.resolve())
    if place.exists() and (converter := converter_of(place)) is not None:
        place = given.enter_context(converter(place.resolve()))
    elif place.is_file():
        raise ValueError(f"{place} is a file, and no folder. To fix: unpack it, and name the model's folder")
    elif not place.is_dir():
        place = fetch(source, MODEL_FILES)
    with given:
        files = inspect(place)
        card = read_card(place)
        bases = planned_bases(card, snapshot, fetch, source=source)
        folder = given.enter_context(staged(files, near=store.folder))
        attempt = given.enter_context(whole_or_nothing(ledger, store))
        stored = store.add(folder, owner=attempt.owner)
        return attempt.record(
            name,
            key=f"import {name} {stored.id}",
            source=source,
            folder=folder,
            relation=card.relation,
            bases=bases,
            keep=lambda record: ledger.keep_tensors(record, folder, store=store),
        )


@contextmanager
def staged(files: ModelFiles, *, near: Path) -> Iterator[Path]:
    """Gives a folder with these files alone, on the disk of the folder `near` where weights can be linked."""
    near.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=near, prefix=".importing-") as aside:
        for name, path in files.items():
            target = Path(aside, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, target)
        yield Path(aside)


def inspect(folder: Path) -> ModelFiles:
    """Returns the files of a model's folder that are imported. Writes nothing.

    Other files are left out: weights in formats that can hold code, such as pytorch_model.bin, and modules. What a
    config names as code (`auto_map`) is kept, and never run.

    Raises ValueError, with all faults, where the folder holds no model, or what none may hold.
    """
    files = model_files(folder)
    if faults := list(_faults(folder, files)):
        raise ValueError(join_limited(faults, between="; ", most=MAX_FAULTS))
    return files


def _faults(folder: Path, files: Mapping[str, Path]) -> Iterator[str]:
    if not any(name.endswith(WEIGHTS) for name in files):
        yield f"{folder} holds no safetensors. To fix: name a model's folder, or a hub name that has them"
    yield from _collisions(folder, files)
    tensors: dict[str, frozenset[str]] = {}
    for name, path in files.items():
        named = folder / name
        try:
            if name.endswith(WEIGHTS):
                tensors[name] = frozenset(tensor.name for tensor in read_layout(path, named=str(named)).tensors)
            elif PurePosixPath(name).name in READ_AS_JSON or name.endswith(INDEX):
                yield from _faults_of_config(named, _read_json(path, named=named))
            elif path.stat().st_size > MAX_OTHER_BYTES:
                yield f"{named} has more than {MAX_OTHER_BYTES // 1_000_000} MB. To fix: remove it, or shorten it"
        except ValueError as error:
            yield str(error)
    damaged = {name for name in files if name.endswith(WEIGHTS)} - tensors.keys()
    for name in files:
        if name.endswith(INDEX):
            yield from _faults_of_index(folder, name, files, tensors, damaged)
    yield from _missing_shards(folder, files)
    try:
        card = read_card(folder)
    except ValueError as error:
        yield str(error)
        return
    for base in card.base_models:
        if fault := base_fault(base):
            yield f"{folder / CARD} names the base_model {base!r:.80}, which {fault}. To fix: mend the card"


def _collisions(folder: Path, files: Collection[str]) -> Iterator[str]:
    """Yields a fault for each two files that are one on case-insensitive file systems."""
    seen: dict[str, str] = {}
    for name in files:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            yield f"{folder} has {other!r} and {name!r}, which differ in case alone. To fix: rename one"


def _read_json(path: Path, *, named: Path) -> dict[str, Any]:
    try:
        most = MAX_OTHER_BYTES if named.name.endswith(INDEX) else MAX_JSON_BYTES
        if path.stat().st_size > most:
            raise ValueError(f"it has more than {most // 1_000_000} MB")
        result = json.loads(path.read_bytes())
        if not isinstance(result, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{named} cannot be read as JSON: {error}. To fix: save the model again") from error
    return result


def _faults_of_config(named: Path, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields a fault for each other file that a config names outside of the model's folder."""
    if named.name == "adapter_config.json" and (base := fields.get(BASE_KEY)) is not None:
        fault = base_fault(base) if isinstance(base, str) else "is not text"
        if fault:
            yield f"{named} has the {BASE_KEY} {base!r:.80}, which {fault}. To fix: name a hub name or a folder there"
    for key in TOKENIZER_FILES if named.name == "tokenizer_config.json" else ():
        file = fields.get(key)
        if file is not None and (not isinstance(file, str) or name_fault(file)):
            yield f"{named} has the {key} {file!r:.80}, which the model does not have. To fix: remove {key} there"


def _faults_of_index(
    folder: Path, name: str, files: Collection[str], tensors: Mapping[str, frozenset[str]], damaged: Collection[str]
) -> Iterator[str]:
    """Yields a fault for each shard that an index names and the folder lacks, or that lacks a tensor of the index."""
    try:
        weight_map = _read_json(folder / name, named=folder / name).get("weight_map")
    except (ValueError, OSError):  # reported before
        return
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        yield f"{folder / name} has no weight_map from tensors to files. To fix: save the model again"
        return
    of_shard: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        of_shard.setdefault(shard, set()).add(tensor)
    for shard, wanted in of_shard.items():
        path = (PurePosixPath(name).parent / shard).as_posix()
        if name_fault(shard) or not shard.endswith(WEIGHTS):
            yield f"{folder / name} names the file {shard!r:.80}, which the model does not have. To fix: save it again"
        elif path not in files:
            yield f"{folder / name} names the file {shard!r:.80}, which is not there. To fix: fetch or save it again"
        elif path not in damaged and (lost := sorted(wanted - tensors[path])):
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            yield f"{folder / path} lacks {lost[0]!r:.80}{more}, which {name} says it has. To fix: save the model again"


def _missing_shards(folder: Path, files: Collection[str]) -> Iterator[str]:
    """Yields a fault for each set of numbered files that is not complete, or that has no index."""
    wanted: dict[tuple[str, str], set[str]] = {}
    for name in files:
        if result := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name):
            wanted.setdefault((result[1], result[3]), set()).add(result[2])
    for (stem, total), numbers in wanted.items():
        if lost := int(total) - len(numbers):
            yield f"{folder} lacks {lost} of the {int(total)} files {stem}-*-of-{total}{WEIGHTS}. To fix: fetch them"
        elif f"{stem}{INDEX}" not in files:
            yield f"{folder} lacks {stem}{INDEX}, the index of its weights. To fix: fetch it, or save the model again"
