"""Requests to a running pool, as flows whose deployments have forms in Prefect's UI.

The command line makes the same requests without a flow run: `ringmaster submit` and `ringmaster jobs`.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from prefect import flow, get_run_logger
from pydantic import Field

from ringmaster.errors import BatchFailed
from ringmaster.flows.batch.artifacts import show_answers
from ringmaster.flows.batch.flow_runs import cancel_batches, final_state, result_of, run_name_template
from ringmaster.flows.form_fields import BatchOfFile, CheckpointEvery, FormSection, titled
from ringmaster.flows.job_forms import JobForm, job_forms
from ringmaster.flows.pool import batch_requests
from ringmaster.flows.train_batch import train_batch
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.storage.fact_keys import FLOW_RUN_PAGE
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.job_features import NAME_PATTERN
from ringmaster.text import printable

BatchName = Annotated[str, titled("Batch", min_length=1)]
NewName = Annotated[str, titled("Batch", pattern=NAME_PATTERN)]


class JobsWrittenOut(FormSection, title="Jobs written out"):
    """Jobs that are given as the text of a batch file."""

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
    flow_run_name=run_name_template("submit to {batch}"),
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
    batch_requests.pool_address()
    added = replace(jobs.batch(), name=batch)
    result = result_of(lambda: train_batch(added, name=batch, checkpoint_every_s=checkpoint_every_s))
    return final_state(result.to_json(), status=result.status, message=result.summary(), failure=BatchFailed)


if TYPE_CHECKING:
    JobAction = JobForm
else:
    JobAction = Annotated[Union[job_forms()], titled("What to do")]  # noqa: UP007 - known at run time


@flow(
    name="control-jobs",
    flow_run_name=run_name_template("control {batch}"),
    persist_result=True,
    result_serializer="json",
)
def control_jobs(batch: BatchName, what: JobAction) -> list[str]:
    """Changes, pauses, resumes or cancels jobs of a batch that runs, wherever it was started, or adds jobs like them.

    Args:
        batch: The name or the id of the batch.
        what: What is done with its jobs.
    """
    with batch_requests.database_of(batch) as database:
        answers = what.request(database, batch, say=get_run_logger().info)
        pages = {answer.batch: Journal(database, batch=answer.batch).get(FLOW_RUN_PAGE) for answer in answers}
    lines = [printable(f"{answer.batch}: {answer.message}") for answer in answers]
    for line in lines:
        get_run_logger().info(line)
    show_answers(lines, pages=pages)
    return lines
