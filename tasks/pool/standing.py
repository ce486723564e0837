"""The batches that a pool stands by: what each of them asks becomes what is asked of the one plan of all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.execution.events import (
    ExecutionEvent,
    GangSaid,
    JobEnded,
    Planned,
    SegmentEnded,
    SegmentStarted,
    Waiting,
)
from ringmaster.tasks.execution.roster import Enlisted
from ringmaster.tasks.execution.workplace import Workplace
from ringmaster.tasks.planning import Certificate, Plan, ProblemError
from ringmaster.tasks.planning.search import Objective
from ringmaster.tasks.planning.terms import OBJECTIVES, Terms
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.profiling.options import planning_problem
from ringmaster.techniques import Profile

PRIORITIES = "priorities"  # a batch's fact: by job, "" for the whole batch, what a person has set
USUAL = 1.0
HEAVIEST = 1e12  # a job's weight at most, whatever is multiplied: planners refuse what is above 1e15, sums of some too

OptionKey = tuple[str, str, int, str, int]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A batch that has not ended. priorities: by job of it, "" for the whole batch; 1 for what is not named."""

    submission: Submission
    priorities: Mapping[str, float] = field(default_factory=dict)

    def priority(self, job: str) -> float:
        """Of a job, by its name within the batch: the batch's times its own."""
        return self.priorities.get("", USUAL) * self.priorities.get(job, USUAL)


def combined_terms(standing: Iterable[Standing]) -> Terms:
    """What is asked of the plan of all batches, its time counted from the epoch: `on(problem, elapsed_s=now)`.

    The rule. Deadlines are those of each batch, counted from its start. The objective is the makespan as long as every
    batch asks for that and nobody has set a priority; it is the cost where every batch asks for that, at the highest
    price that one of them names. Else it is the sum of weight x end over all jobs, a job's weight being that which its
    batch gives it, times the batch's priority, times the job's own, and `HEAVIEST` at most.
    """
    every = list(standing)
    objectives = {each.submission.asked.objective for each in every} or {"makespan"}
    has_priorities = any(priority != USUAL for each in every for priority in each.priorities.values())
    objective: Objective = "weighted"
    if len(objectives) == 1 and not has_priorities:
        (objective,) = objectives
    deadlines_s: dict[str, float] = {}
    weights: dict[str, float] = {}
    for each in every:
        batch, asked = each.submission, each.submission.asked
        for name, deadline_s in asked.deadlines_s.items():
            deadlines_s[batch.qualified(name)] = batch.started_s + deadline_s
        for job in batch.jobs:
            weight = asked.weights.get(job.name, 1.0) * each.priority(job.name)
            weights[batch.qualified(job.name)] = min(weight, HEAVIEST)
    prices = [each.submission.asked.price_per_device_hour for each in every]
    return Terms(
        objective=objective,
        deadlines_s=deadlines_s,
        weights=weights,
        price_per_device_hour=max(prices, default=1.0),
    )


def entries_of(submission: Submission, *, struck_out: Mapping[str, Collection[OptionKey]]) -> list[Enlisted]:
    """A batch's jobs as an executor's list has them.

    struck_out: by job, the options (`option_key`) under which it has run out of memory.
    """
    place = Workplace(
        folder=submission.run_folder(),
        cache_dir=Path(submission.cache_dir),
        import_paths=submission.import_paths,
        weights={job: Path(folder) for job, folder in submission.weights.items()},
        data=submission.data,
        checkpoint_every_s=submission.checkpoint_every_s,
        checkpoint_root=submission.checkpoint_root,
    )
    names = {job.name for job in submission.jobs}
    entries = []
    for job in submission.jobs:
        profiles = submission.profiles.get(job.name, ())
        left = tuple(profile for profile in profiles if option_key(profile) not in struck_out.get(job.name, ()))
        renamed = job.renamed(
            submission.qualified(job.name), lambda name: submission.qualified(name) if name in names else name
        )
        entries.append(
            Enlisted(
                job=renamed,
                profiles=left or profiles,
                place=place,
                batch=submission.id,
                together=_together(submission, job.name, struck_out.get(job.name, ())),
            )
        )
    return entries


def _together(submission: Submission, leader: str, struck_out: Collection[OptionKey]) -> tuple[Profile, ...]:
    """What the group that a job leads can run under, its fellows called as in the pool; nothing where it leads none."""
    left = [p for p in submission.together.get(leader, ()) if option_key(p) not in struck_out]
    return tuple(
        replace(p, fellows=tuple(replace(f, job=submission.qualified(f.job)) for f in p.fellows)) for p in left
    )


def fault_of(submission: Submission) -> str | None:
    """Why a batch cannot be planned at all, not even alone, or None: it must not keep others from being planned."""
    jobs = [job for job in submission.jobs if submission.profiles.get(job.name)]
    if not jobs:
        return None
    every = [profile for job in jobs for profile in submission.profiles[job.name]]
    most, most_nodes = max(profile.num_devices for profile in every), max(profile.num_nodes for profile in every)
    slot = Device(kind="cpu", index=0, name="", memory_bytes=0, cores=())
    anywhere = Cluster(nodes=tuple(Node(name=f"anywhere-{i}", devices=(slot,) * most) for i in range(most_nodes)))
    untyped = {
        name: [replace(profile, device_type="") for profile in profiles]
        for name, profiles in submission.profiles.items()
    }
    try:
        terms = submission.asked
        terms.on(planning_problem(jobs, untyped, anywhere, name=submission.name))
    except (ProblemError, TypeError, ValueError) as error:
        return f"it cannot be planned: {error}"
    return None if terms.objective in OBJECTIVES else f"it cannot be planned: {terms.objective!r} is no objective"


def option_key(profile: Profile) -> OptionKey:
    """Names an option of a job, in every process."""
    config = str(sorted(profile.config.items()))
    return profile.technique, config, profile.num_devices, profile.device_type, profile.num_nodes


def split(name: str) -> tuple[str, str]:
    """The batch of a job in the pool, and its name there."""
    batch, _, job = name.partition("/")
    assert job, f"{name} does not say which batch it is of"
    return batch, job


def batch_of(event: ExecutionEvent) -> str | None:
    """The batch that an event is about; None for one that is about all."""
    if isinstance(event, (Planned, Waiting)):
        return None
    return split(event.segment.job if isinstance(event, (SegmentStarted, SegmentEnded)) else event.job)[0]


def as_told(event: ExecutionEvent, batch: str) -> ExecutionEvent | None:
    """An event as one batch is told of it, with the names that it knows; None where it has no part in it."""
    if isinstance(event, Planned):
        return _planned(event, batch)
    if isinstance(event, (SegmentStarted, SegmentEnded)):
        fellows = tuple(split(fellow)[1] for fellow in event.fellows)
        return replace(event, segment=replace(event.segment, job=split(event.segment.job)[1]), fellows=fellows)
    if isinstance(event, GangSaid):
        return replace(event, job=split(event.job)[1])
    if isinstance(event, JobEnded):
        return replace(event, job=split(event.job)[1], message=event.message.replace(f"{batch}/", ""))
    return event


def _planned(event: Planned, batch: str) -> Planned | None:
    """The part of a plan that is about one batch; its bounds only where that is all of it."""
    problem, plan = event.problem, event.plan
    mine = {job.id: split(job.id)[1] for job in problem.jobs if split(job.id)[0] == batch}
    if not mine:
        return None
    jobs = tuple(
        replace(
            job,
            id=mine[job.id],
            after=tuple(mine[other] for other in job.after if other in mine),
            fellows=tuple(split(fellow)[1] for fellow in job.fellows),
        )
        for job in problem.jobs
        if job.id in mine
    )
    segments = tuple(replace(segment, job=mine[segment.job]) for segment in plan.segments if segment.job in mine)
    part = replace(plan, segments=segments, certificate=_renamed(plan.certificate, mine))
    if len(mine) < len(problem.jobs):
        part = Plan(problem_name=plan.problem_name, segments=segments, method=plan.method)
    return Planned(problem=replace(problem, jobs=jobs), plan=part, why=event.why)


def _renamed(certificate: Certificate | None, names: Mapping[str, str]) -> Certificate | None:
    if certificate is None:
        return None

    def renamed(prices: Mapping[str, float]) -> dict[str, float]:
        return {names.get(job, job): price for job, price in prices.items()}

    return replace(
        certificate,
        job_prices=renamed(certificate.job_prices),
        work_prices=renamed(certificate.work_prices),
        cover_prices=renamed(certificate.cover_prices),
    )
