"""Data from a user's own function, which returns two map-style data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.techniques.data_source import Dataset, DataSource, PreparedData, SampleTensor, check_same
from ringmaster.techniques.dotted_names import resolve
from ringmaster.techniques.job import DataSpec

# Enough samples to detect other data, few enough to read them each time.
MAX_FINGERPRINTED = 128


class Factory(DataSource):
    """The samples that a user's function returns. Nothing is stored: each process calls the function."""

    name = "factory"
    reads = ("factory",)

    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Calls the factory and describes its samples."""
        return describe_factory(spec, open_factory(spec))

    def open(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> tuple[Dataset, Dataset]:
        """Calls the factory, and compares its samples with those that were prepared."""
        datasets = open_factory(spec)
        if prepared is not None:
            check_same(describe_factory(spec, datasets), prepared)
        return datasets


def open_factory(spec: DataSpec) -> tuple[Dataset, Dataset]:
    """Calls the factory and returns its (training, held_out).

    Raises ValueError where the result is something else, or has no training samples.
    """
    assert spec.factory is not None
    made = resolve(spec.factory)(**spec.kwargs)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(
            f"data factory {spec.factory} returned {type(made).__name__}. To fix: return (training, held_out)"
        )
    for name, dataset in zip(("training", "held_out"), made, strict=True):
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"data factory {spec.factory}: {name} is no map-style data set. To fix: give it __len__ and "
                f"__getitem__(index) -> dict of tensors"
            )
    if len(made[0]) == 0:
        raise ValueError(f"data factory {spec.factory} returned no training samples")
    _check_sample(made[0][0], factory=spec.factory)
    return made


def describe_factory(spec: DataSpec, datasets: tuple[Dataset, Dataset]) -> PreparedData:
    """Returns the properties of a factory's data that a model depends on.

    The training set may have the attributes `digest`, `vocab_size` and `num_labels`. Shapes are read from its first
    sample. Without a `digest`, up to 128 samples of each set, evenly spaced, are fingerprinted.
    """
    assert spec.factory is not None
    training, held_out = datasets
    sample = training[0]
    kind = "tokens" if "input_ids" in sample else "images" if "pixel_values" in sample else "other"
    image = tuple(sample["pixel_values"].shape) if kind == "images" else ()
    return PreparedData(
        name=spec.factory.rpartition(":")[2],
        digest=str(getattr(training, "digest", None) or _fingerprint(datasets)),
        num_samples=len(training),
        num_held_out=len(held_out),
        kind=kind,
        vocab_size=getattr(training, "vocab_size", None),
        seq_len=int(sample["input_ids"].shape[-1]) if kind == "tokens" else None,
        num_labels=getattr(training, "num_labels", None),
        image_size=int(image[-1]) if len(image) == 3 and image[-1] == image[-2] else None,
        num_channels=int(image[0]) if len(image) == 3 else None,
        source=spec.factory,
        tensors=_tensors(sample) if kind == "tokens" and sample["input_ids"].ndim > 1 else (),
    )


def _tensors(sample: Mapping[str, Any]) -> tuple[SampleTensor, ...]:
    """Describes the tensors of a sample that is not one sequence of tokens, such as a pair of them."""
    return tuple(
        SampleTensor(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
        for name, value in sample.items()
    )


def _check_sample(sample: Any, *, factory: str) -> None:
    if not isinstance(sample, dict) or not all(hasattr(value, "shape") for value in sample.values()):
        raise ValueError(
            f"data factory {factory}: a sample is {type(sample).__name__}. To fix: return a dict of tensors, "
            f"named as the model's forward names its arguments"
        )


def _fingerprint(datasets: tuple[Dataset, Dataset]) -> str:
    from ringmaster.techniques.training.dropout import seed_generators

    sha = hashlib.sha256()
    for dataset in datasets:
        sha.update(str(len(dataset)).encode())
        chosen = np.linspace(0, len(dataset) - 1, num=min(len(dataset), MAX_FINGERPRINTED), dtype=np.int64)
        for index in chosen:
            seed_generators(int(index))  # so that random augmentation is the same each time
            for name, value in sorted(dataset[int(index)].items()):
                array = np.ascontiguousarray(np.asarray(value))
                sha.update(f"{name} {array.dtype.str} {array.shape}".encode())
                sha.update(array.tobytes())
    return sha.hexdigest()[:16]
