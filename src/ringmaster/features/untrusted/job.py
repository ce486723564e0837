"""`allow_untrusted` of a job, and how the work of untrusted nodes is verified."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ringmaster.findings import Finding, Raw, findings_where
from ringmaster.techniques.job_features import Description, Effect, JobFeature, Limits, Whole, is_black_box


@dataclass(frozen=True, kw_only=True)
class Untrusted(JobFeature):
    """Who may train a job, and how it is verified.

    allow_untrusted: whether segments may run on untrusted nodes, whose work trusted nodes verify by samples.
    verify_share: the probability with which a segment of an untrusted node is repeated on a trusted one.
    verify_steps: the most steps of a segment on an untrusted node.
    """

    effects = Effect(0)
    is_divisible = False

    allow_untrusted: Annotated[bool, Description("true where untrusted nodes of a pool may train it, else false")] = (
        False
    )
    verify_share: Annotated[
        float,
        Limits(gt=0, le=1),
        Description("the share of the segments of untrusted nodes that trusted ones repeat, such as 0.1"),
    ] = 0.1
    verify_steps: Annotated[Whole, Description("the most steps of a segment on an untrusted node, such as 100")] = 100

    @property
    def is_active(self) -> bool:
        """Whether untrusted nodes may train the job."""
        return self.allow_untrusted

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why segments of a job cannot be repeated and compared."""
        if job.get("allow_untrusted") is not True:
            return
        place, remedy = ("allow_untrusted",), "leave one of the two out"
        yield from findings_where(
            (is_black_box(job), place, "does not go with a command, whose states nobody else can repeat", remedy),
            (bool(job.get("may_vary")), place, "does not go with may_vary, which changes the steps on the way", remedy),
        )


JOB_FEATURES = (Untrusted,)
