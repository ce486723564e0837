"""The evaluation stage: trained models, measured on the held-out data of their jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.trials import TrialEnvironment, slots_of
from ringmaster.techniques import Job
from ringmaster.techniques.interface.values import to_json
from ringmaster.techniques.runtime.processes.events import (
    Event,
    ModelEvaluated,
    ModelFailed,
    RankExited,
    event_from_json,
)
from ringmaster.techniques.runtime.scoring.evaluating import EvaluationOrder
from ringmaster.techniques.runtime.scoring.evaluating_together import TogetherOrder, likeness

EVALUATOR = "ringmaster.techniques.runtime.scoring.evaluating:main"
TOGETHER = "ringmaster.techniques.runtime.scoring.evaluating_together:main"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The model in `model_dir`, to be measured by the metrics of `job` on the held-out part of `data`.

    name: chosen by the caller, unique among the evaluations of one call.
    data: the JSON form of the prepared data, as the job's preflight reported it.
    """

    name: str
    job: Job
    model_dir: Path
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Metrics, and the faults of failed evaluations, by the name of the evaluation."""

    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


def evaluate_models(evaluations: Sequence[Evaluation], *, environment: TrialEnvironment, device: Device) -> Evaluated:
    """Evaluates models on one device.

    Adapters of one base are evaluated together in one process, over one copy of the base. All other models are
    evaluated one after another, each in its own process, so that a crash affects one model only. An evaluation that
    fails in a group is repeated alone. All models of one job are evaluated on the same rows in the same batches, so
    that their metrics are comparable.
    """
    metrics: dict[str, Mapping[str, float]] = {}
    faults: dict[str, str] = {}
    environment.cache_dir.mkdir(parents=True, exist_ok=True)
    orders = {evaluation.name: _order(evaluation, environment, device) for evaluation in evaluations}
    for together in _groups(orders).values():
        if len(together) > 1:
            for event in _events(environment, TOGETHER, to_json(TogetherOrder(orders=together))):
                if isinstance(event, ModelEvaluated):
                    metrics[event.model] = event.metrics
    for name, order in orders.items():
        if name in metrics:
            continue
        for event in _events(environment, EVALUATOR, to_json(order)):
            match event:
                case ModelEvaluated():
                    metrics[name] = event.metrics
                case ModelFailed():
                    faults[name] = event.message
                case RankExited() if name not in metrics and name not in faults:
                    faults[name] = f"its process ended with status {event.status}; see {_log(environment)}"
    return Evaluated(metrics=metrics, faults=faults)


def _order(evaluation: Evaluation, environment: TrialEnvironment, device: Device) -> EvaluationOrder:
    return EvaluationOrder(
        job=evaluation.job,
        model_dir=str(evaluation.model_dir),
        data=evaluation.data,
        slot=slots_of([device])[0],
        cache_dir=str(environment.cache_dir),
        import_paths=environment.import_paths,
    )


def _groups(orders: Mapping[str, EvaluationOrder]) -> dict[str, dict[str, EvaluationOrder]]:
    """Groups the orders that can be evaluated over one base, by their common properties."""
    groups: dict[str, dict[str, EvaluationOrder]] = {}
    for name, order in orders.items():
        if (key := likeness(order)) is not None:
            groups.setdefault(key, {})[name] = order
    return groups


def _events(environment: TrialEnvironment, target: str, argument: Any) -> Iterator[Event]:
    """Yields the events of a worker process, including its exit."""
    channel = environment.server.spawn(target=target, argument=argument, log=_log(environment))
    try:
        while not isinstance(event := event_from_json(channel.receive()), RankExited):
            yield event
        yield event
    finally:
        channel.close()


def _log(environment: TrialEnvironment) -> Path:
    return environment.cache_dir / "evaluation.log"
