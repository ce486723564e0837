"""`numerics` of a job: what may differ from a plain step, so that other kernels may compute it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ringmaster.findings import Finding, Raw, findings_where
from ringmaster.techniques.job_features import Description, JobFeature, Limits, is_exact


@dataclass(frozen=True, kw_only=True)
class Numerics(JobFeature):
    """How far a step may be from a plain one, so that the search may choose its kernels."""

    key = "numerics"
    description = "lets the search choose kernels within a tolerance, such as {tolerance: 1e-5}, or leave it out"

    tolerance: Annotated[
        float, Limits(gt=0, le=0.1), Description("the largest relative difference of loss and gradients, such as 1e-5")
    ]

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields a fault where the job must have the same bits everywhere."""
        yield from findings_where(
            (
                job.get(cls.key) is not None and is_exact(job),
                (cls.key,),
                "does not go with the same bits everywhere",
                "leave one of the two out",
            )
        )


JOB_FEATURES = (Numerics,)
