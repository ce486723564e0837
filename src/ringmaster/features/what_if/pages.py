"""What more devices would gain, on the pages of plans."""

from collections.abc import Iterator

from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.recording.record_hooks import RecordHook


class PossibleGains(RecordHook):
    """Says what more devices would gain, and which jobs cost most."""

    def plan_sentences(self, plan: Plan, problem: Problem, *, device: str) -> Iterator[str]:
        """Yields the sentences of `section`."""
        from ringmaster.features.what_if.answers import section  # loads a solver

        yield from section(plan, problem, device=device)


RECORD_HOOKS = (PossibleGains(),)
