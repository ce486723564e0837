"""Serves the metrics of a pool: `python -m ringmaster.flows.services.metrics_server --port PORT`.

The server reads the pool's database, and nothing else. So it measures a pool whose controller, nodes or other servers
are away, and continues when another controller leads.

The module `routes` of a feature adds pages by `ROUTES`, which returns the routes of a pool: it is called with the
pool's address, and with a function that returns whether the server is about to end. `PAGES` names those of them that
`ringmaster up` lists, with their paths. The routes of `KEYED_ROUTES` check keys of their own, and are not behind the
password.
"""

import argparse
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from ringmaster.distribution import own_release
from ringmaster.errors import InputError
from ringmaster.feature_check import OWN, clash, in_words
from ringmaster.features import modules_by_package
from ringmaster.flows.exit_codes import INPUT_FAULT
from ringmaster.flows.file_permissions import set_umask
from ringmaster.flows.output import ProcessRole, report_faults
from ringmaster.flows.pool.batch_requests import pool_address
from ringmaster.flows.services.serving import (
    ALLOWED_HOSTS,
    LOOPBACK,
    PasswordCheck,
    checked,
    hosts_of,
    serve,
    server_of,
)
from ringmaster.tasks.pool.nodes import NodeStatus
from ringmaster.tasks.pool.pool_monitor import PLAN_REASONS, PoolMeasurement, PoolMonitor, PoolState
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import ENDED
from ringmaster.techniques.processes.gang_events import OutcomeStatus

CANCELLED = "cancelled"
OUTCOMES = (
    OutcomeStatus.DONE,
    OutcomeStatus.PREEMPTED,
    OutcomeStatus.OUT_OF_MEMORY,
    OutcomeStatus.CRASHED,
    OutcomeStatus.INVALID,
    OutcomeStatus.LOST,
    CANCELLED,
)
logger = logging.getLogger(__name__)
SINCE = "since this server has started"

Rows = Iterable[tuple[Sequence[str], float]]


def _one(value: float | bool | None) -> Rows:
    """Returns the row of a metric without labels; none where there is no value."""
    return () if value is None else (((), float(value)),)


def _each(labels: Iterable[str], counted: Mapping[str, int]) -> Rows:
    """Returns a row for each label, also for those that were not counted: a rate needs a value before the first."""
    return [((label,), counted.get(label, 0)) for label in labels]


# Name, help, labels and rows. The first are known while the database answers, the others also while it does not.
STATE_GAUGES: Sequence[tuple[str, str, Sequence[str], Callable[[PoolState], Rows]]] = (
    (
        "ringmaster_nodes",
        "Number of registered nodes by status.",
        ["status"],
        lambda state: _each(
            (NodeStatus.SERVING, NodeStatus.LEAVING), Counter(str(node.status) for node in state.nodes)
        ),
    ),
    (
        "ringmaster_devices",
        "Number of devices by node and state: leased to segments, lent to trials, idle, unhealthy, or on a node that "
        "is leaving.",
        ["node", "state"],
        lambda state: [((node.name, each), number) for node in state.nodes for each, number in node.devices.items()],
    ),
    (
        "ringmaster_batches",
        "Number of batches that have not ended, by stage: queued (without a flow run yet), measuring (not in the plan "
        "yet), or active.",
        ["stage"],
        lambda state: [((stage,), number) for stage, number in state.batches.items()],
    ),
    (
        "ringmaster_jobs",
        "Number of jobs of the active batches by batch and status.",
        ["batch", "status"],
        lambda state: list(state.jobs.items()),
    ),
    (
        "ringmaster_job_end_timestamp_seconds",
        "When a job of an active batch ends, since the epoch: the certified earliest, the median and the latest end.",
        ["batch", "job", "end"],
        lambda state: list(state.ends.items()),
    ),
    (
        "ringmaster_plan_timestamp_seconds",
        "Time at which the last plan was made, since the epoch.",
        [],
        lambda state: _one(state.plan.made_s if state.plan else None),
    ),
    (
        "ringmaster_plan_makespan_seconds",
        "Planned time from the last plan to the end of its last job.",
        [],
        lambda state: _one(state.plan.makespan_s if state.plan else None),
    ),
    (
        "ringmaster_plan_gap_ratio",
        "How far the last plan may be above the optimum, as a share of its lower bound; absent without one.",
        [],
        lambda state: _one(state.plan.gap if state.plan else None),
    ),
    (
        "ringmaster_leader_elected",
        "Whether a controller has the lead (1) or none does (0). It may be silent: see the age of its heartbeat.",
        [],
        lambda state: _one(state.leader is not None and state.leader.is_there),
    ),
)
GAUGES: Sequence[tuple[str, str, Sequence[str], Callable[[PoolMeasurement], Rows]]] = (
    (
        "ringmaster_database_up",
        "Whether the pool's database answers (1) or not (0).",
        [],
        lambda state: _one(state.state is not None),
    ),
    (
        "ringmaster_leader_heartbeat_age_seconds",
        "Time since this server has last seen another heartbeat of the leading controller.",
        [],
        lambda state: _one(state.leader_heartbeat_age_s),
    ),
    (
        "ringmaster_node_heartbeat_age_seconds",
        "Time since this server has last seen another heartbeat of a node.",
        ["node"],
        lambda state: [((node,), age_s) for node, age_s in state.node_heartbeat_age_s.items()],
    ),
    (
        "ringmaster_segments_running",
        "Number of segments that run.",
        [],
        lambda state: _one(None if state.state is None else len(state.counts.running)),
    ),
)
COUNTERS: Sequence[tuple[str, str, Sequence[str], Callable[[PoolMeasurement], Rows]]] = (
    (
        "ringmaster_leader_changes",
        "Number of times that a controller has taken the lead, since the database is there.",
        [],
        lambda state: _one(state.state.leader.epoch if state.state and state.state.leader else None),
    ),
    (
        "ringmaster_device_seconds",
        f"Device time by node and state, {SINCE}; time while the database does not answer is not counted.",
        ["node", "state"],
        lambda state: list(state.device_seconds.items()),
    ),
    (
        "ringmaster_plans",
        f"Number of plans by reason, {SINCE}.",
        ["reason"],
        lambda state: _each(PLAN_REASONS, state.counts.plans),
    ),
    (
        "ringmaster_segments_ended",
        f"Number of segments that have ended by the status of their outcomes, {SINCE}.",
        ["status"],
        lambda state: _each(OUTCOMES, state.counts.segments),
    ),
    (
        "ringmaster_jobs_ended",
        f"Number of jobs that have ended by status, such as failed, {SINCE}.",
        ["status"],
        lambda state: _each(ENDED, state.counts.jobs),
    ),
)


class PoolCollector(Collector):
    """Collects the metrics of a pool. measure: returns what is known of it now."""

    def __init__(self, measure: Callable[[], PoolMeasurement]) -> None:
        self._measure = measure

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. Those of the pool's state have no values while its database does not answer."""
        result = self._measure()
        yield InfoMetricFamily("ringmaster_build", "The release of Ringmaster.", value={"version": own_release()})
        kinds: Sequence[tuple[type[GaugeMetricFamily | CounterMetricFamily], Sequence[Any], Any]] = (
            (GaugeMetricFamily, STATE_GAUGES, result.state),
            (GaugeMetricFamily, GAUGES, result),
            (CounterMetricFamily, COUNTERS, result),
        )
        for kind, metrics, known in kinds:
            for name, text, labels, rows_of in metrics:
                family = kind(name, text, labels=labels)
                for values, value in () if known is None else rows_of(known):
                    family.add_metric(values, value)
                yield family


METRICS_PATH, HEALTH_PATH = "/metrics", "/health"

SAMPLE_EVERY_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM; returns the exit status: 2 without a pool or its password, 1 if it cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=LOOPBACK[0])
    parser.add_argument("--port", type=int, required=True)
    requested = parser.parse_args(arguments)
    set_umask()
    try:
        pool = pool_address()
        if not pool.password:
            raise InputError(["the metrics need the pool's password. To fix: set MLFLOW_TRACKING_PASSWORD"])
        routes, keyed_routes = routes_of_features(pool, lambda: server.should_exit)
    except InputError as error:
        report_faults(error.faults)
        return INPUT_FAULT
    monitor = PoolMonitor(lambda: Database(pool.database, timeout_s=0.0))
    app = metrics_app(
        monitor.measurement,
        username=pool.username,
        password=pool.password,
        routes=routes,
        keyed_routes=keyed_routes,
    )
    hosts = hosts_of(os.environ.get(ALLOWED_HOSTS, "")) or LOOPBACK
    server: uvicorn.Server = server_of(
        checked(app, hosts), role=ProcessRole.METRICS, host=requested.host, port=requested.port, log_level="warning"
    )
    over, failed = threading.Event(), threading.Event()
    threading.Thread(target=_sample, args=(monitor, server, over, failed), name="samples", daemon=True).start()
    try:
        serve(server)
    finally:
        over.set()
        monitor.close()
    return 1 if failed.is_set() else 0


def routes_of_features(pool: Any, is_ending: Callable[[], bool]) -> tuple[list[BaseRoute], list[BaseRoute]]:
    """Returns the routes of features behind the pool's password, and those that check keys of their own.

    Routes of which one has the path of an earlier feature are left out, with a line in the log: the first one would
    answer, also to what the other protects.
    """
    every: dict[str, list[BaseRoute]] = {"ROUTES": [], "KEYED_ROUTES": []}
    taken = dict.fromkeys((METRICS_PATH, HEALTH_PATH), OWN)
    for package, module in modules_by_package("routes").items():
        for name, routes in every.items():
            own = list(getattr(module, name)(pool, is_ending)) if hasattr(module, name) else []
            paths = {getattr(route, "path", ""): package for route in own}
            others = {path: taken[path] for path in paths if taken.get(path, package) != package}
            for path, other in others.items():
                fault = in_words(clash("HTTP route", path, other, package))
                logger.warning("%s of %s are left out: %s", name, package, fault)
            if not others:
                taken |= paths
                routes += own
    return every["ROUTES"], every["KEYED_ROUTES"]


def _sample(monitor: PoolMonitor, server: uvicorn.Server, over: threading.Event, failed: threading.Event) -> None:
    """Samples until `over` is set. Any other end is an error, which ends the server: old values must not be served."""
    try:
        monitor.sample()
        while not over.wait(SAMPLE_EVERY_S):
            monitor.sample()
    finally:
        if not over.is_set():
            failed.set()
            server.should_exit = True


def metrics_app(
    measure: Callable[[], PoolMeasurement],
    *,
    username: str,
    password: str,
    routes: Sequence[BaseRoute] = (),
    keyed_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Returns the application. Without the password, it only answers that it is up.

    Args:
        measure: Returns what is known of the pool now.
        username: Of the pool's servers.
        password: Of the pool's servers.
        routes: Further routes behind the password, such as those of features.
        keyed_routes: Further routes that check keys of their own.
    """
    registry = CollectorRegistry()
    registry.register(PoolCollector(measure))

    def metrics(request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except (ValueError, TypeError):  # the header cannot be read: any form will do
            encode, content_type = choose_encoder("")
        return Response(encode(registry), headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    def health(_: Request) -> Response:
        return PlainTextResponse("OK\n")

    own = PasswordCheck(Starlette(routes=[Route(METRICS_PATH, metrics), *routes]), username=username, password=password)
    return Starlette(routes=[Route(HEALTH_PATH, health), *keyed_routes, Mount("/", own)])


if __name__ == "__main__":
    sys.exit(main())
