"""Metadata of an exported model's folder, read without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringmaster.techniques.job import ModelSpec

CONFIG, FACTORY = "config.json", "model.json"
MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, the library's own limit
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of the weights of a model, or the one that names the files of their parts."""

COPY_AGAIN = "To fix: copy or save the model again"
QUANTIZATION = "ringmaster_quantization"
"""The config key that describes a quantization by Ringmaster."""


def model_of_folder(folder: Path) -> ModelSpec | None:
    """Returns the model that a folder holds, or None where the folder does not describe it."""
    content = _read(folder / FACTORY)
    if "factory" in content:
        return ModelSpec(factory=content["factory"], kwargs=content.get("kwargs", {}))
    return ModelSpec(from_pretrained=str(folder)) if (folder / CONFIG).is_file() else None


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Returns {"method", "modules"} where Ringmaster quantized the model in the folder, else None."""
    content = [_read(folder / file).get(QUANTIZATION) for file in (CONFIG, FACTORY)]
    return next((each for each in content if isinstance(each, Mapping)), None)


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of the model's weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def tensor_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor, by name, from the file headers alone.

    Raises ValueError if a file is missing or damaged, as far as its header and size show.
    """
    if folder.is_dir() and not has_weights(folder):
        raise ValueError(
            f"model: the weights of {folder} are in the tensor store alone. To fix: name the registered model, as "
            "models:/NAME/VERSION, or let `ringmaster lineage restore NAME FOLDER` write its files"
        )
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        paths = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
        return {name: tensor for path in paths for name, tensor in tensors_in(path).items()}
    places = _read(index).get("weight_map")
    if not isinstance(places, Mapping) or not all(isinstance(each, str) for each in places.values()):
        raise ValueError(f"model: {index} does not say which file has which tensor. {COPY_AGAIN}")
    files = {name: tensors_in(folder / name) for name in sorted(set(places.values()))}
    if absent := [name for name, file in places.items() if name not in files[file]]:
        raise ValueError(f"model: {index} has {absent[0]} in {places[absent[0]]}, which lacks it. {COPY_AGAIN}")
    return {name: files[file][name] for name, file in places.items()}


def has_weights(folder: Path) -> bool:
    """Returns whether a folder exists, and has no references to the tensor store in place of its weights."""
    return folder.is_dir() and not any(folder.glob("*.safetensors.stored"))


def metadata_of(path: Path) -> dict[str, str]:
    """Returns the metadata in the header of a safetensors file; {} where it is damaged, which its readers report."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        try:
            header: Any = json.loads(file.read(min(num_bytes, MOST_HEADER_BYTES)))
        except ValueError:
            return {}
    result = header.get("__metadata__") if isinstance(header, dict) else None
    return result if isinstance(result, dict) else {}


def tensors_in(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor in a file."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            num_left = os.fstat(file.fileno()).st_size - file.tell()
            header: Any = json.loads(file.read(num_bytes) if num_bytes <= min(num_left, MOST_HEADER_BYTES) else b"")
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        wanted = num_bytes + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        result = {name: (str(t["dtype"]), tuple(map(int, t["shape"]))) for name, t in tensors.items()}
    except OSError as error:
        raise ValueError(f"model: {path} cannot be read: {error.strerror}. {COPY_AGAIN}") from error
    except (AttributeError, KeyError, IndexError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"model: {path} is not a valid safetensors file. {COPY_AGAIN}") from error
    if wanted != num_left:
        raise ValueError(f"model: {path} has {num_left + 8} bytes, not the {wanted + 8} of its tensors. {COPY_AGAIN}")
    return result


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
