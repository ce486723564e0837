"""The key `centralize_gradients` of a job."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from ringmaster.findings import Finding, Raw, findings_where
from ringmaster.techniques.job_features import Description, JobFeature, is_black_box


@dataclass(frozen=True, kw_only=True)
class Centralization(JobFeature):
    """Whether the gradients of matrices are centralized."""

    centralize_gradients: Annotated[bool, Description("true to centralize the gradients of matrices, else false")] = (
        False
    )

    def why_not(self, technique: Any) -> str | None:
        """Requires whole matrices."""
        if technique.whole_tensors:
            return None
        return f"centralize_gradients needs whole matrices, and {technique.name} holds a part of each"

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields a fault where Ringmaster does not train the job itself."""
        problem, remedy = "is for jobs that Ringmaster trains, not for commands", "leave it out"
        yield from findings_where(
            (job.get("centralize_gradients") and is_black_box(job), ("centralize_gradients",), problem, remedy)
        )


JOB_FEATURES = (Centralization,)
