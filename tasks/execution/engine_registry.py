"""Registry of engines: the built-in ones, those of features, and users' from entry points.

It is light: the command line reads the names of all engines from it at every start.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from ringmaster import features
from ringmaster.registry import Registry, resolve

if TYPE_CHECKING:
    from ringmaster.tasks.execution.engine import Engine, EngineContext

LOCAL, WORKERS = "local", "workers"
BUILTIN: dict[str, str] = {
    LOCAL: "ringmaster.tasks.execution.engine:LocalEngine",
    WORKERS: "ringmaster.tasks.pool.engines:EngineOptions",
    "work-pool": "ringmaster.tasks.pool.engines:WorkPoolOptions",
    **features.dotted_names("ENGINES"),
}
"""By name, the dotted path of what builds the engine from an `EngineContext`: a class or function, or a class with a
class method `build`, such as the `EngineOptions` of an engine of pools (`ringmaster.tasks.pool.engines`)."""
ENGINES = Registry(kind="engine", entry_point_group="ringmaster.engines", builtin=BUILTIN)


def build_engine(name: str, context: EngineContext) -> Engine:
    """Builds an engine.

    Raises ValueError on an unknown name, with the known ones; where what is built is not an engine; and where the
    engine needs what its host does not have.
    """
    from ringmaster.tasks.execution.engine import Engine

    path = ENGINES.path(name)
    resolved = resolve(path)
    build = getattr(resolved, "build", None)
    engine = (build if inspect.ismethod(build) else resolved)(context)
    if not isinstance(engine, Engine):
        lacking = [method for method in vars(Engine) if method[0] != "_" and not hasattr(engine, method)]
        raise ValueError(
            f"engine {name!r} ({path}) is not an engine: it lacks {', '.join(lacking)}. "
            "To fix: give it all methods of ringmaster.tasks.execution.engine.Engine"
        )
    return engine
