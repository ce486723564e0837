"""The choice of groups: made once, and never worse than training each job alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import (
    Option,
    Plan,
    PlanningJob,
    PlanningNode,
    Problem,
    Segment,
    certified_bound,
    solve,
    verify,
)
from ringmaster.tasks.planning.divisions import Contraction, Divisions
from ringmaster.tasks.planning.fusion import Fusion, as_executed, choose_groups, contracted, groups_of, without_groups
from ringmaster.tasks.planning.objectives import MAKESPAN, objective_by_name
from ringmaster.tasks.planning.solve import checked_plan, reuse_plan
from ringmaster.tasks.planning.work import WorkBudget
from tests.drawing import draws
from tests.unit.planning.groups.test_fused import adapters


@pytest.mark.parametrize(
    ("gang_step_s", "groups"), [(11.0, {"a": ("b",), "c": ("d",)}), (19.999, {}), (20.0, {}), (30.0, {})]
)
def test_jobs_are_fused_only_where_that_pays(gang_step_s, groups):
    problem = adapters(gang_step_s)
    fusion = choose_groups(problem)
    assert fusion.groups == groups
    assert verify(fusion.fused_plan, problem) == []
    assert verify(fusion.alone, without_groups(problem)) == []
    assert fusion.saved_s == pytest.approx(20.0 - min(gang_step_s, 20.0) if groups else 0.0)
    assert choose_groups(problem) == fusion


def test_what_fusing_saved_is_said():
    said = choose_groups(adapters(11.0)).in_words()
    assert said == "fused 4 jobs into 2 groups: 11 s instead of 20 s, 45 % less; at least 11 s by the bound"
    assert choose_groups(adapters(30.0)).in_words() == "no jobs are fused: trained alone they take 20 s"


def test_without_options_for_groups_there_are_none():
    problem = without_groups(adapters(11.0))
    fusion = choose_groups(problem)
    assert (fusion.groups, fusion.fused_plan) == ({}, fusion.alone)


def test_the_leader_owns_the_options():
    alone = Option("t", 1, 10.0)
    jobs = (PlanningJob("a", (alone,)), PlanningJob("b", (alone, Option("fused", 1, 12.0, jobs=("a",)))))
    problem = Problem("p", (PlanningNode("n0", 1),), jobs)
    assert choose_groups(problem).groups == {"b": ("a",)}
    found = contracted(problem, {"b": ("a",)}).problem
    assert [job.id for job in found.jobs] == ["b"]
    assert found.jobs[0].options == (Option("fused", 1, 12.0),)


def test_a_plan_of_what_is_left_stands_for_one_of_the_whole():
    problem = adapters(11.0)
    fusion = choose_groups(problem)
    left = contracted(problem, fusion.groups)
    plan = solve(left.problem)
    whole = Plan(problem.name, left.expanded(plan, problem))
    assert verify(whole, problem) == []
    assert groups_of(whole, problem) == fusion.groups


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"b": ("a",)}, "job b has no option that carries a"),
        ({"x": ("a",)}, "job x has no option"),
        ({"a": ("b", "c")}, "job a has no option that carries b, c"),
    ],
)
def test_groups_that_no_option_carries_are_refused(groups, says):
    with pytest.raises(ValueError, match=says):
        contracted(adapters(11.0), groups)


def test_a_plan_in_which_a_job_changes_its_group_has_no_division():
    devices = (("n0", (0,)),)
    segments = (
        Segment("a", 1, 0.0, 5.5, 0.5, 0.0, devices),
        Segment("a", 0, 5.5, 11.5, 0.5, 1.0, devices),
        Segment("b", 0, 11.5, 17.5, 0.5, 1.0, devices),
        Segment("c", 1, 17.5, 28.5, 1.0, 0.0, devices),
    )
    plan = Plan("adapters", segments)
    assert verify(plan, adapters(11.0)) == []
    with pytest.raises(ValueError, match="not trained in one group throughout"):
        groups_of(plan, adapters(11.0))


def test_deadlines_that_jobs_meet_only_together():
    problem = adapters(11.0, deadline_s=12.0)
    fusion = choose_groups(problem)
    assert fusion.alone_is_late
    assert (fusion.fused_plan.makespan_s, fusion.alone.makespan_s) == (pytest.approx(11.0), pytest.approx(20.0))
    assert "trained alone they cannot meet their deadlines" in fusion.in_words()
    with pytest.raises(ProblemError, match="deadline"):
        choose_groups(adapters(11.0, deadline_s=5.0))


FIXED_S, SHARE_S = 40.0, 60.0  # of a job's time: common to a group, and for each job


def over_devices(*, num_jobs: int, num_devices: int, gangs: tuple[int, ...], loss: float = 1.05) -> Problem:
    """Equal jobs in groups of any size, on gangs of the given sizes. Each device above one costs a loss."""
    names = [f"j{i}" for i in range(num_jobs)]

    def options(k: int) -> list[Option]:
        for size in range(1, num_jobs - k + 1):
            for gang in gangs:
                seconds = (FIXED_S + SHARE_S * size) / gang * loss ** (gang - 1)
                yield Option("t", gang, seconds, jobs=tuple(names[k + 1 : k + size]))

    jobs = tuple(PlanningJob(name, tuple(options(k))) for k, name in enumerate(names))
    return Problem("over devices", (PlanningNode("n0", num_devices),), jobs, switch_cost_s=10.0)


def gangs_of(fusion: Fusion, problem: Problem) -> list[tuple[int, int]]:
    """The numbers of devices and jobs of each segment's gang."""
    options = [problem.job(s.job).options[s.option] for s in fusion.fused_plan.segments]
    return sorted((o.num_devices, 1 + len(o.jobs)) for o in options)


@pytest.mark.parametrize(
    ("num_jobs", "num_devices", "gangs", "chosen"),
    [
        (3, 2, (1, 2), [(2, 3)]),  # 115.5 s; a pair while the third runs takes 160 s, and each alone 150 s
        (4, 2, (1, 2), [(2, 4)]),  # 147 s instead of 160 s: even the base's part is divided
        (4, 4, (2,), [(2, 2), (2, 2)]),  # no device can hold the base: two gangs of two devices, side by side
        (5, 4, (2, 4), [(4, 5)]),  # 98.4 s; three and two on two devices each take 115.5 s
    ],
)
def test_a_group_takes_several_devices_where_that_is_right(num_jobs, num_devices, gangs, chosen):
    problem = over_devices(num_jobs=num_jobs, num_devices=num_devices, gangs=gangs)
    fusion = choose_groups(problem)
    assert verify(fusion.fused_plan, problem) == []
    assert gangs_of(fusion, problem) == chosen


@pytest.mark.parametrize(("num_jobs", "num_devices"), [(4, 2), (8, 4)])
def test_a_group_takes_one_device_where_several_lose_too_much(num_jobs, num_devices):
    problem = over_devices(num_jobs=num_jobs, num_devices=num_devices, gangs=(1, 2), loss=1.2)
    assert gangs_of(choose_groups(problem), problem) == [(1, num_jobs // num_devices)] * num_devices


@st.composite
def sweeps(draw) -> Problem:
    """Draws jobs with a common base. A group takes a fixed part of a step once, and its jobs are in equal chunks.

    With several devices, jobs and groups may run on one device, on one or two, or on two only, at some loss.
    """
    num_jobs, num_devices = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    fixed_s, share_s, startup_s = (draw(st.floats(0.0, 1.0)) for _ in range(3))
    share_s += 0.01
    kind = draw(st.sampled_from(["equal", "any"]))
    steps = [draw(st.integers(1, 500)) if kind == "any" else 100 for _ in range(num_jobs)]
    steps.sort(reverse=True)
    deadline_s = draw(st.none() | st.just(1e6))
    both = st.sampled_from([(1,), (1, 2), (2,)]) if num_devices > 1 else st.just((1,))
    gangs, loss = draw(both), draw(st.floats(1.0, 2.0))

    def options(work_s: float, *others: str) -> list[Option]:
        return [Option("t", g, startup_s + work_s * (loss / 2 if g == 2 else 1), jobs=others) for g in gangs]

    rows = [options((fixed_s + share_s) * n) for n in steps]
    for size in draw(st.lists(st.sampled_from([2, 3, 4, 8]), unique=True)):
        for k in range(0, num_jobs - size + 1, size):
            gang_step_s = fixed_s * steps[k] + share_s * sum(steps[k : k + size])
            rows[k] += options(gang_step_s, *(f"j{i}" for i in range(k + 1, k + size)))
    jobs = [PlanningJob(f"j{k}", tuple(row), deadline_s=deadline_s) for k, row in enumerate(rows)]
    if draw(st.booleans()):
        jobs.append(
            PlanningJob("last", (Option("single", 1, 5.0),), after=(jobs[draw(st.integers(0, num_jobs - 1))].id,))
        )
    return Problem("drawn", (PlanningNode("n0", num_devices),), tuple(jobs), draw(st.sampled_from([0.0, 1.0, 60.0])))


@pytest.mark.full
@draws(4)
@given(sweeps(), st.sampled_from(["makespan", "weighted"]))
def test_every_choice_is_valid_and_never_worse_than_alone(problem, objective):
    fusion = choose_groups(problem, objective=objective)
    assert verify(fusion.fused_plan, problem) == []
    assert verify(fusion.alone, without_groups(problem)) == []
    assert fusion.fused_plan.lower_bound_s <= fusion.fused_plan.makespan_s
    if fusion.fused_plan.certificate is not None:
        assert fusion.fused_plan.lower_bound_s <= certified_bound(fusion.fused_plan.certificate, problem) * (1 + 1e-9)
    together, alone = (objective_by_name(objective).value(plan, problem) for plan in (fusion.fused_plan, fusion.alone))
    assert together <= alone * (1 + 1e-9)
    assert together < alone * (1 - 5e-4) if fusion.groups else together == pytest.approx(alone)
    assert groups_of(fusion.fused_plan, problem) == fusion.groups
    left, plan = as_executed(problem, fusion.fused_plan)
    assert verify(plan, left) == []
    names = [name for lead, members in fusion.groups.items() for name in (lead, *members)]
    assert len(names) == len(set(names))
    assert {job.id: job.members for job in left.jobs if job.members} == fusion.groups


@draws(4)
@given(sweeps(), st.sampled_from(["makespan", "weighted"]), st.sampled_from([0.5, 1.0]))
def test_the_plan_that_groups_were_chosen_by_is_followed_as_it_is(problem, objective, cheaper):
    fusion = choose_groups(problem, objective=objective)
    left, start = as_executed(problem, fusion.fused_plan)
    left = replace(left, switch_cost_s=left.switch_cost_s * cheaper)
    found = reuse_plan(start, left, objective=objective)
    assert found is not None
    assert verify(found, left) == []
    now, before = (objective_by_name(objective).value(plan, left) for plan in (found, start))
    assert now <= before * (1 + 1e-4)
    assert found.gap is not None
    assert found.lower_bound_s <= found.makespan_s


def test_a_plan_of_another_problem_is_not_followed():
    problem = adapters(11.0)
    left, start = as_executed(problem, choose_groups(problem).fused_plan)
    late = replace(left, jobs=tuple(replace(job, deadline_s=5.0) for job in left.jobs))
    slower = [replace(job, options=(replace(job.options[0], runtime_s=12.0),)) for job in left.jobs]
    others = [
        late,
        replace(left, jobs=tuple(slower)),
        replace(left, jobs=left.jobs[:1]),
        replace(left, nodes=(PlanningNode("elsewhere", 2),)),
        without_groups(problem),
    ]
    assert [reuse_plan(start, other, objective="makespan") for other in others] == [None] * 5
    assert checked_plan(others[1], work_s=5.0, seed=0, start=start).makespan_s == pytest.approx(12.0)


def test_what_is_good_enough_is_searched_for_no_further():
    problem = without_groups(draw("adapters-14x3", seed=2))
    first = solve(problem, enough=1.0)
    assert set(first.seconds) == {"bounds", "heuristics"}
    assert verify(first, problem) == []


@pytest.mark.parametrize(("num_devices", "num_each"), [(2, 8), (4, 4), (8, 2)])
def test_a_sweep_is_divided_among_the_devices(num_devices, num_each):
    problem = replace(draw("adapters-16x2", seed=0), nodes=(PlanningNode("n0", num_devices),))
    fusion = choose_groups(problem)
    assert [1 + len(members) for members in fusion.groups.values()] == [num_each] * num_devices
    assert fusion.fused_plan.gap == pytest.approx(0.0, abs=1e-6)


def test_a_group_that_gains_nothing_is_not_formed():
    """A long job runs anyway, so the other jobs gain nothing from being trained together."""
    problem = adapters(15.0)
    long = PlanningJob("long", (Option("t", 1, 40.0),))
    fusion = choose_groups(replace(problem, jobs=(*problem.jobs, long)))
    assert fusion.groups == {}
    assert fusion.fused_plan.makespan_s == pytest.approx(40.0)


def test_like_divisions_are_judged_once():
    problem = draw("adapters-16x2", seed=0)
    divisions = Divisions(problem, objective=MAKESPAN, is_preemptive=True, work=WorkBudget())
    halves = [divisions.division([group]) for group in Contraction(problem).groups if len(group) == 8]
    assert len(halves) == 2
    assert divisions.estimate(halves[0]) is divisions.estimate(halves[1])
