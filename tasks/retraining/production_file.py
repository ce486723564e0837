"""Schema of the file of production models: the keys and the type of each value."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field
from pydantic.functional_validators import AfterValidator

from ringmaster.tasks.batch.document import Finding
from ringmaster.tasks.batch.references import Name, Positive, Whole, wrong
from ringmaster.tasks.batch.schema import Section
from ringmaster.tasks.retraining.policy import Amount, Probability
from ringmaster.tasks.retraining.report import address_of

MOST_DAYS = 36_500  # the largest window; dates have a limited range


def _hour(value: str) -> str:
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value):
        raise wrong(f"{value!r} is no time of day", 'write it in quotes, from "00:00" to "23:59"')
    return value


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # zones are files; not every text is a valid file name
        raise wrong(f"{value!r} is no time zone", "write UTC, or a name such as Europe/Berlin") from None
    return value


def _webhook(value: str) -> str:
    if not value.startswith("$"):  # a variable is resolved when the run sends its report
        try:
            address_of(value)
        except ValueError as error:
            raise wrong(str(error), "write https://..., or $NAME for the variable that has it") from None
    return value


Hour = Annotated[str, AfterValidator(_hour)]


class DriftEntry(Section):
    """The thresholds of drift, and the data observed for it."""

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
    """The conditions that make a model due."""

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
    priority: int = Field(default=0, description="a whole number: where time is short, higher ones are trained first")


class RetrainingEntry(Section):
    """The schedule of retraining runs, and their limits."""

    starts: Hour = Field(default="00:00", description='the local time at which a run starts, such as "02:00"')
    deadline: Hour | None = Field(
        default=None, description='the local time by which all is trained, such as "06:00", or leave it out'
    )
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC", description="a time zone, such as Europe/Berlin"
    )
    budget: Positive | None = Field(default=None, description="the most that a run may cost, such as 12.5")
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
    night: RetrainingEntry = Field(
        default=RetrainingEntry(), description='the schedule of runs, such as {deadline: "06:00"}'
    )
    registry: bool = Field(
        default=False, description="true for the registered models that have the tag ringmaster.retraining, too"
    )
    models: list[ModelEntry] = Field(default=[], description="a list of models")


def findings(entry: ProductionEntry, *, there: Mapping[str, bool]) -> Iterator[Finding]:
    """Yields the faults that remain although each value is of its type. there: whether each named file exists."""
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
            text = f"there is no file {due.assertions.suite!r}"
            yield Finding((*at, "assertions", "suite"), text, "name a file with assertions, relative to this one")
