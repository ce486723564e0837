"""A batch on a fake engine whose clock is simulated: a test sets the seconds of each step."""

from tests.unit.execution.fakes import Bench


def clocked_bench(folder, jobs, gangs, *, make_plan, policy, kind=Bench, **options):
    """A batch whose executor re-plans as it measures step times, on the clock of `gangs`."""
    return kind(folder, jobs, runner=gangs, make_plan=make_plan, policy=policy, **options)
