"""Profiles the jobs of a batch without training them; returns what `train_batch` would plan with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.batch.context import as_batch, open_node_context
from ringmaster.flows.batch.records import tell_refused
from ringmaster.flows.reports.progress import current_view
from ringmaster.tasks.planning import Problem
from ringmaster.tasks.profiling.option_profiles import planning_problem
from ringmaster.tasks.profiling.stage import Profiled, TrialPolicy, profile_jobs


@dataclass(frozen=True, kw_only=True)
class ProfiledBatch:
    """The profiles of a batch, and its planning problem.

    profiled: the profiles, preflights and faults of the jobs.
    problem: the planning problem; None where no job can be trained.
    """

    profiled: Profiled
    problem: Problem | None

    def to_json(self) -> dict[str, Any]:
        """Returns what `profile --json` prints.

        For each job: its profiles, the profiles of the groups of which it would be the lead job, and the techniques
        that its preflight refused, with reasons.
        """
        found = self.profiled
        jobs = [
            {
                "name": job.name,
                "profiles": to_json(found.profiles[job.name]),
                "groups": to_json(found.groups.get(job.name, ())),
                "refused": found.refused(job.name),
            }
            for job in found.jobs
        ]
        return {"num_trials": found.num_trials, "jobs": jobs, "faults": dict(found.faults)}


def profile_batch(batch: str | dict[str, Any]) -> ProfiledBatch:
    """Profiles the jobs of a batch that have no stored profiles yet, and stores the new profiles.

    Args:
        batch: Path of a batch file, its text, its content as a mapping, or a Batch's `to_json()`.

    Raises:
        BatchFileError: The file has faults; the message has each with its line.
        InputError: The batch cannot be profiled on this machine.
    """
    view = current_view.get()
    with open_node_context(as_batch(batch), home=settings.home()) as node_context:
        profiled = profile_jobs(
            node_context.batch.jobs,
            environment=node_context.environment,
            cluster=node_context.cluster,
            known=node_context.known,
            notice=view.notice,
            lend=node_context.lend,
            policy=TrialPolicy.THOROUGH,
        )
        tell_refused(profiled)
        jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
        if not jobs:
            return ProfiledBatch(profiled=profiled, problem=None)
        name, groups = node_context.batch.name, profiled.groups
        problem = planning_problem(jobs, profiled.profiles, node_context.cluster, name=name, groups=groups)
        return ProfiledBatch(profiled=profiled, problem=node_context.batch.terms.on(problem))
