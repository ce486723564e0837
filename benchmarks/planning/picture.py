"""The picture at the head of the README: current practice and a plan of the same jobs, on one time axis.

`python -m benchmarks.planning.picture` plans twelve jobs on eight devices, and writes
docs/images/plan-and-practice.svg.
No training runs: `tasks.planning.problems.families` draws the runtimes after published ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from benchmarks.planning.families import draw
from ringmaster.tasks.planning.gantt import render_svg
from ringmaster.tasks.planning.plans.list_scheduling import current_practice
from ringmaster.tasks.planning.solve import solve

PROBLEM = "paper-txt-12x8"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "plan-and-practice.svg"
SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def main() -> None:
    """Writes the picture, and prints how much sooner the plan ends."""
    problem = draw(PROBLEM)
    practice, plan = current_practice(problem), solve(problem)
    ratio = practice.makespan_s / plan.makespan_s
    pictures = [
        render_svg(
            replace(each, problem_name=title),
            problem,
            until_s=practice.makespan_s,
            techniques=("ddp", "fsdp", "pipeline"),
        )
        for each, title in (
            (practice, "Current practice: each job on all eight devices, one after another"),
            (plan, f"Ringmaster's plan of the same twelve jobs: {ratio:.2f} times sooner"),
        )
    ]
    PICTURE.write_text(stacked(pictures), encoding="utf-8")
    print(f"{PICTURE}: {ratio:.2f} times sooner, at most {plan.gap:.2%} above the best possible")


def stacked(pictures: list[str]) -> str:
    """Stacks SVG documents of equal width, one below the other."""
    sizes = [tuple(map(int, SIZE.search(picture).groups())) for picture in pictures]
    height = sum(tall for _, tall in sizes)
    parts, y = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sizes[0][0]} {height}">'], 0
    for picture, (_, tall) in zip(pictures, sizes, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{y}" ', 1))
        y += tall
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
