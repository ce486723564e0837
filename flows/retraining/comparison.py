"""Decision which candidates of a retraining run are better than their champions: by a simple rule, or by a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation import recording
from ringmaster.tasks.evaluation.examination import Examined
from ringmaster.tasks.evaluation.slices import ALL
from ringmaster.tasks.evaluation.stage import Evaluated, Evaluation
from ringmaster.tasks.evaluation.suite import Suite
from ringmaster.tasks.evaluation.task import evaluate_task, examine_task
from ringmaster.tasks.profiling.trials import TrialEnvironment
from ringmaster.tasks.promotion.policy import Decision, decide, decide_by
from ringmaster.tasks.promotion.policy_file import Policy
from ringmaster.techniques import Job

CANDIDATE, CHAMPION = "candidate", "champion"


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A candidate that is to be compared with its champion, on the held-out part of `data`.

    name: name of the model in the production file.
    metric: the metric of the comparison.
    min_gain: least gain for a promotion, in units of the metric.
    job: the job with the data to compare on.
    data: the JSON form of prepared data; None if it cannot be read.
    candidate, candidate_dir: record and files of the candidate.
    champion_dir: files of the champion; None if the candidate is the first one.
    fault: why the data cannot be read.
    """

    name: str
    metric: str
    min_gain: float
    job: Job
    data: Mapping[str, Any] | None
    candidate: ModelRecord
    candidate_dir: Path
    champion_dir: Path | None
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The decision on a candidate.

    decision: the decision; None if the candidate could not be evaluated.
    fault: why it could not be evaluated.
    candidate_value, champion_value: values of the metric.
    """

    decision: Decision | None = None
    fault: str = ""
    candidate_value: float | None = None
    champion_value: float | None = None


def judge(
    rivals: Sequence[Rival], policy: Policy | None, *, ledger: Ledger, environment: TrialEnvironment, device: Device
) -> dict[str, Judged]:
    """Returns the decision on each rival, by its name."""
    found = {rival.name: Judged(fault=f"the candidate cannot be evaluated: {rival.fault}") for rival in rivals}
    ready = [rival for rival in rivals if rival.data is not None]
    if policy is None:
        return found | _by_rule(ready, environment=environment, device=device)
    return found | {
        rival.name: _by_policy(rival, policy, ledger=ledger, environment=environment, device=device) for rival in ready
    }


def _by_rule(rivals: Sequence[Rival], *, environment: TrialEnvironment, device: Device) -> dict[str, Judged]:
    """Decides by the simple rule: a candidate is promoted if its gain is at least `min_gain`."""
    evaluations = [
        Evaluation(name=f"{rival.name} {role}", job=rival.job, model_dir=folder, data=rival.data or {})
        for rival in rivals
        for role, folder in ((CANDIDATE, rival.candidate_dir), (CHAMPION, rival.champion_dir))
        if folder is not None
    ]
    evaluated = evaluate_task(evaluations, environment=environment, device=device)
    return {rival.name: _compared(rival, evaluated) for rival in rivals}


def _compared(rival: Rival, evaluated: Evaluated) -> Judged:
    names = {role: f"{rival.name} {role}" for role in (CANDIDATE, CHAMPION)}
    for role, name in names.items():
        if name in evaluated.faults:
            return Judged(fault=f"the {role} cannot be evaluated: {evaluated.faults[name]}")
    values = {role: evaluated.metrics[name][rival.metric] for role, name in names.items() if name in evaluated.metrics}
    champion = values.get(CHAMPION)
    return Judged(
        decision=decide(values[CANDIDATE], champion, metric=rival.metric, min_gain=rival.min_gain),
        candidate_value=values[CANDIDATE],
        champion_value=champion,
    )


def _by_policy(
    rival: Rival, policy: Policy, *, ledger: Ledger, environment: TrialEnvironment, device: Device
) -> Judged:
    """Decides by the policy, and records what was found on the run that made the candidate."""
    metric = policy.metric or rival.metric
    environment = replace(
        environment, import_paths=tuple(dict.fromkeys([*environment.import_paths, str(policy.folder)]))
    )
    found: list[Examined] = [
        examine_task(
            rival.name,
            model=rival.candidate_dir,
            against=rival.champion_dir,
            job=rival.job,
            data=rival.data,
            suite=suite,
            metrics=[metric, *(name for name in rival.job.evaluation.metrics if name != metric)],
            max_rows=policy.max_rows,
            environment=environment,
            device=device,
            folder=policy.folder,
        )
        for suite in policy.suites or (Suite(name="metrics"),)
    ]
    for examined in found:
        recording.record(ledger, rival.candidate, examined, other=None if rival.champion_dir is None else CHAMPION)
    whole = [line for examined in found for line in examined.measured if (line.metric, line.slice) == (metric, ALL)]
    return Judged(
        decision=decide_by(policy, found, metric=metric, is_first=rival.champion_dir is None, min_gain=rival.min_gain),
        candidate_value=whole[0].value if whole else None,
        champion_value=whole[0].other if whole else None,
    )
