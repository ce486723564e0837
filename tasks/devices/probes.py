"""Probes that sample devices through NVML and the kernel, and detect devices with permanent faults.

A value that a device or its driver does not provide is None. A query that a driver does not know is no fault of the
device.
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

# Xids after which the device itself is broken until it is reset; others (13, 31, 43, 45, ...) are faults of programs.
# NVIDIA, "GPU Debug Guidelines" and "Xid Errors": 48 double-bit ECC error, 64 row remapping failed, 74 NVLink error,
# 79 fallen off the bus, 95 uncontained memory error, 119 and 120 the GPU's system processor does not answer.
BROKEN_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120})
# The modules that are run as commands of which a rank is a part.
RANK_MODULES = frozenset(("ringmaster.techniques.processes.forkserver", "ringmaster.techniques.processes.rank"))
GONE = (psutil.NoSuchProcess, psutil.AccessDenied)  # processes that end while they are read, or forbid it
INITIAL_PIDS = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO, the only namespace in which NVML's PIDs are ours


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


class Probe(Protocol):
    """A sampler of some devices of a node."""

    def samples(self) -> Mapping[int, Sample]:
        """Samples the devices now, by their numbers."""
        ...


def probes(devices: Sequence[Device], *, nvml: Any = None, own_pid: int | None = None) -> list[Probe]:
    """Returns probes for all devices, numbered in their order. nvml: the NVML binding, `pynvml` by default."""
    numbered = list(enumerate(devices))
    gpus = [(number, device) for number, device in numbered if device.kind == "gpu"]
    slots = {number: frozenset(device.cores) for number, device in numbered if device.kind != "gpu"}
    if gpus:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()  # for the lifetime of this process: a new initialisation would lose registered events
    found: list[Probe] = [GpuProbe(number, device, nvml=nvml) for number, device in gpus]
    if slots:
        memory_bytes = min(device.memory_bytes for device in devices if device.kind != "gpu")
        found.append(CpuProbe(slots, memory_bytes=memory_bytes, own_pid=own_pid or os.getpid()))
    return found


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
        self._hear()
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

    def _hear(self) -> None:
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
        return not RANK_MODULES.isdisjoint(process.cmdline())
    return False
