"""Points for MLflow of what devices did: named like MLflow's own system metrics, so that its UI shows them as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.execution.events import GangSaid, SegmentEnded
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.pool.telemetry import TELEMETRY

# By what a telemetry word says: MLflow's name, and by what to multiply.
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


def telemetry_points(event: Mapping[str, Any]) -> list[MetricPoint]:
    """The points of an event that is a telemetry word (`tasks/pool/telemetry.py` has its form), none of any other.

    Steps are seconds since the epoch: a job's segments follow each other, and so do its points.
    """
    if event["event"] != TELEMETRY:
        return []
    where = f"system/{event['node']}/" if event["node"] else "system/"
    wall_s = float(event["wall_s"])
    return [
        MetricPoint(f"{where}{device['kind']}_{number}_{name}", device[key] * factor, int(wall_s), int(wall_s * 1000))
        for number, device in event["devices"].items()
        for key, (name, factor) in NAMES.items()
        if key in device
    ]


class Energy:
    """Joules of each job over all its segments, those of another process before this one too: they are in the journal.

    Tell it what the executor tells; `hear` and `end` may be told the same twice.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._running: dict[int, dict[str, float]] = {}  # by segment and node

    def hear(self, said: GangSaid) -> None:
        """A gang said something, perhaps what its devices have taken so far."""
        if said.event["event"] != TELEMETRY:
            return
        used = [device["energy_j"] for device in said.event["devices"].values() if "energy_j" in device]
        if used:
            self._running.setdefault(said.number, {})[said.event["node"]] = sum(used)

    def end(self, ended: SegmentEnded, *, at_ms: int) -> dict[str, list[MetricPoint]]:
        """A segment has ended: what each of its jobs has taken since it began, nothing where no device could tell.

        Jobs that are trained together share alike. at_ms: when it was told, since the epoch.
        """
        jobs, number = (ended.segment.job, *ended.fellows), str(ended.number)
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
