"""Batches that are not trained: profiled alone, or planned to estimate their end, their devices and their cost."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import plan_markdown
from ringmaster.flows.batch.batch_input import BatchInput, as_batch
from ringmaster.flows.batch.context import NodeContext, open_node_context, profiled_at
from ringmaster.flows.batch.local_run import PLANNING_WORK_S
from ringmaster.flows.batch.result import are_measured, report_refusals
from ringmaster.flows.batch.run_folder import folder_to_resume, resumed_batch
from ringmaster.flows.batch.run_options import ProfilingMode
from ringmaster.flows.caller import Caller
from ringmaster.flows.dated_runs import stamped_folder
from ringmaster.flows.pool.batch_requests import check_terms
from ringmaster.flows.pool.own_node import healthy
from ringmaster.flows.pool.profiling import keeping_a_node, profile_on_pool, serving
from ringmaster.flows.reports.plan_report import interval_text
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parent_rules import with_orphans
from ringmaster.tasks.batch.placement import check_placement
from ringmaster.tasks.cluster import Cluster, kind_of
from ringmaster.tasks.control.batch_terms import ALONE, ActiveBatch, combined_terms, past_use
from ringmaster.tasks.control.requests import Requests
from ringmaster.tasks.execution.execution_events import Prediction
from ringmaster.tasks.execution.forecast import ForecastConditions, predict_plan
from ringmaster.tasks.execution.job_table import added_jobs, jobs_left
from ringmaster.tasks.execution.steering import first_goals
from ringmaster.tasks.planning import Plan, Problem, gantt
from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.planning.fusion import Fusion, checked_fusion
from ringmaster.tasks.planning.objectives import (
    HOUR_S,
    PlanningTerms,
    plan_giving_up_bounds,
    plan_giving_up_deadlines,
    without_deadlines,
)
from ringmaster.tasks.planning.series_bands import power_sentence
from ringmaster.tasks.planning.term_features import DeviceUse
from ringmaster.tasks.pool.active_batches import with_features_of_pool
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.profiling.stage import ProfilingPolicy, ProfilingResult, profile_jobs
from ringmaster.tasks.recording.record_hooks import plan_sentences
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import BATCH, STARTED, TRIALS
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.profiles import PREDICTED
from ringmaster.text import enumerated, markdown


@dataclass(frozen=True, kw_only=True)
class WorkLeft:
    """What a run has left, by its journal.

    run: name of its folder.
    batch: the batch as it goes on, with the jobs that were added since.
    steps: the steps that are done, by the name of each job that is left.
    terms: those of its plans, with times from the epoch.
    past: what its jobs have held.
    """

    run: str
    batch: Batch
    steps: Mapping[str, int]
    terms: PlanningTerms
    past: Sequence[DeviceUse]

    @classmethod
    def of(cls, journal: Journal, *, run: str, batch: Batch | None = None) -> Self:
        """Returns what is left of a run that has begun. batch: as it is resumed; None for as it was begun."""
        batch, records = batch or Batch.from_json(journal.get(BATCH)), journal.jobs()
        jobs = (*batch.jobs, *added_jobs(records))
        names = tuple(job.name for job in batch.jobs)
        started_s = float(journal.get(STARTED) or time.time())
        active = ActiveBatch(id=ALONE, name=batch.name, job_names=names, given=batch.terms, started_s=started_s)
        active = active.with_changes(journal)
        return cls(
            run=run,
            batch=replace(batch, jobs=jobs),
            steps={
                name: records[name].step if name in records else 0
                for name in jobs_left(records, [job.name for job in jobs])
            },
            terms=combined_terms([active]),
            past=past_use(journal, [active]),
        )

    def of_profiles(self, profiled: ProfilingResult) -> ProfilingResult:
        """Returns the profiles of the jobs that still have steps to train."""
        jobs = [job for job in profiled.jobs if self.steps.get(job.name, job.total_steps) < job.total_steps]
        names = {job.name for job in jobs}
        groups = {
            name: tuple(each for each in group if {member.job for member in each.members} <= names)
            for name, group in profiled.groups.items()
            if name in names
        }
        faults = {name: fault for name, fault in profiled.faults.items() if name in names}
        return replace(profiled, jobs=tuple(jobs), groups=groups, faults=faults)

    def sentence(self) -> str:
        """Returns what is done, and from where the other jobs would continue."""
        num_jobs, begun = len(self.batch.jobs), {name: step for name, step in self.steps.items() if step}
        totals = {job.name: job.total_steps for job in self.batch.jobs}
        steps = [f"{name} at step {step} of {totals[name]}" for name, step in begun.items()]
        text = f"This is what run {self.run} has left: {num_jobs - len(self.steps)} of its {num_jobs} jobs have ended"
        return f"{text}{', ' if steps else ''}{enumerated(steps)}."


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The estimate of a batch.

    batch: name of the batch.
    made_s: when it was planned, in seconds since the epoch.
    num_trials: number of trials that were run for it.
    price_per_device_hour: price of the batch's devices.
    folder: folder with all results as files.
    problem, plan: the planning problem and the plan; None if no job can be trained.
    faults: why jobs cannot be trained, by job.
    unfit: the jobs whose own data, model or settings are at fault, not the devices.
    predicted: jobs that were planned with predicted step times.
    are_measured: whether all runtimes of the problem were measured.
    fused: a sentence about which jobs would be trained together, and what that saves.
    late: jobs whose deadlines no plan meets.
    gains: what more devices would gain, in sentences.
    prediction: the predicted ends of the batch and its jobs; on a pool, without other batches.
    num_other_jobs: number of jobs of other batches that the pool trains too, which the plan leaves out.
    left: what the run has left that would be resumed; None for a new run.
    """

    batch: str
    made_s: float
    num_trials: int
    price_per_device_hour: float
    folder: Path
    problem: Problem | None = None
    plan: Plan | None = None
    faults: Mapping[str, str]
    unfit: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ()
    are_measured: bool = False
    fused: str = ""
    late: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()
    prediction: Prediction | None = None
    num_other_jobs: int = 0
    left: WorkLeft | None = None

    @property
    def device_hours(self) -> float:
        """The device-hours for which the plan holds its devices."""
        segments = () if self.plan is None else self.plan.segments
        return sum((s.end_s - s.start_s) * sum(len(ids) for _, ids in s.devices) for s in segments) / HOUR_S

    @property
    def cost(self) -> float | None:
        """What the plan costs; None where prices are those of the hour, and the plan does not count them."""
        if self.plan is None or self.problem is None or not self.problem.has_series:
            return self.device_hours * self.price_per_device_hour
        return self.plan.value if self.plan.objective == "cost" else None

    @property
    def is_good(self) -> bool:
        """Whether every job can be trained, and in time."""
        return not self.faults and not self.late

    @property
    def exit_code(self) -> int:
        """0 if every job can be trained in time, 2 for a fault in the input, 1 if devices or time are short."""
        return 0 if self.is_good else 2 if self.unfit else 1

    def sentences(self) -> list[str]:
        """Returns the estimate in sentences, one a line."""
        return list(_sentences(self))

    def summary(self) -> str:
        """Returns what is wrong with it, in one line."""
        failed = [f"{job} cannot be trained ({fault})" for job, fault in self.faults.items()]
        return "; ".join(failed + [f"{job} would be late" for job in self.late])

    def markdown(self) -> str:
        """Returns a page for Prefect's UI: the estimate, the Gantt chart, and a row for each segment."""
        text = "\n".join(f"- {markdown(line)}" for line in self.sentences())
        if self.plan is None or self.problem is None:
            return f"# {markdown(self.batch)} cannot be planned\n\n{text}"
        page = plan_markdown(self.plan, self.problem, self.prediction, gains=self.gains, is_measured=self.are_measured)
        return f"{page}\n\n## Estimate\n\n{text}"

    def to_json(self) -> dict[str, Any]:
        """Returns what `run --dry-run --json` prints."""
        plan = self.plan
        figures = None
        if plan is not None:
            names = ("makespan_s", "gap", "objective", "value")
            figures = {name: getattr(plan, name) for name in names}
            figures |= {"lower_bound_s": plan.best_bound_s, "segments": plan.to_json()["segments"]}
        return {
            "batch": self.batch,
            "status": "planned" if self.is_good else "failed",
            "plan": figures,
            "device_hours": self.device_hours,
            "cost": self.cost,
            "ends_s": None if plan is None else self.made_s + plan.makespan_s,
            "prediction": None if self.prediction is None else to_json(self.prediction),
            "num_trials": self.num_trials,
            "predicted": list(self.predicted),
            "fused": self.fused,
            "late": list(self.late),
            "faults": dict(self.faults),
            "folder": str(self.folder),
            "resumed": None if self.left is None else {"run": self.left.run, "steps": dict(self.left.steps)},
        }


def dry_run(
    batch: Batch, *, profiles: ProfilingMode = "predict", seed: int = 0, is_resumed: bool = False, caller: Caller
) -> DryRun:
    """Plans a batch for this machine or, if it belongs to a pool, for an otherwise idle pool.

    profiles: "predict" plans on what is known and predicted, as a run would; "measure" tries the options of each job
        on the devices first.
    is_resumed: whether to plan what the newest run of the batch has left, as `run --resume` would.
    caller: shows the progress.

    Raises InputError if the requested devices do not exist, or if the run to resume is done or of a changed file.
    """
    pool = settings.checked_pool()
    policy = ProfilingPolicy.THOROUGH if profiles == "measure" else ProfilingPolicy.NEEDED
    if pool is None:
        folder = folder_to_resume(batch, settings.home()) if is_resumed else None
        with ExitStack() as stack:
            left, journal = None, None
            if folder is not None:
                journal = stack.enter_context(closing(Journal.of_file(folder / "journal.db")))
                left = WorkLeft.of(journal, run=folder.name, batch=resumed_batch(folder, batch))
                batch = left.batch
            node_context = stack.enter_context(open_node_context(batch, home=settings.home(), caller=caller))
            result = _here(node_context.with_models(journal), policy=policy, seed=seed, left=left)
    else:
        from ringmaster.flows.pool.follower import newest_run  # loads Prefect, which a plan of this machine need not

        with closing(Database(pool.database)) as database:
            left = None
            if is_resumed and (newest := newest_run(batch, database, settings.home())) is not None:
                left = WorkLeft.of(Journal(database, batch=newest[0]), run=newest[0])
            batch = batch if left is None else left.batch
            if left is None:
                check_terms(batch, database, notice=caller.view.notice)
            terms = with_features_of_pool(batch.terms if left is None else left.terms, database)
            profiled, cluster = _profile_on(database, batch, policy=policy, caller=caller)
            num_other_jobs = sum(len(each.jobs) for each in Submissions(database).unended())
        result = _planned(batch, profiled, cluster, seed=seed, num_others=num_other_jobs, left=left, terms=terms)
        result = _with_prediction(result, profiled, ForecastConditions())
    _write(result)
    return result


def _here(node_context: NodeContext, *, policy: ProfilingPolicy, seed: int, left: WorkLeft | None = None) -> DryRun:
    """Plans the batch for this machine as busy as it is, as a run would."""
    if left is None:
        kinds = {node.name: kind_of(node.devices) for node in node_context.cluster.nodes}
        check_placement(node_context.batch, nodes=kinds)
    profiled, load = _profile_here(node_context, policy=policy), node_context.load()
    profiled = profiled_at(profiled, load)
    batch = node_context.batch
    terms = batch.terms if left is None else left.terms
    result = _planned(batch, profiled, node_context.cluster, seed=seed, num_others=0, left=left, terms=terms)
    return _with_prediction(result, profiled, node_context.conditions(load))


def _with_prediction(dry_run: DryRun, profiled: ProfilingResult, conditions: ForecastConditions) -> DryRun:
    if dry_run.plan is None or dry_run.problem is None:
        return dry_run
    # In the plan, the options of a group follow those of the job that leads it.
    options = {job: (*own, *profiled.groups.get(job, ())) for job, own in profiled.profiles.items()}
    return replace(dry_run, prediction=predict_plan(dry_run.problem, dry_run.plan, options, conditions=conditions))


def _profile_here(node_context: NodeContext, *, policy: ProfilingPolicy) -> ProfilingResult:
    return profile_jobs(
        node_context.batch.jobs,
        environment=node_context.environment,
        cluster=node_context.cluster,
        profile_store=node_context.profile_store,
        notice=node_context.caller.view.notice,
        lend=node_context.lend,
        policy=policy,
        share=node_context.batch.profiling_share,
    )


def _profile_on(
    database: Database, batch: Batch, *, policy: ProfilingPolicy, caller: Caller
) -> tuple[ProfilingResult, Cluster]:
    """Returns the profiles for the pool's nodes, and those nodes."""
    key = f"dry-run-{uuid.uuid4().hex}"
    journal = Journal(database, batch=key)
    with keeping_a_node(Requests(database)):
        cluster = Cluster(nodes=tuple(healthy(node) for node in serving(batch, database, notice=caller.view.notice)))
        journal.put_all({BATCH: batch.to_json(), TRIALS: policy})
        try:
            return profile_on_pool(batch, key=key, database=database, caller=caller), cluster
        finally:
            journal.drop_facts()


def _planned(
    batch: Batch,
    profiled: ProfilingResult,
    cluster: Cluster,
    *,
    seed: int,
    num_others: int,
    left: WorkLeft | None,
    terms: PlanningTerms,
) -> DryRun:
    profiled = profiled if left is None else left.of_profiles(profiled)
    faults = with_orphans(profiled.jobs, profiled.faults)
    jobs = [job for job in profiled.jobs if job.name not in faults]
    result = DryRun(
        batch=batch.name,
        made_s=time.time(),
        num_trials=profiled.num_trials,
        price_per_device_hour=batch.price_per_device_hour,
        folder=stamped_folder(settings.home() / "plans" / batch.name),
        faults=faults,
        unfit=profiled.unfit,
        num_other_jobs=num_others,
        left=left,
    )
    if not jobs:
        return result
    goals = first_goals(jobs, known={})
    short = {search.name: goals[search.name] for job in jobs for search in job.searches()}
    jobs = [replace(job, num_steps=short.get(job.name, job.num_steps)) for job in jobs]
    steps_done = None if left is None else left.steps
    problem = planning_problem(
        jobs, profiled.profiles, cluster, name=batch.name, steps_done=steps_done, groups=profiled.groups
    )
    elapsed_s, past = (0.0, ()) if left is None else (time.time(), left.past)
    problem = terms.on(problem, elapsed_s=elapsed_s, past=lambda: past)
    made: list[Fusion] = []
    choose = partial(checked_fusion, work_s=PLANNING_WORK_S, seed=seed, objective=batch.terms.objective)

    def make_plan(problem: Problem) -> Plan:
        made.append(choose(problem))
        return made[-1].fused_plan

    giving_up = plan_giving_up_deadlines if left is None else plan_giving_up_bounds
    plan, late = giving_up(problem, make_plan)
    fused = next(fusion for fusion in made if fusion.fused_plan is plan).in_words() if problem.is_fused else ""
    options = {job: (*own, *profiled.groups.get(job, ())) for job, own in profiled.profiles.items()}
    rough = {s.job for s in plan.segments if options[s.job][s.option].source == PREDICTED}
    predicted = tuple(job.name for job in jobs if job.name in rough)
    gains = tuple(plan_sentences(plan, without_deadlines(problem, late), device=cluster.device_kind()))
    result = replace(result, are_measured=are_measured(options))
    return replace(result, problem=problem, plan=plan, predicted=predicted, fused=fused, late=late, gains=gains)


def _sentences(dry_run: DryRun) -> Iterator[str]:
    plan, problem = dry_run.plan, dry_run.problem
    if dry_run.left is not None:
        yield dry_run.left.sentence()
    if plan is not None and problem is not None:
        ends = datetime.fromtimestamp(dry_run.made_s + plan.makespan_s).astimezone()
        yield f"Started now it ends at {ends:%Y-%m-%d %H:%M:%S %Z}, after {seconds_text(plan.makespan_s)}."
        if dry_run.prediction is not None:
            yield f"Likely {interval_text(dry_run.prediction)}."
        price = f", at {dry_run.price_per_device_hour:g} an hour" if dry_run.price_per_device_hour != 1 else ""
        if problem.has_series and plan.value is not None:
            price = f"; {plan.objective} by the hour: {plan.value:.4g}"
        elif price:
            price += f": {dry_run.cost:.4g}"
        yield f"It costs {dry_run.device_hours:.3g} device-hours{price}."
        if (power := power_sentence(problem)) is not None:
            yield f"{power[0].upper()}{power[1:]}."
    measured = "1 trial was made for it" if dry_run.num_trials == 1 else f"{dry_run.num_trials} trials were made for it"
    yield f"{measured if dry_run.num_trials else 'Nothing was tried for it'}; nothing was trained."
    if dry_run.fused:
        yield f"{dry_run.fused[0].upper()}{dry_run.fused[1:]}."
    if dry_run.predicted:
        yield f"Predicted, not measured, and so a rough figure: {', '.join(dry_run.predicted)}."
    if dry_run.late:
        late = ", ".join(dry_run.late)
        yield f"By these runtimes no plan meets these deadlines: {late}. Give those jobs more time or fewer steps."
    for job, fault in dry_run.faults.items():
        yield f"{job} cannot be trained: {fault}"
    if dry_run.num_other_jobs:
        yield f"The pool has {dry_run.num_other_jobs} jobs of other batches, which share its devices: it may end later."
    yield f"As files: {dry_run.folder}."


def _write(dry_run: DryRun) -> None:
    """Writes the plan, its problem, its chart and the whole result as files."""
    (dry_run.folder / "dry-run.json").write_text(json.dumps(dry_run.to_json(), indent=1) + "\n")
    (dry_run.folder / "dry-run.md").write_text(dry_run.markdown() + "\n")
    if dry_run.plan is not None and dry_run.problem is not None:
        (dry_run.folder / "plan.json").write_text(json.dumps(dry_run.plan.to_json(), indent=1) + "\n")
        (dry_run.folder / "problem.json").write_text(json.dumps(dry_run.problem.to_json(), indent=1) + "\n")
        (dry_run.folder / "gantt.svg").write_text(gantt.render_svg(dry_run.plan, dry_run.problem))


@dataclass(frozen=True, kw_only=True)
class ProfiledBatch:
    """The profiles of a batch, and its planning problem.

    profiled: the profiles, preflights and faults of the jobs.
    problem: the planning problem; None where no job can be trained.
    """

    profiled: ProfilingResult
    problem: Problem | None

    def to_json(self) -> dict[str, Any]:
        """Returns what `profile --json` prints.

        For each job: its profiles, the profiles of the groups of which it would be the lead job, and the techniques
        that its preflight refused, with reasons.
        """
        result = self.profiled
        jobs = [
            {
                "name": job.name,
                "profiles": to_json(result.profiles[job.name]),
                "groups": to_json(result.groups.get(job.name, ())),
                "refused": result.refused(job.name),
            }
            for job in result.jobs
        ]
        return {"num_trials": result.num_trials, "jobs": jobs, "faults": dict(result.faults)}


def profile_batch(batch: BatchInput, *, caller: Caller) -> ProfiledBatch:
    """Profiles the jobs of a batch that have no stored profiles yet, and stores the new profiles.

    Args:
        batch: A Batch, the path of a batch file, its text, its content as a mapping, or a Batch's `to_json()`.
        caller: Shows the progress.

    Raises:
        BatchFileError: The file has faults; the message has each with its line.
        InputError: The batch cannot be profiled on this machine.
    """
    with open_node_context(as_batch(batch), home=settings.home(), caller=caller) as node_context:
        profiled = _profile_here(node_context, policy=ProfilingPolicy.THOROUGH)
        report_refusals(profiled, view=caller.view)
        jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
        if not jobs:
            return ProfiledBatch(profiled=profiled, problem=None)
        name, groups = node_context.batch.name, profiled.groups
        problem = planning_problem(jobs, profiled.profiles, node_context.cluster, name=name, groups=groups)
        return ProfiledBatch(profiled=profiled, problem=node_context.batch.terms.on(problem))
