"""`components` of a job: names of parts of its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ringmaster.techniques.job_parts import Description, Effect, Format, JobPart


@dataclass(frozen=True, kw_only=True)
class Components(JobPart):
    """Named parts of a model, each with the prefix of its parameters' names, such as {"tower": "vision_model"}.

    The lineage recognizes them in every model that contains them.
    """

    effects = Effect.WEIGHTS | Effect.STEP

    components: Annotated[
        Mapping[Annotated[str, Format("name")], Annotated[str, Format("module")]] | None,
        Description("names of parts, each with the prefix of its parameters' names, such as {tower: vision_model}"),
    ] = None

    @property
    def named_components(self) -> Mapping[str, str]:
        """The prefixes of parameters by the names of components."""
        return self.components or {}


PARTS = (Components,)
