"""The evaluation stage: models that were trained before, measured on the held-out data of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.trials import Site, slots_of
from ringmaster.techniques import Job
from ringmaster.techniques.engine.evaluating import EvaluationOrder
from ringmaster.techniques.engine.evaluating_together import TogetherOrder, likeness
from ringmaster.techniques.values import to_json

EVALUATOR = "ringmaster.techniques.engine.evaluating:main"
TOGETHER = "ringmaster.techniques.engine.evaluating_together:main"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The model in `model_dir`, to be measured by the metrics of `job` on the held-out part of `data`.

    name: for the caller, unique among those that are evaluated together.
    data: the JSON form of the prepared data, as the job's survey told it.
    """

    name: str
    job: Job
    model_dir: Path
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Metrics, and why there are none, by the name of the evaluation."""

    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


def evaluate_models(evaluations: Sequence[Evaluation], *, site: Site, device: Device) -> Evaluated:
    """Evaluates models on one device: adapters of one base together in one process, over one copy of that base; others
    one after another, each in a process of its own: a crash takes one alone. What went wrong together is done alone.

    All models of one job are read with the same rows in the same batches, so that their metrics can be compared.
    """
    metrics: dict[str, Mapping[str, float]] = {}
    faults: dict[str, str] = {}
    site.cache_dir.mkdir(parents=True, exist_ok=True)
    orders = {evaluation.name: _order(evaluation, site, device) for evaluation in evaluations}
    for together in _groups(orders).values():
        if len(together) > 1:
            for event in _events(site, TOGETHER, to_json(TogetherOrder(orders=together))):
                if event["event"] == "metrics":
                    metrics[event["name"]] = event["metrics"]
    for name, order in orders.items():
        if name in metrics:
            continue
        for event in _events(site, EVALUATOR, to_json(order)):
            if event["event"] == "metrics":
                metrics[name] = event["metrics"]
            elif event["event"] == "fault":
                faults[name] = event["message"]
            elif event["event"] == "exit" and name not in metrics and name not in faults:
                faults[name] = f"its process ended with status {event['status']}; see {_log(site)}"
    return Evaluated(metrics=metrics, faults=faults)


def _order(evaluation: Evaluation, site: Site, device: Device) -> EvaluationOrder:
    return EvaluationOrder(
        job=evaluation.job,
        model_dir=str(evaluation.model_dir),
        data=evaluation.data,
        slot=slots_of([device])[0],
        cache_dir=str(site.cache_dir),
        import_paths=site.import_paths,
    )


def _groups(orders: Mapping[str, EvaluationOrder]) -> dict[str, dict[str, EvaluationOrder]]:
    """Those that can be evaluated over one base, by what they have in common."""
    groups: dict[str, dict[str, EvaluationOrder]] = {}
    for name, order in orders.items():
        if (key := likeness(order)) is not None:
            groups.setdefault(key, {})[name] = order
    return groups


def _events(site: Site, target: str, argument: Any) -> Iterator[Mapping[str, Any]]:
    """What a worker process says, its end included."""
    channel = site.server.spawn(target=target, argument=argument, log=_log(site))
    try:
        while (event := channel.receive())["event"] != "exit":
            yield event
        yield event
    finally:
        channel.close()


def _log(site: Site) -> Path:
    return site.cache_dir / "evaluation.log"
