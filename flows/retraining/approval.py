"""Approval by a person in Prefect's UI: the flow run stops, shows a question, and continues with the answer.

A run in the middle of its work is paused: its process waits (`ask`). A run that has only planned is suspended: its
process ends, it occupies no worker, and the answer starts the same run again (`ask_to_start`).
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import httpx
from prefect import pause_flow_run, resume_flow_run, suspend_flow_run
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.input import RunInput, keyset_from_base_key, read_flow_run_input
from pydantic import Field

from ringmaster.flows import settings
from ringmaster.flows.batch.embedded_prefect import has_lasting_server
from ringmaster.flows.batch.flow_runs import current_flow_run
from ringmaster.tasks.background_worker import background_thread

POLL_S = 5
SLACK_S = 600  # added to Prefect's timeout, which would fail the run, so that our own comes first
LONG_SLACK_S = 86_400
NO_SERVER = "approval is not possible: no Prefect server is up (`ringmaster up` starts one)"
SOMEBODY = "somebody"


NOBODY = "nobody"
"""The name in the answer if nobody has answered in time."""
TO_START = "start"
"""Key of a flow run's only suspension, which asks whether to start."""


class Approval(RunInput):
    """The form that asks whether to promote."""

    approve: bool = Field(default=False, title="Promote it", description="Leave it off to keep the champion.")
    name: str = Field(default="", title="Your name")
    comment: str = Field(default="", title="Why")


class Start(RunInput):
    """The form that asks whether to train."""

    start: bool = Field(default=False, title="Train it", description="Leave it off to train nothing.")
    name: str = Field(default="", title="Your name")
    comment: str = Field(default="", title="Why")


@dataclass(frozen=True, kw_only=True)
class ApprovalAnswer:
    """A person's answer.

    approved: None if nobody has answered, or approval is not possible.
    who: name of the person.
    why: the person's comment, or why there is no answer.
    """

    approved: bool | None
    who: str = ""
    why: str = ""

    def sentence(self) -> str:
        """Returns who decided what, and why."""
        if self.who in ("", NOBODY):
            return self.why
        why = f" ({self.why})" if self.why else ""
        return f"{self.who} {'agreed' if self.approved else 'did not agree'}{why}"


def ask(question: str, *, timeout_s: float, form: type[Approval] = Approval, poll_s: int = POLL_S) -> ApprovalAnswer:
    """Pauses the flow run until a person has answered in Prefect's UI, or `timeout_s` seconds have passed.

    question: markdown.
    form: with the field that a person switches on to agree.
    poll_s: seconds between looks for an answer.

    Approval requires a Prefect server that outlives the run.
    """
    run_id = _run_that_can_ask()
    if run_id is None:
        return ApprovalAnswer(approved=None, why=NO_SERVER)
    create_markdown_artifact(key="approval", markdown=question, description="Waits for approval")
    silence = {"approve": False, "name": NOBODY, "comment": ""}
    wanted = form.with_initial_data(description=question)
    answer = _paused(run_id, wanted, timeout_s=timeout_s, silence=silence, poll_s=poll_s)
    if answer.name == NOBODY:
        return ApprovalAnswer(approved=None, why=_unanswered(timeout_s))
    return ApprovalAnswer(approved=answer.approve, who=answer.name or SOMEBODY, why=answer.comment)


def ask_to_start(question: Callable[[], str], *, timeout_s: float, without_answer: bool) -> ApprovalAnswer:
    """Asks a person whether to continue this flow run, which has done nothing yet except to prepare the question.

    On a pool the run is suspended, and starts again once it is answered; `question`, which may be slow, is called only
    once. The pool's controller gives the answer `without_answer` after `timeout_s`
    (`ringmaster.flows.pool.controller`). Elsewhere the process waits.
    """
    run_id = _run_that_can_ask()
    if run_id is None:
        return ApprovalAnswer(approved=False, why=NO_SERVER)
    run = current_flow_run()
    # It can be suspended: it has a deployment, and a controller watches the timeout.
    is_of_pool = settings.checked_pool() is not None and run is not None and run.deployment_id is not None
    key, text = keyset_from_base_key(f"suspended-{TO_START}")["response"], ""
    if not is_of_pool or read_flow_run_input(key, run_id) is None:
        text = question()
        create_markdown_artifact(key="approval", markdown=text, description="Waits for approval")
    form = Start.with_initial_data(description=text)
    if is_of_pool:  # The pool's controller answers in time. If none leads for a day, Prefect fails the run.
        answer = suspend_flow_run(wait_for_input=form, timeout=int(timeout_s) + LONG_SLACK_S, key=TO_START)
    else:
        answer = _paused(run_id, form, timeout_s=timeout_s, silence=silence_to_start(timeout_s, without_answer))
    return ApprovalAnswer(approved=answer.start, who=answer.name or SOMEBODY, why=answer.comment)


def silence_to_start(timeout_s: float, without_answer: bool) -> dict[str, Any]:
    """Returns the answer to `ask_to_start` if nobody has answered in time."""
    return {"start": without_answer, "name": NOBODY, "comment": _unanswered(timeout_s)}


def _run_that_can_ask() -> UUID | None:
    run = current_flow_run()
    return run.id if run is not None and has_lasting_server() else None


def _unanswered(timeout_s: float) -> str:
    return f"nobody answered within {timeout_s:.0f} s"


def _paused(run_id: UUID, form: Any, *, timeout_s: float, silence: dict[str, Any], poll_s: int = POLL_S) -> Any:
    """Returns the form as a person has filled it in or, after `timeout_s`, with the values of `silence`."""
    # In a copy of the context, which has the current settings of Prefect.
    answers = partial(copy_context().run, partial(_answer_late, run_id, silence, timeout_s))
    with background_thread(answers, name="answer"):  # its end is awaited: it could answer the next question
        return pause_flow_run(wait_for_input=form, timeout=int(timeout_s) + SLACK_S, poll_interval=poll_s)


def _answer_late(flow_run_id: UUID, silence: dict[str, Any], timeout_s: float, over: threading.Event) -> None:
    """Ends the pause after `timeout_s`, so that the run continues; Prefect's own timeout would fail it.

    It retries until the pause is over: the pause may not have begun yet, its form may be missing (a RuntimeError), and
    the server may be away.
    """
    wait_s = timeout_s
    while not over.wait(wait_s):
        wait_s = POLL_S
        with suppress(httpx.HTTPError, PrefectException, RuntimeError):
            resume_flow_run(flow_run_id, run_input=silence)
