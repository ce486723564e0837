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
`tasks/recording/rows.py` converts events into metric points.

Probes sample devices through NVML and the kernel, and detect devices with permanent faults. A value that a device or
its driver does not provide is None. A query that a driver does not know is not a fault of the device.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import psutil

from ringmaster.tasks.cluster import Device
from ringmaster.techniques.processes.gang_events import DeviceTelemetry

logger = logging.getLogger(__name__)

# Xids after which the device itself is broken until it is reset; others (13, 31, 43, 45, ...) are faults of programs.
# NVIDIA, "GPU Debug Guidelines" and "Xid Errors": 48 double-bit ECC error, 64 row remapping failed, 74 NVLink error,
# 79 fallen off the bus, 95 uncontained memory error, 119 and 120 the GPU's system processor does not answer.
BROKEN_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120})
FORK_SERVER = "ringmaster.techniques.processes.forkserver"  # the module of which ranks are forks
GONE = (psutil.NoSuchProcess, psutil.AccessDenied)  # processes that end while they are read, or forbid it
INITIAL_PIDS = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO, the only namespace in which NVML's PIDs are ours

SAMPLE_EVERY_S = 1.0
EVENT_EVERY_S = 10.0
STRANGER_SAMPLES = 5  # consecutive samples with a foreign process before its device counts as unusable
SILENT_AFTER_S = 30.0  # the time without a sample after which a hanging driver's GPUs count as unusable
MEANS = ("utilization", "memory_bytes", "memory_share", "power_w", "power_share", "temperature_c", "clock_mhz")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The state of a device at a moment.

    utilization: the share of the time in which it worked.
    energy_j: the value of a counter that only grows; None if there is no counter.
    pids: the processes that compute on it; empty if they cannot be determined.
    fault: why it must not be used; "" for none.
    """

    utilization: float | None = None
    memory_bytes: int | None = None
    memory_share: float | None = None
    power_w: float | None = None
    power_share: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    pids: tuple[int, ...] = ()
    fault: str = ""


class DeviceSampler(Protocol):
    """A sampler of some devices of a node."""

    def samples(self) -> Mapping[int, Sample]:
        """Samples the devices now, by their numbers."""
        ...


def probes(devices: Sequence[Device], *, nvml: Any = None, own_pid: int | None = None) -> list[DeviceSampler]:
    """Returns probes for all devices, numbered in their order. nvml: the NVML binding, `pynvml` by default."""
    numbered = list(enumerate(devices))
    gpus = [(number, device) for number, device in numbered if device.kind == "gpu"]
    slots = {number: frozenset(device.cores) for number, device in numbered if device.kind != "gpu"}
    if gpus:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()  # for the lifetime of this process: a new initialisation would lose registered events
    result: list[DeviceSampler] = [GpuProbe(number, device, nvml=nvml) for number, device in gpus]
    if slots:
        memory_bytes = min(device.memory_bytes for device in devices if device.kind != "gpu")
        result.append(CpuProbe(slots, memory_bytes=memory_bytes, own_pid=own_pid or os.getpid()))
    return result


@dataclass
class GpuProbe:
    """An NVIDIA GPU. Error counts are compared with those at the first sample: older errors were known and accepted.

    A fault stays until the GPU is reset, which sets the counts to 0, or until another probe is made.
    """

    number: int
    device: Device
    nvml: Any
    _handle: Any = None
    _events: Any = None
    _first_errors: int | None = None
    _xids: set[int] = field(default_factory=set)

    def samples(self) -> Mapping[int, Sample]:
        """Samples the GPU now; reports a fault if it has fallen off the bus."""
        return {self.number: self._checked()}

    def _checked(self) -> Sample:
        try:
            if self._handle is None:
                self._handle = self.nvml.nvmlDeviceGetHandleByUUID(self.device.uuid)
                self._listen()
            return self._sample()
        except self.nvml.NVMLError as error:
            lost = (self.nvml.NVML_ERROR_GPU_IS_LOST, self.nvml.NVML_ERROR_NOT_FOUND)
            self._handle = None  # the next sample requests a new handle, as the GPU may come back
            return Sample(fault="has fallen off the bus" if error.value in lost else f"NVML says: {error}")

    def _sample(self) -> Sample:
        nvml, handle = self.nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)  # every GPU supports this query, so an error is a fault
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage)
        limit_mw = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        energy_mj = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return Sample(
            utilization=None if rates is None else rates.gpu / 100,
            memory_bytes=memory.used,
            memory_share=memory.used / memory.total,
            power_w=None if power_mw is None else power_mw / 1000,
            power_share=None if power_mw is None or not limit_mw else power_mw / limit_mw,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            pids=tuple(process.pid for process in self._ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
            fault=self._fault(),
        )

    def _ask(self, question: Callable[..., Any], *details: Any) -> Any:
        """Returns the result of a query, None if this GPU does not support it. Raises NVMLError if the GPU is lost."""
        try:
            return question(self._handle, *details)
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    def _fault(self) -> str:
        nvml = self.nvml
        errors = self._ask(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors is not None:
            self._first_errors = min(errors, errors if self._first_errors is None else self._first_errors)
            if errors > self._first_errors:
                return f"{errors - self._first_errors} uncorrected ECC errors. To fix: reset the GPU"
        remapped = self._ask(nvml.nvmlDeviceGetRemappedRows)
        if remapped is not None and remapped[3]:
            return "a memory row could not be remapped. To fix: have the GPU replaced"
        pages = self._ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)
        if (remapped is not None and remapped[2]) or pages == nvml.NVML_FEATURE_ENABLED:
            return "a memory page is to be retired. To fix: reset the GPU"
        self._take_xids()
        if self._xids:
            return f"Xid {', '.join(map(str, sorted(self._xids)))}. To fix: see the kernel's log, and reset the GPU"
        return ""

    def _listen(self) -> None:
        """Registers for Xid events, if the driver supports them."""
        nvml = self.nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:
            self._events = None

    def _take_xids(self) -> None:
        while self._events is not None:
            try:
                xid = int(self.nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except self.nvml.NVMLError:  # usually a time-out: there are no more events
                return
            if xid in BROKEN_XIDS:
                self._xids.add(xid)


@dataclass
class CpuProbe:
    """Slots of CPU cores: the load of this process and its descendants, by the cores that each is pinned to.

    slots: the cores of each slot, by its number.
    memory_bytes: the memory of each slot.
    """

    slots: Mapping[int, frozenset[int]]
    memory_bytes: int
    own_pid: int
    clock: Callable[[], float] = time.monotonic
    _before: Mapping[tuple[int, float], float] = field(default_factory=dict)
    _before_s: float | None = None

    def samples(self) -> Mapping[int, Sample]:
        """Samples the slots now; their utilization is known from the second sample on."""
        used_s: dict[tuple[int, float], float] = {}
        worked_s, held_bytes = dict.fromkeys(self.slots, 0.0), dict.fromkeys(self.slots, 0.0)
        for process in family(self.own_pid):
            with suppress(*GONE), process.oneshot():
                pinned = set(process.cpu_affinity())
                times, key = process.cpu_times(), (process.pid, process.create_time())
                memory_bytes = process.memory_info().rss
                used_s[key] = times.user + times.system
                for number, cores in self.slots.items():
                    share = len(pinned & cores) / len(pinned)
                    worked_s[number] += share * (used_s[key] - self._before.get(key, 0.0))
                    held_bytes[number] += share * memory_bytes
        now_s = self.clock()
        passed_s = 0.0 if self._before_s is None else now_s - self._before_s
        self._before, self._before_s = used_s, now_s
        return {
            number: Sample(
                utilization=min(1.0, max(0.0, worked_s[number] / (passed_s * len(cores)))) if passed_s else None,
                memory_bytes=int(held_bytes[number]),
                memory_share=held_bytes[number] / self.memory_bytes,
            )
            for number, cores in self.slots.items()
        }


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all its descendants."""
    with suppress(*GONE):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def is_ours(pid: int, *, own_pid: int) -> bool:
    """Returns whether a process is ours: this one, a descendant, a rank of any Ringmaster gang, or unidentifiable.

    A gang's rank descends from a fork server, possibly of another process (trials of a batch), or is started by the
    command of a rank.
    """
    with suppress(*GONE):
        process = psutil.Process(pid)
        line = [process, *process.parents()]
        return any(each.pid == own_pid or _runs_ranks(each) for each in line)
    return True


def pids_are_known(root: Path = Path("/")) -> bool:
    """Returns whether NVML's process ids are those that this process sees; not so in a container with its own ids."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == INITIAL_PIDS
    except OSError:
        return False


def _runs_ranks(process: psutil.Process) -> bool:
    with suppress(*GONE):
        return FORK_SERVER in process.cmdline()
    return False


@dataclass
class _Meter:
    """The use of some devices by a segment, since it began and since its last event."""

    numbers: tuple[int, ...]
    node: str
    reported_s: float
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
        self._probes: Sequence[DeviceSampler] = probes(devices, nvml=nvml, own_pid=self._own_pid)
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
            due = [
                number for number, meter in self._meters.items() if self._clock() - meter.reported_s >= EVENT_EVERY_S
            ]
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
                text = f"the driver has not answered for {silent_s:.0f} s"
                return {str(number): text for number, device in enumerate(self._devices) if device.kind == "gpu"}
            return dict(self._reasons)

    def sample(self) -> None:
        """Samples every device once."""
        samples = {number: sample for probe in self._probes for number, sample in probe.samples().items()}
        foreign_processes = {number: self._foreign_process(number, sample) for number, sample in samples.items()}
        with self._lock:
            now_s = self._sampled_s = self._clock()
            for number, sample in samples.items():
                for meter in self._meters.values():
                    if number in meter.numbers:
                        self._measure(meter, number, sample, now_s)
                self._last[number] = (now_s, sample)
            self._judge(samples, foreign_processes)

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
            reported = {key: [v for s in samples if (v := getattr(s, key)) is not None] for key in MEANS}
            means: dict[str, Any] = {key: fmean(values) for key, values in reported.items() if values}
            if number in meter.energy_j:
                means["energy_j"] = meter.energy_j[number]
            devices[str(number)] = {"kind": self._devices[number].kind, **means}
        meter.samples, meter.reported_s = {}, self._clock()
        return DeviceTelemetry(wall_s=self._wall(), node=meter.node, devices=devices)

    def _foreign_process(self, number: int, sample: Sample) -> int | None:
        """Returns the id of a foreign process on a GPU, None if there is none."""
        if self._devices[number].kind != "gpu" or not self._knows_pids:
            return None
        return next((pid for pid in sample.pids if not is_ours(pid, own_pid=self._own_pid)), None)

    def _judge(self, samples: Mapping[int, Sample], foreign_processes: Mapping[int, int | None]) -> None:
        reasons = {}
        for number, sample in samples.items():
            pid = foreign_processes[number]
            self._strange[number] = 0 if pid is None else self._strange.get(number, 0) + 1
            if sample.fault:
                reasons[str(number)] = sample.fault
            elif self._strange[number] >= STRANGER_SAMPLES:
                reasons[str(number)] = f"in use by process {pid}, which does not belong to Ringmaster"
        for number_, reason in reasons.items():
            if self._reasons.get(number_) != reason:
                logger.warning("device %s of %s %s", number_, self._name, reason)
        self._reasons = reasons
