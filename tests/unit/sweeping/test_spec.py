"""Valid settings of a sweep, and errors that report all faults at once."""

from dataclasses import replace

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.profiling.search import num_evaluations
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy
from ringmaster.tasks.sweeping.sampling import ProposedTrial, propose
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import CategoricalRange, Range, changes_shape, combinations, num_combinations
from ringmaster.techniques.metric import metric_named, metric_names
from tests.unit.sweeping.sweeps import RATES, SEEDS, TEMPLATE, spec


def told(found):
    with pytest.raises(BatchFileError) as raised:
        found.batch()
    return [f"{fault.place}: {fault.message}" for fault in raised.value.faults]


def test_the_same_seed_draws_the_same_trials_and_another_one_others():
    first, again, other = (spec(space=(RATES, SEEDS), seed=seed).known() for seed in (0, 0, 1))
    assert first == again != other
    assert len({str(values) for values in first}) == 16
    assert all(1e-5 <= values["optimizer.lr"] <= 1e-1 for values in first)


def test_a_logarithmic_range_is_drawn_evenly_over_its_decades():
    rates = [v["optimizer.lr"] for v in spec(num_trials=200, seed=3).known()]
    decades = [sum(10.0**-k <= rate < 10.0 ** (1 - k) for rate in rates) for k in range(2, 6)]
    assert all(30 <= count <= 70 for count in decades)


def test_whole_numbers_and_steps():
    warmup = Range(key="schedule.warmup_steps", low=0, high=10, step=5, is_integer=True)
    assert warmup.listed() == (0, 5, 10)
    assert Range(key="x", low=0.1, high=0.5, step=0.1).listed() == (0.1, 0.2, 0.3, 0.4, 0.5)
    drawn = {v["schedule.warmup_steps"] for v in spec(space=(RATES, warmup)).known()}
    assert drawn <= {0, 5, 10} and all(isinstance(value, int) for value in drawn)


def test_a_grid_is_every_combination():
    grid = spec(
        sampler="grid", space=(CategoricalRange(key="optimizer.lr", values=(1e-3, 1e-2)), SEEDS), num_trials=None
    )
    assert [(j.optimizer.lr, j.seed) for j in grid.batch().jobs] == [(r, s) for r in (1e-3, 1e-2) for s in (0, 1, 2)]
    assert num_combinations(grid.space) == len(list(combinations(grid.space))) == 6


@pytest.mark.parametrize("evaluation", [{"max_batches": 4}, {"max_rows": 64}, {}])
def test_trials_with_other_batch_sizes_are_judged_on_the_same_rows(evaluation):
    sizes = CategoricalRange(key="global_batch_size", values=(4, 16, 32))
    template = {**TEMPLATE, "evaluation": evaluation}
    jobs = spec(sampler="grid", space=(sizes,), num_trials=None, template=template).batch().jobs
    assert [job.global_batch_size for job in jobs] == [4, 16, 32]
    assert [job.max_evaluated_rows for job in jobs] == [64 if evaluation else 1024] * 3


def test_proposals_follow_from_what_they_know():
    earlier = [
        ProposedTrial(values={"optimizer.lr": 10.0 ** -(1 + i / 4)}, targets=(-abs(i - 8.0),)) for i in range(16)
    ]
    draw = {"sampler": "tpe", "number": 16, "seed": 1, "num_trials": 20}
    rates = [propose([RATES], earlier=earlier, **{**draw, "seed": s})["optimizer.lr"] for s in range(10)]
    assert propose([RATES], earlier=earlier, **draw) == propose([RATES], earlier=earlier, **draw)
    assert sum(3e-4 < rate < 3e-3 for rate in rates) >= 6, "the best was at 1e-3"


@pytest.mark.parametrize("step", [0.1, 0.142857142857, 1 / 3, 1 / 30_000])
def test_tpe_goes_on_from_what_it_drew_in_steps_of_any_number_of_digits(step):
    parameter = Range(key="clip_grad_norm", low=0.0, high=1.0, step=step)
    earlier = []
    for number in range(3):
        values = propose([parameter], sampler="tpe", number=number, earlier=earlier, seed=0, num_trials=6)
        earlier.append(ProposedTrial(values=values, targets=(float(number),)))
    drawn = [each.values["clip_grad_norm"] for each in earlier]
    assert set(drawn) <= set(parameter.listed()), "what a grid would list"


def test_a_step_is_kept_however_small_beside_the_value():
    parameter = Range(key="clip_grad_norm", low=1000.0, high=1000.004, step=0.001)
    found = spec(sampler="random", space=(parameter,), num_trials=5).known()
    assert {values["clip_grad_norm"] for values in found} == set(parameter.listed())


@pytest.mark.parametrize("num_trials", [1, 2, 3])
def test_tpe_has_no_more_trials_than_were_asked_for(num_trials):
    found = spec(sampler="tpe", num_trials=num_trials)
    assert len(found.batch().jobs) == len(found.provisional()) == num_trials


def test_what_changes_the_shape():
    keys = ("optimizer.lr", "seed", "schedule.name", "clip_grad_norm", "global_batch_size", "optimizer.name", "model.x")
    assert [changes_shape(CategoricalRange(key=key, values=(1,))) for key in keys] == [False] * 4 + [True] * 3


def test_options_of_losses_change_no_shape_unless_a_reference_is_saved():
    beta = [CategoricalRange(key="loss.beta", values=values) for values in ((0.1, 0.5), (0.0, 0.5))]
    assert [changes_shape(each) for each in beta] == [False, True]
    keys = ("loss.temperature", "loss.label_smoothing", "loss.name", "loss.num_generations")
    assert [changes_shape(Range(key=key, low=1, high=2)) for key in keys] == [False, False, True, True]


def test_options_of_a_loss_may_be_varied_where_it_is_given_by_name():
    template = {"model": {"architecture": "LlamaForCausalLM"}, "data": {"path": "*.txt", "seq_len": 8}}
    template |= {"num_steps": 64, "loss": "dpo"}
    (job, *_) = (
        spec(template=template, space=(CategoricalRange(key="loss.beta", values=(0.1, 0.5)),), num_trials=2)
        .batch()
        .jobs
    )
    assert job.loss == "dpo" and job.loss_options["beta"] in (0.1, 0.5)


@pytest.mark.parametrize("name", metric_names())
def test_trials_are_compared_in_the_direction_of_any_metric(name):
    ranking = spec(objective=name).ranking
    low, high = ranking.score({name: 0.2}), ranking.score({name: 0.3})
    assert (high > low) is metric_named(name).higher_is_better
    assert ranking.score({name: float("nan")}) < low


def test_trials_are_evaluated_at_their_rungs():
    (job, *_) = spec().batch().jobs
    assert (job.evaluation.every_steps, job.evaluation.at_steps) == (None, (4, 16))
    assert job.evaluation.metrics == ("loss",)
    assert num_evaluations(job) == 3
    finer = spec(template={**spec().template, "evaluation": {"every_steps": 3, "metrics": ["accuracy"]}})
    (job, *_) = finer.batch().jobs
    assert (job.evaluation.every_steps, job.evaluation.at_steps) == (3, (4, 16))
    assert job.evaluation.metrics == ("loss", "accuracy")
    assert num_evaluations(job, steps_done=3) == 63 // 3 - 1 + 2 + 1
    (job, *_) = spec(stopping=StoppingPolicy(policy="median")).batch().jobs
    assert (job.evaluation.every_steps, job.evaluation.at_steps) == (7, ())


def test_every_fault_is_told_at_once():
    found = spec(
        space=(
            Range(key="optimizer.lr", low=-1e-3, high=1e-1, is_log=True),
            Range(key="seed", low=3, high=1, is_integer=True),
            CategoricalRange(key="modle.config", values=(1,)),
        ),
        stopping=StoppingPolicy(policy="asha", min_steps=64),
    )
    assert told(found) == [
        "space.optimizer.lr.low: must be greater than 0, got -0.001",
        "space.modle.config: is an unknown key",
        "space.optimizer.lr.low: a logarithmic range cannot go to or through 0, got -0.001",
        "space.seed.high: must be greater than low, got 3 and 1",
        "early_stopping.min_steps: must be less than the 64 steps of a trial, got 64",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampler": "grid"}, "optimizer.lr: is a range without a step"),
        ({"sampler": "grid", "space": (SEEDS,), "num_trials": 2}, "has 3 combinations, more than the 2 trials"),
        ({"space": (SEEDS,)}, "num_trials: is 16, and the space has only 3 combinations"),
        ({"space": (RATES, RATES)}, "space.optimizer.lr: is there twice"),
        (
            {"space": (CategoricalRange(key="model.architecture.x", values=(1, 2)),)},
            "space.model.architecture.x: lies inside model.architecture, which has no keys, got",
        ),
        ({"space": (CategoricalRange(key="seed", values=(1, 1)),)}, "seed.values[1]: 1 occurs twice"),
        ({"space": (CategoricalRange(key="num_steps", values=(32, 64)), RATES)}, "num_steps: cannot be varied"),
        ({"space": (RATES, CategoricalRange(key="name", values=("a", "b")))}, "space.name: cannot be varied"),
        (
            {"sampler": "tpe", "space": (Range(key="global_batch_size", low=8, high=64, is_integer=True),)},
            "global_batch_size: changes a trial's speed or size",
        ),
    ],
)
def test_a_fault(changes, words):
    if "template" in changes:
        plain = {key: value for key, value in spec().template.items() if key != "num_steps"}
        changes = {"template": {**plain, **changes["template"]}}
    assert any(words in line for line in told(spec(**changes)))


def test_epochs_are_judged_once_they_are_steps():
    template = {key: value for key, value in spec().template.items() if key != "num_steps"} | {"num_epochs": 2}
    found = spec(template=template)
    (job, *_) = found.batch().jobs
    assert (job.num_epochs, job.evaluation.at_steps) == (2, ())
    (with_rungs,) = SweepScheduler(found).with_rungs([replace(job, num_steps=64, num_epochs=None)])
    assert with_rungs.evaluation.at_steps == (4, 16)
