"""What a run uses of its machine: the devices and their leases, the fork server, the ledger, and stored profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ringmaster.errors import InputError, LedgerError, input_errors
from ringmaster.flows import settings
from ringmaster.flows.batch import flow_runs
from ringmaster.flows.batch.run_folder import with_models
from ringmaster.flows.caller import Caller
from ringmaster.flows.pool.own_node import fork_server_of, lent, lent_here, own_node
from ringmaster.flows.services.first_processes import fork_server_for
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Cluster, detect
from ringmaster.tasks.execution.forecast import ForecastConditions, errors_in
from ringmaster.tasks.execution.leases import FileLeases, leases_of
from ringmaster.tasks.profiling.machine_load import MachineLoad, at_load, present_load
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, PreflightAhead, preflight_order
from ringmaster.tasks.profiling.profile_store import ProfileStore
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.profiling.trials import Lend
from ringmaster.tasks.recording.mlflow_writer import profile_store
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.processes.forkserver_client import ForkServerClient
from ringmaster.text import Notice


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """What a run of a batch uses of this machine, to measure its jobs and to train them.

    caller: the caller of the flow, which shows the progress.
    batch: the batch.
    cluster: this machine's devices.
    ledger: the MLflow records.
    server: the fork server.
    environment: the trial environment.
    profile_store: the stored profiles.
    leases: the machine's device leases.
    lend: lends idle devices; meanwhile neither other processes of this machine nor the pool's executor use them.
    is_pool_node: whether this machine is a node of a pool.
    """

    caller: Caller
    batch: Batch
    cluster: Cluster
    ledger: Ledger
    server: ForkServerClient
    environment: GangEnvironment
    profile_store: ProfileStore
    leases: FileLeases
    lend: Lend
    is_pool_node: bool

    @property
    def holder(self) -> str:
        """The name under which this batch holds devices, for others that wait for them."""
        return f"batch {self.batch.name}"

    def with_models(self, journal: Journal | None) -> NodeContext:
        """Returns the resources with the folders of the models that the batch's jobs name."""
        batch, weights = with_models(self.batch, self.ledger, journal, settings.home())
        return replace(self, batch=batch, environment=replace(self.environment, weights=weights))

    def load(self) -> MachineLoad:
        """Returns the load that other work puts on this machine now.

        Devices that other batches hold are busy with these. They will be free when a job of this batch gets them.
        """
        if self.leases.held():
            return MachineLoad()
        load = present_load(self.environment.devices, server=self.server, cache_dir=self.environment.cache_dir)
        if load.is_busy:
            self.caller.view.notice(f"other work slows this machine down {load.ratio:.1f} times")
        return load

    def conditions(self, load: MachineLoad) -> ForecastConditions:
        """Returns a load of this machine, with the errors of earlier runs of the batch."""
        earlier = self.ledger.finished_batches(self.batch.name, most=NUM_EARLIER)
        return ForecastConditions(load=load, earlier=errors_in(earlier))


def ledger_of(home: Path, *, notice: Notice) -> Ledger:
    """Returns the records of a home, or of the pool to which it belongs; no connection is open yet.

    notice: shows that a pool's MLflow is away, and that it is back.
    """
    with input_errors(LedgerError):
        return settings.ledger(home, waiting=flow_runs.for_mlflow(notice))


def warm_up_ledger(ledger: Ledger, batch: Batch) -> None:
    """Opens the records. Raises InputError where they cannot be used, LedgerError where their server is away."""
    try:
        ledger.warm_up(batch=batch.name)
    except LedgerError as error:
        if error.may_pass:
            raise
        raise InputError([str(error)]) from error


def start_preflight(batch: Batch, *, server: ForkServerClient, home: Path, notice: Notice) -> PreflightAhead | None:
    """Starts to inspect the jobs of a batch in the fork server that was started ahead of its flow.

    Jobs that adapt models which are not in the batch have their preflight later, once these have been looked up in the
    records: None is returned. Raises InputError if the requested devices do not exist.
    """
    cluster, names = _cluster(batch, home), {job.name for job in batch.jobs}
    if not all(names.issuperset(job.parents) for job in batch.jobs):
        return None
    environment = _environment(batch, cluster, server=server, preflight=None, home=home)
    order = preflight_order(batch.jobs, environment=environment, cluster=cluster)
    return PreflightAhead(order, server=server, notice=notice)


def _environment(
    batch: Batch, cluster: Cluster, *, server: ForkServerClient, preflight: PreflightAhead | None, home: Path
) -> GangEnvironment:
    return GangEnvironment(
        server=server,
        devices=cluster.nodes[0].devices,
        cache_dir=home / "cache",
        import_paths=(str(batch.folder),),
        preflight_ahead=preflight,
    )


@contextmanager
def open_node_context(batch: Batch, *, home: Path, caller: Caller) -> Iterator[NodeContext]:
    """Opens the resources of this machine, the slow ones in parallel; ends all workers on exit.

    caller: the caller of the flow, which may have started servers ahead.

    If this machine is a node of a pool, its devices are those that the pool has of it. Raises InputError if the
    requested devices do not exist.
    """
    with ExitStack() as stack:
        node = stack.enter_context(own_node())
        cluster = _cluster(batch, home) if node is None else node.cluster
        leases = leases_of(home, cluster)
        lend: Lend = partial(lent_here, leases, cluster, f"batch {batch.name}", caller.view.notice)
        if node is not None:
            lend = partial(lent, node.requests, node.record, batch.name)
        server = caller.fork_server
        if server is None and node is not None and (link := fork_server_of(home, node.record.name)).exists():
            server = ForkServerClient(link.readlink())
        if server is None:
            server = fork_server_for(batch.jobs)
            stack.callback(server.close)
        ledger = ledger_of(home, notice=caller.view.notice)
        slow: tuple[Callable[[], object], ...] = (server.start, partial(warm_up_ledger, ledger, batch))
        openings = [in_a_thread("opening", act) for act in slow]
        wait(openings)
        for opening in openings:
            opening.result()
        yield NodeContext(
            caller=caller,
            batch=batch,
            cluster=cluster,
            ledger=ledger,
            server=server,
            environment=_environment(batch, cluster, server=server, preflight=caller.preflight, home=home),
            profile_store=profile_store(ledger),
            leases=leases,
            lend=lend,
            is_pool_node=node is not None,
        )


def _cluster(batch: Batch, home: Path) -> Cluster:
    """Returns the devices of this machine for a batch; of more GPUs than it wants, those that no other run holds."""
    with input_errors():
        cluster = detect(batch.devices)
    if {device.kind for device in cluster.devices} != {"gpu"}:
        return cluster
    every = detect({"gpu": "all"})
    held = leases_of(home, every).held()
    idle_first = sorted(every.lease_names().items(), key=lambda item: item[1] in held)
    chosen = sorted(place for place, _ in idle_first[: len(cluster.devices)])
    return Cluster(nodes=(replace(every.nodes[0], devices=tuple(every.device(*place) for place in chosen)),))


NUM_EARLIER = 20  # runs of the batch whose errors correct a prediction


def profiled_at(profiled: ProfilingResult, load: MachineLoad) -> ProfilingResult:
    """Returns the profiles, of jobs and of groups, at a load."""
    return replace(profiled, profiles=at_load(profiled.profiles, load), groups=at_load(profiled.groups, load))
