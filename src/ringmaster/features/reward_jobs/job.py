"""What a batch notes of rewards `job:NAME`: the jobs of the batch whose reward models reward its completions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ringmaster.codec import SINCE_LATER
from ringmaster.findings import Finding, Location, Raw, as_list, as_mapping, findings_where
from ringmaster.techniques.job_features import JobFeature
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.loss import job_named

REWARD_MODEL_LOSS = "bradley-terry"
"""The name of the loss that trains reward models."""


@dataclass(frozen=True, kw_only=True)
class RewardJobs(JobFeature):
    """The jobs whose models are the rewards `job:NAME` of a loss; a batch notes them where it finds such rewards.

    Attributes:
        jobs: their names, each once.
        models: their models, which trials build with fresh weights before they are trained.
    """

    key = "reward_jobs"
    is_in_files: ClassVar[bool] = False
    parents_share_model: ClassVar[bool] = False

    jobs: tuple[str, ...] = ()
    models: tuple[ModelSpec, ...] = field(default=(), metadata=SINCE_LATER)

    @property
    def parents(self) -> tuple[str, ...]:
        """The jobs of the reward models."""
        return self.jobs

    @property
    def frozen_models(self) -> tuple[ModelSpec, ...]:
        """The reward models."""
        return self.models

    def renamed(self, rename: Callable[[str], str]) -> "RewardJobs":
        """Returns the feature with `rename` applied to the names of the jobs."""
        return replace(self, jobs=tuple(map(rename, self.jobs)))

    @classmethod
    def parents_in(cls, job: Raw) -> Iterator[tuple[Location, object]]:
        """Yields the place of the rewards of a job for each job that they name, and its name."""
        for reward in as_list(as_mapping(job.get("loss")).get("rewards")):
            if (name := job_named(reward)) is not None:
                yield ("loss", "rewards"), name

    @classmethod
    def parent_findings(cls, job: Raw, name: str, parent: Raw) -> Iterator[Finding]:
        """Yields why a job of the batch makes no reward model that can be read."""
        loss = parent.get("loss")
        named = loss.get("name") if isinstance(loss, Mapping) else loss
        yield from findings_where(
            (
                named != REWARD_MODEL_LOSS,
                (),
                f"{name} trains no reward model",
                f"name a job whose loss is {REWARD_MODEL_LOSS}",
            ),
            (
                parent.get("adapter") is not None,
                (),
                f"{name} trains an adapter, and rewards are read from whole models",
                f"leave the adapter of {name} out",
            ),
        )


JOB_FEATURES = (RewardJobs,)
