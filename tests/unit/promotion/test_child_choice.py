"""The smaller child that takes a candidate's place: the one that an evaluation of all children finds."""

import random
from dataclasses import replace

import pytest

from ringmaster.flows.retraining.shrinking import (
    SmallerChild,
    cheapest_child,
    is_of_layer,
    largest_size,
    smaller_children,
)
from ringmaster.model_lineage.records import ModelRecord, Origin
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.tasks.evaluation.examination import ExaminationResult, SliceMetric
from ringmaster.tasks.retraining.policy import PromotionPolicy, decide_by

P99 = "latency/p99_s"
POLICY = PromotionPolicy(name="quick", significance=None, limits={P99: (0.0, 0.02)})


def node(id, *parents, kind="pretrained", started_from=None):
    record = ModelRecord(
        model_id=id, registered_name=id, version=1, uri=id, kind=kind, parents=parents,
        origin=Origin(started_from=started_from),
    )  # fmt: skip
    return LineageNode(record=record)


def whole(metric, value):
    return SliceMetric(metric=metric, slice="all", num_rows=9, value=value, low=value, high=value, level=0.95)


def decide(loss, p99_s):
    """What the policy finds of a loss and of the upper end of a p99's interval."""
    lines = (whole("loss", loss), *([] if p99_s is None else [replace(whole(P99, 0.9 * p99_s), high=p99_s)]))
    return decide_by(POLICY, [ExaminationResult(num_rows=9, measured=lines)], metric="loss", is_first=True)


@pytest.mark.parametrize("seed", range(200))
def test_the_choice_is_that_of_evaluating_all_children_and_larger_ones_are_not_tried(seed):
    draw = random.Random(seed)
    nodes = [node("big")]
    for i in range(draw.randint(0, 8)):
        kind = draw.choice(["distilled", "pruned", "quantized", "fine-tuned"])
        nodes.append(node(f"c{i}", draw.choice(nodes).id, kind=kind))
    made = {each.id: each.record for each in nodes}

    def is_smaller(id):
        return id == "big" or (made[id].kind != "fine-tuned" and is_smaller(made[id].parents[0]))

    figures = {
        id: (draw.choice([1e6, 2e6, 3e6]), draw.choice([1.0, 1.5, 2.0]), draw.choice([0.01, 0.02, 0.021, None]))
        for id in made
        if id != "big" and is_smaller(id)
    }
    found = smaller_children(Snapshot(nodes), "big")
    assert {each.id for each in found} == figures.keys()
    children = [SmallerChild(node=each, weight_bytes=figures[each.id][0]) for each in found]
    children.sort(key=lambda child: child.weight_bytes)
    asked = []

    def decisions():
        for child in children:
            asked.append(child.node.id)
            yield decide(*figures[child.node.id][1:])

    chosen, tried = cheapest_child(children, decisions())
    keeping = [(size, loss) for size, loss, p99_s in figures.values() if p99_s is not None and p99_s <= 0.02]
    assert list(tried) == asked
    if not keeping:
        assert chosen is None and len(asked) == len(figures)
        return
    assert figures[chosen.node.id][:2] == min(keeping)
    assert decide(*figures[chosen.node.id][1:]).promote
    assert all(figures[id][0] <= min(keeping)[0] for id in asked)


def test_a_child_is_told_with_its_figures_and_why_it_is_refused():
    child = SmallerChild(node=node("small"), weight_bytes=1_230_000)
    assert child.sentence(decide(1.5, 0.01)) == (
        "tried small/1 (1.23 MB of weights; latency/p99_s 0.01): it keeps every rule"
    )
    assert child.sentence(decide(1.5, 0.5)).startswith(
        "tried small/1 (1.23 MB of weights; latency/p99_s 0.5): its latency/p99_s is 0.5, the end of the"
    )


def test_children_are_what_distillation_pruning_and_quantization_alone_have_made():
    snapshot = Snapshot(
        [
            node("base"),
            node("big", "base", kind="fine-tuned"),
            node("student", "big", "base", kind="distilled", started_from="base"),
            node("int8", "student", kind="quantized"),
            node("sparse", "big", kind="pruned"),
            node("recovered", "big", "sparse", kind="distilled", started_from="sparse"),
            node("tuned", "sparse", kind="fine-tuned"),
            node("late", "tuned", kind="quantized"),
        ]
    )
    assert {each.id for each in smaller_children(snapshot, "big")} == {"student", "int8", "sparse", "recovered"}
    assert not smaller_children(snapshot, "base"), "a student's first weights make it no child of theirs"


def test_only_known_figures_break_a_limit():
    assert POLICY.broken_limits(decide(1.0, 0.03).figures) == [P99]
    assert not POLICY.broken_limits(decide(1.0, 0.02).figures)
    assert not POLICY.broken_limits(decide(1.0, None).figures)
    assert not decide(1.0, None).promote


def test_the_depth_follows_from_the_share_of_the_layers():
    table, norm = ("F32", (100, 10)), ("F32", (10,))
    layers = {f"model.layers.{i}.mlp.weight": ("F32", (10, 50)) for i in range(8)}
    own_head = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": norm, **layers}
    tied = {name: tensor for name, tensor in own_head.items() if name != "lm_head.weight"}
    for shapes in (own_head, tied):  # a head of 1,000 weights, and layers of 500 each
        for share, depth in ((0.61, 4), (0.59, 3), (0.99, 7), (0.25, 0)):
            assert largest_size(shapes, 8, share=share, scales=is_of_layer) == depth
        for share, width in ((0.61, 24), (0.37, 8), (0.99, 48), (0.25, 0)):
            assert largest_size(shapes, 50, share=share, scales=is_of_layer, step=8) == width
