"""A person's word in Prefect's UI: the flow run pauses, shows what is asked, and goes on with the answer."""

from __future__ import annotations

import threading
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from prefect import pause_flow_run, resume_flow_run
from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.exceptions import NotPausedError
from prefect.input import RunInput
from prefect.settings import PREFECT_API_URL
from pydantic import Field

POLL_S = 5
SLACK_S = 600  # after our own time-out, in which Prefect would fail the run


class Approval(RunInput):
    """The form."""

    approve: bool = Field(default=False, title="Promote it", description="Leave it off to keep the champion.")
    name: str = Field(default="", title="Your name")
    comment: str = Field(default="", title="Why")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a person said. approved: None where nobody has answered, or can be asked."""

    approved: bool | None
    who: str = ""
    why: str = ""


def ask(question: str, *, timeout_s: float) -> Answer:
    """Pauses the flow run until a person has answered in Prefect's UI, or `timeout_s` are over.

    question: markdown. Without a Prefect server that outlives the run, nobody can be asked.
    """
    context = FlowRunContext.get()
    if PREFECT_API_URL.value() is None or context is None or context.flow_run is None:
        return Answer(approved=None, why="nobody can be asked: no Prefect server is up (`ringmaster up` starts one)")
    create_markdown_artifact(key="approval", markdown=question, description="Asked of a person")
    unanswered = threading.Event()
    go_on = partial(_go_on, context.flow_run.id, unanswered)
    timer = threading.Timer(timeout_s, copy_context().run, [go_on])  # with the settings of Prefect as they are here
    timer.daemon = True
    timer.start()
    try:
        answer = pause_flow_run(
            wait_for_input=Approval.with_initial_data(description=question),
            timeout=int(timeout_s) + SLACK_S,
            poll_interval=POLL_S,
        )
    finally:
        timer.cancel()
    assert answer is not None, "a pause for input ends with one"
    if unanswered.is_set():
        return Answer(approved=None, why=f"nobody answered within {timeout_s:.0f} s")
    return Answer(approved=answer.approve, who=answer.name or "somebody", why=answer.comment)


def _go_on(flow_run_id: UUID, unanswered: threading.Event) -> None:
    """Ends the pause, so that the run goes on with its other models; Prefect's own time-out would fail it."""
    unanswered.set()
    try:
        resume_flow_run(flow_run_id, run_input={"approve": False, "name": "", "comment": ""})
    except NotPausedError:  # answered just now
        unanswered.clear()
