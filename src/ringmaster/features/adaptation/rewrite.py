"""Technique for models that need no training step: pruned, quantized or merged by one process on one device."""

from ringmaster.extras import missing_extra
from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.job import MERGED, QUANTIZED, Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.technique import WEIGHT_BYTES, Config, GangShape


class Rewrite(BlackBox):
    """Reads the weights of a job's parents, rewrites them, and evaluates the resulting model and the parents."""

    name = "rewrite"
    summary = "one process that prunes, quantizes, merges or extracts models, without a step"
    needs = "a job that is pruned, quantized, merged or extracted and trains no step; one device"

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Supports the jobs that train no step, on one device."""
        if job.adaptation is None or job.trains:
            return "the job trains steps"
        if gang.num_devices > 1:
            return "one process rewrites on one device"
        return missing_extra("torchao", feature="a quantized model") if job.adaptation.kind == QUANTIZED else None

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the model; for a merged one, also of a parent and of the sums in double precision."""
        assert job.adaptation is not None
        return facts.num_parameters * WEIGHT_BYTES * (4 if job.adaptation.kind == MERGED else 1)

    def profile(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Rewrites the model once, with fresh weights."""
        from ringmaster.features.adaptation.rewriting import profile

        return profile(order, reporter)

    def run(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Rewrites the model."""
        from ringmaster.features.adaptation.rewriting import run

        return run(order, reporter)
