"""The metrics of a model in a folder, by the loop that evaluates a job at its end."""

from ringmaster.features.adaptation.rewriting import evaluator
from ringmaster.techniques.processes.ranks import RankContext, take_device


def evaluate_model(order):
    device = take_device((order.slot,), 0, num_ranks=1)
    return evaluator(
        order, ranks=RankContext(rank=0, num_ranks=1, device=device, mesh=None), beat=lambda: None
    ).evaluate()
