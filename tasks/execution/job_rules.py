"""What optional features add to what a job may do next, while its batch is executed.

The module `execute` of a feature lists its rules in `JOB_RULES`. A rule knows of a job only what its record says, so
that it holds in each process that reads the record.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ringmaster.features import listed
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.processes.order import GangOrder


class JobRule:
    """A rule of a feature. By default it changes nothing. record: of the job in the journal."""

    def usable(self, job: Job, profiles: Sequence[Profile]) -> Sequence[Profile]:
        """Returns the options, of those that were measured or predicted, under which the job may be trained."""
        return profiles

    def options(self, job: Job, record: JobRecord, profiles: Sequence[Profile]) -> Sequence[Profile]:
        """Returns the options under which the job may be trained now."""
        return profiles

    def goal(self, record: JobRecord, goal: int) -> int:
        """Returns the step up to which the job may be trained now."""
        return goal

    def changes(self, job: Job, record: JobRecord) -> Mapping[str, Any]:
        """Returns what changes in the record of a job that has come to rest, or that another process goes on with."""
        return {}

    def barred_nodes(self, record: JobRecord) -> Collection[str]:
        """Returns the nodes on which the job's next segment must not run."""
        return ()

    def last_step(self, job: Job, profile: Profile, *, first_step: int, last_step: int) -> int:
        """Returns the step up to which a gang is ordered to train under an option, in a segment up to `last_step`."""
        return last_step

    def order(self, job: Job, record: JobRecord, order: GangOrder) -> GangOrder:
        """Returns the order of a gang that trains the job."""
        return order


def usable_options(job: Job, profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Returns the options, of those that were measured or predicted, under which a job may be trained."""
    for rule in job_rules():
        profiles = rule.usable(job, profiles)
    return tuple(profiles)


def job_rules() -> Iterator[JobRule]:
    """Returns the rules of all features, in the order in which they are applied."""
    return listed("execute", "JOB_RULES")
