"""The Prefect task that stands for a segment on this machine."""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.techniques.processes.events import Outcome

_runs: dict[int, Callable[[], Outcome]] = {}  # by number: Prefect would serialise a function among the parameters
_numbers = count()


@task(name="segment", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def segment_task(label: str, number: int) -> Outcome:
    """Runs a segment. It returns the gang's outcome as a value, even if the gang failed.

    It has no retries of its own: the executor decides whether and how the job continues.
    """
    return _runs.pop(number)()


def as_task(label: str, run: Callable[[], Outcome]) -> Future[Outcome]:
    """Runs a function as a Prefect task of the current flow run. A `Spawn` of the local engine."""
    _runs[number := next(_numbers)] = run
    # A Prefect future has the two methods of a Future that an executor uses.
    return cast("Future[Outcome]", segment_task.submit(label, number))
