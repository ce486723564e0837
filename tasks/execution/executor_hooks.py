"""What optional features do in an executor.

The module `execute` of a feature lists its hooks in `EXECUTOR_HOOKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ringmaster.features import listed
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.progress import PlanProgress, RunningSegment
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.techniques.processes.gang_events import EvaluationReported, Outcome


@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """What hooks see of an executor, and may ask of it.

    request_plan: requests a new plan, with the reason.
    stop: stops the gang of a running segment.
    command: sends a command to the gang that trains a job, if one does.
    expel: gives a node no work any more, with the reason.
    is_out: returns whether a device must not be used, as its node is expelled, or it is faulty.
    """

    job_table: JobTable
    plan_progress: PlanProgress
    request_plan: Callable[[str], None]
    stop: Callable[[RunningSegment], None]
    command: Callable[[str, str], None]
    expel: Callable[[str, str], None]
    is_out: Callable[[DeviceId], bool]


class ExecutorHook:
    """What a feature does in an executor, on whose thread all methods are called. By default they do nothing."""

    def __init__(self, execution: ExecutorContext) -> None:
        self._execution = execution

    def outcome_of(self, running: RunningSegment, outcome: Future[Outcome]) -> Future[Outcome]:
        """Returns the outcome of a segment that has begun, with what the hook adds to it."""
        return outcome

    def decide(self, running: RunningSegment, outcome: Outcome) -> str | None:
        """Acts on an outcome. Returns what follows; None where the outcome is accepted, and others decide."""
        return None

    def steer(self, steering: SteeringRequest) -> None:
        """Applies what the feature requests of jobs in a steering request, before all else of it is applied."""

    def handle_evaluation(self, job: str, report: EvaluationReported) -> None:
        """Follows the report of an evaluation of a job."""


def executor_hooks(execution: ExecutorContext) -> tuple[ExecutorHook, ...]:
    """Returns the hooks of all features for an executor, in the order in which they are called."""
    return tuple(hook(execution) for hook in listed("execute", "EXECUTOR_HOOKS"))
