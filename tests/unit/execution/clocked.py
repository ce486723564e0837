"""A batch on a fake engine whose clock is simulated: a test sets the seconds of each step."""

from concurrent.futures import Future

from ringmaster.errors import ProblemError
from ringmaster.tasks.execution.replanner import Replanner
from tests.unit.execution.fakes import Bench


def at_once(think):
    """Computes a plan in the foreground: the returned future is already done."""
    future = Future()
    try:
        future.set_result(think())
    except ProblemError as error:
        future.set_exception(error)
    return future


def clocked_bench(folder, jobs, gangs, *, make_plan, policy, kind=Bench, **options):
    """A batch whose executor re-plans as it measures step times, on the clock of `gangs`."""
    bench = kind(folder, jobs, runner=gangs, make_plan=make_plan, **options)
    bench.executor._plan_manager.replanner = Replanner(
        name="batch",
        make_plan=bench.plan,
        policy=policy,
        clock=gangs.clock,
        background=at_once,
    )
    return bench
