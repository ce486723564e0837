"""The kernels of preemptive planning, compared with the quantities that they approximate."""

import numpy as np
import pytest

from benchmarks.planning.families import draw
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, preemptive, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.kernels.configurations import INFEASIBLE, config_lp
from ringmaster.tasks.planning.kernels.sequences import in_order, least, of_group, polish, settle
from ringmaster.tasks.planning.node_groups import NodeGroups, Tables, whole_jobs
from ringmaster.tasks.planning.preemptive import _rules, plan_preemptive
from ringmaster.tasks.planning.work import WorkBudget


@pytest.fixture(scope="module")
def node():
    """One node of eight devices with seven jobs, in the kernels' form."""
    problem = draw("paper-txt-7x8", seed=2)
    bound = preemptive_bound(problem)
    tables = Tables.of(problem, bound)
    groups = NodeGroups.of(tables, [[0]])
    parts = whole_jobs(tables, groups)
    return tables, groups.layout(0), of_group(parts, np.arange(7, dtype=np.int32), 0, 1)


def test_one_node_has_a_configuration_lp_that_meets_the_pattern_bound(node):
    tables, layout, members = node
    time, configs, times, prices = config_lp(
        members.job, members.share, members.within, tables.options_of(0), layout, np.zeros(1)
    )
    assert time == pytest.approx(times.sum())
    assert 1 - 1e-6 <= time <= 1.01
    assert prices.sum() == pytest.approx(time, rel=1e-6)
    for i in range(7):
        work = sum(t * tables.options.rate[c[i]] for c, t in zip(configs, times, strict=True) if c[i] >= 0)
        assert work >= 1 - 1e-6


def test_prices_of_one_sequence_bound_the_score_of_others(node):
    tables, layout, members = node
    options, rules, steps = tables.options_of(0), _rules(tables), np.zeros(1)
    _, configs, _, prices = config_lp(members.job, members.share, members.within, options, layout, steps)
    begin = in_order(configs, options.rate, prices, members)
    _, _, sequence, _ = polish(begin, members, options, layout, rules, 500, 0, steps)
    worth, other = np.zeros(7), np.zeros(7)
    starts, times = np.zeros(sequence.shape, np.bool_), np.zeros(len(sequence))
    num = len(sequence)
    settle(sequence.copy(), num, members, options, layout, rules, starts, times, worth, worth.copy(), INFEASIBLE, steps)
    assert worth.sum() > 0
    rng = np.random.default_rng(0)
    for _ in range(20):
        shuffled = sequence[rng.permutation(num)]
        score, _, _ = settle(
            shuffled.copy(), num, members, options, layout, rules, starts, times, other, np.zeros(7), INFEASIBLE, steps
        )
        first_starts = np.array(
            [
                [o >= 0 and (k == 0 or shuffled[k - 1, i] != o) for i, o in enumerate(row)]
                for k, row in enumerate(shuffled)
            ]
        )
        assert least(shuffled, num, first_starts, members, options.rate, rules, worth) <= score + 1e-9


@pytest.mark.parametrize("work", [WorkBudget(limit_s=0.0), WorkBudget(ends_at_s=-1.0)])
def test_a_spent_budget_still_gives_a_plan(work):
    problem = draw("paper-txt-12x16", seed=0)
    segments = plan_preemptive(problem, preemptive_bound(problem), work=work)
    assert {segment.job for segment in segments} == {job.id for job in problem.jobs}


def test_a_configuration_that_cannot_be_placed_is_not_planned(monkeypatch):
    """4 + 2 + 2 and 3 + 3 + 2 fill two nodes of 8, but placing the largest gangs first puts 4 and 3 on one node."""
    jobs = tuple(PlanningJob(f"j{i}", (Option("t", size, 1000.0),)) for i, size in enumerate((4, 3, 3, 2, 2, 2)))
    problem = Problem("tight", (PlanningNode("n0", 8), PlanningNode("n1", 8)), jobs, switch_cost_s=1.0)
    monkeypatch.setattr(preemptive, "groupings_of", lambda _: [[[0, 1]]])
    segments = plan_preemptive(problem, preemptive_bound(problem))
    assert segments is None or verify(Plan("tight", segments), problem) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_without_effort_still_pays_for_its_switches(seed):
    problem = draw("scale-12x16", seed=seed)
    segments = plan_preemptive(problem, preemptive_bound(problem), work=WorkBudget(0.01), effort=1e-9)
    assert segments is not None
    assert verify(Plan(problem.name, segments), problem) == []


def test_a_group_whose_plan_takes_more_than_the_work_that_is_left_is_not_planned(monkeypatch):
    """Five hundred jobs on one node took minutes in compiled code that no limit ends."""
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, 100.0 + i),)) for i in range(500))
    problem = Problem("many", (PlanningNode("n0", 2),), jobs)
    monkeypatch.setattr(preemptive, "plan_group", None)
    assert plan_preemptive(problem, preemptive_bound(problem), work=WorkBudget(10.0)) is None
