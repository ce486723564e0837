"""MLflow metric points of device telemetry, named like MLflow's system metrics so that its UI shows them there."""

from __future__ import annotations

from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.execution.events import GangSaid, SegmentEnded
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.processes.events import DeviceTelemetry

# By the key in a telemetry event: MLflow's metric name, and the factor that converts the value.
NAMES = {
    "utilization": ("utilization_percentage", 100.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "memory_share": ("memory_usage_percentage", 100.0),
    "power_w": ("power_usage_watts", 1.0),
    "power_share": ("power_usage_percentage", 100.0),
    "temperature_c": ("temperature_celsius", 1.0),
    "clock_mhz": ("sm_clock_megahertz", 1.0),
}
ENERGY = "system/energy_joules"


def telemetry_points(event: DeviceTelemetry) -> list[MetricPoint]:
    """Returns the metric points of a telemetry event.

    `tasks/device_monitor.py` documents the form of a telemetry event. The step of a point is its time in
    seconds since the epoch: a job's segments follow each other in time, and so do its points.
    """
    where = f"system/{event.node}/" if event.node else "system/"
    step, at_ms = int(event.wall_s), int(event.wall_s * 1000)
    return [
        MetricPoint(f"{where}{device['kind']}_{number}_{name}", device[key] * factor, step, at_ms)
        for number, device in event.devices.items()
        for key, (name, factor) in NAMES.items()
        if key in device
    ]


class Energy:
    """The energy in joules that each job has used over all its segments.

    The journal stores the energy of each segment, so segments that an earlier process ran are counted too. Pass the
    executor's events to `hear` and `end`; passing an event twice is harmless.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._running: dict[int, dict[str, float]] = {}  # by segment and node

    def hear(self, said: GangSaid) -> None:
        """Takes in an event of a gang; a telemetry event reports the energy that its devices have used so far."""
        if not isinstance(said.event, DeviceTelemetry):
            return
        used = [device["energy_j"] for device in said.event.devices.values() if "energy_j" in device]
        if used:
            self._running.setdefault(said.number, {})[said.event.node] = sum(used)

    def end(self, ended: SegmentEnded, *, at_ms: int) -> dict[str, list[MetricPoint]]:
        """Takes in the end of a segment; returns the energy that each of its jobs has used so far, as metric points.

        The energy of a segment is divided evenly among the jobs that it trains together. A job gets no point if no
        device reported any energy. at_ms: the time of the event, in milliseconds since the epoch.
        """
        jobs, number = (ended.segment.job, *ended.members), str(ended.number)
        used = self._running.pop(ended.number, None)
        records = self._journal.jobs()
        found: dict[str, list[MetricPoint]] = {}
        for job in jobs:
            by_segment = dict(records[job].details.get("energy_j", {}))
            if used is not None:
                by_segment[number] = sum(used.values()) / len(jobs)
                self._journal.write_job(job, details={"energy_j": by_segment})
            if number in by_segment:
                found[job] = [MetricPoint(ENERGY, sum(by_segment.values()), len(by_segment), at_ms)]
        return found
