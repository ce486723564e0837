"""The order of a scoring worker, and what models in folders have in common: their base and tokenizer. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.techniques.job import DataSpec, Job, ModelSpec
from ringmaster.techniques.models.model_folders import model_of_folder
from ringmaster.techniques.models.peft_format import base_name, base_of, is_adapter, quantized_base, read_adapter
from ringmaster.techniques.processes.order import Slot

SCORES = frozenset({"num_tokens", "log_probabilities", "predictions", "probabilities"})
"""The names of a row's scores that are not sums of a metric."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data that a model is trained on. prepared: the JSON form of its `PreparedData`."""

    spec: DataSpec
    prepared: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ScoringOrder:
    """Score `models` (folders by name) on the same rows; rank 0 writes the results into `folder`.

    job: the job whose loss, precision, metrics (beside the default ones) and held-out rows are used. The models' own
        specs are read from their folders.
    slots: the devices. Over several, each with a rank of its own, the models are divided by tensor parallelism.
    data: the JSON form of the `PreparedData` whose held-out rows are read. Without it (and without cases) the job's
        data is prepared, and read with the tokenizer of the first model if the job names none.
    cases: in place of data, a file of literal cases: JSON with "texts" (and "labels", one each), or an .npz of columns.
    encode: "package.module:function" that converts a list of texts to columns of tensors; else each model's tokenizer.
    slicers: dotted functions, by name, each from a row (a dict of tensors) to the name of its slice.
    keep_inputs: whether the file also contains the rows themselves.
    max_rows: the most rows; by default as many as the job's evaluation reads, or all of data that is scored as a whole.
    is_whole: whether all samples of the data are scored, those for training too: of data that nothing is trained on.
    trained_on: data whose samples for training are left out where they are among the samples to score.
    shares_batches: whether adapters of one base are scored in one batch; the scores are the same.
    import_paths: folders appended to the import path.
    rank: which of the ranks this is.
    """

    job: Job
    models: Mapping[str, str]
    slots: tuple[Slot, ...]
    cache_dir: str
    folder: str
    data: Mapping[str, Any] | None = None
    cases: str | None = None
    encode: str | None = None
    slicers: Mapping[str, str] = field(default_factory=dict)
    keep_inputs: bool = False
    max_rows: int | None = None
    is_whole: bool = False
    trained_on: TrainingData | None = None
    shares_batches: bool = True
    import_paths: tuple[str, ...] = ()
    rank: int = 0


def model_spec(folder: Path) -> ModelSpec:
    """The spec of the model in a folder that `export_model` or `save_pretrained` wrote.

    Raises ValueError if the folder holds no model.
    """
    if is_adapter(folder):
        base = base_of(folder)
        return model_spec(base) if base else ModelSpec(from_pretrained=base_name(folder))
    if (spec := model_of_folder(folder.absolute())) is not None:
        return spec
    raise ValueError(f"{folder} holds no model. To fix: give a folder that a job exported or `save_pretrained` wrote")


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def base_key(folder: Path) -> str | None:
    """A key that is equal for models that can be computed over one base; None for a model that must run alone.

    The key of an adapter is its base's folder or hub name; that of a full model is its own folder.
    """
    if not is_adapter(folder):
        return str(folder.resolve())
    try:
        adapter, base = read_adapter(folder), base_name(folder)
        if adapter.dora or adapter.kind == "prompt" or quantized_base(folder):
            return None
    except (OSError, ValueError):  # reported when the model runs alone
        return None
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def tokenizer_of(folder: Path) -> str:
    """The folder or hub name of the tokenizer of the model in `folder`.

    An adapter without a tokenizer of its own uses its base's.
    """
    if not is_adapter(folder) or (folder / "tokenizer.json").is_file():
        return str(folder)
    try:
        return base_name(folder)
    except ValueError:  # reported when the weights are loaded
        return str(folder)


def tokenizer_digest(name: str) -> str:
    """A digest of the tokenizer files in a folder, equal for equal tokenizers; a hub name is returned unchanged."""
    folder, digest = Path(name), hashlib.sha256()
    if not folder.is_dir():
        return name
    for file in (folder / each for each in FILES):
        if file.is_file():
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
