"""Technique for knowledge stores: the passages are encoded by all devices of a gang, and nothing is trained."""

from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.technique import WEIGHT_BYTES, Config, GangShape


class Encode(BlackBox):
    """Each device has the whole encoder and takes its share of the batches of a step; the batches stay the same."""

    name = "encode"
    summary = "passages of a knowledge store, encoded by all devices"
    needs = "a job of kind store"

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Supports exactly the jobs that make a store."""
        return None if job.made_by == self.name else "the job makes no knowledge store"

    def num_ranks(self, gang: GangShape) -> int:
        """Returns one a device."""
        return gang.num_devices

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the encoder's weights."""
        return facts.num_parameters * WEIGHT_BYTES

    def profile(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Encodes some batches."""
        from ringmaster.features.stores.store_builder import run

        return run(order, self.rank, reporter)

    run = profile
