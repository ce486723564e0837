"""The result of a batch, which `run --json` prints, and its records: in MLflow, and in the flow run's log."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prefect import get_run_logger
from prefect.context import FlowRunContext

from ringmaster.codec import to_json
from ringmaster.flows.reports.progress import View, describe
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import ExecutionEvent, JobEnded, Listeners, Prediction, predictions_in
from ringmaster.tasks.execution.forecast import job_error
from ringmaster.tasks.execution.job_table import added_jobs
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans import list_scheduling
from ringmaster.tasks.planning.problems.problem_parts import MAX_DEVICES
from ringmaster.tasks.profiling.preflight_runs import ReportFailure
from ringmaster.tasks.profiling.search import refusal_line
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.recording.async_recorder import AsyncRecorder, PoolRecorder
from ringmaster.tasks.recording.record_hooks import record_hooks
from ringmaster.tasks.storage.fact_keys import (
    FIRST_PREDICTION,
    FUSION,
    IS_MEASURED,
    NEWEST_PREDICTION,
    PROFILING,
    SINCE,
    STARTED,
)
from ringmaster.tasks.storage.journal import ENDED, GroupDecision, JobRecord, JobStatus, Journal, SegmentRecord
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.gang_events import NUM_ROWS
from ringmaster.techniques.profiles import PREDICTED
from ringmaster.text import printable


@dataclass(frozen=True, kw_only=True)
class ProfilingCost:
    """The number of trials of jobs, and the seconds of their profiling."""

    num_trials: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result of a batch.

    Attributes:
        batch: name of the batch.
        status: "done", "failed" (some jobs failed), "cancelled" (some were cancelled, and none has failed), or
            "interrupted" (some jobs have not ended). All but the first can be resumed.
        plan: the first plan since the batch was started or resumed: its makespan, lower bound and gap, its objective
            and value.
        makespan_s: seconds from the first segment's start to the last one's end, since the batch was started or
            resumed.
        objective, value: what was minimised, and its actual value, in seconds or in the currency of the devices' price.
        current_practice_s: seconds to train one job after another, each on all devices, by the same profiles.
        idle_s: the longest time that a device waited between two segments.
        num_trials, profiling_s: number and duration of the trials.
        jobs: the jobs' rows.
        faults: what could not be recorded.
        fusion: which jobs were trained together, with the makespans of that plan and of the plan with each job alone;
            None if there were no candidates for groups.
        prediction: the first prediction of the ends of the batch and its jobs, since it was started or resumed.
        is_measured: whether all runtimes of the first plan were measured, so that its lower bound proves something.
        features: what features add, by their keys, which the JSON object has among the others.
    """

    batch: str
    status: str
    plan: Mapping[str, Any]
    makespan_s: float
    objective: str
    value: float
    current_practice_s: float | None
    idle_s: float
    num_trials: int
    profiling_s: float
    jobs: tuple[Mapping[str, Any], ...]
    faults: tuple[str, ...] = ()
    fusion: GroupDecision | None = None
    prediction: Prediction | None = None
    is_measured: bool = False
    features: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object that `run --json` prints."""
        data: dict[str, Any] = to_json(self)
        of_features: dict[str, Any] = data.pop("features")
        return data | of_features

    def summary(self) -> str:
        """Returns one line: "2 of 4 jobs are done; failed: a (its loss is NaN); cancelled: b"."""
        others: dict[str, list[str]] = {}
        for job in self.jobs:
            if job["status"] != JobStatus.DONE:
                why = f" ({job['message']})" if job["message"] else ""
                others.setdefault(job["status"], []).append(job["name"] + why)
        num_done = sum(job["status"] == JobStatus.DONE for job in self.jobs)
        parts = [f"{num_done} of {len(self.jobs)} jobs are done"]
        return printable("; ".join(parts + [f"{status}: {', '.join(names)}" for status, names in others.items()]))

    @property
    def is_whole(self) -> bool:
        """Whether all jobs are done, so that the makespan compares with the planned one."""
        return all(job["status"] == JobStatus.DONE for job in self.jobs)

    @property
    def objective_value(self) -> float | None:
        """The value where it is not the makespan, else None."""
        return None if objective_by_name(self.objective).only_last_end else self.value

    @property
    def exit_code(self) -> int:
        """0 if all jobs are done and recorded, else 1."""
        return 0 if self.status == "done" and not self.faults else 1


def are_measured(profiles: Mapping[str, Sequence[Profile]]) -> bool:
    """Returns whether all profiles of all jobs were measured, if also under another load."""
    return all(profile.source != PREDICTED for options in profiles.values() for profile in options)


def collect(
    batch: Batch,
    journal: Journal,
    records: Mapping[str, JobRecord],
    refused: Callable[[str], list[dict[str, Any]]],
) -> BatchResult:
    """Returns the result of a batch since it was started or resumed, with the segments and plans in its journal.

    records: the records of its jobs.
    refused: returns the techniques and configs that were refused before any trial, with reasons, by job name.
    """
    since_s, began_s = float(journal.get(SINCE)), float(journal.get(STARTED))
    profiling = journal.read(PROFILING, ProfilingCost) or ProfilingCost()
    batch = replace(batch, jobs=(*batch.jobs, *added_jobs(records)))
    segments = [segment for segment in journal.segments() if segment.started_s >= since_s]
    plan, problem = _first_plan(journal, since_s=since_s)
    fusion, prediction = journal.read(FUSION, GroupDecision), None
    figures: dict[str, Any] = dict.fromkeys(("makespan_s", "lower_bound_s", "gap", "objective", "value"))
    practice_s = None
    if plan is not None and problem is not None:
        figures = {"makespan_s": plan.makespan_s, "lower_bound_s": plan.best_bound_s, "gap": plan.gap}
        value = plan.makespan_s if plan.value is None else plan.value
        figures |= {"objective": plan.objective, "value": value}
        practice_s = fusion.practice_s if fusion else list_scheduling.current_practice(problem).makespan_s
        prediction, newest = predictions_in({key: journal.get(key) for key in (FIRST_PREDICTION, NEWEST_PREDICTION)})
        if prediction is not None and newest is not None:
            prediction = replace(prediction, run_load=newest.run_load)
    if fusion and plan is not None:
        figures |= _bound_over_groups(plan, fusion)
    of_features: dict[str, Any] = {}
    for hook in record_hooks():
        of_features |= hook.batch_results(batch, journal, since_s=since_s)
    value = of_features.pop("value", None)
    return BatchResult(
        batch=batch.name,
        status=_status({records[job.name].status for job in batch.jobs}),
        plan=figures,
        makespan_s=_span_s(segments),
        objective=batch.objective,
        value=_value(batch, segments, problem) if value is None else value,
        current_practice_s=practice_s,
        idle_s=longest_idle_s(segments),
        num_trials=profiling.num_trials,
        profiling_s=profiling.seconds,
        jobs=tuple(
            _job_row(batch, records[job.name], journal.segments(job.name), since_s=since_s, began_s=began_s)
            | {"refused": refused(job.name)}
            for job in batch.jobs
        ),
        fusion=fusion,
        prediction=prediction,
        is_measured=bool(journal.get(IS_MEASURED, False)),
        features=of_features,
    )


def _bound_over_groups(plan: Plan, fusion: GroupDecision) -> dict[str, float | None]:
    """Returns the bound over all divisions into groups; the plan's own bound holds for the chosen division only."""
    lower_s = fusion.lower_bound_s
    if plan.value is not None or plan.best_bound_s is None or not lower_s:
        return {}
    lower_s = min(lower_s, plan.best_bound_s)
    return {"lower_bound_s": lower_s, "gap": max(0.0, plan.makespan_s / lower_s - 1)}


def _status(statuses: Collection[str]) -> str:
    """Returns the status of a batch from those of its jobs."""
    if not set(statuses) <= set(ENDED):
        return "interrupted"
    return next((status for status in (JobStatus.FAILED, JobStatus.CANCELLED) if status in statuses), JobStatus.DONE)


def longest_idle_s(segments: Sequence[SegmentRecord]) -> float:
    """Returns the longest time that a device was idle between two of its segments."""
    longest_s = 0.0
    ended_s: dict[str, float] = {}
    for segment in segments:
        for device in segment.spec.devices:
            if device in ended_s:
                longest_s = max(longest_s, segment.started_s - ended_s[device])
            ended_s[device] = segment.ended_s or segment.started_s
    return longest_s


def _first_plan(journal: Journal, *, since_s: float) -> tuple[Plan | None, Problem | None]:
    plans = journal.plans(since_s=since_s)
    if not plans:
        return None, None
    return Plan.from_json(plans[0]["plan"]), Problem.from_json(plans[0]["problem"])


def _span_s(segments: Sequence[SegmentRecord]) -> float:
    ends = [segment.ended_s for segment in segments if segment.ended_s is not None]
    # Several processes may have recorded them, between which the clock was set back.
    return max(0.0, max(ends) - min(segment.started_s for segment in segments)) if ends else 0.0


def _value(batch: Batch, segments: Sequence[SegmentRecord], planned: Problem | None) -> float:
    """Returns the value of the batch's objective, from its segments. All devices have the same price.

    planned: the problem of the first plan, which has the runtimes of the jobs.
    """
    ended = [(segment, segment.ended_s) for segment in segments if segment.ended_s is not None]
    if not ended:
        return 0.0
    began_s = min(segment.started_s for segment in segments)
    ends_s = {job: end_s - began_s for segment, end_s in ended for job in (segment.job, *segment.members)}
    held = [("any", segment.seconds * len(segment.spec.devices)) for segment, _ in ended]
    rows = {name: job.options for job in planned.jobs for name in (job.id, *job.members)} if planned else {}
    unknown = (Option("any", 1, 1.0),)
    names = {job.name for job in batch.jobs}
    requested = tuple(
        PlanningJob(
            job.name,
            tuple(Option("any", o.num_devices, o.whole_s) for o in rows.get(job.name, unknown) if not o.jobs),
            after=tuple(parent for parent in job.parents if parent in names),
        )
        for job in batch.jobs
    )
    num_devices = min(planned.num_devices, MAX_DEVICES) if planned else 1
    terms = replace(batch.terms, features=())
    problem = terms.on(Problem(batch.name, (PlanningNode("any", num_devices),), requested))
    # A pool plans the jobs of a batch without users as those of one user.
    users = {name: job.user for job in planned.jobs for name in (job.id, *job.members)} if planned else {}
    problem = replace(problem, jobs=tuple(replace(job, user=users.get(job.id) or job.user) for job in problem.jobs))
    return objective_by_name(batch.objective).coefficients(problem).value(ends_s, held)


def _device_s(segment: SegmentRecord) -> float:
    """Returns one job's share of the device-seconds of its gang."""
    return float(segment.seconds * segment.spec.num_devices / segment.num_jobs)


def _job_row(
    batch: Batch, record: JobRecord, started: Sequence[SegmentRecord], *, since_s: float, began_s: float
) -> dict[str, Any]:
    """Returns a job's row, with its deadline and its last segment's end, from the batch's start, where it has one.

    since_s, began_s: when the batch was started or resumed, and when it was first started.
    """
    ended_s = max((segment.ended_s for segment in started if segment.ended_s is not None), default=None)
    segments = [
        {
            "technique": segment.spec.technique,
            "config": dict(segment.spec.config),
            "num_devices": segment.spec.num_devices,
            "devices": list(segment.spec.devices),
            "first_step": segment.spec.first_step if segment.result.first_step is None else segment.result.first_step,
            "last_step": segment.result.step,
            "status": segment.result.status or "lost",
            "seconds": segment.seconds,
            "device_s": _device_s(segment),
        }
        for segment in started
    ]
    row = {
        "name": record.name,
        "status": record.status.value,
        "message": record.message,
        "num_steps": record.step,
        "metrics": record.metrics,
        NUM_ROWS: record.num_rows,
        "compared": [*record.compared],
        "segments": segments,
        "end_s": ended_s if ended_s is not None and ended_s >= since_s and record.status in ENDED else None,
        "model_dir": record.model_dir,
        "model_uri": record.model_uri,
    }
    if record.name in batch.deadlines_s:
        after_s = ended_s - began_s if ended_s is not None and record.status == JobStatus.DONE else None
        row |= {"deadline_s": batch.deadlines_s[record.name], "ended_s": after_s}
    return row


def job_rows(result: BatchResult) -> list[dict[str, Any]]:
    """Returns a table with a row for each job."""
    return [
        {
            "job": job["name"],
            "status": job["status"],
            "technique": ", ".join(dict.fromkeys(s["technique"] for s in job["segments"])),
            "devices": ", ".join(dict.fromkeys(str(s["num_devices"]) for s in job["segments"])),
            "reason": printable(job["message"]),
            "steps": job["num_steps"],
            "seconds": round(sum(s["seconds"] for s in job["segments"]), 1),
            **{f"held-out {key}": round(value, 4) for key, value in job["metrics"].items()},
            "held-out rows": job.get(NUM_ROWS),
        }
        for job in result.jobs
    ]


def finish_records(recorder: AsyncRecorder, result: BatchResult) -> None:
    """Closes the batch's run in MLflow with its result."""
    figures = {
        "makespan_s": result.makespan_s,
        "planned_makespan_s": result.plan["makespan_s"],
        "current_practice_s": result.current_practice_s,
        "objective_value": result.objective_value,
        "num_trials": float(result.num_trials),
        "profiling_s": result.profiling_s,
    }
    if (prediction := result.prediction) is not None:
        figures |= {"predicted_makespan_s": prediction.makespan_s, "predicted_low_s": prediction.low_s}
        figures |= {"predicted_high_s": prediction.high_s, "machine_load": prediction.load}
        figures |= {"run_load": prediction.run_load}
        if not isinstance(recorder, PoolRecorder):  # errors under other load do not hold for a batch alone
            figures |= {"prediction_spread": prediction.spread, "uncorrected_makespan_s": prediction.uncorrected_s}
            ends_s = {job["name"]: job["end_s"] for job in result.jobs if job["end_s"] is not None}
            own = job_error(prediction, makespan_s=result.makespan_s, ends_s=ends_s)
            figures |= {"prediction_job_error": own}
    for hook in record_hooks():
        figures |= hook.batch_metrics(result.features)
    status = {"done": "FINISHED", "failed": "FAILED"}.get(result.status, "KILLED")
    metrics = {key: value for key, value in figures.items() if value is not None}
    recorder.finish(status=status, metrics=metrics, table=[to_json(row) for row in job_rows(result)])


def log_decision(event: ExecutionEvent) -> None:
    """Logs an executor's event with its reason in the flow run's log; a failed job is logged as an error."""
    text, _ = describe(event)
    if text:
        has_failed = isinstance(event, JobEnded) and event.record.status == JobStatus.FAILED
        get_run_logger().log(logging.ERROR if has_failed else logging.INFO, text)


def failure(job: str, why: str) -> JobEnded:
    """Returns the event of a job that failed before any executor had it."""
    return JobEnded(record=JobRecord(name=job, status=JobStatus.FAILED, message=why))


def failure_reporter(view: View, *, but: Iterable[str] = ()) -> ReportFailure:
    """Returns a function that reports a failed job once, at once, by `view` and in the flow run's log.

    but: jobs that have ended before and are not reported.
    """
    listeners, reported = Listeners([view.listen, log_decision]), set(but)

    def report(job: str, why: str) -> None:
        if job not in reported:
            reported.add(job)
            listeners.notify(failure(job, why))

    return report


def report_refusals(profiled: ProfilingResult, *, view: View) -> None:
    """Logs which techniques were refused, and why, in the flow run's log; shows it on the terminal with --verbose."""
    if line := refusal_line({name: preflight.refusals for name, preflight in profiled.preflights.items()}):
        view.detail(line)
        if FlowRunContext.get() is not None:
            get_run_logger().info(printable(line))
