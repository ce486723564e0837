"""Technique of an endpoint on a pool: the first rank of a gang serves until nobody asks any more."""

from ringmaster.registry import resolve
from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.technique import GangShape

SERVER = "ringmaster.features.endpoint.server.pool_gang:serve"


class Served(BlackBox):
    """One process serves by HTTP, and starts those that compute, on devices of one node. Nothing is profiled."""

    name = "endpoint"
    summary = "an endpoint, which serves clients until nobody asks any more"
    needs = "a file of an endpoint, and `ringmaster serve --pool`"
    prints_itself = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Supports no job of a batch: endpoints are submitted with their one option."""
        return "the job is no endpoint"

    def profile(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Raises NotImplementedError: endpoints are submitted with their one option."""
        raise NotImplementedError("an endpoint is not profiled")

    def run(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Serves until the endpoint is idle, or its rank is told to stop."""
        result: JobResult = resolve(SERVER)(order, reporter)
        return result
