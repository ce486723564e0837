"""Pydantic models of the batch file: the keys and the type of each value.

The sections of what a job has are built from the annotations of its dataclasses, which also have the defaults
(`sections`). A key's description completes the sentence "To fix: give ..."; editors show it too.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import Field, ValidationInfo, create_model, model_validator

from ringmaster.findings import Location
from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.references import (
    Devices,
    FileFormat,
    Name,
    Objective,
    OneOf,
    Positive,
    Whole,
)
from ringmaster.tasks.batch.sections import TYPES, Section, fields_of, keys_of, section_of
from ringmaster.tasks.planning.objectives import objective_names
from ringmaster.techniques.data.row_files import FORMATS
from ringmaster.techniques.data.row_kind import Retriever
from ringmaster.techniques.data_source import BUILTIN_SOURCES, data_source_named
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import feature_kinds, file_keys
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.processes.order import KEPT_CHECKPOINTS


class Window(Section):
    """The rows of a data set to read: one of last_days, last_rows, and since, until or both."""

    last_days: Positive | None = Field(default=None, description="days back from the newest row, such as 30")
    last_rows: Whole | None = Field(default=None, description="a number of rows, the last ones, such as 10000")
    since: str | float | None = Field(default=None, description="the first moment, such as 2026-01-31")
    until: str | float | None = Field(default=None, description="the end of the window of rows, such as 2026-03-01")


if TYPE_CHECKING:

    class JobKeys(Section):
        """What is read of a job's own keys."""

        name: str
        evaluation: Any

else:
    TYPES.update(window=Window, retriever=section_of(Retriever))
    options = [data_source_named(name).options_class for name in BUILTIN_SOURCES]
    keys = fields_of(DataSpec)
    for each in options:
        for name, key in fields_of(each).items():
            keys.setdefault(name, key)


class Data(Section):
    """The source of the samples: exactly one of source, path, dataset, factory, and the name of a data set.

    A kind of data that brings its own rows needs none of them.
    """


if not TYPE_CHECKING:
    TYPES["data"] = Data = create_model("Data", __base__=Section, __doc__=Data.__doc__, **keys)


class DatasetVersion(Section):
    """The files of a version: either path or splits."""

    path: str | None = Field(default=None, description='files or an fsspec URL, such as "data/v1/*.jsonl"')
    splits: dict[str, str] = Field(
        default={}, description="paths by split, such as {train: data/train.jsonl, test: data/test.jsonl}"
    )
    digest: str | None = Field(
        default=None, description="the fingerprint that its content must have; `ringmaster datasets show` prints it"
    )


class DatasetSection(DatasetVersion):
    """A data set with a name. If it has one version only, the [keys of that](#dataset-version) may be given here."""

    versions: dict[str, DatasetVersion] = Field(
        default={}, description="the versions, the newest last, such as {1: {path: ...}, 2: {path: ...}}"
    )
    format: FileFormat | None = Field(default=None, description=f"one of {', '.join(FORMATS)}")
    columns: dict[str, Annotated[str, OneOf(references.COLUMN_TYPES)]] = Field(
        default={},
        description="the type of each column that all rows have, such as {text: text, stars: integer?}",
    )
    text_column: str | None = Field(default=None, description="the column that holds the text, such as text")
    time_column: str | None = Field(default=None, description="the column with a row's time, such as at")
    held_out_split: str | None = Field(default=None, description="the split to evaluate on, such as test")


PLANNER_KEYS = ("deadline_s", "weight", "user")
"""The keys of a job's entry that only the planner reads."""
"""The `kind` of a job that makes a knowledge store."""
PROFILING_SHARE = 0.05
"""The default of `profiling_share`."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"


if not TYPE_CHECKING:
    JobKeys = create_model("JobKeys", __base__=Section, **fields_of(Job))


class JobEntry(JobKeys):
    """One model to train."""

    @model_validator(mode="before")
    @classmethod
    def _note_python(cls, value: Any, info: ValidationInfo) -> Any:
        """Notes whether the job has a Python of its own, for the checks of its values."""
        kinds = feature_kinds().values()
        if info.context is not None and isinstance(value, Mapping):
            info.context[references.ELSEWHERE] = any(kind.runs_elsewhere and kind.is_in(value) for kind in kinds)
        return value

    deadline_s: Positive | None = Field(
        default=None, description="the seconds from the batch's start by which the job must have ended, such as 3600"
    )
    weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="how much the moment of the job's end counts under `objective: weighted`, such as 2"
    )
    user: Name | None = Field(
        default=None,
        description="whose job it is, for `objective: fairness` and `users`, such as ana; default: its own",
    )


if not TYPE_CHECKING:
    kinds = [kind for kind in dict.fromkeys(feature_kinds().values()) if kind.is_in_files]
    keys = keys_of((*kinds, *file_keys("ENTRY_KEYS")))
    JobEntry = create_model("JobEntry", __base__=JobEntry, __doc__=JobEntry.__doc__, **keys)


class GridEntry(Section):
    """A template of a job and the values to try: every combination becomes a job."""

    template: dict[str, Any] = Field(description="a job, whose name the names of all combinations start with")
    over: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] = Field(
        description="lists of values by key, such as {optimizer.lr: [1e-4, 3e-4]}"
    )


class BatchEntry(Section):
    """A whole batch file."""

    name: Name = Field(
        default="batch", description="a name of up to 100 letters, digits, '-', '_' and '.', such as tonight"
    )
    objective: Objective = Field(
        default="makespan", description="makespan, weighted, mean_completion, fairness, cost or time-to-target"
    )
    price_per_device_hour: Positive = Field(
        default=1.0, description="what a device costs an hour, for `objective: cost`, such as 2.5"
    )
    profiling_share: Annotated[float, Field(ge=0)] = Field(
        default=PROFILING_SHARE,
        description="the largest share of the predicted time that trials may take, such as 0.05; 0: no trials",
    )
    keep_checkpoints: Annotated[int, Field(ge=1)] = Field(
        default=KEPT_CHECKPOINTS,
        description="how many checkpoints a job keeps, such as 20, for audits from more steps",
    )
    devices: Devices = Field(default="auto", description="auto, {cpu: 2}, {gpu: 2} or {gpu: all}")
    datasets: dict[str, DatasetSection] | str | None = Field(
        default=None, description="data sets by name, or a file with them, such as datasets.yaml"
    )
    jobs: list[JobEntry] = Field(default=[], description="a list of jobs")
    grid: list[GridEntry] = Field(default=[], description="a list of {template: ..., over: ...}")


if not TYPE_CHECKING:
    keys = keys_of(file_keys("BATCH_KEYS"))
    BatchEntry = create_model("BatchEntry", __base__=BatchEntry, __doc__=BatchEntry.__doc__, **keys)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of batch files, with which editors complete and check them."""
    from ringmaster.tasks.batch.file_hooks import file_hooks  # imported here because features import this module

    schema = {"$schema": DIALECT} | BatchEntry.model_json_schema()
    schema["properties"]["objective"] |= {"enum": list(objective_names())}
    schema["anyOf"] = [{"required": [key], "properties": {key: {"minItems": 1}}} for key in ("jobs", "grid")]
    parts = schema["$defs"]
    job = parts["JobEntry"]
    # A key that the template lacks may be given under `over`.
    parts["GridEntry"]["properties"]["template"] = job | {"required": ["name"]}
    # A feature's key that may be a whole file represents the others.
    whole = [hook.file_key for hook in file_hooks() if hook.file_key]
    job["anyOf"] = [{"required": job.pop("required")}, *({"required": ["name", key]} for key in whole)]
    return schema


def section_at(place: Location, *, root: type[Section] = BatchEntry) -> type[Section] | None:
    """Returns the model of the mapping at `place` of a file of type `root`, or None if any key is allowed there."""
    section: Any = root
    for part in place:
        if isinstance(part, int):
            continue
        if get_origin(section) is dict:  # any key is allowed there
            section = _inner(get_args(section)[1])
            continue
        if not (isinstance(section, type) and issubclass(section, Section)) or part not in section.model_fields:
            return None
        section = _inner(section.model_fields[part].annotation)
    return section if isinstance(section, type) and issubclass(section, Section) else None


_BRANCH = re.compile(r"float|int|str|bool|(list|dict)\[.*\]")


def without_branches(place: Location, *, root: type[Section]) -> Location:
    """Returns a place of a validation without the types of a union that it has tried, which are no keys of the file."""
    kept: Location = ()
    for part in place:
        above = section_at(kept[:-1], root=root) if kept else None
        is_value = above is not None and kept[-1] in above.model_fields and section_at(kept, root=root) is None
        if not (is_value and isinstance(part, str) and _BRANCH.fullmatch(part)):
            kept = (*kept, part)
    return kept


def misspelt(raw: Mapping[str, Any], section: type[Section]) -> set[str]:
    """Returns the keys of `section` that resemble unknown keys of `raw`: these are misspelt rather than missing."""
    keys = list(section.model_fields)
    return {key for name in set(raw) - set(keys) for key in get_close_matches(name, keys, n=1)}


def _inner(annotation: Any) -> Any:
    """Returns the item type of an optional, a list or a checked annotation."""
    if get_origin(annotation) in (Union, UnionType):
        return _inner(next(a for a in get_args(annotation) if a is not type(None)))
    return _inner(get_args(annotation)[0]) if get_origin(annotation) in (list, Annotated) else annotation
