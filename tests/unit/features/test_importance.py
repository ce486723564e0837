"""Importance of a sweep's parameters: the numbers of Optuna, from values after one step, of enough trials."""

from xml.etree import ElementTree

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator, PedAnovaImportanceEvaluator, get_param_importances

from ringmaster.codec import to_json
from ringmaster.features.importance.sweep import (
    FIGURE,
    importance_section,
    parameter_importance,
    values_after_one_step,
)
from ringmaster.tasks.sweeping.results import sections
from ringmaster.tasks.sweeping.sampling import ProposedTrial
from tests.unit.sweeping.sweeps import RATES, SEEDS, Swept, spec

SPACE = (RATES, SEEDS)


def rows_of(swept):
    return [{"job": name, "status": status} for name, status in swept.statuses.items()]


def section_of(swept):
    (section,) = [each for each in sections(swept.sweep_scheduler, rows_of(swept)) if each.key == "importance"]
    return section


def importance_by_optuna(values, losses, *, num_best):
    """What a person gets who gives Optuna the values of the parameters and the losses."""
    study = optuna.create_study(direction="minimize")
    distributions = {
        "optimizer.lr": FloatDistribution(1e-5, 1e-1, log=True),
        "seed": CategoricalDistribution([0, 1, 2]),
    }
    for each, value in zip(values, losses, strict=True):
        study.add_trial(optuna.trial.create_trial(params=each, distributions=distributions, value=value))
    share = num_best / len(losses)
    ped_anova = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=share))
    return ped_anova, get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))


@pytest.mark.parametrize(("policy", "step"), [("none", 64), ("halving", 4), ("cut", 4)])
def test_it_is_that_of_optuna_after_the_last_step_that_all_trials_have_reached(tmp_path, policy, step):
    swept = Swept(tmp_path, spec(policy=policy, space=SPACE)).run()
    section = section_of(swept)
    (found,) = section.value
    assert (found["metric"], found["step"], found["num_trials"], found["num_best"]) == ("loss", step, 16, 5)
    values = swept.sweep_scheduler.values
    losses = [swept.sweep_scheduler.reports[name][step]["loss"] for name in values]
    ped_anova, fanova = importance_by_optuna(values.values(), losses, num_best=5)
    assert found["ped_anova"] == pytest.approx(ped_anova, rel=1e-9)
    assert found["fanova"] == pytest.approx(fanova, rel=1e-6)
    assert next(iter(found["ped_anova"])) == "optimizer.lr", "the loss is a function of it alone"
    (line,) = section.lines
    assert line.startswith(f"importance for held-out loss after step {step}, of 16 trials: PED-ANOVA: `optimizer.lr` ")


def test_of_few_trials_nothing_is_said(tmp_path):
    section = section_of(Swept(tmp_path, spec(space=SPACE, num_trials=9)).run())
    assert (section.value, section.lines, section.figures) == ([], [], {})


def test_of_trials_that_are_still_to_end_nothing_is_said(tmp_path):
    swept = Swept(tmp_path, spec(space=SPACE)).run()
    rows = [row | {"status": "running"} if place > 8 else row for place, row in enumerate(rows_of(swept))]
    assert importance_section(swept.sweep_scheduler, rows).value == []


def test_a_trial_that_a_person_changed_is_left_out(tmp_path):
    swept = Swept(tmp_path, spec(policy="none", space=SPACE)).run()
    changed = to_json(swept.jobs[0]) | {"seed": 7}
    swept.bench.journal.write_job(swept.jobs[0].name, settled=changed)
    (found,) = section_of(swept).value
    assert found["num_trials"] == 15


def test_of_one_parameter_and_of_equal_results_nothing_is_said():
    trials = [ProposedTrial(values={"optimizer.lr": 1e-3, "seed": i % 3}, targets=(float(i),)) for i in range(12)]
    assert parameter_importance((RATES,), trials, metric="loss", step=4) is None
    equal = [ProposedTrial(values=each.values, targets=(1.0,)) for each in trials]
    assert parameter_importance(SPACE, equal, metric="loss", step=4) is None
    assert parameter_importance(SPACE, trials, metric="loss", step=4) is not None


def test_of_a_hundred_trials_the_best_tenth_counts():
    trials = [
        ProposedTrial(values={"optimizer.lr": 10.0 ** -(1 + i / 25), "seed": i % 3}, targets=(-float(i),))
        for i in range(100)
    ]
    found = parameter_importance(SPACE, trials, metric="loss", step=4)
    assert (found.num_trials, found.num_best) == (100, 10)


def test_the_step_is_the_last_that_nearly_all_have_reached():
    reports = {f"t{i}": {4: {"loss": 1.0}, 8: {"loss": float(i)}} for i in range(10)}
    reports |= {"best": {4: {"loss": 1.0}, 8: {"loss": 0.5}, 64: {"loss": 0.1}}, "failed": {4: {"loss": 2.0}}, "n": {}}
    step, values = values_after_one_step(reports, "loss")
    assert (step, values) == (8, {**{f"t{i}": float(i) for i in range(10)}, "best": 0.5})
    reports["t0"][8] = {"loss": float("nan")}
    assert "t0" not in values_after_one_step(reports, "loss")[1]
    assert values_after_one_step({}, "loss") == (0, {})


def test_each_parameter_has_two_bars_as_long_as_its_shares(tmp_path):
    section = section_of(Swept(tmp_path, spec(policy="none", space=SPACE)).run())
    svg = ElementTree.fromstring(section.figures[FIGURE])
    rects = [each for each in svg.iter() if each.tag.endswith("rect") and each.get("x") == "300"]
    (found,) = section.value
    for method in ("ped_anova", "fanova"):
        widths = [float(each.get("width")) for each in rects if each.get("class") == method]
        assert widths == pytest.approx([560 * share for share in found[method].values()], abs=0.06)
    texts = [each.text for each in svg.iter() if each.tag.endswith("text")]
    assert {"optimizer.lr", "seed"} <= set(texts)
