"""What the folder of an exported model says of itself, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringmaster.techniques.job import ModelSpec

CONFIG, FACTORY = "config.json", "model.json"
QUANTIZATION = "ringmaster_quantization"
"""Where a config says what was quantized here."""


def model_of_folder(folder: Path) -> ModelSpec | None:
    """The model that a folder holds, None where the folder does not say."""
    said = _read(folder / FACTORY)
    if "factory" in said:
        return ModelSpec(factory=said["factory"], kwargs=said.get("kwargs", {}))
    return ModelSpec(from_pretrained=str(folder)) if (folder / CONFIG).is_file() else None


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """{"method", "modules"} where the folder holds a model that was quantized here, else None."""
    said = [_read(folder / file).get(QUANTIZATION) for file in (CONFIG, FACTORY)]
    return next((each for each in said if isinstance(each, Mapping)), None)


def weight_bytes(folder: Path) -> int:
    """Bytes of the model's weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def tensor_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor, by name, from the headers alone."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {n: (t["dtype"], tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"}
    return found


def _read(file: Path) -> dict[str, Any]:
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return said if isinstance(said, dict) else {}
