"""What optional features add to the records of jobs and models in MLflow, and what follows these records.

The module `pages` of a feature lists its hooks in `RECORD_HOOKS`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.features import listed
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.storage.journal import JobRecord, Journal
from ringmaster.techniques import Job
from ringmaster.techniques.processes.gang_events import EvaluationReported, Steps
from ringmaster.text import Notice


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The run of a job in MLflow. run_id: its id there. params, tags: those of the run, and of the batch's run."""

    batch: str
    job: str
    run_id: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]


class RunListener:
    """Follows what is written of a batch's jobs, once MLflow has it. Each method returns at once, and raises nothing.

    What MLflow is given again, after an interruption, comes again.
    """

    def open_run(self, run: RecordedRun) -> None:
        """The run of a job is open, in this process for the first time. All else of the job comes later."""

    def add_points(self, job: str, points: Sequence[MetricPoint]) -> None:
        """Metrics of a job are written."""

    def end_run(self, record: JobRecord) -> None:
        """The run of a job has ended. record: of the job in the journal."""

    def close(self) -> None:
        """Nothing more comes."""


class RecordHook:
    """What a feature adds to the records. By default nothing. record: of the job in the journal."""

    def tags(self, record: JobRecord) -> Mapping[str, str]:
        """Returns tags of the run of a job."""
        return {}

    def metrics(self, steps: Steps) -> Mapping[str, float]:
        """Returns metrics of the run of a job after some of its steps, such as {"train/NAME": 12.0}."""
        return {}

    def partial_metrics(self, report: EvaluationReported) -> Mapping[str, float]:
        """Returns metrics of the run of a job after an evaluation of a part of the rows, which has none of its own."""
        return {}

    def params(self, record: JobRecord) -> Mapping[str, Any]:
        """Returns parameters of a finished model."""
        return {}

    def components(self, job: Job) -> Mapping[str, str]:
        """Returns the prefixes of parameters by the names of components of a finished model."""
        return {}

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields paragraphs, in markdown, for the page of a finished model."""
        yield from ()

    def batch_results(self, batch: Batch, journal: Journal, *, since_s: float) -> Mapping[str, Any]:
        """Returns further keys of the result of a batch, plain values. since_s: when it was started or resumed.

        The key "value" replaces the actual value of the objective, where the feature alone can compute it.
        """
        return {}

    def batch_metrics(self, results: Mapping[str, Any]) -> Mapping[str, float]:
        """Returns metrics of the run of a batch, by what `batch_results` has returned."""
        return {}

    def batch_sentences(self, results: Mapping[str, Any]) -> Iterator[str]:
        """Yields what a terminal shows of it at the end."""
        yield from ()

    def plan_sentences(self, plan: Plan, problem: Problem, *, device: str) -> Iterator[str]:
        """Yields what pages of a plan say of it besides. device: the kind of the devices, where nodes have no types."""
        yield from ()

    def listeners(self, batch: Batch, *, notice: Notice) -> Iterator[RunListener]:
        """Yields what follows the records of a batch. notice: shows a line to the user, from any thread."""
        yield from ()


def plan_sentences(plan: Plan, problem: Problem, *, device: str) -> list[str]:
    """Returns what features say of a plan, for its pages; see `RecordHook.plan_sentences`."""
    return [line for hook in record_hooks() for line in hook.plan_sentences(plan, problem, device=device)]


def record_hooks() -> Iterator[RecordHook]:
    """Returns the hooks of all features."""
    return listed("pages", "RECORD_HOOKS")
