"""Requests to a running pool, as flows whose deployments have forms in Prefect's UI.

The command line makes the same requests without a flow run: `ringmaster submit`, and `ringmaster jobs` with
`cancel`, `pause`, `resume` and `set-priority`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from pydantic import ConfigDict, Field

from ringmaster.errors import BatchFailed
from ringmaster.flows.batch.batch_input import BatchOfFile, CheckpointEvery, FormSection, titled
from ringmaster.flows.batch.flow_runs import cancel_batches, ended, kept_result, named
from ringmaster.flows.pool.batch_requests import ask_about, open_database, pool_address
from ringmaster.flows.train_batch import train_batch
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.batch.references import NAME_PATTERN
from ringmaster.tasks.pool.requests import MOST_PRIORITY, RequestKind
from ringmaster.text import printable

BatchName = Annotated[str, titled("Batch", min_length=1)]
JobNames = Annotated[list[str], titled("Jobs", examples=[["llama", "vit-lr1e-3"]])]
NewName = Annotated[str, titled("Batch", pattern=NAME_PATTERN)]
Priority = Annotated[float, titled("Priority", gt=0, le=MOST_PRIORITY)]


class JobsWrittenOut(FormSection):
    """Jobs that are given as the text of a batch file."""

    model_config = ConfigDict(title="Jobs written out")

    text: str = Field(title="Jobs", description="The complete text of a batch file, as YAML or JSON.")
    folder: str = Field(
        default=".", title="Folder", description="Relative paths and factories in the text are resolved in this folder."
    )

    def batch(self) -> Batch:
        """Returns the jobs as a batch. Raises BatchFileError with every fault."""
        return parse_batch(self.text, folder=Path(self.folder), name="jobs")


EXAMPLE = BatchOfFile(path="examples/tiny_batch.yaml")


@flow(
    name="submit-jobs",
    flow_run_name=named("submit to {batch}"),
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def submit_jobs(
    batch: NewName = "tiny",
    jobs: Annotated[BatchOfFile | JobsWrittenOut, titled("Jobs")] = EXAMPLE,
    checkpoint_every_s: CheckpointEvery = None,
) -> dict[str, Any]:
    """Adds jobs to those that the pool trains; they join the plan that all batches share.

    Args:
        batch: The name of the batch that the jobs belong to. It may run already.
        jobs: The jobs to add: a batch file, or the text of one.
        checkpoint_every_s: The number of seconds between checkpoints. By default, it follows from the cost of one.
    """
    pool_address()
    with kept_result() as end:
        end.result = train_batch(replace(jobs.batch(), name=batch), name=batch, checkpoint_every_s=checkpoint_every_s)
    result = end.result
    return ended(result.to_json(), status=result.status, message=result.summary(), failure=BatchFailed)


@flow(name="cancel-jobs", flow_run_name=named("cancel {batch}"), persist_result=True, result_serializer="json")
def cancel_jobs(batch: BatchName, jobs: JobNames = []) -> list[str]:  # noqa: B006 - never changed
    """Cancels a batch, or some of its jobs, for good; jobs that run write a checkpoint first.

    Args:
        batch: The name or the id of the batch.
        jobs: The names of the jobs to cancel. If the list is empty, this is the whole batch.
    """
    return _ask(RequestKind.CANCEL, batch, jobs)


@flow(name="pause-jobs", flow_run_name=named("pause {batch}"), persist_result=True, result_serializer="json")
def pause_jobs(batch: BatchName, jobs: JobNames = []) -> list[str]:  # noqa: B006 - never changed
    """Pauses a batch, or some of its jobs, until they are resumed; jobs that run write a checkpoint first.

    Args:
        batch: The name or the id of the batch.
        jobs: The names of the jobs to pause. If the list is empty, this is the whole batch.
    """
    return _ask(RequestKind.PAUSE, batch, jobs)


@flow(name="resume-jobs", flow_run_name=named("resume {batch}"), persist_result=True, result_serializer="json")
def resume_jobs(batch: BatchName, jobs: JobNames = []) -> list[str]:  # noqa: B006 - never changed
    """Resumes paused jobs from their checkpoints.

    Args:
        batch: The name or the id of the batch.
        jobs: The names of the jobs to resume. If the list is empty, these are all paused jobs of the batch.
    """
    return _ask(RequestKind.RESUME, batch, jobs)


@flow(name="set-priority", flow_run_name=named("priority of {batch}"), persist_result=True, result_serializer="json")
def set_priority(batch: BatchName, priority: Priority = 1.0, jobs: JobNames = []) -> list[str]:  # noqa: B006
    """Sets the priority of a batch, or of some of its jobs, relative to all others; the pool then re-plans.

    Args:
        batch: The name or the id of the batch.
        priority: The weight of the jobs' end times in the plan. The default is 1. With 2, an end time counts twice.
        jobs: The names of the jobs. If the list is empty, this is the whole batch.
    """
    return _ask(RequestKind.SET_PRIORITY, batch, jobs, priority=priority)


def _ask(kind: RequestKind, batch: str, jobs: list[str], **more: Any) -> list[str]:
    """Returns and logs the answers of the pool's executor. Raises InputError where it refuses."""
    with open_database(pool_address()) as database:
        answers = ask_about(database, kind, batch=batch, jobs=jobs, **more)
    lines = [printable(f"{answer.batch}: {answer.message}") for answer in answers]
    for line in lines:
        get_run_logger().info(line)
    return lines
