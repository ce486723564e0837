"""Prefect tasks for planning, which store the plan as a markdown artifact with a Gantt chart."""

from __future__ import annotations

import base64
from typing import Any

from prefect import State, Task, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import TaskRun

from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.charts import gantt
from ringmaster.tasks.planning.groups.fusion import Fusion, choose_groups
from ringmaster.tasks.planning.plans.checked import checked_plan


def _may_go_well_again(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether a second attempt can help: it cannot where deadlines are infeasible."""
    return not isinstance(state.result(raise_on_failure=False), ProblemError)


@task(name="plan", retries=1, retry_condition_fn=_may_go_well_again, cache_policy=NO_CACHE, persist_result=False)
def plan_task(
    problem: Problem, *, time_limit_s: float, seed: int, objective: str = "makespan", start: Plan | None = None
) -> Plan:
    """Solves the problem, checks the plan with the independent verifier, and shows the plan in Prefect's UI.

    start: a plan to reuse, as in `checked_plan`.

    Raises ProblemError where no plan meets the deadlines.
    """
    plan = checked_plan(problem, time_limit_s=time_limit_s, seed=seed, objective=objective, start=start)
    create_markdown_artifact(
        key="plan", markdown=plan_markdown(plan, problem), description="The plan, as a Gantt chart"
    )
    return plan


@task(
    name="choose groups",
    retries=1,
    retry_condition_fn=_may_go_well_again,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def choose_groups_task(problem: Problem, *, time_limit_s: float, seed: int, objective: str = "makespan") -> Fusion:
    """Chooses which jobs are trained together, and shows the groups and what they save in Prefect's UI.

    Raises ProblemError where no plan meets the deadlines.
    """
    fusion = choose_groups(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    create_markdown_artifact(
        key="groups",
        markdown=f"{fusion.in_words()}\n\n{plan_markdown(fusion.together, problem)}",
        description="Which jobs are trained together, and what that saves",
    )
    return fusion


def plan_markdown(plan: Plan, problem: Problem) -> str:
    """Returns the plan as markdown.

    The Gantt chart is an SVG in a data URI, which Prefect's UI draws; the UI strips inline SVG.
    """
    picture = base64.b64encode(gantt.render_svg(plan, problem).encode()).decode()
    bound = "-" if plan.lower_bound_s is None else f"{plan.lower_bound_s:.1f} s"
    gap = "-" if plan.gap is None else f"{plan.gap:.2%}"
    lines = [
        f"# Plan of {problem.name}",
        "",
        f"Makespan **{plan.makespan_s:.1f} s**, lower bound {bound}, gap {gap}; {len(problem.jobs)} jobs on "
        f"{problem.num_devices} devices, {plan.num_switches} switches. Found by {plan.method}.",
        *(["", f"Minimised: {plan.objective}, **{plan.value:.2f}**."] if plan.value is not None else []),
        "",
        f"![Gantt chart](data:image/svg+xml;base64,{picture})",
        "",
        "| job | technique | config | devices | start | end |",
        "| --- | --- | --- | --- | ---: | ---: |",
    ]
    for segment in plan.segments:
        option = problem.job(segment.job).options[segment.option]
        config = " ".join(f"{key}={value}" for key, value in option.config.items())
        devices = " ".join(f"{node}:{i}" for node, ids in segment.devices for i in ids)
        times = f"{segment.start_s:.1f} s | {segment.end_s:.1f} s"
        lines.append(f"| {segment.job} | {option.technique} | {config} | {devices} | {times} |")
    return "\n".join(lines)
