"""The active batches of a pool: their jobs in the executor's table, and their parts of its events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ringmaster.codec import to_json
from ringmaster.errors import ProblemError
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.control.batch_terms import ActiveBatch, PoolTerms
from ringmaster.tasks.execution import execution_events
from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.tasks.execution.job_table import variant_options
from ringmaster.tasks.execution.starter import OptionKey, option_key
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.planning.objectives import PlanningTerms, objective_names
from ringmaster.tasks.planning.term_features import TermsFeature, combined_features, terms_features
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import Profile

logger = logging.getLogger(__name__)

FeatureT = TypeVar("FeatureT", bound=TermsFeature)

FEATURES, REVISION = "features", "revision"
"""The keys of the pool's facts: the JSON forms of features of the terms of its plans, by their keys, and how often a
person has set one, by which a controller sees that it must read them again: a series may have a hundred thousand rows.
"""


def active_batch(submission: Submission, journal: Journal) -> ActiveBatch:
    """Returns a submitted batch with what a person has set, which is in its journal."""
    return ActiveBatch(
        id=submission.id,
        name=submission.name,
        job_names=tuple(job.name for job in submission.jobs),
        given=submission.terms,
        started_s=submission.started_s,
    ).with_changes(journal)


def pool_terms(database: Database, *, known: PoolTerms = PoolTerms()) -> PoolTerms:
    """Returns what a person has set for all batches of a pool.

    known: what an earlier call has returned. Features are read where they were set since.
    """
    revision = int(Journal(database, batch="").get(REVISION, 0))
    return known if revision == known.revision else PoolTerms(features=features_of_pool(database), revision=revision)


def features_of_pool(database: Database) -> tuple[TermsFeature, ...]:
    """Returns the features of the terms of all plans of a pool, which a person has set.

    Features that this release cannot read are left out, and logged: the others and all batches go on.
    """
    return _readable_features(Journal(database, batch="").get(FEATURES, {}))


def _readable_features(stored: Mapping[str, Any]) -> tuple[TermsFeature, ...]:
    result: list[TermsFeature] = []
    for key, value in stored.items():
        try:
            result += terms_features({key: value})
        except (TypeError, ValueError) as error:  # written by another release, or by hand
            logger.error("the pool's %s cannot be read, and is not followed: %s", key, error)
    return tuple(result)


def with_features_of_pool(terms: PlanningTerms, database: Database) -> PlanningTerms:
    """Returns the terms of a batch with those of the pool, as in the pool's plans without other batches."""
    return replace(terms, features=combined_features([terms.features], of_pool=features_of_pool(database)))


def change_feature(
    database: Database, kind: type[FeatureT], change: Callable[[FeatureT | None], FeatureT | None]
) -> None:
    """Changes a feature of the terms of all plans of a pool, which its controller follows within seconds.

    change: returns the feature by the present one; None where there is none. It may be called again by its own result.
    """

    def changed(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        stored = dict(facts.get(FEATURES, {}))
        known = _readable_features({kind.key: stored.pop(kind.key)}) if kind.key in stored else ()
        if (feature := change(next((each for each in known if isinstance(each, kind)), None))) is not None:
            stored[kind.key] = to_json(feature)
        return {FEATURES: stored, REVISION: int(facts.get(REVISION, 0)) + 1}

    Journal(database, batch="").change_facts(changed, FEATURES, REVISION)


def entries_of(submission: Submission, *, struck_out: Mapping[str, Collection[OptionKey]]) -> list[JobTableEntry]:
    """Returns a batch's jobs as the entries of an executor's job table.

    struck_out: by job, the options (`option_key`) under which it has run out of memory.
    """
    paths, qualified = submission.run_paths(), submission.qualified
    names = {job.name for job in submission.jobs}

    def left(job: str, profiles: Sequence[Profile]) -> tuple[Profile, ...]:
        return tuple(each for each in profiles if option_key(each) not in struck_out.get(job, ()))

    def in_pool(profile: Profile) -> Profile:
        return replace(profile, members=tuple(replace(each, job=qualified(each.job)) for each in profile.members))

    entries = []
    for job in submission.jobs:
        profiles, variants = submission.profiles.get(job.name, ()), variant_options(job, submission.profiles)
        entries.append(
            JobTableEntry(
                job_in_batch=job,
                job=job.renamed(qualified(job.name), lambda name: qualified(name) if name in names else name),
                profiles=left(job.name, profiles) or profiles,
                paths=paths,
                variants={variant: left(job.name, its) or its for variant, its in variants.items()},
                batch=submission.id,
                group_profiles=tuple(map(in_pool, left(job.name, submission.together.get(job.name, ())))),
            )
        )
    return entries


def fault_of(submission: Submission) -> str | None:
    """Returns why a batch cannot be planned even alone, or None. Such a batch must not block the planning of others."""
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
        if submission.terms.objective not in objective_names():
            return f"it cannot be planned: {submission.terms.objective!r} is not an objective"
        submission.terms.on(planning_problem(jobs, untyped, anywhere, name=submission.name))
    except (ProblemError, TypeError, ValueError) as error:
        return f"it cannot be planned: {error}"
    return None


def split(name: str) -> tuple[str, str]:
    """Splits the name of a job in the pool into its batch and its name within the batch."""
    batch, _, job = name.partition("/")
    assert job, f"{name} does not say which batch it is of"
    return batch, job


def batch_of(event: execution_events.ExecutionEvent) -> str | None:
    """Returns the batch that an event is about; None for an event that is about all batches."""
    if isinstance(event, execution_events.PredictionUpdate):
        return event.batch
    if isinstance(event, (execution_events.PlanUpdate, execution_events.DeviceWait)):
        return None
    return split(
        event.segment.job
        if isinstance(event, (execution_events.SegmentStarted, execution_events.SegmentEnded))
        else event.job
    )[0]


def as_logged(event: execution_events.ExecutionEvent, batch: str) -> execution_events.ExecutionEvent | None:
    """Returns an event as one batch sees it, with the batch's own job names; None if it does not concern the batch."""
    if isinstance(event, execution_events.PlanUpdate):
        return _planned(event, batch)
    if isinstance(event, (execution_events.SegmentStarted, execution_events.SegmentEnded)):
        members = tuple(split(member)[1] for member in event.members)
        return replace(event, segment=replace(event.segment, job=split(event.segment.job)[1]), members=members)
    if isinstance(event, execution_events.JobEnded):
        message = event.record.message.replace(f"{batch}/", "")
        return execution_events.JobEnded(record=replace(event.record, name=split(event.job)[1], message=message))
    return event


def _planned(event: execution_events.PlanUpdate, batch: str) -> execution_events.PlanUpdate | None:
    """Returns the part of a plan that is about one batch. It has bounds only if the plan has no other jobs."""
    problem, plan = event.problem, event.plan
    own = {job.id: split(job.id)[1] for job in problem.jobs if split(job.id)[0] == batch}
    if not own:
        return None
    jobs = tuple(
        replace(
            job,
            id=own[job.id],
            after=tuple(own[other] for other in job.after if other in own),
            members=tuple(split(member)[1] for member in job.members),
        )
        for job in problem.jobs
        if job.id in own
    )
    segments = tuple(replace(segment, job=own[segment.job]) for segment in plan.segments if segment.job in own)
    if len(own) < len(problem.jobs):
        part = Plan(problem_name=plan.problem_name, segments=segments, method=plan.method)
    else:
        certificates = plan.certificate, plan.value_certificate
        own_certificate, of_value = (each and each.renamed(own) for each in certificates)
        part = replace(plan, segments=segments, certificate=own_certificate, value_certificate=of_value)
    return execution_events.PlanUpdate(problem=replace(problem, jobs=jobs), plan=part, why=event.why)
