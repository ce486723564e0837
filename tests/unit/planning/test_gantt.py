from xml.etree import ElementTree

from hypothesis import given
from rich.console import Console

from ringmaster.flows.reports.plan_report import print_gantt
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve
from ringmaster.tasks.planning.gantt import render_svg, rows
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES
from tests.drawing import draws
from tests.unit.planning.draw import problems, tiny


def render_text(plan, problem, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        print_gantt(plan, problem, console)
    return capture.get()


@draws(20)
@given(problems(max_jobs=4))
def test_pictures_are_well_formed(problem):
    plan = BASELINES[0](problem)  # any plan would do
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
    problem = Problem("a<b & c", (PlanningNode("n", 1),), (PlanningJob("<job>", (Option("t&", 1, 5.0),)),))
    ElementTree.fromstring(render_svg(solve(problem), problem))


def test_rows_fill_their_columns_and_name_each_gang_once():
    problem = tiny()
    plan = solve(problem)
    found = rows(plan, problem, 57)
    assert [name for name, _ in found] == ["n0:0", "n0:1"]
    for _, pieces in found:
        assert sum(len(piece.text) for piece in pieces) == 57
    text = "".join(piece.text for _, pieces in found for piece in pieces)
    for segment in plan.segments:
        if segment.duration_s > 0.3 * plan.makespan_s:
            assert text.count(f" {segment.job} ·") == len(plan.segments_of(segment.job))


def test_a_fused_group_is_labelled_with_its_leader_and_names_all():
    both = Option("fused", 1, 8.0, jobs=("b",))
    problem = Problem(
        "p",
        (PlanningNode("n", 1),),
        (PlanningJob("a", (both, Option("one", 1, 6.0))), PlanningJob("b", (Option("one", 1, 9.0),))),
    )
    plan = Plan("p", (Segment("a", 0, 0.0, 8.0, 1.0, 0.0, (("n", (0,)),)),))
    picture = render_svg(plan, problem)
    assert "a +1 · fused" in picture
    assert "together with b" in picture
    text = render_text(plan, problem)
    assert "a +1 · fused" in text
    assert "b: with a, fused x1 0 s..8 s" in text
