"""Commands that plan a problem file and check a plan, and the files of both; nothing is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ringmaster.errors import InputError, NoRoomError, ProblemError, input_errors
from ringmaster.files import text_of
from ringmaster.flows.output import (
    AsJson,
    output_console,
    print_json,
    print_result,
    write_file,
)

if TYPE_CHECKING:
    from ringmaster.tasks.planning import Plan, Problem


MAX_BYTES = 200_000_000
"""Of a problem or a plan: 10,000 jobs of 100 options are half of that."""


def read_problem(path: Path) -> Problem:
    """Reads a problem. Raises InputError with every fault of the file."""
    from ringmaster.tasks.planning import Problem

    try:
        return Problem.from_json(_read(path))
    except ProblemError as error:
        raise InputError([f"{path}: {fault}" for fault in error.faults]) from None


def read_plan(path: Path) -> Plan:
    """Reads a plan. Raises InputError where the file has none."""
    from ringmaster.tasks.planning import Plan

    value = _read(path)
    with input_errors(about=f"{path}: "):
        return Plan.from_json(value)


def _read(path: Path) -> Any:
    try:
        return json.loads(text_of(path, max_bytes=MAX_BYTES))
    except OSError as error:
        raise InputError([f"{path}: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise InputError([f"{path}: not JSON: {error}"]) from None


Preemption = Literal["auto", "never", "always"]


def plan(
    problem_file: Annotated[
        Path, typer.Argument(metavar="PROBLEM.json", help="Problem; `ringmaster profile -o` writes one.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file, as JSON.")] = None,
    work: Annotated[
        float,
        typer.Option(help="Search budget, in seconds of an idle machine; a busy one takes longer.", min=0.1),
    ] = 30.0,
    time_limit: Annotated[
        float, typer.Option(help="Wall-clock limit in seconds, after which the best plan so far is taken.", min=0.1)
    ] = 300.0,
    preemption: Annotated[Preemption, typer.Option(help="Permission for jobs to switch between options.")] = "auto",
    objective: Annotated[
        str,
        typer.Option(
            metavar="[makespan|weighted|cost|...]",
            help="Quantity to minimise; packages may register more.",
            callback=lambda name: _registered(name),
        ),
    ] = "makespan",
    seed: Annotated[int, typer.Option(help="Seed of the search.", min=0)] = 0,
    svg: Annotated[Path | None, typer.Option(help="Draw the plan's Gantt chart into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a problem: a Gantt chart, its makespan, what no plan can beat, what simple rules would give, and what it
    saves to train jobs together where they may be.
    """
    from ringmaster.tasks.planning.fusion import choose_groups

    problem = read_problem(problem_file)
    limits = {"work_s": work, "time_limit_s": time_limit}
    fusion = choose_groups(problem, **limits, preemption=preemption, objective=objective, seed=seed)
    match = fusion.fused_plan
    if output:
        write_file(output, json.dumps(match.to_json(), indent=1) + "\n")
    if svg:
        from ringmaster.tasks.planning.gantt import render_svg

        write_file(svg, render_svg(match, problem) + "\n")
    simple = _simple(problem)
    if as_json:
        result = match.to_json() | {"gap": match.gap, "num_switches": match.num_switches, "simple": simple}
        print_json(result | ({"fusion": fusion.to_json()} if problem.is_fused else {}))
    else:
        from ringmaster.flows.reports.plan_report import print_plan

        print_plan(match, problem, simple, output_console(), fused=fusion.in_words() if problem.is_fused else "")


def check(
    problem_file: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="Planning problem of the plan.")],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="Plan that `ringmaster plan -o` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Check a plan by arithmetic alone: that it keeps all rules, and that its prices prove its bound.

    Exit 0 where all of it holds, else 1 and the faults on stdout. No solver is used, nor code that makes plans.
    """
    from ringmaster.tasks.planning import verify

    problem, planned = read_problem(problem_file), read_plan(plan_file)
    faults = list(verify(planned, problem))
    lines = faults or list(_proofs(planned, problem))
    result = {"is_valid": not faults, "faults": faults, "proofs": [] if faults else lines}
    print_result(result | {"makespan_s": planned.makespan_s}, lines, as_json=as_json)
    if faults:
        raise typer.Exit(1)


def _proofs(planned: Plan, problem: Problem) -> Iterator[str]:
    """Yields what holds for a plan that keeps all rules, and what it claims without a proof."""
    from ringmaster.tasks.planning import certified_bound
    from ringmaster.tasks.planning.bounds.bounds import COUNTING, counted_bound_s
    from ringmaster.tasks.planning.problems import problem_parts

    yield (
        f"OK: {len(planned.segments)} segments of {len(problem.jobs)} jobs keep every rule and end at "
        f"{planned.makespan_s:.1f} s"
    )
    if planned.certificate is not None:
        bound_s = certified_bound(planned.certificate, problem)
        above = (
            f"the plan is at most {planned.makespan_s / bound_s - 1:.2%} longer"
            if bound_s
            else "which is not information"
        )
        yield f"OK: by the prices that it carries no plan ends before {bound_s:.1f} s; {above}"
    elif planned.proof == COUNTING:
        bound_s = counted_bound_s(problem)
        yield f"OK: by {COUNTING}, no plan that splits none of them ends before {bound_s:.1f} s"
    elif planned.lower_bound_s is not None:
        yield f"OK: no plan ends before {planned.lower_bound_s:.1f} s, which needs no prices"
    if planned.solver_bound_s is not None:
        claim = f"no plan which splits no job ends before {planned.solver_bound_s:.1f} s"
        yield f"not checked: that {claim}, as {problem_parts.shown(planned.solver)} claims"
    if planned.value is not None and planned.value_bound is not None:
        least = f"no plan has a {planned.objective} below {planned.value_bound:.2f}"
        above = f"; the plan's {planned.value:.2f} is at most {planned.gap:.2%} more" if planned.gap is not None else ""
        yield f"OK: {least}{above}"


def _registered(objective: str) -> str:
    from ringmaster.tasks.planning.objectives import objective_names

    if objective not in objective_names():
        raise typer.BadParameter(f"{objective!r} is not one of {', '.join(map(repr, objective_names()))}.")
    return objective


def _simple(problem: Problem) -> dict[str, float]:
    """Makespans of common practice without a planner, by name."""
    from ringmaster.tasks.planning.plans.list_scheduling import current_practice, even_split, optimus_greedy

    makespans = {}
    for rule in (current_practice, even_split, optimus_greedy):
        with suppress(NoRoomError):  # such a rule may not know how to do without nodes that go away
            plan = rule(problem)
            makespans[plan.method] = plan.makespan_s
    return makespans
