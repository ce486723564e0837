"""What a pool's controller does for endpoints, whose gangs keep their devices until they end by themselves."""

from concurrent.futures import Future

from ringmaster.tasks.execution.executor_hooks import ExecutorHook
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.techniques.processes.gang_events import Outcome


class HeldDevices(ExecutorHook):
    """Has the other jobs planned again when an endpoint takes its devices, and when it leaves them.

    An endpoint does no steps, so that its answers count as progress: after a crash it is tried again from the first.
    """

    def outcome_of(self, running: RunningSegment, outcome: Future[Outcome]) -> Future[Outcome]:
        """Requests a plan without the devices."""
        if running.profile.holds_devices:
            self._execution.request_plan(f"{running.segment.job} holds its devices")
        return outcome

    def decide(self, running: RunningSegment, outcome: Outcome) -> str | None:
        """Requests a plan with the devices; the outcome is for others to decide on."""
        if running.profile.holds_devices:
            self._execution.request_plan(f"{running.segment.job} has left its devices")
            if running.is_ready:
                self._execution.job_table.attempts.pop(running.segment.job, None)
        return None


EXECUTOR_HOOKS = (HeldDevices,)
