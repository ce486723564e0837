"""`ringmaster whatif`: what changes of a problem or a batch would gain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.errors import InputError, ProblemError, raise_faults
from ringmaster.flows.batch.run_options import ProfilingMode
from ringmaster.flows.commands.parameters import internal, seconds_until
from ringmaster.flows.commands.planning import read_plan, read_problem
from ringmaster.flows.commands.running import estimate
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import AsJson, announce, error_console, output_console, print_lines, print_outcome
from ringmaster.flows.settings import resolve_path

if TYPE_CHECKING:
    from ringmaster.tasks.planning import Plan, Problem
    from ringmaster.tasks.planning.problem_changes import ProblemChange

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
        ProfilingMode, typer.Option(help="Predict unknown runtimes of a batch, as a run does, or measure them.")
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
    from ringmaster.features.what_if import gains
    from ringmaster.features.what_if.answers import answer_questions

    more = len(add_devices or ())
    every: list[ProblemChange] = [gains.MoreDevices(num_devices=num, device_type=kind) for num, kind in counts[:more]]
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


def _devices(text: str) -> tuple[int, str]:
    """Returns the number and the type of devices."""
    if result := DEVICES.fullmatch(text):
        return int(result[1]), result[2] or ""
    raise InputError([f"{text!r} is not a valid number of devices. To fix: give a number from 1 on, or 2:TYPE"])


def _made(problem: Problem, limits: dict[str, Any]) -> Plan:
    from ringmaster.tasks.planning.fusion import choose_groups

    announce("planning; --plan takes a plan that is there already")
    return choose_groups(problem, **limits).fused_plan


def _of_batch(file: Path, plan: Path | None, *, profiles: ProfilingMode, seed: int) -> tuple[Problem, Plan, bool]:
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


COMMANDS = {"Plan": (whatif,)}
