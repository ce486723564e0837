"""What the engine of a pool brings to `ringmaster up`: options, checks, and processes of its own.

What to write for a new cluster depends on what runs node agents there:

    a work pool of Prefect    nothing: `WorkPoolOptions` serves work pools of any type
    a queue of batch jobs     a `BatchScheduler` and its `SchedulerOptions` (`ringmaster.tasks.pool.batch_scheduler`)
    something else            its `Machines` (`ringmaster.tasks.pool.work_pool`), or a whole `NodeProvider`
                              (`ringmaster.tasks.pool.provider`), and a subclass of `EngineOptions`
    no node agents            an `Engine` (`ringmaster.tasks.execution.engine`), which starts segments itself

The module is light: the command line reads the options of all engines from it at every start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ringmaster.registry import resolve
from ringmaster.tasks.execution.engine_registry import BUILTIN, ENGINES, LOCAL, WORKERS

if TYPE_CHECKING:
    from ringmaster.tasks.execution.engine import Engine, EngineContext

CONTROLLER = "controller"
"""Name of the service of a pool that uses the engine."""
ALLOCATION = "RINGMASTER_ALLOCATION"
"""Environment variable for the id under which an engine lends the machine; by default that of the flow run there."""
DEFAULT_IDLE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Service:
    """A process that a pool needs.

    name: name of the service.
    command: its command line.
    environment: changes to the environment that it inherits; None removes a variable.
    after: services that must be up before.
    ready_url: URL that answers once the service is up; None where there is none.
    says_ready: whether the service reports by `say_ready` that it is up, however long that takes.
    once: whether the service ends on its own, with exit status 0.
    group: whether its children end with it.
    timeout_s: seconds within which the service must be up.
    grace_s: seconds within which it must end after SIGTERM.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    ready_url: str | None = None
    says_ready: bool = False
    once: bool = False
    group: bool = True
    timeout_s: float = 400.0
    grace_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class NodeDeployment:
    """The deployment in Prefect whose flow runs serve lent nodes.

    work_pool: the work pool in Prefect whose worker starts them.
    work_pool_type: the type with which the work pool is made if it is missing.
    template: the base job template of the work pool, as JSON; empty for what it has, or its type's.
    devices: the devices of a node that serve.
    job_variables: values for the base job template.
    """

    work_pool: str
    work_pool_type: str
    template: str = ""
    devices: str = "auto"
    job_variables: Mapping[str, Any] = field(default_factory=dict)


def option(
    default: Any,
    description: str,
    *,
    flag: str = "",
    least: float | None = None,
    most: float | None = None,
    **schema: Any,
) -> Any:
    """Returns a field of an engine's options.

    flag: its option of `ringmaster up`, such as --time; empty for what is chosen elsewhere.
    least, most: the smallest and the largest number that is allowed.
    schema: what else the schema of a base job template contains of it, such as its title.
    """
    metadata = {"description": description, "flag": flag, "least": least, "most": most, "schema": schema}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(each: Field[Any]) -> Any:
    """Returns the default of a field of an engine's options."""
    return each.default if each.default_factory is MISSING else each.default_factory()


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of `ringmaster up` for the engine of a pool, and what the engine derives from them.

    An engine with options of its own has a subclass, whose fields with a flag become options of `up`. This class is
    that of machines of one's own, and of installed engines that are built by a function.

    name: name of the engine in the registry.
    foreign_options: errors for options of other engines.
    """

    name: str = WORKERS
    max_nodes: int = option(1, "Maximum number of nodes that the engine lends at a time.", flag="--max-nodes", least=1)
    idle_s: float = option(
        DEFAULT_IDLE_S, "Seconds without work after which a lent node is given back.", flag="--idle", least=0
    )
    node_price: float | None = option(
        None,
        "Price of a lent node for an hour: nodes are requested while each gains more than it costs.",
        flag="--node-price",
        least=0,
    )
    hour_worth: float | None = option(None, "Value of finishing one hour earlier.", flag="--hour-worth", least=0)
    budget: float | None = option(
        None, "Maximum cost of lent nodes until all jobs have ended.", flag="--budget", least=0
    )
    devices: str = option(
        "auto",
        "Devices of a lent node: auto (the GPUs, or else CPU slots), cpu:N, gpu:N, gpu:all.",
        flag="--node-devices",
    )
    work_pool_template: Path | None = option(  # noqa: RUF009 - it makes a field
        None,
        "File with the base job template of the engine's work pool; default: what it has.",
        flag="--work-pool-template",
    )
    foreign_options: tuple[str, ...] = ()

    @property
    def lends_nodes(self) -> bool:
        """Whether nodes come and go as they are needed."""
        return self.name != WORKERS

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all nodes are on this machine, and can share a database in a file."""
        return not self.lends_nodes

    @classmethod
    def build(cls, context: EngineContext) -> Engine:
        """Builds the engine in a process that executes plans, which has the variables of `environment`.

        Raises ValueError where the engine needs what its host does not have.
        """
        from ringmaster.tasks.pool.pool_engine import pool_engine

        return pool_engine(context, name=WORKERS)

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the environment variables by which the engine reads its options. home: of the pool."""
        return {}

    def services(self, home: Path) -> Sequence[Service]:
        """Returns the processes that the engine needs in addition to the pool's, on the machine of its servers.

        Those that start after nothing start before the controller, and end after it. home: of the pool.
        """
        return ()

    def ports(self) -> Mapping[str, int]:
        """Returns the ports of this machine on which its services listen, by the end of the option --port-..."""
        return {}

    def deployment(self) -> NodeDeployment | None:
        """Returns the deployment of lent nodes; None for an engine that needs none."""
        return None

    def queried_faults(self, home: Path) -> Sequence[str]:
        """Returns what is wrong with the requests to the engine; queries it, which takes seconds.

        It is called with options that have no `faults`. home: of the pool.
        """
        return []

    def own_faults(self) -> Sequence[str]:
        """Returns the faults of the options that this engine alone has."""
        return []

    def faults(self, *, has_server: bool) -> list[str]:
        """Returns the faults of the options. has_server: whether the pool's database is a server."""
        result = []
        try:
            ENGINES.path(self.name)
        except ValueError as error:
            result.append(f"--engine: {error}")
        if self.name == LOCAL:
            result.append(
                f"--engine {LOCAL} runs batches without a pool. To fix: leave out --engine, or `ringmaster run`"
            )
        result += [*self.own_faults(), *self.foreign_options, *self._template_faults(), *self._price_faults()]
        if not (self.is_on_this_machine or has_server):
            result.append(
                f"--engine {self.name} lends other machines, which cannot share a SQLite file. To fix: "
                "--database postgresql://USER@HOST:PORT/NAME, with the password in ~/.pgpass"
            )
        return result

    def _price_faults(self) -> list[str]:
        given = {"--node-price": self.node_price, "--hour-worth": self.hour_worth, "--budget": self.budget}
        names = ", ".join(name for name, value in given.items() if value is not None)
        if names and not self.lends_nodes:
            return [f"{names} is of engines that lend nodes, not of {self.name}. To fix: leave it out"]
        if names and self.node_price is None:
            return [f"{names} needs the price of a node. To fix: --node-price PRICE, for an hour of one node"]
        return []

    def _template_faults(self) -> list[str]:
        try:
            self.template_defaults()
        except (OSError, ValueError) as error:
            what = f"--work-pool-template {self.work_pool_template} is not a valid template: {error}"
            return [f"{what}. To fix: `prefect work-pool get-default-base-job-template --type TYPE` prints one"]
        return []

    def template_defaults(self) -> Mapping[str, Any]:
        """Returns the defaults that the base job template sets. Raises OSError, or ValueError where it is not valid."""
        if self.work_pool_template is None:
            return {}
        properties = json.loads(self.work_pool_template.read_text()).get("variables", {}).get("properties", {})
        return {name: each["default"] for name, each in properties.items() if each.get("default") is not None}

    def node_deployment(
        self, work_pool: str, work_pool_type: str, job_variables: Mapping[str, Any] | None = None
    ) -> NodeDeployment:
        """Returns the deployment of lent nodes in a work pool of Prefect."""
        return NodeDeployment(
            work_pool=work_pool,
            work_pool_type=work_pool_type,
            template="" if self.work_pool_template is None else self.work_pool_template.read_text(),
            devices=self.devices,
            job_variables=job_variables or {},
        )


@dataclass(frozen=True, kw_only=True)
class WorkPoolOptions(EngineOptions):
    """The engine whose nodes are flow runs in a work pool of any type, such as Kubernetes."""

    name: str = "work-pool"
    work_pool: str = option("", "Work pool in Prefect whose worker starts the nodes.", flag="--work-pool")
    work_pool_type: str = option(
        "process", "Type of that work pool if it is missing, such as kubernetes.", flag="--work-pool-type"
    )

    @classmethod
    def build(cls, context: EngineContext) -> Engine:
        """Builds the engine; see `EngineOptions`."""
        from ringmaster.tasks.pool.work_pool import MachinesOfRuns, work_pool_engine

        return work_pool_engine(context, MachinesOfRuns, name="work-pool")

    def deployment(self) -> NodeDeployment:
        """Returns the deployment of lent nodes."""
        return self.node_deployment(self.work_pool, self.work_pool_type)

    def own_faults(self) -> Sequence[str]:
        """Returns the fault of a missing name."""
        fault = f"--engine {self.name} needs --work-pool NAME: the work pool in Prefect that starts the nodes"
        return [] if self.work_pool else [fault]


@dataclass(frozen=True, kw_only=True)
class EngineFlag:
    """An option of `ringmaster up` that engines bring. type: the field's. engines: the names of those that have it."""

    field: Field[Any]
    type: Any
    engines: tuple[str, ...]


def engine_flags() -> Mapping[str, EngineFlag]:
    """Returns the options that the built-in engines bring to `ringmaster up`, by the name of the field."""
    result: dict[str, EngineFlag] = {}
    for engine in (name for name in BUILTIN if name != LOCAL):
        kind = options_class(engine)
        types = get_type_hints(kind)
        for each in fields(kind):
            if each.metadata.get("flag"):
                others = result[each.name].engines if each.name in result else ()
                result[each.name] = EngineFlag(field=each, type=types[each.name], engines=(*others, engine))
    return result


def options_class(name: str) -> type[EngineOptions]:
    """Returns the class of an engine's options; that of all engines where it has none of its own, or is unknown."""
    try:
        resolved = resolve(ENGINES.path(name))
    except ValueError:
        return EngineOptions
    return resolved if isinstance(resolved, type) and issubclass(resolved, EngineOptions) else EngineOptions


def engine_options(name: str, values: Mapping[str, Any]) -> EngineOptions:
    """Returns the options of an engine. values: of the options of all engines, by field; None where none was given."""
    kind = options_class(name)
    own = {each.name for each in fields(kind)}
    given, others = {}, dict[str, list[str]]()
    for key, flag in engine_flags().items():
        if values.get(key) in (None, default_of(flag.field)):
            continue
        if key in own:
            given[key] = values[key]
        else:
            others.setdefault(" or ".join(sorted(flag.engines)), []).append(flag.field.metadata["flag"])
    foreign_options = tuple(
        f"{', '.join(flags)} is of --engine {engines}, not of {name}. To fix: leave it out"
        for engines, flags in others.items()
    )
    return kind(name=name, foreign_options=foreign_options, **given)
