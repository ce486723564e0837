"""Metadata of an exported model's folder, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringmaster.techniques.interface.job import ModelSpec

CONFIG, FACTORY = "config.json", "model.json"
MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, the library's own limit
QUANTIZATION = "ringmaster_quantization"
"""The config key that describes a quantization by Ringmaster."""


def model_of_folder(folder: Path) -> ModelSpec | None:
    """Returns the model that a folder holds, or None where the folder does not describe it."""
    said = _read(folder / FACTORY)
    if "factory" in said:
        return ModelSpec(factory=said["factory"], kwargs=said.get("kwargs", {}))
    return ModelSpec(from_pretrained=str(folder)) if (folder / CONFIG).is_file() else None


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Returns {"method", "modules"} where Ringmaster quantized the model in the folder, else None."""
    said = [_read(folder / file).get(QUANTIZATION) for file in (CONFIG, FACTORY)]
    return next((each for each in said if isinstance(each, Mapping)), None)


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of the model's weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def tensor_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor, by name, from the file headers alone."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > min(MOST_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"{path} is no safetensors file: its header would have {num_bytes} bytes")
            header = json.loads(file.read(num_bytes))
        found |= {n: (t["dtype"], tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"}
    return found


def _read(file: Path) -> dict[str, Any]:
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return said if isinstance(said, dict) else {}
