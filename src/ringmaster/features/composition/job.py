"""`components` of a job, names of parts of its model, and `shared_components` of a batch, which jobs train together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ringmaster.techniques.job import SUM, UPDATE_RULES, Job
from ringmaster.techniques.job_features import Choices, Description, Effect, FileKeys, Format, JobFeature, Positive

Name = Annotated[str, Format("name")]


@dataclass(frozen=True, kw_only=True)
class Components(JobFeature):
    """Named parts of a model, each with the prefix of its parameters' names, such as {"tower": "vision_model"}.

    The lineage recognizes them in every model that contains them.
    """

    effects = Effect.WEIGHTS | Effect.STEP
    is_for_training = False

    components: Annotated[
        Mapping[Name, Annotated[str, Format("module")]] | None,
        Description("names of parts, each with the prefix of its parameters' names, such as {tower: vision_model}"),
    ] = None


def components_of(job: Job) -> Mapping[str, str]:
    """Returns the prefixes of parameters by the names of components of a job's model."""
    own = job.feature(Components)
    return {} if own is None or own.components is None else own.components


@dataclass(frozen=True, kw_only=True)
class SharedComponent(FileKeys):
    """A part of several jobs' models that they train together: [how](adaptations.md#shared-components)."""

    jobs: Annotated[
        Mapping[Name, Annotated[str, Format("text")]],
        Description("the path of the component in the model of each job, such as {classify: bert, rank: bert}"),
    ]
    update: Annotated[str, Choices(UPDATE_RULES), Description("how its gradient is made of the jobs': sum")] = SUM
    weights: Annotated[
        Mapping[Name, Positive], Description("the factors of jobs' losses, 1 by default, such as {rank: 0.5}")
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SharedComponents(FileKeys):
    """Components that jobs of a batch train together."""

    names_jobs: ClassVar[bool] = True

    shared_components: Annotated[
        Mapping[Name, SharedComponent],
        Description("components that jobs train together, such as {encoder: {jobs: {a: bert, b: bert}}}"),
    ] = field(default_factory=dict)


JOB_FEATURES = (Components,)
BATCH_KEYS = (SharedComponents,)
