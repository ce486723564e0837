"""The metrics of a pool as Prometheus knows them: names, units, labels and help texts.

Labels have few values: nodes that are there, batches that are active, and fixed words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ringmaster.tasks.pool.nodes import NodeStatus
from ringmaster.tasks.pool.pool_monitor import Measurement, PlanReason, PoolState
from ringmaster.tasks.storage.journal import ENDED
from ringmaster.tasks.storage.releases import own_release
from ringmaster.techniques.processes.events import OutcomeStatus

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
SINCE = "since this server has started"

Rows = Iterable[tuple[Sequence[str], float]]


class PoolCollector(Collector):
    """Collects the metrics of a pool. measure: returns what is known of it now."""

    def __init__(self, measure: Callable[[], Measurement]) -> None:
        self._measure = measure

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. Those of the pool's state have no values while its database does not answer."""
        found = self._measure()
        yield InfoMetricFamily("ringmaster_build", "The release of Ringmaster.", value={"version": own_release()})
        yield _gauge(
            "ringmaster_database_up", "Whether the pool's database answers (1) or not (0).", found.state is not None
        )
        yield from _of_state(found.state)
        yield from _of_heartbeats(found)
        yield from _of_events(found)


def _of_state(state: PoolState | None) -> Iterator[Metric]:
    nodes, plan, leader = (state.nodes, state.plan, state.leader) if state else ((), None, None)
    statuses = [node.status for node in nodes]
    yield _gauges(
        "ringmaster_nodes",
        "Number of registered nodes by status.",
        ["status"],
        [((status,), statuses.count(status)) for status in (NodeStatus.SERVING, NodeStatus.LEAVING)] if state else (),
    )
    yield _gauges(
        "ringmaster_devices",
        "Number of devices by node and state: leased to segments, lent to trials, idle, unhealthy, or on a node that "
        "is leaving.",
        ["node", "state"],
        [((node.name, each), number) for node in nodes for each, number in node.devices.items()],
    )
    yield _gauges(
        "ringmaster_batches",
        "Number of batches that have not ended, by stage: queued (without a flow run yet), measuring (not in the plan "
        "yet), or active.",
        ["stage"],
        [((stage,), number) for stage, number in state.batches.items()] if state else (),
    )
    yield _gauges(
        "ringmaster_jobs",
        "Number of jobs of the active batches by batch and status.",
        ["batch", "status"],
        list(state.jobs.items()) if state else (),
    )
    yield _gauge(
        "ringmaster_plan_timestamp_seconds",
        "Time at which the last plan was made, since the epoch.",
        plan.made_s if plan else None,
    )
    yield _gauge(
        "ringmaster_plan_makespan_seconds",
        "Planned time from the last plan to the end of its last job.",
        plan.makespan_s if plan else None,
    )
    yield _gauge(
        "ringmaster_plan_gap_ratio",
        "How far the last plan may be above the best possible one, as a share of its lower bound; absent without one.",
        plan.gap if plan else None,
    )
    yield _gauge(
        "ringmaster_leader_elected",
        "Whether a controller has the lead (1) or none does (0). It may be silent: see the age of its heartbeat.",
        (leader is not None and leader.is_there) if state else None,
    )
    changes = CounterMetricFamily(
        "ringmaster_leader_changes",
        "Number of times that a controller has taken the lead, since the database is there.",
    )
    if leader is not None:
        changes.add_metric((), leader.epoch)
    yield changes


def _of_heartbeats(found: Measurement) -> Iterator[Metric]:
    yield _gauge(
        "ringmaster_leader_heartbeat_age_seconds",
        "Time since this server has last seen another heartbeat of the leading controller.",
        found.leader_heartbeat_age_s,
    )
    yield _gauges(
        "ringmaster_node_heartbeat_age_seconds",
        "Time since this server has last seen another heartbeat of a node.",
        ["node"],
        [((node,), age_s) for node, age_s in found.node_heartbeat_age_s.items()],
    )


def _of_events(found: Measurement) -> Iterator[Metric]:
    running = None if found.state is None else len(found.counts.running)
    yield _gauge("ringmaster_segments_running", "Number of segments that run.", running)
    yield _counter(
        "ringmaster_device_seconds",
        f"Device time by node and state, {SINCE}; time while the database does not answer is not counted.",
        ["node", "state"],
        [(key, seconds) for key, seconds in found.device_seconds.items()],
    )
    yield _counter(
        "ringmaster_plans", f"Number of plans by reason, {SINCE}.", ["reason"], _each(PlanReason, found.counts.plans)
    )
    yield _counter(
        "ringmaster_segments_ended",
        f"Number of segments that have ended by the status of their outcomes, {SINCE}.",
        ["status"],
        _each(OUTCOMES, found.counts.segments),
    )
    yield _counter(
        "ringmaster_jobs_ended",
        f"Number of jobs that have ended by status, such as failed, {SINCE}.",
        ["status"],
        _each(ENDED, found.counts.jobs),
    )


def _each(labels: Iterable[str], counted: Mapping[str, int] | Mapping[PlanReason, int]) -> Rows:
    """Returns a row for each label, also for those that were not counted: a rate needs a value before the first."""
    known: Mapping[str, int] = {str(label): number for label, number in counted.items()}
    return [((label,), known.get(label, 0)) for label in labels]


def _gauge(name: str, text: str, value: float | bool | None) -> Metric:
    """Returns a metric without labels; without a value where it is None."""
    return _gauges(name, text, [], [] if value is None else [((), float(value))])


def _gauges(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
