"""Pictures of plans: a self-contained SVG. In a browser, pointing at a job shows where else it runs."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from tasks.planning.plan import Plan, Segment
from tasks.planning.problem import Problem

# Colour-blind safe, after Okabe & Ito and Paul Tol; text on them is dark.
COLOURS = ["#9ecae9", "#f8cf7c", "#a9d8b8", "#f4b6b6", "#cfc0e4", "#dbd2a0", "#b4c4f0", "#f3bf92", "#a5d8d2", "#cfcfcf"]
MAX_LINKED = 300  # segments beyond which jobs are not told apart when pointed at: the picture would grow too large
WIDTH, LEFT, TOP, RIGHT, NODE_GAP = 1200, 110, 92, 24, 10


def render_svg(plan: Plan, problem: Problem) -> str:
    """The plan as an SVG document: a row a device, a box a segment, coloured by technique, hatched where it
    switches."""
    row = max(3.0, min(30.0, 880.0 / problem.num_devices))
    top_of, height = _rows(problem, row)
    end_s = plan.makespan_s or 1.0
    scale = (WIDTH - LEFT - RIGHT) / (end_s * 1.01)
    techniques = sorted({_technique(segment, problem) for segment in plan.segments})
    colour_of = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(techniques)}
    number = {job.id: i for i, job in enumerate(problem.jobs)} if len(plan.segments) <= MAX_LINKED else {}
    parts = [_head(plan, height, num_jobs=len(number)), _legend(colour_of), _axis(end_s, scale, height)]
    for node in problem.nodes:
        y, tall, name = top_of[node.id], row * node.num_devices, escape(shortened(node.id, 10))
        parts.append(
            f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{tall:.1f}" class="node"/>'
            f'<text x="{LEFT - 34}" y="{y + tall / 2 + 4:.1f}" class="name">{name}</text>'
        )
        if row >= 9:
            parts += [
                f'<text x="{LEFT - 8}" y="{y + row * (d + 0.5) + 3.5:.1f}" class="device">{d}</text>'
                for d in range(node.num_devices)
            ]
    for segment in plan.segments:
        boxes = _boxes(segment, problem, scale, row, top_of, colour_of[_technique(segment, problem)])
        parts.append(f'<g class="job j{number.get(segment.job, 0)}">{"".join(boxes)}</g>')
    parts.append(_bound_line(plan, scale, height))
    return "\n".join([*parts, "</svg>"])


def _technique(segment: Segment, problem: Problem) -> str:
    return problem.job(segment.job).options[segment.option].technique


def job_label(segment: Segment, problem: Problem) -> str:
    """What a segment is called where there is room: its job, those that a fused group carries along, its technique."""
    option = problem.job(segment.job).options[segment.option]
    return f"{' + '.join((segment.job, *option.jobs))} · {option.technique}"


def shortened(text: str, length: int) -> str:
    """The text, cut to a length."""
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def seconds_text(value: float) -> str:
    """Seconds as a person reads them, to three or four digits or hundredths of an hour."""
    if value >= 7200:
        return f"{value / 3600:.2f} h" if value < 360_000 else f"{value / 3600:.0f} h"
    if value >= 300:
        return f"{value / 60:.1f} min"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _rows(problem: Problem, row: float) -> tuple[dict[str, float], float]:
    """Where each node's rows begin, and the height of the picture."""
    y, top_of = float(TOP), {}
    gap = NODE_GAP if row >= 9 else 2
    for node in problem.nodes:
        top_of[node.id] = y
        y += row * node.num_devices + gap
    return top_of, y - gap + 44


def _head(plan: Plan, height: float, *, num_jobs: int) -> str:
    said = [f"makespan {seconds_text(plan.makespan_s)}"]
    if plan.lower_bound_s and plan.gap is not None:
        said.append(f"no plan beats {seconds_text(plan.lower_bound_s)} (gap {plan.gap:.2%})")
    said.append(f"{len(plan.segments)} segments, {plan.num_switches} switches")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="Gantt chart of {escape(plan.problem_name, quote=True)}">\n'
        "<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}"
        ".title{font-size:18px;font-weight:600}.said{font-size:13px;fill:#52616d}"
        ".name{font-size:12px;text-anchor:end;font-weight:600}"
        ".device{font-size:10px;text-anchor:end;fill:#7b8894}"
        ".tick{font-size:11px;text-anchor:middle;fill:#52616d}"
        ".legend{font-size:12px}.label{font-size:11px}.node{fill:#f3f5f7}.grid{stroke:#dde3e8}"
        ".bound{stroke:#c1121f;stroke-dasharray:5 4}.least{font-size:11px;text-anchor:end;fill:#a30f1a}"
        f"{_pointed_at(num_jobs)}</style>\n"
        '<defs><pattern id="switch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2.5" height="5" fill="#22303c" opacity=".6"/></pattern></defs>\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n'
        f'<text x="{LEFT}" y="28" class="title">{escape(shortened(plan.problem_name, 80))}</text>'
        f'<text x="{LEFT}" y="48" class="said">{escape(" · ".join(said))}</text>'
    )


def _pointed_at(num_jobs: int) -> str:
    """Styles by which a job that is pointed at stays and all others fade."""
    return "".join(f"svg:has(.j{i}:hover) .job:not(.j{i}){{opacity:.25}}" for i in range(num_jobs))


def _legend(colour_of: dict[str, str]) -> str:
    parts, x = [], float(LEFT)
    for name, colour in colour_of.items():
        parts.append(
            f'<rect x="{x:.0f}" y="60" width="13" height="13" rx="2" fill="{colour}" stroke="#5b6873"/>'
            f'<text x="{x + 19:.0f}" y="71" class="legend">{escape(name)}</text>'
        )
        x += 40 + 7.5 * len(name)
    return "".join(parts) + (
        f'<rect x="{x:.0f}" y="60" width="13" height="13" rx="2" fill="url(#switch)" stroke="#5b6873"/>'
        f'<text x="{x + 19:.0f}" y="71" class="legend">switch or start-up</text>'
    )


def _axis(end_s: float, scale: float, height: float) -> str:
    unit, unit_s = ("h", 3600.0) if end_s >= 7200 else ("min", 60.0) if end_s >= 300 else ("s", 1.0)
    step = _round_step(end_s / unit_s / 8)
    parts, value = [], 0.0
    while value * unit_s <= end_s * 1.0001:
        x = LEFT + value * unit_s * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - 38:.1f}" class="grid"/>'
            f'<text x="{x:.1f}" y="{height - 22:.1f}" class="tick">{value:g}</text>'
        )
        value = round(value + step, 9)
    x = WIDTH - RIGHT
    return "".join(parts) + f'<text x="{x}" y="{height - 6:.1f}" class="device">time in {unit}</text>'


def _round_step(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is at least `value`."""
    power = 10.0 ** floor(log10(value))
    return next(power * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if power * m >= value * (1 - 1e-9))


def _boxes(
    segment: Segment, problem: Problem, scale: float, row: float, top_of: dict[str, float], colour: str
) -> list[str]:
    """One box for each run of neighbouring devices, with a label where it fits and a dark head where it pays first."""
    technique = _technique(segment, problem)
    x, wide = LEFT + segment.start_s * scale, max(0.8, segment.duration_s * scale)
    least = 2.5 if segment.overhead_s > 0 else 0.0  # wide enough to be seen
    paid = min(wide / 2, max(least, segment.overhead_s * scale))
    title = (
        f"{segment.job}: {technique} on {sum(len(ids) for _, ids in segment.devices)} devices, "
        f"{seconds_text(segment.start_s)} to {seconds_text(segment.end_s)}, {segment.work:.1%} of its work"
    )
    if others := problem.job(segment.job).options[segment.option].jobs:
        title += f", together with {', '.join(others)}"
    parts = [f"<title>{escape(title)}</title>"]
    for node, run in [(node, run) for node, ids in segment.devices for run in _neighbours(ids)]:
        y, tall = top_of[node] + run[0] * row, len(run) * row - min(1.5, row / 4)
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{tall:.2f}" rx="{min(3.0, row / 5):.1f}" '
            f'fill="{colour}" stroke="#5b6873" stroke-width="{0.8 if row > 6 else 0.3}"/>'
        )
        if paid:
            parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{paid:.2f}" height="{tall:.2f}" fill="url(#switch)"/>')
        letters = int((wide - paid - 8) / 6.1)
        if tall >= 10 and letters >= 3:
            label = escape(shortened(job_label(segment, problem), letters))
            parts.append(f'<text x="{x + paid + 5:.1f}" y="{y + tall / 2 + 4:.1f}" class="label">{label}</text>')
    return parts


def _neighbours(ids: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for device in sorted(ids):
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return runs


def _bound_line(plan: Plan, scale: float, height: float) -> str:
    if not plan.lower_bound_s:
        return ""
    x = LEFT + plan.lower_bound_s * scale
    return (
        f'<line x1="{x:.1f}" y1="{TOP - 12}" x2="{x:.1f}" y2="{height - 38:.1f}" class="bound">'
        "<title>no plan can end before this</title></line>"
        f'<text x="{x - 5:.1f}" y="{TOP - 6}" class="least">'
        f"no plan ends before {seconds_text(plan.lower_bound_s)}</text>"
    )
