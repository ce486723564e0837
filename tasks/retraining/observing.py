"""Features observed for drift, of prepared data and of predictions logged in production."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.codec import from_json, stored_as, to_json
from ringmaster.tasks.evaluation.assertions.logs import largest_probability
from ringmaster.tasks.evaluation.scores import Scores
from ringmaster.tasks.retraining.drift import Reference, reference_of
from ringmaster.techniques.data.arrays import open_columns, rows_of

MOST_ROWS = 5000  # of data: evenly spread rows; of a log: the newest rows
PREDICTED = ("prediction", "confidence")
"""The fields of a log that are observed, where its rows have them."""

Array = npt.NDArray[Any]
Features = Mapping[str, Sequence[Any] | Array]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A record of a training, stored with the model, with which later retraining runs compare.

    run_date: the date of the run that trained the model.
    at_s: when the training began, in seconds since the epoch.
    digest, num_samples: of the training data.
    files: (name, a text that changes with the content) of each training file.
    inputs, predictions: references of the features of the training data, and of the model's outputs for held-out rows.
    """

    run_date: str = stored_as("night")
    at_s: float
    digest: str
    num_samples: int
    files: tuple[tuple[str, str], ...] = ()
    inputs: Mapping[str, Reference] = field(default_factory=dict)
    predictions: Mapping[str, Reference] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads."""
        data: dict[str, Any] = to_json(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trained:
        """Returns the value whose `to_json` is `data`."""
        return from_json(cls, dict(data))


def input_features(folder: Path) -> dict[str, Array]:
    """Returns features of the training part of prepared data; none if the data was not prepared into a folder.

    Images have `brightness` and `contrast`, the mean and standard deviation of each image's pixels. Samples with a
    label have `label`. Text has `token`, and the share of `distinct_tokens` in each sample.
    """
    if not (folder / "layout.json").is_file():
        return {}
    stored = open_columns(folder, "training")
    columns = {name: _spread(column) for name, column in stored.items()}
    found: dict[str, Array] = {}
    if (pixels := columns.get("pixel_values")) is not None and len(pixels):
        flat = pixels.reshape(len(pixels), -1).astype(np.float64)
        found |= {"brightness": flat.mean(axis=1), "contrast": flat.std(axis=1)}
    if (tokens := columns.get("input_ids")) is not None and len(tokens):
        found["token"] = tokens.reshape(-1)
        found["distinct_tokens"] = _distinct(tokens)
    if (rows := rows_of("input_ids", stored, most=MOST_ROWS)) is not None:
        found |= {"token": np.concatenate(rows).reshape(-1), "distinct_tokens": _distinct(rows)}
    labels = columns.get("labels")
    if labels is not None and len(labels) and labels.ndim == 1:
        found["label"] = labels
    return found


def logged_features(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the features PREDICTED of the newest rows of logged predictions, where the rows have them."""
    newest = deque(rows, maxlen=MOST_ROWS)
    found = {name: [v for row in newest if (v := _value(row, name)) is not None] for name in PREDICTED}
    return {name: values for name, values in found.items() if values}


def scored_features(scores: Scores) -> dict[str, Array]:
    """Returns the same features for a model's outputs on scored rows."""
    found: dict[str, Array] = {}
    if scores.predictions is not None:
        found["prediction"] = scores.predictions
    if scores.probabilities is not None:
        found["confidence"] = scores.probabilities.max(axis=1).astype(np.float64)
    return found


def references_of(features: Features) -> dict[str, Reference]:
    """Returns a reference for each feature that has values. A feature of NaNs only, as of a broken model, has none."""
    return {name: found for name, values in features.items() if (found := reference_of(values)) is not None}


def _distinct(rows: Iterable[Array]) -> Array:
    """Returns the share of distinct tokens in each row."""
    return np.array([len(np.unique(row)) / max(row.size, 1) for row in rows])


def _spread(column: Array) -> Array:
    """Returns at most MOST_ROWS rows, evenly spread."""
    if len(column) <= MOST_ROWS:
        return np.asarray(column)
    return np.asarray(column[np.linspace(0, len(column) - 1, MOST_ROWS).astype(np.int64)])


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a logged row. A confidence is a float; if not logged, it is the largest probability."""
    value = row.get(name)
    if name != "confidence":
        return value
    if value is None:
        value = largest_probability(row)
    return float(value) if isinstance(value, (int, float)) else None
