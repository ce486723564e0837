"""What a batch notes of `teacher` of a loss: the job that trains it, or the pretrained model that it is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ringmaster.findings import Finding, Location, Raw, as_mapping, findings_where
from ringmaster.techniques.job_features import JobFeature
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.loss import job_named

VOCABULARY = ("source", "path", "dataset", "factory", "kwargs", "vocab_size", "text_column", "split")
"""The keys of data that determine the tokens that a model learns where no tokenizer is named."""


@dataclass(frozen=True, kw_only=True)
class LossTeacher(JobFeature):
    """The teacher that a job's loss compares the model with; a batch notes it where the loss names it.

    Attributes:
        job: the job of the batch that trains it; None for a pretrained one.
        model: its model, which trials build with fresh weights before it is trained; None until it is known.
    """

    key = "loss_teacher"
    is_in_files: ClassVar[bool] = False
    model_kind = "distilled"
    parents_share_model: ClassVar[bool] = False

    job: str | None = None
    model: ModelSpec | None = None

    @property
    def parents(self) -> tuple[str, ...]:
        """The job that trains the teacher."""
        return () if self.job is None else (self.job,)

    @property
    def teacher(self) -> str | None:
        """The job that trains the teacher, or the folder or name on the hub of a pretrained one."""
        return self.model.from_pretrained if self.job is None and self.model is not None else self.job

    @property
    def frozen_models(self) -> tuple[ModelSpec, ...]:
        """The teacher's model."""
        return () if self.model is None else (self.model,)

    def renamed(self, rename: Callable[[str], str]) -> "LossTeacher":
        """Returns the feature with `rename` applied to the name of the job."""
        return replace(self, job=self.job and rename(self.job))

    @classmethod
    def parents_in(cls, job: Raw) -> Iterator[tuple[Location, object]]:
        """Yields the place and the name of the job that a loss names as its teacher."""
        if (name := job_named(as_mapping(job.get("loss")).get("teacher"))) is not None:
            yield ("loss", "teacher"), name

    @classmethod
    def parent_findings(cls, job: Raw, name: str, parent: Raw) -> Iterator[Finding]:
        """Yields why a job of the batch makes no teacher of this job."""
        own, theirs = as_mapping(job.get("data")), as_mapping(parent.get("data"))
        are_learnt = all(
            each.get("tokenizer") is None and as_mapping(of.get("model")).get("from_pretrained") is None
            for each, of in ((own, job), (theirs, parent))
        )
        sizes = [as_mapping(as_mapping(of.get("model")).get("config")).get("vocab_size") for of in (job, parent)]
        yield from findings_where(
            (
                parent.get("adapter") is not None,
                (),
                f"{name} trains an adapter, and a teacher is a whole model",
                f"leave the adapter of {name} out",
            ),
            (
                are_learnt and any(own.get(key) != theirs.get(key) for key in VOCABULARY),
                (),
                f"{name} reads other tokens: both jobs learn the tokens of their own data",
                "give both the same data.tokenizer",
            ),
            (
                None not in sizes and sizes[0] != sizes[1],
                (),
                f"{name} has a vocabulary of {sizes[1]} tokens, and this job one of {sizes[0]}",
                "give both models the same vocab_size",
            ),
        )


JOB_FEATURES = (LossTeacher,)
