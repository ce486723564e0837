"""Registry of techniques: the built-in ones, and users' techniques from entry points or `register`.

The registries of losses, metrics and data sources are in the modules of their interfaces: `ringmaster.techniques.loss`,
`ringmaster.techniques.metric` and `ringmaster.techniques.data_source`; that of engines is in
`ringmaster.tasks.execution.engine_registry`, that of objectives in `ringmaster.tasks.planning.objectives`.
"""

from ringmaster import features
from ringmaster.registry import Registry, subclass
from ringmaster.techniques.technique import Technique

BUILTIN: dict[str, str] = {
    "single": "ringmaster.techniques.single:Single",
    "ddp": "ringmaster.techniques.ddp:Ddp",
    "zero1": "ringmaster.techniques.zero1:Zero1",
    "zero2": "ringmaster.techniques.zero2:Zero2",
    "fsdp": "ringmaster.techniques.fsdp:Fsdp",
    "fsdp_static": "ringmaster.techniques.fsdp:FsdpStatic",
    "expert": "ringmaster.techniques.expert_parallel:ExpertParallel",
    "tensor": "ringmaster.techniques.tensor_parallel:TensorParallel",
    "context": "ringmaster.techniques.context_parallel:ContextParallel",
    "pipeline": "ringmaster.techniques.pipeline:Pipeline",
    "mesh": "ringmaster.techniques.mesh:Mesh",
    "offload": "ringmaster.techniques.offload:Offload",
    **features.dotted_names("TECHNIQUES"),
}

GROUP_TECHNIQUES: dict[str, str] = {"shared_base": "ringmaster.techniques.shared_base:SharedBase"}
"""Those that train the jobs of a group at once: known by name, but never tried on a single job."""

TECHNIQUES = Registry(
    kind="technique", entry_point_group="ringmaster.techniques", builtin={**BUILTIN, **GROUP_TECHNIQUES}
)


FORMER_PATHS: dict[str, str] = {
    **{
        f"ringmaster.techniques.{name}:{former}": BUILTIN[name]
        for name, former in (("expert", "Expert"), ("tensor", "TensorParallel"), ("context", "Context"))
    },
    **features.dotted_names("FORMER_TECHNIQUES"),
}
"""Dotted names in the stored orders of earlier releases."""


def register(technique: type[Technique]) -> type[Technique]:
    """Makes a technique known to this process and its workers; usable as a class decorator.

    Raises:
        ValueError: Workers could not import the class, or another technique has the name.
    """
    if technique.__module__ == "__main__":
        raise ValueError(
            f"technique {technique.__qualname__} is defined in __main__, which worker processes cannot import. "
            "To fix: move it into a module next to your script and import it from there"
        )
    path = f"{technique.__module__}:{technique.__qualname__}"
    taken = TECHNIQUES.paths().get(technique.name)
    if taken is not None and taken != path:
        raise ValueError(f"technique {technique.name!r} is {taken} already. To fix: choose another name")
    TECHNIQUES.registered[technique.name] = path
    return technique


def dotted_paths() -> dict[str, str]:
    """Returns the dotted path of the class of every technique that trains single jobs, by name.

    Built-in techniques cannot be shadowed.
    """
    return {name: path for name, path in TECHNIQUES.paths().items() if name not in GROUP_TECHNIQUES}


def names() -> tuple[str, ...]:
    """Returns the names of all techniques, built-in ones first, including those that train groups."""
    return tuple(TECHNIQUES.paths())


def dotted_path(name: str) -> str:
    """Returns the dotted path of the class of technique `name`.

    Raises ValueError, with the known names, on an unknown one.
    """
    return TECHNIQUES.path(name)


def load(path: str) -> Technique:
    """Returns the technique at a dotted path "package.module:Class". Raises ValueError where there is none."""
    technique: Technique = subclass(Technique, FORMER_PATHS.get(path, path))()
    return technique
