"""The choice of a smaller child where a candidate breaks a limit of its policy: the cheapest that keeps every rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringmaster.model_lineage.graph import Graph
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.tasks.retraining.policy import PromotionDecision
from ringmaster.techniques.job import DISTILLED, PRUNED, QUANTIZED
from ringmaster.techniques.metric import ranked


@dataclass(frozen=True, kw_only=True)
class SmallerChild:
    """A model that was distilled from, pruned from or quantized from a candidate, directly or by several steps."""

    node: LineageNode
    weight_bytes: int

    def sentence(self, decision: PromotionDecision) -> str:
        """Returns what a policy found of it, with its figures."""
        figures = ", ".join(f"{metric} {value:.4g}" for metric, value in decision.figures.items())
        verdict = "it keeps every rule" if decision.promote else decision.why
        return f"tried {self.node.label} ({self.weight_bytes / 1e6:.3g} MB of weights; {figures}): {verdict}"


def smaller_children(snapshot: Snapshot, id: str) -> list[LineageNode]:
    """Returns the models that only distillation, pruning and quantization separate from a model, the nearest first."""
    smaller = (DISTILLED, PRUNED, QUANTIZED)
    edges = ((n.id, [p for p in n.record.parents if n.record.relation_to(p) in smaller]) for n in snapshot.models)
    return [snapshot.nodes[each] for each in Graph(edges).descendants(id) if each in snapshot.nodes]


def cheapest_child(
    children: Sequence[SmallerChild], decisions: Iterator[PromotionDecision]
) -> tuple[SmallerChild | None, dict[str, PromotionDecision]]:
    """Returns the child with the fewest bytes of weights that its policy promotes, and the decisions on those tried.

    Of children of equal size, the best one by the policy's metric is chosen. Larger children are not tried, so the
    choice is that of all decisions at no more than their cost.

    children: the smallest first. decisions: the policy's, one a child in the same order, each made when it is asked
    for. The decisions that are returned are by the child's model id.
    """
    tried: dict[str, PromotionDecision] = {}
    keeping: dict[str, SmallerChild] = {}
    for child in children:
        if any(child.weight_bytes > each.weight_bytes for each in keeping.values()):
            break
        tried[child.node.id] = decision = next(decisions)
        if decision.promote:
            keeping[child.node.id] = child
    lines = {id: line for id in keeping if (line := tried[id].compared) is not None}
    best = (
        ranked({id: line.value for id, line in lines.items()}, metric=next(iter(lines.values())).metric)
        if lines
        else []
    )
    return (keeping[best[0]] if best else None), tried
