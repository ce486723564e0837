"""What NVML and the kernel say of devices at a moment: one sample a device, and what is wrong with it for good.

What a device or its driver cannot tell is None; a driver that does not know a question is no fault of the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import psutil

from ringmaster.tasks.cluster import Device

# Xids that say that the device itself is broken until it is reset; others (13, 31, 43, 45, ...) are programs' own
# faults. NVIDIA, "GPU Debug Guidelines" and "Xid Errors": 48 double-bit ECC error, 64 row remapping failed, 74 NVLink
# error, 79 fallen off the bus, 95 uncontained memory error, 119 and 120 the GPU's system processor does not answer.
BROKEN_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120})
GONE = (psutil.NoSuchProcess, psutil.AccessDenied)  # processes end while one looks, and some are not ours to look at
INITIAL_PIDS = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO: NVML's process ids mean what ours do only in there


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A device at a moment.

    utilization: share of the time in which it worked. energy_j: of a counter that only grows, None where there is none.
    pids: processes that compute on it; empty where they cannot be told. fault: why it must not be used, "" for none.
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


class Probe(Protocol):
    """What samples some devices of a node."""

    def samples(self) -> Mapping[int, Sample]:
        """The devices now, by their numbers."""
        ...


def probes(devices: Sequence[Device], *, nvml: Any = None, own_pid: int | None = None) -> list[Probe]:
    """Probes for all devices, numbered as they stand. nvml: what speaks for the driver, `pynvml` unless given."""
    numbered = list(enumerate(devices))
    gpus = [(number, device) for number, device in numbered if device.kind == "gpu"]
    slots = {number: frozenset(device.cores) for number, device in numbered if device.kind != "gpu"}
    if gpus:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()  # for as long as this process lives: a driver that is initialised anew loses its events
    found: list[Probe] = [GpuProbe(number, device, nvml=nvml) for number, device in gpus]
    if slots:
        memory_bytes = min(device.memory_bytes for device in devices if device.kind != "gpu")
        found.append(CpuProbe(slots, memory_bytes=memory_bytes, own_pid=own_pid or os.getpid()))
    return found


@dataclass
class GpuProbe:
    """An NVIDIA GPU. Counts of errors are compared with those at the first sample: older ones were known and accepted.

    What a GPU is blamed for once stays until it is reset, which sets the counts to 0, or until another probe is made.
    """

    number: int
    device: Device
    nvml: Any
    _handle: Any = None
    _events: Any = None
    _first_errors: int | None = None
    _xids: set[int] = field(default_factory=set)

    def samples(self) -> Mapping[int, Sample]:
        """The GPU now; a fault where it has fallen off the bus."""
        return {self.number: self._checked()}

    def _checked(self) -> Sample:
        try:
            if self._handle is None:
                self._handle = self.nvml.nvmlDeviceGetHandleByUUID(self.device.uuid)
                self._listen()
            return self._sample()
        except self.nvml.NVMLError as error:
            lost = (self.nvml.NVML_ERROR_GPU_IS_LOST, self.nvml.NVML_ERROR_NOT_FOUND)
            self._handle = None  # asked for again: it may come back
            return Sample(fault="has fallen off the bus" if error.value in lost else f"NVML says: {error}")

    def _sample(self) -> Sample:
        nvml, handle = self.nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)  # every GPU can tell: what is raised here is a fault
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
        """The answer, None where this GPU has none. Raises NVMLError where it is lost."""
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
        self._hear()
        if self._xids:
            return f"Xid {', '.join(map(str, sorted(self._xids)))}. To fix: see the kernel's log, and reset the GPU"
        return ""

    def _listen(self) -> None:
        """Has the driver tell of Xids, where it can."""
        nvml = self.nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:
            self._events = None

    def _hear(self) -> None:
        while self._events is not None:
            try:
                xid = int(self.nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except self.nvml.NVMLError:  # mostly a time-out: there is nothing more
                return
            if xid in BROKEN_XIDS:
                self._xids.add(xid)


@dataclass
class CpuProbe:
    """Slots of CPU cores: what this process and its descendants do there, by the cores that they are pinned to.

    slots: the cores of each, by its number. memory_bytes: of each.
    """

    slots: Mapping[int, frozenset[int]]
    memory_bytes: int
    own_pid: int
    clock: Callable[[], float] = time.monotonic
    _before: Mapping[tuple[int, float], float] = field(default_factory=dict)
    _before_s: float | None = None

    def samples(self) -> Mapping[int, Sample]:
        """The slots now; how busy they are, is told from the second time on."""
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
    """A process and all its descendants."""
    with suppress(*GONE):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def is_ours(pid: int, *, own_pid: int) -> bool:
    """Whether a process is ours: this one or a descendant, or of a gang that another process of this kind has forked
    (trials of a batch), or one of which nothing can be told."""
    with suppress(*GONE):
        process = psutil.Process(pid)
        line = [process, *process.parents()]
        return any(each.pid == own_pid or _is_fork_server(each) for each in line)
    return True


def pids_are_known(root: Path = Path("/")) -> bool:
    """Whether NVML's process ids are those that this process sees: not so in a container with ids of its own."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == INITIAL_PIDS
    except OSError:
        return False


def _is_fork_server(process: psutil.Process) -> bool:
    with suppress(*GONE):
        return "ringmaster.techniques.engine.forkserver" in process.cmdline()
    return False
