"""The section for clones of the form in Prefect's UI that controls the jobs of a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from ringmaster.errors import InputError
from ringmaster.features.clones.batch_requests import clone_job
from ringmaster.flows.job_forms import JobForm, OptionalCount, optional
from ringmaster.flows.pool.batch_requests import ControllerAnswer
from ringmaster.flows.retraining.approval import Approval, ask
from ringmaster.tasks.storage.database import Database
from ringmaster.text import markdown, printable

ANSWER_WITHIN_S = 1800.0  # the run keeps its process until then


class CloneApproval(Approval):
    """The form that asks whether to start a clone."""

    approve: bool = Field(default=False, title="Start the clone", description="Leave it off to start nothing.")


class CloneAction(JobForm, title="Clone a job"):
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

    @classmethod
    def links(cls, jobs: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns the name of the job to clone; a batch has no clones."""
        return {"clone": {"clone": jobs[0], "settings": {}, "mode": "ask"}} if jobs else {"": {}}

    def request(
        self, database: Database, batch: str, *, say: Callable[[str], object] = lambda text: None
    ) -> Sequence[ControllerAnswer]:
        """Requests the price, shows it, and starts the clone once a person has agreed or need not."""

        def accept(priced: ControllerAnswer) -> None:
            price = [each for each in (priced.message, priced.jump) if each]
            say(printable("; ".join(price)))
            if self.mode == "ask":
                text = "\n\n".join(["# Start this clone?", *map(markdown, price)])
                answer = ask(text, form=CloneApproval, timeout_s=ANSWER_WITHIN_S, poll_s=1)
                if not answer.approved:
                    raise InputError([f"no clone was started: {answer.sentence()}"])

        answer = clone_job(
            database,
            batch=batch,
            job=self.clone,
            settings_of_clone=self.settings,
            name=self.name,
            is_warm=self.warm,
            at_step=self.at_step,
            is_dry=self.mode == "dry-run",
            accept=accept,
        )
        return [answer]


JOB_FORMS = (CloneAction,)
