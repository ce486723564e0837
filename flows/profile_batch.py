"""Measures the jobs of a batch and stops there: what `train_batch` would plan with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringmaster.flows import settings
from ringmaster.flows.batch_records import tell_refused
from ringmaster.flows.views import current_view
from ringmaster.flows.workshop import as_batch, open_bench
from ringmaster.tasks.planning import Problem
from ringmaster.tasks.profiling.options import planning_problem
from ringmaster.tasks.profiling.stage import Profiled, profile_jobs
from ringmaster.techniques.values import to_json


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a batch, and the planning problem that it makes; None where nothing can be trained."""

    profiled: Profiled
    problem: Problem | None

    def to_json(self) -> dict[str, Any]:
        """What `profile --json` prints: each job's profiles, those of groups that it would lead, and what was left out
        before any trial, and why.
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


def profile_batch(batch: str | dict[str, Any]) -> Measured:
    """Profiles what is not known yet of a batch, given as for `train_batch`; the profiles are kept for it.

    Raises BatchFileError and InputError with every fault of the input.
    """
    view = current_view.get()
    with open_bench(as_batch(batch), home=settings.home()) as bench:
        profiled = profile_jobs(
            bench.batch.jobs,
            site=bench.site,
            cluster=bench.cluster,
            known=bench.known,
            notice=view.notice,
            lend=bench.lend,
        )
        tell_refused(profiled)
        jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
        if not jobs:
            return Measured(profiled=profiled, problem=None)
        name, groups = bench.batch.name, profiled.groups
        problem = planning_problem(jobs, profiled.profiles, bench.cluster, name=name, groups=groups)
        return Measured(profiled=profiled, problem=bench.batch.terms.on(problem))
