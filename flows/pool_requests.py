"""Requests to a running pool, as flows whose deployments have forms in Prefect's UI.

The command line makes the same requests without a flow run: `ringmaster submit` and `ringmaster jobs`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from ringmaster.errors import BatchFailed, InputError
from ringmaster.flows.batch.artifacts import show_answers
from ringmaster.flows.batch.batch_input import BatchOfFile, CheckpointEvery, FormSection, titled
from ringmaster.flows.batch.flow_runs import cancel_batches, ended, named, result_of
from ringmaster.flows.pool import batch_requests
from ringmaster.flows.retraining.approval import CloneApproval, ask
from ringmaster.flows.train_batch import train_batch
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.control.requests import MAX_PRIORITY, RequestKind
from ringmaster.tasks.pool.active_batches import quota_of, set_quotas
from ringmaster.tasks.recording.mlflow_writer import FLOW_RUN_PAGE
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.job_parts import NAME_PATTERN
from ringmaster.text import markdown, printable

ANSWER_WITHIN_S = 1800.0  # the run keeps its process until then

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
    batch_requests.pool_address()
    added = replace(jobs.batch(), name=batch)
    result = result_of(lambda: train_batch(added, name=batch, checkpoint_every_s=checkpoint_every_s))
    return ended(result.to_json(), status=result.status, message=result.summary(), failure=BatchFailed)


WHICH = "Their names. If the list is empty, this is every job of the batch."


# A number that may stay empty. With None in its schema, the form would have two buttons for it.
OptionalCount = Annotated[int, Field(ge=1)] | SkipJsonSchema[None]
OptionalAmount = Annotated[float, Field(gt=0)] | SkipJsonSchema[None]
OptionalPriority = Annotated[float, Field(gt=0, le=MAX_PRIORITY)] | SkipJsonSchema[None]


def optional(title: str, description: str) -> Any:
    """Returns the field of a number that may stay empty: Prefect would fill in None if that was a default."""

    def drop_default(schema: dict[str, Any]) -> None:
        schema.pop("default", None)

    return Field(default=None, title=title, description=description, json_schema_extra=drop_default)


class CloneAction(FormSection, title="Clone a job"):
    """Add a job like another one, with other settings."""

    clone: str = Field(title="Job to clone", min_length=1, description="The name of a job of the batch, in any state.")
    settings: dict[str, Any] = Field(
        default={},
        title="What differs",
        description='Settings as JSON, such as {"optimizer.lr": 0.0001, "num_steps": 500}. Options of the optimizer, '
        "schedule.*, clip_grad_norm, seed and num_steps can differ.",
    )
    warm: bool = Field(
        default=False,
        title="Warm",
        description="Go on from the newest checkpoint of the job, optimizer included, instead of its first step.",
    )
    at_step: OptionalCount = optional(
        "At step", "If warm: the step of an earlier checkpoint that is kept. If empty, the newest one is taken."
    )
    name: str = Field(default="", title="Name of the clone", description="By default that of the job with a number.")
    mode: Literal["ask", "start", "dry-run"] = Field(
        default="ask",
        title="Mode",
        description='"ask" shows what the clone delays, and how the size of its steps jumps, and waits for approval. '
        '"start" shows both and starts it at once. "dry-run" starts nothing.',
    )


class SetAction(FormSection, title="Change settings"):
    """Change settings of jobs that run or wait."""

    jobs: list[str] = Field(default=[], title="Jobs", description=WHICH)
    steps: OptionalCount = optional("Steps", "The number of steps of each job. What is empty stays as it is.")
    weight: OptionalAmount = optional("Weight", "Of the end of each job in the plan.")
    deadline: OptionalAmount = optional("Deadline (seconds)", "From the start of the batch.")
    priority: OptionalPriority = optional("Priority", "1 is usual; with 2, an end counts twice.")


class StateAction(FormSection, title="Pause, resume or cancel"):
    """Pause, resume or cancel jobs; those that run write a checkpoint first."""

    action: Literal["pause", "resume", "cancel"] = Field(
        default="pause", title="Action", description="Jobs that run write a checkpoint first. A cancelled job ends."
    )
    jobs: list[str] = Field(default=[], title="Jobs", description=WHICH)


# A form that is opened with values shows the section that has most of them, and of equal ones the first.
JobAction = Annotated[CloneAction | SetAction | StateAction, titled("What to do")]


@flow(name="control-jobs", flow_run_name=named("control {batch}"), persist_result=True, result_serializer="json")
def control_jobs(batch: BatchName, what: JobAction) -> list[str]:
    """Clones, changes, pauses, resumes or cancels jobs of a batch that runs, wherever the batch was started.

    Args:
        batch: The name or the id of the batch.
        what: What is done with its jobs.
    """
    with batch_requests.database_of(batch) as database:
        answers = _answers(database, batch, what)
        pages = {answer.batch: Journal(database, batch=answer.batch).get(FLOW_RUN_PAGE) for answer in answers}
    lines = [printable(f"{answer.batch}: {answer.message}") for answer in answers]
    for line in lines:
        get_run_logger().info(line)
    show_answers(lines, pages=pages)
    return lines


def _answers(
    database: Database, batch: str, what: StateAction | CloneAction | SetAction
) -> Sequence[batch_requests.ControllerAnswer]:
    """Returns the answers of the executor. Raises InputError where it refuses."""
    if isinstance(what, StateAction):
        return batch_requests.ask_about(database, RequestKind(what.action), batch=batch, jobs=what.jobs)
    if isinstance(what, SetAction):
        settings = what.model_dump(exclude_none=True, exclude={"jobs"})
        return batch_requests.ask_about(database, RequestKind.SET, batch=batch, jobs=what.jobs, settings=settings)

    def accept(priced: batch_requests.ControllerAnswer) -> None:
        price = [each for each in (priced.message, priced.jump) if each]
        get_run_logger().info(printable("; ".join(price)))
        if what.mode == "ask":
            text = "\n\n".join(["# Start this clone?", *map(markdown, price)])
            answer = ask(text, form=CloneApproval, timeout_s=ANSWER_WITHIN_S, poll_s=1)
            if not answer.approved:
                raise InputError([f"no clone was started: {answer.sentence()}"])

    answer = batch_requests.clone_job(
        database,
        batch=batch,
        job=what.clone,
        settings_of_clone=what.settings,
        name=what.name,
        is_warm=what.warm,
        at_step=what.at_step,
        is_dry=what.mode == "dry-run",
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
    with batch_requests.open_database(batch_requests.pool_address()) as database:
        set_quotas(database, {user: quota_of(limit)})
        lines = [printable(line) for line in batch_requests.quotas_in_words(database)]
    for line in lines:
        get_run_logger().info(line)
    return lines
