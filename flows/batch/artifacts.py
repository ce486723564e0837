"""Artifacts of a batch's flow run: its plan, the table of its decisions, its cost, and links to MLflow's pages."""

import base64
import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for

from ringmaster.errors import LedgerError
from ringmaster.flows.batch.embedded_prefect import has_lasting_server
from ringmaster.flows.batch.flow_runs import current_flow_run, for_prefect
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.job_forms import job_forms
from ringmaster.flows.reports.plan_report import interval_text
from ringmaster.flows.reports.progress import describe
from ringmaster.model_lineage import model_pages
from ringmaster.tasks.background_worker import CoalescingWorker
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import ExecutionEvent, GangReport, JobEnded, PlanUpdate, Prediction
from ringmaster.tasks.planning import Plan, Problem, gantt
from ringmaster.tasks.planning.durations import compared_with_plan, counted, practice_text
from ringmaster.tasks.planning.fusion import Fusion
from ringmaster.tasks.planning.objectives import HOUR_S
from ringmaster.tasks.planning.series_bands import power_sentence
from ringmaster.tasks.planning.term_features import worth_in_words
from ringmaster.tasks.recording.async_recorder import AsyncRecorder
from ringmaster.tasks.recording.record_hooks import plan_sentences
from ringmaster.tasks.timeline.prefect_artifacts import DRAW_EVERY_S, tolerant, write_artifact
from ringmaster.techniques.processes.gang_events import EvaluationReported
from ringmaster.text import markdown, markdown_table

CONTROL = "control-jobs/control-jobs"
VERSION = re.compile(r"models:/([^/@]+)/(\d+)")


def flow_run_page() -> str | None:
    """Returns the URL of the current flow run in Prefect's UI; None outside a flow run or without a lasting server."""
    run = current_flow_run()
    return url_for("flow-run", obj_id=run.id) if run is not None and has_lasting_server() else None


def show_control(batch: str, jobs: Sequence[str]) -> None:
    """Links to the form that controls the jobs of a batch of a pool, with its fields filled in.

    batch: the id of the batch.
    jobs: the names of its jobs.
    """
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(CONTROL)
        except ObjectNotFound:  # a Prefect server of one's own, without it
            return
    if (page := url_for("deployment", obj_id=deployment.id)) is not None:
        text = control_markdown(batch, jobs, form=f"{page}/run")
        create_markdown_artifact(key="control", markdown=text, description="Forms that change its jobs")


def control_markdown(batch: str, jobs: Sequence[str], *, form: str) -> str:
    """Returns links to the form at the address `form`, for the whole batch and for each job."""

    def link(text: str, what: Mapping[str, Any]) -> str:
        return model_pages.link(text, f"{form}?parameters={quote(json.dumps({'batch': batch, 'what': what}))}")

    def row(name: str, own: Sequence[str]) -> list[str]:
        links = [each for section in job_forms() for each in section.links(own).items()]
        return [name, *(text and link(text, fields) for text, fields in links)]

    whole = row("**the whole batch**", ())
    rows = [whole, *(row(markdown(job), [job]) for job in jobs[:MAX_CONTROLLED])]
    more = [f"{len(jobs) - MAX_CONTROLLED} more jobs have no row: type their names into a form."]
    return "\n".join(
        [
            "Each link opens a form. Nothing happens before it is submitted.",
            *("", markdown_table(["job", *[""] * (len(whole) - 1)], rows)),
            *(["", *more] if len(jobs) > MAX_CONTROLLED else []),
        ]
    )


def show_answers(lines: Sequence[str], pages: Mapping[str, str | None]) -> None:
    """Shows what was done with the jobs of batches. pages: of the batches' flow runs, by batch."""
    links = [model_pages.link(f"the page of {batch}", page) for batch, page in pages.items() if page]
    text = "\n\n".join([*map(markdown, lines), *links])
    for_prefect(lambda: create_markdown_artifact(key="answer", markdown=text, description="What was done"))


def show_records(recorder: AsyncRecorder, result: BatchResult, *, notice: Callable[[str], None]) -> None:
    """Shows the MLflow pages of the batch and its models among the flow run's artifacts; only a server has pages."""
    run_id, server = recorder.run_of(), recorder.ledger.tracking_uri
    if run_id is None or current_flow_run() is None or not server.startswith("http"):
        return
    try:
        path = recorder.ledger.ui_links(run_id=run_id)["run"]
    except LedgerError:  # MLflow is away: incomplete records are reported elsewhere
        return
    text = records_markdown(result, server=server, run_path=path)
    message = "Where MLflow has the batch and its models"
    for_prefect(lambda: create_markdown_artifact(key="mlflow", markdown=text, description=message), notice)


def records_markdown(result: BatchResult, *, server: str, run_path: str) -> str:
    """Returns links to the batch's run, at `run_path` in MLflow's UI, and to the page of each model."""
    root = _address(server)
    lines = [
        f"# {markdown(result.batch)} in MLflow",
        "",
        model_pages.link("the batch: plan, metrics and files", f"{root}/{run_path}"),
    ]
    models = []
    for job in result.jobs:
        if match := VERSION.fullmatch(job["model_uri"] or ""):
            name, version = match.groups()
            page = model_pages.link(
                f"{name} version {version}", f"{root}/{model_pages.model_version_path(name, version)}"
            )
            models.append((markdown(job["name"]), page))
    return "\n".join([*lines, *(["", markdown_table(("job", "model"), models)] if models else [])]) + "\n"


def _address(server: str) -> str:
    """Returns a server's URL as a page may show it, without credentials."""
    parts = urlsplit(server)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


MAX_CONTROLLED = 100  # jobs with links of their own
MAX_DECISIONS = 1000  # rows that a page still shows; the flow run's log has all

Row = Mapping[str, Any]


class DecisionArtifact:
    """A table of the decisions and their reasons that grows while the batch runs.

    clock: monotonic seconds.
    write: creates the artifact with these rows and returns its id, or updates the artifact of that id.
    in_background: wraps the update in a background worker, so that nothing waits for it.
    """

    PURPOSE = "the table of decisions in Prefect"

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[UUID | None, list[Row]], UUID] | None = None,
        in_background: Callable[[Callable[[], None]], CoalescingWorker] = partial(
            CoalescingWorker, name="decisions artifact"
        ),
    ) -> None:
        self._rows: deque[Row] = deque(maxlen=MAX_DECISIONS)
        self._clock, self._write = clock, write or _write
        self._began_s = self._written_s = clock()
        self._artifact: UUID | None = None
        self._behind = in_background(self._update)

    def listen(self, event: ExecutionEvent) -> None:
        """Notes an executor's decision; updates the table every DRAW_EVERY_S, and whenever a job ends."""
        text, _ = describe(event)
        if not text or (isinstance(event, GangReport) and isinstance(event.event, EvaluationReported)):
            return  # evaluations are in the log, and no decisions
        now_s = self._clock()
        self._rows.append({"after": f"{now_s - self._began_s:.1f} s", "what": text})
        if isinstance(event, JobEnded) or now_s - self._written_s >= DRAW_EVERY_S:
            self._written_s = now_s
            self._behind.ask()

    def close(self) -> None:
        """Writes all rows."""
        self._behind.ask()
        self._behind.close()

    @tolerant("the table of decisions")
    def _update(self) -> None:
        self._artifact = self._write(self._artifact, list(self._rows))


class PlanArtifact:
    """The artifact with the first plan that a pool has for a batch.

    A pool plans its batches together. Where a batch shares the plan with others, its part has no bound, so nothing is
    proved about what more devices would gain it.

    batch: the name of the batch.
    device: the kind of the pool's devices.
    show: creates the artifact, as `show_plan`.
    """

    PURPOSE = "the plan in Prefect"

    def __init__(self, batch: str, *, device: str, show: Callable[..., None] | None = None) -> None:
        self._batch, self._device, self._show, self._is_shown = batch, device, show or show_plan, False

    def listen(self, event: ExecutionEvent) -> None:
        """Creates the artifact at the first plan."""
        if isinstance(event, PlanUpdate) and not self._is_shown:
            self._is_shown = True
            plan, problem = replace(event.plan, problem_name=self._batch), replace(event.problem, name=self._batch)
            with tolerant("the plan"):
                self._show(plan, problem, device=self._device)


def show_plan(
    plan: Plan, problem: Problem, prediction: Prediction | None = None, *, device: str, is_measured: bool = False
) -> None:
    """Creates the artifact with the plan, its Gantt chart, its likely makespan, and what more devices would gain.

    device: the kind of the cluster's devices. is_measured: whether all runtimes were measured.
    """
    gains = plan_sentences(plan, problem, device=device) if plan.best_bound_s is not None else []
    gains += worth_in_words(problem)
    page = plan_markdown(plan, problem, prediction, gains=gains, is_measured=is_measured)
    create_markdown_artifact(key="plan", markdown=page, description="The plan, as a Gantt chart")


def show_groups(fusion: Fusion, problem: Problem) -> None:
    """Creates the artifact with the groups of jobs that are trained together, and what they save."""
    create_markdown_artifact(
        key="groups",
        markdown=f"{markdown(fusion.in_words())}\n\n{plan_markdown(fusion.fused_plan, problem)}",
        description="Which jobs are trained together, and what that saves",
    )


def plan_markdown(
    plan: Plan,
    problem: Problem,
    prediction: Prediction | None = None,
    *,
    gains: Sequence[str] = (),
    is_measured: bool = False,
) -> str:
    """Returns the plan as markdown.

    gains: what more devices would gain, in sentences.
    is_measured: whether all runtimes were measured. A lower bound that follows from predictions is left out.

    The Gantt chart is an SVG in a data URI, which Prefect's UI draws; the UI strips inline SVG.
    """
    picture = base64.b64encode(gantt.render_svg(plan, problem).encode()).decode()
    bound = f", lower bound {plan.best_bound_s:.1f} s" if is_measured and plan.best_bound_s is not None else ""
    gap = "" if plan.gap is None else f", at most {plan.gap:.2%} above the best plan with these runtimes"
    how = "measured" if is_measured else "predicted"
    gain_lines = [f"- {markdown(line)}" for line in gains]
    size = f"{counted(len(problem.jobs), 'job')} on {counted(problem.num_devices, 'device')}"
    lines = [
        f"# Plan of {markdown(problem.name)}",
        "",
        f"Planned from {how} runtimes: **{plan.makespan_s:.1f} s**{bound}{gap}; {size}, "
        f"{counted(plan.num_switches, 'switch', 'switches')}. Found by {markdown(plan.method)}.",
        *(["", f"Likely {interval_text(prediction)}."] if prediction is not None else []),
        *(["", f"Minimised: {markdown(plan.objective)}, **{plan.value:.2f}**."] if plan.value is not None else []),
        *(["", f"{markdown(power)}."] if (power := power_sentence(problem)) else []),
        "",
        f"![Gantt chart](data:image/svg+xml;base64,{picture})",
        "",
        *(["## What more devices would gain", "", *gain_lines, "", "## Segments", ""] if gain_lines else []),
    ]
    rows = []
    for segment in plan.segments:
        option = problem.job(segment.job).options[segment.option]
        config = " ".join(f"{key}={value}" for key, value in option.config.items())
        devices = " ".join(f"{node}:{i}" for node, ids in segment.devices for i in ids)
        names = map(markdown, (segment.job, option.technique, config, devices))
        rows.append((*names, f"{segment.start_s:.1f} s", f"{segment.end_s:.1f} s"))
    columns = ("job", "technique", "config", "devices", "start", "end")
    return "\n".join([*lines, markdown_table(columns, rows, num_figures=2)])


def show_cost(batch: Batch, result: BatchResult) -> None:
    """Creates the artifact with the batch's cost, its plan, and the time of training one job after another."""
    create_markdown_artifact(
        key="cost", markdown=cost_markdown(batch, result), description="Cost, compared with the plan"
    )


def cost_markdown(batch: Batch, result: BatchResult) -> str:
    """Returns the device-hours and their price, by job and in total, and the actual and the planned duration."""
    hours = {job["name"]: sum(s["device_s"] for s in job["segments"]) / HOUR_S for job in result.jobs}
    price, total = batch.price_per_device_hour, sum(hours.values())
    paid = "" if price == 1 else f", at {price:g} an hour: **{total * price:.4g}**"
    lines = [f"# What {markdown(result.batch)} cost", "", f"**{total:.4g} device-hours**{paid}.", ""]
    planned_s, practice_s = result.plan["makespan_s"], result.current_practice_s
    if planned_s is not None:
        than = compared_with_plan(result.makespan_s, planned_s, is_whole=result.is_whole)
        lines += [f"It took {result.makespan_s:.1f} s, {than} ({planned_s:.1f} s)."]
        if practice_s is not None:
            lines += [f"{practice_text(practice_s, planned_s=planned_s, are_measured=result.is_measured)}."]
    lines += [f"Before it, {result.num_trials} trials took {result.profiling_s:.1f} s.", ""]
    rows = [(markdown(name), f"{spent:.4g}", f"{spent * price:.4g}") for name, spent in hours.items()]
    return "\n".join([*lines, markdown_table(("job", "device-hours", "cost"), rows, num_figures=2)]) + "\n"


def _write(artifact: UUID | None, rows: list[Row]) -> UUID:
    table, description = [dict(row) for row in rows], "What was decided, and why"
    create = partial(create_table_artifact, table=table, key="decisions", description=description)
    return write_artifact(artifact, json.dumps(rows), create=create)
