"""The choice of a smaller child where a candidate breaks a limit of its policy: the cheapest that keeps every rule."""

import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.errors import InputError
from ringmaster.extras import missing_extra
from ringmaster.files import kept_value
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.lineage.recorded_training import RecordedTraining
from ringmaster.model_lineage.graph import Graph
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.retraining.policy import PromotionDecision, PromotionPolicy
from ringmaster.techniques.job import DISTILLED, PRUNED, QUANTIZED, STRUCTURED, AdaptationSpec, Job
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.metric import metric_named, ranked
from ringmaster.techniques.metrics.latency import FAMILY
from ringmaster.techniques.models.architectures import LAYERS, OF_LOADING, WIDTHS, kept_layers
from ringmaster.techniques.models.model_folders import CONFIG, quantization_of, read_json, tensor_shapes, weight_bytes


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


SMALLER = (DISTILLED, PRUNED, QUANTIZED)
"""The kinds of models that take the place of a larger one."""


def smaller_children(snapshot: Snapshot, id: str) -> list[LineageNode]:
    """Returns the models that only distillation, pruning and quantization separate from a model, the nearest first."""
    edges = ((n.id, [p for p in n.record.parents if n.record.relation_to(p) in SMALLER]) for n in snapshot.models)
    return [snapshot.nodes[each] for each in Graph(edges).descendants(id) if each in snapshot.nodes]


def cheapest_child(
    children: Sequence[SmallerChild], decisions: Iterator[PromotionDecision]
) -> tuple[SmallerChild | None, dict[str, PromotionDecision]]:
    """Returns the child with the fewest bytes of weights that its policy promotes, and the decisions on those tried.

    Of children of equal size, the best one by the policy's metric is chosen. Larger children are not tried, so the
    choice is that of all decisions at no more than their cost.

    children: the smallest first. decisions: the policy's, one per child in the same order, each computed when it is
    requested for. The decisions that are returned are by the child's model id.
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


MARGIN = 0.9
"""The share of a limit that a smaller model is predicted to take at most, as a measured p99 varies."""
WIDTH_STEP = 8
"""What a width is a multiple of, as kernels divide it."""
KEPT = (
    *("name", "model", "data", "loss", "loss_options", "precision", "optimizer", "schedule", "clip_grad_norm"),
    *("global_batch_size", "num_steps", "num_epochs", "evaluation", "seed"),
)
"""The fields of a model's job that its children's jobs share. They start again, and any technique may train them."""

Judge = Callable[[LineageHome, Iterable[LineageNode]], Generator[PromotionDecision]]
"""Yields the policy's decision on each of some models, lazily."""


def _keeping_child(
    home: LineageHome, node: LineageNode, judge: Judge, tried: dict[str, str]
) -> tuple[LineageNode, PromotionDecision] | None:
    """Returns the cheapest of a model's smaller children that keeps every rule, and the decision on it.

    tried: a sentence on each child that was tried before, by its id; gets those on the others.
    """
    nodes = [each for each in smaller_children(home.snapshot, node.id) if each.id not in tried]
    sized = (SmallerChild(node=each, weight_bytes=weight_bytes(home.model_dir(each))) for each in nodes)
    children = sorted(sized, key=lambda child: child.weight_bytes)
    with closing(judge(home, [child.node for child in children])) as decisions:
        chosen, made = cheapest_child(children, decisions)
    tried |= {child.node.id: child.sentence(made[child.node.id]) for child in children if child.node.id in made}
    return None if chosen is None else (chosen.node, made[chosen.node.id])


def replacement_child(
    home: LineageHome,
    node: LineageNode,
    policy: PromotionPolicy,
    decision: PromotionDecision,
    *,
    judge: Judge,
    notice: Callable[[str], None],
    train: Callable[[Batch], object] | None,
    remedy: str,
) -> tuple[LineageNode, PromotionDecision]:
    """Returns the smaller child of a model that is promoted in its place, as a version of its name, and the decision.

    Returns the model and the decision on it, with what was tried, where no child keeps every rule.

    train: trains a batch of such children where none keeps every rule, or continues with it; None for no training.
        Where it raises, the same batch is continued the next time, before any child is tried.
    remedy: how to have some.
    """
    tried: dict[str, str] = {}
    # A latency that is measured again plans other sizes: what was begun is kept for the policy's limits until it ends.
    file = home.folder / "batches" / batch_name(node) / f"planned-{digest(policy.limits)}.json"
    is_begun, chosen = train is not None and file.exists(), None
    if not is_begun:
        notice(f"{node.label}: {decision.why}. Its smaller children are tried")
        chosen = _keeping_child(home, node, judge, tried)
    if chosen is None and train is not None:
        plan = kept_value(dict, file, lambda: plan_children(home, node, policy, decision.figures).to_json())
        batch = Batch.from_json(plan)
        home = LineageHome(folder=home.folder, is_fresh=True)
        made = {child.record.registered_name for child in smaller_children(home.snapshot, node.id)}
        if not made.issuperset(f"{batch.name}.{job.name}" for job in batch.jobs):
            why = "what was begun for it is continued" if is_begun else "none keeps every rule"
            notice(f"{node.label}: {why}; training {', '.join(job.name for job in batch.jobs)}")
            train(batch)
        file.unlink(missing_ok=True)
        home = LineageHome(folder=home.folder, is_fresh=True)
        chosen = _keeping_child(home, node, judge, tried)
    for sentence in tried.values():
        notice(sentence)
    if chosen is None:
        none = f"there are no models that were distilled, pruned or quantized from it. To fix: {remedy}"
        return node, replace(decision, reasons=(*decision.reasons, *(tried.values() or (none,))))
    child, of_child = chosen
    text = f"Promoted in place of {node.label}, which breaks a limit of the policy {policy.name}."
    record = home.ledger.add_version(child.record, node.record.registered_name, text=text)
    broken = f"{node.label} breaks a limit: {decision.why}"
    cheapest = f"{child.label} is the cheapest of those tried that keeps every rule"
    reasons = (*of_child.reasons, broken, *tried.values(), cheapest)
    return replace(child, record=record), replace(of_child, reasons=reasons)


def batch_name(node: LineageNode) -> str:
    """Returns the name of the batch that trains smaller children of a model."""
    return f"smaller-{node.label.replace('/', '-')}"


def plan_children(home: LineageHome, node: LineageNode, policy: PromotionPolicy, figures: Mapping[str, float]) -> Batch:
    """Returns the batch that trains smaller children of a model.

    figures: the model's values of the metrics that the policy limits.
    Raises InputError, with every reason, where no smaller model can be expected to keep the limits.
    """
    broken = policy.broken_limits(figures)
    job, folder = RecordedTraining.of(home, node).job, home.model_dir(node)
    faults = [
        f"{name} is beyond its limit, and a smaller model would not mend it. To fix: train it otherwise"
        for name in broken
        if not name.startswith(f"{FAMILY}/")
    ]
    if job.adapter is not None:
        faults.append(f"{node.label} is an adapter. To fix: merge it into its base by a job, and promote the result")
    if quantization_of(folder) is not None:
        faults.append(f"{node.label} is quantized. To fix: name the model that it was quantized from")
    if faults:
        raise InputError([f"{node.label} is not made smaller: {fault}" for fault in faults])
    share = MARGIN * min(_share_allowed(name, figures[name], policy.limits[name]) for name in broken)
    uri = f"models:/{node.label}"
    plain = Job(**{name: getattr(job, name) for name in KEPT})
    pruned = [_pruned(plain, folder, *shape, base=uri) for shape in _shapes(job, folder, share=share)]
    students = [_recovered(each, teacher=uri, teacher_model=job.model, of=plain) for each in pruned]
    jobs, lacking = [*pruned, *students], missing_extra("torchao", feature="quantization")
    if lacking is None:
        jobs += [_quantized(plain, of) for of in students]
        jobs.append(_quantized(replace(plain, base=uri), None))
    if not jobs:
        raise InputError([f"{node.label} is not made smaller: {lacking}"])
    return Batch(
        name=batch_name(node),
        jobs=tuple(jobs),
        folder=Path.cwd(),
        text=json.dumps({"smaller": node.label}),
    )


def _share_allowed(metric: str, value: float, limits: tuple[float, float]) -> float:
    """Returns the share of its present time in which a model must answer to keep a limit."""
    return value / limits[0] if metric_named(metric).higher_is_better else limits[1] / value


def _pruned(job: Job, folder: Path, key: str, size: int, *, base: str) -> Job:
    """Returns the job that takes layers, or channels of each, out of a model, whose config then has `size` as `key`."""
    config = read_json(folder / CONFIG)
    own: dict[str, Any] = dict(job.model.config)
    if job.model.from_pretrained is not None:
        own = {name: value for name, value in config.items() if name not in OF_LOADING}
    if key in LAYERS:  # lists of a value for each layer, such as the kinds of attention
        kept = kept_layers(config[key], size)
        is_listed = {name for name, each in own.items() if isinstance(each, list) and len(each) == config[key]}
        own |= {name: [own[name][i] for i in kept] for name in is_listed}
    model = ModelSpec(architecture=config["architectures"][0], config={**own, key: size}, attention=job.model.attention)
    how = AdaptationSpec(kind=PRUNED, method=STRUCTURED)
    name = f"{job.name}-{size}-{'layers' if key in LAYERS else 'wide'}-pruned"
    return replace(job, name=name, model=model, base=base, num_steps=0, num_epochs=None).with_features(how)


def _recovered(pruned: Job, *, teacher: str, teacher_model: ModelSpec, of: Job) -> Job:
    """Returns the job that trains what is left of a model, taught by the whole model, for as many steps as that had.

    Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (arXiv:2407.14679).
    """
    how = AdaptationSpec(kind=DISTILLED, teacher=teacher, teacher_model=teacher_model)
    name = pruned.name.removesuffix("-pruned")
    return replace(of, name=name, model=pruned.model, base=pruned.name).with_features(how)


def _quantized(job: Job, of: Job | None) -> Job:
    """Returns the job that quantizes the model of another job, or the base of `job`."""
    base, model = (job.base, job.model) if of is None else (of.name, of.model)
    how = AdaptationSpec(kind=QUANTIZED, method="dynamic-int8")
    name = f"{job.name if of is None else of.name}-int8"
    return replace(job, name=name, base=base, model=model, num_steps=0, num_epochs=None).with_features(how)


def _shapes(job: Job, folder: Path, *, share: float) -> list[tuple[str, int]]:
    """Returns the keys and values of configs with which smaller models are predicted to take a share of the time.

    First the most layers with which one is, and half of these, in case that fewer are needed; then the largest width of
    the layers' feed-forward part. There are none for a model that cannot be distilled, and none of a kind where other
    parts of the model take too long.
    """
    config, shapes = read_json(folder / CONFIG), tensor_shapes(folder)
    if job.loss is not None or not job.trains:
        return []
    result: list[tuple[str, int]] = []
    layers, width = (next((key for key in keys if isinstance(config.get(key), int)), "") for keys in (LAYERS, WIDTHS))
    if layers:
        most = largest_size(shapes, config[layers], share=share, scales=is_of_layer)
        result += [(layers, depth) for depth in dict.fromkeys((most, most // 2)) if depth > 0]
    size = config[width] if width else 0
    is_joined = any(2 * size in shape for name, (_, shape) in shapes.items() if is_of_layer(name, shape))
    if size and not is_joined and size not in (config.get("hidden_size"), config.get("d_model")):

        def is_between(name: str, shape: Sequence[int]) -> bool:
            return is_of_layer(name, shape) and size in shape

        widest = largest_size(shapes, size, share=share, scales=is_between, step=WIDTH_STEP)
        result += [(width, widest)] if widest > 0 else []
    return result


def is_of_layer(name: str, shape: Sequence[int]) -> bool:
    """Returns whether a tensor is of one of several equal layers, by its name."""
    return any(part.isdecimal() for part in name.split("."))


def largest_size(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    size: int,
    *,
    share: float,
    scales: Callable[[str, Sequence[int]], bool],
    step: int = 1,
) -> int:
    """Returns the largest number of layers, or width, with which a model is predicted to take a share of its time.

    It is a multiple of `step` below the present `size`; 0 for none. A forward pass takes the time of its matrices, with
    m weights in those that scale with the size, and r in the rest (the head among them):

        time(k) / time(size) = (r + m k / size) / (r + m)

    shapes: the dtype and shape of each tensor, by name. Tables of embeddings take no time, except as a tied head.
    """
    matrices = {name: shape for name, (_, shape) in shapes.items() if len(shape) > 1}
    has_head = any("lm_head" in name for name in matrices)
    timed = {n: shape for n, shape in matrices.items() if not (has_head and ("embed" in n or "wte" in n))}
    whole = sum(map(math.prod, timed.values()))
    scaled = sum(math.prod(shape) for name, shape in timed.items() if scales(name, shape))
    sizes = range((size - 1) // step * step, 0, -step)
    return next((k for k in sizes if whole - scaled + scaled * k / size <= share * whole), 0)
