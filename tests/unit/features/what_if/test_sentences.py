"""What the nodes and jobs contribute, and what reports say about more devices."""

from dataclasses import replace

import pytest

from benchmarks.planning.families import draw
from ringmaster.features.what_if.answers import (
    costliest,
    explain,
    explanation_json,
    explanation_lines,
    gain_lines,
    section,
)
from ringmaster.features.what_if.gains import Gain, MoreDevices, WhatIf
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from tests.matrix import matrix

LITTLE = 0.2


def of(problem):
    return WhatIf(problem, solve(problem, work_s=LITTLE))


@pytest.mark.parametrize("family", matrix(["scale-12x16", "types-12x16", "paper-txt-6xhet"], quick=["paper-txt-6xhet"]))
def test_shares_add_up_to_the_bound(family):
    explanation = explain(of(draw(family)), most_jobs=2)
    shares = [price.share for price in explanation.nodes] + [share for _, share in explanation.own_time]
    assert sum(shares) == pytest.approx(1.0)
    assert len(explanation.jobs) == 2


def test_a_job_that_decides_alone_is_named_and_devices_gain_nothing():
    jobs = (PlanningJob("long", (Option("single", 1, 5000.0),)), PlanningJob("short", (Option("single", 1, 900.0),)))
    what_if = of(Problem("one long", (PlanningNode("n0", 2),), jobs))
    explanation = explain(what_if)
    assert explanation.own_time == (("long", pytest.approx(1.0)),)
    assert explanation.nodes[0].one_more_s == pytest.approx(0.0)
    lines = list(explanation_lines(explanation))
    assert lines[0].startswith(
        "0% of the bound is due to the node n0 (2 devices): one more device there gains at most 0 s"
    )
    assert lines[1] == "100% of the bound is due to the length of long itself, which no further device shortens."
    assert lines[2] == "long costs 68.3 min."
    assert explanation_json(explanation)["own_time"] == {"long": pytest.approx(1.0)}


def test_a_job_costs_with_those_that_wait_for_it():
    jobs = (
        PlanningJob("base", (Option("single", 1, 1000.0),)),
        PlanningJob("tuned", (Option("single", 1, 800.0),), after=("base",)),
        PlanningJob("other", (Option("single", 1, 300.0),)),
    )
    what_if = of(Problem("chain", (PlanningNode("n0", 1),), jobs))
    (base, tuned) = costliest(what_if, 2)
    assert base.gain.change.jobs == ("base", "tuned")
    assert base.gain.most_s == pytest.approx(1800.0)
    assert tuned.gain.most_s == pytest.approx(800.0)
    assert any("base, with tuned that waits for it costs" in line for line in explanation_lines(explain(what_if)))


def test_what_a_report_says():
    problem = draw("paper-txt", seed=1)
    plan = solve(problem, work_s=LITTLE)
    lines = section(plan, problem, device="NVIDIA H200")
    assert lines[0].startswith("With one more device (NVIDIA H200) on n0 the last job would end ")
    assert lines[0].endswith(" earlier, by these runtimes.")
    assert 1 < len(lines) <= 4
    assert all(line.startswith("Without ") for line in lines[1:])
    many = draw("scale-12x16")
    lines = section(solve(many, work_s=LITTLE), many)
    assert lines[1].startswith("With one more node of 8 devices the last job would end ")


def test_a_job_that_stands_for_a_group_is_named_with_its_members():
    """What the executor plans after groups were chosen: the first job's gang trains all three."""
    jobs = (
        PlanningJob("a", (Option("shared_base", 1, 3000.0),), members=("b", "c")),
        PlanningJob("d", (Option("single", 1, 1000.0),)),
    )
    problem = Problem("contracted", (PlanningNode("n", 1),), jobs)
    lines = section(solve(problem, work_s=LITTLE), problem)
    assert any(
        line.startswith("Without a, with b, c trained together with it the last job would end") for line in lines
    )


def test_where_a_report_says_nothing():
    problem = draw("paper-txt", seed=1)
    plan = solve(problem, work_s=LITTLE)
    assert section(replace(plan, objective="cost", value=1.0), problem) == []
    one = replace(problem, jobs=problem.jobs[:1])
    assert section(solve(one, work_s=LITTLE), one) == []
    short = replace(
        problem,
        switch_cost_s=0.01,
        jobs=tuple(
            replace(job, options=tuple(replace(o, runtime_s=o.runtime_s / 10_000) for o in job.options))
            for job in problem.jobs
        ),
    )
    assert section(solve(short, work_s=LITTLE), short) == []
    late = replace(problem, jobs=tuple(replace(job, deadline_s=1.0) for job in problem.jobs))
    assert section(plan, late) == []
    assert section(replace(plan, certificate=None), problem), "the bound is computed where the plan has no prices"


@pytest.mark.parametrize(
    ("least_s", "most_s", "says"),
    [
        (2460.0, 2640.0, "41.0 to 44.0 min"),
        (200.0, 600.0, "3.3 to 10.0 min"),
        (0.0, 600.0, "at most 10.0 min"),
        (600.0, 600.0, "ends 10.0 min earlier"),
    ],
)
def test_intervals_in_words(least_s, most_s, says):
    gain = Gain(
        change=MoreDevices(num_devices=1), on="n0", least_s=least_s, most_s=most_s, most_by_prices_s=most_s,
        bound_s=0.0, makespan_s=None,
    )  # fmt: skip
    (line,) = gain_lines(gain, of(draw("tiny-3x2")), proof="by these runtimes")
    assert line.startswith("With one more device on n0")
    assert says in line
