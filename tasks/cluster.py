"""The devices of this machine: its NVIDIA GPUs, or slots of CPU cores where it has none."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

T = TypeVar("T")
Devices = str | Mapping[str, int | str]
"""What a batch asks for: "auto", {"cpu": n}, {"gpu": n} or {"gpu": "all"}."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one slot of CPU cores.

    index: of the GPU in NVML's order (that of the PCI bus), or of the slot.
    name: the model of the GPU or of the CPU.
    memory_bytes: of the GPU, or the slot's even share of what this process may use.
    cores: the logical CPUs that the worker on this device is pinned to; GPUs share the machine's evenly.
    uuid: by which CUDA_VISIBLE_DEVICES names a GPU beyond doubt; empty for a CPU slot.
    """

    kind: Literal["cpu", "gpu"]
    index: int
    name: str
    memory_bytes: int
    cores: tuple[int, ...]
    uuid: str = ""

    def device_kind(self) -> str:
        """What decides a device's speed, as a text for the fingerprints of profiles."""
        if self.kind == "gpu":
            return self.name
        return f"{self.name}, {len(self.cores)} core{'s' if len(self.cores) != 1 else ''}"


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
        """All devices, node by node."""
        return tuple(device for node in self.nodes for device in node.devices)

    def device(self, node: str, number: int) -> Device:
        """The device of that number on that node."""
        return next(each for each in self.nodes if each.name == node).devices[number]

    def lease_names(self) -> dict[tuple[str, int], str]:
        """What leases call each device, by the name of its node and its number there."""
        return {
            (node.name, number): f"{node.name}:{device.kind}:{number}"
            for node in self.nodes
            for number, device in enumerate(node.devices)
        }

    def device_kind(self) -> str:
        """The kinds of devices in this cluster, usually one, as a text for the fingerprints of profiles."""
        return " + ".join(sorted({device.device_kind() for device in self.devices}))


def detect(devices: Devices = "auto", *, nvml: Any = None, root: Path = Path("/")) -> Cluster:
    """The asked `devices` of this machine; "auto" takes its GPUs, or where it has none a slot for each core.

    nvml: what speaks for the NVIDIA driver, `pynvml` unless given. root: of the files that describe the CPUs.
    Raises ValueError where the machine does not have what is asked.
    """
    if devices == "auto":
        found = gpus(nvml=nvml) or cpu_slots(root=root)
    else:
        if not isinstance(devices, Mapping) or len(devices) != 1:
            raise ValueError(
                f"devices {devices!r} are unknown. To fix: write auto, {{cpu: 2}}, {{gpu: 2}} or {{gpu: all}}"
            )
        ((kind, number),) = devices.items()
        if kind == "gpu":
            found = _first_gpus(number, nvml=nvml)
        elif kind == "cpu" and isinstance(number, int):
            found = cpu_slots(number, root=root)
        else:
            raise ValueError(f"devices {dict(devices)!r} are unknown. To fix: write {{cpu: 2}} or {{gpu: all}}")
    return Cluster(nodes=(Node(name=platform.node() or "localhost", devices=found),))


def _first_gpus(number: int | str, *, nvml: Any) -> tuple[Device, ...]:
    found = gpus(nvml=nvml)
    if not found:
        raise ValueError(
            "this machine has no GPU that NVIDIA's driver shows. To fix: write `devices: auto` or {cpu: 2}"
        )
    if number == "all":
        return found
    if not isinstance(number, int) or number < 1 or number > len(found):
        raise ValueError(f"{number} GPUs are asked of {len(found)}. To fix: ask for 1 to {len(found)}, or all")
    return found[:number]


def gpus(*, nvml: Any = None) -> tuple[Device, ...]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process; none where there is no driver."""
    if nvml is None:
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = [_gpu(index, nvml=nvml) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",")]
        found = [gpu for gpu in found if any(_is_named(gpu, name) for name in wanted)]
    cpus = sorted(os.sched_getaffinity(0))
    shares = _even(cpus, len(found)) if 0 < len(found) <= len(cpus) else [tuple(cpus)] * len(found)
    return tuple(replace(gpu, cores=share) for gpu, share in zip(found, shares, strict=True))


def cpu_slots(number: int | None = None, *, root: Path = Path("/")) -> tuple[Device, ...]:
    """`number` slots of equally many CPU cores each, by default one slot for each physical core.

    The threads of one core share a slot, unless there would be fewer slots than asked (or than two). Cores
    that do not divide evenly stay unused, so that one profile is true of all slots.
    """
    cpus = sorted(os.sched_getaffinity(0))
    cores = _physical_cores(cpus, root=root)
    if len(cores) < (number or 2):
        cores = [(cpu,) for cpu in cpus]
    cores = cores[: _cpu_quota(root)]
    if number is not None and not 1 <= number <= len(cores):
        raise ValueError(
            f"{number} CPU slots are asked of {len(cores)} cores that this process may use. "
            f"To fix: ask for 1 to {len(cores)}"
        )
    shares = _even(cores, number or len(cores))
    memory_bytes = _memory_bytes(root) // len(shares)
    name = _cpu_name(root)
    return tuple(
        Device(
            kind="cpu",
            index=index,
            name=name,
            memory_bytes=memory_bytes,
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
    )


def _is_named(gpu: Device, name: str) -> bool:
    """Whether a part of CUDA_VISIBLE_DEVICES means `gpu`: by its index, or by the start of its UUID."""
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def _even(items: Sequence[T], number: int) -> list[tuple[T, ...]]:
    """The first items in `number` runs of equal length."""
    length = len(items) // number
    return [tuple(items[i * length : (i + 1) * length]) for i in range(number)]


def _physical_cores(cpus: Sequence[int], *, root: Path) -> list[tuple[int, ...]]:
    """The logical CPUs, those of one physical core together where the kernel tells."""
    cores: dict[object, list[int]] = {}
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.setdefault(_text(siblings) or cpu, []).append(cpu)
    return [tuple(core) for core in cores.values()]


def _memory_bytes(root: Path) -> int:
    """Bytes of memory that this process may use: the machine's, or less where its control groups say so."""
    limits = [
        _text(group / file)
        for group in _control_groups("memory", root=root)
        for file in ("memory.max", "memory.limit_in_bytes")
    ]
    machine_bytes: int = psutil.virtual_memory().total
    return min([machine_bytes, *(int(limit) for limit in limits if limit.isdigit())])


def _cpu_quota(root: Path) -> int | None:
    """How many CPUs' time the control groups allow, at least one; None where they do not say."""
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
    """The folders of this process's control group and of those above it, in versions 1 and 2."""
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
    """What a small file says, or nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
