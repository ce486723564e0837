"""The form of a batch in Prefect's pages: trains a batch, plans it only, or asks for approval of the plan.

Its flow has the name of `ringmaster.flows.train_batch.train_batch`, which commands and Python call: they are one flow
in Prefect, whose deployment has this form.
"""

from typing import Annotated, Any, cast

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.states import Cancelled

from ringmaster.errors import BatchFailed
from ringmaster.flows import form_fields
from ringmaster.flows.batch.dry_run import DryRun, dry_run
from ringmaster.flows.batch.flow_runs import cancel_batches, final_state, for_prefect, typed_or
from ringmaster.flows.batch.run_options import ProfilingMode, RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.retraining.approval import ask_to_start
from ringmaster.flows.train_batch import run_stages
from ringmaster.tasks.batch import Batch
from ringmaster.text import markdown

WORDS = {"train": "train", "dry-run": "plan", "ask": "ask about"}


def run_name() -> str:
    """Returns the name of a flow run: its mode, and the name of its batch."""
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
def train_batch(
    batch: form_fields.BatchChoice = form_fields.ExampleBatch(),
    name: form_fields.RunName = "",
    mode: form_fields.Mode = "train",
    profiles: Annotated[ProfilingMode, form_fields.titled("Profiles")] = "predict",
    answer_within_s: form_fields.AnswerWithin = form_fields.ANSWER_WITHIN_S,
    without_answer: form_fields.WithoutAnswer = "stop",
    resume: form_fields.Resume = False,
    checkpoint_every_s: form_fields.CheckpointEvery = None,
    seed: form_fields.Seed = 0,
) -> dict[str, Any]:
    """Trains the jobs of a batch file, or plans them only, or plans them and asks for approval first.

    Args:
        batch: The batch file: an example, a file that the workers can read, or pasted text.
        name: A name for the flow run. If it is empty, the name is made from the mode and the batch.
        mode: "train" trains at once. "dry-run" only plans, and shows when the jobs would end and what that would cost.
            "ask" plans, shows the plan, and waits for approval before it trains.
        profiles: How a plan without training treats jobs that were never measured. "measure" starts short trials;
            "predict" uses predictions and starts none.
        answer_within_s: With the mode "ask", how many seconds to wait for an answer.
        without_answer: With the mode "ask", what to do if nobody answers in time.
        resume: Continues the last run of this batch, which was interrupted, from its checkpoints.
        checkpoint_every_s: Seconds between checkpoints; by default derived from the cost of one checkpoint.
        seed: Seed of the planner. A pool's controller uses its own seed.
    """
    requested = batch.batch()
    if mode == "dry-run":
        match = dry_run(requested, profiles=profiles, seed=seed, caller=Caller())
        show(match)
        return final_state(
            match.to_json(), status="done" if match.is_good else "failed", message=match.summary(), failure=BatchFailed
        )
    if mode == "ask":
        answer = ask_to_start(
            lambda: _question(requested, profiles=profiles, seed=seed),
            timeout_s=answer_within_s,
            without_answer=without_answer == "train",
        )
        if not answer.approved:
            why = f"{requested.name} was not trained: {answer.sentence()}"
            return cast(dict[str, Any], Cancelled(message=why))  # no failure
    options = RunOptions(resume=resume, checkpoint_every_s=checkpoint_every_s, seed=seed)
    result = run_stages(requested, options)
    return final_state(result.to_json(), status=result.status, message=result.summary(), failure=BatchFailed)


def show(result: DryRun) -> None:
    """Shows a dry run among the artifacts of the flow run."""
    page = result.markdown()
    text = "The estimated end and cost of the batch"
    for_prefect(lambda: create_markdown_artifact(key="dry-run", markdown=page, description=text))


def _question(batch: Batch, *, profiles: ProfilingMode, seed: int) -> str:
    """Plans the batch and shows the plan; returns the question for a person, as markdown."""
    result = dry_run(batch, profiles=profiles, seed=seed, caller=Caller())
    show(result)
    lines = "".join(f"\n- {markdown(line)}" for line in result.sentences())
    return f"# Train {markdown(batch.name)}?\n{lines}\n\nThe plan is among this run's artifacts."
