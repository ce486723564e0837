"""Decision which candidates of a retraining run are better than their champions: by a policy, or by the plain rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation import recording
from ringmaster.tasks.evaluation.examination import Examined
from ringmaster.tasks.evaluation.suite import Suite
from ringmaster.tasks.evaluation.task import examine_task
from ringmaster.tasks.profiling.preflight import TrialEnvironment
from ringmaster.tasks.promotion.policy import PLAIN_RULE, Decision, decide_by
from ringmaster.tasks.promotion.policy_file import Policy
from ringmaster.techniques import Job
from ringmaster.techniques.scoring.order import TrainingData

CHAMPION = "champion"


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A candidate that is to be compared with its champion, on `data`.

    name: name of the model in the production file.
    metric: the metric of the comparison.
    min_gain: least gain for a promotion, in units of the metric.
    job: the job with the data to compare on.
    data: the JSON form of prepared data; None if it cannot be read.
    is_whole: whether all rows of the data are compared on, as no model is trained on it; else its held-out part.
    trained_on: the data of the candidate, whose rows are left out of other data; None for the candidate's own.
    candidate, candidate_dir: record and files of the candidate.
    champion_dir: files of the champion; None if the candidate is the first one.
    fault: why the data cannot be read.
    """

    name: str
    metric: str
    min_gain: float
    job: Job
    data: Mapping[str, Any] | None
    is_whole: bool = False
    trained_on: TrainingData | None = None
    candidate: ModelRecord
    candidate_dir: Path
    champion_dir: Path | None
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The decision on a candidate.

    decision: the decision; None if the candidate could not be evaluated.
    fault: why it could not be evaluated.
    notes: what people should inspect.
    """

    decision: Decision | None = None
    fault: str = ""
    notes: tuple[str, ...] = ()


def judge(
    rivals: Sequence[Rival], policy: Policy | None, *, ledger: Ledger, environment: TrialEnvironment, device: Device
) -> dict[str, Judged]:
    """Returns the decision on each rival, by its name."""
    return {
        rival.name: Judged(fault=f"the candidate cannot be evaluated: {rival.fault}")
        if rival.data is None
        else _judged(rival, policy, rival.data, ledger=ledger, environment=environment, device=device)
        for rival in rivals
    }


def _judged(
    rival: Rival,
    policy: Policy | None,
    data: Mapping[str, Any],
    *,
    ledger: Ledger,
    environment: TrialEnvironment,
    device: Device,
) -> Judged:
    """Decides by the policy or the plain rule, and records what was found on the run that made the candidate."""
    rule = policy or PLAIN_RULE
    metric = rule.metric or rival.metric
    max_rows = rule.max_rows if policy is None or rival.is_whole else policy.num_rows
    environment = replace(environment, import_paths=tuple(dict.fromkeys([*environment.import_paths, str(rule.folder)])))
    found: list[Examined] = [
        examine_task(
            rival.name,
            model=rival.candidate_dir,
            against=rival.champion_dir,
            job=rival.job,
            data=data,
            suite=suite,
            metrics=[metric, *(name for name in rival.job.evaluation.metrics if name != metric)],
            max_rows=max_rows,
            is_whole=rival.is_whole,
            trained_on=rival.trained_on,
            environment=environment,
            device=device,
            folder=rule.folder,
        )
        for suite in rule.suites or (Suite(name="metrics"),)
    ]
    if policy is None and (faults := [fault for examined in found for fault in examined.faults]):
        return Judged(fault=f"it cannot be compared: {'; '.join(faults)}")
    for examined in found:
        recording.record(ledger, rival.candidate, examined, other=None if rival.champion_dir is None else CHAMPION)
    decision = decide_by(rule, found, metric=metric, is_first=rival.champion_dir is None, min_gain=rival.min_gain)
    return Judged(decision=decision, notes=tuple(_left_out(rival, data, found[0].num_rows, max_rows=max_rows)))


def _left_out(rival: Rival, data: Mapping[str, Any], num_rows: int, *, max_rows: int | None) -> Sequence[str]:
    """Returns a note on the rows that are not compared on, as the candidate is trained on them."""
    every = data["num_held_out"] + (data["num_samples"] if rival.is_whole else 0)
    if max_rows is None and not rival.is_whole:
        max_rows = rival.job.evaluation.max_batches * rival.job.global_batch_size
    if rival.trained_on is None or not num_rows or num_rows >= min(every, max_rows or every):
        return ()
    return (
        f"{every - num_rows} of the {every} rows of compare_on are trained on too, and were left out of the comparison",
    )
