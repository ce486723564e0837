"""Gantt charts of plans as self-contained SVG; hovering over a job in a browser highlights all its segments."""

from collections.abc import Iterable

from ringmaster.tasks.planning.charts.drawing import Frame, colours, counted, label, legend, seconds_text, stripes
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.text import xml

MAX_LINKED = 300  # segments above which hovering highlights nothing: the styles would make the file too large
BOUND_STYLE = (
    ".bound{stroke:#c1121f;stroke-dasharray:5 4}.least{font-size:11px;text-anchor:end;fill:#a30f1a}"  # the bound's line
)


def render_svg(
    plan: Plan, problem: Problem, *, until_s: float | None = None, techniques: Iterable[str] | None = None
) -> str:
    """Draws the plan as SVG: a row per device, a box per segment, coloured by technique, with hatched overhead.

    until_s: end of the time axis.
    techniques: techniques in the legend, each with a colour.

    Both are taken from the plan where they are left out.
    """
    frame = Frame([(node.id, node.num_devices) for node in problem.nodes], end_s=until_s or plan.makespan_s or 1.0)
    colour_of = colours(techniques or (_technique(segment, problem) for segment in plan.segments))
    number = {job.id: i for i, job in enumerate(problem.jobs)} if len(plan.segments) <= MAX_LINKED else {}
    style = BOUND_STYLE + _pointed_at(len(number))
    parts = [
        frame.head(plan.problem_name, _said(plan), style=style, defs=stripes("switch", opacity=0.6)),
        legend(colour_of | {"switch or start-up": "url(#switch)"}),
        frame.axis(),
        *frame.ground(),
    ]
    for segment in plan.segments:
        boxes = _boxes(segment, problem, frame, colour_of[_technique(segment, problem)])
        parts.append(f'<g class="job j{number.get(segment.job, 0)}">{"".join(boxes)}</g>')
    if plan.best_bound_s:
        least = f"no plan ends before {seconds_text(plan.best_bound_s)}"
        title = "no plan can end before this"
        parts.append(frame.line(plan.best_bound_s, said=least, title=title, style=("bound", "least")))
    return "\n".join([*parts, "</svg>"])


def job_label(segment: Segment, problem: Problem) -> str:
    """The label of a segment: its job, the number of further jobs that are trained with it, and its technique."""
    others = trained_beside(segment, problem)
    return f"{segment.job}{f' +{len(others)}' if others else ''} · {_technique(segment, problem)}"


def trained_beside(segment: Segment, problem: Problem) -> tuple[str, ...]:
    """The other jobs that a segment trains: members of its job, and jobs of its option."""
    job = problem.job(segment.job)
    return (*job.members, *job.options[segment.option].jobs)


def _technique(segment: Segment, problem: Problem) -> str:
    return problem.job(segment.job).options[segment.option].technique


def _said(plan: Plan) -> list[str]:
    said = [f"makespan {seconds_text(plan.makespan_s)}"]
    if plan.best_bound_s and plan.gap is not None:
        said.append(f"no plan beats {seconds_text(plan.best_bound_s)} (gap {plan.gap:.2%})")
    return [*said, f"{counted(len(plan.segments), 'segment')}, {counted(plan.num_switches, 'switch', 'switches')}"]


def _pointed_at(num_jobs: int) -> str:
    """CSS rules by which all jobs fade except the one under the pointer."""
    return "".join(f"svg:has(.j{i}:hover) .job:not(.j{i}){{opacity:.25}}" for i in range(num_jobs))


def _boxes(segment: Segment, problem: Problem, frame: Frame, colour: str) -> list[str]:
    """Draws a segment's boxes, with a label where it fits and a hatched start for the overhead."""
    option = problem.job(segment.job).options[segment.option]
    title = (
        f"{segment.job}: {option.technique} on {sum(len(ids) for _, ids in segment.devices)} devices, "
        f"{seconds_text(segment.start_s)} to {seconds_text(segment.end_s)}, {segment.work:.1%} of its work"
    )
    if others := trained_beside(segment, problem):
        title += f", together with {', '.join(others)}"
    parts = [f"<title>{xml(title)}</title>"]
    least = 2.5 if segment.overhead_s > 0 else 0.0  # minimum visible width
    for box in frame.boxes(segment.devices, segment.start_s, segment.end_s):
        paid = min(box.wide / 2, max(least, segment.overhead_s * frame.scale))
        parts.append(frame.rect(box, fill=colour))
        if paid:
            parts.append(
                f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{paid:.2f}" height="{box.tall:.2f}" '
                'fill="url(#switch)"/>'
            )
        parts.append(label(box, job_label(segment, problem), indent=paid))
    return parts
