"""Makes this machine a node of a pool: waits for the pool, reserves the devices, and serves them."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from ringmaster.errors import InputError, NodeAlreadyServed, ReleaseMismatch, input_errors
from ringmaster.feature_check import refuse_faulty_features, refuse_faulty_modules
from ringmaster.feature_hooks import OF_PROCESSES
from ringmaster.flows import settings
from ringmaster.flows.interrupts import stop_signals
from ringmaster.flows.output import ProcessRole, log_to_stderr, logs_to
from ringmaster.flows.pool import own_node
from ringmaster.flows.pool.flow_worker import DEFAULT_QUEUE, REQUESTS_QUEUE, FlowWorker, queue_of
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.execution.leases import leases_of
from ringmaster.tasks.pool.engines import ALLOCATION
from ringmaster.tasks.pool.node_agent import DRAIN_S, NodeAgent
from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.tasks.process_identity import say_ready
from ringmaster.tasks.storage.database import Database, DatabaseClosed
from ringmaster.tasks.storage.schema import check_release
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.text import Notice

LOOK_EVERY_S = 1.0
RELEASE_EVERY_S = 5.0  # interval of the checks of the leader's release


def serve_flows(pool: PoolAddress, *, name: str, notice: Notice) -> None:
    """Runs the pool's flows on this machine, which has no devices for the pool, until SIGTERM or SIGINT."""
    refuse_faulty_features()
    log_to_stderr(ProcessRole.FLOW_WORKER)
    wait_for(f"{pool.prefect_api}/health", notice)
    queues, most_runs = (DEFAULT_QUEUE, REQUESTS_QUEUE), settings.most_flow_runs()
    worker = FlowWorker(name=name, work_pool=pool.work_pool, queues=queues, most_runs=most_runs)
    stopping = threading.Event()
    with stop_signals(stopping.set):
        worker.start()
        notice(f"{name} runs flows: work pool {pool.work_pool}, {', '.join(queues)}, {most_runs} batches at once")
        say_ready()
        stopping.wait()
        worker.stop()


def serve_until_stopped(options: own_node.NodeOptions, *, notice: Notice) -> bool:
    """Serves until SIGTERM or SIGINT; returns False if another worker has taken the node over.

    Raises InputError if another worker holds the devices or an installed feature has a fault, ReleaseMismatch if the
    pool is of another release, at the start or later.
    """
    refuse_faulty_features()
    refuse_faulty_modules(OF_PROCESSES)  # on which each job of this node would fail
    log_to_stderr(ProcessRole.NODE)
    _hold(options, notice)
    database = Database(options.pool.database)
    wait_for(f"{options.pool.prefect_api}/health", notice)
    database.read(check_release)
    if not options.devices[0].is_trusted:
        own_node.check_calibration(options.cluster, database)
    timeouts = Timeouts.of_environment()
    folder = options.home / "nodes" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    device_monitor = Telemetry(options.name, options.devices)
    device_monitor.start()
    server = ForkServer(log=folder / "forkserver.log", fence_after_s=timeouts.fence_after_s)
    host = NodeAgent(
        name=options.name,
        address=options.address or _address_towards(options.pool.prefect_api),
        devices=options.devices,
        database=database,
        server=server,
        device_monitor=device_monitor,
        timeouts=timeouts,
        allocation=options.allocation,
    )
    try:
        server.start_when_needed(link=own_node.fork_server_of(options.home, options.name))
        stopping = threading.Event()
        # From now on the node must leave in order: the pool would otherwise notice its absence only after a minute.
        with stop_signals(stopping.set):
            host.start()
            _serve(host, options, notice, stopping, database)
        return not host.was_replaced
    finally:
        host.close()
        device_monitor.close()
        database.close()


def _serve(
    host: NodeAgent, options: own_node.NodeOptions, notice: Notice, stopping: threading.Event, database: Database
) -> None:
    """Serves until `stopping` is set or the agent has ended; then the gangs write checkpoints and the node leaves."""
    queues = [queue_of(options.name), *((DEFAULT_QUEUE, REQUESTS_QUEUE) if options.serves_flows else ())]
    worker = FlowWorker(
        name=options.name, work_pool=options.pool.work_pool, queues=queues, most_runs=settings.most_flow_runs()
    )
    worker.start()
    threading.Thread(target=_pass_on, args=(host.ended, stopping), name="ended", daemon=True).start()
    try:
        served = f"{len(options.devices)} x {options.cluster.device_kind()}"
        notice(f"node {options.name} serves {served}: work pool {options.pool.work_pool}, {', '.join(queues)}")
        say_ready()
        with _watched_release(database, stop=stopping.set):
            stopping.wait()
            notice(f"node {options.name} leaves: its gangs write a checkpoint")
            host.drain(within_s=options.drain_s)
            notice(f"node {options.name} has left the pool")
    finally:
        worker.stop()


def _pass_on(event: threading.Event, other: threading.Event) -> None:
    """Sets another event once an event is set."""
    event.wait()
    other.set()


@contextmanager
def _watched_release(database: Database, *, stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` once a controller of another release leads the pool; raises ReleaseMismatch at the end of the
    context.

    A worker may be forgotten in an upgrade: it leaves in order, and its jobs resume from their checkpoints elsewhere.
    """
    result = list[ReleaseMismatch]()

    def watch(over: threading.Event) -> None:
        with suppress(DatabaseClosed):
            while not over.wait(RELEASE_EVERY_S):
                try:
                    database.read(check_release)
                except ReleaseMismatch as error:
                    result.append(error)
                    stop()
                    return

    with background_thread(watch, name="release", timeout_s=0.0):
        yield
    if result:
        raise result[0]


@input_errors(NodeAlreadyServed)
def _hold(options: own_node.NodeOptions, notice: Notice) -> None:
    own_node.hold_devices(
        leases_of(options.home, options.cluster),
        tuple(options.cluster.lease_names().values()),
        worker=options.name,
        may_share=all(device.kind == "cpu" for device in options.devices),
        notice=notice,
        wait=time.sleep,
    )


def wait_for(url: str, notice: Notice) -> None:
    """Waits until the server answers successfully, which it does not if it refuses the requested host name."""
    reported = False
    while True:
        try:
            answer = httpx.get(url, timeout=5.0)
            if answer.is_success:
                return
            text = f"{answer.status_code} {answer.text[:100]}"
        except httpx.HTTPError as error:
            text = str(error)
        if not reported:
            notice(f"waiting for {url}: {text}")
            reported = True
        time.sleep(LOOK_EVERY_S)


def _address_towards(url: str) -> str:
    """Returns the address of this machine on the route to a server."""
    parts = urlsplit(url)
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses the source address
        address: str = probe.getsockname()[0]
        return address


@flow(name="segment", flow_run_name="segment {segment}", persist_result=False)
def segment(segment: int) -> None:
    """Shows a segment of a job, which the pool's controller starts and ends. Cancel it to preempt the segment.

    Args:
        segment: Number of the segment.
    """
    raise RuntimeError(
        f"segment {segment} is started by the pool's controller, not by a worker of Prefect. To fix: end the worker "
        "that serves the queue `segments`"
    )


@flow(name="serve-node", persist_result=False)
def serve_node(devices: str = "auto", drain_s: float = DRAIN_S) -> None:
    """Serves the machine on which it runs as a node of the pool.

    Args:
        devices: auto, cpu:N, gpu:N or gpu:all; auto takes the GPUs, or CPU slots where there is none.
        drain_s: Seconds that running jobs have to write a checkpoint when the machine is taken back.
    """
    address = settings.checked_pool()
    if address is None:
        raise InputError(["this flow serves a node of a pool, and no pool is named. To fix: `ringmaster up`"])
    options = own_node.NodeOptions(
        home=settings.home(),
        pool=address,
        name=own_node.node_name(os.environ.get(settings.OWN_NODE)),
        cluster=own_node.cluster_of(devices),
        allocation=os.environ.get(ALLOCATION) or str(flow_run.id),
        drain_s=drain_s,
    )
    os.environ[settings.OWN_NODE] = options.name  # for the flows that run here, which measure on these devices
    logger = get_run_logger()
    with logs_to(logger):
        if not serve_until_stopped(options, notice=logger.info):
            raise RuntimeError(f"another process serves node {options.name} by now")
