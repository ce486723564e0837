"""Requests to a running pool, as flows whose deployments have forms in Prefect's UI.

The command line makes the same requests without a flow run: `ringmaster submit` and `ringmaster jobs`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger
from pydantic import ConfigDict, Field

from ringmaster.errors import BatchFailed, InputError
from ringmaster.flows.batch.batch_input import BatchOfFile, CheckpointEvery, FormSection, titled
from ringmaster.flows.batch.flow_runs import cancel_batches, ended, kept_result, named
from ringmaster.flows.pool.batch_requests import (
    ControllerAnswer,
    ask_about,
    clone_job,
    database_of,
    open_database,
    pool_address,
    quotas_in_words,
)
from ringmaster.flows.train_batch import train_batch
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.batch.references import NAME_PATTERN
from ringmaster.tasks.pool.active_batches import quota_of, set_quotas
from ringmaster.tasks.pool.requests import MOST_PRIORITY, RequestKind
from ringmaster.tasks.storage.database import Database
from ringmaster.text import printable

BatchName = Annotated[str, titled("Batch", min_length=1)]
JobNames = Annotated[list[str], titled("Jobs", examples=[["llama", "vit-lr1e-3"]])]
NewName = Annotated[str, titled("Batch", pattern=NAME_PATTERN)]


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


class CloneAction(FormSection):
    """Add a job like another one, with other settings."""

    model_config = ConfigDict(title="Clone")

    clone: str = Field(title="Job to clone", min_length=1, description="The name of a job of the batch, in any state.")
    settings: dict[str, Any] = Field(
        default={}, title="Settings", description='What differs, as JSON, such as {"optimizer.lr": 1e-4}.'
    )
    warm: bool = Field(
        default=False, title="Warm", description="Go on from the newest checkpoint of the job, optimizer included."
    )
    at_step: int | None = Field(
        default=None, ge=1, title="At step", description="The step of an earlier checkpoint that is kept. For Warm."
    )
    name: str = Field(default="", title="Name", description="By default that of the job with a number.")
    only_price: bool = Field(default=False, title="Only show the price", description="Start nothing.")
    accept_jump: bool = Field(
        default=False,
        title="Accept a jump of the step",
        description="Start it although the learning rate jumps by more than a fifth at its first step.",
    )


class SetAction(FormSection):
    """Change settings of jobs that run or wait. Empty fields stay as they are."""

    model_config = ConfigDict(title="Set")

    steps: int | None = Field(default=None, ge=1, title="Steps", description="The number of steps of each job.")
    weight: float | None = Field(default=None, gt=0, title="Weight", description="Of the end of each job.")
    deadline: float | None = Field(
        default=None, gt=0, title="Deadline (seconds)", description="From the start of the batch."
    )
    priority: float | None = Field(
        default=None, gt=0, le=MOST_PRIORITY, title="Priority", description="1 is usual; with 2, an end counts twice."
    )


class StateAction(FormSection):
    """Pause, resume or cancel jobs; those that run write a checkpoint first."""

    model_config = ConfigDict(title="Pause, resume or cancel")

    action: Literal["pause", "resume", "cancel"] = Field(
        default="pause", title="Action", description="A cancelled job ends for good."
    )


JobAction = Annotated[StateAction | CloneAction | SetAction, titled("What to do")]


@flow(name="control-jobs", flow_run_name=named("control {batch}"), persist_result=True, result_serializer="json")
def control_jobs(
    batch: BatchName,
    what: JobAction = StateAction(),
    jobs: JobNames = [],  # noqa: B006 - never changed
) -> list[str]:
    """Clones, changes, pauses, resumes or cancels jobs of a batch that runs, wherever the batch was started.

    Args:
        batch: The name or the id of the batch.
        what: What is done with its jobs.
        jobs: The names of the jobs. If the list is empty, this is the whole batch. A clone names its job itself.
    """
    with database_of(batch) as database:
        answers = _answers(database, batch, what, jobs)
    lines = [printable(f"{answer.batch}: {answer.message}") for answer in answers]
    for line in lines:
        get_run_logger().info(line)
    return lines


def _answers(
    database: Database, batch: str, what: StateAction | CloneAction | SetAction, jobs: Sequence[str]
) -> Sequence[ControllerAnswer]:
    """Returns the answers of the executor. Raises InputError where it refuses."""
    if isinstance(what, StateAction):
        return ask_about(database, RequestKind(what.action), batch=batch, jobs=jobs)
    if isinstance(what, SetAction):
        return ask_about(database, RequestKind.SET, batch=batch, jobs=jobs, settings=what.model_dump(exclude_none=True))

    def accept(priced: ControllerAnswer) -> None:
        get_run_logger().info(printable(priced.message))
        if priced.jump and not (what.only_price or what.accept_jump):
            raise InputError([f'{priced.jump}. To fix: tick "Accept a jump of the step"'])

    answer = clone_job(
        database,
        batch=batch,
        job=what.clone,
        settings_of_clone=what.settings,
        name=what.name,
        is_warm=what.warm,
        at_step=what.at_step,
        is_dry=what.only_price,
        accept=accept,
    )
    return [answer]


@flow(name="set-quota", flow_run_name=named("quota of {user}"), persist_result=True, result_serializer="json")
def set_quota(
    user: Annotated[str, titled("User", min_length=1)],
    limit: Annotated[str, titled("Limit", pattern=r"^([1-9][0-9]{0,5}|[1-9][0-9]?%|100%|none)$")],
) -> list[str]:
    """Limits how many devices the jobs of a user may hold at a time, in all batches of the pool.

    Args:
        user: The user that jobs name in batch files.
        limit: A number of devices, such as 4, a share of all devices, such as 25%, or none.
    """
    with open_database(pool_address()) as database:
        set_quotas(database, {user: quota_of(limit)})
        lines = [printable(line) for line in quotas_in_words(database)]
    for line in lines:
        get_run_logger().info(line)
    return lines
