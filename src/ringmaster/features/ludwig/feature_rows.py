"""Rows of a table with features of several types: numbers, categories, binary values, texts and images.

What an encoding depends on besides the row is measured on the rows to train on, and recorded with the samples: the
names of categories, and the mean and the standard deviation of numbers. An exported model carries it, so that it
predicts from rows alone. Source: Molino et al., Ludwig: a type-based declarative deep learning toolbox
(arXiv:1909.07930).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmaster.codec import digest
from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.arrow_files import Array, Table
from ringmaster.techniques.data.class_labels import (
    ClassLabels,
    as_class_name,
    check_number,
    in_order,
    notes_on,
    read_number,
)
from ringmaster.techniques.data.images import pixels_of, read_image
from ringmaster.techniques.data.row_files import MAX_FAULTS
from ringmaster.techniques.data.row_samples import DEFAULT_MAX_LENGTH
from ringmaster.techniques.data.sample_checks import MAX_LOST_SHARE
from ringmaster.techniques.data.samples import ArraySamples
from ringmaster.techniques.data_source import DataOptions, Dataset, PreparedData
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.models.model_folders import FACTORY, read_json

if TYPE_CHECKING:
    import torch

NUMBER, BINARY, CATEGORY, TEXT, IMAGE = "number", "binary", "category", "text", "image"
UNKNOWN = "<UNK>"
"""The category, of number 0, of what the rows to train on do not have, and of missing values."""
LARGEST = float(np.finfo(np.float32).max)
NO_CATEGORIES = (list, tuple, dict, bytes)
"""Types of values whose text is no name of a category: one in a file of another form would have another text."""

Feature = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(DataOptions):
    """The features, inputs before outputs, and the model whose encoding is used.

    features: each has a `name` and a `type`, and may have a `column` (by default the name), `is_output`, for numbers
        `normalization` ("zscore", "minmax" or None) and for images `size` and `channels`.
    encoded_as: the folder of an exported model, whose categories and statistics are used in place of the data's own.
    """

    features: Sequence[Feature] = ()
    encoded_as: str | None = None


class FeatureRows(row_source.RowSource):
    """A tensor for each feature of a row, named by `tensor_names`.

    Numbers are normalised, float32 []; categories and binary values are int64 []; texts are int32 [tokens], token + 1,
    so that 0 is padding; images are bytes [channels, size, size], scaled to -1..1. A missing number is the mean, a
    missing category unknown, a missing text empty, and a missing binary value its first class; outputs may not be
    missing. The NaN that pandas writes for one is a missing category or binary value.

    measured: the features with what was measured: `categories` and `unknown` of categories, `shift` and `scale` of
        numbers, `size` and `channels` of images, `num_tokens` of texts.
    """

    name = "features"
    version = 4
    reads = ("path",)
    options_class = FeatureOptions
    file_role = IMAGE
    keeps_files = False  # samples depend on what was measured on all rows
    measured: Sequence[Feature] = ()

    @cached_property
    def encoders(self) -> list[ValueEncoder]:
        """The encoder of each feature."""
        return [ValueEncoder(each) for each in self.measured]

    def check(self, spec: DataSpec) -> None:
        """Refuses windows, whose rows are chosen after the measurement, and options that are not there."""
        super().check(spec)
        features = self.options(spec).features
        if spec.window is not None:
            raise ValueError("data: kind features reads all rows. To fix: remove the window")
        if not {True, False} <= {bool(each.get("is_output")) for each in features}:
            raise ValueError("data: kind features has no input or no output. To fix: list both in kwargs.features")

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> row_source.Columns:
        """Returns the column of each feature, under the name that `role` gives it."""
        there = row_source.columns_of_files(spec, kind=self.name) if available is None else available
        columns = {role(each): each.get("column") or each["name"] for each in self.options(spec).features}
        if missing := [column for column in columns.values() if column not in there]:
            raise ValueError(
                f"{spec.path} has no column {', '.join(missing)}; its rows have {', '.join(sorted(there))}. To fix: "
                "set the column of the feature to one of them"
            )
        optional = frozenset(role(each) for each in self.options(spec).features if not each.get("is_output"))
        unread = tuple(name for name in there if name not in columns.values())
        return row_source.Columns(columns=columns, roles=tuple(columns), optional=optional, unread=unread)

    def texts(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Iterable[str]:
        """Returns the texts of a row."""
        return [row[role(each)] or "" for each in self.options(context.spec).features if each["type"] == TEXT]

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tensors of a row."""
        arrays = (encode(row[role(encode.feature)], context) for encode in self.encoders)
        return dict(zip(tensor_names(self.measured), arrays, strict=True))

    def collate(self, columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Returns a batch, with the pixels of images, which are bytes, in -1..1."""
        scaled = {
            name: rows.astype(np.float32) / np.float32(127.5) - np.float32(1) if rows.dtype == np.uint8 else rows
            for name, rows in columns.items()
        }
        return super().collate(scaled)

    def samples(self, table: Table, prepared: PreparedData) -> Dataset:
        """Returns the samples in the rows of a table, which are padded if there are texts."""
        if prepared.seq_len is None:
            return ArraySamples(table, collate=self.collate)
        return super().samples(table, prepared)

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes a sample of each row, encoded by the statistics of the rows to train on, or of another model's
        rows."""
        kind, source = copy.copy(self), self.options(spec).encoded_as
        kind.measured = _features_of(Path(source), self.options(spec).features) if source else self._measure(spec)
        names = [n for n, each in zip(tensor_names(kind.measured), kind.measured, strict=True) if each["type"] == TEXT]
        kind.needs_tokenizer = bool(names)  # type: ignore[misc]
        kind.padding = dict.fromkeys(names, 0)  # type: ignore[misc]
        prepared = super(FeatureRows, kind).write(folder, spec, where=where, cache_dir=cache_dir)
        features = tuple(
            {**each, "num_tokens": prepared.vocab_size, "max_length": spec.seq_len or DEFAULT_MAX_LENGTH}
            if each["type"] == TEXT
            else dict(each)
            for each in kind.measured
        )
        first = next(each for each in features if each.get("is_output"))
        widths = [tensor.shape[0] for tensor in prepared.tensors if tensor.name in names]
        return replace(
            prepared,
            features=features,
            notes=(*prepared.notes, *_notes_on(kind.measured)),
            digest=digest([prepared.digest, features]),
            seq_len=max(widths) if widths else None,
            num_labels=num_outputs(first),
        )

    def _measure(self, spec: DataSpec) -> list[Feature]:
        """Returns the features with their statistics over the rows to train on."""
        features, columns = self.options(spec).features, self.columns(spec)
        seen: dict[str, list[Any]] = {role(each): [] for each in features}
        names: dict[str, set[str]] = {role(each): set() for each in features}
        for row in self.rows_of_path(spec):
            for key, value in () if row.held_out else self.values(row, columns, spec=spec).items():
                if _is_missing(value):
                    continue
                if key.startswith((CATEGORY, BINARY)):
                    if isinstance(value, NO_CATEGORIES):
                        continue  # it is refused with its row
                    names[key].add(as_class_name(value))
                    check_number(len(names[key]), column=columns.columns[key])
                elif key.startswith(NUMBER) and math.isfinite(read_number(value)):
                    seen[key].append(value)  # others are refused with their rows
                elif key.startswith(IMAGE) and not seen[key]:
                    seen[key].append(value)
        return [
            {**each, **_measured(each, seen[role(each)], names[role(each)], column=columns.columns[role(each)])}
            for each in features
        ]


def role(feature: Feature) -> str:
    """Returns what a feature is called among the columns: its type and name, and whether it is predicted."""
    return f"{feature['type']}{' output' if feature.get('is_output') else ''} {feature['name']}"


def tensor_names(features: Sequence[Feature]) -> list[str]:
    """Returns the name of each feature's tensor: input_0, input_1, ...; labels, labels_1, ... of outputs."""
    inputs = sum(not each.get("is_output") for each in features)
    outputs = range(len(features) - inputs)
    return [*(f"input_{number}" for number in range(inputs)), *("labels" if k == 0 else f"labels_{k}" for k in outputs)]


def num_outputs(feature: Feature) -> int:
    """Returns the number of logits of an output: its classes, or one of a number."""
    return len(feature["categories"]) if "categories" in feature else 1


class ValueEncoder:
    """Turns the values of one feature into arrays. feature: with what was measured of it."""

    def __init__(self, feature: Feature) -> None:
        self.feature = feature
        self._labels = ClassLabels(feature.get("categories", ()))

    def __call__(self, value: Any, context: row_source.SampleContext) -> Any:
        """Returns the array of a value. Raises ValueError, with the feature's name, where it is none of its type."""
        feature, name = self.feature, self.feature["name"]
        is_nan = isinstance(value, float) and math.isnan(value)
        # Numbers refuse NaN, and models of earlier releases may have learnt a category of this name.
        takes_nan = feature["type"] == NUMBER or "nan" in self._labels.names
        is_missing = _is_missing(value) and not (is_nan and takes_nan)
        if is_missing and (feature.get("is_output") or feature["type"] == IMAGE):
            raise ValueError(f"{role(feature)} has no value. To fix: add the value, or remove the row")
        if feature["type"] == NUMBER:
            number = feature["shift"] if is_missing else read_number(value)
            scaled = (number - feature["shift"]) / feature["scale"]
            if not abs(scaled) <= LARGEST:  # also of NaN
                raise ValueError(f"{name} is {value!r:.80}, which is not a number of 32 bits. To fix: correct it")
            return np.float32(scaled)
        if feature["type"] == TEXT:
            if not isinstance(value, (str, int, float, type(None))):
                raise ValueError(f"{name} is {type(value).__name__}. To fix: give it a text")
            tokens = context.tokenizer.encode("" if is_missing else str(value))
            return np.asarray(context.tokenizer.with_special(tokens, at_most=context.max_length).tokens, np.int32) + 1
        if feature["type"] == IMAGE:
            return pixels_of(read_image(value), mode="L" if feature["channels"] == 1 else "RGB", size=feature["size"])
        if isinstance(value, NO_CATEGORIES):
            raise ValueError(
                f"{name} is {type(value).__name__}. To fix: give a text or a number, or name another column"
            )
        try:
            return np.int64(0 if is_missing else self._labels.number(value))
        except ValueError:
            if feature["unknown"]:
                return np.int64(0)
            raise


def _measured(feature: Feature, values: Sequence[Any], names: set[str], *, column: str) -> dict[str, Any]:
    kind = feature["type"]
    if kind == CATEGORY:
        known = list(in_order(names).names)
        is_open = not feature.get("is_output")
        return {"unknown": is_open, "categories": [UNKNOWN, *known] if is_open else known}
    if kind == BINARY:
        if len(names) != 2:
            raise ValueError(
                f"binary feature {feature['name']}: column {column!r} has {len(names)} values "
                f"({', '.join(sorted(names)[:MAX_FAULTS])}). To fix: set its type to category"
            )
        return {"unknown": False, "categories": sorted(names)}
    if kind == NUMBER:
        if not values:
            raise ValueError(f"number feature {feature['name']}: column {column!r} has no number. To fix: name another")
        return measured_numbers(feature, values, column=column)
    if kind == IMAGE and values and not {"size", "channels"} <= feature.keys():
        image = read_image(values[0])
        if image.width != image.height and "size" not in feature:
            raise ValueError(
                f"image feature {feature['name']}: {values[0]} has {image.width} x {image.height} pixels. To fix: set "
                "preprocessing.height and width to the size, one number, to which images are resized"
            )
        return {"size": feature.get("size", image.height), "channels": 1 if image.mode in ("1", "L") else 3}
    return {}


def measured_numbers(feature: Feature, values: Sequence[Any], *, column: str) -> dict[str, float]:
    """Returns the shift and the scale of numbers. Raises ValueError where most different ones become equal by them."""
    rows, how = np.array([read_number(each) for each in values]), feature.get("normalization", "zscore")
    with np.errstate(over="ignore", invalid="ignore"):
        shift, scale = {
            "zscore": (rows.mean(), rows.std()), "minmax": (rows.min(), np.ptp(rows)), None: (0.0, 1.0),
        }[how]  # fmt: skip
        scaled = ((rows - shift) / (scale or 1.0)).astype(np.float32)
    different = {
        value if isinstance(value, int) else number for value, number in zip(values, rows.tolist(), strict=True)
    }
    num_left = len(np.unique(scaled))
    if not np.isfinite(scaled).all() or num_left < (1 - MAX_LOST_SHARE) * len(different):
        raise ValueError(
            f"number feature {feature['name']}: {len(different):,} different values of column {column!r} become "
            f"{num_left:,} numbers of 32 bits. To fix: correct values that are far from the others, subtract a "
            "constant from all, or set its normalization to zscore"
        )
    return {"shift": float(shift), "scale": float(scale) or 1.0}


def _is_missing(value: Any) -> bool:
    """Whether a row lacks a value: pandas writes NaN for it."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _notes_on(features: Iterable[Feature]) -> Iterator[str]:
    """Yields what users should know of the categories that were found."""
    for feature in features:
        names = [name for name in feature.get("categories", ()) if name != UNKNOWN]
        for note in notes_on(ClassLabels(names), trained=range(len(names)), are_learnt=True):
            yield f"{feature['name']}: {note}"


def _features_of(model: Path, features: Sequence[Feature]) -> list[Feature]:
    """The features of an exported model. Raises ValueError where they are not those of the data."""
    known = read_json(model / FACTORY).get("kwargs", {}).get("features", [])
    if [role(each) for each in known] != [role(each) for each in features]:
        raise ValueError(f"data: encoded_as {model} has other features. To fix: name a model of the same features")
    return list(known)
