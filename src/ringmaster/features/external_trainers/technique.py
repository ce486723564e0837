"""Technique for an external trainer that is started as a command and reports its progress in JSON lines.

docs/commands.md describes the protocol.
"""

from collections.abc import Iterator

from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.technique import Config, GangShape


class Command(BlackBox):
    """Runs the command of a job's model on any number of devices of one node."""

    name = "command"
    summary = "an external trainer, started as a command"
    needs = "a job whose model is a command that speaks the protocol; devices of one node"
    prints_itself = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Supports exactly the jobs whose model is a command, on one node."""
        if job.model.command is None:
            return "the model is not a command"
        if gang.num_nodes > 1:
            return "a command is started on one node"
        return None

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields the configs that the job lists, in its order."""
        yield from job.model.configs or ({},)

    def profile(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Lets the command train until enough steps are measured, then save, evaluate and export once."""
        from ringmaster.features.external_trainers.child import profile

        return profile(order, reporter)

    def run(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Lets the command train the steps of the segment."""
        from ringmaster.features.external_trainers.child import run

        return run(order, reporter)
