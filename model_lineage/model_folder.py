"""The files of an untrusted model's folder that are imported: weights and descriptions, and nothing that is code."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from ringmaster.model_lineage.hub_cards import CARD, read_card
from ringmaster.model_lineage.tensors.model_files import MOST_FAULTS, files_of, name_fault, read_layout

WEIGHTS, INDEX = ".safetensors", ".safetensors.index.json"
MODEL_FILES = (f"*{WEIGHTS}", "*.json", "*.txt", "*.model", "*.jinja", CARD)
READ_AS_JSON = ("config.json", "adapter_config.json", "generation_config.json", "model.json", "tokenizer_config.json")
MOST_JSON_BYTES = 10_000_000  # the limit for each of these files
MOST_OTHER_BYTES = 200_000_000  # the limit for each other file without weights
BASE_KEY = "base_model_name_or_path"
TOKENIZER_FILES = ("tokenizer_file", "vocab_file", "merges_file")
LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model's folder that was inspected. files: by relative name, the paths of the bytes that are imported."""

    folder: Path
    files: Mapping[str, Path]

    @contextmanager
    def staged(self, *, beside: Path) -> Iterator[Path]:
        """Gives a folder with these files alone, on the disk of the folder `beside` where weights can be linked."""
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=beside, prefix=".importing-") as aside:
            for name, path in self.files.items():
                target = Path(aside, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # another disk, or another user's file
                    shutil.copyfile(path, target)
            yield Path(aside)


def inspect(folder: Path) -> ModelFolder:
    """Returns the files of a model's folder that are imported. Writes nothing.

    Other files are left out: weights in formats that can hold code, such as pytorch_model.bin, and modules. What a
    config says of code (`auto_map`) is kept, and never run.

    Raises ValueError, with all faults, where the folder holds no model, or what none may hold.
    """
    model = model_files(folder)
    faults = list(_faults(folder, model.files))
    if faults:
        more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise ValueError("; ".join(faults[:MOST_FAULTS]) + more)
    return model


def model_files(folder: Path) -> ModelFolder:
    """Returns the files of a model's folder that may be imported, without looking into them.

    Raises ValueError where one lies outside of the folder.
    """
    return ModelFolder(folder=folder, files={name: path for name, path in files_of(folder) if is_model_file(name)})


def is_model_file(name: str) -> bool:
    """Whether a file of that relative name holds weights or a description of a model, and no code."""
    return any(fnmatch(name, each) for each in MODEL_FILES)


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
            elif path.stat().st_size > MOST_OTHER_BYTES:
                yield f"{named} has more than {MOST_OTHER_BYTES // 1_000_000} MB. To fix: remove it, or shorten it"
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


def base_fault(base: str) -> str:
    """Returns why a text names no base model, neither a folder nor a name on the hub; "" if it may."""
    if len(base) > LONGEST_NAME:
        return f"has more than {LONGEST_NAME} characters"
    if Path(base).is_absolute():
        return "leads out of its folder" if ".." in PurePosixPath(base).parts else ""
    parts = base.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is no name"
    return "" if all(re.fullmatch(r"[\w.@:~ -]+", part) for part in parts) else "has characters that no name has"


def _collisions(folder: Path, files: Collection[str]) -> Iterator[str]:
    """Yields a fault for each two files that are one on disks that do not tell upper case from lower case."""
    seen: dict[str, str] = {}
    for name in files:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            yield f"{folder} has {other!r} and {name!r}, which differ in case alone. To fix: rename one"


def _read_json(path: Path, *, named: Path) -> dict[str, Any]:
    try:
        most = MOST_OTHER_BYTES if named.name.endswith(INDEX) else MOST_JSON_BYTES
        if path.stat().st_size > most:
            raise ValueError(f"it has more than {most // 1_000_000} MB")
        result = json.loads(path.read_bytes())
        if not isinstance(result, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{named} cannot be read as JSON: {error}. To fix: save the model again") from error
    return result


def _faults_of_config(named: Path, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields a fault for each other file that a config names outside of the model's folder."""
    if named.name == "adapter_config.json" and (base := fields.get(BASE_KEY)) is not None:
        fault = base_fault(base) if isinstance(base, str) else "is no text"
        if fault:
            yield f"{named} has the {BASE_KEY} {base!r:.80}, which {fault}. To fix: name a hub name or a folder there"
    for key in TOKENIZER_FILES if named.name == "tokenizer_config.json" else ():
        file = fields.get(key)
        if file is not None and (not isinstance(file, str) or name_fault(file)):
            yield f"{named} has the {key} {file!r:.80}, which is no file of the model. To fix: remove {key} there"


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
            yield f"{folder / name} names the file {shard!r:.80}, which is no file of the model. To fix: save it again"
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


Fetch = Callable[[str, tuple[str, ...]], Path]
"""Downloads the files of a hub name that match the patterns and returns their folder. Raises OSError on failure."""
