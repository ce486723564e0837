from xml.etree import ElementTree

from hypothesis import given, settings

from tasks.planning import Node, Option, PlanningJob, Problem, solve
from tasks.planning.gantt import render_svg, render_text

from .draw import problems, tiny


@settings(max_examples=20, deadline=None)
@given(problems(max_jobs=4))
def test_pictures_are_well_formed(problem):
    plan = solve(problem, preemption="never")
    root = ElementTree.fromstring(render_svg(plan, problem))
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    for job in problem.jobs:
        assert any(title.startswith(f"{job.id}: ") for title in titles)
    assert max(map(len, render_text(plan, problem, width=80).splitlines())) <= 80


def test_text_names_jobs_devices_and_techniques():
    text = render_text(solve(tiny()), tiny(), width=90)
    for word in ("n0:0", "n0:1", "j3", "single", "A"):
        assert word in text


def test_names_are_escaped():
    problem = Problem("a<b & c", (Node("n", 1),), (PlanningJob("<job>", (Option("t&", 1, 5.0),)),))
    ElementTree.fromstring(render_svg(solve(problem), problem))
