"""An external trainer, started as a command, that says in JSON lines what it does.

docs/commands.md has the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import Config, GangShape

if TYPE_CHECKING:
    from ringmaster.techniques.engine.models import ModelFacts
    from ringmaster.techniques.engine.order import GangOrder
    from ringmaster.techniques.engine.reporter import Reporter


class Command(BlackBox):
    """The command of a job's model, on any number of devices of one node."""

    name = "command"
    summary = "an external trainer, started as a command"
    needs = "a job whose model is a command that speaks the protocol; devices of one node"

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """It runs commands alone, and nobody else does."""
        if job.model.command is None:
            return "the model is no command"
        if gang.num_nodes > 1:
            return "a command is started on one node"
        return None

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Those that the job names, in its order."""
        yield from job.model.configs or ({},)

    def profile(self, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
        """Lets the command train until enough steps are measured, then save, evaluate and export once."""
        from ringmaster.techniques.engine.commands.running import profile

        return profile(order, reporter)

    def run(self, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
        """Lets the command train the segment's steps."""
        from ringmaster.techniques.engine.commands.running import run

        return run(order, reporter)
