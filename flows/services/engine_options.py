"""The engine of a pool as `ringmaster up` configures it: what lends nodes, how many, for how long; and its checks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.extras import missing_extra
from ringmaster.flows.settings import ENGINE, MAX_NODES, NODE_IDLE_S, NODE_PRICES
from ringmaster.tasks.execution.engine import LOCAL, RAY, SLURM, WORK_POOL, WORKERS, check_engine_name
from ringmaster.tasks.planning.whatif.nodes import NodePrices
from ringmaster.tasks.pool.node_scaler import DEFAULT_IDLE_S
from ringmaster.tasks.pool.ray.options import ADDRESS, DEVICES

SLURM_POOL = "ringmaster-slurm"
"""The work pool in Prefect whose worker starts nodes as jobs of Slurm."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine of a pool.

    name: name of the engine in the registry.
    max_nodes: the most nodes that it lends at a time.
    idle_s: seconds without work after which a lent node is given back.
    devices: the devices of a lent node that serve, as `ringmaster pool worker --devices` names them.
    node_price, hour_worth, budget: what a lent node's hour costs, what it is worth that the last job ends an hour
        earlier, and what nodes may cost until all jobs have ended; None where nothing was said of it.
    work_pool: the work pool in Prefect whose worker starts lent nodes; empty for the engine's own, if it has one.
    work_pool_type: the type with which that work pool is made if it is missing.
    work_pool_template: file of the base job template that the work pool gets; None for what it has, or its type's.
    address: address of a Ray cluster; empty for one of this machine alone.
    partition, time, gres: what Slurm is asked for; empty for its defaults.
    sbatch_options: further options of `sbatch`.
    """

    name: str = WORKERS
    max_nodes: int = 1
    idle_s: float = DEFAULT_IDLE_S
    node_price: float | None = None
    hour_worth: float | None = None
    budget: float | None = None
    devices: str = "auto"
    work_pool: str = ""
    work_pool_type: str = "process"
    work_pool_template: Path | None = None
    address: str = ""
    partition: str = ""
    time: str = ""
    gres: str = ""
    sbatch_options: Sequence[str] = field(default_factory=tuple)

    @property
    def lends_nodes(self) -> bool:
        """Whether nodes come and go as they are needed."""
        return self.name != WORKERS

    @property
    def has_own_ray(self) -> bool:
        """Whether the nodes are on a Ray cluster of this machine alone, which the pool starts."""
        return self.name == RAY and not self.address

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the pool's controller."""
        if not self.lends_nodes:
            return {}
        ray = {DEVICES: self.devices, **({ADDRESS: self.address} if self.address else {})} if self.name == RAY else {}
        prices = {} if (result := self.prices()) is None else {NODE_PRICES: result.to_text()}
        return {ENGINE: self.name, MAX_NODES: str(self.max_nodes), NODE_IDLE_S: f"{self.idle_s:g}", **prices, **ray}

    def prices(self) -> NodePrices | None:
        """Returns what nodes cost, or None where no price is given."""
        if self.node_price is None:
            return None
        budget = math.inf if self.budget is None else self.budget
        return NodePrices(per_node_hour=self.node_price, per_hour_earlier=self.hour_worth or 0.0, budget=budget)

    def job_variables(self) -> Mapping[str, Any]:
        """Returns the values for the base job template of a work pool of type `slurm`."""
        requested = {
            "partition": self.partition,
            "time": self.time,
            "gres": self.gres,
            "sbatch_options": list(self.sbatch_options),
        }
        return {name: value for name, value in requested.items() if value}

    def deployment(self) -> NodeDeployment | None:
        """Returns the deployment of lent nodes; None for an engine that needs none."""
        if not (self.name == SLURM or self.work_pool):
            return None
        return NodeDeployment(
            work_pool=SLURM_POOL if self.name == SLURM else self.work_pool,
            work_pool_type=SLURM if self.name == SLURM else self.work_pool_type,
            template="" if self.work_pool_template is None else self.work_pool_template.read_text(),
            devices=self.devices,
            job_variables=self.job_variables(),
        )

    def faults(self, *, has_server: bool) -> list[str]:
        """Returns the faults of the options. has_server: whether the pool's database is a server."""
        result = []
        try:
            check_engine_name(self.name)
        except ValueError as error:
            result.append(f"--engine: {error}")
        if self.name == LOCAL:
            result.append(
                f"--engine {LOCAL} runs batches without a pool. To fix: leave out --engine, or `ringmaster run`"
            )
        if self.name == WORK_POOL and not self.work_pool:
            result.append(
                f"--engine {WORK_POOL} needs --work-pool NAME: the work pool in Prefect that starts the nodes"
            )
        for engine, options in OWN_OPTIONS.items():
            given = ", ".join(f"--{name.replace('_', '-')}" for name, value in options(self).items() if value)
            if given and self.name != engine:
                result.append(f"{given} is of --engine {engine}, not of {self.name}. To fix: leave it out")
        result += [*self._template_faults(), *self._price_faults()]
        if self.name == RAY and (fault := missing_extra("ray", feature=f"--engine {RAY}")):
            result.append(fault)
        if self.lends_nodes and not self.has_own_ray and not has_server:
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
        if self.work_pool_template is None:
            return []
        try:
            json.loads(self.work_pool_template.read_text())
        except (OSError, ValueError) as error:
            remedy = "`prefect work-pool get-default-base-job-template --type TYPE` prints one"
            return [
                f"--work-pool-template {self.work_pool_template} is not a valid template: {error}. To fix: {remedy}"
            ]
        return []


OWN_OPTIONS: Mapping[str, Callable[[EngineOptions], Mapping[str, Any]]] = {
    WORK_POOL: lambda options: {"work_pool": options.work_pool},
    SLURM: lambda options: {
        "partition": options.partition,
        "time": options.time,
        "gres": options.gres,
        "sbatch": options.sbatch_options,
    },
    RAY: lambda options: {"address": options.address},
}
"""The options that only one engine has, by its name."""


@dataclass(frozen=True, kw_only=True)
class NodeDeployment:
    """The deployment whose flow runs serve lent nodes.

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


def engine_faults(engine: EngineOptions, *, home: Path) -> Sequence[str]:
    """Returns what is wrong with what the engine would be asked; asks it, which takes seconds. home: of the pool."""
    if engine.faults(has_server=True):  # these come first: an engine cannot be asked with options that make no sense
        return []
    if engine.name == SLURM:
        return _slurm_faults(engine, home=home)
    if engine.name == RAY and engine.address:
        from ringmaster.tasks.pool.ray import ray_engine

        return ray_engine.faults(engine.environment(), log=home / "ray.log")
    return []


def _slurm_faults(engine: EngineOptions, *, home: Path) -> Sequence[str]:
    from ringmaster.flows.pool.slurm.worker import SlurmJobConfiguration
    from ringmaster.tasks.pool.slurm.commands import Slurm
    from ringmaster.tasks.pool.slurm.slurm_engine import JobRequest, faults

    given = {**_defaults(engine.work_pool_template), **engine.job_variables()}

    def options(request: JobRequest) -> Sequence[str]:
        requested = {"partition": request.partition, "time": request.time, "gres": request.gres}
        job = SlurmJobConfiguration(**{**given, **{name: value or None for name, value in requested.items()}})
        return job.arguments(flow_run="preflight", log_dir=home / "slurm")

    wanted = {name: given.get(name) or "" for name in ("partition", "time", "gres")}
    kind, _, number = engine.devices.partition(":")
    request = JobRequest(
        **wanted,
        num_gpus=(int(number) if number.isdigit() else 1) if kind == "gpu" else 0,
        has_whole_node=bool(given.get("exclusive", True)),
        script=str(given.get("batch_script", "")),
    )
    return faults(Slurm(), request, options=options)


def _defaults(template: Path | None) -> Mapping[str, Any]:
    """Returns the defaults of a base job template that were set."""
    if template is None:
        return {}
    properties = json.loads(template.read_text()).get("variables", {}).get("properties", {})
    return {name: each["default"] for name, each in properties.items() if each.get("default") is not None}
