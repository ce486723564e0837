"""Registry of engines: the built-in ones, and those of installed distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmaster.techniques.dotted_names import resolve
from ringmaster.techniques.registry import find, installed

if TYPE_CHECKING:
    from ringmaster.tasks.execution.engine import Engine
    from ringmaster.tasks.execution.engines.context import EngineContext

ENTRY_POINT_GROUP = "ringmaster.engines"
LOCAL, WORKERS, WORK_POOL, SLURM, RAY = "local", "workers", "work-pool", "slurm", "ray"
BUILTIN: dict[str, str] = {
    LOCAL: "ringmaster.tasks.execution.local.engine:local",
    WORKERS: "ringmaster.tasks.pool.controller.engine:workers",
    WORK_POOL: "ringmaster.tasks.pool.providers.work_pool:work_pool",
    SLURM: "ringmaster.tasks.pool.providers.slurm.engine:slurm",
    RAY: "ringmaster.tasks.pool.providers.ray.engine:ray",
}
"""By name, the dotted path of the function or class that builds the engine from an `EngineContext`."""


def engine_names() -> tuple[str, ...]:
    """Returns the names of all engines, built-in ones first."""
    return tuple(_every())


def check_engine_name(name: str) -> None:
    """Raises ValueError, with the known names, on an unknown one."""
    find("engine", name, _every())


def build_engine(name: str, context: EngineContext) -> Engine:
    """Builds an engine.

    Raises ValueError on an unknown name, with the known ones; where what is built is no engine; and where the engine
    needs what its host does not have.
    """
    from ringmaster.tasks.execution.engine import Engine

    path = find("engine", name, _every())
    engine = resolve(path)(context)
    if not isinstance(engine, Engine):
        lacking = [method for method in vars(Engine) if method[0] != "_" and not hasattr(engine, method)]
        raise ValueError(
            f"engine {name!r} ({path}) is no engine: it lacks {', '.join(lacking)}. "
            "To fix: give it all methods of ringmaster.tasks.execution.engine.Engine"
        )
    return engine


def _every() -> dict[str, str]:
    # Built-in engines come first, and cannot be shadowed.
    return {**BUILTIN, **installed(ENTRY_POINT_GROUP), **BUILTIN}
