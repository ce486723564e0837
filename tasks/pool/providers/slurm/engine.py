"""The engine `slurm`: the nodes of the pool are jobs of Slurm, which are requested while there is work for them."""

from __future__ import annotations

from ringmaster.tasks.execution.engines.context import EngineContext
from ringmaster.tasks.pool.controller.engine import PoolEngine
from ringmaster.tasks.pool.providers.slurm.commands import Slurm, lacking_commands
from ringmaster.tasks.pool.providers.slurm.machines import SlurmMachines
from ringmaster.tasks.pool.providers.work_pool import build_engine


def slurm(context: EngineContext) -> PoolEngine:
    """Builds the engine, which reads events and asks for nodes from now on.

    Raises ValueError outside of a pool, and where the commands of Slurm are not installed.
    """
    if faults := lacking_commands():
        raise ValueError("\n".join(faults))
    return build_engine(context, lambda _: SlurmMachines(Slurm()), name="slurm")
