"""`warm_start` of a job: the checkpoint of another job from which it continues."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ringmaster.codec import SINCE_LATER
from ringmaster.findings import Finding, Location, Raw, as_mapping, findings_where
from ringmaster.techniques.checkpoints.checkpoint import folder_of
from ringmaster.techniques.checkpoints.storage import place_of
from ringmaster.techniques.job_features import (
    Description,
    Effect,
    FirstCheckpoint,
    Format,
    JobFeature,
    Whole,
    is_black_box,
    is_name,
)


@dataclass(frozen=True, kw_only=True)
class WarmStart(FirstCheckpoint, JobFeature):
    """A checkpoint of another job of the same model, from which the job continues: weights, optimizer and step.

    Attributes:
        checkpoints: the folder or URL of that job's checkpoints, or the name of a job of the batch, which ends at the
            step. The job's own ones, with the step 0: from before it was changed.
        step: the step of the checkpoint, after which this job trains on.
        first: with the job's own ones, the checkpoint of another job with which it began.
    """

    key = "warm_start"
    description = "a checkpoint to continue from, such as {checkpoints: runs/a/checkpoints, step: 60}, or leave it out"
    effects = Effect.WEIGHTS
    is_divisible = False

    checkpoints: Annotated[
        str,
        Format("folder"),
        Description("a job of this batch, or the folder or URL of the other job's checkpoints"),
    ]
    step: Annotated[Whole, Description("the step of the checkpoint, such as 60")]
    first: "WarmStart | None" = field(default=None, metadata=SINCE_LATER)

    @property
    def started_from(self) -> "WarmStart | None":
        """The checkpoint of another job with which the job began, also where its own steps were set since."""
        return self if self.step else self.first

    @property
    def checkpoint_roots(self) -> tuple[str, ...]:
        """The checkpoints that the job reads."""
        return (self.checkpoints,)

    @property
    def parents(self) -> tuple[str, ...]:
        """The job, folder or URL whose checkpoint it is."""
        return () if self.started_from is None else (self.started_from.checkpoints,)

    def renamed(self, rename: Callable[[str], str]) -> "WarmStart":
        """Returns the start with `rename` applied to the names of jobs."""
        return replace(self, checkpoints=rename(self.checkpoints), first=self.first and self.first.renamed(rename))

    @classmethod
    def parents_in(cls, job: Raw) -> Iterator[tuple[Location, object]]:
        """Yields where the plain values of a job name the checkpoints, and what they are."""
        yield (cls.key, "checkpoints"), as_mapping(job.get(cls.key)).get("checkpoints")

    @classmethod
    def is_elsewhere(cls, parent: str) -> bool:
        """Returns whether a name is that of a folder, or a URL."""
        return not is_name(parent) or Path(parent).is_dir()

    @classmethod
    def parent_findings(cls, job: Raw, name: str, parent: Raw) -> Iterator[Finding]:
        """Yields why a job of the batch does not end with the checkpoint."""
        if (step := as_mapping(job.get(cls.key)).get("step")) != parent.get("num_steps"):
            yield Finding((cls.key,), f"{name} does not end at step {step}", "name a job with that num_steps")

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why a job cannot continue from a checkpoint of another one."""
        start, num_steps, place = as_mapping(job.get(cls.key)), job.get("num_steps"), (cls.key,)
        root, step = start.get("checkpoints"), start.get("step")
        if not isinstance(root, str) or not isinstance(step, int):
            return
        yield from findings_where(
            (is_black_box(job), place, "is for jobs that Ringmaster trains, not for commands", "leave it out"),
            (
                isinstance(num_steps, int) and step >= num_steps,
                (*place, "step"),
                f"is {step}, and the job has {num_steps} steps",
                "take an earlier one, or raise num_steps",
            ),
        )
        if is_name(root) and not Path(root).is_dir():
            return  # a job of the batch, or else not there, which is reported with its parents
        try:
            names = place_of(root).names()
        except (OSError, ValueError) as error:
            yield Finding((*place, "checkpoints"), f"cannot be read: {error}", "check the folder or URL")
            return
        if folder_of(step) not in names:
            there = ", ".join(str(int(name.rpartition("-")[2])) for name in names) or "none"
            problem, remedy = f"is {step}, of which {root} has no checkpoint", f"name one that is there: {there}"
            yield Finding((*place, "step"), problem, remedy)


JOB_FEATURES = (WarmStart,)
