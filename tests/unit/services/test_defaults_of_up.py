"""The defaults of `ringmaster up` that the command line repeats, as it does not import the planner."""

from ringmaster.flows.commands import services
from ringmaster.tasks.execution import engine
from ringmaster.tasks.pool.controller import elasticity


def test_the_command_line_repeats_the_defaults_of_engines():
    assert (services.WORKERS, services.DEFAULT_IDLE_S) == (engine.WORKERS, elasticity.DEFAULT_IDLE_S)
