"""The evaluation stage: models that were trained before, measured on the held-out data of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.cluster import Device
from tasks.profiling.trials import Site, slots_of
from techniques import Job
from techniques.engine.evaluating import EvaluationOrder
from techniques.values import to_json

EVALUATOR = "techniques.engine.evaluating:main"


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
    """Evaluates one model after another on one device, each in a process of its own: a crash takes one alone.

    All models of one job are read with the same rows in the same batches, so that their metrics can be compared.
    """
    metrics: dict[str, Mapping[str, float]] = {}
    faults: dict[str, str] = {}
    site.cache_dir.mkdir(parents=True, exist_ok=True)
    for evaluation in evaluations:
        order = EvaluationOrder(
            job=evaluation.job,
            model_dir=str(evaluation.model_dir),
            data=evaluation.data,
            slot=slots_of([device])[0],
            cache_dir=str(site.cache_dir),
            import_paths=site.import_paths,
        )
        log = site.cache_dir / "evaluation.log"
        channel = site.server.spawn(target=EVALUATOR, argument=to_json(order), log=log)
        while (event := channel.receive())["event"] != "exit":
            if event["event"] == "metrics":
                metrics[evaluation.name] = event["metrics"]
            elif event["event"] == "fault":
                faults[evaluation.name] = event["message"]
        channel.close()
        if evaluation.name not in metrics and evaluation.name not in faults:
            faults[evaluation.name] = f"its process ended with status {event['status']}; see {log}"
    return Evaluated(metrics=metrics, faults=faults)
