"""The schema of the file of production models: which keys there are, and what each may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field
from pydantic.functional_validators import AfterValidator

from ringmaster.tasks.batch.data_schema import Section
from ringmaster.tasks.batch.faults import Finding
from ringmaster.tasks.batch.field_types import Name, Positive, Whole
from ringmaster.tasks.batch.references import wrong
from ringmaster.tasks.retraining.webhook import address_of

Probability = Annotated[float, Field(gt=0, lt=1)]
MOST_DAYS = 36_500  # of a window: a calendar has no days without end
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _hour(value: str) -> str:
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value):
        raise wrong(f"{value!r} is no time of day", 'write it in quotes, from "00:00" to "23:59"')
    return value


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # zones are files, and not every text is a file's name
        raise wrong(f"{value!r} is no time zone", "write UTC, or a name such as Europe/Berlin") from None
    return value


def _webhook(value: str) -> str:
    if not value.startswith("$"):  # a variable is looked up when the night has a report
        try:
            address_of(value)
        except ValueError as error:
            raise wrong(str(error), "write https://..., or $NAME for the variable that has it") from None
    return value


Hour = Annotated[str, AfterValidator(_hour)]


class DriftEntry(Section):
    """What counts as drift, and what is looked at."""

    psi: Positive | None = Field(default=0.2, description="the population stability index above which, such as 0.2")
    ks: Probability | None = Field(
        default=None, description="the Kolmogorov-Smirnov p-value below which, such as 0.001, or leave it out"
    )
    min_rows: Whole = Field(default=100, description="the rows that must be there to tell, such as 100")
    inputs: dict[str, Any] | None = Field(
        default=None, description="data as in a batch file that came in lately; the model's own where it is left out"
    )
    predictions: str | None = Field(
        default=None, description="a JSONL or Parquet file of logged predictions, such as predictions.jsonl"
    )


class AssertionsEntry(Section):
    """Assertions on logged predictions, as `ringmaster monitor` checks them."""

    suite: str = Field(description="a file with assertions, such as tests.yaml")
    predictions: str = Field(description="a JSONL or Parquet file of logged predictions, such as predictions.jsonl")


class DueEntry(Section):
    """What makes a model due."""

    new_data: bool = Field(default=True, description="false where new data alone does not count, else true")
    min_new_samples: Annotated[int, Field(ge=0)] = Field(
        default=0, description="how many samples new data must have more, such as 500"
    )
    max_age_days: Positive | None = Field(default=None, description="days after which it is trained anyway, such as 30")
    drift: DriftEntry | None = Field(default=None, description="what counts as drift, such as {psi: 0.2}")
    assertions: AssertionsEntry | None = Field(
        default=None, description="{suite: tests.yaml, predictions: predictions.jsonl}"
    )


class ModelEntry(Section):
    """One production model."""

    name: Name = Field(description="a name of letters, digits, '-', '_' and '.', such as digits")
    job: dict[str, Any] = Field(description="a job as in a batch file, without name, data and base")
    data: dict[str, Any] = Field(description="the data as in a batch file, such as {path: 'data/*.jsonl', seq_len: 64}")
    compare_on: dict[str, Any] | None = Field(
        default=None, description="data whose held-out part the champion and the challenger are compared on"
    )
    warm_start: bool = Field(default=True, description="false to train from fresh weights every time, else true")
    min_gain: Amount = Field(
        default=0.0, description="by how much a challenger must be better, in its first metric, such as 0.01"
    )
    due: DueEntry = Field(default=DueEntry(), description="what makes it due, such as {max_age_days: 30}")
    window_days: Annotated[int, Field(ge=1, le=MOST_DAYS)] | None = Field(
        default=None, description="of files with a date in their name, only those of the last so many days, such as 14"
    )
    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default={},
        description="values to try beside its own, by dotted keys, such as {optimizer.lr: [1e-3]}",
    )
    priority: int = Field(default=0, description="a whole number: where the night is short, higher ones come first")


class NightEntry(Section):
    """When nights are, and what they may take."""

    starts: Hour = Field(default="00:00", description='the local time at which a night starts, such as "02:00"')
    deadline: Hour | None = Field(
        default=None, description='the local time by which all is trained, such as "06:00", or leave it out'
    )
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC", description="a time zone, such as Europe/Berlin"
    )
    budget: Positive | None = Field(default=None, description="the most that a night may cost, such as 12.5")
    price_per_device_hour: Positive = Field(
        default=1.0, description="what an hour of one device costs, such as 2.5; at 1 the budget is in device-hours"
    )
    webhook: Annotated[str, AfterValidator(_webhook)] | None = Field(
        default=None, description="the address that reports are posted to, https://... or $VARIABLE"
    )


class ProductionEntry(Section):
    """A whole file of production models."""

    name: Name = Field(description="a name that the registered models' names start with, such as production")
    devices: Any = Field(default="auto", description="auto, {cpu: 2}, {gpu: 2} or {gpu: all}")
    policy: str | None = Field(
        default=None, description="a file that says when a challenger is promoted, such as policy.yaml"
    )
    datasets: Any = Field(
        default=None, description="data sets by name, or a file with them, as in a batch file (docs/datasets.md)"
    )
    night: NightEntry = Field(default=NightEntry(), description='when nights are, such as {deadline: "06:00"}')
    registry: bool = Field(
        default=False, description="true for the registered models that have the tag ringmaster.retraining, too"
    )
    models: list[ModelEntry] = Field(default=[], description="a list of models")


def findings(entry: ProductionEntry, *, there: Mapping[str, bool]) -> Iterator[Finding]:
    """What is wrong with a file although each of its values is of its kind. there: whether a file that it names is."""
    if not entry.models and not entry.registry:
        yield Finding(("models",), "is empty", "give a list of models, or `registry: true` for tagged ones")
    for i, model in enumerate(entry.models):
        due, at = model.due, ("models", i, "due")
        if due.min_new_samples and model.window_days is not None:
            remedy = "take one of the two, or max_age_days"
            yield Finding((*at, "min_new_samples"), "counts how data grows, and in a window it does not", remedy)
        if due.drift is not None and due.drift.psi is None and due.drift.ks is None:
            yield Finding((*at, "drift"), "has no measure", "give psi, such as 0.2, or ks, such as 0.001")
        if due.assertions is not None and not there[due.assertions.suite]:
            said = f"there is no file {due.assertions.suite!r}"
            yield Finding((*at, "assertions", "suite"), said, "name a file with assertions, seen from this one")
