"""Metadata of an exported model's folder, read without torch."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError, safe_open

from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import ModelSpec

CONFIG, FACTORY = "config.json", "model.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
LOSS = "loss.json"
"""The file of the loss that a model was trained with, where its job names one, and the kind of data."""
REFERENCE = "reference"
"""The key there of the folder or hub name of the weights with which the loss compares those of a whole model."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of the weights of a model, or the one that names the files of their parts."""

MAX_NAMED = 3
COPY_AGAIN = "To fix: copy or save the model again"
QUANTIZATION = "ringmaster_quantization"
"""The config key that describes a quantization by Ringmaster."""


def model_of_folder(folder: Path) -> ModelSpec | None:
    """Returns the model that a folder holds, or None where the folder does not describe it."""
    content = read_json(folder / FACTORY)
    if "factory" in content:
        return ModelSpec(factory=content["factory"], kwargs=content.get("kwargs", {}))
    return ModelSpec(from_pretrained=str(folder)) if (folder / CONFIG).is_file() else None


def teacher_model(job: Job, folder: Path | None) -> ModelSpec:
    """Returns the model of a job's teacher. Raises ValueError where neither the job nor the folder describes it."""
    assert job.adaptation is not None
    model = job.adaptation.teacher_model or (model_of_folder(folder) if folder is not None else None)
    if model is None:
        raise ValueError(
            f"distillation: the teacher {job.adaptation.teacher} does not name its model. "
            f"To fix: give adaptation.teacher_model"
        )
    return model


def config_in(name: str) -> SimpleNamespace | None:
    """Returns the text part of the config in a folder, or of a model on the hub; None where there is none.

    It is as it was written, without the defaults of its class, which may take much memory to be made.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        file = Path(name) / CONFIG if Path(name).is_dir() else Path(hf_hub_download(name, CONFIG))
    except (OSError, ValueError, HfHubHTTPError):
        return None
    content = read_json(file)
    fields = content.get("text_config", content)
    return SimpleNamespace(**fields) if isinstance(fields, dict) and fields else None


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Returns {"method", "modules"} where Ringmaster quantized the model in the folder, else None."""
    content = [read_json(folder / file).get(QUANTIZATION) for file in (CONFIG, FACTORY)]
    return next((each for each in content if isinstance(each, Mapping)), None)


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of the model's weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of the model's weights: the one, else those of the index, else all that are there."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    places = read_json(folder / INDEX).get("weight_map", {})
    return [folder / name for name in sorted(set(places.values()))] or sorted(folder.glob("*.safetensors"))


def tensor_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor, by name, from the file headers alone.

    Raises ValueError if a file is missing or damaged, as far as its header and size show.
    """
    if folder.is_dir() and not has_weights(folder):
        raise ValueError(
            f"model: the weights of {folder} are in the tensor store alone. To fix: let `ringmaster lineage "
            "restore FOLDER` write them there again, or name the registered model, as models:/NAME/VERSION"
        )
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        paths = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
        return {name: tensor for path in paths for name, tensor in tensors_in(path).items()}
    places = read_json(index).get("weight_map")
    if not isinstance(places, Mapping) or not all(isinstance(each, str) for each in places.values()):
        raise ValueError(f"model: {index} does not map tensors to files. {COPY_AGAIN}")
    files = {name: tensors_in(folder / name) for name in sorted(set(places.values()))}
    if absent := [name for name, file in places.items() if name not in files[file]]:
        raise ValueError(f"model: {index} has {absent[0]} in {places[absent[0]]}, which lacks it. {COPY_AGAIN}")
    return {name: files[file][name] for name, file in places.items()}


def has_weights(folder: Path) -> bool:
    """Returns whether a folder exists, and has no references to the tensor store in place of its weights."""
    return folder.is_dir() and not any(folder.glob("*.safetensors.stored"))


def metadata_of(path: Path) -> dict[str, str]:
    """Returns the metadata in the header of a safetensors file; {} where it is damaged, which its readers report."""
    with suppress(SafetensorError), safe_open(path, framework="np") as file:
        return file.metadata() or {}
    return {}


def tensors_in(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor in a file, in the order of their bytes."""
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except OSError as error:
        raise ValueError(f"model: {path} cannot be read: {error}. {COPY_AGAIN}") from error
    except SafetensorError as error:
        raise ValueError(
            f"model: {path} is not a valid safetensors file, or not whole: {error}. {COPY_AGAIN}"
        ) from error


def misfits(stored: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns a message for each tensor that is missing, that a model does not have, or that has another shape."""
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    wrong += [f"{name} has no place" for name in sorted(stored.keys() - wanted.keys())]
    shapes = [(name, list(stored[name]), list(wanted[name])) for name in sorted(stored.keys() & wanted.keys())]
    return wrong + [f"{name} is {one}, not {other}" for name, one, other in shapes if one != other]


def few(faults: Sequence[str]) -> str:
    """Returns the first of some faults, and how many more there are."""
    more = f", and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
    return ", ".join(faults[:MAX_NAMED]) + more


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} where there is none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
