"""The defaults of `ringmaster up` that the command line repeats, as it does not import the planner."""

from ringmaster.flows.commands import pool
from ringmaster.tasks.execution import engine
from ringmaster.tasks.pool import node_scaler


def test_the_command_line_repeats_the_defaults_of_engines():
    assert (pool.WORKERS, pool.DEFAULT_IDLE_S) == (engine.WORKERS, node_scaler.DEFAULT_IDLE_S)
