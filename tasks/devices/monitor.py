"""Device monitor of a node: samples the devices while segments run on them, and reports unusable devices.

    telemetry = Telemetry(node.name, node.devices)
    telemetry.start()                                   # starts a thread that samples the devices until `close`
    telemetry.begin(12, (0, 1))                         # segment 12 has devices 0 and 1 of this node
    for segment, event in telemetry.due_events().items(): ... # the events to report, one per segment each EVENT_EVERY_S
    event = telemetry.end(12)                            # the last event, to be reported before the outcome
    telemetry.health()                                  # for `Nodes.beat`: {"1": "has fallen off the bus"}

A telemetry event is an event of the segment's gang, as JSON:

    {"event": "telemetry", "wall_s": 1767225600.0, "node": "", "devices": {"0": {"kind": "gpu", "utilization": 0.93,
     "memory_bytes": 41e9, "memory_share": 0.48, "power_w": 612.0, "power_share": 0.87, "temperature_c": 61.0,
     "clock_mhz": 1755.0, "energy_j": 18302.1}}}

Devices have their numbers on the node. Values that a device does not provide are left out. All values are means since
the last event, except `energy_j`: the joules since the segment began on this node, so that a lost event loses no
energy. CPU slots have no power values. `node` is the node's name for gangs over several nodes, and empty otherwise.
`tasks/recording/system_metrics.py` converts events into metric points.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.devices.probes import Probe, Sample, is_ours, pids_are_known, probes
from ringmaster.techniques.processes.events import DeviceTelemetry

logger = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0
EVENT_EVERY_S = 10.0
STRANGER_SAMPLES = 5  # consecutive samples with a foreign process before its device counts as unusable
SILENT_AFTER_S = 30.0  # the time without a sample after which a hanging driver's GPUs count as unusable

MEANS = ("utilization", "memory_bytes", "memory_share", "power_w", "power_share", "temperature_c", "clock_mhz")


@dataclass
class _Meter:
    """The use of some devices by a segment, since it began and since its last event."""

    numbers: tuple[int, ...]
    node: str
    said_s: float
    energy_j: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)


class Telemetry:
    """The monitor of the devices of the node `name`, by number. Thread-safe; only its own thread waits for drivers.

    own_pid: the process whose descendants are not foreign.
    knows_pids: whether the driver's process ids are those that this process sees. If not, foreign processes are not
        detected.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[Device],
        *,
        nvml: Any = None,
        own_pid: int | None = None,
        knows_pids: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._devices, self._clock, self._wall = name, tuple(devices), clock, wall
        self._own_pid = own_pid or os.getpid()
        self._knows_pids = pids_are_known() if knows_pids is None else knows_pids
        self._probes: Sequence[Probe] = probes(devices, nvml=nvml, own_pid=self._own_pid)
        self._lock = threading.Lock()
        self._meters: dict[int, _Meter] = {}
        self._last: dict[int, tuple[float, Sample]] = {}
        self._strange: dict[int, int] = {}
        self._reasons: dict[str, str] = {}
        self._sampled_s = clock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to sample the devices periodically."""
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops sampling, without waiting for a driver that hangs."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * SAMPLE_EVERY_S)

    def begin(self, segment: int, numbers: Sequence[int], *, is_part: bool = False) -> None:
        """Starts to measure a segment on those devices. is_part: whether other nodes have more of its gang."""
        meter = _Meter(tuple(numbers), self._name if is_part else "", self._clock())
        with self._lock:
            self._meters[segment] = meter

    def due_events(self) -> dict[int, DeviceTelemetry]:
        """Returns the telemetry events of the segments whose last event is EVENT_EVERY_S old, by segment."""
        with self._lock:
            due = [number for number, meter in self._meters.items() if self._clock() - meter.said_s >= EVENT_EVERY_S]
            return {number: self._word(self._meters[number]) for number in due}

    def end(self, segment: int) -> DeviceTelemetry | None:
        """Stops measuring a segment; returns its last telemetry event, or None if it was not measured."""
        with self._lock:
            meter = self._meters.pop(segment, None)
            return None if meter is None else self._word(meter)

    def health(self) -> dict[str, str]:
        """Returns, by device number (as text), why a device must not be used now; recovered devices are not listed."""
        with self._lock:
            silent_s = self._clock() - self._sampled_s
            if self._thread is not None and silent_s > SILENT_AFTER_S:
                said = f"the driver has not answered for {silent_s:.0f} s"
                return {str(number): said for number, device in enumerate(self._devices) if device.kind == "gpu"}
            return dict(self._reasons)

    def sample(self) -> None:
        """Samples every device once."""
        samples = {number: sample for probe in self._probes for number, sample in probe.samples().items()}
        strangers = {number: self._stranger(number, sample) for number, sample in samples.items()}
        with self._lock:
            now_s = self._sampled_s = self._clock()
            for number, sample in samples.items():
                for meter in self._meters.values():
                    if number in meter.numbers:
                        self._measure(meter, number, sample, now_s)
                self._last[number] = (now_s, sample)
            self._judge(samples, strangers)

    def _work(self) -> None:
        while not self._closing.wait(SAMPLE_EVERY_S):
            self.sample()

    def _measure(self, meter: _Meter, number: int, sample: Sample, now_s: float) -> None:
        meter.samples.setdefault(number, []).append(sample)
        before_s, before = self._last.get(number, (now_s, sample))
        if sample.energy_j is not None and before.energy_j is not None:
            used_j = max(0.0, sample.energy_j - before.energy_j)  # a reloaded driver counts from 0
        elif sample.power_w is not None and before.power_w is not None:
            used_j = (now_s - before_s) * (sample.power_w + before.power_w) / 2
        else:
            return
        meter.energy_j[number] = meter.energy_j.get(number, 0.0) + used_j

    def _word(self, meter: _Meter) -> DeviceTelemetry:
        devices = {}
        for number in meter.numbers:
            samples = meter.samples.get(number, [])
            told = {key: [v for s in samples if (v := getattr(s, key)) is not None] for key in MEANS}
            means: dict[str, Any] = {key: fmean(values) for key, values in told.items() if values}
            if number in meter.energy_j:
                means["energy_j"] = meter.energy_j[number]
            devices[str(number)] = {"kind": self._devices[number].kind, **means}
        meter.samples, meter.said_s = {}, self._clock()
        return DeviceTelemetry(wall_s=self._wall(), node=meter.node, devices=devices)

    def _stranger(self, number: int, sample: Sample) -> int | None:
        """Returns the id of a foreign process on a GPU, None if there is none."""
        if self._devices[number].kind != "gpu" or not self._knows_pids:
            return None
        return next((pid for pid in sample.pids if not is_ours(pid, own_pid=self._own_pid)), None)

    def _judge(self, samples: Mapping[int, Sample], strangers: Mapping[int, int | None]) -> None:
        reasons = {}
        for number, sample in samples.items():
            pid = strangers[number]
            self._strange[number] = 0 if pid is None else self._strange.get(number, 0) + 1
            if sample.fault:
                reasons[str(number)] = sample.fault
            elif self._strange[number] >= STRANGER_SAMPLES:
                reasons[str(number)] = f"in use by process {pid}, which is none of ours"
        for number_, reason in reasons.items():
            if self._reasons.get(number_) != reason:
                logger.warning("device %s of %s %s", number_, self._name, reason)
        self._reasons = reasons
