"""Detection of this machine's devices: NVIDIA GPUs, or slots of CPU cores on a machine without GPUs."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from ringmaster.codec import SINCE_LATER
from ringmaster.techniques.profiles import UNTRUSTED

T = TypeVar("T")
DEFAULT_GPU_W, DEFAULT_CPU_W = 200.0, 12.0
"""Watts of a GPU and of a CPU of which nothing is known, as Lannelongue et al., "Green Algorithms" (Advanced Science,
2021) have them for any model."""
Devices = str | Mapping[str, int | str]
"""The devices that a batch requests: "auto", {"cpu": n}, {"gpu": n} or {"gpu": "all"}."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one slot of CPU cores.

    index: the GPU's index in NVML's order (the order of the PCI bus), or the slot's index.
    name: the model of the GPU or of the CPU.
    memory_bytes: the GPU's memory, or the slot's even share of the memory that this process may use.
    cores: the logical CPUs that the worker on this device is pinned to. GPUs share the machine's CPUs evenly.
    uuid: the unambiguous name of a GPU in CUDA_VISIBLE_DEVICES; empty for a CPU slot.
    is_trusted: whether its node is. A device of an untrusted node is of another kind, so that jobs may do without it.
    power_limit_w: the most watts that a GPU takes; None where NVML does not say.
    """

    kind: Literal["cpu", "gpu"]
    index: int
    name: str
    memory_bytes: int
    cores: tuple[int, ...]
    uuid: str = ""
    is_trusted: bool = field(default=True, metadata=SINCE_LATER)
    power_limit_w: float | None = field(default=None, metadata=SINCE_LATER)

    @property
    def power_w(self) -> float:
        """The most watts that it takes, as NVML says; else those of any GPU, or of any CPU times the CPUs of a slot."""
        usual_w = DEFAULT_GPU_W if self.kind == "gpu" else DEFAULT_CPU_W * max(1, len(self.cores))
        return self.power_limit_w or usual_w

    def units(self) -> tuple[str, ...]:
        """Returns what it consists of, the GPU or the cores, by names that hold in all processes of its machine."""
        return (f"gpu {self.uuid or self.index}",) if self.kind == "gpu" else tuple(f"core {n}" for n in self.cores)

    def device_kind(self) -> str:
        """Returns the device properties that decide its speed, as text for the fingerprints of profiles."""
        cores = f", {len(self.cores)} core{'s' if len(self.cores) != 1 else ''}" if self.kind == "cpu" else ""
        return f"{self.name}{cores}{'' if self.is_trusted else UNTRUSTED}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines that a batch runs on."""

    nodes: tuple[Node, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, in the order of the nodes."""
        return tuple(device for node in self.nodes for device in node.devices)

    def untrusted(self) -> "Cluster":
        """Returns the same devices as those of untrusted nodes."""
        nodes = (replace(n, devices=tuple(replace(d, is_trusted=False) for d in n.devices)) for n in self.nodes)
        return Cluster(nodes=tuple(nodes))

    def device(self, node: str, number: int) -> Device:
        """Returns the device with that number on that node."""
        return next(each for each in self.nodes if each.name == node).devices[number]

    def lease_names(self) -> dict[tuple[str, int], str]:
        """Returns each device's name in leases, by the name of its node and its number on the node."""
        return {
            (node.name, number): f"{node.name}:{device.kind}:{number}"
            for node in self.nodes
            for number, device in enumerate(node.devices)
        }

    def device_kind(self) -> str:
        """Returns the kinds of devices in this cluster, usually one, as text for the fingerprints of profiles."""
        return kind_of(self.devices)


def kind_of(devices: Iterable[Device]) -> str:
    """Returns the kinds of devices, usually one, as text for the fingerprints of profiles."""
    return " + ".join(sorted({device.device_kind() for device in devices}))


def detect(devices: Devices = "auto", *, nvml: Any = None, root: Path = Path("/")) -> Cluster:
    """Returns the requested `devices` of this machine; "auto" means its GPUs, or a slot per core if it has no GPU.

    nvml: the NVML binding, `pynvml` by default.
    root: the root folder of the files that describe the CPUs.

    Raises ValueError if the machine does not have the requested devices.
    """
    if devices == "auto":
        result = gpus(nvml=nvml) or cpu_slots(root=root)
    else:
        if not isinstance(devices, Mapping) or len(devices) != 1:
            raise ValueError(
                f"devices {devices!r} are unknown. To fix: write auto, {{cpu: 2}}, {{gpu: 2}} or {{gpu: all}}"
            )
        ((kind, number),) = devices.items()
        if kind == "gpu":
            result = _first_gpus(number, nvml=nvml)
        elif kind == "cpu" and isinstance(number, int):
            result = cpu_slots(number, root=root)
        else:
            raise ValueError(f"devices {dict(devices)!r} are unknown. To fix: write {{cpu: 2}} or {{gpu: all}}")
    return Cluster(nodes=(Node(name=platform.node() or "localhost", devices=result),))


def _first_gpus(number: int | str, *, nvml: Any) -> tuple[Device, ...]:
    result = gpus(nvml=nvml)
    if not result:
        raise ValueError(
            "this machine has no GPU that NVIDIA's driver shows. To fix: write `devices: auto` or {cpu: 2}"
        )
    if number == "all":
        return result
    if not isinstance(number, int) or number < 1 or number > len(result):
        raise ValueError(f"{number} GPUs are requested of {len(result)}. To fix: request 1 to {len(result)}, or all")
    return result[:number]


def gpus(*, nvml: Any = None) -> tuple[Device, ...]:
    """Returns the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process; none on a machine without a driver."""
    if nvml is None:
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        result = [_gpu(index, nvml=nvml) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",")]
        result = [gpu for gpu in result if any(_is_named(gpu, name) for name in wanted)]
    cpus = sorted(os.sched_getaffinity(0))
    shares = _even(cpus, len(result)) if 0 < len(result) <= len(cpus) else [tuple(cpus)] * len(result)
    return tuple(replace(gpu, cores=share) for gpu, share in zip(result, shares, strict=True))


def cpu_slots(number: int | None = None, *, root: Path = Path("/")) -> tuple[Device, ...]:
    """Returns `number` slots with equally many CPU cores each, by default one slot per physical core.

    The threads of one core share a slot, unless that gives fewer slots than requested (or fewer than two). Cores that
    do not divide evenly stay unused, so that one profile holds for all slots.
    """
    cpus = sorted(os.sched_getaffinity(0))
    cores = _physical_cores(cpus, root=root)
    if len(cores) < (number or 2):
        cores = [(cpu,) for cpu in cpus]
    cores = cores[: _cpu_quota(root)]
    if number is not None and not 1 <= number <= len(cores):
        raise ValueError(
            f"{number} CPU slots are requested of {len(cores)} cores that this process may use. "
            f"To fix: request 1 to {len(cores)}"
        )
    shares = _even(cores, number or len(cores))
    share_bytes = memory_bytes(root) // len(shares)
    name = _cpu_name(root)
    return tuple(
        Device(
            kind="cpu",
            index=index,
            name=name,
            memory_bytes=share_bytes,
            cores=tuple(sorted(cpu for core in share for cpu in core)),
        )
        for index, share in enumerate(shares)
    )


def _gpu(index: int, *, nvml: Any) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Device(
        kind="gpu",
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        cores=(),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        power_limit_w=_power_limit_w(handle, nvml=nvml),
    )


def _power_limit_w(handle: Any, *, nvml: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000.0
    except nvml.NVMLError:  # not every GPU has one
        return None


def _is_named(gpu: Device, name: str) -> bool:
    """Returns whether an entry of CUDA_VISIBLE_DEVICES means `gpu`: by its index, or by the start of its UUID."""
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def _even(items: Sequence[T], number: int) -> list[tuple[T, ...]]:
    """Splits the first items into `number` runs of equal length."""
    length = len(items) // number
    return [tuple(items[i * length : (i + 1) * length]) for i in range(number)]


def _physical_cores(cpus: Sequence[int], *, root: Path) -> list[tuple[int, ...]]:
    """Groups the logical CPUs by physical core, as far as the kernel reports the cores."""
    cores: dict[object, list[int]] = {}
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.setdefault(_text(siblings) or cpu, []).append(cpu)
    return [tuple(core) for core in cores.values()]


def memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process may use: the machine's, or less if its control groups limit it."""
    limits = [
        _text(group / file)
        for group in _control_groups("memory", root=root)
        for file in ("memory.max", "memory.limit_in_bytes")
    ]
    machine_bytes: int = psutil.virtual_memory().total
    return min([machine_bytes, *(int(limit) for limit in limits if limit.isdigit())])


def _cpu_quota(root: Path) -> int | None:
    """Returns the number of CPUs whose time the control groups allow, at least one; None if they set no limit."""
    quotas = []
    for group in _control_groups("cpu", root=root):
        limit = _text(group / "cpu.max") or " ".join(
            _text(group / file) for file in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        quota, _, period = limit.partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(max(1, int(quota) // int(period)))
    return min(quotas, default=None)


def _control_groups(controller: str, *, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's control group and of its ancestors, in versions 1 and 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        yield group
        yield from (above for above in group.parents if above.is_relative_to(top))


def _cpu_name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _text(path: Path) -> str:
    """Returns the text of a small file, or an empty text if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
