"""What the form of a batch in Prefect's UI starts: it trains the batch, plans it only, or plans it and asks first."""

from __future__ import annotations

from typing import Any, cast

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.states import Cancelled

from ringmaster.flows.approval import Answer, ask_to_start
from ringmaster.flows.batch_form import (
    ANSWER_WITHIN_S,
    AnswerWithin,
    BatchChoice,
    CheckpointEvery,
    ExampleBatch,
    Mode,
    Profiles,
    RunName,
    Seed,
    WithoutAnswer,
)
from ringmaster.flows.dry_run import DryRun, dry_run
from ringmaster.flows.faults import BatchFailed
from ringmaster.flows.flow_runs import cancel_batches, ended
from ringmaster.flows.run_names import typed_or
from ringmaster.flows.train_batch import train
from ringmaster.flows.waiting import for_prefect
from ringmaster.tasks.batch import Batch

WORDS = {"train": "train", "dry-run": "plan", "ask": "ask about"}


def run_name() -> str:
    """Of a flow run: what it does, and with which batch."""
    given = runtime.flow_run.parameters
    batch = given["batch"]
    named = given["name"] or getattr(batch, "example", "") or getattr(batch, "path", "") or "a batch"
    return typed_or(f"{WORDS[given['mode']]} {named}")


@flow(
    name="train-batch",
    flow_run_name=run_name,
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def start_batch(
    batch: BatchChoice = ExampleBatch(),
    name: RunName = "",
    mode: Mode = "train",
    profiles: Profiles = "measure",
    answer_within_s: AnswerWithin = ANSWER_WITHIN_S,
    without_answer: WithoutAnswer = "stop",
    resume: bool = False,
    checkpoint_every_s: CheckpointEvery = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Trains the jobs of a batch file, or plans them only, or plans them and asks first.

    Args:
        batch: A batch file that comes with Ringmaster, one of your own, or the text of one.
        name: Names the flow run.
        mode: "train" at once; "dry-run": plan only, and show end and cost; "ask": plan, show it, and wait for approval.
        profiles: Before a dry run, jobs that are not known are measured, or only predicted, which starts no trial.
        answer_within_s: How long an answer is waited for, in seconds.
        without_answer: What happens when nobody has answered by then.
        resume: Go on with the last run of this batch, which was interrupted.
        checkpoint_every_s: Seconds between checkpoints; by default from what one costs.
        seed: Of the planner; on a pool the executor has its own.
    """
    asked = batch.batch()
    if mode == "dry-run":
        found = dry_run(asked, profiles=profiles, seed=seed)
        show(found)
        return ended(
            found.to_json(), status="done" if found.is_good else "failed", message=found.summary(), failure=BatchFailed
        )
    if mode == "ask":
        answer = ask_to_start(
            lambda: _question(asked, profiles=profiles, seed=seed),
            timeout_s=answer_within_s,
            without_answer=without_answer == "train",
        )
        if not answer.approved:
            return _turned_down(asked, answer)
    result = train(asked, resume=resume, checkpoint_every_s=checkpoint_every_s, seed=seed)
    return ended(result.to_json(), status=result.status, message=result.summary(), failure=BatchFailed)


def show(found: DryRun) -> None:
    """A dry run among the artifacts of the flow run."""
    page = found.markdown()
    said = "What the batch would come to"
    for_prefect(lambda: create_markdown_artifact(key="dry-run", markdown=page, description=said))


def _question(batch: Batch, *, profiles: Profiles, seed: int) -> str:
    """Plans the batch, shows the plan, and says what a person is asked, as markdown."""
    found = dry_run(batch, profiles=profiles, seed=seed)
    show(found)
    lines = "".join(f"\n- {line}" for line in found.sentences())
    return f"# Train {batch.name}?\n{lines}\n\nThe plan is among this run's artifacts."


def _turned_down(batch: Batch, answer: Answer) -> dict[str, Any]:
    """The run of a batch that is not to be trained is cancelled: that is what happened to it, and no failure."""
    why = f"{batch.name} was not trained: {answer.sentence()}"
    return cast(dict[str, Any], Cancelled(message=why))
