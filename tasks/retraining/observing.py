"""What is looked at for drift: features of prepared data, and of predictions that were logged in production."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.tasks.evaluation.logs import largest_probability
from ringmaster.tasks.evaluation.scores import Scores
from ringmaster.tasks.retraining.drift import Reference, reference_of
from ringmaster.techniques.engine.data.arrays import open_columns
from ringmaster.techniques.values import from_json, to_json

MOST_ROWS = 5000  # of data, spread evenly; of a log the newest ones
PREDICTED = ("prediction", "confidence")
"""The fields of a log that are looked at, where its rows have them."""

Array = npt.NDArray[Any]
Features = Mapping[str, Sequence[Any] | Array]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is kept of a training, beside the model that came of it: what later nights compare with.

    night: that trained it. at_s: when it began, in seconds since the epoch. digest, num_samples: of the data that it
    read; files: of that, by name, with what changes as they do. inputs, predictions: features of its data,
    and of what the model says of held-out rows.
    """

    night: str
    at_s: float
    digest: str
    num_samples: int
    files: tuple[tuple[str, str], ...] = ()
    inputs: Mapping[str, Reference] = field(default_factory=dict)
    predictions: Mapping[str, Reference] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        data: dict[str, Any] = to_json(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trained:
        """The value whose `to_json` is `data`."""
        return from_json(cls, dict(data))


def input_features(folder: Path) -> dict[str, Array]:
    """Features of the training part of prepared data, none of data that was not prepared into a folder.

    Images: `brightness` and `contrast`, the mean and deviation of each one's pixels; `label`; of text `token`, and the
    share of `distinct_tokens` of each sample.
    """
    if not (folder / "layout.json").is_file():
        return {}
    columns = {name: _spread(column) for name, column in open_columns(folder, "training").items()}
    found: dict[str, Array] = {}
    if (pixels := columns.get("pixel_values")) is not None and len(pixels):
        flat = pixels.reshape(len(pixels), -1).astype(np.float64)
        found |= {"brightness": flat.mean(axis=1), "contrast": flat.std(axis=1)}
    if (tokens := columns.get("input_ids")) is not None and len(tokens):
        found["token"] = tokens.reshape(-1)
        found["distinct_tokens"] = np.array([len(np.unique(row)) / len(row) for row in tokens])
    labels = columns.get("labels")
    if labels is not None and len(labels) and labels.ndim == 1:
        found["label"] = labels
    return found


def logged_features(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Features of logged predictions, of the newest rows: PREDICTED, where a row has them."""
    newest = deque(rows, maxlen=MOST_ROWS)
    found = {name: [v for row in newest if (v := _value(row, name)) is not None] for name in PREDICTED}
    return {name: values for name, values in found.items() if values}


def scored_features(scores: Scores) -> dict[str, Array]:
    """The same features of what a model says of rows that it was scored on."""
    found: dict[str, Array] = {}
    if scores.predictions is not None:
        found["prediction"] = scores.predictions
    if scores.probabilities is not None:
        found["confidence"] = scores.probabilities.max(axis=1).astype(np.float64)
    return found


def references_of(features: Features) -> dict[str, Reference]:
    """A reference for each feature that has values; one of nothing but NaN, as of a model that is broken, has none."""
    return {name: found for name, values in features.items() if (found := reference_of(values)) is not None}


def _spread(column: Array) -> Array:
    """At most MOST_ROWS rows, evenly spread."""
    if len(column) <= MOST_ROWS:
        return np.asarray(column)
    return np.asarray(column[np.linspace(0, len(column) - 1, MOST_ROWS).astype(np.int64)])


def _value(row: Mapping[str, Any], name: str) -> Any:
    """A field of a logged row; a confidence that was not logged is the largest probability. Confidences are floats."""
    value = row.get(name)
    if name != "confidence":
        return value
    if value is None:
        value = largest_probability(row)
    return float(value) if isinstance(value, (int, float)) else None
