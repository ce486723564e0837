"""Parameters that exist only where others have given values, with each sampler, and what is refused."""

import json
from xml.etree import ElementTree

import jsonschema
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from ringmaster.codec import digest
from ringmaster.errors import BatchFileError
from ringmaster.features.importance.sweep import parameter_importance
from ringmaster.flows.sweep import sweep
from ringmaster.flows.sweep_form import Parameter, Sweep, load_sweep, spec_of
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.figures import SweepFigures
from ringmaster.tasks.sweeping.sampling import ProposedTrial, propose
from ringmaster.tasks.sweeping.space import (
    CategoricalRange,
    Range,
    combinations,
    example,
    findings,
    in_order,
    num_combinations,
    shapes,
)
from tests.unit.sweeping.sweeps import RATES, SEEDS, Swept, spec

NAMES = CategoricalRange(key="optimizer.name", values=("adamw", "sgd", "lion"))
MOMENTUM = Range(key="optimizer.options.momentum", low=0.0, high=0.9, when=(("optimizer.name", ("sgd",)),))
NESTEROV = CategoricalRange(
    key="optimizer.options.nesterov", values=(True, False), when=(("optimizer.options.momentum", (0.9,)),)
)
FLAT = CategoricalRange(key="optimizer.options.momentum", values=(0.0, 0.9), when=(("optimizer.name", ("sgd",)),))
BETAS = CategoricalRange(
    key="optimizer.options.betas", values=((0.9, 0.99), (0.95, 0.98)), when=(("optimizer.name", ("adamw", "lion")),)
)


def test_a_grid_has_each_combination_once():
    space = (NESTEROV, FLAT, NAMES)  # in whatever order they are written
    found = list(combinations(space))
    assert found == [
        {"optimizer.name": "adamw"},
        {"optimizer.name": "sgd", "optimizer.options.momentum": 0.0},
        {"optimizer.name": "sgd", "optimizer.options.momentum": 0.9, "optimizer.options.nesterov": True},
        {"optimizer.name": "sgd", "optimizer.options.momentum": 0.9, "optimizer.options.nesterov": False},
        {"optimizer.name": "lion"},
    ]
    assert num_combinations(space) == 5
    jobs = spec(sampler="grid", space=space, num_trials=None).batch().jobs
    assert [(job.optimizer.name, job.optimizer.options.get("momentum")) for job in jobs] == [
        ("adamw", None), ("sgd", 0.0), ("sgd", 0.9), ("sgd", 0.9), ("lion", None),
    ]  # fmt: skip
    assert num_combinations((NAMES, MOMENTUM)) is None
    assert num_combinations((NAMES, FLAT, SEEDS, BETAS)) == 3 * (2 + 2 + 2)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_parameter_is_drawn_where_it_exists_alone(tmp_path, sampler):
    asked = spec(sampler=sampler, policy="none", space=(NAMES, RATES, MOMENTUM, BETAS), num_trials=24)
    swept = Swept(tmp_path, asked).run()
    values = swept.sweep_scheduler.values
    assert {each["optimizer.name"] for each in values.values()} == set(NAMES.values)
    for name, each in values.items():
        job = swept.bench.executor.job_table.entries[name].job
        is_sgd = each["optimizer.name"] == "sgd"
        assert ("optimizer.options.momentum" in each, "optimizer.options.betas" in each) == (is_sgd, not is_sgd)
        assert ("momentum" in job.optimizer.options, "betas" in job.optimizer.options) == (is_sgd, not is_sgd)
    assert set(swept.statuses.values()) == {JobStatus.DONE}
    again = Swept(tmp_path / "again", asked).run()
    assert again.sweep_scheduler.values == values


def test_tpe_learns_the_values_of_a_parameter_from_the_trials_that_have_it():
    tried = [
        ProposedTrial(values={"optimizer.name": "sgd", MOMENTUM.key: i / 20}, targets=(-abs(i / 20 - 0.8),))
        for i in range(18)
    ]
    tried += [ProposedTrial(values={"optimizer.name": "adamw"}, targets=(-1.0,)) for _ in range(6)]
    space = (CategoricalRange(key="optimizer.name", values=("adamw", "sgd")), MOMENTUM)
    drawn = [propose(space, sampler="tpe", number=24, earlier=tried, seed=seed, num_trials=40) for seed in range(12)]
    momenta = [each[MOMENTUM.key] for each in drawn if each["optimizer.name"] == "sgd"]
    assert len(momenta) >= 6
    assert sum(abs(each - 0.8) < 0.15 for each in momenta) >= len(momenta) / 2


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_spaces_without_conditions_are_drawn_as_optuna_asks_for_all_at_once(sampler):
    """Sweeps that an earlier release began are continued with the trials that it would have proposed."""
    warmup = Range(key="schedule.warmup_steps", low=0, high=9, step=3, is_integer=True)
    clip = Range(key="clip_grad_norm", low=0.5, high=2.0, step=0.5)
    space = (RATES, warmup, SEEDS, clip)
    distributions = {
        RATES.key: FloatDistribution(1e-5, 1e-1, log=True),
        warmup.key: IntDistribution(0, 9, step=3),
        SEEDS.key: CategoricalDistribution(range(3)),
        clip.key: FloatDistribution(0.5, 2.0, step=0.5),
    }
    study = optuna.create_study(direction="maximize")
    earlier = []
    for number in range(6):
        seed = int(digest([7, number, 0]), 16) % 2**32
        is_random = sampler == "random" or number < 3
        tpe = optuna.samplers.TPESampler(n_startup_trials=1, constant_liar=True, seed=seed)
        asked = optuna.create_study(
            sampler=optuna.samplers.RandomSampler(seed=seed) if is_random else tpe, direction="maximize"
        )
        asked.add_trials(study.trials)
        params = asked.ask(distributions).params
        values = propose(space, sampler=sampler, number=number, earlier=earlier, seed=7, num_trials=9)
        assert values[SEEDS.key] == params[SEEDS.key]
        assert values[RATES.key] == pytest.approx(params[RATES.key], rel=1e-5)
        assert (values[warmup.key], values[clip.key]) == (params[warmup.key], params[clip.key])
        params[RATES.key] = values[RATES.key]
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=-float(number % 4)))
        earlier.append(ProposedTrial(values=values, targets=(-float(number % 4),)))


def test_shapes_are_those_with_and_without_a_parameter():
    rank = CategoricalRange(key="adapter.rank", values=(4, 8), when=(("seed", (1,)),))
    space = (CategoricalRange(key="seed", values=(0, 1)), rank, RATES)
    assert [{key: each.get(key) for key in ("adapter.rank",)} for each in shapes(space)] == [
        {"adapter.rank": None}, {"adapter.rank": 4}, {"adapter.rank": 8},
    ]  # fmt: skip
    assert len(shapes((CategoricalRange(key="seed", values=(0, 1)), RATES))) == 1


def test_a_value_is_checked_with_those_that_its_condition_names():
    assert example((NESTEROV, FLAT, NAMES), NESTEROV, True) == {
        "optimizer.options.nesterov": True, "optimizer.options.momentum": 0.9, "optimizer.name": "sgd",
    }  # fmt: skip
    assert example((NAMES, FLAT), NAMES, "sgd") == {"optimizer.name": "sgd", "optimizer.options.momentum": 0.0}
    assert example((NAMES, FLAT), NAMES, "lion") == {"optimizer.name": "lion"}
    assert in_order((NESTEROV, FLAT, NAMES)) == [NAMES, FLAT, NESTEROV]


FILE = """\
name: rates
template: {job: {model: {from_pretrained: gpt2}, data: {source: digits}, num_steps: 16%s}}
num_trials: 3
space:
  optimizer.name: [adamw, sgd]
  optimizer.lr: {low: 1e-4, high: 1e-1}
"""
OPTION = "  optimizer.options.momentum: {low: 0, high: 0.9, when: %s}\n"


def loaded(tmp_path, text):
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    return spec_of(load_sweep(file))


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("{optimizer.nam: sgd}", "7: space.optimizer.options.momentum.when: names optimizer.nam, which the space"),
        ("{optimizer.lr: 0.1}", "names optimizer.lr, which is a range"),
        ("{optimizer.name: [sgd, muon]}", "names the value 'muon', which optimizer.name does not take"),
        ("{optimizer.name: []}", "names no value of optimizer.name"),
        ("{optimizer.options.momentum: 0.1}", "names optimizer.options.momentum, which is a range"),
        ("{optimizer.name: adamw}", "space.optimizer.options.momentum"),  # which AdamW does not have
        ("sgd", "7: space.optimizer.options.momentum.when: "),
    ],
)  # fmt: skip
def test_a_wrong_condition_is_refused(tmp_path, condition, words):
    with pytest.raises(BatchFileError) as caught:
        loaded(tmp_path, FILE % "" + OPTION % condition)
    found = [f"{fault.line}: {fault.place}: {fault.message}" for fault in caught.value.faults]
    assert any(words in each for each in found), found


def test_conditions_in_a_circle_are_refused(tmp_path):
    circle = (
        "  seed: {values: [1, 2], when: {clip_grad_norm: 1}}\n  clip_grad_norm: {values: [1, 2], when: {seed: 1}}\n"
    )
    with pytest.raises(BatchFileError) as caught:
        loaded(tmp_path, FILE % "" + circle)
    found = [(fault.place, fault.message) for fault in caught.value.faults]
    assert ("space.seed.when", "depends on itself, by the conditions of others") in found


def test_a_key_with_a_condition_is_not_in_the_template(tmp_path):
    with pytest.raises(BatchFileError, match="has a condition, and the template has it for all trials"):
        loaded(tmp_path, FILE % ", optimizer: {options: {momentum: 0.5}}" + OPTION % "{optimizer.name: sgd}")


def test_very_many_combinations_of_conditions_are_refused_at_once():
    keys = [CategoricalRange(key=f"k{i}", values=tuple(range(30))) for i in range(3)]
    late = CategoricalRange(key="late", values=(1,), when=tuple((each.key, (0,)) for each in keys))
    found = findings((*keys, late), sampler="random", num_trials=8)
    assert [each.message for each in found] == [
        "has conditions on 27,000 combinations of values, of which no sweep tries more than 1,000"
    ]


def test_a_file_with_conditions(tmp_path):
    found = loaded(tmp_path, FILE % "" + OPTION % "{optimizer.name: sgd}")
    (momentum,) = [each for each in found.space if each.when]
    assert momentum.when == (("optimizer.name", ("sgd",)),)
    for job in found.batch().jobs:
        assert ("momentum" in job.optimizer.options) is (job.optimizer.name == "sgd")


def test_a_trial_is_drawn_through_the_parameters_that_it_has():
    reports = {"a": {4: {"loss": 1.0}}, "b": {4: {"loss": 2.0}}}
    figures = SweepFigures(name="s", objective="loss", reports=reports, done=["a", "b"])
    values = {"a": {NAMES.key: "adamw"}, "b": {NAMES.key: "sgd", MOMENTUM.key: 0.5}}
    svg = ElementTree.fromstring(figures.parallel_coordinates((NAMES, MOMENTUM), values))
    lines = [each for each in svg.iter() if each.tag.endswith("polyline")]
    assert {line[0].text[0]: len(line.get("points").split()) for line in lines} == {"a": 2, "b": 3}


def test_the_importance_of_a_parameter_with_a_condition_is_that_of_optuna():
    space, study = (NAMES, MOMENTUM), optuna.create_study(direction="maximize")
    names = CategoricalDistribution(range(3))
    trials = []
    for i in range(20):
        name = i % 2  # AdamW and SGD
        momentum = {} if not name else {MOMENTUM.key: i / 25}
        score = 1.0 + abs(i / 25 - 0.5) if name else 0.1 * (i % 5)
        trials.append(ProposedTrial(values={NAMES.key: NAMES.values[name], **momentum}, targets=(score,)))
        study.add_trial(
            optuna.trial.create_trial(
                params={NAMES.key: name, **momentum},
                distributions={NAMES.key: names, **({MOMENTUM.key: FloatDistribution(0.0, 0.9)} if name else {})},
                value=score,
            )
        )
    found = parameter_importance(space, trials, metric="loss", step=4)
    expected = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=0.25))
    assert found.ped_anova == pytest.approx(expected, rel=1e-9)
    assert set(found.ped_anova) == {NAMES.key, MOMENTUM.key} and set(found.fanova) == {NAMES.key}


def form_schema():
    return json.loads(json.dumps(parameter_schema(sweep.fn).model_dump()))


def test_the_defaults_of_the_form_in_prefect_are_what_its_own_schema_takes():
    schema = form_schema()
    defaults = {key: each["default"] for key, each in schema["properties"].items() if "default" in each}
    jsonschema.validate(defaults, schema)


def test_the_form_in_prefect_has_conditions_constraints_and_several_objectives():
    """What its fields hold means what a file says."""
    space = [{"key": "optimizer.name", "values": "sgd, adamw"}, {"key": "lr", "values": "1", "when": CONDITION}]
    ranking = {
        "constraints": [{"metric": "latency/p99_s", "at_most": 0.05, "at_least": None}],
        "objectives": [{"metric": "loss", "direction": None}, {"metric": "accuracy", "direction": None}],
    }
    filled = {"space": space, "ranking": ranking}
    jsonschema.validate(filled, form_schema())
    template = {"job": {"model": {"architecture": "LlamaForCausalLM"}, "data": {"source": "python-stdlib"}}}
    form = Sweep.model_validate({"template": template, **filled})
    assert form.space[1].when == {"optimizer.name": ["sgd", "adamw"]}
    assert [str(each) for each in form.ranking_sections()["constraints"]] == ["latency/p99_s <= 0.05"]
    in_file = {"constraints": {"metric": "latency/p99_s", "at_most": 0.05}, "objective": ["loss", "accuracy"]}
    assert Sweep.model_validate({"template": template, "space": space, **in_file}).ranking == form.ranking
    assert Sweep.model_validate({"template": template, **filled, "ranking": None}).ranking_sections() == {}


CONDITION = "optimizer.name: [sgd, adamw]"


@pytest.mark.parametrize("line", ["sgd", "optimizer.name: [sgd", "optimizer.name"])
def test_a_line_of_the_form_that_is_no_condition_is_refused(line):
    with pytest.raises(ValidationError, match="must be keys with their values"):
        Parameter(key="lr", values=["1"], when=line)
    assert Parameter(key="lr", values=["1"], when="").when is None
