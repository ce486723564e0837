"""Commands that plan a problem file and check a plan, and the files of both; nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ringmaster.errors import InputError, NoRoomError, ProblemError, input_errors, raise_faults
from ringmaster.files import text_of
from ringmaster.flows.batch.run_options import Profiles
from ringmaster.flows.commands.parameters import internal
from ringmaster.flows.commands.running import estimate
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import (
    AsJson,
    announce,
    error_console,
    output_console,
    print_json,
    print_lines,
    print_outcome,
    print_result,
    write_file,
)
from ringmaster.flows.settings import resolve_path

if TYPE_CHECKING:
    from ringmaster.tasks.planning import Plan, Problem
    from ringmaster.tasks.planning.whatif.gains import Change


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


UNITS_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)")
DEVICES = re.compile(r"([1-9]\d{0,5})(?::(.+))?")


@internal("changes")
def whatif(
    file: Annotated[Path, typer.Argument(metavar="PROBLEM.json|BATCH.yaml", help="Planning problem, or batch file.")],
    add_devices: Annotated[
        list[str] | None,
        typer.Option(metavar="N[:TYPE]", help="Add N devices to the node where they gain most by the prices."),
    ] = None,
    add_node: Annotated[list[str] | None, typer.Option(metavar="N[:TYPE]", help="Add a node of N devices.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="JOB[,JOB...]", help="Leave these jobs out together.")
    ] = None,
    deadline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIME", help="Time by which all jobs are to end: 06:00, or within 6h, 90m or 3600 seconds."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Name the nodes and jobs that decide when the last job ends.")
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", help="Plan of the problem; default: a new one.")
    ] = None,
    at_once: Annotated[
        bool,
        typer.Option("--at-once", help="Show only the intervals that are proved at once; nothing is planned again."),
    ] = False,
    work: Annotated[
        float, typer.Option(help="Search budget of each plan, in seconds of an idle machine.", min=0.1)
    ] = 30.0,
    time_limit: Annotated[float, typer.Option(help="Wall-clock limit of each search, in seconds.", min=0.1)] = 300.0,
    profiles: Annotated[
        Profiles, typer.Option(help="Predict unknown runtimes of a batch, as a run does, or measure them.")
    ] = "predict",
    seed: Annotated[int, typer.Option(help="Seed of the search.", min=0)] = 0,
    as_json: AsJson = False,
    changes: Sequence[Any] = (),
) -> None:
    """What more devices would gain, what a job costs, and whether all jobs can end in time.

    First an interval that is proved for these runtimes, by the prices of the plan's bound; then the changed
    problem is planned again. Options may be repeated; each is a question of its own. A batch is profiled and planned
    as by `ringmaster run --dry-run`, by the profiles that are stored where there are any.
    """
    due_s = [seconds_until(text) for text in deadline or ()]
    counts = [_devices(text) for text in (*(add_devices or ()), *(add_node or ()))]
    if not (counts or changes or without or due_s or explain):
        raise InputError(["no question. To fix: --add-devices, --add-node, --without, --deadline or --explain"])
    limits: dict[str, Any] = {"work_s": work, "time_limit_s": time_limit, "seed": seed}
    if file.suffix.lower() in (".yaml", ".yml"):
        problem, planned, are_measured = _of_batch(file, plan, profiles=profiles, seed=seed)
    else:
        problem, are_measured = read_problem(file), None
        planned = _made(problem, limits) if plan is None else read_plan(plan)
    from ringmaster.tasks.planning.whatif import gains

    more = len(add_devices or ())
    every: list[Change] = [gains.MoreDevices(num_devices=num, device_type=kind) for num, kind in counts[:more]]
    every += [gains.MoreNodes(num_devices=num, device_type=kind) for num, kind in counts[more:]]
    every += changes
    jobs = {job.id for job in problem.jobs}  # a job may have commas in its name
    listed = [(text,) if text in jobs else filter(None, text.split(",")) for text in without or ()]
    every += [gains.FewerJobs(jobs=tuple(dict.fromkeys(names))) for names in listed]
    faults: list[str] = []
    for change in every:
        try:
            change.on(problem)
        except ProblemError as error:
            faults += error.faults
    raise_faults(faults)
    # A batch was profiled and planned meanwhile.
    due_s = [seconds_until(text) for text in deadline or ()]
    from ringmaster.flows.reports.plan_report import answer_questions

    result = answer_questions(
        gains.WhatIf(problem, planned),
        every,
        [gains.Deadline(due_s=each_s) for each_s in due_s],
        is_explained=explain,
        are_measured=are_measured,
        limits=None if at_once else limits,
        say=(lambda line: None) if as_json else partial(output_console().print, soft_wrap=True),
    )
    print_outcome(result, as_json=as_json)


def seconds_until(text: str, *, now: datetime | None = None) -> float:
    """Returns the seconds from now to a time of the day, or of a duration such as 6h, 1h30m or 3600.

    A time of the day that is over is that of tomorrow. Raises InputError where the text is neither.
    """
    now = now or datetime.now().astimezone()
    if result := CLOCK.fullmatch(text):
        then = now.replace(hour=int(result[1]), minute=int(result[2]), second=0, microsecond=0)
        return ((then if then > now else then + timedelta(days=1)) - now).total_seconds()
    parts = DURATION.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
        if seconds > 0:
            return seconds
    raise InputError(
        [f"--deadline {text!r} is not a valid time. To fix: give a time of the day, 06:00, or 6h, 90m or 3600"]
    )


def _devices(text: str) -> tuple[int, str]:
    """Returns the number and the type of devices."""
    if result := DEVICES.fullmatch(text):
        return int(result[1]), result[2] or ""
    raise InputError([f"{text!r} is not a valid number of devices. To fix: give a number from 1 on, or 2:TYPE"])


def _made(problem: Problem, limits: dict[str, Any]) -> Plan:
    from ringmaster.tasks.planning.fusion import choose_groups

    announce("planning; --plan takes a plan that is there already")
    return choose_groups(problem, **limits).fused_plan


def _of_batch(file: Path, plan: Path | None, *, profiles: Profiles, seed: int) -> tuple[Problem, Plan, bool]:
    """Returns the planning problem of a batch, and the plan of a dry run, without deadlines that it cannot meet.

    The third value is whether all runtimes of the problem were measured.
    """
    from ringmaster.tasks.batch import load_batch

    batch = load_batch(resolve_path(file))
    if plan is not None:
        raise InputError(["--plan is for a problem file. To fix: give the problem.json of that plan, not the batch"])
    if batch.terms.objective != "makespan":
        raise InputError(
            [f"{file}: the batch minimises {batch.terms.objective}, and what a change gains is known for the makespan "
             f"alone. To fix: `ringmaster profile {file} -o problem.json`, then `ringmaster whatif problem.json`"]
        )  # fmt: skip
    result = estimate(batch, profiles=profiles, seed=seed, interrupts=Interrupts())
    from ringmaster.tasks.planning.objectives import without_deadlines

    print_lines(error_console(), result.sentences())
    if result.problem is None or result.plan is None:
        raise InputError([f"{file}: no job can be trained: {result.summary()}"])
    return without_deadlines(result.problem, result.late), result.plan, result.are_measured
