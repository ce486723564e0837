"""What steers batches on the way, of optional features.

The module `execute` of a feature lists its policies in `STEERING`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ringmaster.features import modules
from ringmaster.tasks.execution.job_table import GOAL, RunPaths, SteeringPolicy
from ringmaster.tasks.storage.journal import JobRecord, Journal
from ringmaster.techniques import Job, Profile


class FeaturePolicy(SteeringPolicy):
    """Decides how far the jobs of a feature train in a batch.

    jobs: of the batch, as they were written, with their steps resolved.
    profiles: the options of the jobs and of their variants, by name.
    place: the folders of the batch's run.
    notice: receives what was chosen, and why.
    is_replayed: whether `listen` is called with all events of the batch, again after a kill, and later than the journal
        returns what follows from them.
    """

    def __init__(
        self,
        journal: Journal,
        jobs: Iterable[Job],
        profiles: Mapping[str, Sequence[Profile]],
        *,
        place: RunPaths,
        notice: Callable[[str], None] = lambda _: None,
        is_replayed: bool = False,
    ) -> None:
        self._journal, self._place, self._notice, self._is_replayed = journal, place, notice, is_replayed

    @classmethod
    def is_for(cls, job: Job) -> bool:
        """Returns whether the policy steers a job."""
        raise NotImplementedError

    @classmethod
    def goals(cls, jobs: Iterable[Job]) -> Mapping[str, int]:
        """Returns the first goals of the jobs that it steers, by name."""
        raise NotImplementedError


def steering_policy(
    journal: Journal, jobs: Sequence[Job], profiles: Mapping[str, Sequence[Profile]], **options: Any
) -> FeaturePolicy | None:
    """Returns what steers a batch: the first policy of a feature that is for one of its jobs; None for no such job."""
    for kind in _policies():
        if any(map(kind.is_for, jobs)):
            return kind(journal, jobs, profiles, **options)
    return None


def first_goals(jobs: Sequence[Job], *, known: Mapping[str, JobRecord]) -> dict[str, dict[str, Any]]:
    """Returns the details with the first goals of the jobs that a policy of a feature steers, by name.

    known: the records of jobs; those that have a goal already are left out.
    """
    goals = {name: goal for kind in _policies() for name, goal in kind.goals(jobs).items()}
    has_goal = {name for name, record in known.items() if GOAL in record.details}
    return {name: {GOAL: goal} for name, goal in goals.items() if name not in has_goal}


def _policies() -> Iterator[type[FeaturePolicy]]:
    for module in modules("execute"):
        yield from getattr(module, "STEERING", ())
