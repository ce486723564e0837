"""Optional features of a job: their values, their keys in files, rules, and what they change.

A feature has a frozen dataclass of values. The annotations of its fields define what values files may give, as those
of the job's own fields do, and a batch file's sections are built from them: fields without `Description`, `Choices` or
`Format` are not keys. Its JSON form is stored among the job's other fields: under its `key`, or field by field.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Flag, auto
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from ringmaster.codec import feature_items, from_json
from ringmaster.features import listed
from ringmaster.findings import Finding, Location, Raw, as_mapping

MAX_WHOLE = 2**31 - 1
MAX_AT_ONCE = 2**24
"""The most samples of a step, tokens of a sample, and tokens of a vocabulary: memory is reserved by these numbers."""


@dataclass(frozen=True)
class Description:
    """What a key of a file may have: the text completes the sentence "To fix: give ..."."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a number: at least, more than, at most, less than."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


@dataclass(frozen=True)
class Choices:
    """The names of which a text is one."""

    names: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Distinct:
    """The values of a list differ. at_least, at_most: their smallest and largest number."""

    at_least: int | None = None
    at_most: int | None = None


@dataclass(frozen=True)
class Format:
    """The name of the type of values in files, such as "folder": see `tasks.batch.sections`."""

    name: str


Whole = Annotated[int, Limits(ge=1, le=MAX_WHOLE)]
Positive = Annotated[float, Limits(gt=0)]
ModuleName = Annotated[str, Format("module")]


class Effect(Flag):
    """What may differ between jobs that differ in a feature.

    WEIGHTS: the trained weights. STEP: what a step needs and does. TIME: how long a step takes. MODEL: one forward and
    backward of the model without an adapter.
    """

    WEIGHTS = auto()
    STEP = auto()
    TIME = auto()
    MODEL = auto()


@dataclass(frozen=True, kw_only=True)
class FirstCheckpoint:
    """A checkpoint with which a job begins: the folder or URL of checkpoints, or the job that has them, and a step."""

    checkpoints: str
    step: int


@dataclass(frozen=True)
class KeysOf:
    """The keys of a mapping are those of the feature with this key."""

    key: str


class FileKeys:
    """Keys of a feature in batch files, the base of frozen dataclasses.

    The first line of a subclass's docstring is shown in the reference of batch files. The module `job` of a feature
    lists keys of jobs that exist only in batch files in `ENTRY_KEYS`, and those of the batch in `BATCH_KEYS`.

    Attributes:
        key: the key of the mapping with its fields; "" where its fields are keys of the job itself.
        description: what the key may have, as in `Description`.
        names_jobs: whether keys of the batch name its jobs, so that they are none of other lists of jobs.
        is_in_files: whether files may give the keys; others are made of other keys, by `BatchFileHook.job_fields`.
    """

    key: ClassVar[str] = ""
    description: ClassVar[str] = ""
    names_jobs: ClassVar[bool] = False
    is_in_files: ClassVar[bool] = True

    @classmethod
    def job_keys(cls) -> tuple[str, ...]:
        """Returns its keys in the JSON form of a job: the first is the main key, the others are its settings."""
        return (cls.key,) if cls.key else tuple(each.name for each in fields(cls))  # type: ignore[arg-type]


class JobFeature(FileKeys):
    """The values of an optional feature in a job, the base of frozen dataclasses.

    Attributes:
        effects: what may differ between jobs that differ in the feature.
        is_exact: whether a job with the feature has the same bits on any number of devices.
        made_by: the technique that makes such a job's model instead of training; "" where it trains.
        product: what such a job makes, such as "a store"; "" for a model.
        model_kind: how its model is made, in the lineage; "" for the way of other jobs.
        group_obstacle: why such a job is not trained in a group, after its name; "" where it may be.
        is_for_training: whether the feature is about training, so that no job has it that trains nothing.
        is_divisible: whether a job with the feature may be trained as several jobs, one after another.
        objective: the objective of a batch without which no job may have the feature; "" for any.
        parents_share_model: whether the jobs that it names have the model of the job.
        runs_elsewhere: whether such a job has a Python of its own, with modules that this process may not find.
        changes_base: whether it changes the weights below an adapter, by `change_base`. The values of its keys are
            texts, which the file of the adapter's weights keeps.
    """

    effects: ClassVar[Effect] = Effect.WEIGHTS | Effect.STEP | Effect.TIME
    is_exact: ClassVar[bool] = False
    made_by: ClassVar[str] = ""
    product: ClassVar[str] = ""
    model_kind: ClassVar[str] = ""
    group_obstacle: ClassVar[str] = ""
    is_for_training: ClassVar[bool] = True
    is_divisible: ClassVar[bool] = True
    objective: ClassVar[str] = ""
    parents_share_model: ClassVar[bool] = True
    runs_elsewhere: ClassVar[bool] = False
    changes_base: ClassVar[bool] = False

    @property
    def started_from(self) -> FirstCheckpoint | None:
        """The checkpoint of another job with which the job begins."""
        return None

    @property
    def checkpoint_roots(self) -> tuple[str, ...]:
        """The checkpoints that the job reads to begin or to continue: folders, URLs, or the jobs that have them."""
        return ()

    @property
    def parents(self) -> tuple[str, ...]:
        """The names of what the job reads for the feature."""
        return ()

    @property
    def teacher(self) -> str | None:
        """The model whose outputs the job learns: one of `parents`, or a folder or hub name; None without any."""
        return None

    @property
    def frozen_models(self) -> tuple[Any, ...]:
        """The models (`ModelSpec`) that each device holds in addition to the one that is trained."""
        return ()

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """Returns the feature with `rename` applied to the names of jobs."""
        return self

    @property
    def num_workers(self) -> int | None:
        """The workers that have an optimizer each; None where all devices have one together."""
        return None

    @property
    def exchange_every(self) -> int:
        """The steps from one exchange of gradients or weights to the next."""
        return 1

    def exchanges_a_step(self, *, num_steps: int) -> float:
        """Returns how many exchanges there are for each of `num_steps` steps, on average."""
        return 1.0

    @property
    def phases(self) -> tuple[Any, ...]:
        """The stretches of a job's steps that differ (`TrainingPhase`), from its first step to its last one."""
        return ()

    def with_steps(self, num_steps: int) -> Self:
        """Returns the feature in a job with another number of steps."""
        return self

    @property
    def is_empty(self) -> bool:
        """Whether a job with the feature is the same as without."""
        return not feature_items(self)

    @property
    def is_active(self) -> bool:
        """False where the job has only settings of the feature, and not the feature itself."""
        return True

    def why_not(self, technique: Any) -> str | None:
        """Returns why a technique (a `Technique`) cannot train a job with the feature, or None."""
        return None

    def change_base(self, model: Any, adapter: Any) -> None:
        """Changes a model (an `nn.Module`) in place, before an adapter (an `Adapter`) is attached to it."""

    def why_not_on(self, device_kind: str) -> str | None:
        """Returns why a job with the feature cannot be trained on devices of a kind ("cpu" or "gpu"), or None."""
        return None

    def interpreter(self, job: Any, *, cache_dir: Path) -> str | None:
        """Returns the Python that runs a job (a `Job`), made where it is not there yet; None for that of this process.

        cache_dir: the folder of what can be made again. Raises InterpreterError where there is none.
        """
        return None

    def segment_result(self, *, cache_dir: Path) -> Mapping[str, Any]:
        """Returns what the result of each segment has of the feature."""
        return {}

    def why_unfit(self, job: Any, facts: Any) -> str:
        """Returns why a job (a `Job`) cannot have the feature; empty where it can. facts: a `ModelFacts`."""
        return ""

    def varies(self, job: Any) -> bool:
        """Returns whether something of a job (a `Job`) is still to be chosen on the way."""
        return False

    def searches(self, job: Any) -> Sequence[Any]:
        """Returns the jobs, short runs, whose results are compared before a job is trained."""
        return ()

    def variants(self, job: Any) -> Mapping[Any, Any]:
        """Returns the other ways in which a job may be trained after a while, as jobs to be profiled."""
        return {}

    def settled(self, *, num_workers: int | None) -> Self:
        """Returns the feature with what the preflight has chosen."""
        return self

    def final_message(self, result: Any) -> str:
        """Returns a sentence on the result (a `JobResult`) of a job that has ended; empty for none."""
        return ""

    @classmethod
    def parents_in(cls, job: Raw) -> Iterator[tuple[Location, object]]:
        """Yields the places in the plain values of a job that name its parents, and what is there."""
        yield from ()

    @classmethod
    def is_in(cls, job: Raw) -> bool:
        """Returns whether the plain values of a job have the feature."""
        return any(job.get(key) is not None for key in cls.job_keys())

    @classmethod
    def is_elsewhere(cls, parent: str) -> bool:
        """Returns whether a name among `parents_in` that is not a job of the batch may be that of something else."""
        return False

    @classmethod
    def parent_findings(cls, job: Raw, name: str, parent: Raw) -> Iterator[Finding]:
        """Yields the faults between its values and a job that they name; the place is that of the name."""
        yield from ()

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields the faults between its values and others of a job; places are relative to the job."""
        yield from ()


FeatureT = TypeVar("FeatureT", bound=JobFeature)


def feature_in(features: Sequence[JobFeature], kind: type[FeatureT]) -> FeatureT | None:
    """Returns the feature of a kind among others; None where there is none, or one that is not active."""
    return next((feature for feature in features if isinstance(feature, kind) and feature.is_active), None)


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Of what becomes a folder, an address or a key: a batch, a job, a user, a node. Names that are only shown follow
`ringmaster.text.is_printable_name`: data sets, models, and the ids of planning problems."""


def is_name(text: object) -> bool:
    """Whether a text follows NAME_PATTERN."""
    return isinstance(text, str) and re.fullmatch(NAME_PATTERN, text) is not None


def is_black_box(job: Raw) -> bool:
    """Whether plain values are of a job whose model is built and trained by something that knows it alone."""
    return as_mapping(job.get("model")).get("command") is not None


def is_exact(job: Raw) -> bool:
    """Whether plain values are of a job with the same bits on any number of devices."""
    return job.get("exact") is True or any(kind.is_exact and kind.is_in(job) for kind in feature_kinds().values())


@cache
def file_keys(kind: str) -> tuple[type[FileKeys], ...]:
    """Returns keys that exist only in batch files: those of a job by "ENTRY_KEYS", of the batch by "BATCH_KEYS"."""
    return tuple(listed("job", kind))


@cache
def feature_kinds(*, only_builtin: bool = False) -> Mapping[str, type[JobFeature]]:
    """Returns the classes of all features by their keys in the JSON form of a job, built-in ones first."""
    kinds: dict[str, type[JobFeature]] = {}
    for kind in listed("job", "JOB_FEATURES", only_builtin=only_builtin):
        kinds |= {key: kind for key in kind.job_keys() if key not in kinds}
    return kinds


def other_features(kind: type[FileKeys]) -> Mapping[str, type[JobFeature]]:
    """Returns the classes of the features of other kinds, by their main keys."""
    return {key: other for key, other in feature_kinds().items() if other is not kind and key == other.job_keys()[0]}


def product_of(job: Raw) -> str:
    """Returns what a job of plain values makes, as in `JobFeature.product`; "" for a model."""
    return next((kind.product for kind in feature_kinds().values() if kind.product and kind.is_in(job)), "")


def feature_kind(key: str) -> type[JobFeature] | None:
    """Returns the class of the feature with a key in the JSON form of a job; None where no feature has the key."""
    # Installed features are searched for other keys only: that takes a tenth of a second, in each rank.
    return feature_kinds(only_builtin=True).get(key) or feature_kinds().get(key)


def feature_of(key: str, value: Any) -> JobFeature:
    """Returns the feature with a value, in its JSON form, at a key in the JSON form of a job.

    Raises ValueError where no feature has the key: a package that has it is not installed here.
    """
    if (kind := feature_kind(key)) is None:
        raise ValueError(
            f"no feature has the key {key} of a job. To fix: install here what has it where the job is from, "
            "and read in the log why an installed feature is left out"
        )
    return from_json(kind, value if kind.key else {key: value})


def base_changes(texts: Mapping[str, str]) -> tuple[JobFeature, ...]:
    """Returns the features that change the weights below an adapter, from their keys and texts among others."""
    kinds = {key: kind for key in texts if (kind := feature_kind(key)) is not None}
    return tuple(feature_of(key, texts[key]) for key, kind in kinds.items() if kind.changes_base)
