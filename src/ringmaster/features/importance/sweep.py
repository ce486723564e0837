"""Importance of the parameters of a sweep, by Optuna, from values of the objective after the same step.

PED-ANOVA (Watanabe et al., 2023, arXiv:2304.10255) compares where the best trials lie with where all of them lie.
fANOVA (Hutter et al., 2014) divides the variance of a random forest that predicts the objective. Trials that were
stopped early have no final value. Both methods therefore take the last step that nearly all trials have reached, such
as the first rung; values of different steps are never compared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.extras import missing_packages
from ringmaster.features.importance.drawing import draw_bars
from ringmaster.tasks.storage.journal import ENDED
from ringmaster.tasks.sweeping.ranking import Ranking
from ringmaster.tasks.sweeping.results import ResultSection
from ringmaster.tasks.sweeping.sampling import ProposedTrial, study_of
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import Parameter

MIN_TRIALS = 10
"""The fewest trials whose values tell the importance of parameters from chance; of many parameters, two of each."""
MIN_BEST = 5
"""The fewest trials that PED-ANOVA should count among the best, according to Optuna."""
BEST_SHARE = 0.1
"""The share of the trials that are the best ones for PED-ANOVA, if these are enough."""
REACHED_SHARE = 0.9
"""The share of the trials that have reached the step after which values are compared; a few may have failed before."""
FIGURE, FURTHER = "sweep/importance.svg", "sweep/importance_{}.svg"


@dataclass(frozen=True, kw_only=True)
class ParameterImportance:
    """The importance of the parameters of a sweep for a metric; of each method, the shares add up to 1.

    step: the step after which the values of the metric were taken.
    num_trials: the number of trials with such a value. num_best: those that are the best ones for PED-ANOVA.
    ped_anova, fanova: the shares by key, in the order of the first.
    """

    metric: str
    step: int
    num_trials: int
    num_best: int
    ped_anova: Mapping[str, float]
    fanova: Mapping[str, float]

    def __str__(self) -> str:
        methods = [
            f"{method}: {', '.join(f'`{key}` {share:.0%}' for key, share in shares.items())}"
            for method, shares in (("PED-ANOVA", self.ped_anova), ("fANOVA", self.fanova))
        ]
        head = f"importance for held-out {self.metric} after step {self.step}, of {self.num_trials} trials: "
        return head + "; ".join(methods)


def values_after_one_step(reports: Mapping[str, Mapping[int, Mapping[str, float]]], metric: str) -> tuple[int, Any]:
    """Returns the last step that nearly all trials have reached, and the finite values of a metric by trial after it.

    reports: the metrics by trial and step. Trials without any are not counted. The step is 0 where there are no trials.
    """
    measured = [steps for steps in reports.values() if steps]
    reached = {step: sum(step in steps for steps in measured) for steps in measured for step in steps}
    last = max((step for step, num in reached.items() if num >= REACHED_SHARE * len(measured)), default=0)
    values = {name: steps[last].get(metric, math.nan) for name, steps in reports.items() if last in steps}
    return last, {name: value for name, value in values.items() if math.isfinite(value)}


def parameter_importance(
    space: Sequence[Parameter],
    trials: Sequence[ProposedTrial],
    *,
    metric: str,
    step: int,
    seed: int = 0,
) -> ParameterImportance | None:
    """Returns the importance of the parameters; None if there are too few trials, or if all of them are equally good.

    trials: with their results after `step`.
    """
    num = len(trials)
    is_enough = len(space) > 1 and num >= max(MIN_TRIALS, 2 * len(space))
    if not is_enough or len({trial.targets for trial in trials}) == 1:
        return None
    evaluators = import_evaluators()
    study = study_of(space, trials)
    best_share = max(BEST_SHARE, MIN_BEST / num)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it also warns of a parameter that few trials have
        ped_anova = evaluators.get_param_importances(
            study, evaluator=evaluators.PedAnovaImportanceEvaluator(target_quantile=best_share)
        )
        fanova = evaluators.get_param_importances(study, evaluator=evaluators.FanovaImportanceEvaluator(seed=seed))
    return ParameterImportance(
        metric=metric,
        step=step,
        num_trials=num,
        num_best=math.ceil(best_share * num),
        ped_anova=ped_anova,
        fanova={key: fanova[key] for key in ped_anova if key in fanova},
    )


def import_evaluators() -> Any:
    """Returns Optuna's module of importance, which imports scikit-learn and pandas for seconds."""
    import optuna.importance

    return optuna.importance


def prepare(num_trials: int) -> None:
    """Imports what the section needs, if it is installed and there are trials enough, while the last ones train."""
    if num_trials >= MIN_TRIALS and not missing_packages("sweep"):
        import_evaluators()


def importance_section(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> ResultSection:
    """Returns the importance of a sweep's parameters, if enough of its trials have ended.

    A trial whose job a person has changed is left out, and so is a job that a person has added.
    """
    spec = sweep_scheduler.spec
    ended = {row["job"] for row in rows if row["status"] in ENDED}
    proposed, trained = sweep_scheduler.values, sweep_scheduler.trial_values()
    names = [name for name in spec.trials if name in ended and proposed.get(name) == trained.get(name)]
    reports = {name: sweep_scheduler.reports.get(name, {}) for name in names}
    result = []
    for metric in spec.ranking.objectives if not missing_packages("sweep") else ():  # which a grid does not need
        step, values = values_after_one_step(reports, metric)
        targets = {name: Ranking(metric=metric).targets({metric: value}) for name, value in values.items()}
        trials = [ProposedTrial(values=proposed[name], targets=each) for name, each in targets.items()]
        importance = parameter_importance(spec.space, trials, metric=metric, step=step, seed=spec.seed)
        result += [importance] if importance is not None else []
    title = f"{spec.name}: importance of parameters"
    return ResultSection(
        key="importance",
        value=[{**vars(each), "ped_anova": dict(each.ped_anova), "fanova": dict(each.fanova)} for each in result],
        lines=[str(each) for each in result],
        figures={FIGURE if not i else FURTHER.format(i + 1): draw_bars(title, each) for i, each in enumerate(result)},
    )


SECTIONS = (importance_section,)
PREPARATIONS = (prepare,)
